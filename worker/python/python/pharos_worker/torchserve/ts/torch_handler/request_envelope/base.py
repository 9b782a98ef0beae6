"""The base class of envelopes: unpacks a handler's input and wraps its results."""

import abc


class BaseEnvelope(abc.ABC):
    """Wraps a handler's entry point."""

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
        """Returns the handler's items of a list of requests."""

    @abc.abstractmethod
    def format_output(self, data):
        """Returns a response for each request from the handler's results."""


def body_of(row):
    """Returns the body of a request: its part `data` or `body`."""
    data = row.get("data")
    return row.get("body") if data is None else data


def cut(items, lengths):
    """Splits a list into pieces of these lengths, until it ends."""
    pieces, at = [], 0
    for length in lengths:
        pieces.append(items[at : at + length])
        at += length
    return pieces


def check_length(items, lengths):
    """Checks that a handler returned one result for each item. Otherwise, results would be assigned to the wrong requests."""
    from ts.service import Refused

    if not isinstance(items, list):
        raise Refused(503, "Invalid model predict output")
    if len(items) != sum(lengths):
        raise Refused(503, "number of batch response mismatched")
