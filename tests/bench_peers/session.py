"""The ONNX Runtime session of every server in Python, of the limit and of the expected results.

The environment variable `BENCH_MODEL` describes the model as JSON; `describe` writes it. All sessions, also that of Pharos, have
the same number of threads for one operation and the same setting of spinning.
"""

import json
import os

import numpy as np
import onnxruntime

VARIABLE = "BENCH_MODEL"
PROCESSES = "BENCH_PROCESSES"
"""The environment variable with the number of processes that run the model."""
NUMPY = {"FP32": np.float32, "INT64": np.int64}
"""The numpy type of each datatype of the protocol that the models have."""


def describe(model, threads: int) -> str:
    """Returns the value of the environment variable for a model of `models.py`."""
    fields = {name: getattr(model, name) for name in ("name", "input", "datatype", "shape", "output", "spinning", "wait_ms")}
    return json.dumps(fields | {"path": str(model.path), "threads": threads})


def wait_s() -> float:
    """Returns how long a server waits for more requests of a batch, in seconds."""
    return json.loads(os.environ[VARIABLE])["wait_ms"] / 1000


class Session:
    """A session of the model that the environment variable, or `text`, describes."""

    def __init__(self, text: str = ""):
        told = json.loads(text or os.environ[VARIABLE])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = told["threads"]
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(told["spinning"])))
        self.session = onnxruntime.InferenceSession(told["path"], options, providers=["CPUExecutionProvider"])
        self.name, self.input, self.output, self.shape = told["name"], told["input"], told["output"], told["shape"]
        self.type = NUMPY[told["datatype"]]

    def run(self, rows: np.ndarray) -> np.ndarray:
        """Runs the model: inputs `[batch, *shape]` to outputs `[batch, ...]`."""
        return self.session.run([self.output], {self.input: rows})[0]

    def row(self, numbers: list) -> np.ndarray:
        """Returns one row of the input from the numbers of a request."""
        return np.array(numbers, self.type)
