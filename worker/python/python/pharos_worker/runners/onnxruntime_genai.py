"""Serves language models with ONNX Runtime GenAI: a directory with `genai_config.json`, the model and its tokenizer, as GenAI's model builder
writes it. Tensors and parameters are those of `runners/vllm.py`, without probabilities of tokens.

A model for dynamic batches (`engine.dynamic_batching` in its configuration) runs in GenAI's engine, which computes all requests together. Other
models can be computed together only if they begin together. They have a generator for each sequence instead, which take turns; with the
parameter `static_batches`, they run in batches that begin and end as a whole.

All of the engine's work is on one thread: GenAI's engine refuses other threads. Text for a client that reads slowly is collected and sent as one
response.
"""

import json
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from pharos_worker.runners import files, schemas, text

ENGINE = None
"""The library version for logs and the served configuration; set when a model is loaded."""
FILE = "genai_config.json"
DEFAULT_SEQUENCES = 4
"""The sequences that run together, unless `max_sequences` or the model's configuration says otherwise."""
MOST_SEQUENCES = 1024
DEFAULT_TOKENS = 16
"""The limit of tokens of a request that sets none, as in vLLM."""
PROMPT_PART = 256
"""The tokens of a prompt that a generator computes in one step. GenAI keeps the interpreter for itself meanwhile."""
RETRIES = 3
"""The steps that may fail one after the other until a sequence counts as their reason."""
EVENTS = 1024
"""The events of the engine that are read at once; others are read in the next step."""
MOST_STRINGS, MOST_STRING_BYTES = 16, 1024
"""The most stop strings, and their longest."""
SEEDS = 1 << 31
NEUTRAL = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "min_p": (0, None),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "skip_special_tokens": (True, None),
    "spaces_between_special_tokens": (True, False, None),
    "thinking_token_budget": (None,),
    "lora_name": (None,),
    "extra_args": (None, {}),
}
"""Parameters that the engine does not have, and their values without an effect."""


@dataclass
class Settings:
    """How a request is generated. What is None has the value of `search` in the model's configuration."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int = DEFAULT_TOKENS
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list = field(default_factory=list)
    stop_token_ids: frozenset = frozenset()
    include_stop_str_in_output: bool = False
    n: int = 1
    guidance: tuple | None = None


@dataclass(kw_only=True, eq=False)
class Job(text.Job):
    """A request that is answered."""

    settings: Settings
    tokens: np.ndarray
    running: int = 0


@dataclass(eq=False)
class Sequence:
    """A choice of a request, while it is generated."""

    job: Job
    index: int
    stops: text.StopStrings
    decoder: object
    limit: int
    generated: list = field(default_factory=list)
    handle: object = None

    def tokens(self):
        """Returns the tokens with which the generation begins, or continues after it was interrupted."""
        return np.concatenate([self.job.tokens, np.array(self.generated, np.int32)]) if self.generated else self.job.tokens

    def least(self):
        """Returns how many tokens come before the end of the text may come."""
        settings = self.job.settings
        return self.limit if settings.ignore_eos else min(settings.min_tokens, self.limit)


@dataclass
class Event:
    """What a step has for a sequence: a token, the end, or both. The reason `interrupted` is no end: the sequence continues later."""

    sequence: Sequence
    token: int | None = None
    reason: str | None = None
    error: object = None


def unavailable(message):
    """Returns the error of a request that the engine cannot finish."""
    return pb_utils.TritonError(message, pb_utils.TritonError.UNAVAILABLE)


class Generators:
    """Sequences of a model without dynamic batches, which take turns."""

    continuous = True

    def __init__(self, genai, model, tokenizer, capacity, search):
        self.genai = genai
        self.model = model
        self.ends = {int(one) for one in np.atleast_1d(tokenizer.eos_token_ids)}
        self.capacity = capacity
        self.search = search
        self.most = None
        self.running = {}
        # Other devices take a prompt only as a whole.
        self.part = PROMPT_PART if model.device_type in ("CPU", "CUDA") else None

    def begin(self, sequence):
        """Begins to generate."""
        settings = sequence.job.settings
        tokens = sequence.tokens()
        length = len(tokens) + sequence.limit
        options = {"batch_size": 1, "max_length": length, "min_length": len(tokens) + sequence.least()}
        options |= sampling_options(settings, self.search)
        if settings.seed is not None:
            options["random_seed"] = (settings.seed + sequence.index) % SEEDS
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(**options)
        if settings.guidance:
            params.set_guidance(*settings.guidance)
        sequence.handle = self.genai.Generator(self.model, params)
        self.running[sequence] = tokens

    def end(self, sequence):
        """Frees the sequence."""
        self.running.pop(sequence, None)
        sequence.handle = None

    def sequences(self):
        """Returns the sequences that run."""
        return list(self.running)

    def step(self):
        """Computes a token of each sequence, or a part of its prompt."""
        for sequence in self.sequences():
            # A choice of a request that has failed meanwhile does not run any more.
            if sequence in self.running and (event := self.advance(sequence)):
                yield event

    def advance(self, sequence):
        """Computes the next token; returns None after a part of the prompt."""
        generator, tokens = sequence.handle, self.running[sequence]
        try:
            if len(tokens):
                part = self.part or len(tokens)
                generator.append_tokens(tokens[:part])
                self.running[sequence] = tokens[part:]
                if len(tokens) > part:
                    return None
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
        except RuntimeError as error:
            failed = text.invalid if sequence.job.settings.guidance else pb_utils.TritonError
            return Event(sequence, error=failed(f"ONNX Runtime GenAI has failed: {first_line(error)}"))
        reason = "stop" if token in self.ends else "length" if len(sequence.generated) + 1 >= sequence.limit else None
        return Event(sequence, token, reason)


class Batches:
    """Sequences in GenAI's engine."""

    def __init__(self, genai, model, tokenizer, continuous, search):
        self.genai = genai
        self.engine = genai.Engine(model)
        self.continuous = continuous
        self.search = search
        capabilities = self.engine.get_capabilities()
        self.capacity = capabilities.configured_max_batch_size
        self.most = capabilities.max_request_length or None
        self.buffer = self.engine.create_event_buffer(EVENTS)
        self.running = {}
        names = ("TOKEN", "TURN_FINISHED", "FAILED", "CAPACITY_BLOCKED", "RETRYABLE")
        self.flags = {name: getattr(genai.EngineEventFlags, name).value for name in names}
        self.retries = 0

    def begin(self, sequence):
        """Begins to generate."""
        settings = sequence.job.settings
        if settings.seed is not None and not self.continuous:
            raise ValueError("seed is not supported by static batches: set the parameter 'static_batches' of the model to 'false'")
        if settings.guidance and not self.continuous:
            # The engine would end with all of its requests if it could not follow the structure.
            raise ValueError("structured_outputs is not supported by static batches: set the parameter 'static_batches' of the model to 'false'")
        request = self.engine.create_request()
        options = self.genai.TurnOptions(request)
        options.set_max_generated_tokens(sequence.limit - len(sequence.generated))
        if (least := sequence.least() - len(sequence.generated)) > 0:
            options.set_min_generated_tokens(least)
        for name, value in sampling_options(settings, self.search).items():
            getattr(options, f"set_{name}")(value)
        if settings.seed is not None:
            options.set_seed((settings.seed + sequence.index) % SEEDS)
        if settings.guidance:
            options.set_guidance(*settings.guidance)
        sequence.handle = request
        try:
            request.begin_turn(sequence.tokens().astype(np.int32), options)
        except BaseException:
            request.close()
            raise
        self.running[request] = sequence

    def end(self, sequence):
        """Frees the sequence."""
        if self.running.pop(sequence.handle, None):
            sequence.handle.close()
        sequence.handle = None

    def sequences(self):
        """Returns the sequences that run."""
        return list(self.running.values())

    def step(self):
        """Computes a token of each sequence, or a part of its prompt. Without a free block in the KV cache, a sequence is interrupted."""
        self.engine.run(self.buffer)
        events = [self.buffer[at] for at in range(len(self.buffer))]
        flags = [event.flags.value for event in events]
        if events and all(flag & self.flags["CAPACITY_BLOCKED"] for flag in flags):
            yield self.interrupted()
            return
        if events and all(flag & self.flags["RETRYABLE"] for flag in flags):
            self.retries += 1
            if self.retries == RETRIES:
                self.retries = 0
                yield self.failed()
            return
        self.retries = 0
        for event, flag in zip(events, flags):
            sequence = self.running.get(event.request) if event.request is not None else None
            if sequence is None:
                if flag & self.flags["FAILED"]:
                    raise RuntimeError(f"the engine has failed with the code {event.error_code.name}")
                continue
            token = event.token if flag & self.flags["TOKEN"] else None
            if not flag & self.flags["TURN_FINISHED"]:
                yield Event(sequence, token)
                continue
            sequence.job.cached_tokens = event.usage.cached_prompt_tokens
            if event.error_code == self.genai.EngineErrorCode.REQUEST_UNSERVICEABLE:
                yield Event(sequence, error=text.invalid("the request needs more than the KV cache of the engine; allow fewer tokens"))
            elif flag & self.flags["FAILED"]:
                yield Event(sequence, error=unavailable(f"the engine has failed with the code {event.error_code.name}"))
            else:
                reason = "stop" if event.finish_reason == self.genai.FinishReason.EOS else "length"
                yield Event(sequence, token, reason)

    def failed(self):
        """Returns the end of the sequence that probably is the reason for a step that fails again and again: the youngest one with a
        structure, which the engine cannot follow; without one, the youngest."""
        guided = [one for one in self.sequences() if one.job.settings.guidance]
        if guided:
            return Event(guided[-1], error=text.invalid("ONNX Runtime GenAI cannot follow structured_outputs: it is too costly"))
        return Event(self.sequences()[-1], error=unavailable("the engine has failed to compute the request"))

    def interrupted(self):
        """Returns the end of the youngest sequence: it continues when another one has ended. Its output is computed again, which random
        numbers with a seed and a structure do not allow."""
        youngest = self.sequences()[-1]
        settings = youngest.job.settings
        if len(self.running) == 1 or settings.guidance or settings.seed is not None:
            return Event(youngest, error=unavailable("the KV cache of the engine is full; allow fewer tokens or sequences"))
        return Event(youngest, reason="interrupted")


def first_line(error):
    """Returns the first line of an error: in others, GenAI describes its state."""
    return str(error).partition("\n")[0]


def sampling_options(settings, search):
    """Returns the options of GenAI for sampling. A request without parameters of sampling has those of the model."""
    given = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "seed")}
    samples = any(value is not None for value in given.values()) or search.get("do_sample", False)
    options = {}
    if settings.temperature == 0 or settings.top_k == 1 or not samples:
        options["do_sample"] = False
    else:
        options["do_sample"] = True
        options["temperature"] = settings.temperature if settings.temperature is not None else search.get("temperature", 1.0) or 1.0
        options["top_p"] = settings.top_p if settings.top_p is not None else search.get("top_p", 1.0) or 1.0
        if settings.top_k is not None:
            options["top_k"] = max(settings.top_k, 0)
    if settings.repetition_penalty is not None:
        options["repetition_penalty"] = settings.repetition_penalty
    return options


class TritonPythonModel:
    """One instance: an engine and the requests that it runs."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        folder = folder_of(config, Path(pb_utils.get_model_dir()))
        sequences = sequences_of(config, text.read_object(folder / FILE, purpose="the configuration of the model, as GenAI's model builder writes it"))
        parameters = {"max_open_requests": text.open_requests(sequences)} | text.template_of(lambda name: folder / name)
        return text.complete(auto_complete_model_config, parameters, left_out=text.PROBABILITIES)

    def initialize(self, args):
        global ENGINE
        config = files.configuration(args)
        self.folder = folder_of(config, Path(args["model_repository"], args["model_version"]))
        self.settings = text.read_object(self.folder / FILE, purpose="the configuration of the model, as GenAI's model builder writes it")
        self.genai = files.package("onnxruntime_genai", "onnxruntime-genai", "a model of the backend onnxruntime_genai")
        if not hasattr(self.genai, "Engine") or not hasattr(self.genai, "TurnOptions"):
            raise pb_utils.TritonModelException(f"onnxruntime-genai {self.genai.__version__} has no engine with turns: install version 0.18 or a later one")
        ENGINE = f"ONNX Runtime GenAI {self.genai.__version__}"
        self.outputs = {entry["name"] for entry in config["output"]}
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.commands = queue.SimpleQueue()
        self.waiting = deque()
        self.ending = []
        self.jobs = set()
        # Sequences wait until another one ends, because the KV cache was full.
        self.is_full = False
        self.gauges = text.Gauges(args)
        sys.setswitchinterval(text.SWITCH_S)
        started = Future()
        self.thread = threading.Thread(target=self.work, args=(config, started), name="genai", daemon=True)
        self.thread.start()
        started.result()

    def start(self, config):
        """Loads the model; on the thread of the engine."""
        dynamic = is_dynamic(self.settings)
        static = files.switch(config, "static_batches", False)
        if dynamic and static:
            raise pb_utils.TritonModelException(f"the parameter 'static_batches' is 'true', but '{self.folder / FILE}' has dynamic batches")
        sequences = sequences_of(config, self.settings)
        try:
            loaded = self.genai.Config(str(self.folder))
            if dynamic or static:
                kind = "dynamic_batching" if dynamic else "static_batching"
                loaded.overlay(json.dumps({"engine": {kind: {"max_batch_size": sequences}}}))
            model = self.genai.Model(loaded)
            # Prompts are encoded on the thread that gets requests, and tokens decoded on this one.
            self.encoder, self.decoder = self.genai.Tokenizer(model), self.genai.Tokenizer(model)
            self.encoder.update_options(add_special_tokens="true")
            search = self.settings.get("search", {})
            if dynamic or static:
                self.engine = Batches(self.genai, model, self.decoder, dynamic, search)
            else:
                self.engine = Generators(self.genai, model, self.decoder, sequences, search)
        except Exception as error:
            raise pb_utils.TritonModelException(f"ONNX Runtime GenAI cannot load '{self.folder}': {error}") from None
        lengths = (search.get("max_length"), self.settings.get("model", {}).get("context_length"), self.engine.most)
        self.context = min(length for length in lengths if length)

    def work(self, config, started):
        """Runs the engine."""
        try:
            self.start(config)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while self.accept():
                self.cancel()
                self.admit()
                for event in self.engine.step() if self.engine.running else ():
                    self.take(event)
                self.send()
                self.record()
        except BaseException as error:
            reason = f"ONNX Runtime GenAI has failed: {type(error).__name__}: {error}"
            for job in self.jobs:
                job.fail(unavailable(reason))
            # The server starts a new process, with a new engine.
            print(f"{reason}; this process ends", file=sys.stderr, flush=True)
            time.sleep(1)
            os._exit(1)
        self.engine = None

    def accept(self):
        """Takes new requests, and waits for one if there is nothing else to do. Returns False at the end."""
        wait = None if not self.jobs else text.SLOW_CLIENT_S
        block = not self.engine.running
        try:
            while True:
                job = self.commands.get(block, wait)
                if job is None:
                    return False
                block = False
                self.jobs.add(job)
                job.running = len(job.choices)
                limit = min(job.settings.max_tokens, self.context - len(job.tokens))
                for index, choice in enumerate(job.choices):
                    if job.request.has_prompt:
                        choice.text = job.request.text
                    stops = text.StopStrings(job.settings.stop, job.settings.include_stop_str_in_output)
                    self.waiting.append(Sequence(job, index, stops, self.decoder.create_stream(), limit))
        except queue.Empty:
            return True

    def cancel(self):
        """Ends the requests whose clients have left."""
        for job in [job for job in self.jobs if job.sender.is_cancelled()]:
            self.fail(job, text.cancelled())

    def fail(self, job, error):
        """Ends a request with an error."""
        for sequence in [one for one in self.engine.sequences() if one.job is job]:
            self.engine.end(sequence)
            self.is_full = False
        self.waiting = deque(one for one in self.waiting if one.job is not job)
        self.ending = [one for one in self.ending if one is not job]
        self.jobs.discard(job)
        job.fail(error)

    def admit(self):
        """Begins sequences that wait. Static batches begin as a whole."""
        if self.is_full and self.engine.running or not self.engine.continuous and self.engine.running:
            return
        self.is_full = False
        while self.waiting and len(self.engine.running) < self.engine.capacity:
            sequence = self.waiting.popleft()
            try:
                self.engine.begin(sequence)
            except (RuntimeError, ValueError) as error:
                self.fail(sequence.job, text.invalid(f"ONNX Runtime GenAI refuses the request: {first_line(error)}"))

    def take(self, event):
        """Adds what a step has generated to its choice."""
        sequence = event.sequence
        if sequence.handle is None:
            # Its request has failed with another choice.
            return
        job = sequence.job
        if event.error:
            self.fail(job, event.error)
            return
        if event.reason == "interrupted":
            self.engine.end(sequence)
            self.waiting.appendleft(sequence)
            self.is_full = True
            return
        settings, choice = job.settings, job.choices[sequence.index]
        reason, stop_reason = event.reason, None
        if event.token is None:
            choice.unnamed_tokens += reason == "stop"
        else:
            sequence.generated.append(event.token)
            choice.token_ids.append(event.token)
            may_stop = len(sequence.generated) > settings.min_tokens
            if event.token in settings.stop_token_ids and may_stop:
                reason, stop_reason = "stop", event.token
            elif reason != "stop":
                part = sequence.decoder.decode(event.token)
                found = None
                if settings.stop and may_stop:
                    part, found = sequence.stops.take(part)
                choice.text += part
                if found is not None:
                    reason, stop_reason = "stop", found
        if reason is None:
            return
        choice.text += sequence.stops.rest()
        choice.finish_reason, choice.stop_reason = reason, stop_reason
        self.engine.end(sequence)
        self.is_full = False
        job.running -= 1
        if not job.running:
            self.ending.append(job)

    def send(self):
        """Sends what clients can take."""
        for job in {one.job for one in self.engine.sequences()}:
            if job.request.stream and job.has_news() and job.sender.is_ready():
                job.sender.send(job.response())
        for job in [job for job in self.ending if job.sender.is_ready()]:
            self.ending.remove(job)
            self.jobs.discard(job)
            job.sender.send(job.response(), text.FINAL)

    def record(self):
        """Records the gauges."""
        self.gauges.record(time.monotonic(), len(self.engine.running), len(self.waiting))

    def execute(self, requests):
        text.execute(requests, self.read, self.commands.put)

    def read(self, request, sender):
        """Reads a request."""
        read = text.read(request, self.outputs, self.decoupled)
        settings = settings_of(read.members)
        if settings.n > self.engine.capacity:
            raise text.WrongRequest(f"n {settings.n} is not allowed: the model generates at most {self.engine.capacity} sequences together (max_sequences)")
        if found := read.returns.intersection(text.PROBABILITIES):
            raise text.WrongRequest(f"return_{min(found)} is not supported by the backend onnxruntime_genai")
        tokens = self.tokens(read.text)
        if not len(tokens):
            raise text.WrongRequest("text_input has no tokens")
        if len(tokens) >= self.context:
            raise text.WrongRequest(f"the prompt has {len(tokens)} tokens, and the context of the model is {self.context} tokens, with at least one of output")
        choices = [text.Pending() for _ in range(settings.n)]
        return Job(sender=sender, request=read, settings=settings, tokens=tokens, choices=choices, prompt_tokens=len(tokens))

    def tokens(self, prompt):
        """Returns the tokens of a prompt. The token that begins a text is added, unless the text has it."""
        try:
            tokens = np.asarray(self.encoder.encode(prompt), np.int32).reshape(-1)
        except RuntimeError as error:
            raise text.WrongRequest(f"the tokenizer refuses text_input: {error}") from None
        first = self.encoder.bos_token_id
        return tokens[1:] if len(tokens) > 1 and tokens[0] == tokens[1] == first else tokens

    def is_ready(self):
        """Returns whether the engine runs."""
        return self.thread.is_alive()

    def finalize(self):
        """Ends the engine."""
        self.commands.put(None)
        self.thread.join()


def folder_of(config, version):
    """Returns the directory of the model: that of the version, or the one of the parameter `model_directory`, relative to it."""
    return version / files.parameter(config, "model_directory")


def is_dynamic(settings):
    """Returns whether a model is for dynamic batches."""
    return bool((settings.get("engine") or {}).get("dynamic_batching"))


def sequences_of(config, settings):
    """Returns how many sequences run together."""
    sequences = files.number(config, "max_sequences")
    if sequences and sequences > MOST_SEQUENCES:
        raise pb_utils.TritonModelException(f"the parameter 'max_sequences' is '{sequences}'; allowed are 1 to {MOST_SEQUENCES}")
    engine = settings.get("engine") or {}
    batching = engine.get("dynamic_batching") or engine.get("static_batching") or {}
    return sequences or batching.get("max_batch_size") or DEFAULT_SEQUENCES


def settings_of(members):
    """Returns the settings of a request; refuses what the engine does not have."""
    members = dict(members)
    structure = members.pop("structured_outputs", None) or members.pop("guided_decoding", None)
    is_number = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)  # noqa: E731
    is_integer = lambda value: isinstance(value, int) and not isinstance(value, bool)  # noqa: E731
    is_flag = lambda value: isinstance(value, bool)  # noqa: E731
    checks = {
        "temperature": ("a number from 0 to 2", lambda value: is_number(value) and 0 <= value <= 2),
        "top_p": ("a number above 0 and at most 1", lambda value: is_number(value) and 0 < value <= 1),
        "top_k": ("an integer from -1", lambda value: is_integer(value) and -1 <= value < 1 << 31),
        "repetition_penalty": ("a number above 0", lambda value: is_number(value) and value > 0),
        "seed": ("an integer", is_integer),
        "max_tokens": ("an integer above 0", lambda value: is_integer(value) and value > 0),
        "min_tokens": ("an integer from 0", lambda value: is_integer(value) and value >= 0),
        "ignore_eos": ("true or false", is_flag),
        "include_stop_str_in_output": ("true or false", is_flag),
        "n": ("an integer above 0", lambda value: is_integer(value) and value > 0),
        "stop": (f"a text, or up to {MOST_STRINGS} texts of 1 to {MOST_STRING_BYTES} bytes", are_stops),
        "stop_token_ids": ("a list of token ids", lambda value: isinstance(value, list) and all(map(is_integer, value))),
    }
    settings = Settings()
    for name, value in members.items():
        if name in NEUTRAL:
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name]):
                raise text.WrongRequest(f"{name} is not supported by the backend onnxruntime_genai")
            continue
        if name not in checks:
            raise text.WrongRequest(f"{name} is not a parameter of sampling; those are {', '.join(checks)} and structured_outputs")
        allowed, check = checks[name]
        if value is None:
            continue
        if not check(value):
            raise text.WrongRequest(f"{name} {json.dumps(value)[:100]} is not allowed: it must be {allowed}")
        setattr(settings, name, value)
    settings.stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop
    settings.stop_token_ids = frozenset(settings.stop_token_ids)
    if settings.min_tokens > settings.max_tokens:
        raise text.WrongRequest(f"min_tokens {settings.min_tokens} is not allowed: it must be at most max_tokens, which is {settings.max_tokens}")
    settings.guidance = guidance_of(structure) if structure is not None else None
    return settings


def are_stops(value):
    """Returns whether a value is allowed for `stop`."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > MOST_STRINGS:
        return False
    return all(isinstance(one, str) and 0 < len(one.encode("utf-8", "replace")) <= MOST_STRING_BYTES for one in strings)


def guidance_of(structure):
    """Returns the kind and the text of GenAI's guidance for a structure of the output."""
    kinds = ("json", "json_object", "regex", "grammar", "choice")
    given = {name: value for name, value in structure.items() if value is not None and value is not False} if isinstance(structure, dict) else {}
    if unknown := [name for name in given if name not in kinds]:
        raise text.WrongRequest(f"structured_outputs.{unknown[0]} is not supported by the backend onnxruntime_genai; it has {', '.join(kinds)}")
    if len(given) != 1:
        raise text.WrongRequest(f"structured_outputs must have one of {', '.join(kinds)}")
    ((kind, value),) = given.items()
    try:
        if kind == "json":
            value = json.loads(value) if isinstance(value, str) else value
            schemas.check(value)
        elif kind == "grammar" and isinstance(value, str):
            schemas.check_grammar(value)
    except (ValueError, RecursionError) as error:
        raise text.WrongRequest(f"structured_outputs.{kind} is not allowed: {error}") from None
    match kind, value:
        case "json", dict() | bool():
            return "json_schema", json.dumps(value)
        case "json_object", True:
            return "json_schema", '{"type": "object"}'
        case "regex", str():
            return "regex", value
        case "grammar", str():
            return "lark_grammar", value
        case "choice", [_, *_] if all(isinstance(one, str) and one for one in value):
            return "lark_grammar", f"start: {' | '.join(json.dumps(one, ensure_ascii=False) for one in value)}"
    raise text.WrongRequest(f"structured_outputs.{kind} is not allowed: its value is of another type")
