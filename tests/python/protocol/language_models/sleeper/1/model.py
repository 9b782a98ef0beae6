"""A model that repeats its prompt, and sleeps and wakes up by request."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.parts, self.asleep = set(), ""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        operation, prompt = self.text_of(request, "operation"), self.text_of(request, "text_input")
        if operation:
            options = json.loads(json.loads(request.parameters())["triton_sleep"])
            if operation == "sleep":
                self.parts = {"weights", "kv_cache"}
                self.asleep = f"the model sleeps at level {options['level']} ({options['mode']})"
            elif operation == "wake_up":
                self.parts -= set(options["tags"] or self.parts)
            return self.response("sleeping" if self.parts else "awake")
        if self.parts:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(self.asleep, pb_utils.TritonError.UNAVAILABLE))
        return self.response(prompt)

    def text_of(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return "" if tensor is None else tensor.as_numpy().reshape(-1)[0].decode()

    def response(self, text):
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text], dtype=object))])
