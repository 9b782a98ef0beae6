"""Helpers of the runners: finding a model's file, importing its package, reading parameters of the configuration."""

import importlib
import json
from pathlib import Path

import triton_python_backend_utils as pb_utils


SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


def configuration(args):
    """Returns the model configuration in the arguments of `initialize`."""
    return json.loads(args["model_config"])


def parameter(config, name, default=""):
    """Returns a parameter of a configuration as a string."""
    return config.get("parameters", {}).get(name, {}).get("string_value", default)


def switch(config, name, default):
    """Returns a parameter that must be `true` or `false`."""
    text = parameter(config, name, "true" if default else "false").lower()
    if text not in ("true", "false"):
        raise pb_utils.TritonModelException(f"the parameter '{name}' is '{text}'; allowed are 'true' and 'false'")
    return text == "true"


def number(config, name):
    """Returns a parameter that must be a positive integer; None if it is not set."""
    text = parameter(config, name)
    if text and not (text.isdigit() and int(text)):
        raise pb_utils.TritonModelException(f"the parameter '{name}' is '{text}'; allowed are whole numbers from 1")
    return int(text) if text else None


def package(module, distribution, what):
    """Imports the package that runs a kind of file. The error of a missing package says how to install it."""
    import sys

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise pb_utils.TritonModelException(
            f"{what} needs the Python package '{distribution}', which {sys.executable} does not have ({error}): "
            f"run '{sys.executable} -m pip install {distribution}'"
        ) from None


def find(directory, config, names):
    """Finds the model's file in the directory of its version: the one named by `default_model_filename`, else the first of
    `names` that exists. If the configured name is one of `names`, the others are tried too."""
    named = config.get("default_model_filename")
    wanted = list(names) if not named else [named, *(name for name in names if name != named and named in names)]
    found = next((Path(directory, name) for name in wanted if Path(directory, name).is_file()), None)
    if found is None:
        raise pb_utils.TritonModelException(
            f"model '{config.get('name', '')}' has no file in {directory}: expected one of {', '.join(wanted)}"
        )
    return found


def names(config, kind):
    """Returns the names of a configuration's inputs or outputs in order."""
    return [entry["name"] for entry in config.get(kind, [])]


def complete(config, inputs, outputs, batch):
    """Fills in what the configuration omits: the inputs or outputs if it names none. Sets the largest batch size and dynamic
    batching only if it omits all three, because batching changes the meaning of configured dimensions."""
    given = config.as_dict()
    if not given.get("input") and not given.get("output") and not given.get("max_batch_size"):
        batch_together(config, batch)
        batched = bool(batch)
    else:
        batched = bool(given.get("max_batch_size"))
    for kind, entries, add in [("input", inputs, config.add_input), ("output", outputs, config.add_output)]:
        for entry in [] if given.get(kind) else entries:
            dims = entry["dims"] if batched else [-1, *entry["dims"]]
            add({**entry, "dims": dims})
    return config


def batch_together(config, batch):
    """Sets the largest batch size, and enables the dynamic batcher unless a scheduler is configured. As for ONNX models,
    batching would not happen without it."""
    config.set_max_batch_size(batch)
    if batch > 1 and not any(config.as_dict().get(name) is not None for name in SCHEDULERS):
        config.set_dynamic_batching()


def rows(requests, name):
    """Returns the tensors of this name of all requests, and the number of rows of each."""
    arrays = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
    return arrays, [len(array) for array in arrays]


def column(made, entry, batched):
    """Reshapes an output to the dimensions of its entry in the configuration: adds a dimension of size 1 if that has one more."""
    dims = len(entry["dims"]) + (1 if batched else 0)
    return made.reshape(made.shape[0], 1) if made.ndim + 1 == dims else made


def refused(execute, requests, text):
    """Returns the responses to requests that have an invalid value: an error with this text to a single one. Several are executed
    alone, because the value may be that of one."""
    if len(requests) > 1:
        return [execute([request])[0] for request in requests]
    error = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
    return [pb_utils.InferenceResponse(error=error)]


def part(results, begin, end, request):
    """Returns a request's rows of each output that it requests."""
    wanted = request.requested_output_names()
    tensors = [pb_utils.Tensor(name, made[begin:end]) for name, made in results.items() if name in wanted]
    return pb_utils.InferenceResponse(tensors)
