"""Doubles its input with PyTorch, all requests together, on the instance's device; inputs and outputs stay there."""

import torch
import triton_python_backend_utils as pb_utils

SLEEP = 20_000_000
"""Device cycles before the result is ready: a copy that does not wait gets the previous content."""


class TritonPythonModel:
    def initialize(self, args):
        self.on_gpu = args["model_instance_kind"].endswith("GPU")
        self.device = torch.device(f"cuda:{args['model_instance_device_id']}" if self.on_gpu else "cpu")

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "I0") for request in requests]
        given = [torch.from_dlpack(tensor).to(self.device) for tensor in tensors]
        if self.on_gpu:
            torch.cuda._sleep(SLEEP)
        parts = (2 * torch.cat(given)).split([len(one) for one in given])
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("O0", part)]) for part in parts]
