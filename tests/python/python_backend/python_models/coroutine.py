"""A model whose `execute` is a coroutine: it waits for several timers concurrently.

Triton's answers contain a line number of this file."""
import asyncio
import json

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
        """`OUT`: the seconds of `VALUE`, waited for concurrently, and whether all waits had begun when the first ended."""
        seconds = [float(s) for s in pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()]
        begun = []
        running = await asyncio.gather(*(self.wait(s, begun) for s in seconds))
        if min(seconds) < 0:
            raise ValueError("a negative time")
        together = min(running) == len(seconds)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([*seconds, together], np.float32))])
        if not self.decoupled:
            return response
        request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    async def wait(self, seconds: float, begun: list) -> int:
        """Waits; returns how many waits had begun when it ended."""
        begun.append(seconds)
        await asyncio.sleep(seconds)
        return len(begun)
