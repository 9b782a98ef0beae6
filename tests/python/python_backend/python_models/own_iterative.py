"""Reschedules a request until it has been executed as often as its input says, and returns the number of executions, which it counts
by the sequence that the server has started for the request. A decoupled model sends a response for each execution."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.times = {}

    def execute(self, requests):
        responses = [self.step(request) for request in requests]
        return None if self.decoupled else responses

    def step(self, request):
        wanted = request.inputs()[0].as_numpy()
        sequence = request.correlation_id()
        times = self.times[sequence] = self.times.get(sequence, 0) + 1
        starts = bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        if starts != (times == 1):
            error = pb_utils.TritonError(f"START is {starts} in execution {times} of the sequence {sequence}")
            return pb_utils.InferenceResponse(error=error)
        again = times < wanted.flat[0]
        if again:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full_like(wanted, times))])
        if self.decoupled:
            flags = 0 if again else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(response, flags)
            return None
        return None if again else response
