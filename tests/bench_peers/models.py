"""The two models of the benchmark, with their inputs.

`digits` is the example model of this repository: an image of 8 x 8 pixels, some ten microseconds a run. `encoder` is a text
classifier that takes 5 to 20 ms a run: a transformer encoder whose layers share their weights, as in ALBERT
(https://arxiv.org/abs/1909.11942), so that the file stays small. Its weights are random.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python"))
from harness import onnx_file as onnx  # noqa: E402

MAX_BATCH_SIZE = 32
INPUTS = 16
"""The number of different inputs that the clients send in turn."""
TOKENS, HIDDEN, INNER, HEADS, LAYERS, VOCABULARY, LABELS = 32, 384, 1536, 12, 8, 1000, 16


@dataclass(frozen=True)
class Model:
    """A model: its file, one input and its first output."""

    name: str
    path: Path
    input: str
    datatype: str
    """The input's datatype in the KServe protocol."""
    shape: tuple
    """The shape of one row of the input."""
    output: str
    spinning: bool
    """Whether the threads of ONNX Runtime spin while they wait: its default, which makes large models faster and takes the
    processors from everything else between the runs of small ones."""
    wait_ms: int
    """How long a server waits for more requests before it runs a batch. Without a wait, the requests of a few clients can remain
    divided into batches of one and of all others. Small models gain nothing from waiting."""

    def rows(self) -> np.ndarray:
        """Returns the inputs, `[INPUTS, *shape]`."""
        random = np.random.default_rng(3)
        if self.datatype == "INT64":
            return random.integers(0, VOCABULARY, (INPUTS, *self.shape), np.int64)
        # Pixels have values from 0 to 16.
        return random.integers(0, 17, (INPUTS, *self.shape)).astype(np.float32)


def all_models(folder: Path) -> list:
    """Returns both models; writes the file of `encoder` into `folder`."""
    path = folder / "encoder.onnx"
    path.write_bytes(encoder())
    return [
        Model("digits", ROOT / "examples/models/digits/1/model.onnx", "image", "FP32", (8, 8), "probabilities", False, 0),
        Model("encoder", path, "tokens", "INT64", (TOKENS,), "logits", True, 1),
    ]


class Graph:
    """Collects the nodes and weights of an ONNX graph."""

    def __init__(self):
        self.random = np.random.default_rng(5)
        self.nodes, self.constants = [], []

    def weight(self, name: str, *shape) -> str:
        """Adds random weights that keep the variance of their input."""
        values = self.random.standard_normal(shape) / np.sqrt(shape[0])
        self.constants.append(onnx.constant(name, "FP32", values.astype(np.float32)))
        return name

    def fixed(self, name: str, datatype: str, values) -> str:
        """Adds a constant array."""
        self.constants.append(onnx.constant(name, datatype, values))
        return name

    def add(self, operator: str, output: str, *inputs, **attributes) -> str:
        """Adds a node with one output."""
        self.nodes.append(onnx.node(operator, list(inputs), [output], **attributes))
        return output


def encoder() -> bytes:
    """Returns the ONNX file of the classifier: tokens `[batch, TOKENS]` to logits `[batch, LABELS]`."""
    graph = Graph()
    for name in ("query", "key", "value", "mixed"):
        graph.weight(name, HIDDEN, HIDDEN)
    graph.weight("widen", HIDDEN, INNER)
    graph.weight("narrow", INNER, HIDDEN)
    graph.fixed("ones", "FP32", np.ones(HIDDEN, np.float32))
    graph.fixed("zeros", "FP32", np.zeros(HIDDEN, np.float32))
    graph.fixed("scale", "FP32", np.array((HIDDEN // HEADS) ** -0.5, np.float32))
    graph.fixed("split", "INT64", np.array([0, TOKENS, HEADS, HIDDEN // HEADS]))
    graph.fixed("join", "INT64", np.array([0, TOKENS, HIDDEN]))
    state = graph.add("Gather", "embedded", graph.weight("embedding", VOCABULARY, HIDDEN), "tokens", axis=0)
    for layer in range(LAYERS):
        state = encoder_layer(graph, f"{layer}_", state)
    mean = graph.add("ReduceMean", "mean", state, axes=[1], keepdims=0)
    graph.add("MatMul", "logits", mean, graph.weight("labels", HIDDEN, LABELS))
    ends = [("tokens", "INT64", ["batch", TOKENS])], [("logits", "FP32", ["batch", LABELS])]
    return onnx.model(graph.nodes, *ends, graph.constants)


def encoder_layer(graph: Graph, name: str, state: str) -> str:
    """Adds attention and a feed-forward network, each with a residual connection and a normalization."""
    heads = {}
    for side, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
        flat = graph.add("MatMul", f"{name}{side}_flat", state, side)
        wide = graph.add("Reshape", f"{name}{side}_split", flat, "split")
        heads[side] = graph.add("Transpose", f"{name}{side}", wide, perm=order)
    scores = graph.add("MatMul", f"{name}scores", heads["query"], heads["key"])
    scores = graph.add("Mul", f"{name}scaled", scores, "scale")
    shares = graph.add("Softmax", f"{name}shares", scores, axis=-1)
    attended = graph.add("MatMul", f"{name}attended", shares, heads["value"])
    attended = graph.add("Transpose", f"{name}attended_back", attended, perm=[0, 2, 1, 3])
    attended = graph.add("Reshape", f"{name}attended_flat", attended, "join")
    state = normalized(graph, f"{name}first", state, graph.add("MatMul", f"{name}attention", attended, "mixed"))
    inner = graph.add("Relu", f"{name}inner", graph.add("MatMul", f"{name}wide", state, "widen"))
    return normalized(graph, f"{name}second", state, graph.add("MatMul", f"{name}narrow", inner, "narrow"))


def normalized(graph: Graph, name: str, state: str, change: str) -> str:
    """Adds the residual connection and its normalization."""
    total = graph.add("Add", f"{name}_sum", state, change)
    return graph.add("LayerNormalization", f"{name}_normalized", total, "ones", "zeros", axis=-1)
