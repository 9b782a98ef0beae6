"""`--worker-spin-us`: a worker looks for its next batch before it sleeps, while batches follow each other closely."""

import http.client
import json
import os
import statistics
from pathlib import Path

import pytest

from harness.inference import simple
from harness.processes import sleeps
from harness.server import EXAMPLES
from harness.waiting import DEADLINE_S, eventually, run_for

REQUESTS = 200


def sleeps_of_worker(server) -> int:
    """Returns how often the only worker has gone to sleep so far."""
    (worker,) = server.workers()
    return sleeps(Path(f"/proc/{worker}"))


def processor_time_s(server) -> float:
    """Returns the processor time of the only worker."""
    (worker,) = server.workers()
    fields = Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sleeps_per_request(server) -> float:
    """Sends requests one after the other over one connection."""
    connection = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
    body, before = json.dumps(simple()), sleeps_of_worker(server)
    for _ in range(REQUESTS):
        connection.request("POST", "/v2/models/simple/infer", body)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
    connection.close()
    return (sleeps_of_worker(server) - before) / REQUESTS


@pytest.fixture
def serve(start):
    """Starts a server for `simple` alone."""

    def begin(spin_us: int):
        return start([], f"--worker-spin-us={spin_us}", "--model-control-mode=explicit", "--load-model=simple", repository=EXAMPLES)

    return begin


@pytest.mark.alone
def test_a_worker_does_not_sleep_between_close_batches(serve):
    server = serve(10_000)
    # The best of many attempts: on a busy machine, the pause between two requests can exceed the limit, and other processes take
    # the processor. Without the limit, a worker sleeps for every request (the next test).
    eventually("the worker sleeps for less than half of the requests", lambda: sleeps_per_request(server) < 0.5)


@pytest.mark.alone
def test_zero_sends_it_to_sleep_each_time(serve):
    server = serve(0)
    # On a busy machine, the next request can arrive before the worker has slept.
    assert statistics.median(sleeps_per_request(server) for _ in range(5)) > 0.9


def test_without_requests_a_worker_uses_no_processor_time(serve):
    server = serve(10_000)
    sleeps_per_request(server)
    before = processor_time_s(server)
    run_for("a worker that spins would use most of this time", 1)
    assert processor_time_s(server) - before < 0.3


def test_the_limit_is_checked(start):
    server = start([], "--worker-spin-us=10001", repository=EXAMPLES, wait=False)
    assert server.process.wait(DEADLINE_S) == 2
    text = server.log_tail()
    assert "--worker-spin-us" in text and "10001" in text and "10000" in text, text
