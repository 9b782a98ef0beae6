"""What the runners of language models share: the tensors of Triton's vllm_backend, their requests and responses, chat templates and gauges."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from pharos_worker import metrics

CANCELLED_EVERY_S = 0.05
"""The time between two looks for clients that have left, while the engine waits."""
SLOW_CLIENT_S = 0.005
"""The time between two attempts to send to a client that reads slowly."""
SAMPLE_EVERY_S = 0.1
"""The time between two samples of the gauges."""
SWITCH_S = 0.0005
"""How long a thread of Python holds the interpreter while another one waits. The default of 5 ms would be added to the time to the first
token for each of the threads on the way: the one that gets requests and the one of the engine."""
INPUTS = [
    ("text_input", "TYPE_STRING"),
    ("stream", "TYPE_BOOL"),
    ("sampling_parameters", "TYPE_STRING"),
    ("exclude_input_in_output", "TYPE_BOOL"),
    ("return_finish_reason", "TYPE_BOOL"),
    ("return_cumulative_logprob", "TYPE_BOOL"),
    ("return_logprobs", "TYPE_BOOL"),
    ("return_num_input_tokens", "TYPE_BOOL"),
    ("return_num_output_tokens", "TYPE_BOOL"),
    ("return_token_ids", "TYPE_BOOL"),
]
OUTPUTS = [
    ("text_output", "TYPE_STRING"),
    ("finish_reason", "TYPE_STRING"),
    ("stop_reason", "TYPE_STRING"),
    ("cumulative_logprob", "TYPE_FP32"),
    ("logprobs", "TYPE_STRING"),
    ("token_ids", "TYPE_UINT32"),
    ("num_input_tokens", "TYPE_UINT32"),
    ("num_cached_tokens", "TYPE_UINT32"),
    ("num_output_tokens", "TYPE_UINT32"),
]
TOKEN_INPUTS = [
    ("operation", "TYPE_STRING"),
    ("prompt_token_ids", "TYPE_UINT32"),
    ("add_special_tokens", "TYPE_BOOL"),
    ("return_prompt_token_ids", "TYPE_BOOL"),
]
"""The inputs of an engine whose tokenizer clients can ask."""
TOKEN_OUTPUTS = [("prompt_token_ids", "TYPE_UINT32"), ("prompt_logprobs", "TYPE_STRING")]
PROBABILITIES = ("cumulative_logprob", "logprobs")
"""The outputs with probabilities, which not all engines have."""
RETURNED = ("finish_reason", "num_input_tokens", "num_output_tokens")
"""The outputs that a request gets unless it excludes them."""
IGNORED = ("stream", "exclude_input_in_output")
"""Parameters of a request that are no parameters of sampling."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
ADAPTER = "triton_adapter"
"""The parameter of a request with an adapter that was loaded by request: JSON that the server writes. Clients cannot set it."""
LOAD_ADAPTER, UNLOAD_ADAPTER = "load_adapter", "unload_adapter"
SLEEP_OPTIONS = "triton_sleep"
"""The parameter of a request of `SLEEP_OPERATIONS`: JSON that the server writes. Clients cannot set it."""
SLEEP, WAKE_UP, IS_SLEEPING = SLEEP_OPERATIONS = ("sleep", "wake_up", "is_sleeping")
OPERATIONS = ("tokenize", "detokenize", LOAD_ADAPTER, UNLOAD_ADAPTER, *SLEEP_OPERATIONS)


def invalid(message):
    """Returns the error of a wrong request."""
    return pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)


def cancelled():
    """Returns the error of a request whose client has left."""
    return pb_utils.TritonError("the request is cancelled", pb_utils.TritonError.CANCELLED)


class WrongRequest(Exception):
    """A request that its client must change."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that was loaded by request. `load` differs for each load, also of the same name."""

    name: str
    path: str
    load: int


class AdapterPlaces:
    """Where the files of adapters may be that requests load: in the directory of the model, and in the one of its parameter
    `adapter_directory`, where relative paths then begin."""

    def __init__(self, version, own):
        self.allowed = [Path(version).parent.resolve()]
        self.base = Path(version, own or "").resolve()
        if not self.base.is_dir():
            raise pb_utils.TritonModelException(f"the parameter 'adapter_directory' is '{own}': it is not a directory")
        if not self.base.is_relative_to(self.allowed[0]):
            self.allowed.append(self.base)

    def find(self, path):
        """Returns the place of a path that a request has, without symbolic links."""
        try:
            found = (self.base / path).resolve(strict=True)
        except (OSError, ValueError) as error:
            raise WrongRequest(f"'{path}' cannot be read: {error}") from None
        if not any(found.is_relative_to(directory) for directory in self.allowed):
            allowed = " or ".join(f"'{directory}'" for directory in self.allowed)
            raise WrongRequest(
                f"'{path}' is not in {allowed}; the parameter 'adapter_directory' of the model permits another directory"
            )
        return str(found)


@dataclass
class Request:
    """A request as its tensors have it."""

    text: str
    members: dict
    stream: bool
    has_prompt: bool
    returns: set
    operation: str = ""
    """One of `OPERATIONS`; empty for the generation of text."""
    prompt_ids: list | None = None
    """The prompt as tokens, in place of its text."""
    add_special_tokens: bool = True
    adapter: Adapter | None = None
    """The adapter that was loaded by request."""
    sleep: dict | None = None
    """The options of an operation of `SLEEP_OPERATIONS`."""


@dataclass
class Pending:
    """What a choice has for its client since the last response."""

    text: str = ""
    token_ids: list = field(default_factory=list)
    unnamed_tokens: int = 0
    logprobs: list = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: object = None


@dataclass(kw_only=True, eq=False)
class Job:
    """A request that is answered. `unnamed_tokens` of its choices count, but their ids are not known."""

    sender: object
    request: Request
    choices: list
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_ids: list | None = None
    """The tokens of the prompt, until a response has them."""
    prompt_logprobs: list | None = None
    """The probabilities of the prompt's tokens, until a response has them; None for the first token."""

    def response(self):
        """Returns the response with all that was taken, and forgets it."""
        choices, self.choices = self.choices, [Pending() for _ in self.choices]
        returns = self.request.returns
        strings = lambda texts: np.array([text.encode() for text in texts], np.object_)  # noqa: E731
        naturals = lambda numbers: np.array(numbers, np.uint32)  # noqa: E731
        tensors = {"text_output": strings(one.text for one in choices)}
        if "finish_reason" in returns:
            tensors["finish_reason"] = strings(str(one.finish_reason) for one in choices)
            tensors["stop_reason"] = strings(json.dumps(one.stop_reason) for one in choices)
        if "cumulative_logprob" in returns:
            tensors["cumulative_logprob"] = np.array([one.cumulative_logprob or 0 for one in choices], np.float32)
        if "logprobs" in returns:
            tensors["logprobs"] = strings(json.dumps([logprobs_of(one) for one in choice.logprobs]) for choice in choices)
        if "token_ids" in returns:
            tensors["token_ids"] = naturals(choices[0].token_ids)
        if "prompt_token_ids" in returns and self.prompt_ids is not None:
            tensors["prompt_token_ids"], self.prompt_ids = naturals(self.prompt_ids), None
        if self.prompt_logprobs is not None:
            positions, self.prompt_logprobs = self.prompt_logprobs, None
            listed = [None if position is None else logprobs_of(position) for position in positions]
            tensors["prompt_logprobs"] = strings([json.dumps(listed)])
        if "num_input_tokens" in returns:
            tensors["num_input_tokens"] = naturals([self.prompt_tokens])
            tensors["num_cached_tokens"] = naturals([self.cached_tokens])
        if "num_output_tokens" in returns:
            tensors["num_output_tokens"] = naturals([len(one.token_ids) + one.unnamed_tokens for one in choices])
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, data) for name, data in tensors.items()])

    def has_news(self):
        """Returns whether there is something to send."""
        return any(one.text or one.token_ids or one.finish_reason for one in self.choices)

    def fail(self, error):
        """Ends the request with an error."""
        self.sender.send(pb_utils.InferenceResponse(error=error), FINAL)


def logprobs_of(position):
    """Returns the probabilities of a position in vllm_backend's form."""
    return {
        str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in position.items()
    }


def value_of(name, value):
    """Returns the value of a parameter. Clients of vllm_backend write numbers, flags and objects as strings, flags also as Python does."""
    if isinstance(value, str) and name not in ("stop", "lora_name"):
        for text in (value, value.lower()):
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                pass
    return value


def one_of(request, name):
    """Returns the only element of an input; None if the request does not have it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    elements = tensor.as_numpy().reshape(-1)
    if len(elements) != 1:
        raise WrongRequest(f"the input '{name}' has {len(elements)} elements; it must have one")
    return elements[0]


def tokens_response(texts, ids=None):
    """Returns the response with the texts of tokens, and their ids, if the client has asked for them."""
    tensors = [pb_utils.Tensor("text_output", np.array([text.encode() for text in texts], np.object_))]
    if ids is not None:
        tensors.append(pb_utils.Tensor("prompt_token_ids", np.array(ids, np.uint32)))
    return pb_utils.InferenceResponse(tensors)


def operation_of(request):
    """Returns what a request wants besides generated text; empty for nothing."""
    given = one_of(request, "operation")
    operation = given.decode(errors="replace") if given is not None else ""
    if operation not in ("", *OPERATIONS):
        raise WrongRequest(f"the input 'operation' is '{operation}'; allowed are {', '.join(OPERATIONS)}")
    return operation


def adapter_of(parameters):
    """Takes the adapter that was loaded by request out of the parameters of a request; None without one."""
    given = parameters.pop(ADAPTER, None)
    if given is None:
        return None
    try:
        return Adapter(**json.loads(given))
    except (TypeError, ValueError) as error:
        raise WrongRequest(f"the parameter '{ADAPTER}' must be JSON with name, path and load: {error}") from None


def sleep_of(parameters):
    """Takes the options of a sleep out of the parameters of a request; None without them."""
    given = parameters.pop(SLEEP_OPTIONS, None)
    try:
        return None if given is None else json.loads(given)
    except (TypeError, ValueError) as error:
        raise WrongRequest(f"the parameter '{SLEEP_OPTIONS}' must be JSON: {error}") from None


def prompt_ids_of(request):
    """Returns the tokens that a request has in place of a text; None without them."""
    tensor = pb_utils.get_input_tensor_by_name(request, "prompt_token_ids")
    return None if tensor is None else tensor.as_numpy().reshape(-1).tolist()


def read(request, outputs, decoupled):
    """Reads the tensors of a request for a model with these outputs."""
    flag = lambda name, default: default if (value := one_of(request, name)) is None else bool(value)  # noqa: E731
    text = one_of(request, "text_input")
    given = one_of(request, "sampling_parameters")
    parameters = json.loads(request.parameters() or "{}")
    adapter = adapter_of(parameters)
    sleep = sleep_of(parameters)
    try:
        members = parameters if given is None else json.loads(given)
        text = text.decode()
    except (ValueError, AttributeError, RecursionError) as error:
        raise WrongRequest(f"the inputs must be a text in UTF-8 and parameters of sampling in JSON: {error}") from None
    if not isinstance(members, dict):
        raise WrongRequest("the input 'sampling_parameters' must be a JSON object")
    stream = flag("stream", False)
    excludes_prompt = flag("exclude_input_in_output", stream)
    if stream and not (decoupled and excludes_prompt):
        raise WrongRequest("stream is true: the model must be decoupled, and exclude_input_in_output must be true")
    names = (*RETURNED, *PROBABILITIES, "token_ids", "prompt_token_ids")
    returns = {name for name in names if flag(f"return_{name}", name in RETURNED)}
    return Request(
        text=text,
        members={name: value_of(name, value) for name, value in members.items() if name not in IGNORED},
        stream=stream,
        has_prompt=not excludes_prompt,
        returns=returns & outputs,
        operation=operation_of(request),
        prompt_ids=prompt_ids_of(request),
        add_special_tokens=flag("add_special_tokens", True),
        adapter=adapter,
        sleep=sleep,
    )


def execute(requests, read, run):
    """Reads requests with `read(request, sender)` and passes them on with `run(job)`. Those that are wrong fail."""
    for request in requests:
        sender = request.get_response_sender()
        try:
            job = read(request, sender)
        except WrongRequest as error:
            sender.send(pb_utils.InferenceResponse(error=invalid(str(error))), FINAL)
            continue
        run(job)


class Gauges:
    """The gauges of an instance. `adapter_slots` is the number of adapters (LoRA) whose requests the engine computes in one step; 0 if it
    has no adapters."""

    NAMES = (
        "pharos_llm_running_requests",
        "pharos_llm_waiting_requests",
        "pharos_llm_kv_cache_usage_ratio",
        "pharos_llm_kv_cache_tokens",
    )

    def __init__(self, args, adapter_slots=0):
        self.series = [self.find(name) for name in self.NAMES]
        self.labels = [args["model_name"], args["model_version"], args["model_instance_name"]]
        self.at = 0.0
        self.busy = False
        self.adapters = self.find("pharos_llm_adapter_requests")
        self.shown = set()
        """The adapters and states of which a number above 0 was recorded last."""
        if adapter_slots:
            self.set(self.find("pharos_llm_adapter_slots"), adapter_slots)

    @staticmethod
    def find(name):
        try:
            return metrics.get_metric(name, "gauge")
        except Exception:
            # metrics.yaml does not have it.
            return None

    def set(self, gauge, value, *labels):
        if gauge is not None and value is not None:
            gauge.add_or_update(float(value), self.labels + list(labels))

    def record(self, now, running, waiting, kv_usage=None, kv_tokens=None, adapters=None):
        """Records the state of the engine: its beginning, its end, and at most ten times a second while it runs. `adapters`
        returns the choices of each adapter by its name and state ("running", "waiting"); it is called for samples only."""
        busy = bool(running or waiting)
        if busy and self.busy and now - self.at < SAMPLE_EVERY_S:
            return
        self.at, self.busy = now, busy
        for gauge, value in zip(self.series, (running, waiting, kv_usage, kv_tokens)):
            self.set(gauge, value)
        counts = adapters() if adapters else {}
        for labels in self.shown.difference(counts):
            self.set(self.adapters, 0, *labels)
        for labels, count in counts.items():
            self.set(self.adapters, count, *labels)
        self.shown = set(counts)


def complete(config, parameters, left_out=(), has_tokens=False):
    """Adds the tensors to a configuration, except those of the outputs that are left out, and the parameters that it does not set.
    `has_tokens` says that clients can ask for tokens."""
    given = config.as_dict()
    names = [[entry["name"] for entry in given[kind]] for kind in ("input", "output")]
    for name, kind in INPUTS + (TOKEN_INPUTS if has_tokens else []):
        if name not in names[0] and name.removeprefix("return_") not in left_out:
            dims = [-1 if name == "prompt_token_ids" else 1]
            config.add_input({"name": name, "data_type": kind, "dims": dims, "optional": name != "text_input"})
    for name, kind in OUTPUTS + (TOKEN_OUTPUTS if has_tokens else []):
        if name not in names[1] and name not in left_out:
            config.add_output({"name": name, "data_type": kind, "dims": [-1]})
    config.set_model_transaction_policy({"decoupled": True})
    config.set_max_batch_size(0)
    own = given.setdefault("parameters", {})
    for name, text in parameters.items():
        own.setdefault(name, {"string_value": text})
    return config


def open_requests(sequences):
    """Returns the requests that an engine holds which runs so many: those above it wait in the queue of the server."""
    return str(sequences + max(1, sequences // 8))


def template_of(path_of):
    """Returns the parameters of the configuration with the chat template and its special tokens; `path_of` gives the path of a file of the
    tokenizer."""
    tokenizer = read_object(path_of("tokenizer_config.json"))
    template = path_of("chat_template.jinja")
    chosen = template.read_text() if template.is_file() else tokenizer.get("chat_template")
    if isinstance(chosen, list):
        named = {entry.get("name"): entry.get("template") for entry in chosen}
        chosen = named.get("default")
    found = {"chat_template": chosen} if isinstance(chosen, str) else {}
    for name in ("bos_token", "eos_token"):
        token = tokenizer.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def read_object(path, purpose=None):
    """Reads a JSON object from a file; an empty one without the file, unless the file has a purpose."""
    path = Path(path)
    if not path.is_file():
        if purpose:
            raise pb_utils.TritonModelException(f"'{path}' does not exist: it has {purpose}")
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise pb_utils.TritonModelException(f"'{path}' is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise pb_utils.TritonModelException(f"'{path}' must be a JSON object")
    return value


class StopStrings:
    """Finds stop strings in a text that comes in parts, and holds back what may begin one."""

    def __init__(self, strings, included):
        self.strings = strings
        self.included = included
        self.held = ""

    def take(self, text):
        """Returns the text that is complete now, and the stop string that ends it; None without one."""
        self.held += text
        found = [(at, string) for string in self.strings if (at := self.held.find(string)) >= 0]
        if found:
            at, string = min(found)
            end = at + len(string) if self.included else at
            text, self.held = self.held[:end], ""
            return text, string
        kept = max((self.beginning(string) for string in self.strings), default=0)
        at = len(self.held) - kept
        text, self.held = self.held[:at], self.held[at:]
        return text, None

    def beginning(self, string):
        """Returns how many characters at the end of the held text begin a stop string."""
        most = min(len(string) - 1, len(self.held))
        return next((length for length in range(most, 0, -1) if string.startswith(self.held[-length:])), 0)

    def rest(self):
        """Returns the held text, at the end of the generation."""
        text, self.held = self.held, ""
        return text
