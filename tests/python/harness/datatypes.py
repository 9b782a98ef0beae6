"""The protocol's datatypes as numpy types, and random values of each."""

import ml_dtypes
import numpy as np

NUMPY = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
    "BYTES": np.object_, "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
"""The numpy type that the clients use for each datatype."""


def random_values(datatype: str, shape) -> np.ndarray:
    """Returns values over the whole range of a datatype; each call returns the same values."""
    generator = np.random.default_rng(7)
    count = int(np.prod(shape))
    if datatype == "BYTES":
        values = [generator.bytes(int(n)) for n in generator.integers(0, 40, count)]
        return np.array(values, dtype=np.object_).reshape(shape)
    dtype = np.dtype(NUMPY[datatype])
    if dtype.kind == "f" or datatype == "BF16":
        return generator.standard_normal(count).astype(dtype).reshape(shape)
    if dtype.kind == "b":
        return (generator.integers(0, 2, count) == 1).reshape(shape)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True).reshape(shape)
