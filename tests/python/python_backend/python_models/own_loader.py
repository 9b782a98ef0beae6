"""Loads the model `other`, checks its readiness and unloads it, all in `initialize`; `OUT` is 1 if it was ready."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        pb_utils.load_model("other")
        ready = pb_utils.is_model_ready("other")
        pb_utils.unload_model("other")
        self.well = np.array([1.0 if ready else 0.0], np.float32)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.well)]) for _ in requests]
