"""What an envelope hands over, as texts and numbers."""


class Enveloped:
    """Answers with what it was given."""

    def initialize(self, context):
        """Nothing to load."""

    def handle(self, data, context):
        """The rows as they came; an object that holds a tensor answers with a tensor."""
        return [self.one(row) for row in data]

    def one(self, row):
        """One answer."""
        if isinstance(row, (bytes, bytearray)):
            return row.decode()
        return row
