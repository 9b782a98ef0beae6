"""A dimension of a sample."""


class Dimension:
    """A dimension: its name and value."""

    def __init__(self, name, value):
        self.name = name
        self.value = value

    def __str__(self):
        return f"{self.name}:{self.value}"

    def to_dict(self):
        """Returns the dimension as a dictionary for JSON."""
        return {"Name": self.name, "Value": self.value}
