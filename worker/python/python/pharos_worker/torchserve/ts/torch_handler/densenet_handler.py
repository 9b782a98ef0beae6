"""A handler without a base class for image classifiers whose clients send tensors, which `torch.save` has written."""

import importlib
import io
import logging
import os
import time

from ts.utils.util import list_classes_from_module

logger = logging.getLogger(__name__)


class DenseNetHandler:
    """Loads a model and runs it on a batch of equal tensors."""

    def __init__(self):
        self.model = None
        self.device = None
        self.initialized = False
        self.context = None
        self.manifest = None
        self.map_location = None

    def initialize(self, context):
        """Loads the model that the manifest names: `modelFile` with the state in `serializedFile`, or else TorchScript."""
        import torch

        properties = context.system_properties
        gpu_id = properties.get("gpu_id")
        has_gpu = gpu_id is not None and torch.cuda.is_available()
        self.map_location = "cuda" if has_gpu else "cpu"
        self.device = torch.device(f"cuda:{gpu_id}" if has_gpu else "cpu")
        self.manifest = context.manifest
        model_dir, model = properties.get("model_dir"), self.manifest["model"]
        path = os.path.join(model_dir, model["serializedFile"])
        if not os.path.isfile(path):
            raise RuntimeError(f"Missing the model.pt file: '{path}'")
        if model.get("modelFile"):
            self.model = self._load_pickled_model(model_dir, model["modelFile"], path)
        else:
            self.model = self._load_torchscript_model(path)
        self.model.to(self.device)
        self.model.eval()
        logger.debug("loaded %s", path)
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path):
        import torch

        return torch.jit.load(model_pt_path, map_location=self.map_location)

    def _load_pickled_model(self, model_dir, model_file, model_pt_path):
        import torch

        path = os.path.join(model_dir, model_file)
        if not os.path.isfile(path):
            raise RuntimeError(f"Missing the model.py file: '{path}'")
        classes = list_classes_from_module(importlib.import_module(model_file.split(".")[0]))
        if len(classes) != 1:
            raise ValueError(f"Expected only one class as model definition. {classes}")
        model = classes[0]()
        model.load_state_dict(torch.load(model_pt_path, map_location=self.map_location))
        return model

    def inference(self, data, *args, **kwargs):
        """Runs the model on a tensor."""
        import torch

        with torch.no_grad():
            return self.model(data.to(self.device), *args, **kwargs)

    def handle(self, data, context):
        """The entry point. Returns one tensor for the whole batch, so that the batch size must be 1, as in TorchServe."""
        import torch

        begun = time.perf_counter()
        self.context = context
        rows = [torch.load(io.BytesIO(row.get("data") or row.get("body"))) for row in data]
        results = self.inference(torch.stack(rows))
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - begun) * 1000, 2), None, "ms")
        return [results]
