"""A decoupled model that calls decoupled models and forwards each response as soon as it arrives."""

import calls
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for call in calls.calls(request):
                for response in calls.made(call, request).exec(decoupled=True):
                    if response.has_error():
                        sender.send(pb_utils.InferenceResponse(error=response.error()))
                    elif response.output_tensors():
                        sender.send(pb_utils.InferenceResponse(response.output_tensors()))
            sender.send(flags=FINAL)
        return None
