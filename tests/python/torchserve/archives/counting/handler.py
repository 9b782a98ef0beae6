"""Counts the requests of each sequence."""


class Counting:
    """Keeps a count for each sequence."""

    def initialize(self, context):
        """Starts without sequences."""
        self.counts = {}

    def handle(self, data, context):
        """Returns the count so far, and the number of sequences in the batch."""
        answers = []
        for place in range(len(data)):
            sequence = context.get_sequence_id(place)
            self.counts[sequence] = self.counts.get(sequence, 0) + 1
            context.set_response_header(place, "X-Sequence", sequence)
            answers.append(str(self.counts[sequence]))
        return answers
