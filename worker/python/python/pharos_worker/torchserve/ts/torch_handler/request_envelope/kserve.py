"""The envelope `kserve` for KServe's v1 protocol: `{"instances": [...]}` in, `{"predictions": [...]}` or
`{"explanations": [...]}` out. The handler gets the instances of all requests of a batch in one list."""

import json

from ts.torch_handler.request_envelope.base import BaseEnvelope as _Base
from ts.torch_handler.request_envelope.base import body_of, check_length, cut


class KServeEnvelope(_Base):
    """Joins the instances of a batch and splits the results."""

    def __init__(self, handle_fn):
        super().__init__(handle_fn)
        self._lengths = []

    def parse_input(self, data):
        bodies = [body_of(row) for row in data]
        bodies = [json.loads(body) if isinstance(body, (bytes, bytearray)) else body for body in bodies]
        rows = [body.get("instances") or [] for body in bodies]
        self._lengths = [len(instances) for instances in rows]
        return [instance for instances in rows for instance in instances]

    def format_output(self, data):
        name = "explanations" if self._is_explain() else "predictions"
        if len(self._lengths) == 1:
            # The number of explanations may differ from the number of instances.
            return [{name: data}]
        check_length(data, self._lengths)
        return [{name: piece} for piece in cut(data, self._lengths)]

    def _is_explain(self):
        return bool(self.context) and self.context.get_request_header(0, "explain") == "True"
