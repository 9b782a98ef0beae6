"""Serves gradient-boosted trees of XGBoost: `model.json` or `model.ubj`, as written by `Booster.save_model`.

The model has one FP32 input of rows of features; NaN is a missing value. Outputs by name: `predict`, the result of the
objective; `margin`, the sum before the objective's transformation; `leaf`, the leaf index in each tree; `contributions`, one
for each feature and the bias. Any other name is an alias of `predict`. Parameters of the configuration: `threads` (default 1,
so that instances do not compete for cores) and `iterations` (`BEGIN:END`, the boosting rounds to use; default: up to the best
one if known, else all).
"""

import numpy as np
import triton_python_backend_utils as pb_utils

from pharos_worker.runners import files

ENGINE = None
"""The library version for logs and the served configuration; set when a model is loaded."""
FILES = ("model.json", "model.ubj")
KINDS = {"margin": {"output_margin": True}, "leaf": {"pred_leaf": True}, "contributions": {"pred_contribs": True}}
"""The arguments of `Booster.predict` for each output name."""


def load(directory, config):
    """Loads the trees in the directory of a version."""
    global ENGINE
    xgboost = files.package("xgboost", "xgboost", "a model of XGBoost")
    ENGINE = f"XGBoost {xgboost.__version__}"
    path = files.find(directory, config, FILES)
    booster = xgboost.Booster()
    try:
        booster.load_model(path)
    except xgboost.core.XGBoostError as error:
        raise pb_utils.TritonModelException(f"cannot load {path}: {first_line(error)}") from None
    booster.set_param({"nthread": files.number(config, "threads") or 1})
    return booster


def first_line(error):
    """Returns the first line of an error, without the library's stack trace."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def iterations(config):
    """Returns the boosting rounds to use; `(0, 0)` for the library's default."""
    text = files.parameter(config, "iterations", "0:0")
    begin, _, end = text.partition(":")
    if not (begin.isdigit() and end.isdigit()):
        raise pb_utils.TritonModelException(
            f"the parameter 'iterations' is '{text}'; expected two numbers, such as '0:20'"
        )
    return int(begin), int(end)


class TritonPythonModel:
    """One instance: the trees and their outputs."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        booster = load(pb_utils.get_model_dir(), config)
        features = booster.num_features()
        inputs = [{"name": "input", "data_type": "TYPE_FP32", "dims": [features]}]
        made = booster.inplace_predict(np.zeros((2, features), np.float32))
        outputs = [{"name": "predict", "data_type": "TYPE_FP32", "dims": list(made.shape[1:]) or [1]}]
        return files.complete(auto_complete_model_config, inputs, outputs, 64)

    def initialize(self, args):
        config = files.configuration(args)
        self.booster = load(pb_utils.get_model_dir(), config)
        self.rounds = iterations(config)
        self.batched = config.get("max_batch_size", 0) > 0
        self.inputs = files.names(config, "input")
        if len(self.inputs) != 1:
            raise pb_utils.TritonModelException(
                f"an XGBoost model must have one input; the configuration has {len(self.inputs)}"
            )
        self.outputs = {entry["name"]: entry for entry in config["output"]}
        self.features = self.booster.num_features()

    def execute(self, requests):
        arrays, sizes = files.rows(requests, self.inputs[0])
        wrong = [array.shape for array in arrays if array.ndim != 2 or array.shape[1] != self.features]
        if wrong:
            text = f"input '{self.inputs[0]}' has shape {list(wrong[0])}; the model expects rows of {self.features} features"
            return files.refused(self.execute, requests, text)
        together = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        wanted = {name for request in requests for name in request.requested_output_names()}
        try:
            results = {name: self.result(name, together) for name in self.outputs if name in wanted}
        except ValueError as error:
            # XGBoost's errors are ValueErrors. Infinity is an invalid value.
            return files.refused(self.execute, requests, first_line(error))
        ends = np.cumsum(sizes)
        return [files.part(results, end - size, end, request) for request, size, end in zip(requests, sizes, ends)]

    def result(self, name, values):
        """Returns an output of all rows, with the datatype and dimensions of the configuration."""
        values = np.asarray(values, np.float32)
        if name in KINDS:
            import xgboost

            matrix = xgboost.DMatrix(values, nthread=1)
            made = self.booster.predict(matrix, iteration_range=self.rounds, validate_features=False, **KINDS[name])
        else:
            made = self.booster.inplace_predict(values, iteration_range=self.rounds, validate_features=False)
        entry = self.outputs[name]
        made = made.astype(pb_utils.triton_string_to_numpy(entry["data_type"]), copy=False)
        return files.column(made, entry, self.batched)
