"""`OUT` is `IN`, or what the request's id selects."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Returns the response to one request."""
        how, array = request.request_id(), request.inputs()[0].as_numpy()
        if how == "empty":
            return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", np.zeros((1, 2, 0, 4), np.float32))])
        if how == "overwritten":
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            array[:] = 9
            return None
        out = pb_utils.Tensor("OUT", array.astype(np.float64) if how == "float64" else array)
        parameters = {"text": "x" * (65 << 20)} if how == "long" else None
        return pb_utils.InferenceResponse([out, out] if how == "twice" else [out], parameters=parameters)
