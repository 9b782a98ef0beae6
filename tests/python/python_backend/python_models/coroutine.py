"""A model whose `execute` is a coroutine: it waits for several timers concurrently and checks the total time."""

import asyncio
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)

    async def execute(self, requests):
        responses = await asyncio.gather(*(self.answer(request) for request in requests))
        return None if self.decoupled else responses

    async def answer(self, request):
        """`OUT`: the seconds of `VALUE`, waited for concurrently, and whether the total time was that of the longest wait."""
        seconds = [float(s) for s in pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()]
        begin = time.monotonic()
        await asyncio.gather(*(asyncio.sleep(s) for s in seconds))
        if min(seconds) < 0:
            raise ValueError("a negative time")
        together = time.monotonic() - begin < max(seconds) + 0.1
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([*seconds, together], np.float32))])
        if not self.decoupled:
            return response
        request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
