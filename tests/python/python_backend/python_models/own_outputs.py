"""Returns its input as tensors "on a device" of fake libraries: a `torch` and a `cupy` that copy an output as the real ones do
and record the calls (the next request with `how: told` returns the record)."""

import json
import sys
import types

import numpy as np
import triton_python_backend_utils as pb_utils

CALLS, KEPT = [], []


def where(array):
    """Returns the path of the mapping that contains the array."""
    address = array.__array_interface__["data"][0]
    for line in open("/proc/self/maps", encoding="utf-8"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[5] if len(line.split()) > 5 else ""
    return None


class Made:
    """A tensor that reports a device."""

    def __init__(self, array, how):
        self.array, self.how = array, how

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return 2, 0


class Tensor(Made):
    """A fake `torch.Tensor`."""

    def detach(self):
        return self

    def cpu(self):
        CALLS.append("cpu")
        return self

    def numpy(self):
        return self.array


class Host:
    """The result of the fake `torch.from_numpy`."""

    def __init__(self, view):
        self.view = view

    def copy_(self, tensor):
        if tensor.how == "fails":
            raise RuntimeError("not with this version")
        CALLS.append(["copy_", where(self.view), bool(self.view.flags.writeable), bool(self.view.flags.owndata)])
        np.copyto(self.view, tensor.array)
        for view in KEPT:
            view.fill(9)
        if tensor.how == "kept":
            KEPT.append(self.view)
        return self


class Array(Made):
    """A fake `cupy.ndarray`."""

    def get(self, out=None):
        CALLS.append(["get", where(out)])
        np.copyto(out, self.array)
        return out


class OldArray(Made):
    """The same for older versions, whose `get` cannot write to an existing array."""

    def get(self):
        CALLS.append("get")
        return self.array


torch = types.ModuleType("torch")
torch.Tensor, torch.from_numpy = Tensor, Host
KINDS = {"cupy": Array, "old": OldArray}


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        how = json.loads(request.parameters())["how"]
        array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().copy()
        told = json.dumps(CALLS)
        if how == "told":
            CALLS.clear()
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)], parameters={"told": told})
        sys.modules.pop("torch", None)
        if how != "other":
            sys.modules["torch"] = torch
        out = pb_utils.Tensor.from_dlpack("OUT", KINDS.get(how, Tensor)(array, how))
        assert not out.is_cpu()
        return pb_utils.InferenceResponse([out])
