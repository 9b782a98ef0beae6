"""The envelope `body`: a handler is given the bodies themselves."""

from ts.torch_handler.request_envelope.base import BaseEnvelope as _Base
from ts.torch_handler.request_envelope.base import body_of


class BodyEnvelope(_Base):
    """Bodies in, answers out as they are."""

    def parse_input(self, data):
        return [body_of(row) for row in data]

    def format_output(self, data):
        return data
