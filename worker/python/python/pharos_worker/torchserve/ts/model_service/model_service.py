"""The base classes of handlers of TorchServe's predecessor, Multi Model Server: a model with a signature file, whose inference has
three steps."""

import abc
import ast
import json
import logging
import os
import time


class ModelService:
    """A model whose manifest names a signature: a JSON file with `input_type` and `inputs`."""

    def __init__(self, model_name, model_dir, manifest, gpu=None):
        self.ctx = None
        self._context = None
        self._signature = None

    def initialize(self, context):
        """Reads the signature."""
        self._context = context
        path = os.path.join(context.system_properties.get("model_dir"), context.manifest["Model"]["Signature"])
        if not os.path.isfile(path):
            raise ValueError(f"Signature file is not found: '{path}'")
        with open(path, encoding="utf-8") as file:
            self._signature = json.load(file)

    @abc.abstractmethod
    def inference(self, data):
        """Returns the list of results for a list of inputs."""

    @abc.abstractmethod
    def ping(self):
        """Returns the health of the model as a text."""

    def signature(self):
        """Returns the signature."""
        return self._signature

    def handle(self, data, context):
        """The entry point. Passes the first input of the signature, of the first request, to `inference`."""
        row = data[0]
        name = self._signature["inputs"][0]["data_name"]
        value = next((row[key] for key in (name, "body", "data") if row.get(key) is not None), None)
        if self._signature["input_type"] == "application/json" and isinstance(value, (bytes, bytearray)):
            value = ast.literal_eval(value.decode("utf-8"))
        results = self.inference([value])
        return results if isinstance(results, list) else [results]


class SingleNodeService(ModelService):
    """A model whose inference has three steps."""

    def inference(self, data):
        """Runs the three steps and logs their times."""
        for name, step in (("preprocess", self._preprocess), ("inference", self._inference), ("postprocess", self._postprocess)):
            begun = time.perf_counter()
            data = step(data)
            logging.info("%s time: %.2f", name, (time.perf_counter() - begun) * 1000)
        return data

    @abc.abstractmethod
    def _inference(self, data):
        """Runs the model."""
        return data

    def _preprocess(self, data):
        """Converts requests to inputs of the model."""
        return data

    def _postprocess(self, data):
        """Converts outputs of the model to results."""
        return data
