"""The dynamic batcher observed by clients: batches, refusals and timeouts."""

import concurrent.futures
import contextlib
import time

import pytest

from harness.inference import one
from harness.processes import held
from harness.server import total
from harness.statistics import sizes, until_dispatched, until_received
from harness.stream_models import build, model as config, pair

REQUEST = one("FP32", [1, 2], [1, 2])


def at_once(server, model: str, requests: list) -> list:
    """Sends all requests concurrently; returns the answers in the order of the requests."""
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: server.infer(model, request), requests))


@contextlib.contextmanager
def queued_behind_one(server, model: str, requests: list):
    """Sends one request, which executes until the block ends, then the others, which wait or are refused meanwhile. Yields the
    pending answers, and waits for all of them."""
    with concurrent.futures.ThreadPoolExecutor(1 + len(requests)) as pool, held(server, model):
        first = pool.submit(server.infer, model, REQUEST)
        until_dispatched(server, model, 1)
        others = [pool.submit(server.infer, model, request) for request in requests]
        yield others
    assert first.result()[0] == 200


@pytest.mark.smoke
def test_waiting_requests_are_executed_together(start):
    """While the model is busy, other requests queue up; each then gets its rows of the batch's result."""
    server = start(["delay_200"])
    requests = [one("FP32", [1, 2], [n, -n]) for n in range(16)]
    with queued_behind_one(server, "delay_200", requests) as answers:
        until_received(server, "delay_200", 17)
    for n, pending in enumerate(answers):
        status, answer = pending.result()
        assert status == 200, answer
        assert answer["outputs"][0]["shape"] == [1, 2]
        assert answer["outputs"][0]["data"] == [n, -n]
    assert sizes(server, "delay_200") == {1: 1, 4: 4}, "batches grow up to max_batch_size"


def test_different_shapes_are_not_mixed(start):
    """Requests of different shapes are never in the same batch."""
    server = start(["batched"])
    requests = [one("FP32", [1, 1 + n % 2], [n] * (1 + n % 2)) for n in range(12)]
    for n, (status, answer) in enumerate(at_once(server, "batched", requests)):
        assert (status, answer["outputs"][0]["data"]) == (200, [n] * (1 + n % 2))


def test_queue_delay_waits_for_more_requests(start):
    """A single request waits for others during the configured delay of 100 ms, and not longer."""
    server = start(["batched"])
    started = time.monotonic()
    assert server.infer("batched", REQUEST)[0] == 200
    assert 0.1 <= time.monotonic() - started < 5
    assert 100e6 <= server.statistics("batched")["inference_stats"]["queue"]["ns"] < 5e9


def test_a_preferred_batch_is_executed_at_once(start):
    """A full preferred batch does not wait for the queue delay of ten minutes."""
    server = start(["preferred"])
    assert {status for status, _ in at_once(server, "preferred", [REQUEST] * 4)} == {200}
    assert sizes(server, "preferred") == {4: 1}


@pytest.mark.smoke
def test_full_queue_refuses(start):
    """A request beyond `max_queue_size` is refused at once with 503, and is in no statistic."""
    server = start(["queue_limit"])
    with queued_behind_one(server, "queue_limit", [REQUEST] * 8) as answers:
        answered = concurrent.futures.as_completed(answers)
        refused = [next(answered).result() for _ in range(6)]
    assert {status for status, _ in refused} == {503}
    assert all("Exceeds maximum queue size" in answer["error"] for _, answer in refused)
    assert sorted(answer.result()[0] for answer in answers) == [200] * 2 + [503] * 6
    statistics = server.statistics("queue_limit")
    assert statistics["inference_stats"]["success"]["count"] == 3
    assert statistics["inference_stats"]["fail"]["count"] == 0


def test_a_queue_timeout_is_refused(start):
    """A request that exceeds its queue timeout fails with 503, and counts as REJECTED."""
    server = start(["queue_timeout"])
    with queued_behind_one(server, "queue_timeout", [REQUEST] * 3) as answers:
        refused = [answer.result() for answer in answers]
    assert {status for status, _ in refused} == {503}
    assert all("Request timeout expired" in answer["error"] for _, answer in refused)
    labels = {"model": "queue_timeout", "reason": "REJECTED"}
    assert total(server.scrape(), "nv_inference_request_failure", **labels) == 3
    assert server.statistics("queue_timeout")["inference_stats"]["fail"]["count"] == 3


def test_requests_that_fit_in_no_common_batch_are_executed_alone(start, tmp_path):
    """The ids and parameters of a batch have a limit. Requests with long parameters do not fail the others of their batch."""
    text = config("identity", pair(0, "INT32", [2]), batch=128, decoupled=False, extra="dynamic_batching { }\n")
    server = start([], repository=build(tmp_path / "long", {"wide": text}))

    def request(n: int, **more) -> dict:
        return {"inputs": [{"name": "I0", "datatype": "INT32", "shape": [1, 2], "data": [n, -n]}], **more}

    requests = [request(n, parameters={"long": "x" * 1_000_000}) for n in range(70)] + [request(70)]
    with concurrent.futures.ThreadPoolExecutor(72) as pool, held(server, "wide"):
        first = pool.submit(server.infer, "wide", request(0))
        until_dispatched(server, "wide", 1)
        others = [pool.submit(server.infer, "wide", body) for body in requests]
        until_received(server, "wide", 72)
    assert first.result()[0] == 200
    for n, (status, answer) in enumerate(other.result() for other in others):
        assert status == 200 and answer["outputs"][0]["data"] == [n, -n], answer
    assert sizes(server, "wide") == {1: 72}
    assert total(server.scrape(), "nv_inference_pending_request_count", model="wide") == 0


@pytest.mark.parametrize("model", ["identity_fp32_nobatch", "identity_fp32"])
def test_without_batching_each_request_is_one_execution(start, model):
    """Without `dynamic_batching` in the configuration, requests are never combined."""
    server = start([model])
    shape = [2] if model.endswith("nobatch") else [1, 2]
    answers = at_once(server, model, [one("FP32", shape, [1, 2])] * 12)
    assert {status for status, _ in answers} == {200}
    statistics = server.statistics(model)
    assert statistics["execution_count"] == statistics["inference_count"] == 12
