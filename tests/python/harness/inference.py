"""Values and bodies of inference requests."""

import struct

from harness.wire import byte_strings, tensor

ROW = list(range(16))
ONES = [1] * 16
RAW_ROW = struct.pack("<16i", *ROW)
RAW_ONES = struct.pack("<16i", *ONES)
JSON_VALUES = {
    "BOOL": [True, False, True],
    "UINT8": [0, 1, 255],
    "UINT16": [0, 1, 65535],
    "UINT32": [0, 1, 4294967295],
    "UINT64": [0, 1, 18446744073709551615],
    "INT8": [-128, 0, 127],
    "INT16": [-32768, 0, 32767],
    "INT32": [-2147483648, 0, 2147483647],
    "INT64": [-9223372036854775808, 0, 9223372036854775807],
    "FP32": [0.1, -1.5, 3.4028235e38, 1e-8, 0.0, 16777216, 1e21, 123456.789],
    "FP64": [0.1, -1.5, 1.7976931348623157e308, 5e-324, 1e21, 1e22, 123456789.125, 1.0],
    "BYTES": ["", "a", "Grüße, 世界", 'quote " and \\ and \n and \t and /'],
}
"""Values of each datatype that JSON can carry: the limits, and values whose decimal form is hard to get right."""
RAW_VALUES = {
    "BOOL": struct.pack("<3?", True, False, True),
    "UINT8": struct.pack("<3B", 0, 1, 255),
    "UINT16": struct.pack("<3H", 0, 1, 65535),
    "UINT32": struct.pack("<3I", 0, 1, 4294967295),
    "UINT64": struct.pack("<3Q", 0, 1, 18446744073709551615),
    "INT8": struct.pack("<3b", -128, 0, 127),
    "INT16": struct.pack("<3h", -32768, 0, 32767),
    "INT32": struct.pack("<3i", -(2**31), 0, 2**31 - 1),
    "INT64": struct.pack("<3q", -(2**63), 0, 2**63 - 1),
    "FP16": struct.pack("<3e", 0.5, -1.0, 65504.0),
    "FP32": struct.pack("<3f", 0.1, -1.5, 3.4028235e38),
    "FP64": struct.pack("<3d", 0.1, -1.5, 1.7976931348623157e308),
    "BYTES": byte_strings(b"", b"a", bytes(range(256))),
}
"""Three values of each datatype in binary form."""


def simple(**more) -> dict:
    """Returns a valid request for the model `simple`, with `more` keys."""
    return {"inputs": [tensor("INPUT0", "INT32", [1, 16], ROW), tensor("INPUT1", "INT32", [1, 16], ONES)], **more}


def simple_binary(**more) -> dict:
    """Returns the same request with both inputs in binary form (the blobs are RAW_ROW and RAW_ONES)."""
    inputs = [tensor(name, "INT32", [1, 16], binary_data_size=64) for name in ("INPUT0", "INPUT1")]
    return {"inputs": inputs, **more}


def one(datatype: str, shape: list, data=None, **parameters) -> dict:
    """Returns a request with the single input INPUT0."""
    return {"inputs": [tensor("INPUT0", datatype, shape, data, **parameters)]}
