"""`is_ready` follows the file `ready` in the model's folder; if IN is 1, execute ends when the file `end` exists."""

import asyncio
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def is_ready(self):
        told = Path(pb_utils.get_model_dir(), "../ready").read_text()
        if told == "slow":
            time.sleep(6)
        if told == "coroutine":
            return self.later()
        return {"yes": True, "no": False, "one": 1, "slow": True}[told]

    async def later(self):
        await asyncio.sleep(0.01)
        return True

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            while tensor[0] and not Path(pb_utils.get_model_dir(), "../end").exists():
                time.sleep(0.01)
            ready = [pb_utils.is_model_ready(name) for name in ("ready", "memory")]
            out = pb_utils.Tensor("OUT", tensor)
            responses.append(pb_utils.InferenceResponse([out], parameters={"itself": ready[0], "another": ready[1]}))
        return responses
