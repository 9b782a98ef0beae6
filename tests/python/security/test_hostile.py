"""Hostile clients over raw sockets: each attack ends, its memory is bounded, and other clients are served meanwhile as usual."""

import contextlib
import json
import re
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from harness.certificates import Files
from harness.connections import GRPC_HEADERS, connect, next_bytes, post, read_response
from harness.inference import one
from harness.models import copy_models, write
from harness.processes import resident_kb
from harness.server import Server, total
from harness.waiting import DEADLINE_S, eventually, every, join_all
from security.others import INFER, MODEL, MOST, OPTIONS, P99_S, Others

pytestmark = pytest.mark.alone

GROWTH_KB = 400_000
"""The limit of the frontend's memory growth during an attack; one HTTP/2 connection may send 16 MiB in advance, and answers
to slow readers have 64 MiB here."""
SLOW = f"""backend: "test"
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
parameters {{ key: "function" value {{ string_value: "delay" }} }}
parameters {{ key: "delay_ms" value {{ string_value: "{2000 * DEADLINE_S}" }} }}
"""
"""A model that answers after any deadline."""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A server with short timeouts."""
    folder = tmp_path_factory.mktemp("attacked")
    with Server(folder, [copy_models(folder / "models", [MODEL])], OPTIONS) as server:
        yield server


def refused(server, reason: str, listener: str = "http") -> float:
    """Returns the number of connections that were refused for this reason."""
    return total(server.scrape(), "pharos_connections_refused_total", listener=listener, reason=reason)


def drain(wire) -> bytes:
    """Returns all bytes until the end of the connection; a reset is an end."""
    received = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while part := wire.recv(65536):
            received += part
    return received


def push(wire, data: bytes) -> bool:
    """Returns whether the peer accepts the data."""
    try:
        wire.sendall(data)
    except (ConnectionResetError, BrokenPipeError):
        return False
    return True


def chunk(data: bytes) -> bytes:
    """Returns one chunk."""
    return b"%x\r\n" % len(data) + data + b"\r\n"


CHUNKED = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def endless_body(server):
    """An endless body in chunks is refused at the size limit."""
    with connect(server.http_port) as wire:
        wire.sendall(CHUNKED)
        piece = chunk(bytes(1 << 20))
        for _ in range(2000):
            if not push(wire, piece):
                break
        else:
            raise AssertionError("the server accepted 2 GiB")


def chunked_body_over_the_limit(server):
    """65 MiB in chunks, where 64 are allowed, without an announced length: 400 with the size that was received until then, and the
    option that raises the limit."""
    with connect(server.http_port) as wire:
        wire.sendall(CHUNKED)
        for _ in range(65):
            wire.sendall(chunk(b" " * (1 << 20)))
        wire.sendall(b"0\r\n\r\n")
        status, body = read_response(wire)
    text = r"request JSON size of (\d+) bytes exceeds the maximum allowed input size of 67108864 bytes. Use "
    found = re.search(text, body.decode())
    assert (status, bool(found)) == (400, True), body
    assert 64 << 20 < int(found[1]) <= 65 << 20
    assert b"--http-max-input-size to increase the limit." in body


def oversized_body(server):
    """A body with an announced length over the limit is refused without being read completely."""
    for size in (10**9, 10**12, 2**63 - 1):
        with connect(server.http_port) as wire:
            wire.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
            push(wire, bytes(1 << 20))
            status, body = read_response(wire)
            assert (status, b"exceeds the maximum allowed" in body) == (400, True), body


def truncated_bodies(server):
    """Truncated bodies are discarded."""
    request = post(INFER, json.dumps(one("FP32", [4], [1, 2, 3, 4])).encode())
    for keep in range(1, len(request), 7):
        with connect(server.http_port) as wire:
            wire.sendall(request[:keep])


def slow_bodies(server):
    """Stalled bodies and bodies below the minimum rate are refused with 400."""
    wires = [connect(server.http_port) for _ in range(200)]
    for wire in wires:
        wire.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
    for _ in every(0.5, 4):
        for wire in wires[100:]:
            push(wire, b" ")
    texts = [drain(wire) for wire in wires]
    assert all(text.startswith(b"HTTP/1.1 400") for text in texts)
    assert all(b"the request's body stalled for 2 seconds" in text for text in texts[:100])
    assert all(b"the request's body is too slow" in text for text in texts[100:]), texts[100:]
    for wire in wires:
        wire.close()


def many_chunks(server):
    """More than 65536 non-empty chunks: Triton's text, and the connection is closed."""
    with connect(server.http_port) as wire:
        wire.sendall(CHUNKED)
        for _ in range(70):
            push(wire, chunk(b" ") * 1000)
        push(wire, b"0\r\n\r\n")
        status, answer = read_response(wire)
        text = "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."
        assert (status, json.loads(answer)) == (400, {"error": text})
        assert drain(wire) == b"", "closed"
    body = json.dumps(one("FP32", [4], [1, 2, 3, 4])).encode()
    with connect(server.http_port) as wire:
        wire.sendall(CHUNKED + b"".join(chunk(bytes([byte])) for byte in body) + chunk(b" ") * 60000 + b"0\r\n\r\n")
        assert read_response(wire)[0] == 200, "fewer chunks are accepted"


def endless_heads(server):
    """An endless head is refused with 431, and one with too many headers too."""
    for line in (b"x: y\r\n", b"x-long: " + b"y" * 5000 + b"\r\n"):
        with connect(server.http_port) as wire:
            wire.sendall(b"GET /v2 HTTP/1.1\r\n")
            for _ in range(64):
                if not push(wire, line * (65536 // len(line))):
                    break
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_WR)
            answer = drain(wire)
            assert answer[:12] in (b"HTTP/1.1 431", b""), answer[:100]


def slow_heads(server):
    """The server waits for a head no longer than `--client-head-timeout-secs`, also if bytes keep arriving."""
    before = refused(server, "HEAD_TIMEOUT")
    wires = [connect(server.http_port) for _ in range(500)]
    for wire in wires:
        wire.sendall(b"GET /v2 HT")
    for _ in every(0.25, 2):
        for wire in wires[:50]:
            push(wire, b"T")
    assert all(drain(wire) == b"" for wire in wires)
    for wire in wires:
        wire.close()
    assert refused(server, "HEAD_TIMEOUT") >= before + 500


def half_open(server):
    """Thousands of idle connections: those beyond the limit get 503, the others are closed after the head timeout; then new
    connections are accepted again."""
    wires = [connect(server.http_port) for _ in range(MOST + 500)]
    refusals = 0
    for wire in reversed(wires):
        answer = drain(wire)
        refusals += answer.startswith(b"HTTP/1.1 503") and b"reached its limit of" in answer
        wire.close()
    assert refusals >= 450, refusals
    open_now = lambda: total(server.scrape(), "pharos_connections_open", listener="http")  # noqa: E731
    eventually("the idle connections are closed", lambda: open_now() < 10)
    assert refused(server, "LIMIT") >= 500


def unread_answers(server):
    """Clients that do not read their answers of 64 MiB are disconnected after `--client-write-timeout-secs`."""
    before = refused(server, "SLOW_READER")
    values = np.zeros(2 * 2**20, dtype=np.float32)
    head = json.dumps(one("FP32", [len(values)], binary_data_size=values.nbytes)
                      | {"parameters": {"binary_data_output": True}}).encode()  # fmt: skip
    request = post(INFER, head + values.tobytes(), f"Inference-Header-Content-Length: {len(head)}")
    wires = [connect(server.http_port) for _ in range(8)]
    for wire in wires:
        wire.sendall(request)
    eventually("the slow readers are disconnected", lambda: refused(server, "SLOW_READER") == before + 8)
    for wire in wires:
        wire.close()


def garbage(server):
    """Random bytes on the HTTP and gRPC ports."""
    rng = np.random.default_rng(5)
    for port in (server.http_port, server.grpc_port):
        for size in (1, 10, 100, 10_000):
            for _ in range(20):
                with connect(port) as wire:
                    push(wire, rng.bytes(size))
                    with contextlib.suppress(OSError):
                        wire.shutdown(socket.SHUT_WR)
                    drain(wire)


# ---- HTTP/2 -----------------------------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Returns an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers_block(extra=()) -> bytes:
    """Returns the compressed headers of a call."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    connection.initiate_connection()
    connection.data_to_send()
    connection.send_headers(1, [*GRPC_HEADERS.items(), *extra])
    return connection.data_to_send()[9:]


def end_of(wire, seconds: float = DEADLINE_S):
    """Returns the error code of the GOAWAY that ends the connection; `None` if the connection ends without one, -1 if it does not
    end."""
    buffer, code = b"", None
    wire.settimeout(seconds)
    try:
        while part := wire.recv(65536):
            buffer += part
            while len(buffer) >= 9 and len(buffer) >= 9 + (length := int.from_bytes(buffer[:3], "big")):
                if buffer[3] == 7:
                    code = int.from_bytes(buffer[13:17], "big")
                buffer = buffer[9 + length :]
    except (ConnectionResetError, BrokenPipeError):
        return code
    except TimeoutError:
        return -1
    return code


def flood(server, piece: bytes, seconds: float, first: bytes = b"", grpc: bool = True) -> bool:
    """Sends `piece` repeatedly while another thread reads; returns whether the peer accepted all of it."""
    with connect(server.grpc_port if grpc else server.http_port) as wire:
        wire.sendall(PREFACE + first)
        stop = threading.Event()
        reader = threading.Thread(target=lambda: (drain(wire), stop.set()), daemon=True)
        reader.start()
        taken = True
        wire.settimeout(DEADLINE_S)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if stop.is_set() or not push(wire, piece):
                taken = False
                break
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)
        join_all([reader])
    return taken


def rapid_reset(server):
    """Streams that are opened and reset at once (CVE-2023-44487): the connection is closed."""
    block = headers_block()
    for grpc in (True, False):
        pieces = [frame(1, 4, n, block) + frame(3, 0, n, struct.pack(">I", 8)) for n in range(3, 2 * 20_000, 2)]
        joined = [b"".join(pieces[start : start + 500]) for start in range(0, len(pieces), 500)]
        with connect(server.grpc_port if grpc else server.http_port) as wire:
            # The first call adds the header to the table; later calls refer to it.
            wire.sendall(PREFACE + frame(1, 4, 1, block))
            for piece in joined:
                if not push(wire, piece):
                    break
            # The frame is lost if the client still sends when the connection is closed.
            assert end_of(wire) in (h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, None)


def continuation_flood(server):
    """A head in endless CONTINUATION frames (CVE-2024-27316): the connection is closed."""
    taken = flood(server, frame(9, 0, 1, b"\x00\x01a\x7f" + b"\xff" * 100) * 100, 10, frame(1, 0, 1, headers_block()))
    assert not taken


def header_bomb(server):
    """A small frame that expands: one long header, referenced repeatedly. The connection is closed."""
    long = [("x", "y" * 4000)]
    block = headers_block(long)
    # The newest entry of the table is number 62: each reference expands to 4000 bytes.
    with connect(server.grpc_port) as wire:
        wire.sendall(PREFACE + frame(1, 4, 1, block))
        for stream in range(3, 400, 2):
            if not push(wire, frame(1, 4, stream, block + b"\xbe" * 10_000)):
                break
        assert end_of(wire) in (h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, None)


def cheap_frames(server):
    """PING, SETTINGS, empty DATA, WINDOW_UPDATE, PRIORITY and unknown frames at full speed. Only empty DATA frames, which
    clients do not need, close the connection."""
    for piece, is_accepted in (
        (frame(6, 0, 0, bytes(8)), True),
        (frame(4, 0, 0), True),
        (frame(4, 0, 0, struct.pack(">HI", 4, 65535)), True),
        (frame(0, 0, 1), False),
        (frame(8, 0, 0, struct.pack(">I", 1)), True),
        (frame(2, 0, 1, struct.pack(">IB", 0, 1)), True),
        (frame(0xEE, 0, 0, bytes(10)), True),
    ):
        assert flood(server, piece * 1000, 1, frame(1, 4, 1, headers_block())) == is_accepted, piece


def streams_without_end(server):
    """A thousand calls that never send their message end with the body timeout."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    with connect(server.grpc_port) as wire:
        connection.initiate_connection()
        for stream in range(1, 2001, 2):
            connection.send_headers(stream, list(GRPC_HEADERS.items()))
        wire.sendall(connection.data_to_send())
        ended = {}
        while len(ended) < 1000:
            for event in connection.receive_data(next_bytes(wire)):
                if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                    ended[event.stream_id] = dict(event.headers)
            wire.sendall(connection.data_to_send())
    assert {headers.get("grpc-status") for headers in ended.values()} == {"3"}, list(ended.values())[:1]
    assert "stalled" in next(iter(ended.values()))["grpc-message"]


def begun_messages(server):
    """Hundreds of streams of requests that begin a message and do not complete it end with the body timeout; a stream that waits
    between two messages does not."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    streams = GRPC_HEADERS | {":path": "/inference.GRPCInferenceService/ModelStreamInfer"}
    waiting, slow = 1, set(range(3, 603, 2))
    request = pb.ModelInferRequest(model_name="unknown").SerializeToString()
    with connect(server.grpc_port) as wire:
        connection.initiate_connection()
        for stream in [waiting, *sorted(slow)]:
            connection.send_headers(stream, list(streams.items()))
            connection.send_data(stream, b"\0" + struct.pack(">I", len(request)) + request)
        for stream in slow:
            connection.send_data(stream, b"\0" + struct.pack(">I", 10_000) + b"begun")
        wire.sendall(connection.data_to_send())
        ended = {}
        while slow - ended.keys():
            for event in connection.receive_data(next_bytes(wire)):
                if isinstance(event, h2.events.TrailersReceived):
                    ended[event.stream_id] = dict(event.headers)
            wire.sendall(connection.data_to_send())
        assert ended.keys() == slow, "the stream that waits goes on"
        assert {headers["grpc-status"] for headers in ended.values()} == {"3"}, list(ended.values())[:1]
        assert "stalled" in ended[3]["grpc-message"]


def shut_windows(server):
    """Clients that grant no window for their answers are disconnected after `--client-write-timeout-secs`, even if the connection
    is otherwise active."""
    before = refused(server, "SLOW_READER", "grpc")
    message = pb.ModelInferRequest(model_name=MODEL)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[2**20])
    message.raw_input_contents.append(bytes(4 * 2**20))
    data = message.SerializeToString()
    data = b"\0" + struct.pack(">I", len(data)) + data
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    with connect(server.grpc_port) as wire:
        connection.initiate_connection()
        connection.send_headers(1, list(GRPC_HEADERS.items()))
        rest = data
        while rest:
            size = min(connection.local_flow_control_window(1), connection.max_outbound_frame_size, len(rest))
            if size:
                connection.send_data(1, rest[:size], end_stream=size == len(rest))
                rest = rest[size:]
            else:
                connection.receive_data(next_bytes(wire))
            wire.sendall(connection.data_to_send())
        begun = time.monotonic()
        wire.settimeout(0.2)
        # It answers pings and makes other calls to keep the connection active.
        while time.monotonic() - begun < DEADLINE_S:
            try:
                received = wire.recv(65536)
            except TimeoutError:
                received = None
            except ConnectionResetError:
                break
            if received == b"":
                break
            connection.receive_data(received or b"")
            connection.ping(b"12345678")
            if not push(wire, connection.data_to_send()):
                break
        assert 1 < time.monotonic() - begun < DEADLINE_S
    assert refused(server, "SLOW_READER", "grpc") == before + 1


ATTACKS = [
    endless_body, chunked_body_over_the_limit, oversized_body, truncated_bodies, slow_bodies, many_chunks, endless_heads, slow_heads, half_open,
    unread_answers, garbage, rapid_reset, continuation_flood, header_bomb, cheap_frames, streams_without_end, begun_messages,
    shut_windows,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack(attacked, attack, capsys):
    """During the attack other clients are served and memory stays bounded; afterwards the server is as before."""
    workers = attacked.workers()
    with Others(attacked) as others:
        attack(attacked)
    grown = others.most_kb - others.first_kb
    with capsys.disabled():
        print(
            f"\n{attack.__name__}: others p50 {1000 * np.median(others.times):.1f} ms, p99 {1000 * others.p99():.1f} ms, "
            f"longest {1000 * max(others.times):.0f} ms ({len(others.times)} requests); the frontend grew by {grown / 1024:.0f} MiB ",
            end="",
        )
    others.check()
    assert grown < GROWTH_KB
    assert attacked.process.poll() is None and attacked.workers() == workers
    assert attacked.infer(MODEL, one("FP32", [1], [1]))[0] == 200
    attacked.check()


def test_garbage_in_tls(tmp_path, capsys):
    """Thousands of invalid TLS handshakes, and others that stall; meanwhile a client with TLS is served."""
    files = Files(tmp_path / "pem")
    options = [*OPTIONS, *files.options("http")]
    server = Server(tmp_path, [copy_models(tmp_path / "models", [MODEL])], options)
    server.launch()
    try:
        eventually("the server is ready", lambda: " ready" in server.log_tail())
        context, rng = ssl.create_default_context(cafile=files.root), np.random.default_rng(6)
        request = post(INFER, json.dumps(one("FP32", [4], [1, 2, 3, 4])).encode())
        times, first_kb = [], resident_kb(server)
        with context.wrap_socket(connect(server.http_port), server_hostname="localhost") as good:
            stopped = [connect(server.http_port) for _ in range(300)]
            for wire in stopped:
                wire.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            for n in range(1500):
                with connect(server.http_port) as wire:
                    push(wire, b"\x16\x03\x01" + struct.pack(">H", 512) + rng.bytes(600))
                if n % 5 == 0:
                    begun = time.monotonic()
                    good.sendall(request)
                    assert read_response(good)[0] == 200
                    times.append(time.monotonic() - begun)
            for wire in stopped:
                drain(wire)
                wire.close()
            good.sendall(request)
            assert read_response(good)[0] == 200
        count = lambda reason: refused(server, reason)  # noqa: E731
        eventually("all failed handshakes are counted", lambda: count("HANDSHAKE") >= 1500 and count("HANDSHAKE_TIMEOUT") >= 300)
        lines = [line for line in server.log.read_text().splitlines() if "refused a connection" in line]
        assert len(lines) < 20, "the log is not flooded"
        p99 = float(np.percentile(times, 99))
        with capsys.disabled():
            print(f"\nTLS garbage: p99 of a client with TLS {1000 * p99:.1f} ms ", end="")
        assert p99 < P99_S and resident_kb(server) - first_kb < GROWTH_KB
    finally:
        server.stop()


def test_one_grpc_connection_too_many(start):
    """It is closed, the client gets UNAVAILABLE, and other connections continue."""
    server = start([MODEL], "--grpc-max-connections=3")
    wires = []
    for _ in range(3):
        wire = connect(server.grpc_port)
        wire.sendall(PREFACE)
        assert wire.recv(9)[3] == 4
        wires.append(wire)
    with connect(server.grpc_port) as fourth:
        push(fourth, PREFACE)
        assert drain(fourth) == b""
    assert refused(server, "LIMIT", "grpc") == 1
    wires.pop().close()
    eventually("a connection is free", lambda: total(server.scrape(), "pharos_connections_open", listener="grpc") == 2)
    with connect(server.grpc_port) as wire:
        wire.sendall(PREFACE)
        assert wire.recv(9)[3] == 4


def test_old_connections_are_replaced(start, tmp_path):
    """`--grpc-max-connection-age`: GOAWAY, which clients do not notice; a call that exceeds the grace period is aborted."""
    models = write(copy_models(tmp_path / "models", [MODEL]), "slow", SLOW)
    server = start([], "--grpc-max-connection-age=1000", "--grpc-max-connection-age-grace=500", repository=models)
    with connect(server.grpc_port) as wire:
        wire.sendall(PREFACE)
        begun = time.monotonic()
        assert end_of(wire) == 0
        assert time.monotonic() - begun > 0.8
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        begun = time.monotonic()
        with pytest.raises(InferenceServerException) as error:
            client.infer("slow", [tensor])
        assert error.value.status() == "StatusCode.UNAVAILABLE", error.value
        assert time.monotonic() - begun > 1
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert client.infer(MODEL, [tensor]).as_numpy("OUTPUT0").item() == 1, "clients must not notice the replacement"


def test_flags_without_effect_are_reported(start):
    """Triton's flags without an effect here are accepted and reported."""
    flags = [
        "--grpc-keepalive-permit-without-calls=false", "--grpc-http2-max-pings-without-data=2",
        "--grpc-http2-min-recv-ping-interval-without-data=300000", "--grpc-http2-max-ping-strikes=2",
        "--grpc-infer-thread-count=2", "--grpc-infer-allocation-pool-size=8", "--grpc-max-response-pool-size=8",
    ]  # fmt: skip
    server = start([MODEL], *flags, "--http-thread-count=2", "--grpc-keepalive-time=10000", "--grpc-keepalive-timeout=5000")
    log = server.log.read_text()
    assert [flag for flag in flags if f"{flag.split('=')[0]} has no effect: " not in log] == []
    for count in (2, 3):
        server = server if count == 2 else start([MODEL], f"--http-thread-count={count}")
        threads = [(task / "comm").read_text().strip() for task in Path(f"/proc/{server.process.pid}/task").iterdir()]
        assert sum(bool(re.fullmatch(r"loop-\d+", name)) for name in threads) == count, threads


def test_answers_are_compressed_if_configured(start):
    """`--grpc-infer-response-compression-level`: clients that accept gzip get it although they do not compress requests."""
    connection_of = lambda server: connect(server.grpc_port)  # noqa: E731
    for options, encoding in (([], None), (["--grpc-infer-response-compression-level=high"], "gzip")):
        server = start([MODEL], *options)
        message = pb.ModelInferRequest(model_name=MODEL)
        message.inputs.add(name="INPUT0", datatype="FP32", shape=[1000])
        message.raw_input_contents.append(bytes(4000))
        data = message.SerializeToString()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        with connection_of(server) as wire:
            connection.initiate_connection()
            connection.send_headers(1, [*GRPC_HEADERS.items(), ("grpc-accept-encoding", "gzip, deflate")])
            connection.send_data(1, b"\0" + struct.pack(">I", len(data)) + data, end_stream=True)
            wire.sendall(connection.data_to_send())
            got, size, over = {}, 0, False
            while not over:
                for event in connection.receive_data(next_bytes(wire)):
                    if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                        got |= dict(event.headers)
                    size += len(event.data) if isinstance(event, h2.events.DataReceived) else 0
                    over = over or isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset))
                wire.sendall(connection.data_to_send())
        assert (got.get("grpc-encoding"), got["grpc-status"], size < 1000) == (encoding, "0", encoding is not None)
        server.stop()
