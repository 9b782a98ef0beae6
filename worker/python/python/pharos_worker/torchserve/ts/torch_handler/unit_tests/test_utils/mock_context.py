"""A context for tests of handlers without a server."""

import os
import uuid

from ts.metrics.metrics_store import MetricsStore
from ts.utils.util import get_yaml_config


class MockContext:
    """The parts of a context that `initialize` and `handle` of TorchServe's handlers use."""

    def __init__(
        self,
        model_pt_file="model.pt",
        model_dir="ts/torch_handler/unit_tests/models/tmp",
        model_file="model.py",
        gpu_id="0",
        model_name="mnist",
        model_yaml_config_file=None,
    ):
        named = {"serializedFile": model_pt_file, "modelFile": model_file}
        self.manifest = {"model": {key: value for key, value in named.items() if value}}
        self.system_properties = {"model_dir": model_dir}
        if gpu_id and _has_gpu():
            self.system_properties["gpu_id"] = gpu_id
        self.explain = False
        self.metrics = MetricsStore(uuid.uuid4(), model_name)
        self.model_yaml_config = {}
        if model_yaml_config_file:
            self.model_yaml_config = get_yaml_config(os.path.join(model_dir, model_yaml_config_file))

    def get_request_header(self, idx, exp):
        """Returns whether the test has set `explain`. As in TorchServe, the first request of a batch has no headers."""
        return bool(idx and exp and self.explain)


def _has_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
