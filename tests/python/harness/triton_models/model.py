"""Functions of the backends `builtin` and `test`, for the Python backend of a real Triton.

`triton_repository.py` converts a repository for this server to one for Triton: the same configurations, with this file as the
code of every model. Both servers then run the same models, so that a different answer shows a difference of the servers.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


FUNCTIONS = ("identity", "add_sub", "delay", "fail", "sequence_sum")


class TritonPythonModel:
    """One model; its configuration names its function."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self.function = parameters["function"]
        if self.function not in FUNCTIONS:
            raise ValueError(f"there is no function '{self.function}'")
        self.delay_s = int(parameters.get("delay_ms", "0")) / 1000
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        self.delay_first = self.function in ("delay", "sequence_sum")
        batching = config.get("sequence_batching", {})
        self.controls = [control["name"] for control in batching.get("control_input", [])]
        self.sums = {}
        self.delay_items = int(parameters.get("delay_items", "0"))

    def execute(self, requests):
        if self.delay_first and self.is_slow(requests):
            time.sleep(self.delay_s)
        if self.function == "sequence_sum":
            return self.sequence_sum(requests)
        return [self.answer(request) for request in requests]

    def sequence_sum(self, requests):
        """Computes the function, with the correlation ID as the key; omits the output OPEN."""
        seen = [self.seen(request) for request in requests]
        text = " ".join(",".join(values) for values in seen).encode()
        responses = []
        for request, controls in zip(requests, seen):
            start, _, ready, key = controls
            value = pb_utils.get_input_tensor_by_name(request, self.inputs[0]).as_numpy()
            total = 0
            if ready != "0":
                total = int(value.sum()) + (0 if start != "0" else self.sums.get(key, 0))
                self.sums[key] = total
            shape = (1, 1) if value.ndim > 1 else (1,)
            sums, texts = np.full(shape, total, np.int32), np.full(shape, text, np.object_)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sums), pb_utils.Tensor("BATCH", texts)])
            )
        return responses

    def seen(self, request):
        """Returns the controls of a request as texts."""
        values = (pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0] for name in self.controls)
        return [value.decode() if isinstance(value, bytes) else f"{int(value)}" for value in values]

    def is_slow(self, requests):
        """Returns whether this batch is delayed: its first request has at least `delay_items` elements (0 delays every batch)."""
        first = pb_utils.get_input_tensor_by_name(requests[0], self.inputs[0])
        return first.as_numpy().size >= self.delay_items

    def answer(self, request):
        """Returns the response of one request; an error if the function fails."""
        try:
            if self.function == "fail":
                raise ValueError("requested failure")
            inputs = [pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs]
            values = add_sub(*(t.as_numpy() for t in inputs)) if self.function == "add_sub" else copies(inputs)
            wanted = set(request.requested_output_names())
            tensors = [pb_utils.Tensor(name, value) for name, value in zip(self.outputs, values) if value is not None]
            return pb_utils.InferenceResponse([t for t in tensors if t.name() in wanted])
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))


def copies(inputs):
    """Returns the inputs as outputs: output i is input i, or absent if that input is absent."""
    return [None if tensor is None else tensor.as_numpy() for tensor in inputs]


def add_sub(first, second):
    """Returns the sum and the difference; integers wrap, BYTES are decimal strings."""
    if first.dtype != np.object_:
        return [first + second, first - second]
    left, right = numbers(first), numbers(second)
    text = np.vectorize(lambda number: str(number).encode(), otypes=[np.object_])
    return [text(left + right), text(left - right)]


def numbers(tensor):
    """Returns the integers of a BYTES tensor of decimal strings."""
    return np.array([int(element) for element in tensor.flatten()], dtype=np.int64).reshape(tensor.shape)
