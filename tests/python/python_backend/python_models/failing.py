"""Fails in `initialize` or `finalize`: the configuration's parameter `at` selects where and how."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.at = json.loads(args["model_config"])["parameters"]["at"]["string_value"]
        if self.at == "initialize":
            raise ValueError("cannot begin: grün")
        if self.at == "initialize, model exception":
            raise pb_utils.TritonModelException("cannot begin either")
        if self.at == "initialize, exit":
            raise SystemExit(3)
        if self.at == "initialize, in a function":
            self.inner()

    def inner(self):
        raise KeyError("inside")

    def execute(self, requests):
        text = np.array([self.at.encode()], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)]) for _ in requests]

    def finalize(self):
        if self.at == "finalize":
            raise ValueError("cannot end")
