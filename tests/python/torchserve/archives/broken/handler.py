"""Cannot be loaded."""

raise ImportError("this module cannot be imported")
