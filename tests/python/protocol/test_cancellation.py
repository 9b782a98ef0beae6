"""Requests that clients cancel while they wait: removed from the queue at once, counted, and never executed."""

import json

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2_grpc

from harness.connections import connect, post, read_response
from harness.generate import model, one_to_one
from harness.inference import one
from harness.processes import held
from harness.server import total
from harness.statistics import until_dispatched, until_received
from harness.waiting import eventually
from harness.wire import grpc_infer, grpc_tensor

REQUEST = post("/v2/models/slow/infer", json.dumps(one("FP32", [1, 1], [1])).encode())
PENDING = "nv_inference_pending_request_count"


@pytest.fixture
def busy(start, tmp_path):
    """A server with one model, `slow`, whose only instance executes a request until the test ends."""
    limit = "dynamic_batching { default_queue_policy { max_queue_size: 100 } }\n"
    name, config, _ = model("slow", "delay", one_to_one("FP32"), batch=1, extra=limit, delay_ms=1)
    (tmp_path / "models" / name / "1").mkdir(parents=True)
    (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    server = start([], repository=tmp_path / "models")
    with connect(server.http_port) as first:
        with held(server, "slow"):
            first.sendall(REQUEST)
            until_dispatched(server, "slow", 1)
            yield server
        assert read_response(first)[0] == 200
    statistics = server.statistics("slow")
    assert (statistics["execution_count"], statistics["inference_stats"]["fail"]["count"]) == (1, 3)


def waiting(server) -> int:
    """Returns the number of waiting requests."""
    return total(server.scrape(), "nv_inference_pending_request_count", model="slow")


def message():
    """Returns the gRPC request."""
    return grpc_infer("", "slow", [grpc_tensor("INPUT0", "FP32", [1, 1], fp32_contents=[1])]).message


def http_disconnect(server):
    """Closes the connections."""
    connections = [connect(server.http_port) for _ in range(3)]
    for connection in connections:
        connection.sendall(REQUEST)
    yield
    for connection in connections:
        connection.close()
    yield


def grpc_cancel(server):
    """Cancels the calls."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(message()) for _ in range(3)]
        yield
        assert [call.cancel() for call in calls] == [True] * 3
        yield


def grpc_deadline(server):
    """`tritonclient`'s `client_timeout`."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), dtype=np.float32))
        errors = []
        for _ in range(3):
            client.async_infer("slow", [tensor], lambda result, error: errors.append(error), client_timeout=6)
        yield
        eventually("three errors", lambda: len(errors) == 3)
        assert {error.status() for error in errors} == {"StatusCode.DEADLINE_EXCEEDED"}
        yield


@pytest.mark.parametrize("giving_up", [http_disconnect, grpc_cancel, grpc_deadline], ids=lambda f: f.__name__)
def test_cancelled_requests_leave_the_queue_at_once(busy, giving_up):
    """The gauge falls while the instance is still busy; each request is counted as CANCELED, and none is executed."""
    steps = giving_up(busy)
    next(steps)
    until_received(busy, "slow", 4)
    next(steps)
    eventually("none waits", lambda: waiting(busy) == 0)
    labels = {"model": "slow", "reason": "CANCELED"}
    assert total(busy.scrape(), "nv_inference_request_failure", **labels) == 3
    list(steps)
