"""Triton's Python backend with dynamic batching: `model.py` of the model.

Triton's Python process ignores `PYTHONPATH`. The environment variable `BENCH_PATH` names this folder and the packages with ONNX
Runtime.
"""

import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path += os.environ["BENCH_PATH"].split(os.pathsep)
from session import Session  # noqa: E402


class TritonPythonModel:
    """The model behind Triton's interface."""

    def initialize(self, args):
        """Loads the model."""
        self.session = Session()

    def execute(self, requests):
        """Runs the requests of a batch in one run."""
        rows = [pb_utils.get_input_tensor_by_name(request, self.session.input).as_numpy() for request in requests]
        output = self.session.run(np.concatenate(rows))
        ends = np.cumsum([len(some) for some in rows])
        parts = np.split(output, ends[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor(self.session.output, part)]) for part in parts]
