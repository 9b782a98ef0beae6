"""Where handlers of older releases find what sends parts of an answer."""
