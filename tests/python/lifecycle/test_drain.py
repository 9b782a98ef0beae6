"""Shutdown: requests and running sequences are finished, new ones are refused, and no connection is cut."""

import concurrent.futures
import http.client
import json
import os
import queue
import signal
import socket

import grpc
import h2.config
import h2.connection
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from harness.connections import GRPC_HEADERS, connect
from harness.inference import one
from harness.models import copy_models, write
from harness.ports import free_ports
from harness.sequence_models import config, controls
from harness.processes import held
from harness.server import EXAMPLES, Server, total
from harness.statistics import until_received
from harness.waiting import DEADLINE_S, eventually
from protocol import cloud

IDLE_LONG = "max_sequence_idle_microseconds: 600000000"
MODELS = {
    "direct": config(f"{IDLE_LONG} direct {{ }} {controls()}"),
    "oldest": config(f"{IDLE_LONG} oldest {{ max_candidate_sequences: 8 }} {controls()}"),
    "short": config(f"max_sequence_idle_microseconds: 300000 direct {{ }} {controls()}"),
}
ENSEMBLE = """platform: "ensemble" max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "direct" model_version: -1
  input_map { key: "VALUE" value: "IN" } output_map { key: "SUM" value: "OUT" } } ] }
"""


@pytest.fixture
def repository(tmp_path):
    """Models with sequences, an ensemble of one of them, and others."""
    folder = copy_models(tmp_path / "repository", ["identity_fp32", "delay_200", "hang"])
    for name, text in (MODELS | {"pipeline": ENSEMBLE}).items():
        write(folder, name, text)
    return folder


@pytest.fixture
def server(start, repository):
    """A server with these models."""
    return start([], repository=repository)


def begin_exit(server):
    """Sends SIGTERM and waits until the server logs that it exits."""
    server.process.send_signal(signal.SIGTERM)
    eventually("the server exits", lambda: "exiting: waiting" in server.log_tail())


def step(module, value: int, name: str = "VALUE"):
    """Returns the input of a step."""
    tensor = module.InferInput(name, [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return [tensor]


def frames(data: bytes):
    """Yields the HTTP/2 frames in a server's bytes: kind, flags, payload."""
    while len(data) >= 9:
        length = int.from_bytes(data[:3], "big")
        yield data[3], data[4], data[9 : 9 + length]
        data = data[9 + length :]


def ends_well(server):
    """Expects exit code 0 with everything finished."""
    assert server.process.wait(DEADLINE_S) == 0, server.log_tail()


@pytest.mark.parametrize(("model", "names"), [
    ("direct", ("VALUE", "SUM")), ("oldest", ("VALUE", "SUM")), ("pipeline", ("IN", "OUT")),
])  # fmt: skip
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_running_sequence_is_finished(server, protocol, model, names):
    """Steps of the sequence are accepted while the server exits, with unmodified clients; new sequences and other requests are
    refused with 503. After the sequence's END the server exits with 0."""
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    given, made = names
    with module.InferenceServerClient(getattr(server, protocol)) as client:

        def send(value, **flags):
            result = client.infer(model, step(module, value, given), sequence_id=7, **flags)
            return result.as_numpy(made).item()

        assert send(1, sequence_start=True) == 1
        assert send(2) == 3
        begin_exit(server)
        for value, expected in ((3, 6), (4, 10)):
            assert send(value) == expected
        refused = "Server exiting|GRPC server is shutting down"
        with pytest.raises(InferenceServerException, match=refused):
            client.infer(model, step(module, 1, given), sequence_id=8, sequence_start=True)
        status, answer = server.infer("identity_fp32", one("FP32", [1, 1], [1]))
        assert (status, answer) == (503, {"error": "Server exiting"})
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            client.infer(model, step(module, 1, given), sequence_id=9)
        assert server.get("/v2/health/ready")[0] == 503, "the server must not be ready"
        assert server.process.poll() is None, "the server must wait for the sequence"
        assert send(5, sequence_end=True) == 15
    ends_well(server)


def test_a_running_sequence_is_finished_on_its_stream(server):
    """As above, on the gRPC stream on which the sequence began."""
    answers = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result.as_numpy("SUM").item()))

        def send(value, **flags):
            client.async_stream_infer("direct", step(tritonclient.grpc, value), sequence_id=7, **flags)
            return answers.get(timeout=DEADLINE_S)

        assert send(1, sequence_start=True) == 1
        begin_exit(server)
        assert [send(2), send(3), send(4, sequence_end=True)] == [3, 6, 10]
        client.stop_stream()
    ends_well(server)


def test_a_sequence_whose_client_has_disconnected(server):
    """The sequence ends after the idle timeout of its model; the server waits no longer than that."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        client.infer("short", step(tritonclient.http, 1), sequence_id=7, sequence_start=True)
    server.process.send_signal(signal.SIGTERM)
    ends_well(server)


def test_a_sequence_that_is_not_finished_in_time(start, repository):
    """Triton's log line and exit code 1; an executing and a waiting step get an error."""
    server = start([], "--exit-timeout-secs=1", repository=repository)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        client.infer("direct", step(tritonclient.http, 1), sequence_id=7, sequence_start=True)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE_S) == 1
    text = "Exit timeout expired. Exiting immediately. 0 requests were not answered, 1 sequences not finished"
    assert text in server.log_tail()


def test_requests_that_wait_at_the_timeout(start, repository):
    """Waiting requests and the executing one get the error that the server exits."""
    server = start([], "--exit-timeout-secs=1", repository=repository)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        request = one("UINT8", [1], [1])
        futures = [pool.submit(server.infer, "hang", request) for _ in range(6)]
        name = "ts_inference_requests_total"
        eventually("the requests are accepted", lambda: total(server.scrape(), name, model_name="hang") == 6)
        server.process.send_signal(signal.SIGTERM)
        answers = [future.result() for future in futures]
    for status, answer in answers:
        assert status == 503
        assert "Server exiting: the request was not finished within the time" in answer["error"]
        assert "--exit-timeout-secs" in answer["error"]
    assert server.process.wait(DEADLINE_S) == 1
    assert "Exit timeout expired. Exiting immediately. 6 requests were not answered" in server.log_tail()


def test_a_second_signal_is_the_reason(start, repository):
    """It ends the wait: the request gets an error at once, and the log names the signal and not the timeout."""
    server = start([], repository=repository)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.infer, "hang", one("UINT8", [1], [1]))
        until_received(server, "hang", 1)
        begin_exit(server)
        server.process.send_signal(signal.SIGTERM)
        status, answer = future.result()
    assert status == 503 and "or until a second signal" in answer["error"], answer
    assert server.process.wait(DEADLINE_S) == 1
    log = server.log_tail()
    assert "A second signal has ended the wait. Exiting immediately. 1 requests were not answered, 0 sequences not finished" in log
    assert "Exit timeout expired" not in log


def test_readiness_ends_first(start, repository):
    """`--exit-delay-secs`: the server is not ready but serves until the delay has passed."""
    server = start([], "--exit-delay-secs=5", repository=repository)
    server.process.send_signal(signal.SIGTERM)
    eventually("the server is not ready", lambda: server.get("/v2/health/ready")[0] == 400)
    assert server.get("/v2/health/live")[0] == 200
    assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live() and not client.is_server_ready()
    ends_well(server)


@pytest.mark.parametrize("delay", [[], ["--exit-delay-secs=600"]], ids=["draining", "before"])
def test_no_health_check_is_healthy_while_the_server_exits(tmp_path, repository, delay):
    """Those of v2, of gRPC's health protocol, of SageMaker and of Vertex AI. A running sequence keeps the server from exiting."""
    sagemaker, vertex_ai = free_ports(2)
    copy_models(repository, ["simple"], EXAMPLES)
    server = Server(tmp_path, [repository], [*cloud.options(sagemaker, vertex_ai), *delay])
    server.environment = cloud.ENVIRONMENT
    with server:
        platforms = cloud.Both(sagemaker, vertex_ai, False)
        cloud.until_there(platforms)

        def healthy() -> dict:
            with grpc.insecure_channel(server.grpc) as channel:
                check = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=DEADLINE_S)
                ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=DEADLINE_S)
            return {
                "/v2/health/ready": server.get("/v2/health/ready")[0] == 200,
                "/ping": platforms.ask("sagemaker", "GET", "/ping")[0] == 200,
                "Vertex AI": platforms.ask("vertex_ai", "GET", cloud.HEALTH)[0] == 200,
                "Check": check == b"\x08\x01",
                "ServerReady": ready == b"\x08\x01",
            }

        assert set(healthy().values()) == {True}
        with tritonclient.http.InferenceServerClient(server.http) as client:
            client.infer("direct", step(tritonclient.http, 1), sequence_id=7, sequence_start=True)
            server.process.send_signal(signal.SIGTERM)
            eventually("the exit begins", lambda: "exiting: " in server.log_tail())
            assert set(healthy().values()) == {False}, healthy()
            client.infer("direct", step(tritonclient.http, 1), sequence_id=7, sequence_end=True)
        # A second signal ends the delay.
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(DEADLINE_S)


def test_kept_connections_over_http(server):
    """While the server exits, its answers ask clients to close the connection; it closes an idle connection only at the end."""
    waiting = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
    waiting.request("GET", "/v2/health/live")
    waiting.getresponse().read()
    busy = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
    with held(server, "delay_200"):
        busy.request("POST", "/v2/models/delay_200/infer", json.dumps(one("FP32", [1, 1], [7])))
        until_received(server, "delay_200", 1)
        begin_exit(server)
    response = busy.getresponse()
    assert (response.status, response.getheader("connection")) == (200, "close")
    assert json.load(response)["outputs"][0]["data"] == [7]
    assert waiting.sock.recv(10) == b"", "closed by the server"
    ends_well(server)


def test_grpc_connections_get_goaway(server):
    """GOAWAY is sent as soon as the server exits, and the call in flight is answered."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    message = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="delay_200")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    message.raw_input_contents.append(np.float32(7).tobytes())
    data = message.SerializeToString()
    seen = b""
    with connect(server.grpc_port) as wire:
        connection.initiate_connection()
        connection.send_headers(1, list(GRPC_HEADERS.items()))
        connection.send_data(1, b"\0" + len(data).to_bytes(4, "big") + data, end_stream=True)
        with held(server, "delay_200"):
            wire.sendall(connection.data_to_send())
            until_received(server, "delay_200", 1)
            begin_exit(server)
        # The client library stops sending after GOAWAY, but the server expects an answer to its ping.
        answered = False
        while received := wire.recv(65536):
            seen += received
            pings = [payload for kind, flags, payload in frames(seen) if kind == 6 and flags == 0]
            if pings and not answered:
                answered = True
                wire.sendall(bytes([0, 0, 8, 6, 1, 0, 0, 0, 0]) + pings[0])
    kinds = [kind for kind, _, _ in frames(seen)]
    assert kinds.count(7) == 2, "expected two GOAWAY frames: the announcement, then the last accepted call"
    assert any(kind == 0 and np.float32(7).tobytes() in payload for kind, _, payload in frames(seen))
    ends_well(server)


def test_a_second_signal_aborts_the_drain(start, repository):
    """The exit code is 1, because requests are unfinished."""
    server = start([], "--exit-timeout-secs=600", repository=repository)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        client.infer("direct", step(tritonclient.http, 1), sequence_id=7, sequence_start=True)
    begin_exit(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE_S) == 1


def test_a_second_signal_kills_hanging_workers(start):
    """A hanging batch is not awaited: its request is refused and its worker killed."""
    server = start(["hang"], "--exit-timeout-secs=600")
    with socket.create_connection(("127.0.0.1", server.http_port)) as client:
        body = json.dumps(one("UINT8", [1], [1]))
        head = f"POST /v2/models/hang/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        workers = server.workers()
        eventually("the request is accepted", lambda: total(server.scrape(), "ts_inference_requests_total") >= 1)
        server.process.send_signal(signal.SIGTERM)
        eventually("the drain has begun", lambda: "waiting up to 600 s" in server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) == 1
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    eventually("the workers are gone", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))


@pytest.mark.parametrize(("http", "grpc"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "::")])
def test_two_listeners_do_not_share_a_port(start, http, grpc):
    """With `--reuse-http-port` and `--reuse-grpc-port` too: connections would go to either."""
    [port] = free_ports(1)
    addresses = [f"--http-address={http}", f"--grpc-address={grpc}", f"--http-port={port}", f"--grpc-port={port}"]
    server = start(["identity_fp32"], "--reuse-http-port=true", "--reuse-grpc-port=true", *addresses, wait=False)
    assert server.process.wait(DEADLINE_S) == 1
    bracketed = f"[{grpc}]" if ":" in grpc else grpc
    text = f"gRPC cannot listen on {bracketed}:{port} (--grpc-port): HTTP listens on {http}:{port} (--http-port). Give each its own port"
    assert text in server.log_tail()


def test_a_shared_port(start):
    """`--reuse-http-port`, `--reuse-grpc-port`: a second server on the same ports takes over when the first exits."""
    shared = ["--reuse-http-port=true", "--reuse-grpc-port=true"]
    first = start(["identity_fp32"], *shared)
    second = start(["identity_fp32"], *shared, f"--http-port={first.http_port}", f"--grpc-port={first.grpc_port}", wait=False)
    eventually("the second is ready", lambda: "ready" in second.log_tail())
    first.stop()
    for _ in range(10):
        assert first.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    third = start(["identity_fp32"], f"--http-port={first.http_port}", wait=False)
    assert third.process.wait(DEADLINE_S) == 1, "a server without the option must not start"
    assert "--http-port chooses another port" in third.log_tail()
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(DEADLINE_S) == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", first.http_port), timeout=DEADLINE_S)


def test_a_shared_port_hands_over_without_a_refusal(start, repository):
    """The server that exits closes its listeners, so that no new connection reaches it; its responses ask the clients to connect again."""
    shared = ["--reuse-http-port=true", "--reuse-grpc-port=true"]
    first = start([], *shared, "--exit-delay-secs=600", "--exit-timeout-secs=600", repository=repository)
    ports = [f"--http-port={first.http_port}", f"--grpc-port={first.grpc_port}"]
    body, path = json.dumps(one("FP32", [1, 1], [1])), "/v2/models/identity_fp32/infer"
    kept = http.client.HTTPConnection("127.0.0.1", first.http_port, timeout=DEADLINE_S)
    kept.request("GET", "/v2/health/ready")
    assert kept.getresponse().read() == b'{"ready":true}'
    with tritonclient.grpc.InferenceServerClient(first.grpc) as client:
        assert client.is_server_ready()
        second = start(["identity_fp32"], *shared, *ports, wait=False)
        eventually("the second is ready", lambda: "ready" in second.log_tail())
        first.process.send_signal(signal.SIGTERM)
        eventually("the first leaves", lambda: "no longer ready" in first.log_tail())
        # The first response after the signal asks the client to close the connection, which is answered as usual.
        kept.request("POST", path, body)
        response = kept.getresponse()
        assert (response.status, response.headers["Connection"]) == (200, "close")
        assert response.read()
        for _ in range(40):
            fresh = http.client.HTTPConnection("127.0.0.1", first.http_port, timeout=DEADLINE_S)
            fresh.request("GET", "/v2/health/ready")
            response = fresh.getresponse()
            assert (response.status, response.read()) == (200, b'{"ready":true}'), "the second server answers"
            fresh.request("POST", path, body)
            assert fresh.getresponse().status == 200
            fresh.close()
        eventually("the gRPC client reaches the second server", client.is_server_ready)
    first.process.send_signal(signal.SIGTERM)
    ends_well(first)
    second.process.send_signal(signal.SIGTERM)
    ends_well(second)
