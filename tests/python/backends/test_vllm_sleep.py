"""The sleep of models of the backend `vllm`, with a double of the engine. vLLM has no sleep on CPUs."""

import asyncio
import importlib
import json
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from harness.server import ROOT
from harness.waiting import DEADLINE_S, eventually_async, pause_as_async_client

package = pytest.importorskip("pharos_worker.runners", reason="pharos_worker is missing: `make wheel` builds it")


class EngineDeadError(Exception):
    """vLLM's error of an engine that has ended."""


class Engine:
    """A double of `AsyncLLM`, which notes its calls."""

    def __init__(self):
        self.calls, self.slept, self.error = [], set(), None
        self.gate = asyncio.Event()
        self.gate.set()

    async def sleep(self, level, mode):
        self.calls.append(("sleep", level, mode))
        await self.gate.wait()
        if self.error:
            raise self.error
        self.slept = {"weights", "kv_cache"}

    async def wake_up(self, tags=None):
        self.calls.append(("wake_up", tags))
        self.slept -= set(tags or self.slept)
        return not self.slept

    async def is_sleeping(self):
        return bool(self.slept)

    async def collective_rpc(self, method):
        self.calls.append((method,))
        assert self.slept == {"kv_cache"}, "the weights are on the GPU, and no request can run"

    async def add_lora(self, adapter):
        self.calls.append(("add_lora", adapter))

    async def remove_lora(self, number):
        self.calls.append(("remove_lora", number))

    async def generate(self, prompt, sampling, name, lora_request=None):
        self.calls.append(("generate",))
        yield SimpleNamespace(prompt_token_ids=[1], num_cached_tokens=0, prompt_logprobs=None, outputs=[], finished=True)


@dataclass
class Sender:
    """A sender that keeps the responses."""

    responses: list
    left: bool = False

    def send(self, response, flags=0):
        self.responses.append(response)

    def is_ready(self):
        return True

    def is_cancelled(self):
        return self.left


@pytest.fixture
def runner(monkeypatch):
    """The runner of this source tree, with doubles of vLLM's modules."""
    names = ("text", "images", "audio", "files", "vllm")
    for name in names:
        monkeypatch.delitem(sys.modules, f"pharos_worker.runners.{name}", raising=False)
        monkeypatch.delattr(package, name, raising=False)
    monkeypatch.setattr(package, "__path__", [str(ROOT / "worker/python/python/pharos_worker/runners")])
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.exceptions", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.exceptions")}
    modules["vllm.exceptions"].VLLMClientError = type("VLLMClientError", (Exception,), {})
    modules["vllm.v1.engine.exceptions"].EngineDeadError = EngineDeadError
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("pharos_worker.runners.vllm")
    for name in names:
        sys.modules.pop(f"pharos_worker.runners.{name}", None)


class Model:
    """A model with a double of the engine, in a running event loop."""

    def __init__(self, runner, is_enabled=True):
        self.runner, self.text = runner, runner.text
        model = self.model = runner.TritonPythonModel()
        model.loop, model.engine, model.jobs, model.numbers = asyncio.get_running_loop(), Engine(), {}, iter(range(99))
        model.sleep = runner.Sleep("m", is_enabled)
        model.adapters = SimpleNamespace(loads={}, load=self.load, unload=lambda *rest: runner.Adapters.unload(model.adapters, *rest))
        model.tokenizer = SimpleNamespace(bos_token_id=None)
        model.tokens = lambda prompt, _: [1]
        model.tokens_response = lambda operation, tokens: self.text.tokens_response([operation])
        self.calls = model.engine.calls

    async def load(self, engine, adapter, loaded):
        """Loads an adapter as `Adapters.load` does."""
        await engine.add_lora(adapter.lora_int_id)
        self.model.adapters.loads[adapter.lora_int_id] = True

    def job(self, operation="", sleep=None, adapter=None):
        """Returns a request."""
        loaded = self.text.Adapter("a", "path", 1) if adapter else None
        request = self.text.Request("x", {}, False, False, set(), operation=operation, sleep=sleep, adapter=loaded)
        return self.runner.Job(sender=Sender([]), request=request, sampling=None, adapter=adapter, choices=[self.text.Pending()], media={})

    async def ask(self, operation="", sleep=None, adapter=None):
        """Returns the text of the answer to a request, or the code and the message of its error."""
        job = self.job(operation, sleep, adapter)
        await asyncio.wait_for(self.model.answer(job), DEADLINE_S)
        (response,) = job.sender.responses
        if response.has_error():
            return response.error().code(), response.error().message()
        return response.output_tensors()[0].as_numpy()[0].decode()

    async def sleep(self, level=1, mode="abort"):
        """Puts the model to sleep."""
        return await self.ask("sleep", {"level": level, "mode": mode})

    async def wake_up(self, *tags):
        """Wakes the model, or parts of it, up."""
        return await self.ask("wake_up", {"tags": list(tags) or None})


def check(runner, steps, **options):
    """Runs steps with a model."""

    async def run():
        await steps(Model(runner, **options))

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


ADAPTER = SimpleNamespace(lora_int_id=7)


def test_requests_fail_while_the_model_sleeps(runner):
    """At once, with the path that wakes it up; the tokenizer answers. Adapters are not loaded into memory that the engine does not have."""
    codes = runner.pb_utils.TritonError

    async def steps(model):
        assert await model.ask() == ""
        assert await model.ask("is_sleeping", {}) == "awake"
        assert await model.sleep() == "sleeping"
        assert await model.ask("is_sleeping", {}) == "sleeping"
        refused = (codes.UNAVAILABLE, "the model 'm' sleeps: POST /wake_up?model=m wakes it up")
        for request in [(), ("load_adapter", None, ADAPTER), ("tokenize", None, ADAPTER)]:
            assert await model.ask(*request) == refused
        assert await model.ask("tokenize") == "tokenize"
        assert await model.wake_up() == "awake"
        assert await model.ask() == ""
        assert model.calls == [("generate",), ("sleep", 1, "abort"), ("wake_up", None), ("generate",)]

    check(runner, steps)


def test_parts_wake_up(runner):
    """The model sleeps until it has all of them."""

    async def steps(model):
        assert await model.sleep(mode="wait") == "sleeping"
        assert await model.wake_up("weights") == "sleeping"
        assert (await model.ask())[0] == runner.pb_utils.TritonError.UNAVAILABLE
        assert await model.wake_up("kv_cache") == "awake"
        assert model.calls == [("sleep", 1, "wait"), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]

    check(runner, steps)


@pytest.mark.parametrize("wakes", [[()], [("kv_cache", "weights")], [("weights",), ("kv_cache",)], [("weights",), ()]])
def test_dropped_weights_are_read_again(runner, wakes):
    """Before the engine can compute; adapters are loaded again by their next requests."""

    async def steps(model):
        model.model.adapters.loads[7] = True
        assert await model.sleep(2) == "sleeping"
        code, why = await model.wake_up("kv_cache")
        assert code == runner.pb_utils.TritonError.INVALID_ARG and "wake up weights first" in why
        assert [await model.wake_up(*tags) for tags in wakes] == ["sleeping"] * (len(wakes) - 1) + ["awake"]
        reads = [("wake_up", ["weights"]), ("reload_weights",)]
        assert model.calls[:3] == [("sleep", 2, "abort"), *reads] and model.calls.count(("reload_weights",)) == 1
        assert model.model.adapters.loads == {}

    check(runner, steps)


def test_another_level_is_refused_while_the_model_sleeps(runner):
    """vLLM would ignore it. The same level is no error."""

    async def steps(model):
        await model.sleep(1)
        code, why = await model.sleep(2)
        assert code == runner.pb_utils.TritonError.INVALID_ARG
        assert why == "level 2 is not possible: the model 'm' sleeps at level 1; wake it up first"
        assert await model.sleep(1) == "sleeping"

    check(runner, steps)


def test_a_failed_sleep_leaves_the_model_in_the_state_of_the_engine(runner):
    """Which is still awake, with its weights."""

    async def steps(model):
        model.model.engine.error = RuntimeError("no memory of the host")
        code, why = await model.sleep(2)
        assert code == runner.pb_utils.TritonError.INTERNAL and "no memory of the host" in why
        assert await model.ask() == "" and model.model.sleep.has_weights

    check(runner, steps)


def test_a_client_that_leaves_does_not_end_the_change(runner):
    """Requests fail from its beginning, and the next change waits for it."""

    async def steps(model):
        gate = model.model.engine.gate
        gate.clear()
        job = model.job("sleep", {"level": 1, "mode": "wait"})
        task = asyncio.create_task(model.model.answer(job))
        async def has_begun():
            return model.calls

        await eventually_async("the engine begins to sleep", has_begun)
        job.task.cancel()
        await task
        assert job.sender.responses[0].error().code() == runner.pb_utils.TritonError.CANCELLED
        assert (await model.ask())[0] == runner.pb_utils.TritonError.UNAVAILABLE
        wake = asyncio.create_task(model.wake_up())
        await pause_as_async_client(0.01)
        assert model.calls == [("sleep", 1, "wait")]
        gate.set()
        assert await wake == "awake"

    check(runner, steps)


def test_an_unload_of_an_adapter_waits_for_the_end_of_the_sleep(runner):
    """The engine has no memory to free before."""

    async def steps(model):
        model.model.adapters.loads[7] = True
        await model.sleep()
        assert await model.ask("unload_adapter", None, ADAPTER) == "a"
        await pause_as_async_client(3 * runner.text.CANCELLED_EVERY_S)
        assert ("remove_lora", 7) not in model.calls
        await model.wake_up()
        await model.model.unloading
        assert model.calls[-1] == ("remove_lora", 7)

    check(runner, steps)


def test_the_file_of_the_engine_permits_the_sleep(runner, tmp_path):
    """Without `enable_sleep_mode`, the error names it. Only the server asks for a sleep."""
    (tmp_path / "model.json").write_text(json.dumps({"model": "x", "enable_sleep_mode": True}))
    assert runner.parameters_of(runner.engine_arguments(tmp_path))["sleep_mode"] == "true"
    assert "sleep_mode" not in runner.parameters_of({"model": "x"})

    async def steps(model):
        code, why = await model.sleep()
        assert code == runner.pb_utils.TritonError.INVALID_ARG
        assert why == "the model 'm' cannot sleep: model.json must have \"enable_sleep_mode\": true"
        code, why = await model.ask("sleep")
        assert code == runner.pb_utils.TritonError.INVALID_ARG and "POST /sleep" in why
        assert model.calls == []

    check(runner, steps, is_enabled=False)
