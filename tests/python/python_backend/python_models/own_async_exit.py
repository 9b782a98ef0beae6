"""Ends the process from the event loop of `async def execute`, as the request's parameter `do` selects."""

import asyncio
import json
import sys

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    async def execute(self, requests):
        responses = [await self.answer(request) for request in requests]
        return None if self.decoupled else responses

    async def answer(self, request):
        """`OUT` is `IN`."""
        await getattr(self, json.loads(request.parameters()).get("do", "nothing"))()
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
        if self.decoupled:
            request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return response

    async def nothing(self):
        pass

    async def exit(self):
        sys.exit(3)

    async def interrupt(self):
        raise KeyboardInterrupt

    async def cancelled(self):
        raise asyncio.CancelledError

    async def stop(self):
        asyncio.get_running_loop().stop()

    async def task(self):
        await asyncio.create_task(self.exit())

    async def callback(self):
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.sleep(0)
