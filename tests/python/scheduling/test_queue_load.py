"""A thousand clients on one model with a queue limit: each is answered, refusals come at once, memory does not grow.

The clients are a process of their own (`load_clients.py`). How long a refusal takes is measured by a probe beside them,
over connections that are open already, in turn with a request that never waits: what that one takes is the machine's.
"""

import collections
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from harness.generate import model, one_to_one
from harness.inference import one
from harness.server import ROOT, total
from harness.waiting import eventually, pause_as_client, run_for
from harness.wire import grpc_infer, grpc_tensor
from scheduling.load_clients import REFUSED

pytestmark = pytest.mark.alone

CLIENTS = 1000
ROUNDS = 5
ROUND_S = 1.5
LIMIT_S = 0.010
"""How much longer the 90th percentile of refusals may be than that of a request that never waits."""
ACCEPTED_S = 0.25
"""A probe that is not answered by then waits in the queue, or is a refusal that is far too late."""


class HttpProbe:
    """Asks over connections that are kept open."""

    def __init__(self, server, name: str):
        self.path, self.server, self.body = f"/v2/models/{name}/infer", server, json.dumps(one("FP32", [1, 2], [1, 2]))
        self.idle, self.waiting = [], []
        for _ in range(64):
            connection = http.client.HTTPConnection(server.http, timeout=30)
            connection.connect()
            self.idle.append(connection)

    def nothing(self):
        """A request that never waits."""
        self.idle[-1].request("GET", "/v2/health/live")
        self.idle[-1].getresponse().read()

    def ask(self) -> bool:
        """One request: whether it was refused. One that waits in the queue is put aside."""
        connection = self.idle.pop()
        connection.request("POST", self.path, self.body)
        connection.sock.settimeout(ACCEPTED_S)
        try:
            connection.sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            self.waiting.append(connection)
            return False
        self.idle.append(connection)
        return self.is_refused(connection)

    def is_refused(self, connection) -> bool:
        """Reads an answer."""
        connection.sock.settimeout(30)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200 or (response.status == 503 and REFUSED in text), text
        return response.status == 503

    def late(self) -> int:
        """How many that were put aside were refused in the end."""
        waiting, self.waiting = self.waiting, []
        self.idle += waiting
        return sum(self.is_refused(connection) for connection in waiting)

    def close(self):
        """Disconnects."""
        for connection in self.idle + self.waiting:
            connection.close()


class GrpcProbe:
    """Asks over one channel."""

    def __init__(self, server, name: str):
        self.channel, self.waiting = grpc.insecure_channel(server.grpc), []
        case = grpc_infer("", name, [grpc_tensor("INPUT0", "FP32", [1, 2], fp32_contents=[1, 2])])
        self.request = case.message.SerializeToString()
        service = "/inference.GRPCInferenceService/"
        self.infer = self.channel.unary_unary(service + "ModelInfer", bytes, bytes)
        self.live = self.channel.unary_unary(service + "ServerLive", bytes, bytes)

    def nothing(self):
        """A request that never waits."""
        self.live(b"", timeout=30)

    def ask(self) -> bool:
        """One request: whether it was refused. One that waits in the queue is put aside."""
        call = self.infer.future(self.request, timeout=30)
        try:
            return self.is_refused(call.exception(ACCEPTED_S))
        except grpc.FutureTimeoutError:
            self.waiting.append(call)
            return False

    def is_refused(self, error) -> bool:
        """Looks at an answer."""
        assert error is None or (error.code() == grpc.StatusCode.UNAVAILABLE and REFUSED in error.details()), error
        return error is not None

    def late(self) -> int:
        """How many that were put aside were refused in the end."""
        waiting, self.waiting = self.waiting, []
        return sum(self.is_refused(call.exception(30)) for call in waiting)

    def close(self):
        """Disconnects."""
        self.channel.close()


def percentile(times: list, share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def told(times: list) -> str:
    """Times in words."""
    middle, most = percentile(times, 0.5) * 1e3, max(times) * 1e3
    return f"{len(times)} probes, median {middle:.2f}, p99 {percentile(times, 0.99) * 1e3:.2f}, at most {most:.2f} ms"


def probe_until(end: float, probe) -> tuple:
    """Asks in turn until the time `end`: how long refusals took, how long nothing took, how many requests waited."""
    refusals, nothing, accepted = [], [], 0
    while time.monotonic() < end:
        started = time.perf_counter()
        probe.nothing()
        between = time.perf_counter()
        refused = probe.ask()
        nothing.append(between - started)
        if refused:
            refusals.append(time.perf_counter() - between)
        else:
            accepted += 1
        pause_as_client(0.001)
    return refusals, nothing, accepted


def resident_kib(pid: int) -> int:
    """The resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS")))


@contextlib.contextmanager
def clients(protocol: str, address: str, name: str):
    """The clients' process, connected."""
    command = [sys.executable, "-m", "scheduling.load_clients", protocol, address, name, str(CLIENTS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT / "tests/python", **pipes) as process:
        try:
            assert process.stdout.readline() == "connected\n"
            yield process
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_thousand_clients_and_a_queue_limit(start, tmp_path, protocol):
    """Five rounds; after each everybody has been answered, with a result or a refusal in words."""
    policy = "dynamic_batching {\n  default_queue_policy { max_queue_size: 32 }\n}\n"
    name, config, _ = model("limited", "delay", one_to_one("FP32"), extra=policy, delay_ms=200)
    (tmp_path / "models" / name / "1").mkdir(parents=True)
    (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    server = start([], repository=tmp_path / "models")
    refusals, nothing, accepted, memory, counts = [], [], 0, [], collections.Counter()
    probe = {"http": HttpProbe, "grpc": GrpcProbe}[protocol](server, name)
    with clients(protocol, getattr(server, protocol), name) as process, contextlib.closing(probe):
        for _ in range(ROUNDS):
            process.stdin.write(f"{ROUND_S}\n")
            process.stdin.flush()
            # The first refusals come when the first requests fill the queue; the last when the round ends.
            run_for("the clients of a round begin within 0.3 s", 0.3)
            some, none, more = probe_until(time.monotonic() + ROUND_S - 0.4, probe)
            refusals, nothing, accepted = refusals + some, nothing + none, accepted + more
            assert probe.late() == 0, "a refusal takes no time"
            counts.update(json.loads(process.stdout.readline()))
            memory.append(resident_kib(server.process.pid))
    assert len(refusals) >= 100, "the queue is full nearly all the time"
    print(f"{protocol}: {dict(counts)}; refusals: {told(refusals)}; nothing: {told(nothing)}; {memory} KiB resident")
    sent = counts.pop("sent")
    assert set(counts) == {"ok", "refused"}, counts
    assert counts["ok"] + counts["refused"] == sent >= CLIENTS * ROUNDS
    statistics = server.statistics(name)["inference_stats"]
    assert statistics["success"]["count"] == counts["ok"] + accepted
    assert statistics["fail"]["count"] == 0
    pending = "nv_inference_pending_request_count"
    eventually("nothing waits", 5, lambda: total(server.scrape(), pending, model=name) == 0)
    # The last percent is the machine's: when it is busy, a few of either kind wait for a processor.
    assert percentile(refusals, 0.9) < LIMIT_S + percentile(nothing, 0.9)
    assert percentile(refusals, 0.99) < ACCEPTED_S
    assert memory[4] < memory[1] * 1.05 + 2048, f"{memory} KiB resident after each round"
