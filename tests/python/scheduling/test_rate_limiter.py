"""The rate limiter (`--rate-limit=execution_count`) and instance groups, observed by clients and metrics."""

import concurrent.futures
import os
import queue
import re
import signal
import threading
import time

import numpy as np
import pytest
import tritonclient.grpc

from harness.processes import held
from harness.sequence_models import config as sequence_config
from harness.server import Server, total
from harness.statistics import dispatched, until_dispatched, until_received
from harness.waiting import DEADLINE_S, eventually, holds_for, run_for
from scheduling.resources import REQUEST, Load, config, delay, group

ON = "--rate-limit=execution_count"
@pytest.fixture
def serve(tmp_path):
    """Starts a server with `models` (name -> configuration) and options, and stops it after the test."""
    started = []

    def start(models: dict, *options, launch_only=False) -> Server:
        repository = tmp_path / f"models{len(started)}"
        for name, text in models.items():
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(text)
        server = Server(tmp_path, [repository], options)
        started.append(server)
        server.launch()
        if not launch_only:
            server.wait_until_ready()
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop(check=False)


def resource(server, name: str, device: str, what: str) -> float:
    return server.scrape().get((f"pharos_rate_limiter_resource_{what}", (("device", device), ("resource", name))), -1.0)


def executions(server, model: str) -> int:
    return server.statistics(model)["execution_count"]


def check_released(server, name="R", device="global"):
    eventually(f"all of {name} is released", lambda: resource(server, name, device, "used") == 0)


def test_models_with_one_resource_never_execute_at_the_same_time(serve):
    """Two models share one unit of a global resource: while one executes, the other waits, and a third model is not delayed."""
    models = {name: delay(100, group("R 1 global")) for name in ("a", "b")} | {"free": delay(1, group(""))}
    server = serve(models, ON)
    for first, second in (("a", "b"), ("b", "a"), ("a", "b")):
        counts = {model: executions(server, model) for model in models}
        sent = dispatched(server, second)
        waiting = ("pharos_rate_limiter_waiting_instances", (("model", second), ("version", "1")))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            with held(server, first):
                requests = [pool.submit(server.infer, first, REQUEST)]
                eventually("the resource is held", lambda: resource(server, "R", "global", "used") == 1)
                requests.append(pool.submit(server.infer, second, REQUEST))
                eventually("the other instance waits", lambda: server.scrape()[waiting] == 1)
                assert server.infer("free", REQUEST)[0] == 200
                assert dispatched(server, second) == sent
            assert [request.result()[0] for request in requests] == [200] * 2
        assert {model: executions(server, model) for model in models} == {model: count + 1 for model, count in counts.items()}
    waited = total(server.scrape(), "pharos_rate_limiter_wait_seconds_total")
    assert waited >= 0.3, "one model waits for at least 100 ms in each round"
    assert resource(server, "R", "global", "limit") == 1
    check_released(server)


def test_without_the_rate_limiter_resources_are_ignored(serve):
    """Both execute concurrently, and the rate limiter has no series."""
    server = serve({name: delay(200, group("R 1 global")) for name in ("a", "b")}, "--rate-limit-resource=R:0")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with held(server, "a", "b"):
            requests = [pool.submit(server.infer, model, REQUEST) for model in ("a", "b")]
            for model in ("a", "b"):
                until_dispatched(server, model, 1)
        assert [request.result()[0] for request in requests] == [200] * 2
    assert not [name for name, _ in server.scrape() if name.startswith("pharos_rate_limiter")]
    assert "has no effect without --rate-limit=execution_count" in server.log_tail()


def test_executions_are_shared_by_priority(serve):
    """Three busy models of priorities 1, 2 and 4 on one resource execute as 4 : 2 : 1."""
    models = {f"p{p}": delay(5, group("R 1 global", limiter=f"priority: {p}")) for p in (1, 2, 4)}
    server, queued, errors = serve(models, ON), 250, queue.SimpleQueue()
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 2), np.float32))

    def counts():
        """Returns the numbers of executions in one scrape, as soon as they are 200 in all."""
        metrics = server.scrape()
        found = {model: total(metrics, "nv_inference_exec_count", model=model) for model in models}
        return found if sum(found.values()) >= 200 else None

    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        with held(server, *models):
            for model in [model for model in models for _ in range(queued)]:
                client.async_infer(model, [tensor], callback=lambda result, error: errors.put(error))
            for model in models:
                until_received(server, model, queued)
        counts = eventually("200 executions", counts)
        assert {errors.get(timeout=DEADLINE_S) for _ in range(queued * len(models))} == {None}
    assert counts["p1"] < queued, "every model has waiting requests"
    assert counts["p1"] == pytest.approx(2 * counts["p2"], rel=0.15)
    assert counts["p1"] == pytest.approx(4 * counts["p4"], rel=0.15)
    check_released(server)


def test_shares_of_a_run_of_tritons_suite(serve):
    """`L0_rate_limiter`: eight requests in flight to each of two models of priorities 1 and 2, until 80 are sent to the first. A real
    Triton 2.51 answers 80 and 44 of them."""
    server = serve({f"p{p}": delay(20, group("R 1 global", limiter=f"priority: {p}")) for p in (1, 2)}, ON)
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
    sent, errors, over = {"p1": 0, "p2": 0}, [], threading.Event()

    def send(model: str, begun: threading.Event):
        """Keeps eight requests in flight."""
        free = threading.Semaphore(8)

        def answered(result, error):
            errors.append(error)
            free.release()

        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            while not over.is_set():
                assert free.acquire(timeout=DEADLINE_S)
                client.async_infer(model, [tensor], callback=answered)
                begun.set()
                sent[model] += 1
                if sent[model] == 80:
                    over.set()
            assert all(free.acquire(timeout=DEADLINE_S) for _ in range(8))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        begun = threading.Event()
        runs = [pool.submit(send, "p1", begun)]
        assert begun.wait(DEADLINE_S)
        until_dispatched(server, "p1", 1)
        runs.append(pool.submit(send, "p2", begun))
        for run in runs:
            run.result()
    assert set(errors) == {None}
    counts = {model: total(server.scrape(), "nv_inference_request_success", model=model) for model in sent}
    assert counts == sent and counts["p1"] == 80
    assert counts["p1"] / counts["p2"] > 1.8, counts


def test_waiting_batches_grow(serve):
    """A batch is formed when its instance gets the resource, from all requests that wait at that time."""
    models = {"holder": delay(1, group("R 1 global")), "batched": delay(1, group("R 1 global"), "dynamic_batching { }")}
    server = serve(models, ON)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        waiting = ("pharos_rate_limiter_waiting_instances", (("model", "batched"), ("version", "1")))
        with held(server, "holder"):
            first = pool.submit(server.infer, "holder", REQUEST)
            eventually("the resource is held", lambda: resource(server, "R", "global", "used") == 1)
            others = [pool.submit(server.infer, "batched", REQUEST) for _ in range(4)]
            until_received(server, "batched", 4)
            eventually("an instance waits", lambda: server.scrape()[waiting] == 1)
        assert [request.result()[0] for request in [first, *others]] == [200] * 5
    assert [(entry["batch_size"], entry["compute_infer"]["count"]) for entry in server.statistics("batched")["batch_stats"]] == [(4, 1)]


@pytest.mark.parametrize(
    "models, options, reason",
    [
        (
            {"m": group("R 5 global")},
            ["--rate-limit-resource=R:4"],
            'Resource count for "R" is limited to 4 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 5",
        ),
        (
            {"m": group("R 1 global") + group("R 1")},
            [],
            'Resource "R" is present as both global and device-specific resource in the model configuration.',
        ),
        (
            {"m": "instance_group { passive: true }"},
            [],
            "all instances of model 'm' are passive: none would execute its requests",
        ),
    ],
)
def test_unsatisfiable_resources_fail_the_load(serve, models, options, reason):
    """The load is refused with Triton's reason, and the other models serve."""
    models = {name: config("identity", groups) for name, groups in models.items()}
    good = {"good": config("identity", group("R 1 global" if options else "Q 1"))}
    server = serve(models | good, ON, "--exit-on-error=false", "--strict-readiness=false", *options)
    eventually("the load has failed", lambda: "serving without the models that failed to load: m" in server.log_tail())
    assert server.index()["m"][0]["state"] == "UNAVAILABLE"
    assert server.index()["m"][0]["reason"] == reason
    assert server.infer("good", REQUEST)[0] == 200


def test_explicit_limits(serve):
    """With a limit of twice an instance's need, two execute concurrently; CPU instances use the resources of device 0."""
    models = {name: delay(200, group("R 2")) for name in "abc"}
    server = serve(models, ON, "--rate-limit-resource=R:4:0")
    assert resource(server, "R", "0", "limit") == 4
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with held(server, *models):
            requests = [pool.submit(server.infer, model, REQUEST) for model in models]
            for model in models:
                until_received(server, model, 1)
            eventually("two instances execute", lambda: resource(server, "R", "0", "used") == 4)
            execute = lambda: sum(dispatched(server, model) for model in models)  # noqa: E731
            holds_for("the third instance waits", 0.2, lambda: execute() == 2)
        assert {request.result()[0] for request in requests} == {200}
    check_released(server, device="0")


@pytest.mark.parametrize("value", ["R", "R:1:2:3", "R:x"])
def test_bad_flags_end_the_start(serve, value):
    server = serve({}, f"--rate-limit-resource={value}", launch_only=True)
    assert server.process.wait(DEADLINE_S) == 2
    text = "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got " + value
    assert text in server.log_tail()


def test_a_killed_worker_releases_its_resource(serve):
    """The worker that holds the only resource is killed repeatedly; all requests are answered."""
    models = {name: delay(20, group("R 1 global")) for name in ("a", "b")}
    server = serve(models, ON)
    with Load(server, models) as load:
        for _ in range(6):
            eventually("the resource is held", lambda: resource(server, "R", "global", "used") == 1)
            for pid in list(server.workers())[:1]:
                os.kill(pid, signal.SIGKILL)
            run_for("both models execute between two kills", 0.3)
        before = {model: len(answers) for model, answers in load.answers.items()}
        eventually("both models execute", lambda: all(len(load.answers[m]) > before[m] + 10 for m in models))
    statuses = [status for answers in load.answers.values() for status in answers]
    assert statuses.count(200) > 50 and set(statuses) <= {200, 503}
    check_released(server)
    eventually("all instances are ready", lambda: server.get("/v2/health/ready")[0] == 200)
    assert [server.infer(model, REQUEST)[0] for model in models] == [200, 200]


def test_a_cancelled_request_leaves_the_queue(serve):
    """A client that disconnects while its request waits for a resource leaves no staged inputs and no held resource."""
    import http.client
    import json

    server = serve({"a": delay(600, group("R 1 global")), "b": delay(1, group("R 1 global"))}, ON)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.infer, "a", REQUEST)
        eventually("the resource is held", lambda: resource(server, "R", "global", "used") == 1)
        with held(server, "a"):
            connection = http.client.HTTPConnection(server.http)
            connection.request("POST", "/v2/models/b/infer", json.dumps(REQUEST))
            waiting = ("pharos_rate_limiter_waiting_instances", (("model", "b"), ("version", "1")))
            eventually("the request waits", lambda: server.scrape()[waiting] == 1)
            connection.close()
            eventually("the request is removed", lambda: server.scrape()[waiting] == 0)
            assert not first.done()
        assert first.result()[0] == 200
    check_released(server)
    assert executions(server, "b") == 0


def instance_states(server) -> dict:
    """Returns the state of each instance of all models."""
    found = [dict(labels) for (name, labels), value in server.scrape().items() if name == "pharos_instance_state" and value == 1]
    return {labels["instance"]: labels["state"] for labels in found}


def instances_at_work(server) -> set:
    """Returns the instances that hold inputs."""
    arenas = [(dict(labels), value) for (name, labels), value in server.scrape().items() if name == "pharos_arena_used_bytes"]
    return {labels["instance"] for labels, value in arenas if labels["direction"] == "input" and value}


def test_instances_by_group(serve):
    """Named and unnamed groups, counts and kinds determine the instances and their names; passive instances are loaded and get no
    requests."""
    groups = """instance_group [ { count: 2 kind: KIND_CPU }, { name: "auto" kind: KIND_AUTO }, { name: "other" kind: KIND_MODEL },
      { name: "spare" count: 2 passive: true } ]"""
    server = serve({"m": delay(50, groups), "plain": config("identity", "")})
    assert instance_states(server) == dict.fromkeys(
        ["m_0_0", "m_0_1", "auto_0", "other_0", "spare_0", "spare_1", "plain_0"], "ready"
    )
    kinds = re.findall(r'"kind":"(\w+)"', server.get("/v2/models/m/config")[1])
    assert kinds == ["KIND_CPU", "KIND_CPU", "KIND_MODEL", "KIND_CPU"]

    active = {"m_0_0", "m_0_1", "auto_0", "other_0"}
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        with held(server):
            requests = [pool.submit(server.infer, "m", REQUEST) for _ in range(5)]
            until_received(server, "m", 5)
            eventually("four instances execute", lambda: instances_at_work(server) >= active)
            assert instances_at_work(server) == active, "passive instances do not execute"
        assert {request.result()[0] for request in requests} == {200}



def test_requests_use_the_least_loaded_instance_and_survive_a_worker(serve):
    """With one of two instances busy, the next request uses the other; when a worker dies, the other instance answers its
    requests."""
    server = serve({"m": delay(150, "instance_group { count: 2 }")})
    workers = server.workers()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with held(server, "m"):
            requests = [pool.submit(server.infer, "m", REQUEST) for _ in range(2)]
            eventually("both instances execute", lambda: len(instances_at_work(server)) == 2)
        assert {request.result()[0] for request in requests} == {200}
        with held(server, "m"):
            requests = [pool.submit(server.infer, "m", REQUEST) for _ in range(8)]
            until_received(server, "m", 10)
            os.kill(min(workers), signal.SIGKILL)
        assert {request.result()[0] for request in requests} == {200}
    assert total(server.scrape(), "nv_inference_request_success", model="m") == 10


def test_sequences_share_a_resource(serve):
    """Two instances with sequences share one resource: batches never overlap, every sequence gets its sum, and the resource is
    released in the end."""
    delay_ms, clients, steps = 20, 6, 5
    model = sequence_config(
        "max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 }",
        instances=2,
        delay_ms=delay_ms,
    ).replace("count: 2", 'count: 2 rate_limiter { resources [ { name: "R" count: 1 global: true } ] }')
    server = serve({"sums": model}, ON)

    def sequence(number: int) -> list:
        sums = []
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            for turn in range(steps):
                tensor = tritonclient.grpc.InferInput("VALUE", [1, 1], "INT32")
                tensor.set_data_from_numpy(np.array([[number]], np.int32))
                flags = {"sequence_start": turn == 0, "sequence_end": turn == steps - 1}
                result = client.infer("sums", [tensor], sequence_id=number, **flags)
                sums.append(result.as_numpy("SUM").item())
        return sums

    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        got = list(pool.map(sequence, range(1, clients + 1)))
    took = time.monotonic() - begin
    assert got == [[number * (turn + 1) for turn in range(steps)] for number in range(1, clients + 1)]
    executions = server.statistics("sums")["execution_count"]
    assert took >= executions * delay_ms / 1000, "two batches overlapped"
    check_released(server)
