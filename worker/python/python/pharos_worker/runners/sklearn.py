"""Serves scikit-learn models: an estimator or a pipeline in a joblib file (`model.joblib` or `model.pkl`).

The model has one input of numbers, or of strings for pipelines that accept them, with one row for each example. An output with
the name of a method (`predict`, `predict_proba`, `predict_log_proba`, `decision_function`, `transform`) contains the result of
that method; any other output contains the result of `predict`. Each method is called once for all requests of a batch.

A joblib file is a pickle, and loading it can execute arbitrary code. Serve only files that you trust.
"""

import warnings

import numpy as np
import triton_python_backend_utils as pb_utils

from pharos_worker.runners import files

ENGINE = None
"""The library version for logs and the served configuration; set when a model is loaded."""
FILES = ("model.joblib", "model.pkl")
NO_NAMES = "X does not have valid feature names"
"""The start of the warning of an estimator that was fitted with named columns and gets an array."""
LONGEST = 1000
"""The maximum number of characters of the listed features in the log."""
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "transform")


def load(directory, config):
    """Loads the estimator in the directory of a version."""
    global ENGINE
    sklearn = files.package("sklearn", "scikit-learn", "a model of scikit-learn")
    joblib = files.package("joblib", "joblib", "a model of scikit-learn")
    ENGINE = f"scikit-learn {sklearn.__version__}"
    path = files.find(directory, config, FILES)
    try:
        return joblib.load(path)
    except Exception as error:
        # A pickle can raise any exception; the error must name the file.
        raise pb_utils.TritonModelException(f"cannot load {path}: {type(error).__name__}: {error}") from None


def accept_rows_without_names(estimator):
    """Logs once that columns are taken by position if the estimator was fitted with a table of named columns. Otherwise
    scikit-learn warns at each call: its own `warnings.catch_warnings` makes Python forget which warnings it has shown."""
    warnings.filterwarnings("ignore", NO_NAMES, UserWarning)
    names = getattr(estimator, "feature_names_in_", None)
    if names is not None:
        listed = ", ".join(map(str, names))
        pb_utils.Logger.log_info(f"the columns of the input are, in this order, the features {shortened(listed)}")


def shortened(text):
    """Returns a text that fits into a line of the log."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def method_of(name):
    """Returns the method whose result an output contains."""
    return name if name in METHODS else "predict"


def triton_type(dtype):
    """Returns the name of a numpy type in a configuration."""
    if dtype.kind in "OUS":
        return "TYPE_STRING"
    return {"b": "TYPE_BOOL", "f": "TYPE_FP", "i": "TYPE_INT", "u": "TYPE_UINT"}[dtype.kind] + (
        "" if dtype.kind == "b" else str(dtype.itemsize * 8)
    )


def example(estimator):
    """Returns two rows of zeros that fit the estimator."""
    return np.zeros((2, estimator.n_features_in_), np.float32)


class TritonPythonModel:
    """One instance: an estimator and the methods of its outputs."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        estimator = load(pb_utils.get_model_dir(), config)
        warnings.filterwarnings("ignore", NO_NAMES, UserWarning)
        features = getattr(estimator, "n_features_in_", None)
        if features is None:
            # The number of inputs is unknown, for example of a pipeline over texts.
            return auto_complete_model_config
        inputs = [{"name": "input", "data_type": "TYPE_FP32", "dims": [int(features)]}]
        outputs = []
        for method in ("predict", "predict_proba", "transform"):
            if hasattr(estimator, method):
                made = np.asarray(getattr(estimator, method)(example(estimator)))
                outputs.append(
                    {"name": method, "data_type": triton_type(made.dtype), "dims": list(made.shape[1:]) or [1]}
                )
        return files.complete(auto_complete_model_config, inputs, outputs, 64)

    def initialize(self, args):
        config = files.configuration(args)
        self.estimator = load(pb_utils.get_model_dir(), config)
        accept_rows_without_names(self.estimator)
        self.batched = config.get("max_batch_size", 0) > 0
        self.inputs = files.names(config, "input")
        if len(self.inputs) != 1:
            raise pb_utils.TritonModelException(
                f"a scikit-learn model must have one input; the configuration has {len(self.inputs)}"
            )
        self.outputs = {entry["name"]: entry for entry in config["output"]}
        for name in self.outputs:
            if not hasattr(self.estimator, method_of(name)):
                raise pb_utils.TritonModelException(
                    f"output '{name}': a {type(self.estimator).__name__} has no method '{method_of(name)}'"
                )

    def execute(self, requests):
        arrays, sizes = files.rows(requests, self.inputs[0])
        wanted = {name for request in requests for name in request.requested_output_names()}
        try:
            together = self.readable(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
            results = {name: self.result(name, together) for name in self.outputs if name in wanted}
        except ValueError as error:
            # Invalid values, such as NaN, a wrong number of features, or a string that is not UTF-8.
            return files.refused(self.execute, requests, str(error))
        ends = np.cumsum(sizes)
        return [files.part(results, end - size, end, request) for request, size, end in zip(requests, sizes, ends)]

    def readable(self, values):
        """Decodes strings; returns a column of strings as the list that vectorizers expect."""
        if values.dtype != np.object_:
            return values
        texts = np.array([v.decode() if isinstance(v, bytes) else v for v in values.ravel()], np.object_)
        return texts if not hasattr(self.estimator, "n_features_in_") else texts.reshape(values.shape)

    def result(self, name, values):
        """Returns an output of all rows, with the datatype and dimensions of the configuration."""
        made = np.asarray(getattr(self.estimator, method_of(name))(values))
        entry = self.outputs[name]
        dtype = np.dtype(pb_utils.triton_string_to_numpy(entry["data_type"]))
        made = made if made.dtype == dtype else made.astype(dtype)
        return files.column(made, entry, self.batched)
