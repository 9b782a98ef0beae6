"""ONNX models of different output shapes."""

from pathlib import Path

import numpy as np

from harness import onnx_file
from harness.generate import config_type
from harness.onnx_file import constant, node

MIB = 1 << 20
TWO = constant("two", "FP32", np.array(2, np.float32))
PAIR = np.array([5, 9], np.float32)
WEIGHTS = [TWO, constant("pair", "FP32", PAIR)]


def fp32(name: str, *dims) -> tuple:
    """Returns an FP32 input or output."""
    return name, "FP32", dims


DOUBLE = [node("Mul", ["X", "two"], ["Y"])]
MODELS = {
    "static": (0, DOUBLE, [fp32("X", 2, 3)], [fp32("Y", 2, 3)]),
    "batched": (8, DOUBLE, [fp32("X", "N", 4)], [fp32("Y", "N", 4)]),
    "free": (0, DOUBLE, [fp32("X", "n", "m")], [fp32("Y", "n", "m")]),
    "free_row": (8, DOUBLE, [fp32("X", "N", "m")], [fp32("Y", "N", "m")]),
    "greater": (8, [node("Greater", ["X", "two"], ["Y"])], [fp32("X", "N", 4)], [("Y", "BOOL", ["N", 4])]),
    "several": (
        8,
        [*DOUBLE, node("Add", ["X", "two"], ["A"]), node("Sub", ["A", "X"], ["B"])],
        [fp32("X", "N", 4)],
        [fp32("A", "N", 4), fp32("Y", "N", 4), fp32("B", "N", 4)],
    ),
    "nonzero": (0, [node("NonZero", ["X"], ["Y"])], [fp32("X", 6)], [("Y", "INT64", [1, "k"])]),
    "constant": (
        0,
        [*DOUBLE, node("Add", ["pair", "two"], ["Z"])],
        [fp32("X", 4)],
        [fp32("Y", 4), fp32("pair", 2), fp32("Z", 2)],
    ),
    "empty": (
        8,
        [node("Slice", ["X", "zero", "zero", "one"], ["Y"]), node("Mul", ["X", "two"], ["Z"])],
        [fp32("X", "N", 4)],
        [fp32("Y", "N", 0), fp32("Z", "N", 4)],
    ),
    "wrong_first": (0, DOUBLE, [fp32("X", "n", 4)], [fp32("Y", 1, 4)]),
    "wrong_last": (
        8,
        [*DOUBLE, node("Slice", ["X", "zero", "one", "one"], ["A"])],
        [fp32("X", "N", "m")],
        [fp32("Y", "N", 4), fp32("A", "N", 1)],
    ),
    "large": (8, DOUBLE, [fp32("X", "N", 16 * MIB)], [fp32("Y", "N", 16 * MIB)]),
}
"""For each model the maximum batch size, operations, inputs and outputs."""


def config(name: str, backend: str, batch: int, inputs: list, outputs: list) -> str:
    """Returns the configuration; dimensions with a name or without a size are variable."""
    text = f'name: "{name}"\nbackend: "{backend}"\nmax_batch_size: {batch}\n'
    for kind, tensors in [("input", inputs), ("output", outputs)]:
        for tensor, datatype, dims in tensors:
            sizes = [dim if isinstance(dim, int) and dim > 0 else -1 for dim in dims[1 if batch else 0 :]]
            text += f'{kind} [ {{ name: "{tensor}" data_type: {config_type(datatype)} dims: {sizes} }} ]\n'
    return text


def write(folder: Path, name: str, backend: str, parts: tuple):
    """Writes one model of the repository."""
    batch, nodes, inputs, outputs, *more = parts
    version = folder / name / "1"
    version.mkdir(parents=True)
    constants = more[0] if more else WEIGHTS
    (version / "model.onnx").write_bytes(onnx_file.model(nodes, inputs, outputs, constants))
    (version.parent / "config.pbtxt").write_text(config(name, backend, batch, inputs, outputs))
