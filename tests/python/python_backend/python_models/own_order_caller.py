"""Calls the model `order` with the inputs that the request's parameter `given` names. The response's parameters `outputs` and
`inputs` have the names in the order of the called model's response and of its `request.inputs()`."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Returns the response to one request."""
        asked = json.loads(request.parameters())
        called = pb_utils.InferenceRequest(
            model_name="order",
            requested_output_names=list(asked["wanted"]),
            inputs=[pb_utils.Tensor(name, np.ones(1, np.float32)) for name in asked["given"]],
            parameters={"order": asked["order"]},
        ).exec()
        if called.has_error():
            raise pb_utils.TritonModelException(called.error().message())
        found = json.loads(called.parameters()) | {"outputs": "".join(t.name() for t in called.output_tensors())}
        out = pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())
        return pb_utils.InferenceResponse([out], parameters=found)
