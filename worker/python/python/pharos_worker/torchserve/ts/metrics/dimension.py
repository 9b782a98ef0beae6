"""A label of a sample."""


class Dimension:
    """A name and a value."""

    def __init__(self, name, value):
        self.name = name
        self.value = value

    def __str__(self):
        return f"{self.name}:{self.value}"

    def to_dict(self):
        """As JSON has it."""
        return {"Name": self.name, "Value": self.value}
