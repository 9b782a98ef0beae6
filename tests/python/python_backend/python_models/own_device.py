"""Reports the location of its input, and returns it in the way that the request's parameter `how` selects. Memory of the fake
driver's devices (`fake_cuda`) can be read at its address; this model takes the address from a DLPack capsule."""

import ctypes
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class DLTensor(ctypes.Structure):
    """The structure DLTensor of dlpack.h, for floats."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def seen(capsule):
    """Returns the device and the values of a capsule."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = DLTensor.from_address(pointer(capsule, b"dltensor"))
    assert (tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset) == (2, 32, 1, 0)
    count = int(np.prod([tensor.shape[at] for at in range(tensor.ndim)]))
    values = np.ctypeslib.as_array((ctypes.c_float * count).from_address(tensor.data)).tolist()
    return [tensor.device_type, tensor.device_id], values


def numpys(tensor):
    """Returns the values of `as_numpy`, or its error."""
    try:
        return tensor.as_numpy().ravel().tolist()
    except pb_utils.TritonModelException as error:
        return str(error)


class Lent:
    """A library's tensor on the device, in memory of the server; it records the stream that each consumer passes."""

    def __init__(self, tensor, streams):
        self.tensor, self.streams = tensor, streams

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.tensor.to_dlpack()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def get(self, out):
        raise RuntimeError("these elements must stay on the device")


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.kept, self.streams = None, []

    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, together):
        how = json.loads(request.parameters()).get("how", "tensor")
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        if how == "keep":
            self.kept = tensor.to_dlpack()
        device, values = seen(self.kept if how == "kept" else tensor.to_dlpack())
        if how == "drop":
            self.kept = None
        told = {
            "cpu": tensor.is_cpu(), "device": list(tensor.__dlpack_device__()), "capsule": device, "values": values,
            "numpy": numpys(tensor), "shape": tensor.shape(), "together": together,
        }  # fmt: skip
        if how == "streams":
            told["streams"] = self.streams
        if how == "capsule":
            out = pb_utils.Tensor.from_dlpack("OUT", tensor.to_dlpack())
        elif how == "lent":
            self.streams.clear()
            out = pb_utils.Tensor.from_dlpack("OUT", Lent(tensor, self.streams))
        elif how == "tensor":
            out = pb_utils.Tensor.from_dlpack("OUT", tensor)
            told["again"] = [out.is_cpu(), list(out.__dlpack_device__())]
        else:
            out = pb_utils.Tensor("OUT", np.zeros(tensor.shape(), np.float32))
        return pb_utils.InferenceResponse([out], parameters={"told": json.dumps(told)})
