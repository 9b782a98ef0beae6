"""The envelope `kservev2` for KServe's v2 protocol. The handler gets the inputs of all requests of a batch in one list, each
`{"name", "shape", "datatype", "data"}` with `data` in its shape, and returns a result for each of them."""

import json

import numpy as np

from ts.torch_handler.request_envelope.base import BaseEnvelope as _Base
from ts.torch_handler.request_envelope.base import body_of, check_length, cut

_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}


class KServev2Envelope(_Base):
    """Joins the inputs of a batch, and builds each request's outputs from the results of its inputs."""

    def __init__(self, handle_fn):
        super().__init__(handle_fn)
        self._requests = []

    def parse_input(self, data):
        self._requests = []
        items = []
        for row in data:
            body = body_of(row)
            body = json.loads(body) if isinstance(body, (bytes, bytearray)) else body
            inputs = [_shaped(tensor) for tensor in body["inputs"]]
            self._requests.append((body.get("id") or "", [tensor["name"] for tensor in inputs]))
            items += inputs
        # Handlers read these names.
        self.context.input_names = [name for _, names in self._requests for name in names]
        return items

    def format_output(self, data):
        if len(self._requests) == 1:
            # If there are fewer results than inputs, they get the names of the first inputs.
            pieces = [data]
        else:
            lengths = [len(names) for _, names in self._requests]
            check_length(data, lengths)
            pieces = cut(data, lengths)
        return [self._response(at, piece) for at, piece in enumerate(pieces)]

    def _response(self, at, results):
        given, names = self._requests[at]
        model = self.context.manifest.get("model", {})
        return {
            "id": given.strip() or self.context.get_request_id(at),
            "model_name": model.get("modelName"),
            "model_version": model.get("modelVersion"),
            "outputs": [_output(result, name) for result, name in zip(results, names)],
        }


def _shaped(tensor):
    """Returns an input with its data in its shape; a single string is returned itself."""
    data = tensor["data"]
    if tensor["datatype"] == "BYTES":
        data = data[0] if len(data) == 1 else data
    else:
        data = np.array(data).reshape(tuple(tensor["shape"])).tolist()
    return {**tensor, "data": data}


def _output(result, name):
    flat = np.array(result).flatten()
    return {
        "name": name,
        "datatype": _DATATYPES.get(str(flat.dtype), "BYTES"),
        "data": flat.tolist(),
        "shape": list(flat.shape),
    }
