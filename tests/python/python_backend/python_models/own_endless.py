"""Decoupled: sends responses until the request is cancelled."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            while not request.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
