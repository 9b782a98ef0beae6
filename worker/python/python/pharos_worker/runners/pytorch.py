"""Serves PyTorch files without code: TorchScript (`model.pt`) and files of `torch.export.save` (`model.pt2`).

As in Triton's backend for LibTorch, the configured inputs are matched to the arguments of `forward`: by name if all names are
argument names, by position if all have the form `NAME__0`, otherwise in order. Outputs are matched by `NAME__0`, by key if the
model returns a dictionary, otherwise in order. BYTES tensors become one-dimensional lists of strings.

Parameters, with Triton's names: `INFERENCE_MODE` (default true), `DISABLE_OPTIMIZED_EXECUTION`,
`INTRA_OP_THREAD_COUNT`, `INTER_OP_THREAD_COUNT` (default: the instance's share of the CPUs),
`ENABLE_CACHE_CLEANING`.

A TorchScript file is code, and a `.pt2` file may execute some: serve only files that you trust.
"""

import contextlib
import re
import warnings

import numpy as np
import triton_python_backend_utils as pb_utils

from pharos_worker import _native
from pharos_worker.runners import files

ENGINE = None
"""The library version for logs and the served configuration; set when a model is loaded."""
DEVICE_TENSORS = True
"""The model takes inputs of clients in device memory."""
FILES = ("model.pt", "model.pt2")
POSITION = re.compile(r".*__(\d+)$")
BYTES = 13
"""The number of the datatype BYTES."""
LARGEST_BATCH = 64
"""The largest batch size, unless it is configured."""
UNLIMITED = 2**31 - 1
"""The largest value of max_batch_size."""
PROBES = (2, 3)
"""The size of dynamic dimensions in a trial run that determines the outputs."""
TYPES = {
    "TYPE_BOOL": "bool", "TYPE_UINT8": "uint8", "TYPE_INT8": "int8", "TYPE_INT16": "int16", "TYPE_INT32": "int32",
    "TYPE_INT64": "int64", "TYPE_FP16": "float16", "TYPE_BF16": "bfloat16", "TYPE_FP32": "float32", "TYPE_FP64":
    "float64", "TYPE_UINT16": "uint16", "TYPE_UINT32": "uint32", "TYPE_UINT64": "uint64",
}  # fmt: skip
"""The torch types of the datatypes in a configuration; BYTES has none."""


class Script:
    """A TorchScript module on a device."""

    def __init__(self, torch, path, device):
        with warnings.catch_warnings():
            # Newer versions warn that TorchScript is deprecated; the operator of a server cannot change the model's format.
            warnings.simplefilter("ignore", FutureWarning)
            self.module = torch.jit.load(str(path), map_location=device).eval()
        self.arguments = [argument.name for argument in self.module.forward.schema.arguments[1:]]

    def inputs(self):
        """Returns no inputs: a TorchScript file contains neither datatypes nor shapes."""
        return []

    def largest_batch(self):
        """Returns 0: a TorchScript file does not say whether it batches."""
        return 0

    def call(self, values):
        """Returns the model's result; `values` has the value of each argument, in order."""
        return self.module(**values)


class Exported:
    """A program of `torch.export` on a device."""

    def __init__(self, torch, path, device):
        if not hasattr(torch, "export"):
            raise pb_utils.TritonModelException(
                f"{path} needs PyTorch 2.1 or newer; the installed version is {torch.__version__}"
            )
        self.program = torch.export.load(str(path))
        if {device.type, *self.places()} != {"cpu"}:
            # Also a program of a GPU to the processor, where its outputs are determined.
            from torch.export.passes import move_to_device_pass

            self.program = move_to_device_pass(self.program, device)
        self.torch, self.module = torch, self.program.module()
        self.arguments = list(self.program.graph_signature.user_inputs)
        positional, keywords = self.program.call_spec.in_spec.children()
        self.positional = positional.num_children
        if positional.num_leaves + keywords.num_leaves != positional.num_children + keywords.num_children:
            raise pb_utils.TritonModelException(f"{path} takes lists or dictionaries; only tensors are supported as inputs")
        # Keywords may be renamed in the graph; the signature has the names for calls.
        self.keywords = list(keywords.context or [])
        self.arguments = self.arguments[: self.positional] + self.keywords

    def places(self):
        """Returns the kinds of devices that the program was exported on: those of its inputs, weights and buffers."""
        values = [node.meta.get("val") for node in self.program.graph.nodes if node.op == "placeholder"]
        return {value.device.type for value in values if hasattr(value, "device")}

    def inputs(self):
        """Returns the inputs with datatype and shape; dynamic dimensions are -1."""
        nodes = {node.name: node.meta["val"] for node in self.program.graph.nodes if node.op == "placeholder"}
        user = self.program.graph_signature.user_inputs
        found = []
        for name, node in zip(self.arguments, user):
            value = nodes[node]
            dims = [int(size) if isinstance(size, int) else -1 for size in value.shape]
            found.append({"name": name, "data_type": type_name(value.dtype), "dims": dims})
        return found

    def largest_batch(self):
        """Returns the largest number of rows that all first dimensions allow; 0 if one of them is fixed."""
        nodes = {node.name: node.meta["val"] for node in self.program.graph.nodes if node.op == "placeholder"}
        largest = UNLIMITED
        for name in self.program.graph_signature.user_inputs:
            first = nodes[name].shape[0] if nodes[name].dim() else 1
            if isinstance(first, int):
                return 0
            allowed = self.program.range_constraints.get(first.node.expr)
            if allowed is not None:
                # An unlimited dimension is infinite, which cannot be converted to an integer.
                largest = int(min(largest, allowed.upper)) if allowed.lower <= 1 else 0
        return largest

    def call(self, values):
        """Returns the model's result; `values` has the value of each argument, in order."""
        positional = [values[name] for name in self.arguments[: self.positional]]
        return self.module(*positional, **{name: values[name] for name in self.keywords})


def type_name(dtype):
    """Returns the name of a torch type in a configuration."""
    known = {name: triton for triton, name in TYPES.items()}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise pb_utils.TritonModelException(f"tensors of type {name} are not supported; allowed are {', '.join(known)}")
    return known[name]


def load(directory, config, device):
    """Loads the model in the directory of a version on a device such as `cpu` or `cuda:0`."""
    global ENGINE
    torch = files.package("torch", "torch", "a PyTorch file")
    ENGINE = f"PyTorch {torch.__version__}"
    path = files.find(directory, config, FILES)
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pb_utils.TritonModelException(
            f"model '{config.get('name', '')}' needs {device}, but this PyTorch ({torch.__version__}) finds no GPU"
        )
    try:
        return torch, (Exported if path.suffix == ".pt2" else Script)(torch, path, device)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        text = str(error).strip().splitlines()
        raise pb_utils.TritonModelException(
            f"cannot load {path}: {text[0] if text else type(error).__name__}"
        ) from None


def matched(names, arguments):
    """Returns the argument of each input. The error lists both the inputs and the arguments."""
    if all(name in arguments for name in names):
        return {name: name for name in names}
    places = [POSITION.fullmatch(name) for name in names]
    if all(places):
        numbers = [int(place[1]) for place in places]
        if sorted(numbers) == list(range(len(numbers))) and len(numbers) <= len(arguments):
            return {name: arguments[number] for name, number in zip(names, numbers)}
    elif len(names) <= len(arguments):
        return dict(zip(names, arguments))
    raise pb_utils.TritonModelException(
        f"the inputs {', '.join(names)} do not match the model's forward({', '.join(arguments)}): use these names, or "
        f"NAME__0 to NAME__{len(arguments) - 1}"
    )


def chosen(result, names):
    """Returns the tensors of a result by output name. The result is a tensor, a tuple, a list or a dictionary."""
    if isinstance(result, dict):
        missing = [name for name in names if name not in result]
        if missing:
            raise pb_utils.TritonModelException(f"the model returns {', '.join(result)}, but not {', '.join(missing)}")
        return {name: result[name] for name in names}
    texts = isinstance(result, list) and all(isinstance(item, str) for item in result)
    several = list(result) if isinstance(result, (tuple, list)) and not texts else [result]
    places = [POSITION.fullmatch(name) for name in names]
    numbers = [int(place[1]) for place in places] if all(places) else range(len(names))
    if max(numbers, default=0) >= len(several):
        raise pb_utils.TritonModelException(
            f"the model returns {len(several)} outputs, but the configuration has {len(names)}"
        )
    return {name: several[number] for name, number in zip(names, numbers)}


def as_torch(torch, tensor, device):
    """Converts an input to torch, without copying if it is on the device."""
    if tensor.triton_dtype() == BYTES:
        return texts_of(tensor.as_numpy())
    try:
        value = torch.from_dlpack(tensor)
    except (RuntimeError, TypeError, BufferError):
        # Older versions of torch do not accept BOOL through DLPack.
        with warnings.catch_warnings():
            # The array may be read-only, but this request is its only user.
            warnings.simplefilter("ignore")
            value = torch.from_numpy(tensor.as_numpy())
    return value.to(device, non_blocking=True)


def texts_of(array):
    """Returns a one-dimensional BYTES tensor, apart from the batch dimension, as a list of strings."""
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array.ravel()]


def as_output(name, value):
    """Returns the output for a tensor or a list of strings."""
    if isinstance(value, (list, tuple)):
        return pb_utils.Tensor(name, np.array([text.encode() for text in value], np.object_))
    value = value.detach().contiguous()
    if value.device.type != "cpu":
        # The native part copies it to the server's memory.
        try:
            return pb_utils.Tensor.from_dlpack(name, value)
        except (RuntimeError, TypeError, BufferError):
            # As in `as_torch`.
            value = value.cpu()
    if str(value.dtype) == "torch.bfloat16":
        return pb_utils.Tensor.from_dlpack(name, value)
    return pb_utils.Tensor(name, value.numpy())


def zeros(torch, entries, batched, probe):
    """Returns inputs for a trial run: zeros, with size `probe` for each dynamic dimension."""
    found = {}
    for entry in entries:
        dims = [probe if int(dim) < 0 else int(dim) for dim in entry["dims"]]
        shape = [probe, *dims] if batched else dims
        if entry["data_type"] not in TYPES:
            raise pb_utils.TritonModelException(
                f"cannot determine the outputs for {entry['data_type']} inputs; configure the outputs"
            )
        found[entry["name"]] = torch.zeros(shape, dtype=getattr(torch, TYPES[entry["data_type"]]))
    return found


def outputs_of(result):
    """Returns a result's tensors by name: the keys of a dictionary, else `OUTPUT__0` and so on."""
    if isinstance(result, dict):
        return dict(result)
    several = result if isinstance(result, (tuple, list)) else [result]
    return {f"OUTPUT__{place}": value for place, value in enumerate(several)}


def tried(torch, model, entries, batched):
    """Returns the outputs as found by trial runs with zeros of two sizes. Dimensions that differ between the two are -1."""
    names = matched([entry["name"] for entry in entries], model.arguments)
    results = []
    for probe in PROBES:
        values = {names[name]: value for name, value in zeros(torch, entries, batched, probe).items()}
        with torch.no_grad():
            results.append(outputs_of(model.call(values)))
    found = []
    for name, first in results[0].items():
        dims = [a if a == b else -1 for a, b in zip(first.shape, results[1][name].shape)]
        found.append({"name": name, "data_type": type_name(first.dtype), "dims": dims[1:] if batched else dims})
    return found


class Copies:
    """Measures copies of inputs to a device, with events in the stream of the copies."""

    def __init__(self, torch, device):
        self.stream = lambda: torch.cuda.current_stream(device)
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.timed = False

    @contextlib.contextmanager
    def timing(self):
        """Measures the copies made in the context."""
        self.began.record(self.stream())
        yield
        self.ended.record(self.stream())
        self.timed = True

    def report(self):
        """Reports the measured time of a batch once. Requires that the device has completed the copies."""
        if self.timed:
            _native.inputs_took(self.began.elapsed_time(self.ended) / 1000)
        self.timed = False


class TritonPythonModel:
    """One instance: a model on its device."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        if config.get("input") and config.get("output"):
            return auto_complete_model_config
        torch, model = load(pb_utils.get_model_dir(), config, "cpu")
        entries, batch = config.get("input") or model.inputs(), config.get("max_batch_size", 0)
        if not entries:
            raise pb_utils.TritonModelException(
                "a TorchScript file contains neither datatypes nor shapes; name its inputs in config.pbtxt "
                f"({', '.join(model.arguments)}), or serve a torch.export file"
            )
        if not config.get("input"):
            largest = model.largest_batch()
            batch = batch or (min(largest, LARGEST_BATCH) if not config.get("output") else 0)
            if batch > largest:
                raise pb_utils.TritonModelException(
                    f"max_batch_size is {batch}, but the program takes at most {largest} rows"
                )
        if not config.get("input") and batch:
            # All inputs share a dynamic first dimension: the batch.
            if config.get("max_batch_size"):
                auto_complete_model_config.set_max_batch_size(batch)
            else:
                files.batch_together(auto_complete_model_config, batch)
            entries = [{**entry, "dims": entry["dims"][1:]} for entry in entries]
        if not config.get("input"):
            for entry in entries:
                auto_complete_model_config.add_input(entry)
        if not config.get("output"):
            for entry in tried(torch, model, entries, bool(batch)):
                auto_complete_model_config.add_output(entry)
        return auto_complete_model_config

    def initialize(self, args):
        config = files.configuration(args)
        kind, number = args["model_instance_kind"], args["model_instance_device_id"]
        self.device = f"cuda:{number}" if kind.endswith("GPU") else "cpu"
        self.torch, self.model = load(pb_utils.get_model_dir(), config, self.device)
        self.set_threads(config)
        self.batched = config.get("max_batch_size", 0) > 0
        self.arguments = matched(files.names(config, "input"), self.model.arguments)
        self.outputs = files.names(config, "output")
        self.inference = files.switch(config, "INFERENCE_MODE", True)
        self.optimized = not files.switch(config, "DISABLE_OPTIMIZED_EXECUTION", False)
        self.cleans = files.switch(config, "ENABLE_CACHE_CLEANING", False) and self.device != "cpu"
        self.copies = Copies(self.torch, self.device) if self.device != "cpu" else None

    def set_threads(self, config):
        """Sets the number of threads within an operation and across operations."""
        intra, inter = files.number(config, "INTRA_OP_THREAD_COUNT"), files.number(config, "INTER_OP_THREAD_COUNT")
        if intra:
            self.torch.set_num_threads(intra)
        self.torch.set_num_interop_threads(inter or 1)

    def execute(self, requests):
        inputs = [{name: pb_utils.get_input_tensor_by_name(r, name) for name in self.arguments} for r in requests]
        try:
            found = chosen(self.called(inputs), self.outputs)
            return self.answers(requests, inputs, found)
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            if len(requests) > 1:
                # One request's values may have caused the error: execute each request alone.
                return [self.execute([request])[0] for request in requests]
            # Assertions of an exported program check the shapes of its inputs.
            code = (
                pb_utils.TritonError.INVALID_ARG if isinstance(error, AssertionError) else pb_utils.TritonError.INTERNAL
            )
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(last_line(error), code))]
        finally:
            self.finish()

    def called(self, inputs):
        """Calls the model with these inputs of all requests."""
        with self.copies.timing() if self.copies else contextlib.nullcontext():
            values = {self.arguments[name]: self.together([given[name] for given in inputs]) for name in self.arguments}
        with self.mode():
            return self.model.call({argument: value for argument, value in values.items() if value is not None})

    def finish(self):
        """Waits for the device, which reads the requests' memory: that memory is reused after they are answered."""
        if self.device != "cpu":
            self.torch.cuda.current_stream(self.device).synchronize()
            self.copies.report()
        if self.cleans:
            self.torch.cuda.empty_cache()

    @contextlib.contextmanager
    def mode(self):
        """Disables gradients, and applies the configured optimizations."""
        with self.torch.inference_mode() if self.inference else self.torch.no_grad():
            with self.torch.jit.optimized_execution(self.optimized):
                yield

    def together(self, tensors):
        """Joins an input of all requests; None if a request omits it."""
        if any(tensor is None for tensor in tensors):
            return None
        values = [as_torch(self.torch, tensor, self.device) for tensor in tensors]
        if len(values) == 1:
            return values[0]
        return sum(values, []) if isinstance(values[0], list) else self.torch.cat(values)

    def answers(self, requests, inputs, found):
        """Returns a response for each request, with its rows of the requested outputs."""
        if len(requests) == 1:
            return [answer(requests[0], found)]
        sizes = [next(tensor for tensor in given.values() if tensor is not None).shape()[0] for given in inputs]
        for name, value in found.items():
            rows = 0 if getattr(value, "ndim", 1) == 0 else len(value)
            if rows != sum(sizes):
                raise ValueError(f"output '{name}' has {rows} rows for a batch of {sum(sizes)}")
        ends = np.cumsum(sizes)
        parts = [{name: value[end - size : end] for name, value in found.items()} for size, end in zip(sizes, ends)]
        return [answer(request, part) for request, part in zip(requests, parts)]


def answer(request, found):
    """Returns the response with the outputs that a request asks for."""
    wanted = request.requested_output_names()
    return pb_utils.InferenceResponse([as_output(name, value) for name, value in found.items() if name in wanted])


def last_line(error):
    """Returns the last line of a model's error, without the stack trace that TorchScript puts first."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
