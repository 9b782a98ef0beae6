"""`OUT` is `IN` with the datatype of the request's parameter `dtype`, and without the first row if `short` is given."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Returns the output of one request."""
        given = json.loads(request.parameters())
        array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().astype(given.get("dtype", "float32"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array[1:] if given.get("short") else array)])
