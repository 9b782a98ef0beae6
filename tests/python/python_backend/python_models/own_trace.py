"""Returns the context of each request's trace as the parameter `context`; empty for None."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Returns the input and the context."""
        told = {"context": request.trace().get_context() or ""}
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())], parameters=told)
