"""The envelope `body`: passes the bodies to a handler."""

from ts.torch_handler.request_envelope.base import BaseEnvelope as _Base
from ts.torch_handler.request_envelope.base import body_of


class BodyEnvelope(_Base):
    """Passes the bodies and the results unchanged."""

    def parse_input(self, data):
        return [body_of(row) for row in data]

    def format_output(self, data):
        return data
