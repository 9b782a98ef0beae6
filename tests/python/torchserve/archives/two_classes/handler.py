"""Has two classes that could both be the handler."""


class One:
    """The first class."""

    def initialize(self, context):
        """Does nothing."""

    def handle(self, data, context):
        """Returns its name."""
        return ["one" for _ in data]


class Two:
    """The second class."""

    def initialize(self, context):
        """Does nothing."""

    def handle(self, data, context):
        """Returns its name."""
        return ["two" for _ in data]
