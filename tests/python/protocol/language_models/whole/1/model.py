"""A model that answers chats with OpenAI's JSON itself, without streams."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "openai_request")) for request in requests]

    def answer(self, tensor):
        body = json.loads(tensor.as_numpy().reshape(-1)[0])
        message = {"role": "assistant", "content": body["messages"][-1]["content"]}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        answer["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        text = body.get("raw", json.dumps(answer, indent=1))
        return pb_utils.InferenceResponse([pb_utils.Tensor("openai_response", np.array([text], dtype=object))])
