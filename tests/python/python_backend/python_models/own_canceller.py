"""Reads three responses of the model `endless`, cancels the call, and reads twice until the end. Parameters have the counts."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Returns the counts of the responses as parameters."""
        call = pb_utils.InferenceRequest(model_name="endless", requested_output_names=["OUT"], inputs=request.inputs())
        responses = call.exec(decoupled=True)
        first = [next(responses) for _ in range(3)]
        responses.cancel()
        rest, again = list(responses), list(responses)
        errors = [response.error().code() == pb_utils.TritonError.CANCELLED for response in rest if response.has_error()]
        told = {"good": len(first) + len(rest) - len(errors), "errors": len(errors), "again": len(again)}
        told["cancelled"] = errors == [True] and rest[-1].has_error()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())], parameters=told)
