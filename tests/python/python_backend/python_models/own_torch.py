"""Gives its input back as real tensors of PyTorch that say that they are on a device, by way of the runner for PyTorch's files or
not. Any other copy than the one into the output's memory is an error."""

import json

import torch
import triton_python_backend_utils as pb_utils
from pharos_worker.runners import pytorch


class OnDevice(torch.Tensor):
    """A tensor that says so, and whose own copies are detours."""

    device = property(lambda self: torch.device("cuda", 0))

    def __dlpack__(self, **_):
        return self.as_subclass(torch.Tensor).__dlpack__()

    def __dlpack_device__(self):
        return 2, 0

    def cpu(self):
        raise AssertionError("a detour")

    numpy = cpu


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = json.loads(request.parameters())
        values = torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, "IN")).clone()
        values = values.to(getattr(torch, given["type"])).as_subclass(OnDevice)
        make = pytorch.as_output if given["how"] == "runner" else pb_utils.Tensor.from_dlpack
        out = make(given["type"], values)
        assert not out.is_cpu()
        return pb_utils.InferenceResponse([out])
