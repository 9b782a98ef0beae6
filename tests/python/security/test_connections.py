"""Connections: many clients, slow clients, clients that disconnect, and bytes that are not requests."""

import concurrent.futures
import contextlib
import gzip
import json
import socket
import struct

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from harness.connections import GRPC_HEADERS, INFER, connect, next_bytes, post, read_response
from harness.inference import one, simple
from harness.models import copy_models
from harness.server import Server, total
from harness.stream_models import COMPARED, build
from harness.streams import Collected, repeat_inputs
from harness.waiting import DEADLINE_S, eventually
from harness.wire import grpc_infer, grpc_tensor


def still_answers(server):
    """Checks that the server and all its workers are alive."""
    assert server.process.poll() is None
    assert server.infer("simple", simple())[0] == 200


@pytest.mark.parametrize("listener", ["http", "grpc", "metrics"])
def test_connections_are_counted(server, listener):
    """Each accepted connection once; a scrape makes one to the metrics listener."""
    accepted = lambda: total(server.scrape(), "pharos_connections_total", listener=listener)  # noqa: E731
    host, port = getattr(server, listener).split(":")
    before, scrapes = accepted(), 0
    for _ in range(5):
        with socket.create_connection((host, int(port)), DEADLINE_S):
            pass

    def counted() -> bool:
        nonlocal scrapes
        scrapes += listener == "metrics"
        return accepted() == before + 5 + scrapes

    eventually("the connections are counted", counted)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_many_clients(server, protocol):
    """Each of 64 concurrent clients gets its own answers, and each request is counted once."""
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    before = server.statistics("simple")["inference_stats"]["success"]["count"]

    def client(n: int) -> int:
        with module.InferenceServerClient(getattr(server, protocol)) as own:
            for k in range(10):
                value = np.full((1, 16), n * 1000 + k, dtype=np.int32)
                tensors = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
                tensors[0].set_data_from_numpy(value)
                tensors[1].set_data_from_numpy(np.ones((1, 16), dtype=np.int32))
                result = own.infer("simple", tensors, request_id=f"{n}-{k}")
                np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), value + 1)
                np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), value - 1)
        return n

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert sorted(pool.map(client, range(64))) == list(range(64))
    assert server.statistics("simple")["inference_stats"]["success"]["count"] == before + 640


def test_idle_connections_do_not_delay_others(server):
    """200 idle connections do not delay other requests."""
    idle = [connect(server.http_port) for _ in range(200)]
    try:
        still_answers(server)
    finally:
        for connection in idle:
            connection.close()


def test_a_thousand_clients_at_once(tmp_path):
    """Each of 1000 open connections is answered, even if the initial limit of open files is 256."""
    server = Server(tmp_path, [copy_models(tmp_path / "models", ["identity_fp32_nobatch"])])
    server.command = ["bash", "-c", 'ulimit -Sn 256; exec "$@"', "bash", *server.command]
    body = json.dumps(one("FP32", [1], [1])).encode()
    request = post("/v2/models/identity_fp32_nobatch/infer", body)
    with server:
        clients = [connect(server.http_port) for _ in range(1000)]
        try:
            for client in clients:
                client.sendall(request)
            assert {read_response(client)[0] for client in clients} == {200}
        finally:
            for client in clients:
                client.close()


def test_slow_sender(server):
    """The server waits for a body that arrives in pieces, and answers other requests meanwhile."""
    request = post("/v2/models/simple/infer", json.dumps(simple()).encode())
    with connect(server.http_port) as connection:
        for start in range(0, len(request), 40):
            connection.sendall(request[start : start + 40])
            still_answers(server)
        assert read_response(connection)[0] == 200


def test_slow_reader(server):
    """A client that does not read its 64 MiB answers does not delay other requests for the same model."""
    values = np.zeros(2 * 2**20, dtype=np.float32)
    head = json.dumps(one("FP32", [len(values)], binary_data_size=values.nbytes) | {"parameters": {
        "binary_data_output": True}}).encode()  # fmt: skip
    request = post("/v2/models/identity_fp32_nobatch/infer", head + values.tobytes(),
                   f"Inference-Header-Content-Length: {len(head)}")  # fmt: skip
    slow = [connect(server.http_port) for _ in range(8)]
    try:
        for connection in slow:
            connection.sendall(request)
        for n in range(20):
            status, answer = server.infer("identity_fp32_nobatch", one("FP32", [1], [n]))
            assert (status, answer["outputs"][0]["data"]) == (200, [n])
        for connection in slow:
            status, body = read_response(connection)
            assert status == 200
            assert body.endswith(values.tobytes())
    finally:
        for connection in slow:
            connection.close()


def test_slow_reader_of_grpc(server):
    """A client that grants no window for its answer of 16 MiB does not delay other requests."""
    message = pb.ModelInferRequest(model_name="identity_fp32_nobatch")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[4 * 2**20])
    message.raw_input_contents.append(bytes(16 * 2**20))
    data = message.SerializeToString()
    config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
    connection, received, begun = h2.connection.H2Connection(config), 0, False
    with connect(server.grpc_port) as wire:
        connection.initiate_connection()
        connection.send_headers(1, list(GRPC_HEADERS.items()))
        data = b"\0" + struct.pack(">I", len(data)) + data
        while not begun:
            while data and connection.local_flow_control_window(1):
                size = min(connection.local_flow_control_window(1), connection.max_outbound_frame_size)
                connection.send_data(1, data[:size], end_stream=size >= len(data))
                data = data[size:]
            wire.sendall(connection.data_to_send())
            events = connection.receive_data(next_bytes(wire))
            received += sum(len(event.data) for event in events if isinstance(event, h2.events.DataReceived))
            begun = received > 0
        for n in range(20):
            status, answer = server.infer("identity_fp32_nobatch", one("FP32", [1], [n]))
            assert (status, answer["outputs"][0]["data"]) == (200, [n])
    still_answers(server)


@pytest.mark.parametrize("rpc", ["ModelStreamInfer", "ModelInfer"])
def test_clients_that_grant_no_window_are_disconnected(start, tmp_path, rpc):
    """`--client-write-timeout-secs` applies to small responses too. Meanwhile a decoupled model waits for the client, and other
    requests to it wait."""
    folder = build(tmp_path / "models", {"repeat": COMPARED["repeat"], "rows": COMPARED["rows"]})
    server = start([], "--client-write-timeout-secs=1", repository=folder)
    messages = {"ModelStreamInfer": grpc_infer("", "repeat", [grpc_tensor("IN", "INT32", [500], int_contents=range(500))]),
                "ModelInfer": grpc_infer("", "rows", [grpc_tensor("I0", "INT32", [1, 4], int_contents=range(4))])}  # fmt: skip
    data = messages[rpc].message.SerializeToString()
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    with connect(server.grpc_port) as wire:
        connection.initiate_connection()
        connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        connection.send_headers(1, list((GRPC_HEADERS | {":path": f"/inference.GRPCInferenceService/{rpc}"}).items()))
        connection.send_data(1, b"\0" + struct.pack(">I", len(data)) + data, end_stream=rpc == "ModelInfer")
        begun = False
        while not begun:
            wire.sendall(connection.data_to_send())
            events = connection.receive_data(next_bytes(wire))
            begun = any(isinstance(event, h2.events.ResponseReceived) for event in events)
        collected = Collected()
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(collected)
            client.async_stream_infer("repeat", repeat_inputs([1, 2]), request_id="other")
            eventually("the other client is answered", lambda: collected.values.get("other") == [1, 2])
            client.stop_stream()
        # Pings may come before the end.
        while wire.recv(65536):
            pass
    labels = {"listener": "grpc", "reason": "SLOW_READER"}
    assert total(server.scrape(), "pharos_connections_refused_total", **labels) == 1


def test_pipelined_requests(server):
    """Several requests on one connection, sent without waiting for answers, are answered in order."""
    requests = [post("/v2/models/simple/infer", json.dumps(simple(id=str(n))).encode()) for n in range(5)]
    with connect(server.http_port) as connection:
        connection.sendall(b"".join(requests))
        data = b""
        while data.count(b'"outputs"') < 5:
            part = connection.recv(65536)
            assert part, data
            data += part
    places = [data.index(b'"id":"%d"' % n) for n in range(5)]
    assert places == sorted(places)


@pytest.mark.parametrize("data", [
    b"\r\n\r\n", b"GET\r\n\r\n", b"NONSENSE / HTTP/1.1\r\n\r\n", b"GET /v2 HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"\0" * 5000,
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"GET /v2/models/%00%ff/ready HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
], ids=lambda data: repr(data[:40]))  # fmt: skip
@pytest.mark.parametrize("port", ["http_port", "grpc_port", "metrics_port"])
def test_bytes_that_are_not_a_request(server, port, data):
    """They are refused, and the connection is closed; the server continues."""
    answer = b""
    with connect(getattr(server, port)) as connection:
        connection.sendall(data)
        with contextlib.suppress(OSError):  # the server has closed the connection
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    assert b"HTTP/1.1 200" not in answer
    still_answers(server)


@pytest.mark.parametrize("framing, body", [
    ("Content-Length: 5000", b"{"),
    ("Transfer-Encoding: chunked", b"100\r\n{"),
    ("Transfer-Encoding: chunked", b"1\r\n{\r\nzz\r\n"),
], ids=["shorter than said", "chunk cut", "no chunk"])  # fmt: skip
def test_truncated_body(server, framing, body):
    """It is answered with 400 and an explanation, and counted."""
    labels = {"protocol": "http", "reason": "MALFORMED", "route": "infer"}
    before = total(server.scrape(), "pharos_request_failures_total", **labels)
    with connect(server.http_port) as connection:
        connection.sendall(f"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        status, text = read_response(connection)
    assert status == 400
    assert b"the request's body broke off" in text
    assert total(server.scrape(), "pharos_request_failures_total", **labels) == before + 1


def test_malformed_heads_are_counted(server):
    """Malformed requests are counted in the metrics too."""
    labels = {"protocol": "http", "route": "unknown"}
    before = total(server.scrape(), "pharos_requests_total", **labels)
    for status, head in [
        (400, b"NONSENSE\r\n\r\n"),
        (400, b"POST /v2 HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
        (414, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"),
        (431, b"GET /v2 HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n"),
    ]:
        with connect(server.http_port) as connection:
            connection.sendall(head)
            assert read_response(connection)[0] == status
    eventually("all four are counted", lambda: total(server.scrape(), "pharos_requests_total", **labels) == before + 4)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_client_disconnects_within_a_request(server, keep):
    """A client that closes its connection within a request does not affect others."""
    request = post("/v2/models/simple/infer", json.dumps(simple()).encode())
    for _ in range(20):
        with connect(server.http_port) as connection:
            connection.sendall(request[:keep])
    still_answers(server)


def test_client_disconnects_before_the_answer(start):
    """Requests whose clients have disconnected are dropped or finished; afterwards nothing is pending."""
    server = start(["delay_200"])
    request = post("/v2/models/delay_200/infer", json.dumps(one("FP32", [1, 1], [1])).encode())
    for connection in [connect(server.http_port) for _ in range(12)]:
        connection.sendall(request)
        connection.close()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), dtype=np.float32))
        for _ in range(12):
            client.async_infer("delay_200", [tensor], callback=lambda result, error: None).cancel()
    name = "nv_inference_pending_request_count"
    eventually("nothing is pending", lambda: total(server.scrape(), name, model="delay_200") == 0)
    assert server.infer("delay_200", one("FP32", [1, 1], [1]))[0] == 200


def test_body_over_the_limit(start):
    """`--http-max-input-size`: a body one byte longer is refused with 400 and a text that names the option, also after
    decompression, and without reading all of a body that announces its length."""
    server = start(["identity_bytes_nobatch"], "--http-max-input-size=10000")
    path = "/v2/models/identity_bytes_nobatch/infer"
    large = json.dumps(one("BYTES", [1], ["x" * 20000])).encode()
    for body, headers in [(large, {}), (gzip.compress(large), {"Content-Encoding": "gzip"})]:
        status, text = server.ask("POST", path, body, headers=headers)
        assert status == 400, text
        assert "http-max-input-size" in text
    with connect(server.http_port) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n".encode())
        assert read_response(connection)[0] == 400
    assert server.ask("POST", path, json.dumps(one("BYTES", [1], ["x" * 5000])).encode())[0] == 200


def test_gzip_bomb(server):
    """A small body that decompresses to more than the limit of 64 MiB is refused without filling the memory."""
    bomb = gzip.compress(b" " * (256 * 2**20))
    status, text = server.ask("POST", "/v2/models/simple/infer", bomb, headers={"Content-Encoding": "gzip"})
    assert status == 400, text
    resident = int(
        next(line for line in open(f"/proc/{server.process.pid}/status") if line.startswith("VmRSS")).split()[1]
    )
    assert resident < 700_000, f"{resident} kB resident"
    still_answers(server)


def test_health_service(server):
    """`grpc.health.v1.Health/Check` returns SERVING (1) for any service name."""
    with grpc.insecure_channel(server.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", lambda b: b, lambda b: b)
        assert check(b"", timeout=DEADLINE_S) == b"\x08\x01"
        name = b"inference.GRPCInferenceService"
        assert check(b"\x0a" + bytes([len(name)]) + name, timeout=DEADLINE_S) == b"\x08\x01"


def test_reflection(server):
    """Tools without the schema can request it."""
    with grpc.insecure_channel(server.grpc) as channel:
        path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        ask = channel.stream_stream(path, lambda b: b, lambda b: b)
        answer = next(ask(iter([b"\x3a\x01*"]), timeout=DEADLINE_S))
    assert b"inference.GRPCInferenceService" in answer


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x2a\x05abc"], ids=repr)
def test_message_that_is_not_protobuf(server, message):
    """It is refused with a status, and the next call succeeds."""
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(INFER, lambda b: b, lambda b: b)
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=DEADLINE_S)
        assert caught.value.code() == grpc.StatusCode.INTERNAL
    still_answers(server)


def test_unknown_method(server):
    """UNIMPLEMENTED."""
    with grpc.insecure_channel(server.grpc) as channel:
        for path in ("/inference.GRPCInferenceService/Nothing", "/no.Service/ModelInfer"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path, lambda b: b, lambda b: b)(b"", timeout=DEADLINE_S)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_long_error_text(server):
    """A text with content of the client that exceeds the limit of gRPC headers arrives truncated, not as another error."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="^.StatusCode.INVALID_ARGUMENT. .request id: xxx"):
            client.infer("simple", [], request_id="x" * 100_000)
    answer = server.infer("simple", {"id": "x" * 100_000, "inputs": []})
    assert len(answer[1]["error"]) == (64 << 10) + len("..."), "over HTTP the text is in the body, and may be longer"


def test_truncated_stream(server):
    """Bytes that are not a message end the stream with an error instead of a normal end."""
    with grpc.insecure_channel(server.grpc) as channel:
        path = "/inference.GRPCInferenceService/ModelStreamInfer"
        call = channel.stream_stream(path, lambda b: b, lambda b: b)(iter([b"\xff\xff"]), timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.INTERNAL
    still_answers(server)


def h2_call(port: int, headers: dict, data: bytes) -> dict:
    """Makes a call with a plain HTTP/2 client; returns the headers and trailers of the answer in one dictionary. `reset` is the error
    code of a reset stream."""
    config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
    connection, result = h2.connection.H2Connection(config), {}
    with connect(port) as wire:
        connection.initiate_connection()
        connection.send_headers(1, list((GRPC_HEADERS | headers).items()))
        connection.send_data(1, data, end_stream=True)
        wire.sendall(connection.data_to_send())
        while True:
            for event in connection.receive_data(next_bytes(wire)):
                if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                    result |= dict(event.headers)
                if isinstance(event, h2.events.StreamReset):
                    return result | {"reset": event.error_code}
                if isinstance(event, h2.events.StreamEnded):
                    return result
            wire.sendall(connection.data_to_send())


@pytest.mark.parametrize("change, data", [
    ({"content-type": "application/json"}, b"{}"),
    ({"grpc-encoding": "br"}, b"\1" + struct.pack(">I", 3) + b"abc"),
    ({"grpc-encoding": "gzip"}, b"\1" + struct.pack(">I", 3) + b"abc"),
    ({}, b"\0" + struct.pack(">I", 100) + b"cut"),
    ({}, b"\7" + struct.pack(">I", 0)),
    ({}, b""),
    ({}, b"\0" + struct.pack(">I", 2**32 - 1)),
], ids=["not gRPC", "unknown compression", "compression that lies", "message cut", "unknown flag", "no message",
        "4 GiB"])  # fmt: skip
def test_frames_that_are_not_a_call(server, change, data):
    """Each is answered with an HTTP or gRPC error status, or the stream is reset; the server continues."""
    answer = h2_call(server.grpc_port, change, data)
    assert "reset" in answer or answer[":status"] >= "400" or answer.get("grpc-status", "0") != "0", answer
    still_answers(server)
