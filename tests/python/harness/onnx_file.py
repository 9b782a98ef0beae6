"""Writes small ONNX files without the `onnx` package. The field numbers are those of the project's `onnx.proto3`."""

ELEMENT = {
    "FP32": 1, "UINT8": 2, "INT8": 3, "UINT16": 4, "INT16": 5, "INT32": 6, "INT64": 7, "BYTES": 8, "BOOL": 9,
    "FP16": 10, "FP64": 11, "UINT32": 12, "UINT64": 13, "BF16": 16,
}  # fmt: skip
"""The `TensorProto.DataType` of each datatype of the protocol."""

INTEGER, STRING, INTEGERS = 2, 3, 7
"""Values of `AttributeProto.AttributeType`: INT, STRING and INTS."""

EXTERNAL = 1
"""A value of `TensorProto.DataLocation`."""

SEQUENCE = "SEQUENCE"
"""The type of an output that is a sequence of FP32 tensors, in place of a datatype."""


def varint(value: int) -> bytes:
    """Encodes a number as a protobuf varint; negative numbers as 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def field(number: int, value) -> bytes:
    """Encodes one field: a number, or bytes or text with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def value_info(name: str, datatype: str, dims) -> bytes:
    """Encodes an input or output; a dimension is a number, or a name for a variable dimension."""
    if datatype == SEQUENCE:
        return field(1, name) + field(2, field(4, field(1, field(1, field(1, ELEMENT["FP32"])))))
    shape = b"".join(field(1, field(1 if isinstance(dim, int) else 2, dim)) for dim in dims)
    return field(1, name) + field(2, field(1, field(1, ELEMENT[datatype]) + field(2, shape)))


def attribute(name: str, value) -> bytes:
    """Encodes an attribute: a number, a text or a list of numbers."""
    if isinstance(value, int):
        return field(1, name) + field(3, value) + field(20, INTEGER)
    if isinstance(value, str):
        return field(1, name) + field(4, value) + field(20, STRING)
    return field(1, name) + b"".join(field(8, number) for number in value) + field(20, INTEGERS)


def node(operator: str, inputs: list, outputs: list, domain: str = "", **attributes) -> bytes:
    """Encodes one operation."""
    names = b"".join(field(1, name) for name in inputs) + b"".join(field(2, name) for name in outputs)
    more = b"".join(field(5, attribute(*item)) for item in attributes.items())
    return names + field(3, f"{operator}_{outputs[0]}") + field(4, operator) + more + (field(7, domain) if domain else b"")


def constant(name: str, datatype: str, array) -> bytes:
    """Encodes a weight."""
    dims = b"".join(field(1, dim) for dim in array.shape)
    return dims + field(2, ELEMENT[datatype]) + field(8, name) + field(9, array.tobytes())


def external_constant(name: str, datatype: str, array, file: str) -> bytes:
    """Encodes a weight whose bytes are in another file, in the directory of the model's file."""
    dims = b"".join(field(1, dim) for dim in array.shape)
    return dims + field(2, ELEMENT[datatype]) + field(8, name) + field(13, field(1, "location") + field(2, file)) + field(14, EXTERNAL)


def model(nodes: list, inputs: list, outputs: list, constants=(), domains=()) -> bytes:
    """Encodes a whole file; inputs and outputs are `(name, datatype, dims)`. `domains` are those of operations beside ONNX's own."""
    graph = b"".join(field(1, item) for item in nodes) + field(2, "graph")
    graph += b"".join(field(5, item) for item in constants)
    graph += b"".join(field(11, value_info(*item)) for item in inputs)
    graph += b"".join(field(12, value_info(*item)) for item in outputs)
    imports = b"".join(field(8, field(1, domain) + field(2, version)) for domain, version in [("", 17), *((one, 1) for one in domains)])
    return field(1, 8) + field(7, graph) + imports
