"""Requests that clients cancel: in the queue, behind an executing batch, and during execution."""

import json

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness.connections import connect, post
from harness.inference import one
from harness.models import IO, write
from harness.processes import held
from harness.server import total
from harness.statistics import until_dispatched
from harness.waiting import eventually, pause_as_client

REQUEST = one("FP32", [1, 2], [1, 2])


def slow(seconds: float, batch=1, more="") -> str:
    """Returns a model with this execution time per batch."""
    return f"""backend: "test" max_batch_size: {batch} {IO} {more}
parameters {{ key: "function" value {{ string_value: "delay" }} }}
parameters {{ key: "delay_ms" value {{ string_value: "{int(seconds * 1000)}" }} }}
"""


def leave(server, model: str):
    """Opens a connection and sends a request; the caller closes the connection."""
    connection = connect(server.http_port)
    connection.sendall(post(f"/v2/models/{model}/infer", json.dumps(REQUEST).encode()))
    return connection


def gone(server, model: str) -> tuple:
    """Returns the numbers of cancelled and of pending requests."""
    metrics = server.scrape()
    cancelled = total(metrics, "nv_inference_request_failure", model=model, reason="CANCELED")
    return cancelled, total(metrics, "nv_inference_pending_request_count", model=model)


@pytest.fixture
def long(start, tmp_path):
    """A server with a model that takes ten minutes, and one that batches."""
    folder = write(tmp_path / "models", "long", slow(600))
    write(folder, "batching", slow(600, 2, "dynamic_batching { max_queue_delay_microseconds: 100000 }"))
    return start([], repository=folder)


def test_an_executing_request_is_cancelled(long):
    """The backend is notified that its only client has disconnected, and is free for the next request; the failure is counted."""
    with leave(long, "long"):
        until_dispatched(long, "long", 1)
    eventually("it is counted", lambda: gone(long, "long") == (1, 0))
    statistics = long.statistics("long")["inference_stats"]
    assert statistics["fail"]["count"] == 1
    assert statistics["fail"]["ns"] < 30e9


def test_a_request_behind_another_is_never_executed(long):
    """Three clients disconnect: one request executes, one is queued in the worker, one waits. None blocks the model."""
    connections = [leave(long, "long") for _ in range(3)]
    eventually("two wait", lambda: gone(long, "long")[1] == 2)
    for connection in reversed(connections):
        connection.close()
    eventually("all are counted", lambda: gone(long, "long") == (3, 0))
    # One execution was interrupted and one was skipped, so both report almost no time.
    assert long.statistics("long")["inference_stats"]["fail"]["count"] == 3


def test_a_batch_continues_for_the_remaining_clients(long, start, tmp_path):
    """One of two clients of a batch disconnects; the other gets its answer as usual."""
    folder = write(tmp_path / "two", "two", slow(1, 2, "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 600000000 }"))
    server = start([], repository=folder)
    with held(server, "two"):
        leaving, staying = leave(server, "two"), leave(server, "two")
        until_dispatched(server, "two", 1)
        leaving.close()
    with staying:
        assert staying.recv(1000).startswith(b"HTTP/1.1 200")
    assert server.statistics("two")["execution_count"] == 1
    # A cancelled request in an executing batch is answered like the others.
    assert server.statistics("two")["inference_stats"]["success"]["count"] == 2


def grpc_request(server, **options):
    """Sends a request with tritonclient and the given options of `infer`."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
        return client.infer("long", [tensor], **options)


def test_a_deadline_ends_a_request(long):
    """gRPC's deadline, sent by the client and enforced by the server: the request ends when it has passed."""
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        grpc_request(long, client_timeout=3)
    eventually("it is counted", lambda: gone(long, "long") == (1, 0))


def test_a_cancelled_call_ends_its_request(long):
    """gRPC's cancellation, of executing and of waiting requests."""
    with tritonclient.grpc.InferenceServerClient(long.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
        calls = [client.async_infer("long", [tensor], callback=lambda result, error: None) for _ in range(4)]
        eventually("three wait", lambda: gone(long, "long")[1] == 3)
        for call in calls:
            call.cancel()
        eventually("all are counted", lambda: gone(long, "long") == (4, 0))


def test_nothing_is_leaked(long):
    """Hundreds of clients that disconnect at random times: afterwards nothing is pending and no arena memory is in use."""
    for number in range(200):
        connection = leave(long, "batching" if number % 2 else "long")
        if number % 3 == 0:
            pause_as_client(0.01)
        connection.close()
    for model in ["long", "batching"]:
        eventually("nothing is pending", lambda model=model: gone(long, model)[1] == 0)
        used = "pharos_arena_used_bytes"
        eventually("nothing is held", lambda model=model: total(long.scrape(), used, model=model) == 0)
