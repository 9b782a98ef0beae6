"""The modules from which handlers of older releases import the function for partial responses."""
