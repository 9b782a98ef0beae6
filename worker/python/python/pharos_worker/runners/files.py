"""What the runners share: finding a model's file, asking for its package, and a configuration's parameters."""

import importlib
import json
from pathlib import Path

import triton_python_backend_utils as pb_utils


SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


def configuration(args):
    """The model's configuration of `initialize`'s arguments."""
    return json.loads(args["model_config"])


def parameter(config, name, default=""):
    """A parameter of a configuration as text."""
    return config.get("parameters", {}).get(name, {}).get("string_value", default)


def switch(config, name, default):
    """A parameter that is `true` or `false`."""
    text = parameter(config, name, "true" if default else "false").lower()
    if text not in ("true", "false"):
        raise pb_utils.TritonModelException(f"the parameter '{name}' is '{text}', it must be 'true' or 'false'")
    return text == "true"


def number(config, name):
    """A parameter that is a positive whole number, nothing if it is not there."""
    text = parameter(config, name)
    if text and not (text.isdigit() and int(text)):
        raise pb_utils.TritonModelException(f"the parameter '{name}' is '{text}', it must be a whole number from 1 on")
    return int(text) if text else None


def package(module, distribution, what):
    """Imports the package that runs a kind of file, or says how to get it."""
    import sys

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise pb_utils.TritonModelException(
            f"{what} needs the Python package '{distribution}', which {sys.executable} does not have ({error}): "
            f"run '{sys.executable} -m pip install {distribution}'"
        ) from None


def find(directory, config, names):
    """The model's file in its version's directory: what `default_model_filename` names, the first of `names` if it names
    nothing or one of them."""
    named = config.get("default_model_filename")
    wanted = list(names) if not named else [named, *(name for name in names if name != named and named in names)]
    found = next((Path(directory, name) for name in wanted if Path(directory, name).is_file()), None)
    if found is None:
        raise pb_utils.TritonModelException(
            f"model '{config.get('name', '')}' has no file in {directory}: one of {', '.join(wanted)} must be there"
        )
    return found


def names(config, kind):
    """The names of a configuration's inputs or outputs in order."""
    return [entry["name"] for entry in config.get(kind, [])]


def complete(config, inputs, outputs, batch):
    """Adds what a configuration leaves open: all inputs if it names none, all outputs if it names none; the largest
    batch and dynamic batching only then, since dimensions that are told without it would mean something else with it."""
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
    """Sets the largest batch, and the dynamic batcher unless a scheduler is chosen: as for ONNX models, a batch size that
    is filled in would be of no use without it."""
    config.set_max_batch_size(batch)
    if batch > 1 and not any(config.as_dict().get(name) is not None for name in SCHEDULERS):
        config.set_dynamic_batching()


def rows(requests, name):
    """The tensors of this name of all requests, and how many rows each has."""
    arrays = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
    return arrays, [len(array) for array in arrays]


def column(made, entry, batched):
    """An output with the dimensions of its entry in the configuration: where that has one more, each row has one element."""
    dims = len(entry["dims"]) + (1 if batched else 0)
    return made.reshape(made.shape[0], 1) if made.ndim + 1 == dims else made


def part(results, begin, end, request):
    """A request's rows of each output that it asks for, of the outputs of all rows by name."""
    wanted = request.requested_output_names()
    tensors = [pb_utils.Tensor(name, made[begin:end]) for name, made in results.items() if name in wanted]
    return pb_utils.InferenceResponse(tensors)
