"""The envelope `json` for TensorFlow Serving's format: `{"instances": [...]}` in, `{"predictions": [...]}` out. The handler
gets the instances of all requests of a batch in one list."""

import base64
import json

from ts.torch_handler.request_envelope.base import BaseEnvelope as _Base
from ts.torch_handler.request_envelope.base import body_of, check_length, cut


class JSONEnvelope(_Base):
    """Joins the instances of a batch and splits the results."""

    def __init__(self, handle_fn):
        super().__init__(handle_fn)
        self._lengths = []

    def parse_input(self, data):
        rows = [self._instances(row) for row in data]
        self._lengths = [len(instances) for instances in rows]
        return [instance for instances in rows for instance in instances]

    def format_output(self, data):
        check_length(data, self._lengths)
        return [json.dumps({"predictions": piece}) for piece in cut(data, self._lengths)]

    @staticmethod
    def _instances(row):
        body = body_of(row)
        body = row if body is None else body
        if isinstance(body, (bytes, bytearray)):
            body = json.loads(body)
        return [_decoded(instance) for instance in body["instances"]]


def _decoded(instance):
    """Decodes `{"b64": STRING}` to bytes, as the instance itself or as one of its entries."""
    if not isinstance(instance, dict):
        return instance
    if list(instance) == ["b64"]:
        return base64.b64decode(instance["b64"])
    return {name: _decoded(value) if _is_encoded(value) else value for name, value in instance.items()}


def _is_encoded(value):
    return isinstance(value, dict) and list(value) == ["b64"]
