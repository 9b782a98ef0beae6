"""Models of tests of handlers."""
