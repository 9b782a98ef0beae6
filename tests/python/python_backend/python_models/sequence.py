"""Adds up a sequence's values by its correlation ID. `SEEN` has the controls and the properties of the request."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.controls = [control["name"] for control in config["sequence_batching"]["control_input"]]
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, together):
        """Returns the sum up to this request."""
        controls = {name: self.control(request, name) for name in self.controls}
        value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
        key = controls["CORRID"]
        total = float(value.sum()) + (0.0 if controls["START"] else self.sums.get(key, 0.0))
        self.sums[key] = total
        seen = {
            "controls": controls,
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "inputs": sorted(tensor.name() for tensor in request.inputs()),
            "parameters": json.loads(request.parameters()),
            "together": together,
        }
        shape = [1] * value.ndim
        text = np.array([json.dumps(seen, sort_keys=True).encode()], np.object_).reshape(shape)
        out = np.array([total], np.float32).reshape(shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out), pb_utils.Tensor("SEEN", text)])

    def control(self, request, name):
        """Returns the value of a control."""
        value = pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0]
        return value.decode() if isinstance(value, bytes) else int(value)
