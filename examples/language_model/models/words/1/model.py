"""A language model without weights, for tests of clients: its tokens are the words of the prompt, which it repeats.

It has the tensors of Triton's vllm_backend. `vllm_xargs` of a request changes it: `delay_ms` is the time of each token, and
`fail_at` the number of the token at which the request fails.
"""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        try:
            await self.generate(request, sender)
        except Exception as error:
            code = pb_utils.TritonError.CANCELLED if request.is_cancelled() else pb_utils.TritonError.INTERNAL
            failed = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
            sender.send(failed, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def generate(self, request, sender):
        words = first(request, "text_input", b"").decode().split()
        parameters = json.loads(first(request, "sampling_parameters", b"{}"))
        if "structured_outputs" in parameters:
            raise pb_utils.TritonModelException("this model cannot constrain its output")
        choices = parameters.get("n", 1)
        extra = parameters.get("extra_args", {})
        count = min(len(words), parameters.get("max_tokens", 16))
        reason = "length" if count < len(words) else "stop"
        streams = bool(first(request, "stream", False))
        whole = []
        for number, word in enumerate(words[:count]):
            await asyncio.sleep(extra.get("delay_ms", 0) / 1000)
            if request.is_cancelled():
                raise pb_utils.TritonModelException("the client has left")
            if number == extra.get("fail_at"):
                raise pb_utils.TritonModelException(f"failed at token {number}, as asked")
            last = number + 1 == count
            text = word if last else f"{word} "
            if streams:
                send(sender, text, reason if last else "None", [text], len(words), choices, last)
            else:
                whole.append(text)
        if not streams or not count:
            send(sender, "".join(whole), reason, whole, len(words), choices, True)


def first(request, name, default):
    """Returns the only element of an optional input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


def send(sender, text, reason, tokens, prompt_tokens, choices, last):
    """Sends a response with the same text for each choice."""
    logprobs = [{str(number): {"logprob": -0.5, "rank": 1, "decoded_token": token}} for number, token in enumerate(tokens)]
    strings = {"text_output": text, "finish_reason": reason, "logprobs": json.dumps(logprobs)}
    numbers = {"num_input_tokens": prompt_tokens, "num_output_tokens": len(tokens) * choices}
    outputs = [pb_utils.Tensor(name, np.array([value] * choices, dtype=object)) for name, value in strings.items()]
    outputs += [pb_utils.Tensor(name, np.array([value], dtype=np.uint32)) for name, value in numbers.items()]
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
    sender.send(pb_utils.InferenceResponse(outputs), flags=flags)
