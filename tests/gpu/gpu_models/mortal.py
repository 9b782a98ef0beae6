"""Holds memory of the device; if a file `slow` is beside it, waits before that. Fails in a kernel on request, and makes N passes
over its memory for an input of -N."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        if (Path(__file__).resolve().parent / "slow").exists():
            time.sleep(6)
        self.on_gpu = args["model_instance_kind"].endswith("GPU")
        self.device = torch.device(f"cuda:{args['model_instance_device_id']}" if self.on_gpu else "cpu")
        size = 2 << 30 if self.on_gpu else 1 << 20
        self.held = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        given = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0])
        if given == 1 and not self.on_gpu:
            os.kill(os.getpid(), signal.SIGKILL)
        if given == 1:
            # The kernel accesses an element that does not exist, and its assertion fails.
            self.held[torch.tensor([1 << 40], device=self.device)].sum().item()
        for _ in range(-given):
            self.held.add_(0)
        found = np.array([given + 1 + int(self.held[:8].sum().item())], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", found)])
