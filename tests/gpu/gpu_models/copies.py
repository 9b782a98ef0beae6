"""Copies its input to the device; returns the milliseconds of the copy, measured by events, and whether the memory was pinned."""

import time

import numpy as np
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.on_gpu = args["model_instance_kind"].endswith("GPU")
        self.device = torch.device(f"cuda:{args['model_instance_device_id']}" if self.on_gpu else "cpu")
        torch.zeros(1, device=self.device)

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def copied(self, given):
        """Returns the copy and its duration in milliseconds."""
        if not self.on_gpu:
            begun = time.perf_counter()
            copy = given.clone()
            return copy, (time.perf_counter() - begun) * 1000
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copy = torch.empty_like(given, device=self.device)
        first.record()
        copy.copy_(given, non_blocking=True)
        last.record()
        last.synchronize()
        return copy, first.elapsed_time(last)

    def one(self, request):
        given = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
        pinned = self.on_gpu and given.is_pinned()
        copy, took = self.copied(given)
        values = {"SUM": copy.double().sum().item(), "MS": took, "PINNED": float(pinned)}
        tensors = [pb_utils.Tensor(name, np.array([value])) for name, value in values.items()]
        return pb_utils.InferenceResponse(tensors)
