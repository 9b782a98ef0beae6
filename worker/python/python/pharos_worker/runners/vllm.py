"""Serves language models with vLLM, in the layout of Triton's vllm_backend: `1/model.json` has the arguments of the engine
(vLLM's `AsyncEngineArgs`), `1/multi_lora.json` the adapters by name. Tensors and parameters are those of vllm_backend, with the
additional outputs `token_ids`, `stop_reason` and `num_cached_tokens`.

The engine holds all requests and runs them together. It runs in further processes, which vLLM starts and which end with this one. All of this module's work is on one event loop. Text for a client that reads slowly is collected and sent as one response.
"""

import asyncio
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from pharos_worker import metrics
from pharos_worker.runners import files

ENGINE = None
"""The library version for logs and the served configuration; set when a model is loaded."""
FILE, ADAPTERS = "model.json", "multi_lora.json"
DEFAULT_SEQUENCES = 256
"""The requests that vLLM runs together, unless `max_num_seqs` says otherwise."""
CANCELLED_EVERY_S = 0.05
"""The time between two looks for clients that have left."""
SLOW_CLIENT_S = 0.005
"""The time between two attempts to send to a client that reads slowly."""
SAMPLE_EVERY_S = 0.1
"""The time between two samples of the gauges."""
LONG_TEXT = 16_384
"""The characters of a prompt above which its tokens are found on another thread, so that the event loop goes on."""
SWITCH_S = 0.0005
"""How long a thread of Python holds the interpreter while another one waits. The default of 5 ms would be added to the time to the first
token for each of the threads on the way: the one that gets requests and the event loop."""
MOST_LOGPROBS = 20
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
IGNORED = ("stream", "exclude_input_in_output")
"""Parameters of a request that are no parameters of sampling."""


def invalid(message):
    """Returns the error of a wrong request."""
    return pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)


class WrongRequest(Exception):
    """A request that its client must change."""


@dataclass
class Pending:
    """What a choice has for its client since the last response."""

    text: str = ""
    token_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: object = None


@dataclass
class Job:
    """A request that is answered."""

    sender: object
    text: str
    sampling: object
    adapter: object
    stream: bool
    has_prompt: bool
    returns: set
    choices: list
    prompt_tokens: int = 0
    cached_tokens: int = 0
    task: object = None

    def take(self, output):
        """Adds what the engine has generated."""
        self.prompt_tokens = len(output.prompt_token_ids or ())
        self.cached_tokens = output.num_cached_tokens or 0
        for one in output.outputs:
            choice = self.choices[one.index]
            choice.text += one.text
            choice.token_ids += one.token_ids
            choice.logprobs += one.logprobs or ()
            choice.cumulative_logprob = one.cumulative_logprob
            choice.finish_reason = one.finish_reason or choice.finish_reason
            choice.stop_reason = one.stop_reason if one.stop_reason is not None else choice.stop_reason

    def response(self):
        """Returns the response with all that was taken, and forgets it."""
        choices, self.choices = self.choices, [Pending() for _ in self.choices]
        strings = lambda texts: np.array([text.encode() for text in texts], np.object_)  # noqa: E731
        naturals = lambda numbers: np.array(numbers, np.uint32)  # noqa: E731
        tensors = {"text_output": strings(one.text for one in choices)}
        if "finish_reason" in self.returns:
            tensors["finish_reason"] = strings(str(one.finish_reason) for one in choices)
            tensors["stop_reason"] = strings(json.dumps(one.stop_reason) for one in choices)
        if "cumulative_logprob" in self.returns:
            tensors["cumulative_logprob"] = np.array([one.cumulative_logprob or 0 for one in choices], np.float32)
        if "logprobs" in self.returns:
            tensors["logprobs"] = strings(json.dumps([logprobs_of(one) for one in choice.logprobs]) for choice in choices)
        if "token_ids" in self.returns:
            tensors["token_ids"] = naturals(choices[0].token_ids)
        if "num_input_tokens" in self.returns:
            tensors["num_input_tokens"] = naturals([self.prompt_tokens])
            tensors["num_cached_tokens"] = naturals([self.cached_tokens])
        if "num_output_tokens" in self.returns:
            tensors["num_output_tokens"] = naturals([len(one.token_ids) for one in choices])
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, data) for name, data in tensors.items()])


def logprobs_of(position):
    """Returns the probabilities of a position in vllm_backend's form."""
    return {
        str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in position.items()
    }


def value_of(name, value):
    """Returns the value of a parameter. Clients of vllm_backend write numbers and flags as strings."""
    if isinstance(value, str) and name not in ("stop", "lora_name"):
        try:
            return json.loads(value.lower())
        except ValueError:
            return value
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


class Gauges:
    """The gauges of the engine, which vLLM calls after each step."""

    def __init__(self, labels):
        names = ("pharos_llm_running_requests", "pharos_llm_waiting_requests", "pharos_llm_kv_cache_usage_ratio")
        self.series = []
        for name in names:
            try:
                self.series.append(metrics.get_metric(name, "gauge"))
            except Exception:
                # metrics.yaml does not have it.
                self.series.append(None)
        self.labels = labels
        self.at = 0.0

    def logger(self, config, engine_index=0):
        """Returns what vLLM creates for an engine."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        gauges = self

        class Logger(StatLoggerBase):
            def __init__(self):
                pass

            def record(self, scheduler_stats=None, iteration_stats=None, *_, **__):
                if scheduler_stats is not None:
                    gauges.record(scheduler_stats)

            def log_engine_initialized(self):
                pass

        return Logger()

    def record(self, stats):
        """Records the state of the scheduler, at most ten times a second while it runs."""
        now = asyncio.get_running_loop().time()
        if now - self.at < SAMPLE_EVERY_S and (stats.num_running_reqs or stats.num_waiting_reqs):
            return
        self.at = now
        values = (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage)
        for series, value in zip(self.series, values):
            if series is not None:
                series.add_or_update(float(value), self.labels)


class TritonPythonModel:
    """One instance: an engine and the requests that it runs."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        names = [entry["name"] for entry in config["input"]], [entry["name"] for entry in config["output"]]
        for name, kind in INPUTS:
            if name not in names[0]:
                auto_complete_model_config.add_input(
                    {"name": name, "data_type": kind, "dims": [1], "optional": name != "text_input"}
                )
        for name, kind in OUTPUTS:
            if name not in names[1]:
                auto_complete_model_config.add_output({"name": name, "data_type": kind, "dims": [-1]})
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        auto_complete_model_config.set_max_batch_size(0)
        parameters = config.setdefault("parameters", {})
        version = Path(pb_utils.get_model_dir())
        for name, text in parameters_of(engine_arguments(version)).items():
            parameters.setdefault(name, {"string_value": text})
        return auto_complete_model_config

    def initialize(self, args):
        global ENGINE
        config = files.configuration(args)
        version = Path(args["model_repository"], args["model_version"])
        vllm = files.package("vllm", "vllm", "a model of the backend vllm")
        ENGINE = f"vLLM {vllm.__version__}"
        arguments = engine_arguments(version)
        self.adapters = {
            name: (number, str(version / path) if (version / path).exists() else path)
            for number, (name, path) in enumerate(read_object(version / ADAPTERS).items(), 1)
        }
        self.outputs = {entry["name"] for entry in config["output"]}
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.jobs = {}
        self.numbers = iter(range(1 << 62))
        sys.setswitchinterval(SWITCH_S)
        labels = [args["model_name"], args["model_version"], args["model_instance_name"]]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vllm", daemon=True).start()
        self.run(self.start(arguments, Gauges(labels))).result()

    def run(self, coroutine):
        """Runs a coroutine on the event loop of the engine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def start(self, arguments, gauges):
        """Starts the engine."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            engine_arguments = AsyncEngineArgs(**arguments)
        except TypeError as error:
            raise pb_utils.TritonModelException(f"{FILE} has an argument that vLLM does not know: {error}") from None
        self.engine = AsyncLLM.from_engine_args(engine_arguments, stat_loggers=[gauges.logger])
        self.tokenizer = self.engine.get_tokenizer()
        if asyncio.iscoroutine(self.tokenizer):
            self.tokenizer = await self.tokenizer
        self.watcher = self.loop.create_task(self.watch())

    async def watch(self):
        """Cancels the requests whose clients have left, also those without a token yet."""
        while True:
            await asyncio.sleep(CANCELLED_EVERY_S)
            for job in list(self.jobs.values()):
                if job.sender.is_cancelled():
                    job.task.cancel()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                job = self.read(request, sender)
            except WrongRequest as error:
                sender.send(pb_utils.InferenceResponse(error=invalid(str(error))), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            self.run(self.answer(job))
        return None

    def read(self, request, sender):
        """Reads a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        flag = lambda name, default: default if (value := one_of(request, name)) is None else bool(value)  # noqa: E731
        text = one_of(request, "text_input")
        given = one_of(request, "sampling_parameters")
        if given is None:
            given = request.parameters() or "{}"
        try:
            members = json.loads(given)
            text = text.decode()
        except (ValueError, AttributeError) as error:
            raise WrongRequest(f"the inputs must be a text in UTF-8 and parameters of sampling in JSON: {error}") from None
        if not isinstance(members, dict):
            raise WrongRequest("the input 'sampling_parameters' must be a JSON object")
        members = {name: value_of(name, value) for name, value in members.items() if name not in IGNORED}
        stream = flag("stream", False)
        excludes_prompt = flag("exclude_input_in_output", stream)
        if stream and not (self.decoupled and excludes_prompt):
            raise WrongRequest("stream is true: the model must be decoupled, and exclude_input_in_output must be true")
        adapter = self.adapter(members.pop("lora_name", None))
        structure = members.pop("structured_outputs", None) or members.pop("guided_decoding", None)
        try:
            if structure is not None:
                members["structured_outputs"] = StructuredOutputsParams(**structure)
            kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
            sampling = SamplingParams(**members, output_kind=kind)
        except (TypeError, ValueError) as error:
            raise WrongRequest(f"a parameter of sampling is not allowed: {error}") from None
        if sampling.logprobs is not None and sampling.logprobs > MOST_LOGPROBS:
            raise WrongRequest(f"logprobs {sampling.logprobs} is not allowed: it must be an integer from 0 to {MOST_LOGPROBS}")
        returns = {
            name
            for name, default in (
                ("finish_reason", True),
                ("num_input_tokens", True),
                ("num_output_tokens", True),
                ("cumulative_logprob", False),
                ("logprobs", False),
                ("token_ids", False),
            )
            if flag(f"return_{name}", default)
        }
        return Job(
            sender=sender,
            text=text,
            sampling=sampling,
            adapter=adapter,
            stream=stream,
            has_prompt=not excludes_prompt,
            returns=returns & self.outputs,
            choices=[Pending() for _ in range(sampling.n)],
        )

    def adapter(self, name):
        """Returns vLLM's request for an adapter; None without one."""
        from vllm.lora.request import LoRARequest

        if name is None:
            return None
        if name not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise WrongRequest(f"lora_name '{name}' is not an adapter of the model; its adapters are: {known}")
        number, path = self.adapters[name]
        return LoRARequest(name, number, path)

    def tokens(self, text):
        """Returns the tokens of a prompt. The token that begins a text is added, unless the text has it."""
        tokens = self.tokenizer(text, add_special_tokens=True).input_ids
        first = getattr(self.tokenizer, "bos_token_id", None)
        return tokens[1:] if first is not None and tokens[:2] == [first, first] else tokens

    async def answer(self, job):
        """Answers a request."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        number = next(self.numbers)
        job.task = asyncio.current_task()
        self.jobs[number] = job
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            await self.generate(job, str(number))
        except asyncio.CancelledError:
            self.fail(job, pb_utils.TritonError("the request is cancelled", pb_utils.TritonError.CANCELLED))
        except EngineDeadError as error:
            self.fail(job, pb_utils.TritonError(f"the engine of vLLM has ended: {error}", pb_utils.TritonError.UNAVAILABLE))
            # The server starts a new process, with a new engine.
            print("the engine of vLLM has ended; this process ends", file=sys.stderr, flush=True)
            self.loop.call_later(1, os._exit, 1)
        except (ValueError, VLLMClientError) as error:
            self.fail(job, invalid(str(error)))
        except Exception as error:
            self.fail(job, pb_utils.TritonError(f"vLLM has failed: {type(error).__name__}: {error}"))
        else:
            job.sender.send(job.response(), final)
        finally:
            del self.jobs[number]

    def fail(self, job, error):
        """Ends a request with an error."""
        job.sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def generate(self, job, name):
        """Passes on what the engine generates, except the last part."""
        is_long = len(job.text) > LONG_TEXT
        tokens = await asyncio.to_thread(self.tokens, job.text) if is_long else self.tokens(job.text)
        if job.has_prompt:
            for choice in job.choices:
                choice.text = job.text
        prompt = {"prompt_token_ids": tokens}
        async for output in self.engine.generate(prompt, job.sampling, name, lora_request=job.adapter):
            job.take(output)
            if job.stream and not output.finished and job.sender.is_ready():
                job.sender.send(job.response())
        while not job.sender.is_ready():
            await asyncio.sleep(SLOW_CLIENT_S)

    def is_ready(self):
        """Returns whether the engine runs."""
        return not self.engine.errored

    def finalize(self):
        """Ends the engine and its processes."""
        self.engine.shutdown()


def engine_arguments(version):
    """Returns the arguments of the engine. A relative path of the model is in the directory of the version."""
    arguments = read_object(version / FILE, required=True)
    if isinstance(arguments.get("model"), str) and (version / arguments["model"]).is_dir():
        arguments["model"] = str(version / arguments["model"])
    return arguments


def parameters_of(arguments):
    """Returns the parameters of the configuration that the server needs: the chat template with its special tokens, and the number of
    requests that the engine holds. Those above it wait in the queue of the server."""
    sequences = arguments.get("max_num_seqs") or DEFAULT_SEQUENCES
    found = {"max_open_requests": str(sequences + max(1, sequences // 8))}
    model = arguments.get("tokenizer") or arguments.get("model") or ""
    tokenizer = read_object(file_of(model, "tokenizer_config.json"))
    template = file_of(model, "chat_template.jinja")
    chosen = template.read_text() if template.is_file() else tokenizer.get("chat_template")
    if isinstance(chosen, list):
        named = {entry.get("name"): entry.get("template") for entry in chosen}
        chosen = named.get("default")
    if isinstance(chosen, str):
        found["chat_template"] = chosen
    for name in ("bos_token", "eos_token"):
        token = tokenizer.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def file_of(model, name):
    """Returns the path of a file of a model: in its directory, or in the cache of Hugging Face's hub; a path that does not exist if it
    is in neither."""
    if Path(model).is_dir():
        return Path(model, name)
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, name)
    except (ImportError, ValueError):
        cached = None
    return Path(cached) if isinstance(cached, str) else Path(model, name)


def read_object(path, required=False):
    """Reads a JSON object from a file; an empty one without the file."""
    if not path.is_file():
        if required:
            raise pb_utils.TritonModelException(f"'{path}' does not exist: it has the arguments of vLLM's engine as JSON")
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise pb_utils.TritonModelException(f"'{path}' is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise pb_utils.TritonModelException(f"'{path}' must be a JSON object")
    return value
