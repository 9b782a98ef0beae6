"""Answers with the arguments of `initialize` as JSON, and writes to the log at every level."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.given = {**args, "model_config": json.loads(args["model_config"])}
        for level in ("info", "warn", "error", "verbose"):
            getattr(pb_utils.Logger, f"log_{level}")(f"said at level {level}")
        pb_utils.Logger.log("said at a level by name", pb_utils.Logger.WARNING)
        print("printed by the model", flush=True)

    def execute(self, requests):
        text = np.array([json.dumps(self.given).encode()], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)]) for _ in requests]

    def finalize(self):
        print("finalized by the model", flush=True)
