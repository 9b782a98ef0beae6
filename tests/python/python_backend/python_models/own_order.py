"""Returns the outputs named by the request's parameter `order`, one letter each, in that order. The response's parameter
`inputs` has the names of the inputs in the order of `request.inputs()`, and `together` the number of requests of the batch."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests):
        responses = [self.answer(request, len(requests)) for request in requests]
        if not self.decoupled:
            return responses
        for request, response in zip(requests, responses):
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def answer(self, request, together):
        """Returns the response to one request."""
        given = request.inputs()
        values = {name: np.full_like(given[0].as_numpy(), ord(name)) for name in json.loads(request.parameters())["order"]}
        tensors = [pb_utils.Tensor(name, value) for name, value in values.items()]
        names = "".join(tensor.name() for tensor in given)
        return pb_utils.InferenceResponse(tensors, parameters={"inputs": names, "together": together})
