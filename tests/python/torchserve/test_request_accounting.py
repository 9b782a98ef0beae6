"""Each request is counted once and has one line in the access log, also if its stream fails or its client disconnects.

Requires a Python with the package `pharos-worker`: `PHAROS_PYTHON`, or that of the tests."""

import contextlib
import http.client
import os
import re
import socket

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2

from harness.processes import held, writer
from harness.server import ROOT, total
from harness.statistics import dispatched, until_dispatched
from harness.waiting import DEADLINE_S, eventually
from torchserve.home import HOST, INFERENCE, MANAGEMENT, Home, body, call, has_worker, message

pytestmark = pytest.mark.skipif(not has_worker, reason="there is no Python with the package pharos-worker: make python-worker")
LINE = re.compile(r'^\S+ - /127\.0\.0\.1:\d+ "(?P<request>[^"]+)" (?P<status>\d+) (?P<ms>\d+)$')
STREAM = INFERENCE + "StreamPredictions"
FAILS = "3"
"""The body for which the handler `streamed` fails after its parts. With a smaller number it returns as many parts and an end."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A server with a model that streams and one that does not."""
    folder = tmp_path_factory.mktemp("home")
    definition = folder / "metrics.yaml"
    definition.write_text((ROOT / "metrics.yaml").read_text() + "\nslos: [{name: up, availability: 99%}]\n")
    properties = ["load_models=m-1.0.mar,streams-1.0.mar", "metrics_mode=prometheus", f"metrics_config={definition}"]
    server = Home(folder, properties)
    server.archive("m")
    server.archive("streams", handler="streamed", yaml="streaming: true\n")
    with server:
        eventually("m is ready", lambda: server.predict("m", b"pid")[0] == 200)
        eventually("streams is ready", lambda: server.predict("streams", b"0")[0] == 200)
        yield server


def counted(home, protocol: str, route: str) -> tuple:
    """Returns the number of requests of a route by code, and of failures by reason."""
    found = {}, {}
    for (name, pairs), value in home.scrape().items():
        labels = dict(pairs)
        if labels.get("protocol") == protocol and labels.get("route") == route and value:
            if name == "pharos_requests_total":
                found[0][labels["code"]] = value
            if name == "pharos_request_failures_total":
                found[1][labels["reason"]] = value
    return found


def added(after: tuple, before: tuple) -> tuple:
    """Returns what the second of two `counted` has more."""
    more = [{key: new - old.get(key, 0) for key, new in now.items() if new > old.get(key, 0)} for now, old in zip(after, before)]
    return tuple(more)


def logged(home, request: str) -> list:
    """Returns the statuses in the lines about this request, and lines in another format as they are."""
    path = request.split()[1]
    named = path if path.startswith("/") else "/" + path.rpartition("/")[2]
    lines = [(line, LINE.match(line)) for line in home.access().splitlines() if re.search(rf"{named}(?=[\s\"])", line)]
    return [int(match["status"]) if match and match["request"] == request else line for line, match in lines]


def flush(home):
    """Waits until the lines of all earlier requests are written: lines are in the order of the ends of requests."""
    ping = "GET /ping HTTP/1.1"
    before = len(logged(home, ping))
    home.ask("GET", "/ping")
    eventually("a line about the ping", lambda: len(logged(home, ping)) > before)


class Expectation:
    """Expects the count of one more request of a route, and one more line about it."""

    def __init__(self, home, route: tuple, request: str):
        flush(home)
        self.home, self.route, self.request = home, route, request
        self.before, self.lines = counted(home, *route), len(logged(home, request))

    def now(self) -> tuple:
        """Returns the counts since then, and the statuses in the lines since then."""
        lines = logged(self.home, self.request)[self.lines :]
        return *added(counted(self.home, *self.route), self.before), lines

    def check(self, code: str, reason: str | None, status: int):
        """Fails unless one request has been added, with one line."""
        expected = {code: 1}, {reason: 1} if reason else {}, [status]
        is_there = lambda: all(len(part) >= len(wanted) for part, wanted in zip(self.now(), expected))  # noqa: E731
        with contextlib.suppress(AssertionError):
            eventually("the request is counted and logged", is_there)
        # A second line of the request would be written too.
        flush(self.home)
        assert self.now() == expected


def of_grpc(method: str) -> str:
    """Returns what the access log quotes of a call."""
    return f"gRPC {method.removeprefix('/')} HTTP/2.0"


def test_a_grpc_stream_that_succeeds_counts_once(home):
    expected = Expectation(home, ("grpc", "stream_predict"), of_grpc(STREAM))
    parts = call(home.grpc, STREAM, (1, "streams"), body("2"), stream=True)
    assert [part[1][0] for part in parts] == [b"0:0 ", b"0:1 ", b"end"]
    expected.check("OK", None, 0)


def test_a_grpc_stream_that_fails_counts_its_status(home):
    """The status is in the trailers, behind the parts."""
    expected = Expectation(home, ("grpc", "stream_predict"), of_grpc(STREAM))
    with grpc.insecure_channel(f"{HOST}:{home.grpc}") as channel:
        answer = channel.unary_stream(STREAM)(message((1, "streams"), body(FAILS)), timeout=DEADLINE_S)
        assert next(answer)
        with pytest.raises(grpc.RpcError) as failed:
            list(answer)
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    expected.check("UNAVAILABLE", "BACKEND", 14)


def test_a_refused_grpc_stream_counts_its_status(home):
    """The status is in the headers."""
    expected = Expectation(home, ("grpc", "stream_predict"), of_grpc(STREAM))
    with pytest.raises(grpc.RpcError) as failed:
        call(home.grpc, STREAM, (1, "absent"), body("1"), stream=True)
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    expected.check("INTERNAL", "UNKNOWN_MODEL", 13)


def test_a_rest_stream_that_succeeds_counts_once(home):
    expected = Expectation(home, ("http", "predict"), "POST /predictions/streams HTTP/1.1")
    assert home.predict("streams", b"2") == (200, b"0:0 0:1 end")
    expected.check("200", None, 200)


def test_a_rest_stream_that_fails_counts_a_failure(home):
    """Its status, 200, is sent with the first part; the connection ends without the last chunk."""
    expected = Expectation(home, ("http", "predict"), "POST /predictions/streams HTTP/1.1")
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        home.predict("streams", FAILS.encode())
    expected.check("200", "BACKEND", 200)


def test_a_rest_prediction_whose_client_disconnects_is_logged(home):
    """The format has no word for it: the status is 499."""
    expected = Expectation(home, ("http", "predict"), "POST /predictions/m HTTP/1.1")
    with held(home, "m"):
        before = dispatched(home, "m")
        connection = http.client.HTTPConnection(HOST, home.inference, timeout=DEADLINE_S)
        connection.request("POST", "/predictions/m", b"pid")
        until_dispatched(home, "m", before + 1)
        connection.close()
        expected.check("499", "CANCELLED", 499)


def test_a_rest_stream_whose_client_disconnects_is_logged(home):
    """After the first part; the handler waits after that part."""
    expected = Expectation(home, ("http", "predict"), "POST /predictions/streams HTTP/1.1")
    gate = home.folder / "gate"
    os.mkfifo(gate)
    request = f"1 {gate}"
    with socket.create_connection((HOST, home.inference), DEADLINE_S) as connection:
        head = f"POST /predictions/streams HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n\r\n"
        connection.sendall(f"{head}{request}".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
        opened = writer(gate)
    try:
        expected.check("499", "CANCELLED", 499)
    finally:
        os.close(opened)
    executing = lambda: total(home.scrape(), "pharos_model_executing_requests", model="streams")  # noqa: E731
    eventually("the cancelled request has ended", lambda: executing() == 0)


@pytest.mark.parametrize("method", ["Predictions", "StreamPredictions"])
def test_a_grpc_prediction_whose_client_disconnects_is_logged(home, method):
    """With the status CANCELLED."""
    route = {"Predictions": "predict", "StreamPredictions": "stream_predict"}[method]
    expected = Expectation(home, ("grpc", route), of_grpc(INFERENCE + method))
    with held(home, "m"):
        before = dispatched(home, "m")
        with grpc.insecure_channel(f"{HOST}:{home.grpc}") as channel:
            make = channel.unary_stream if method == "StreamPredictions" else channel.unary_unary
            asked = message((1, "m"), body("pid"))
            answer = make(INFERENCE + method)(asked) if method == "StreamPredictions" else make(INFERENCE + method).future(asked)
            until_dispatched(home, "m", before + 1)
            answer.cancel()
        expected.check("CANCELLED", "CANCELLED", 1)


@pytest.mark.parametrize("method", ["Predictions", "StreamPredictions"])
def test_a_grpc_prediction_whose_client_leaves_at_its_deadline(home, method):
    """It is too late, in the count of failures and for the objective of availability, although the model completes it."""
    route = {"Predictions": "predict", "StreamPredictions": "stream_predict"}[method]
    bad = lambda: added(objective(home), before)  # noqa: E731
    before, requests, lines = objective(home), counted(home, "grpc", route), logged(home, of_grpc(INFERENCE + method))
    with held(home, "m"), grpc.insecure_channel(f"{HOST}:{home.grpc}") as channel:
        make = channel.unary_stream if method == "StreamPredictions" else channel.unary_unary
        with pytest.raises(grpc.RpcError) as failed:
            list(make(INFERENCE + method)(message((1, "m"), body("pid")), timeout=9))
        assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        late = {"DEADLINE_EXCEEDED": 1}, {"TIMEOUT": 1}
        eventually("the call is counted", lambda: added(counted(home, "grpc", route), requests) == late)
        flush(home)
        assert logged(home, of_grpc(INFERENCE + method))[len(lines) :] == [4]
    eventually("the request counts as bad", lambda: bad() == ({"all": 1}, {}))


def objective(home) -> tuple:
    """Returns the number of all requests and of the good ones of `m` that count for the objective."""
    found = home.scrape()
    names = {"all": "pharos_slo_requests_total", "good": "pharos_slo_good_requests_total"}
    every = {kind: total(found, name, model="m", slo="up") for kind, name in names.items()}
    return {"all": every["all"]}, {"good": every["good"]}


@pytest.mark.parametrize(
    ("method", "route", "parts"),
    [("Ping", "ping", ()), ("Predictions", "predict", ((1, "m"), body("pid")))],
)
def test_a_grpc_call_has_one_line(home, method, route, parts):
    expected = Expectation(home, ("grpc", route), of_grpc(INFERENCE + method))
    call(home.grpc, INFERENCE + method, *parts)
    expected.check("OK", None, 0)


def test_a_call_of_the_management_port_has_one_line(home):
    expected = Expectation(home, ("grpc", "model_list"), of_grpc(MANAGEMENT + "ListModels"))
    call(home.grpc_management, MANAGEMENT + "ListModels")
    expected.check("OK", None, 0)


@pytest.mark.parametrize("package", ["inference", "org.pytorch.serve.grpc.openinference"])
def test_a_v2_call_has_one_line(home, package):
    """In the standard package and in TorchServe's, with the name that the client sent."""
    method = f"/{package}.GRPCInferenceService/ServerLive"
    expected = Expectation(home, ("grpc", "live"), of_grpc(method))
    with grpc.insecure_channel(f"{HOST}:{home.grpc}") as channel:
        channel.unary_unary(method)(b"", timeout=DEADLINE_S)
    expected.check("OK", None, 0)


def test_a_failed_v2_call_has_one_line_with_its_status(home):
    method = "/inference.GRPCInferenceService/ModelMetadata"
    expected = Expectation(home, ("grpc", "model_metadata"), of_grpc(method))
    with tritonclient.grpc.InferenceServerClient(f"{HOST}:{home.grpc}") as client, pytest.raises(Exception, match="absent"):
        client.get_model_metadata("absent")
    expected.check("INVALID_ARGUMENT", "UNKNOWN_MODEL", 3)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_v2_inference_has_one_line(home, compression):
    """Also if its answer is compressed."""
    expected = Expectation(home, ("grpc", "infer"), of_grpc("/inference.GRPCInferenceService/ModelInfer"))
    with tritonclient.grpc.InferenceServerClient(f"{HOST}:{home.grpc}") as client:
        tensor = tritonclient.grpc.InferInput("IN", [100_000], "FP32")
        tensor.set_data_from_numpy(values := np.ones(100_000, np.float32))
        answer = client.infer("m", [tensor], compression_algorithm=compression)
        assert np.array_equal(answer.as_numpy("OUT"), values)
    expected.check("OK", None, 0)


def test_a_refused_v2_stream_of_events_has_one_line(home):
    """Over REST."""
    expected = Expectation(home, ("http", "generate_stream"), "POST /v2/models/absent/generate_stream HTTP/1.1")
    status = home.ask("POST", "/v2/models/absent/generate_stream", b"{}")[0]
    assert status >= 400
    expected.check(str(status), "UNKNOWN_MODEL", status)


def test_a_v2_stream_of_events_has_one_line(home):
    """Over REST."""
    expected = Expectation(home, ("http", "generate_stream"), "POST /v2/models/m/generate_stream HTTP/1.1")
    status, _, events = home.ask("POST", "/v2/models/m/generate_stream", b'{"data": "x"}')
    assert (status, events[:6]) == (200, b"data: ")
    expected.check("200", None, 200)


def test_a_v2_stream_has_one_line(home):
    """Its requests are counted by themselves."""
    method = "/inference.GRPCInferenceService/ModelStreamInfer"
    expected = Expectation(home, ("grpc", "stream_infer"), of_grpc(method))
    with grpc.insecure_channel(f"{HOST}:{home.grpc}") as channel:
        stream = channel.stream_stream(method, service_pb2.ModelInferRequest.SerializeToString)
        assert len(list(stream(iter([service_pb2.ModelInferRequest(model_name="absent")]), timeout=DEADLINE_S))) == 1
    expected.check("INVALID_ARGUMENT", "UNKNOWN_MODEL", 0)
