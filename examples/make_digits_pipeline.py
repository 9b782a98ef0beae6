#!/usr/bin/env python3
"""Writes the two small ONNX models that the ensemble `digits_pipeline` combines with `digits`.

`digits_preprocess` converts a scanned image (dark ink on white paper, 64 x 64 pixels of 0 to 255) to the input of `digits`.
`digits_postprocess` computes the confidence of the result. The `onnx` package is not needed: a graph is a few protobuf fields.
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/python"))
from harness.onnx_file import constant, model, node  # noqa: E402

SURE = 0.9
"""The minimum confidence of a result that is reported as sure."""


def preprocess() -> bytes:
    """`picture` UINT8 [batch, 64, 64] -> `image` FP32 [batch, 8, 8]: inverted, 0 to 16, each pixel the mean of 8 x 8."""
    nodes = [
        node("Cast", ["picture"], ["brightness"], to=1),
        node("Sub", ["white", "brightness"], ["ink"]),
        node("Mul", ["ink", "scale"], ["scaled"]),
        node("Unsqueeze", ["scaled", "channel"], ["planes"]),
        node("AveragePool", ["planes"], ["pooled"], kernel_shape=[8, 8], strides=[8, 8]),
        node("Squeeze", ["pooled", "channel"], ["image"]),
    ]
    constants = [
        constant("white", "FP32", np.array(255, np.float32)),
        constant("scale", "FP32", np.array(16 / 255, np.float32)),
        constant("channel", "INT64", np.array([1])),
    ]
    return model(nodes, [("picture", "UINT8", ["n", 64, 64])], [("image", "FP32", ["n", 8, 8])], constants)


def postprocess() -> bytes:
    """`probabilities` FP32 [batch, 10] -> `digit` INT64, `confidence` FP32 and `sure` BOOL, each [batch, 1]."""
    nodes = [
        node("ArgMax", ["probabilities"], ["digit"], axis=1, keepdims=1),
        node("ReduceMax", ["probabilities"], ["confidence"], axes=[1], keepdims=1),
        node("Greater", ["confidence", "enough"], ["sure"]),
    ]
    outputs = [("digit", "INT64", ["n", 1]), ("confidence", "FP32", ["n", 1]), ("sure", "BOOL", ["n", 1])]
    constants = [constant("enough", "FP32", np.array(SURE, np.float32))]
    return model(nodes, [("probabilities", "FP32", ["n", 10])], outputs, constants)


def main():
    """Writes both models."""
    for name, file in [("digits_preprocess", preprocess()), ("digits_postprocess", postprocess())]:
        target = HERE / "models" / name / "1/model.onnx"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file)


if __name__ == "__main__":
    main()
