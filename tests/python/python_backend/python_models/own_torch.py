"""Returns its input as real PyTorch tensors that report a device, through the runner for PyTorch files or directly. Any copy
other than the one into the output's memory is an error."""

import json

import torch
import triton_python_backend_utils as pb_utils
from pharos_worker.runners import pytorch


class OnDevice(torch.Tensor):
    """A tensor that reports a device and refuses copies through the CPU."""

    device = property(lambda self: torch.device("cuda", 0))

    def __dlpack__(self, **_):
        return self.as_subclass(torch.Tensor).__dlpack__()

    def __dlpack_device__(self):
        return 2, 0

    def cpu(self):
        raise AssertionError("an additional copy")

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
