"""What all envelopes do: they unpack what a handler is given, and wrap what it returns."""

import abc


class BaseEnvelope(abc.ABC):
    """Stands in front of a handler's entry point."""

    def __init__(self, handle_fn):
        self._handle_fn = handle_fn
        self.context = None

    def handle(self, data, context):
        """The entry point that the server calls."""
        self.context = context
        results = self._handle_fn(self.parse_input(data) if data else data, context)
        return self.format_output(results) if results and data else results

    @abc.abstractmethod
    def parse_input(self, data):
        """The handler's items of a list of requests."""

    @abc.abstractmethod
    def format_output(self, data):
        """An answer for each request of what the handler returned."""


def body_of(row):
    """The body of a request: its part `data` or `body`."""
    data = row.get("data")
    return row.get("body") if data is None else data


def cut(items, lengths):
    """A list in pieces of these lengths, as long as it lasts."""
    pieces, at = [], 0
    for length in lengths:
        pieces.append(items[at : at + length])
        at += length
    return pieces


def check_length(items, lengths):
    """Refuses what a handler returned if it is not one for each item: the pieces would be other requests' answers."""
    from ts.service import Refused

    if not isinstance(items, list):
        raise Refused(503, "Invalid model predict output")
    if len(items) != sum(lengths):
        raise Refused(503, "number of batch response mismatched")
