"""Holds as many MiB of the device as the parameter `mib` says, or of the host on processors. Returns the number that it gets plus
one, which it reads from there."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        count = int(config["parameters"]["mib"]["string_value"]) << 18
        if args["model_instance_kind"].endswith("GPU"):
            import torch

            self.held = torch.ones(count, dtype=torch.int32, device=f"cuda:{args['model_instance_device_id']}")
        else:
            self.held = np.ones(count, np.int32)

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        found = np.array([int(given[0]) + int(self.held[-1])], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", found)])
