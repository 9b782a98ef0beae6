#!/usr/bin/env python3
"""Trains the model `digits`, which recognizes a handwritten digit in an image of 8 x 8 pixels.

    pip install scikit-learn onnx
    python3 examples/train_digits.py

The data are scikit-learn's digits (1797 images of the UCI data set "Optical Recognition of Handwritten Digits"). A fifth is
held out: `digits_held_out.npz` contains all of these images, and `images/` one for each digit. The results are committed, so
that no training is needed before serving; the seed is fixed.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

HERE = Path(__file__).resolve().parent
BRIGHTEST = 16.0
"""Pixels are whole numbers from 0 (empty) to 16; the model scales them."""


def train():
    """Returns the trained network, the held-out images `[n, 8, 8]` and their digits `[n]`."""
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    network = MLPClassifier(hidden_layer_sizes=(64,), alpha=0.01, max_iter=400, random_state=0)
    network.fit(train_x.reshape(-1, 64) / BRIGHTEST, train_y)
    accuracy = network.score(test_x.reshape(-1, 64) / BRIGHTEST, test_y)
    print(f"accuracy {accuracy:.1%} on {len(test_y)} held-out images after {network.n_iter_} epochs")
    return network, test_x, test_y


def to_onnx(network) -> onnx.ModelProto:
    """Converts the network to ONNX: `image` FP32 [batch, 8, 8] -> `probabilities` FP32 [batch, 10], `label` INT64 [batch, 1]."""
    weights = [
        np.array([BRIGHTEST]),
        network.coefs_[0],
        network.intercepts_[0],
        network.coefs_[1],
        network.intercepts_[1],
    ]
    names = ["brightest", "weights_0", "bias_0", "weights_1", "bias_1"]
    constants = [numpy_helper.from_array(w.astype(np.float32), name) for w, name in zip(weights, names)]
    nodes = [
        helper.make_node("Div", ["image", "brightest"], ["scaled"]),
        helper.make_node("Flatten", ["scaled"], ["pixels"], axis=1),
        helper.make_node("Gemm", ["pixels", "weights_0", "bias_0"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "weights_1", "bias_1"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["label"], axis=1, keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 8, 8])],
        [
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10]),
            helper.make_tensor_value_info("label", TensorProto.INT64, ["batch", 1]),
        ],
        constants,
    )
    # Old versions that all current runtimes support.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7, producer_name="digits")
    onnx.checker.check_model(model, full_check=True)
    return model


def write_picture(path: Path, pixels: np.ndarray):
    """Writes an image as plain PGM (P2), a text format: https://netpbm.sourceforge.net/doc/pgm.html"""
    rows = "\n".join(" ".join(f"{int(pixel):2}" for pixel in row) for row in pixels)
    path.write_text(f"P2\n8 8\n16\n{rows}\n")


def main():
    """Trains the model, and writes it, the held-out data and one image for each digit."""
    network, pictures, labels = train()
    onnx.save(to_onnx(network), HERE / "models/digits/1/model.onnx")
    np.savez_compressed(HERE / "digits_held_out.npz", images=pictures.astype(np.uint8), labels=labels.astype(np.uint8))
    for digit in range(10):
        first = int(np.argmax(labels == digit))
        write_picture(HERE / f"images/digit_{digit}.pgm", pictures[first])


if __name__ == "__main__":
    main()
