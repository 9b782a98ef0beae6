"""The functions `repeat`, `silent`, `identity` and `delay` of the backends `builtin` and `test`, for the Python backend of a real Triton,
decoupled if the configuration says so."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """One model; its configuration names its function."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self.function = self.parameters["function"]
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)

    def execute(self, requests):
        if not self.decoupled:
            time.sleep(int(self.parameters.get("delay_ms", "0")) / 1000)
            return [self.identity(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            if self.function == "silent" or not self.repeat(request, sender):
                sender.send(flags=FINAL)
        return None

    def identity(self, request):
        """Returns the inputs as outputs: output i is input i, or absent if that input is absent."""
        tensors = [pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs]
        pairs = zip(self.outputs, tensors)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, tensor.as_numpy()) for name, tensor in pairs if tensor is not None]
        )

    def repeat(self, request, sender):
        """Sends one response for each element; returns whether the last response had the final flag."""
        elements = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().flatten()
        delays = pb_utils.get_input_tensor_by_name(request, "DELAY")
        delays = [] if delays is None else delays.as_numpy().flatten()
        wanted = request.requested_output_names()
        for number, element in enumerate(elements):
            time.sleep(delays[number] / 1000 if number < len(delays) else 0)
            if self.is_at("fail_at", number):
                sender.send(error(f"requested failure at response {number}"), FINAL)
                return True
            if self.is_at("error_at", number):
                sender.send(error(f"requested error at response {number}"))
                continue
            copies = int(self.parameters.get("copies", "1"))
            tensors = [
                pb_utils.Tensor("OUT", np.array([element] * copies, elements.dtype)),
                pb_utils.Tensor("IDX", np.array([number], np.uint32)),
            ]
            response = pb_utils.InferenceResponse([tensor for tensor in tensors if tensor.name() in wanted])
            if self.parameters.get("final") == "with" and number + 1 == len(elements):
                sender.send(response, FINAL)
                return True
            sender.send(response)
        return False

    def is_at(self, parameter, number):
        """Returns whether a parameter names the response of this number."""
        return self.parameters.get(parameter) == str(number)


def error(text):
    """Returns an error response."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
