"""A load with other instance groups starts and stops only the instances that differ, as in Triton. Groups are compared without
their names and counts."""

import concurrent.futures
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from harness.inference import one
from harness.sequence_models import config as sequence_config, controls
from harness.server import Server, total
from harness.waiting import eventually
from python_backend.worker import model
from scheduling.resources import Load, delay, group

PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
HAS_WORKER = subprocess.run([PYTHON, "-c", "import pharos_worker"], capture_output=True).returncode == 0
EXPLICIT = "--model-control-mode=explicit"
ON = "--rate-limit=execution_count"
LOAD = "/v2/repository/models/m/load"
REQUEST = one("FP32", [1, 2], [1, 2])


class World:
    """A server with the model `m`; records which processes its loads start and stop."""

    def __init__(self, folder, *options):
        self.folder = folder / "models/m"
        (self.folder / "1").mkdir(parents=True)
        self.server = Server(folder, [folder / "models"], [EXPLICIT, *options])

    def load(self, config: str) -> tuple:
        """Loads the model with this configuration; returns the number of started processes and the old ones that continue."""
        (self.folder / "config.pbtxt").write_text(config)
        before = self.server.workers()
        status, answer = self.server.ask("POST", LOAD)
        assert status == 200, answer
        after = self.server.workers()
        return len(after - before), before & after

    def update(self, config: str, started: int, stopped: int):
        """Loads the model and checks the number of started and stopped processes; all others continue. The answer comes after the end
        of the stopped ones."""
        before = self.server.workers()
        begun, remaining = self.load(config)
        assert (begun, len(before) - len(remaining)) == (started, stopped)


@pytest.fixture
def world(tmp_path):
    """Returns a function that starts the server: `world(*options)`."""
    worlds = []

    def start(*options) -> World:
        worlds.append(World(tmp_path, *options))
        worlds[0].server.__enter__()
        return worlds[0]

    yield start
    for each in worlds:
        each.server.__exit__(None, None, None)


def groups(*texts: str) -> str:
    """Returns a model with these instance groups on CPUs."""
    return delay(1, f"instance_group [ {', '.join(f'{{ {text} kind: KIND_CPU }}' for text in texts)} ]")


@pytest.mark.parametrize("limiter", [[], [ON]], ids=["without a rate limiter", "with one"])
def test_only_instances_that_differ_are_started_and_stopped(world, limiter):
    """For changes of counts, names and the division into groups; the statistics are kept."""
    own = world(*limiter)
    own.update(groups("count: 3"), 3, 0)
    assert own.server.infer("m", REQUEST)[0] == 200
    own.update(groups("count: 4"), 1, 0)
    own.update(groups("count: 2"), 0, 2)
    own.update(groups('name: "other" count: 2'), 0, 0)
    own.update(groups('name: "a"', 'name: "b"', 'name: "c" count: 2'), 2, 0)
    names = {dict(labels)["instance"] for name, labels in own.server.scrape() if name == "pharos_instance_state"}
    assert names == {"a_0", "b_0", "c_0", "c_1"}
    own.update(groups('name: "c" count: 3', 'name: "d" passive: true'), 1, 1)
    own.update(groups("count: 0"), 0, 3)
    assert own.server.infer("m", REQUEST)[0] == 200
    assert own.server.statistics("m")["inference_count"] == 2


def test_instances_change_under_load_with_the_rate_limiter(world):
    """Each removed instance ends its batch with its resources; no two batches execute concurrently."""
    own = world(ON)
    limited = lambda count: delay(5, group("R 1 global", f"count: {count} kind: KIND_CPU"))  # noqa: E731
    own.load(limited(3))
    with Load(own.server, ["m"], clients=6) as load:
        for started, stopped, count in [(0, 2, 1), (3, 0, 4), (0, 3, 1), (1, 0, 2)]:
            own.update(limited(count), started, stopped)
            seen = len(load.answers["m"])
            eventually("requests are answered", lambda: len(load.answers["m"]) > seen + 20)
    assert set(load.answers["m"]) == {200}
    eventually("no resource is held", lambda: total(own.server.scrape(), "pharos_rate_limiter_resource_used") == 0)


@pytest.mark.parametrize("limiter", [[], [ON]], ids=["without a rate limiter", "with one"])
def test_a_load_waits_for_the_batches_of_removed_instances(world, limiter):
    """The answer comes when a removed instance has executed its request and ended, as in Triton."""
    own = world(*limiter)
    slow = lambda count: delay(1000, f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]")  # noqa: E731
    own.load(slow(3))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        requests = [pool.submit(own.server.infer, "m", REQUEST) for _ in range(3)]
        executing = lambda: total(own.server.scrape(), "pharos_model_executing_requests", model="m") == 3  # noqa: E731
        eventually("all instances execute a request", executing)
        own.update(slow(1), 0, 2)
        assert [request.result()[0] for request in requests] == [200] * 3
    assert own.server.infer("m", REQUEST)[0] == 200


def test_resources_follow_the_instances(world):
    """The limit of a resource follows the existing instances, and the log reports it as Triton's does."""
    own = world(ON)
    needs = lambda count: delay(1, group(f"R1 {count}", "kind: KIND_CPU"))  # noqa: E731
    limit = lambda: total(own.server.scrape(), "pharos_rate_limiter_resource_limit", resource="R1")  # noqa: E731
    own.update(needs(4), 1, 0)
    assert limit() == 4
    for count in (8, 3):
        own.update(needs(count), 1, 1)
        eventually("the limit follows", lambda: limit() == count)
        assert own.server.infer("m", REQUEST)[0] == 200
        line = f"Device: 0, Resource: R1\\t Count: {count}"
        eventually("the log has the limit", lambda: line in own.server.log_tail())


def test_an_exceeded_limit_fails_the_update(world):
    """The model continues unchanged, and a smaller requirement is applied."""
    own = world(ON, "--rate-limit-resource=R1:10")
    needs = lambda count: delay(1, group(f"R1 {count}", "kind: KIND_CPU"))  # noqa: E731
    own.update(needs(2), 1, 0)
    (own.folder / "config.pbtxt").write_text(needs(32))
    status, answer = own.server.ask("POST", LOAD)
    assert status == 400 and "limited to 10" in str(answer)
    assert own.server.infer("m", REQUEST)[0] == 200
    own.update(needs(10), 1, 1)
    assert own.server.infer("m", REQUEST)[0] == 200


def steps(own: World):
    """Returns a function that executes a step of a sequence, written as its letter with `(` for START and `)` for END."""
    client = tritonclient.http.InferenceServerClient(own.server.http)
    value = tritonclient.http.InferInput("VALUE", [1, 1], "INT32")
    value.set_data_from_numpy(np.ones((1, 1), np.int32))

    def step(text: str) -> int:
        sequence = ord(text.strip("()"))
        flags = {"sequence_start": "(" in text, "sequence_end": ")" in text}
        return int(client.infer("m", [value], sequence_id=sequence, **flags).as_numpy("SUM")[0, 0])

    return step


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
@pytest.mark.parametrize("limiter", [[], [ON]], ids=["without a rate limiter", "with one"])
def test_models_with_sequences_change_in_place(world, strategy, limiter):
    """At once without running sequences; an instance with open sequences is stopped after the last of them."""
    batching = f"{strategy} max_sequence_idle_microseconds: 600000000 {controls()}"
    config = lambda count, more="": sequence_config(batching, instances=count).replace("KIND_CPU", "KIND_CPU " + more)  # noqa: E731
    other = "rate_limiter { priority: 2 }"
    own = world(*limiter)
    own.update(config(2), 2, 0)
    step = steps(own)
    assert [step(text) for text in ("(a", "a", "a)")] == [1, 2, 3]
    own.update(config(4), 2, 0)
    own.update(config(3), 0, 1)
    # The two sequences have an instance each; the third instance is unused.
    assert [step(text) for text in ("(a", "(b")] == [1, 1]
    before = own.server.workers()
    assert own.load(config(1, other))[0] == 1
    eventually("one of three workers has ended", lambda: len(before & own.server.workers()) == 2)
    assert [step(text) for text in ("a", "b", "(c", "c")] == [2, 2, 1, 2]
    assert len(before & own.server.workers()) == 2
    assert step("b)") == 3
    eventually("another worker has ended", lambda: len(before & own.server.workers()) == 1)
    assert [step(text) for text in ("a", "a)", "c)")] == [3, 4, 3]
    eventually("all old workers have ended", lambda: not before & own.server.workers())
    assert len(own.server.workers()) == 1

    def instances() -> set:
        return {dict(labels)["instance"] for name, labels in own.server.scrape() if name == "pharos_instance_state"}

    eventually("the metrics have one instance", lambda: instances() == {"m_0_0"})


def test_an_id_that_ended_on_a_removed_instance_begins_on_another(world):
    """No new sequence begins on an instance that will be stopped."""
    batching = f"direct {{ }} max_sequence_idle_microseconds: 600000000 {controls()}"
    own = world()
    own.load(sequence_config(batching, instances=1))
    step = steps(own)
    assert [step(text) for text in ("(a", "(b")] == [1, 1]
    (old,) = own.server.workers()
    own.load(sequence_config(batching).replace("KIND_CPU", "KIND_CPU rate_limiter { priority: 2 }"))
    assert [step(text) for text in ("a)", "(a", "a")] == [2, 1, 2]
    assert step("b)") == 2
    eventually("the old worker has ended", lambda: old not in own.server.workers())
    assert step("a)") == 3


def given(config: dict) -> str:
    """Returns the body of a load with a configuration."""
    return json.dumps({"parameters": {"config": json.dumps(config)}})


def override_over_http(own: World) -> dict:
    with tritonclient.http.InferenceServerClient(own.server.http) as client:
        return client.get_model_config("m")


def override_over_grpc(own: World) -> dict:
    with tritonclient.grpc.InferenceServerClient(own.server.grpc) as client:
        return client.get_model_config("m", as_json=True)["config"]


@pytest.mark.parametrize("shown", [override_over_http, override_over_grpc])
def test_a_configuration_override_may_add_an_instance(world, shown):
    """The server's own configuration with a higher count: the existing instance continues."""
    own = world()
    own.load(groups("count: 1"))
    config = shown(own)
    config["instance_group"][0]["count"] += 1
    before = own.server.workers()
    status, answer = own.server.ask("POST", LOAD, given(config))
    assert status == 200, answer
    assert before < own.server.workers() and len(own.server.workers()) == 2
    assert own.server.infer("m", REQUEST)[0] == 200
    config["max_batch_size"] = 2
    status, answer = own.server.ask("POST", LOAD, given(config))
    assert status == 200, answer
    eventually("all workers are new", lambda: not before & own.server.workers())


@pytest.mark.skipif(not HAS_WORKER, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
@pytest.mark.parametrize("shown", [override_over_http, override_over_grpc])
def test_a_python_model_is_completed_before_the_comparison(tmp_path, shown):
    """The configurations are compared after their completion."""
    model(tmp_path / "models", "m", "counted", f'parameters {{ key: "folder" value {{ string_value: "{tmp_path}" }} }}\n')
    count = lambda what: len((tmp_path / what).read_bytes()) if (tmp_path / what).exists() else 0  # noqa: E731
    with Server(tmp_path, [tmp_path / "models"], [f"--python={PYTHON}", EXPLICIT, "--load-model=m"]) as server:
        own = type("Own", (), {"server": server})
        config = shown(own)
        config["instance_group"][0]["count"] += 1
        assert server.ask("POST", LOAD, given(config))[0] == 200
        assert (count("initialize"), count("finalize")) == (2, 0)
        config["instance_group"][0]["count"] = 1
        assert server.ask("POST", LOAD, given(config))[0] == 200
        assert (count("initialize"), count("finalize")) == (2, 1)
        assert server.infer("m", {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]})[0] == 200
