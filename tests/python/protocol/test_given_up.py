"""Requests that their clients give up: in the queue, behind a batch that executes, and while they execute."""

import json
import time

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness.connections import connect, post
from harness.inference import one
from harness.models import IO, write
from harness.server import total
from harness.statistics import until_dispatched
from harness.waiting import eventually, pause_as_client

REQUEST = one("FP32", [1, 2], [1, 2])


def slow(seconds: float, batch=1, more="") -> str:
    """A model that takes so long for each batch."""
    return f"""backend: "builtin" max_batch_size: {batch} {IO} {more}
parameters {{ key: "function" value {{ string_value: "delay" }} }}
parameters {{ key: "delay_ms" value {{ string_value: "{int(seconds * 1000)}" }} }}
"""


def leave(server, model: str):
    """Opens a connection and sends a request; the connection is to be closed."""
    connection = connect(server.http_port)
    connection.sendall(post(f"/v2/models/{model}/infer", json.dumps(REQUEST).encode()))
    return connection


def gone(server, model: str) -> tuple:
    """Requests that are counted as cancelled, and that are pending."""
    metrics = server.scrape()
    cancelled = total(metrics, "nv_inference_request_failure", model=model, reason="CANCELED")
    return cancelled, total(metrics, "nv_inference_pending_request_count", model=model)


@pytest.fixture
def long(start, tmp_path):
    """A server of a model that takes a minute, and of one that batches."""
    folder = write(tmp_path / "models", "long", slow(60))
    write(folder, "batching", slow(60, 2, "dynamic_batching { max_queue_delay_microseconds: 100000 }"))
    return start([], repository=folder)


def test_an_executing_request_is_given_up(long):
    """The backend hears that its only client is gone, and is free for the next at once; the failure is counted."""
    with leave(long, "long"):
        until_dispatched(long, "long", 1)
    eventually("it is counted", 5, lambda: gone(long, "long") == (1, 0))
    statistics = long.statistics("long")["inference_stats"]
    assert statistics["fail"]["count"] == 1
    assert statistics["fail"]["ns"] < 30e9


def test_a_request_behind_another_is_never_executed(long):
    """Three clients leave: one executes, one has been sent behind it, one waits. None holds the model up."""
    connections = [leave(long, "long") for _ in range(3)]
    eventually("two wait", 10, lambda: gone(long, "long")[1] == 2)
    for connection in reversed(connections):
        connection.close()
    eventually("all are counted", 5, lambda: gone(long, "long") == (3, 0))
    # One execution was broken off and one was spared, so both say that they took no time to speak of.
    assert long.statistics("long")["inference_stats"]["fail"]["count"] == 3


def test_a_batch_goes_on_for_those_who_stay(long, start, tmp_path):
    """One of two clients of a batch leaves: the other is answered as if nothing had happened."""
    folder = write(tmp_path / "two", "two", slow(1, 2, "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 5000000 }"))
    server = start([], repository=folder)
    leaving, staying = leave(server, "two"), leave(server, "two")
    until_dispatched(server, "two", 1)
    leaving.close()
    with staying:
        staying.settimeout(20)
        assert staying.recv(1000).startswith(b"HTTP/1.1 200")
    assert server.statistics("two")["execution_count"] == 1
    # Whoever leaves a batch that is executed is answered like the others.
    assert server.statistics("two")["inference_stats"]["success"]["count"] == 2


def grpc_request(server, **options):
    """A request of tritonclient, with the options of `infer`."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
        return client.infer("long", [tensor], **options)


def test_a_deadline_ends_a_request(long):
    """gRPC's deadline, kept by the client and told to the server: the request is gone when it is over."""
    started = time.monotonic()
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        grpc_request(long, client_timeout=1)
    assert time.monotonic() - started < 5
    eventually("it is counted", 5, lambda: gone(long, "long") == (1, 0))


def test_a_cancelled_call_ends_its_request(long):
    """gRPC's cancellation, of requests that execute and that wait."""
    with tritonclient.grpc.InferenceServerClient(long.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
        calls = [client.async_infer("long", [tensor], callback=lambda result, error: None) for _ in range(4)]
        eventually("three wait", 10, lambda: gone(long, "long")[1] == 3)
        for call in calls:
            call.cancel()
        eventually("all are counted", 5, lambda: gone(long, "long") == (4, 0))


def test_nothing_is_leaked(long):
    """Hundreds of clients that leave at any time: afterwards nothing is pending and no memory of the arena is in use."""
    for number in range(200):
        connection = leave(long, "batching" if number % 2 else "long")
        if number % 3 == 0:
            pause_as_client(0.01)
        connection.close()
    for model in ["long", "batching"]:
        eventually("nothing is pending", 20, lambda model=model: gone(long, model)[1] == 0)
        used = "pharos_arena_used_bytes"
        eventually("nothing is held", 5, lambda model=model: total(long.scrape(), used, model=model) == 0)
