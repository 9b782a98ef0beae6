"""A language model with the inputs `image` and `audio`: it answers with the prompt and with what the files contain."""

import base64
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        seen = {"prompt": elements(request, "text_input")[0].decode()}
        seen |= {name: [base64.b64decode(file).decode() for file in elements(request, name)] for name in ("image", "audio")}
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([json.dumps(seen)], dtype=object))])


def elements(request, name):
    """Returns the elements of an optional input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else list(tensor.as_numpy().reshape(-1))
