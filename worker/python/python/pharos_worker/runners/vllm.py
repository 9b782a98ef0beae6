"""Serves language models with vLLM, in the layout of Triton's vllm_backend: `1/model.json` has the arguments of the engine
(vLLM's `AsyncEngineArgs`), `1/multi_lora.json` the adapters by name. A version that has `config.json` is itself a model in Hugging
Face's layout, which needs no `model.json`. Tensors and parameters are those of vllm_backend, with the
additional outputs `token_ids`, `stop_reason`, `num_cached_tokens`, `prompt_token_ids` and `prompt_logprobs`. The input `operation` asks
for the tokens of a text, or for the text of tokens. The inputs `image` and `audio` have the images and the clips of audio of a prompt.

The engine holds all requests and runs them together. It runs in further processes, which vLLM starts and which end with this one. All of this module's work is on one event loop. Text for a client that reads slowly is collected and sent as one response.
"""

import asyncio
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton_python_backend_utils as pb_utils

from pharos_worker.runners import audio, files, images, text

ENGINE = None
"""The library version for logs and the served configuration; set when a model is loaded."""
FILE, ADAPTERS = "model.json", "multi_lora.json"
DEFAULT_SEQUENCES = 256
"""The requests that vLLM runs together, unless `max_num_seqs` says otherwise."""
LONG_TEXT = 16_384
"""The characters of a prompt above which its tokens are found on another thread, so that the event loop goes on."""
MOST_LOGPROBS = 20
MEDIA = (images, audio)
"""What reads the files of a prompt, each from its input."""


@dataclass(kw_only=True, eq=False)
class Job(text.Job):
    """A request that is answered."""

    sampling: object
    adapter: object
    scores_only: bool = False
    """Whether the client wants the probabilities of its prompt alone. vLLM generates a token all the same."""
    media: dict
    """The files in the prompt, as base64, by their input: images and clips of audio."""
    task: object = None

    def take(self, output):
        """Adds what the engine has generated."""
        self.prompt_tokens = len(output.prompt_token_ids or ())
        self.cached_tokens = output.num_cached_tokens or 0
        if output.prompt_logprobs and self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        for one in output.outputs:
            choice = self.choices[one.index]
            if self.scores_only:
                choice.unnamed_tokens += len(one.token_ids)
            else:
                choice.text += one.text
                choice.token_ids += one.token_ids
                choice.logprobs += one.logprobs or ()
                choice.cumulative_logprob = one.cumulative_logprob
            choice.finish_reason = one.finish_reason or choice.finish_reason
            choice.stop_reason = one.stop_reason if one.stop_reason is not None else choice.stop_reason


def logger(gauges, adapters_in_use):
    """Returns what vLLM creates for an engine, and calls after each step. `adapters_in_use` returns the choices of each adapter by its name
    and state, from those that run by vLLM's name."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):
        def __init__(self, config, engine_index=0):
            self.cache = config.cache_config

        def tokens(self):
            """Returns the tokens for which the KV cache has room, which the engine knows after its start."""
            blocks = self.cache.num_gpu_blocks
            return blocks * self.cache.block_size if blocks else None

        def record(self, scheduler_stats=None, iteration_stats=None, *_, **__):
            if scheduler_stats is not None:
                stats, now = scheduler_stats, asyncio.get_running_loop().time()
                running, waiting = stats.num_running_reqs, stats.num_waiting_reqs
                # The last choices have ended, and their requests may not have seen it yet.
                adapters = (lambda: adapters_in_use(stats.running_lora_adapters)) if running or waiting else None
                gauges.record(now, running, waiting, stats.kv_cache_usage, self.tokens(), adapters)

        def log_engine_initialized(self):
            pass

    return Logger


class Adapters:
    """The adapters of a model: those of `multi_lora.json`, and those that were loaded by request. The engine has each after its first
    use, or its load, until vLLM needs its place (`max_cpu_loras`)."""

    def __init__(self, version, directory, is_enabled):
        self.listed = {
            name: (number, str(version / path) if (version / path).exists() else path)
            for number, (name, path) in enumerate(text.read_object(version / ADAPTERS).items(), 1)
        }
        self.places = text.AdapterPlaces(version, directory)
        self.is_enabled = is_enabled
        self.loads = {}
        """The loads that the engine has begun, by the numbers of the adapters."""

    def of(self, name, loaded):
        """Returns vLLM's request for the adapter of `multi_lora.json` with a name, or for one that was loaded by request; None
        without one."""
        from vllm.lora.request import LoRARequest

        if loaded is not None:
            if not self.is_enabled:
                raise text.WrongRequest(f"the model has no adapters: {FILE} must have \"enable_lora\": true")
            # vLLM knows prefixes in its cache by the name of the adapter.
            return LoRARequest(f"{loaded.name}@{loaded.load}", len(self.listed) + loaded.load, loaded.path)
        if name is None:
            return None
        if name not in self.listed:
            known = ", ".join(self.listed) or "none"
            raise text.WrongRequest(f"lora_name '{name}' is not an adapter of the model; its adapters are: {known}")
        return LoRARequest(name, *self.listed[name])

    def name_of(self, adapter):
        """Returns the name of an adapter from the name of vLLM's request for it."""
        return adapter if adapter in self.listed else adapter.rpartition("@")[0]

    async def load(self, engine, adapter, loaded):
        """Loads an adapter before its first request: one that cannot be loaded would end the engine. Its file is needed again after vLLM
        has given its place to another adapter."""
        from vllm.v1.engine.exceptions import EngineDeadError

        number, name = adapter.lora_int_id, loaded.name if loaded else adapter.lora_name
        if loaded:
            try:
                adapter.lora_path = self.places.find(loaded.path)
            except text.WrongRequest as error:
                raise ValueError(f"the adapter '{name}' cannot be loaded: {error}") from None
        if number not in self.loads:
            self.loads[number] = asyncio.ensure_future(engine.add_lora(adapter))
        try:
            # A request whose client leaves does not end the load, for which others may wait.
            await asyncio.shield(self.loads[number])
        except EngineDeadError:
            raise
        except Exception as error:
            self.loads.pop(number, None)
            # The reason of a worker of vLLM is within a sentence about the place of its stack trace.
            reason = str(error).partition("failed with error '")[2].rpartition("', please")[0] or str(error) or type(error).__name__
            raise ValueError(f"the adapter '{name}' cannot be loaded: {reason}") from None

    async def unload(self, engine, adapter, jobs, sleep):
        """Frees the memory of an adapter when no request uses it any more, and the engine is awake."""
        number = adapter.lora_int_id
        is_used = lambda: any(job.adapter is not None and job.adapter.lora_int_id == number for job in jobs.values())  # noqa: E731
        while sleep.level is not None or is_used():
            await asyncio.sleep(text.CANCELLED_EVERY_S)
        if self.loads.pop(number, None) is not None:
            await engine.remove_lora(number)


class Asleep(Exception):
    """A request that the engine cannot compute while it sleeps."""


class Sleep:
    """The sleep of an engine: the memory of its GPUs is free, and its processes go on. Changes follow each other."""

    def __init__(self, model, is_enabled):
        self.model = model
        self.is_enabled = is_enabled
        self.level = None
        """1 if the weights are in the memory of the host, 2 if they are dropped; None while all is on the GPUs."""
        self.has_weights = True
        self.lock = asyncio.Lock()

    def check_awake(self):
        """Refuses a request that needs the engine while it sleeps."""
        if self.level is not None:
            raise Asleep(f"the model '{self.model}' sleeps: POST /wake_up?model={self.model} wakes it up")

    async def run(self, operation, options, engine, adapters):
        """Runs an operation, and returns the state after it."""
        if options is None:
            raise ValueError("models sleep and wake up by POST /sleep and POST /wake_up; GET /is_sleeping returns the state")
        if not self.is_enabled:
            raise ValueError(f"the model '{self.model}' cannot sleep: {FILE} must have \"enable_sleep_mode\": true")
        if operation == text.SLEEP:
            await self.sleep(engine, options["level"], options["mode"])
        elif operation == text.WAKE_UP:
            await self.wake_up(engine, adapters, options["tags"])
        return "awake" if self.level is None else "sleeping"

    async def sleep(self, engine, level, mode):
        """Frees the memory. vLLM ends running requests (`abort`), or waits for them (`wait`)."""
        async with self.lock:
            if self.level not in (None, level):
                raise ValueError(f"level {level} is not possible: the model '{self.model}' sleeps at level {self.level}; wake it up first")
            self.level, had_weights = level, self.has_weights
            self.has_weights = had_weights and level == 1
            try:
                await engine.sleep(level, mode)
            except Exception:
                if not await engine.is_sleeping():
                    self.level, self.has_weights = None, had_weights
                raise

    async def wake_up(self, engine, adapters, tags):
        """Gets the parts with these tags back to the GPUs; all without tags. Dropped weights are read from their files again, before the
        engine has a KV cache and so can compute."""
        async with self.lock:
            if not self.has_weights:
                if tags == ["kv_cache"]:
                    raise ValueError(f"tags kv_cache is not possible: the model '{self.model}' sleeps at level 2; wake up weights first")
                await engine.wake_up(["weights"])
                await engine.collective_rpc("reload_weights")
                # vLLM has forgotten the adapters.
                adapters.loads.clear()
                self.has_weights = True
                if tags == ["weights"]:
                    return
                tags = ["kv_cache"]
            if await engine.wake_up(tags):
                self.level = None


class TritonPythonModel:
    """One instance: an engine and the requests that it runs."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        version = Path(pb_utils.get_model_dir())
        config = text.complete(auto_complete_model_config, parameters_of(engine_arguments(version)), has_tokens=True)
        known = {entry["name"] for entry in config.as_dict()["input"]}
        for media in MEDIA:
            if media.INPUT not in known:
                config.add_input({"name": media.INPUT, "data_type": "TYPE_STRING", "dims": [-1], "optional": True})
        return config

    def initialize(self, args):
        global ENGINE
        config = files.configuration(args)
        version = Path(args["model_repository"], args["model_version"])
        vllm = files.package("vllm", "vllm", "a model of the backend vllm")
        ENGINE = f"vLLM {vllm.__version__}"
        arguments = engine_arguments(version)
        own = config.get("parameters", {}).get("adapter_directory", {}).get("string_value")
        self.adapters = Adapters(version, own, arguments.get("enable_lora", False))
        self.sleep = Sleep(args["model_name"], arguments.get("enable_sleep_mode", False))
        self.outputs = {entry["name"] for entry in config["output"]}
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.jobs = {}
        self.numbers = iter(range(1 << 62))
        sys.setswitchinterval(text.SWITCH_S)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vllm", daemon=True).start()
        self.run(self.start(arguments, args)).result()

    def run(self, coroutine):
        """Runs a coroutine on the event loop of the engine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def start(self, arguments, args):
        """Starts the engine of the instance that `args` describes."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            engine_arguments = AsyncEngineArgs(**arguments)
        except TypeError as error:
            raise pb_utils.TritonModelException(f"{FILE} has an argument that vLLM does not know: {error}") from None
        gauges = text.Gauges(args, engine_arguments.max_loras if engine_arguments.enable_lora else 0)
        self.engine = AsyncLLM.from_engine_args(engine_arguments, stat_loggers=[logger(gauges, self.adapters_in_use)])
        self.tokenizer = self.engine.get_tokenizer()
        if asyncio.iscoroutine(self.tokenizer):
            self.tokenizer = await self.tokenizer
        self.watcher = self.loop.create_task(self.watch())

    def adapters_in_use(self, running):
        """Returns the choices of each adapter that run and that wait. vLLM tells which run, but only those that wait and have run before."""
        counts = Counter()
        for job in self.jobs.values():
            if job.adapter is not None and not job.request.operation:
                open_choices = sum(choice.finish_reason is None for choice in job.choices)
                counts[self.adapters.name_of(job.adapter.lora_name), "waiting"] += open_choices
        for adapter, count in running.items():
            name = self.adapters.name_of(adapter)
            counts[name, "running"] += count
            counts[name, "waiting"] -= count
        return +counts

    async def watch(self):
        """Cancels the requests whose clients have left, also those without a token yet."""
        while True:
            await asyncio.sleep(text.CANCELLED_EVERY_S)
            for job in list(self.jobs.values()):
                if job.sender.is_cancelled():
                    job.task.cancel()

    def execute(self, requests):
        text.execute(requests, self.read, lambda job: self.run(self.answer(job)))

    def read(self, request, sender):
        """Reads a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        read = text.read(request, self.outputs, self.decoupled)
        members = read.members
        adapter = self.adapters.of(members.pop("lora_name", None), read.adapter)
        structure = members.pop("structured_outputs", None) or members.pop("guided_decoding", None)
        scores_only = members.get("max_tokens") == 0 and members.get("prompt_logprobs") is not None
        if scores_only:
            members["max_tokens"] = 1
        try:
            if structure is not None:
                members["structured_outputs"] = StructuredOutputsParams(**structure)
            kind = RequestOutputKind.DELTA if read.stream else RequestOutputKind.FINAL_ONLY
            sampling = SamplingParams(**members, output_kind=kind)
        except (TypeError, ValueError) as error:
            raise text.WrongRequest(f"a parameter of sampling is not allowed: {error}") from None
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(sampling, name)
            if number is not None and not 0 <= number <= MOST_LOGPROBS:
                raise text.WrongRequest(f"{name} {number} is not allowed: it must be an integer from 0 to {MOST_LOGPROBS}")
        choices = [text.Pending() for _ in range(sampling.n)]
        given = {media.INPUT: pb_utils.get_input_tensor_by_name(request, media.INPUT) for media in MEDIA}
        encoded = {name: tensor.as_numpy().reshape(-1).tolist() for name, tensor in given.items() if tensor is not None}
        return Job(
            sender=sender, request=read, sampling=sampling, adapter=adapter, choices=choices, scores_only=scores_only, media=encoded
        )

    def tokens(self, prompt, add_special_tokens=True):
        """Returns the tokens of a prompt. The token that begins a text is added, unless the text has it."""
        tokens = self.tokenizer(prompt, add_special_tokens=add_special_tokens).input_ids
        first = getattr(self.tokenizer, "bos_token_id", None)
        return tokens[1:] if first is not None and tokens[:2] == [first, first] else tokens

    async def answer(self, job):
        """Answers a request."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        number = next(self.numbers)
        job.task = asyncio.current_task()
        self.jobs[number] = job
        try:
            await self.generate(job, str(number))
        except asyncio.CancelledError:
            job.fail(text.cancelled())
        except EngineDeadError as error:
            job.fail(pb_utils.TritonError(f"the engine of vLLM has ended: {error}", pb_utils.TritonError.UNAVAILABLE))
            # The server starts a new process, with a new engine.
            print("the engine of vLLM has ended; this process ends", file=sys.stderr, flush=True)
            self.loop.call_later(1, os._exit, 1)
        except Asleep as error:
            job.fail(pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE))
        except (ValueError, VLLMClientError) as error:
            job.fail(text.invalid(str(error)))
        except Exception as error:
            job.fail(pb_utils.TritonError(f"vLLM has failed: {type(error).__name__}: {error}"))
        else:
            if job.request.operation == "":
                job.sender.send(job.response(), text.FINAL)
        finally:
            del self.jobs[number]

    async def generate(self, job, name):
        """Passes on what the engine generates, except the last part."""
        given = job.request
        if given.operation in (text.LOAD_ADAPTER, text.UNLOAD_ADAPTER):
            return await self.change_adapter(job)
        if given.operation in text.SLEEP_OPERATIONS:
            return await self.change_sleep(job)
        if not given.operation or job.adapter is not None:
            self.sleep.check_awake()
        if job.adapter is not None:
            await self.adapters.load(self.engine, job.adapter, given.adapter)
        is_long = len(given.text) > LONG_TEXT
        tokens = given.prompt_ids
        if not tokens and given.operation != "detokenize":
            find = lambda: self.tokens(given.text, given.add_special_tokens)  # noqa: E731
            tokens = await asyncio.to_thread(find) if is_long else find()
        if given.operation:
            return job.sender.send(self.tokens_response(given.operation, tokens or []), text.FINAL)
        job.prompt_ids = tokens
        if given.has_prompt:
            for choice in job.choices:
                choice.text = given.text
        prompt = {"prompt_token_ids": tokens}
        for media in MEDIA:
            if found := job.media.get(media.INPUT):
                prompt.setdefault("multi_modal_data", {})[media.INPUT] = await asyncio.to_thread(media.read, found)
        # The sleep may have begun meanwhile.
        self.sleep.check_awake()
        async for output in self.engine.generate(prompt, job.sampling, name, lora_request=job.adapter):
            job.take(output)
            if given.stream and not output.finished and job.sender.is_ready():
                job.sender.send(job.response())
        while not job.sender.is_ready():
            await asyncio.sleep(text.SLOW_CLIENT_S)

    async def change_adapter(self, job):
        """Loads or unloads an adapter, and answers with its name."""
        loaded, adapter = job.request.adapter, job.adapter
        if loaded is None:
            raise ValueError("adapters are loaded and unloaded by POST /v1/load_lora_adapter and /v1/unload_lora_adapter")
        if job.request.operation == text.LOAD_ADAPTER:
            self.sleep.check_awake()
            await self.adapters.load(self.engine, adapter, loaded)
        else:
            job.adapter = None
            self.unloading = self.loop.create_task(self.adapters.unload(self.engine, adapter, self.jobs, self.sleep))
        job.sender.send(text.tokens_response([loaded.name]), text.FINAL)

    async def change_sleep(self, job):
        """Runs an operation about the sleep of the engine, and answers with the state after it."""
        given = job.request
        # A client that leaves does not end the change, which would leave the engine between two states.
        self.changing = self.loop.create_task(self.sleep.run(given.operation, given.sleep, self.engine, self.adapters))
        job.sender.send(text.tokens_response([await asyncio.shield(self.changing)]), text.FINAL)

    def tokens_response(self, operation, tokens):
        """Returns the response to a request for tokens, with the text of each, or for the text of tokens."""
        size = len(self.tokenizer)
        wrong = next((token for token in tokens if token >= size), None)
        if wrong is not None:
            raise ValueError(f"the token id {wrong} is not allowed: the vocabulary of the model has {size} tokens")
        if operation == "detokenize":
            return text.tokens_response([self.tokenizer.decode(tokens)])
        return text.tokens_response([self.tokenizer.decode([token]) for token in tokens], tokens)

    def is_ready(self):
        """Returns whether the engine runs."""
        return not self.engine.errored

    def finalize(self):
        """Ends the engine and its processes."""
        self.engine.shutdown()


def engine_arguments(version):
    """Returns the arguments of the engine. A relative path of the model is in the directory of the version, which may itself be a model in
    Hugging Face's layout."""
    is_model = (version / "config.json").is_file()
    arguments = text.read_object(version / FILE, purpose=None if is_model else "the arguments of vLLM's engine as JSON")
    if is_model:
        arguments.setdefault("model", str(version))
    if isinstance(arguments.get("model"), str) and (version / arguments["model"]).is_dir():
        arguments["model"] = str(version / arguments["model"])
    return arguments


def parameters_of(arguments):
    """Returns the parameters of the configuration that the server needs: the chat template with its special tokens, whether the model
    can sleep, and the number of requests that the engine holds. Those above it wait in the queue of the server."""
    sequences = arguments.get("max_num_seqs") or DEFAULT_SEQUENCES
    model = arguments.get("tokenizer") or arguments.get("model") or ""
    context = {"context_length": str(length)} if (length := arguments.get("max_model_len")) else {}
    own = {"max_open_requests": text.open_requests(sequences)} | context
    sleep = {"sleep_mode": "true"} if arguments.get("enable_sleep_mode") else {}
    return own | sleep | text.template_of(lambda name: file_of(model, name))


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
