"""Counts the requests of each sequence."""


class Counting:
    """Keeps a count by sequence."""

    def initialize(self, context):
        """No sequence yet."""
        self.counts = {}

    def handle(self, data, context):
        """The count so far, and how many sequences the batch has."""
        answers = []
        for place in range(len(data)):
            sequence = context.get_sequence_id(place)
            self.counts[sequence] = self.counts.get(sequence, 0) + 1
            context.set_response_header(place, "X-Sequence", sequence)
            answers.append(str(self.counts[sequence]))
        return answers
