"""The module that models for Triton's Python backend import. Names and behavior are Triton's."""

import struct

import numpy as np

from pharos_worker._native import (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    Metric,
    PreferredMemory,
    Tensor,
    TritonError,
    TritonModelException,
    get_input_tensor_by_name,
    is_model_ready,
    load_model,
    unload_model,
)
from pharos_worker.custom_metrics import MetricFamily, MetricKind
from pharos_worker.logger import Logger, LogLevel
from pharos_worker.model_config import ModelConfig

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

# The datatypes of a configuration: name, number, numpy type. BF16 has no numpy type.
_DATATYPES = [
    ("TYPE_BOOL", 1, np.bool_),
    ("TYPE_UINT8", 2, np.uint8),
    ("TYPE_UINT16", 3, np.uint16),
    ("TYPE_UINT32", 4, np.uint32),
    ("TYPE_UINT64", 5, np.uint64),
    ("TYPE_INT8", 6, np.int8),
    ("TYPE_INT16", 7, np.int16),
    ("TYPE_INT32", 8, np.int32),
    ("TYPE_INT64", 9, np.int64),
    ("TYPE_FP16", 10, np.float16),
    ("TYPE_FP32", 11, np.float32),
    ("TYPE_FP64", 12, np.float64),
    ("TYPE_STRING", 13, np.object_),
]
TRITON_STRING_TO_NUMPY = {name: numpy_type for name, _, numpy_type in _DATATYPES}
# As in Triton: Python's own type, which numpy accepts as its own.
TRITON_STRING_TO_NUMPY["TYPE_BOOL"] = bool

_model_dir = None


def get_model_dir():
    """Returns the directory of the running version, with the model's files."""
    return _model_dir


def get_output_tensor_by_name(inference_response, name):
    """Returns the output of this name, or None."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config, name):
    """Returns the input of this name in a configuration as a dictionary, or None."""
    return next((entry for entry in model_config.get("input", []) if entry["name"] == name), None)


def get_output_config_by_name(model_config, name):
    """Returns the output of this name in a configuration as a dictionary, or None."""
    return next((entry for entry in model_config.get("output", []) if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config):
    """Returns whether the configured model is decoupled: it may send any number of responses to a request."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string):
    """Returns the numpy type of a datatype's name in a configuration, such as TYPE_FP32."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type):
    """Returns the numpy type of a datatype's number; None if numpy has none."""
    return next((numpy_type for _, number, numpy_type in _DATATYPES if number == data_type), None)


def numpy_to_triton_type(data_type):
    """Returns the number of the datatype for a numpy type; None for unsupported types."""
    if data_type == np.bytes_:
        return 13
    return next((number for _, number, numpy_type in _DATATYPES if data_type == numpy_type), None)


def serialize_byte_tensor(input_tensor):
    """Serializes an array of objects or byte strings in row-major order, each element prefixed by its length (4 bytes,
    little-endian). Returns None for an array of another type, and an empty tuple for an empty array."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype != np.object_ and input_tensor.dtype.type != np.bytes_:
        return None
    pieces = []
    for element in input_tensor.ravel().tolist():
        content = element if isinstance(element, bytes) else str(element).encode("utf-8")
        pieces += [struct.pack("<I", len(content)), content]
    return b"".join(pieces)


def deserialize_bytes_tensor(encoded_tensor):
    """Deserializes the output of `serialize_byte_tensor` to a one-dimensional array of `bytes` objects."""
    data, at, elements = bytes(encoded_tensor), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if at + length > len(data):
            raise ValueError(f"the element at byte {at} should have {length} bytes, but only {len(data) - at} are left")
        elements.append(data[at : at + length])
        at += length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
