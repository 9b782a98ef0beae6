"""The memory of received data depends on the bytes received, not on the announced length; the total is limited, and so is
decompressed data. Other clients are served meanwhile."""

import contextlib
import gzip
import json
import struct
import threading
import zlib

import grpc
import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb

from harness.connections import GRPC_HEADERS, connect, next_bytes, read_response
from harness.inference import one
from harness.models import copy_models
from harness.processes import resident_kb
from harness.server import Server, total
from harness.waiting import DEADLINE_S, eventually, join_all
from security.others import INFER, MODEL, OPTIONS, Others
from torchserve.home import Home, has_worker

pytestmark = pytest.mark.alone

GZIP = [("grpc-encoding", "gzip"), ("grpc-accept-encoding", "gzip")]
SERVICE = "/inference.GRPCInferenceService/"


class Calls:
    """Calls on one HTTP/2 connection, sent frame by frame."""

    def __init__(self, port):
        configuration = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.wire, self.connection = connect(port), h2.connection.H2Connection(configuration)
        self.connection.initiate_connection()
        self.ended, self.streams = {}, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wire.close()

    def begin(self, data=b"", extra=(), path=SERVICE + "ModelInfer", end=False, flush=True) -> int:
        """Begins a call and sends the first bytes of its message; without `flush` they are sent with the next frames."""
        stream = self.connection.get_next_available_stream_id()
        self.connection.send_headers(stream, [*({**GRPC_HEADERS, ":path": path}).items(), *extra])
        self.streams += 1
        while data:
            size = min(self.connection.local_flow_control_window(stream), self.connection.max_outbound_frame_size, len(data))
            if size:
                self.connection.send_data(stream, data[:size])
                data = data[size:]
            else:
                self.wire.sendall(self.connection.data_to_send())
                self.receive()
                if stream in self.ended:
                    return stream
        if end:
            self.connection.end_stream(stream)
        if flush:
            self.wire.sendall(self.connection.data_to_send())
        return stream

    def receive(self):
        """Receives all available data."""
        for event in self.connection.receive_data(next_bytes(self.wire)):
            if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                headers = dict(event.headers)
                if "grpc-status" in headers:
                    self.ended[event.stream_id] = headers
        self.wire.sendall(self.connection.data_to_send())

    def end(self, *streams, seconds=30):
        """Waits until these calls have ended; returns their trailers."""
        self.wire.settimeout(seconds)
        while not all(stream in self.ended for stream in streams):
            self.receive()
        return [(int(self.ended[stream]["grpc-status"]), self.ended[stream].get("grpc-message", "")) for stream in streams]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A server with short timeouts."""
    folder = tmp_path_factory.mktemp("attacked")
    with Server(folder, [copy_models(folder / "models", [MODEL])], OPTIONS) as server:
        yield server


def bomb(size: int) -> bytes:
    """Returns a compressed message that decompresses to this size."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join([packer.compress(bytes(2**20)) for _ in range(size // 2**20)]) + packer.flush()
    return b"\1" + struct.pack(">I", len(packed)) + packed


def reserved_kb(server) -> int:
    """Returns the peak address space of the frontend."""
    text = open(f"/proc/{server.process.pid}/status").read()
    return int(text.split("VmPeak:")[1].split()[0])


def promises(server):
    """4,000 calls that announce 2 GiB each and send five bytes."""
    before = reserved_kb(server)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(Calls(server.grpc_port)) for _ in range(4)]
        prefix = b"\0\x7f\xff\xff\xff"
        paths = [SERVICE + method for method in ("ModelInfer", "ServerMetadata", "ModelMetadata", "RepositoryIndex")]
        streams = []
        for calls, path in zip(connections, paths, strict=True):
            streams.append([calls.begin(prefix, path=path, flush=number == 999) for number in range(1000)])
        for calls, opened in zip(connections, streams, strict=True):
            assert {status for status, _ in calls.end(*opened)} == {3}
    assert reserved_kb(server) - before < 2**20, "announced lengths must not reserve address space"


def bombs(server):
    """Three calls, each with 1 MB that decompresses to 1 GB."""
    data = bomb(2**30)
    assert len(data) < 2**20 + 2**16

    def send(results):
        with Calls(server.grpc_port) as calls:
            results += calls.end(calls.begin(data, GZIP, end=True), seconds=60)

    results = []
    threads = [threading.Thread(target=send, args=(results,), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert [status for status, _ in results] == [8] * 3, results
    assert "maximum%20allowed%20value%20of%2067108864%20bytes" in results[0][1]


def bombs_in_streams(server):
    """The same requests in one stream: the first ends the stream."""
    data = bomb(2**28)
    with Calls(server.grpc_port) as calls:
        [(status, _)] = calls.end(calls.begin(data * 3, GZIP, SERVICE + "ModelStreamInfer", end=True), seconds=60)
    assert status == 8


def bombs_over_http(server):
    """Three HTTP requests, each with 1 MB that decompresses to 1 GB."""
    data = bomb(2**30)[5:]
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connect(server.http_port)) for _ in range(3)]
        for wire in wires:
            wire.sendall(head + data)
        for wire in wires:
            wire.settimeout(DEADLINE_S)
            status, body = read_response(wire)
            text = b"exceeds the maximum allowed value of 67108864 bytes. Use --http-max-input-size to increase the limit."
            assert status == 400 and text in body, body


ATTACKS = {promises: 150, bombs: 400, bombs_in_streams: 250, bombs_over_http: 400}
"""Each attack, and the limit of its memory in MiB."""


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack(attacked, attack, capsys):
    with Others(attacked) as others:
        attack(attacked)
    grown = (others.most_kb - others.first_kb) / 1024
    with capsys.disabled():
        print(
            f"\n{attack.__name__}: others p50 {1000 * np.median(others.times):.1f} ms, p99 {1000 * others.p99():.1f} ms, "
            f"longest {1000 * max(others.times):.0f} ms; the frontend grew by {grown:.0f} MiB ",
            end="",
        )
    others.check()
    assert grown < ATTACKS[attack]
    assert attacked.process.poll() is None
    attacked.check()


def message(values: int) -> pb.ModelInferRequest:
    """Returns a request with this many numbers."""
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[values])
    request.raw_input_contents.append(np.arange(values, dtype=np.float32).tobytes())
    return request


def infer(server, request, compression=grpc.Compression.NoCompression):
    """Returns the numbers in the answer."""
    with grpc.insecure_channel(server.grpc, [("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.unary_unary(
            SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        answer = call(request, timeout=60, compression=compression)
    return np.frombuffer(answer.raw_output_contents[0], dtype=np.float32)


def test_messages_have_a_size_limit(start):
    """`--grpc-max-input-size` limits the message both before and after decompression."""
    small, large = message(2000), message(40_000)
    server = start([MODEL], f"--grpc-max-input-size={small.ByteSize()}")
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert np.array_equal(infer(server, small, compression), np.arange(2000, dtype=np.float32))
        with pytest.raises(grpc.RpcError) as refused:
            infer(server, large, compression)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "Use --grpc-max-input-size to increase the limit" in refused.value.details()
    zeros = pb.ModelInferRequest(model_name=MODEL, id="0" * (small.ByteSize() + 1))
    with pytest.raises(grpc.RpcError) as refused:
        infer(server, zeros, grpc.Compression.Gzip)
    assert "when it is decompressed" in refused.value.details()
    assert total(server.scrape(), "pharos_request_failures_total", protocol="grpc", reason="TOO_LARGE") == 4


@pytest.mark.slow
def test_large_messages_are_compressed_both_ways(server):
    """Messages too large for compression in one step, in unary calls and in streams."""
    request = message(3_000_000)
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert np.array_equal(infer(server, request, compression), np.arange(3_000_000, dtype=np.float32))
    with grpc.insecure_channel(server.grpc, [("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.stream_stream(
            SERVICE + "ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        )
        answers = list(call(iter([request, message(3), request]), timeout=60, compression=grpc.Compression.Gzip))
    sizes = [len(answer.infer_response.raw_output_contents[0]) // 4 for answer in answers]
    assert sizes == [3_000_000, 3, 3_000_000]


def test_memory_of_received_data_is_bounded(start):
    """`--receive-memory-byte-size` limits HTTP bodies and gRPC messages together; data over the limit is refused, and released
    memory can be used again."""
    mib = 2**20
    server = start([MODEL], f"--receive-memory-byte-size={16 * mib}")
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {8 * mib}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            wire = stack.enter_context(connect(server.http_port))
            wire.sendall(head + bytes(4 * mib))
        calls = stack.enter_context(Calls(server.grpc_port))
        calls.begin(b"\0" + struct.pack(">I", 8 * mib) + bytes(3 * mib))

        def full():
            with pytest.raises(grpc.RpcError) as refused:
                infer(server, message(mib))
            return refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "--receive-memory-byte-size" in refused.value.details()

        eventually("a call of 4 MiB is refused", full)
        with connect(server.http_port) as wire:
            wire.sendall(head + bytes(8 * mib))
            wire.settimeout(DEADLINE_S)
            status, body = read_response(wire)
            assert status == 503 and b"--receive-memory-byte-size" in body, body
        # A body that arrives in one piece does not wait, so it is served.
        assert server.infer(MODEL, one("FP32", [1], [1]))[0] == 200

    def served():
        try:
            return len(infer(server, message(mib))) == mib
        except grpc.RpcError:
            return False

    eventually("the call is served after the others have ended", served)
    with pytest.raises(grpc.RpcError) as refused:
        infer(server, pb.ModelInferRequest(model_name=MODEL, id="0" * (20 * mib)), grpc.Compression.Gzip)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    packed = gzip.compress(json.dumps(one("FP32", [1], [1])).encode() + b" " * (20 * mib))
    status, text = server.ask("POST", INFER, packed, headers={"Content-Encoding": "gzip"})
    assert (status, "--receive-memory-byte-size" in text) == (503, True), text


@pytest.mark.parametrize("path", ["/grpc.health.v1.Health/Check", SERVICE + "ServerLive", SERVICE + "ModelReady"])
def test_clients_without_a_token_do_not_use_up_the_memory(start, tmp_path, path):
    """Calls that need no token have small messages, which are not counted: clients with a token are served meanwhile."""
    tokens = tmp_path / "tokens"
    tokens.write_text("infer-1\n")
    server = start([MODEL], f"--receive-memory-byte-size={8 * 2**20}", f"--inference-token-file={tokens}")
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    with client, Calls(server.grpc_port) as calls:
        large = calls.begin(b"\0" + struct.pack(">I", 2**20) + bytes(2**18), path=path)
        assert calls.end(large) == [(8, "Received%20message%20larger%20than%20max%20(1048576%20vs.%2065536).")]
        for _ in range(200):
            calls.begin(b"\0" + struct.pack(">I", 2**16) + bytes(60_000), path=path)
        # Frames are read in order: when this call is refused, all earlier frames have been received.
        calls.end(calls.begin(b"\0\x7f\xff\xff\xff", path=path))
        values = np.arange(2**20, dtype=np.float32)
        tensor = tritonclient.grpc.InferInput("INPUT0", [2**20], "FP32")
        tensor.set_data_from_numpy(values)
        answer = client.infer(MODEL, [tensor], headers={"authorization": "Bearer infer-1"})
        assert np.array_equal(answer.as_numpy("OUTPUT0"), values)


def test_every_unary_call_must_send_its_message(attacked):
    """Also those of the other services on the port."""
    with Calls(attacked.grpc_port) as calls:
        paths = ["/grpc.health.v1.Health/Check", "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics", SERVICE + "ServerLive"]
        stalled = [calls.begin(b"\0\0\0\0\x05abc", path=path) for path in paths]
        for status, text in calls.end(*stalled):
            assert status == 3 and "stalled" in text, text


@pytest.mark.skipif(not has_worker, reason="needs the package pharos-worker")
def test_announced_lengths_on_torchserves_ports(tmp_path):
    """Calls that announce 6 MB, the limit of these ports, and send five bytes; longer messages are refused at once."""
    ports = {
        "grpc": [SERVICE + "ModelInfer", "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"],
        "grpc_management": ["/org.pytorch.serve.grpc.management.ManagementAPIsService/RegisterModel"],
    }
    with Home(tmp_path) as home:
        before = resident_kb(home)
        for name, paths in ports.items():
            for path in paths:
                with Calls(getattr(home, name)) as calls:
                    refused = calls.begin(b"\0\x7f\xff\xff\xff", path=path)
                    [(status, text)] = calls.end(refused)
                    assert (status, "max_request_size" in text) == (8, True), (path, status, text)
                    for _ in range(500):
                        calls.begin(b"\0" + struct.pack(">I", 6_000_000), path=path)
                    # Frames are read in order: when this call is refused, all earlier frames have been received.
                    calls.end(calls.begin(b"\0\x7f\xff\xff\xff", path=path))
                    assert resident_kb(home) - before < 100_000, path
