"""Returns where it runs: its process, its environment, its processors, and its arguments."""

import json
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        """Prints the instances that it sees."""
        print("asked with", json.dumps(auto_complete_model_config.as_dict()["instance_group"]), flush=True)
        auto_complete_model_config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [1]})
        auto_complete_model_config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]})
        return auto_complete_model_config

    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        # Long enough that concurrent requests go to other instances.
        time.sleep(0.05)
        place = {
            "pid": os.getpid(),
            "cuda": {name: value for name, value in os.environ.items() if name.startswith("CUDA_")},
            "threads": int(os.environ["OMP_NUM_THREADS"]),
            "cpus": sorted(os.sched_getaffinity(0)),
            "kind": self.args["model_instance_kind"],
            "device": self.args["model_instance_device_id"],
            "instance": self.args["model_instance_name"],
            "config": json.loads(self.args["model_config"])["instance_group"],
        }
        answer = np.array([json.dumps(place)], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", answer)]) for _ in requests]
