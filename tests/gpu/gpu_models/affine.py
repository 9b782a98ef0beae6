"""Computes max(x W, 0) with PyTorch on the instance's device, and returns the device."""

import numpy as np
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        on_gpu = args["model_instance_kind"].endswith("GPU")
        self.device = torch.device(f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu")
        weights = np.random.default_rng(7).standard_normal((64, 64)).astype(np.float32)
        self.weights = torch.from_numpy(weights).to(self.device)

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        given = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
        found = torch.relu(given.to(self.device) @ self.weights)
        where = np.array([[str(found.device).encode()]] * len(given), np.object_)
        outputs = [pb_utils.Tensor("Y", found.cpu().numpy()), pb_utils.Tensor("WHERE", where)]
        return pb_utils.InferenceResponse(outputs)
