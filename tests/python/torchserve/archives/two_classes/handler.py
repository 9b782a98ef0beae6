"""Has two classes, either of which could be the handler."""


class One:
    """The first."""

    def initialize(self, context):
        """Nothing."""

    def handle(self, data, context):
        """Its name."""
        return ["one" for _ in data]


class Two:
    """The second."""

    def initialize(self, context):
        """Nothing."""

    def handle(self, data, context):
        """Its name."""
        return ["two" for _ in data]
