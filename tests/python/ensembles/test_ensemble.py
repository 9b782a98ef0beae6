"""Ensembles: concurrent steps, pruning, cancellation, statistics, the response cache, classification, and the example.
`test_ensemble_tables.py` compares ensembles with a real Triton."""

import concurrent.futures
import json
import os
import queue
import signal
import subprocess
import sys

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from ensembles import runner as ensembles
from ensembles.ensemble_tables import SERVING, Ensemble, chain, step
from harness.generate import one_to_one, parameters
from harness.models import write
from harness.processes import held
from harness.server import EXAMPLES, ROOT, Server, total
from harness.statistics import dispatched, until_dispatched, until_received
from harness.waiting import DEADLINE_S, eventually

sys.path.insert(0, str(ROOT / "examples"))

STEP, OVERHEAD = "pharos_ensemble_step_duration_seconds", "pharos_ensemble_overhead_duration_seconds"
DELAY_S = 0.3
"""Execution time of a batch in the member `slow`."""
HELD_S = 600
"""Execution time of a batch in the member `held`, unless it is cancelled."""

TOP = Ensemble("cached", chain("fp32", "slow"), more="response_cache { enable: true }\n")
FAILS_BESIDE = Ensemble(
    "fails_beside",
    (
        *chain("failing", last="a"),
        *chain("held", last="b"),
        step("two", {"INPUT0": "a", "INPUT1": "b"}, {"OUTPUT0": "Y"}),
    ),
)
HELD = Ensemble("waits", chain("fp32", "held"))
MANY = Ensemble("gathered", chain("fp32", "batched"))
TOGETHER = Ensemble(
    "together",
    (*chain("slow", last="a"), *chain("slow_too", last="b"), step("two", {"INPUT0": "a", "INPUT1": "b"}, {"OUTPUT0": "Y"})),
)


def delay_model(folder, name: str, seconds: float, more: str = ""):
    """Writes a model with one input and this execution time."""
    config = f'backend: "test"\nmax_batch_size: 8\n{one_to_one("FP32")}{more}'
    write(folder, name, config + parameters(function="delay", delay_ms=int(seconds * 1000)))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with the ensembles of the tables and of this module, with a response cache."""
    folder = tmp_path_factory.mktemp("ensembles")
    own = [TOP, FAILS_BESIDE, HELD, MANY, TOGETHER]
    repository = ensembles.build(folder / "models", [*SERVING, *own], False)
    delay_model(repository, "held", HELD_S)
    delay_model(repository, "slow_too", DELAY_S)
    wait = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 5000000 }\n"
    delay_model(repository, "batched", 0, wait)
    with Server(folder, [repository, EXAMPLES], ["--cache-config=local,size=1048576"]) as running:
        yield running


def tensor(module, values, name="X"):
    """Returns an input."""
    array = np.asarray(values)
    datatype = {"float32": "FP32", "uint8": "UINT8"}[array.dtype.name]
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def ask(server, model: str, values, module=tritonclient.http, **more):
    """Sends one request with the input X."""
    address = server.http if module is tritonclient.http else server.grpc
    with module.InferenceServerClient(address) as client:
        return client.infer(model, [tensor(module, np.asarray(values, np.float32))], **more)


def success(server, model: str) -> int:
    """Returns the number of successful requests of a model."""
    return server.statistics(model)["inference_stats"]["success"]["count"]


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_independent_steps_run_concurrently(server, module):
    """The second of two independent steps begins before the first ends; the ensemble's execution time is the members' sum."""
    before = server.statistics("together")["inference_stats"]
    sent = {name: dispatched(server, name) for name in ("slow", "slow_too")}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with held(server, "slow", "slow_too"):
            result = pool.submit(ask, server, "together", [[1, 2]], module)
            for name, count in sent.items():
                until_dispatched(server, name, count + 1)
        assert result.result().as_numpy("Y").tolist() == [[2, 4]]
    after = server.statistics("together")["inference_stats"]
    grown = {key: after[key]["ns"] - before[key]["ns"] for key in after}
    assert grown["compute_infer"] >= 2 * DELAY_S * 1e9 and grown["success"] >= DELAY_S * 1e9


def test_steps_that_are_not_needed_do_not_run(server):
    """If only A is requested, the failing step and the other step do not run."""
    counts = {name: success(server, name) for name in ("fp32", "small")}
    wanted = [tritonclient.http.InferRequestedOutput("A")]
    assert ask(server, "branches", [[1, 2]], outputs=wanted).as_numpy("A").tolist() == [[1, 2]]
    assert {name: success(server, name) - count for name, count in counts.items()} == {"fp32": 1, "small": 0}


def test_requests_of_an_ensemble_share_a_members_batch(server):
    """Four requests of the ensemble form one batch of its member."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: ask(server, "gathered", [[n]]).as_numpy("Y").tolist(), range(4)))
    assert answers == [[[n]] for n in range(4)]
    batches = {b["batch_size"]: b["compute_infer"]["count"] for b in server.statistics("batched")["batch_stats"]}
    assert batches == {4: 1}
    own = {b["batch_size"]: b["compute_infer"]["count"] for b in server.statistics("gathered")["batch_stats"]}
    assert own == {1: 4}


def test_a_failed_step_ends_the_others(server):
    """The answer does not wait for the step concurrent with the failed one; that step is cancelled."""
    before = server.statistics("held")["inference_stats"]["fail"]["count"]
    sent = dispatched(server, "held")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with held(server, "failing"):
            answer = pool.submit(ask, server, "fails_beside", [[1]])
            until_dispatched(server, "held", sent + 1)
        with pytest.raises(InferenceServerException, match="in ensemble 'fails_beside', requested failure"):
            answer.result()
    fails = lambda: server.statistics("held")["inference_stats"]["fail"]["count"]  # noqa: E731
    eventually("the other step is counted as failed", lambda: fails() == before + 1)
    failure = {"model": "fails_beside", "reason": "OTHER"}
    assert total(server.scrape(), "nv_inference_request_failure", **failure) == 1


def test_a_cancelled_call_ends_the_steps(server):
    """A cancelled gRPC call cancels the running step long before its end."""
    cancelled = lambda model: total(  # noqa: E731
        server.scrape(), "nv_inference_request_failure", model=model, reason="CANCELED"
    )
    before = cancelled("held")
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        first = success(server, "fp32")
        values = np.ones([1, 1], np.float32)
        call = client.async_infer("waits", [tensor(tritonclient.grpc, values)], lambda result, error: None)
        eventually("the first step is done", lambda: success(server, "fp32") > first)
        call.cancel()
        eventually("the ensemble is counted as cancelled", lambda: cancelled("waits") == 1)
        eventually("the step is counted as cancelled", lambda: cancelled("held") == before + 1)


@pytest.mark.smoke
def test_statistics_and_metrics(server):
    """An ensemble is counted as by Triton; its pending gauge stays 0; each step has its wall-clock time."""
    before = server.scrape()
    counts = lambda metrics, name, **labels: total(metrics, name, model="diamond", **labels)  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(ask, server, "diamond", [[n, n]]) for n in range(3)]
        pending = set()
        while not all(one.done() for one in running):
            pending.add(counts(server.scrape(), "nv_inference_pending_request_count"))
        assert [one.result().as_numpy("SUM").tolist() for one in running] == [[[2 * n, 2 * n]] for n in range(3)]
    after = server.scrape()
    grown = lambda name, **labels: counts(after, name, **labels) - counts(before, name, **labels)  # noqa: E731
    assert pending == {0}
    for name in ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count"):
        assert grown(name) == 3
    for number, member in enumerate(["fp32", "slow", "slow", "two"]):
        assert grown(f"{STEP}_count", step=str(number), member=member) == 3
    assert grown(f"{STEP}_sum", step="1") >= 3 * DELAY_S
    assert grown(f"{STEP}_sum", step="0") < DELAY_S
    assert grown(f"{OVERHEAD}_count") == 3
    # Wall clock: all but the overhead was spent in the first step, in one or both of the slow steps, and in the last.
    assert grown(f"{OVERHEAD}_sum") < 0.1 * grown("nv_inference_request_duration_us") / 1e6
    assert counts(after, "pharos_instances") == 0


def test_series_of_steps_exist_from_the_start(server):
    """They are 0 before the first request."""
    metrics = server.scrape()
    labels = {"model": "optional_needed", "version": "1", "step": "0", "member": "fp32"}
    assert [v for (n, pairs), v in metrics.items() if n == f"{STEP}_count" and set(labels.items()) <= set(pairs)] == [0]


@pytest.mark.smoke
def test_a_cache_hit_runs_no_step(server):
    """The second of two equal requests reaches no member, and only the ensemble counts a hit."""
    first = ask(server, "cached", [[5, 6]], request_id="one")
    counts = {name: success(server, name) for name in ("fp32", "slow")}
    second = ask(server, "cached", [[5, 6]], request_id="two")
    assert second.as_numpy("Y").tolist() == first.as_numpy("Y").tolist() == [[5, 6]]
    assert second.get_response()["id"] == "two"
    assert {name: success(server, name) for name in counts} == counts
    stats = server.statistics("cached")
    inference = {key: stats["inference_stats"][key]["count"] for key in ("success", "cache_hit", "cache_miss")}
    assert inference == {"success": 2, "cache_hit": 1, "cache_miss": 1}
    assert stats["execution_count"] == stats["inference_count"] == 1
    assert all(server.statistics(name)["inference_stats"]["cache_miss"]["count"] == 0 for name in counts)


def test_classification_with_inherited_labels(server):
    """The ensemble has no label file; the model that makes the output has one."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        wanted = [tritonclient.http.InferRequestedOutput("probabilities", class_count=2)]
        picture = tensor(tritonclient.http, scanned()[:3], "picture")
        found = client.infer("digits_pipeline", [picture], outputs=wanted).as_numpy("probabilities")
    assert found.shape == (3, 2)
    labels = (EXAMPLES / "digits/labels.txt").read_text().split("\n")
    for (first, _), digit in zip(found.tolist(), held_out()[1]):
        value, index, label = first.decode().split(":")
        assert (int(index), label) == (int(digit), labels[int(digit)])
        assert float(value) > 0.5


def held_out() -> tuple:
    """Returns the held-out pictures of the example and their digits."""
    data = np.load(ROOT / "examples/digits_held_out.npz")
    return data["images"], data["labels"]


def scanned() -> np.ndarray:
    """Returns the same pictures in the format of a scanner."""
    from classify import as_scanned

    return as_scanned(held_out()[0].astype(np.float32))


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_the_example_equals_its_steps_run_separately(server, module):
    """The pipeline's answers are those of its members called one after the other, and they are correct."""
    address = server.http if module is tritonclient.http else server.grpc
    pictures, digits = scanned()[:32], held_out()[1][:32]
    with module.InferenceServerClient(address) as client:
        one = client.infer("digits_preprocess", [tensor(module, pictures, "picture")])
        two = client.infer("digits", [tensor(module, one.as_numpy("image"), "image")])
        three = client.infer("digits_postprocess", [tensor(module, two.as_numpy("probabilities"), "probabilities")])
        whole = client.infer("digits_pipeline", [tensor(module, pictures, "picture")])
    np.testing.assert_array_equal(whole.as_numpy("probabilities"), two.as_numpy("probabilities"))
    for name in ("digit", "confidence", "sure"):
        np.testing.assert_array_equal(whole.as_numpy(name), three.as_numpy(name))
    assert (whole.as_numpy("digit")[:, 0] == digits).mean() > 0.9
    np.testing.assert_array_equal(whole.as_numpy("sure"), whole.as_numpy("confidence") > 0.9)


def test_the_examples_command(server):
    """The command of docs/src/guides/ensembles.md."""
    command = [sys.executable, "examples/classify.py", "--pipeline", "--url", server.http]
    pictures = [f"examples/images/digit_{n}.pgm" for n in range(10)]
    done = subprocess.run(command + pictures, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert [line.split(": ")[1][0] for line in done.stdout.splitlines()] == [str(n) for n in range(10)]


def test_the_examples_files_are_what_its_script_writes(tmp_path):
    """The committed ONNX files are up to date."""
    import make_digits_pipeline as script

    for name, file in [("digits_preprocess", script.preprocess()), ("digits_postprocess", script.postprocess())]:
        assert (EXAMPLES / name / "1/model.onnx").read_bytes() == file


def test_large_tensors_pass(server):
    """16 MiB through three members, in both directions of the arenas."""
    values = np.arange(4 << 20, dtype=np.float32).reshape(1, -1)
    np.testing.assert_array_equal(ask(server, "nested", values, tritonclient.grpc).as_numpy("Y"), values)


def test_exit_finishes_a_running_ensemble(tmp_path):
    """SIGTERM while the first of two slow steps runs: the second still runs, and the client gets its answer."""
    ensemble = Ensemble("two_slow", chain("slow", "slow"))
    with Server(tmp_path, [ensembles.build(tmp_path / "models", [ensemble], False)]) as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, server, "two_slow", [[7]])
            pending = ("nv_inference_count", {"model": "two_slow"})
            assert total(server.scrape(), pending[0], **pending[1]) == 0
            until_dispatched(server, "slow", 1)
            assert server.stop() == 0
            assert answer.result().as_numpy("Y").tolist() == [[7]]


def test_an_ensemble_is_as_ready_as_its_members(tmp_path):
    """If a member's worker is killed, the ensemble is not ready until it is back."""
    ensemble = Ensemble("one", chain("fp32"))
    with Server(tmp_path, [ensembles.build(tmp_path / "models", [ensemble], False)]) as server:
        ready = lambda: server.get("/v2/models/one/ready")[0] == 200  # noqa: E731
        assert ready()
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        eventually("the ensemble is not ready", lambda: not ready())
        eventually("the ensemble is ready again", ready)
        assert ask(server, "one", [[1]]).as_numpy("Y").tolist() == [[1]]
        assert server.index()["one"] == [{"name": "one", "version": "1", "state": "READY"}]


def test_parameters_reach_the_members(tmp_path):
    """Priority and timeout of the request apply to its steps: in a member with priority levels, the higher priority is served
    first."""
    ensemble = Ensemble("ranked", chain("levels"))
    repository = ensembles.build(tmp_path / "models", [ensemble], False)
    levels = "dynamic_batching { priority_levels: 2 default_priority_level: 2 preferred_batch_size: [ 1 ] "
    levels += "default_queue_policy { max_queue_size: 100 allow_timeout_override: true default_timeout_microseconds: 600000000 } }\n"
    delay_model(repository, "levels", 0.5, levels)
    with Server(tmp_path, [repository]) as server:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:

            def send(priority: int, timeout_us=None):
                answer = pool.submit(ask, server, "ranked", [[priority]], priority=priority, timeout=timeout_us)
                done = answer.add_done_callback(lambda _: order.append(priority))
                sent.append(priority)
                until_received(server, "levels", len(sent))
                return done or answer

            order, sent = [], []
            with held(server, "levels"):
                late = [send(2), send(2), send(1), send(2, 1000)]
                with pytest.raises(InferenceServerException, match="in ensemble 'ranked', .*[Tt]imeout"):
                    late[3].result()
            assert [answer.result().as_numpy("Y").item() for answer in late[:3]] == [2, 2, 1]
        assert order == [2, 2, 1, 2], "the one that timed out, the executing one, then by priority"
        stats = json.loads(server.get("/v2/models/levels/stats")[1])["model_stats"][0]
        assert stats["inference_stats"]["fail"]["count"] == 1


def test_over_a_grpc_stream(server):
    """The requests of a stream are answered in order, with errors in band."""
    answers = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for model, number in [("together", 1), ("one", 2), ("fails", 3), ("one", 4)]:
            client.async_stream_infer(model, [tensor(tritonclient.grpc, np.array([[number]], np.float32))])
        first, second, third, fourth = (answers.get(timeout=DEADLINE_S) for _ in range(4))
        client.stop_stream()
    assert [answer.as_numpy("Y").tolist() for answer in (first, second, fourth)] == [[[2]], [[2]], [[4]]]
    assert "in ensemble 'fails', requested failure" in third.message()
    assert second.get_response().parameters["sequence_id"].int64_param == 0
