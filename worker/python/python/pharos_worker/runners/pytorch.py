"""Serves PyTorch files without code: TorchScript (`model.pt`) and what `torch.export.save` writes (`model.pt2`).

A configuration's inputs are matched to `forward` as Triton's backend for LibTorch does: all names are names of its
arguments, or all are of the form `NAME__0` (the position), or else they are meant in their order. Outputs are matched
by `NAME__0`, by key where the model gives a dictionary, else in their order. BYTES are lists of texts, of one
dimension.

Parameters, with Triton's names: `INFERENCE_MODE` (default true), `DISABLE_OPTIMIZED_EXECUTION`,
`INTRA_OP_THREAD_COUNT`, `INTER_OP_THREAD_COUNT` (default: what the server gives each instance),
`ENABLE_CACHE_CLEANING`.

A TorchScript file is code, and a `.pt2` file may run some: serve only files that you trust.
"""

import contextlib
import re
import warnings

import numpy as np
import triton_python_backend_utils as pb_utils

from pharos_worker import _native
from pharos_worker.runners import files

ENGINE = None
"""What computes, for logs and the served configuration; known once a model is loaded."""
DEVICE_TENSORS = True
"""Inputs that clients have on a device are taken there."""
FILES = ("model.pt", "model.pt2")
POSITION = re.compile(r".*__(\d+)$")
BYTES = 13
"""The number of the datatype of texts."""
LARGEST_BATCH = 64
"""The largest batch that is asked for unless the configuration does."""
UNLIMITED = 2**31 - 1
"""The largest number that a configuration can have there."""
PROBES = (2, 3)
"""What stands for a dimension that is not fixed, when a model is tried out to see what it gives."""
TYPES = {
    "TYPE_BOOL": "bool", "TYPE_UINT8": "uint8", "TYPE_INT8": "int8", "TYPE_INT16": "int16", "TYPE_INT32": "int32",
    "TYPE_INT64": "int64", "TYPE_FP16": "float16", "TYPE_BF16": "bfloat16", "TYPE_FP32": "float32", "TYPE_FP64":
    "float64", "TYPE_UINT16": "uint16", "TYPE_UINT32": "uint32", "TYPE_UINT64": "uint64",
}  # fmt: skip
"""Datatypes of a configuration and their names in torch; texts have none."""


class Script:
    """A TorchScript module on a device."""

    def __init__(self, torch, path, device):
        with warnings.catch_warnings():
            # Newer versions say that TorchScript is deprecated, which who serves such a file cannot mend.
            warnings.simplefilter("ignore", FutureWarning)
            self.module = torch.jit.load(str(path), map_location=device).eval()
        self.arguments = [argument.name for argument in self.module.forward.schema.arguments[1:]]

    def inputs(self):
        """Nothing: such a file says neither datatypes nor shapes."""
        return []

    def largest_batch(self):
        """Whether it batches is told as well."""
        return 0

    def call(self, values):
        """The model's result; `values` by argument, in order."""
        return self.module(**values)


class Exported:
    """A program of `torch.export` on a device."""

    def __init__(self, torch, path, device):
        if not hasattr(torch, "export"):
            raise pb_utils.TritonModelException(f"{path} needs PyTorch 2.1 or newer, here is {torch.__version__}")
        self.program = torch.export.load(str(path))
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            self.program = move_to_device_pass(self.program, device)
        self.torch, self.module = torch, self.program.module()
        self.arguments = list(self.program.graph_signature.user_inputs)
        positional, keywords = self.program.call_spec.in_spec.children()
        self.positional = positional.num_children
        if positional.num_leaves + keywords.num_leaves != positional.num_children + keywords.num_children:
            raise pb_utils.TritonModelException(f"{path} takes lists or dictionaries; only tensors can be inputs")
        # The names of keywords in the graph may have been changed, those in the signature are what is called.
        self.keywords = list(keywords.context or [])
        self.arguments = self.arguments[: self.positional] + self.keywords

    def inputs(self):
        """The inputs with datatype and shape; a dimension that may change is -1."""
        nodes = {node.name: node.meta["val"] for node in self.program.graph.nodes if node.op == "placeholder"}
        user = self.program.graph_signature.user_inputs
        found = []
        for name, node in zip(self.arguments, user):
            value = nodes[node]
            dims = [int(size) if isinstance(size, int) else -1 for size in value.shape]
            found.append({"name": name, "data_type": type_name(value.dtype), "dims": dims})
        return found

    def largest_batch(self):
        """How many rows may go together: what all first dimensions allow; 0 if one of them is fixed."""
        nodes = {node.name: node.meta["val"] for node in self.program.graph.nodes if node.op == "placeholder"}
        largest = UNLIMITED
        for name in self.program.graph_signature.user_inputs:
            first = nodes[name].shape[0] if nodes[name].dim() else 1
            if isinstance(first, int):
                return 0
            allowed = self.program.range_constraints.get(first.node.expr)
            if allowed is not None:
                # An unlimited one is infinite, which has no whole number.
                largest = int(min(largest, allowed.upper)) if allowed.lower <= 1 else 0
        return largest

    def call(self, values):
        """The model's result; `values` by argument, in order."""
        positional = [values[name] for name in self.arguments[: self.positional]]
        return self.module(*positional, **{name: values[name] for name in self.keywords})


def type_name(dtype):
    """The name in a configuration of a type of torch."""
    known = {name: triton for triton, name in TYPES.items()}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise pb_utils.TritonModelException(f"tensors of the type {name} cannot be sent: {', '.join(known)} can")
    return known[name]


def load(directory, config, device):
    """The model in a version's directory, on a device such as `cpu` or `cuda:0`."""
    global ENGINE
    torch = files.package("torch", "torch", "a PyTorch file")
    ENGINE = f"PyTorch {torch.__version__}"
    path = files.find(directory, config, FILES)
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pb_utils.TritonModelException(
            f"model '{config.get('name', '')}' is for {device}, but this PyTorch ({torch.__version__}) finds no GPU"
        )
    try:
        return torch, (Exported if path.suffix == ".pt2" else Script)(torch, path, device)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        text = str(error).strip().splitlines()
        raise pb_utils.TritonModelException(
            f"{path} cannot be loaded: {text[0] if text else type(error).__name__}"
        ) from None


def matched(names, arguments):
    """Which argument each input is; an error names both sides."""
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
        f"the inputs {', '.join(names)} do not fit the model's forward({', '.join(arguments)}): use these names, or "
        f"NAME__0 to NAME__{len(arguments) - 1}"
    )


def chosen(result, names):
    """The tensors of a result by the outputs' names: of a tensor, a tuple or list, or a dictionary."""
    if isinstance(result, dict):
        missing = [name for name in names if name not in result]
        if missing:
            raise pb_utils.TritonModelException(f"the model gives {', '.join(result)}, and no {', '.join(missing)}")
        return {name: result[name] for name in names}
    texts = isinstance(result, list) and all(isinstance(item, str) for item in result)
    several = list(result) if isinstance(result, (tuple, list)) and not texts else [result]
    places = [POSITION.fullmatch(name) for name in names]
    numbers = [int(place[1]) for place in places] if all(places) else range(len(names))
    if max(numbers, default=0) >= len(several):
        raise pb_utils.TritonModelException(
            f"the model gives {len(several)} outputs, the configuration has {len(names)}"
        )
    return {name: several[number] for name, number in zip(names, numbers)}


def as_torch(torch, tensor, device):
    """An input as torch takes it, where it lies if that is the device."""
    if tensor.triton_dtype() == BYTES:
        return texts_of(tensor.as_numpy())
    try:
        value = torch.from_dlpack(tensor)
    except (RuntimeError, TypeError, BufferError):
        # Older versions of torch take no BOOL in this way.
        with warnings.catch_warnings():
            # That the array may be read only is no matter: it is this request's alone.
            warnings.simplefilter("ignore")
            value = torch.from_numpy(tensor.as_numpy())
    return value.to(device, non_blocking=True)


def texts_of(array):
    """A BYTES tensor of one dimension (beside that of the batch) as a list of texts."""
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array.ravel()]


def as_output(name, value):
    """An output of a tensor, or of a list of texts."""
    if isinstance(value, (list, tuple)):
        return pb_utils.Tensor(name, np.array([text.encode() for text in value], np.object_))
    value = value.detach().contiguous()
    if value.device.type != "cpu":
        # The native part copies it to where the server takes it from.
        try:
            return pb_utils.Tensor.from_dlpack(name, value)
        except (RuntimeError, TypeError, BufferError):
            # As in `as_torch`.
            value = value.cpu()
    if str(value.dtype) == "torch.bfloat16":
        return pb_utils.Tensor.from_dlpack(name, value)
    return pb_utils.Tensor(name, value.numpy())


def zeros(torch, entries, batched, probe):
    """Inputs to try a model with: zeros, `probe` for each dimension that is not fixed."""
    found = {}
    for entry in entries:
        dims = [probe if int(dim) < 0 else int(dim) for dim in entry["dims"]]
        shape = [probe, *dims] if batched else dims
        if entry["data_type"] not in TYPES:
            raise pb_utils.TritonModelException(
                f"what it gives for {entry['data_type']} must be told: name its outputs"
            )
        found[entry["name"]] = torch.zeros(shape, dtype=getattr(torch, TYPES[entry["data_type"]]))
    return found


def outputs_of(result):
    """A result's tensors by name: keys of a dictionary, else `OUTPUT__0` and so on."""
    if isinstance(result, dict):
        return dict(result)
    several = result if isinstance(result, (tuple, list)) else [result]
    return {f"OUTPUT__{place}": value for place, value in enumerate(several)}


def tried(torch, model, entries, batched):
    """The outputs, as the model gives them for zeros of two sizes; what differs between the two is -1."""
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
    """Times copies of inputs to a device, with events in the stream in which they are made."""

    def __init__(self, torch, device):
        self.stream = lambda: torch.cuda.current_stream(device)
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.timed = False

    @contextlib.contextmanager
    def timing(self):
        """Of what is copied within."""
        self.began.record(self.stream())
        yield
        self.ended.record(self.stream())
        self.timed = True

    def tell(self):
        """What they took, once the device has done all of it; of each batch once."""
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
                "a TorchScript file says neither datatypes nor shapes: name its inputs in config.pbtxt "
                f"({', '.join(model.arguments)}), or serve a file of torch.export"
            )
        if not config.get("input"):
            largest = model.largest_batch()
            batch = batch or (min(largest, LARGEST_BATCH) if not config.get("output") else 0)
            if batch > largest:
                raise pb_utils.TritonModelException(
                    f"max_batch_size is {batch}, the program takes {largest} rows at most"
                )
        if not config.get("input") and batch:
            # All inputs share their first dimension, which is free: that is what a batch is.
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
        """The threads that one operation, and operations side by side, may use."""
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
                # The others are not to suffer for one whose values the model does not take.
                return [self.execute([request])[0] for request in requests]
            # What an exported program asserts is of what shapes it can be.
            code = (
                pb_utils.TritonError.INVALID_ARG if isinstance(error, AssertionError) else pb_utils.TritonError.INTERNAL
            )
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(last_line(error), code))]
        finally:
            self.finish()

    def called(self, inputs):
        """What the model gives for these inputs of all requests."""
        with self.copies.timing() if self.copies else contextlib.nullcontext():
            values = {self.arguments[name]: self.together([given[name] for given in inputs]) for name in self.arguments}
        with self.mode():
            return self.model.call({argument: value for argument, value in values.items() if value is not None})

    def finish(self):
        """Waits for the device, which reads the requests' own memory: when they are answered it is another's."""
        if self.device != "cpu":
            self.torch.cuda.current_stream(self.device).synchronize()
            self.copies.tell()
        if self.cleans:
            self.torch.cuda.empty_cache()

    @contextlib.contextmanager
    def mode(self):
        """Without gradients, and with the optimisations that are asked for."""
        with self.torch.inference_mode() if self.inference else self.torch.no_grad():
            with self.torch.jit.optimized_execution(self.optimized):
                yield

    def together(self, tensors):
        """An input of all requests; nothing where it may be left out and is."""
        if any(tensor is None for tensor in tensors):
            return None
        values = [as_torch(self.torch, tensor, self.device) for tensor in tensors]
        if len(values) == 1:
            return values[0]
        return sum(values, []) if isinstance(values[0], list) else self.torch.cat(values)

    def answers(self, requests, inputs, found):
        """Each request's rows of the outputs that it asks for."""
        if len(requests) == 1:
            return [answer(requests[0], found)]
        sizes = [next(tensor for tensor in given.values() if tensor is not None).shape()[0] for given in inputs]
        for name, value in found.items():
            if len(value) != sum(sizes):
                raise ValueError(f"output '{name}' has {len(value)} rows for a batch of {sum(sizes)}")
        ends = np.cumsum(sizes)
        parts = [{name: value[end - size : end] for name, value in found.items()} for size, end in zip(sizes, ends)]
        return [answer(request, part) for request, part in zip(requests, parts)]


def answer(request, found):
    """The response with the outputs that a request asks for."""
    wanted = request.requested_output_names()
    return pb_utils.InferenceResponse([as_output(name, value) for name, value in found.items() if name in wanted])


def last_line(error):
    """What went wrong in a model, without the stack that TorchScript puts before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
