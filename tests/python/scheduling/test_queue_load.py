"""A thousand clients of one model with a queue limit: each is answered, refusals are immediate, memory does not grow.

The clients are a separate process (`load_clients.py`). A probe beside them measures the latency of refusals over open
connections, alternating with a request that never waits, whose latency is that of the machine.
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
from harness.waiting import DEADLINE_S, eventually, pause_as_client, run_for
from harness.wire import grpc_infer, grpc_tensor
from scheduling.load_clients import REFUSED

pytestmark = pytest.mark.alone

CLIENTS = 1000
ROUNDS = 5
ROUND_S = 1.5
LIMIT_S = 0.010
"""The limit of the 90th percentile of refusals, in addition to that of requests that never wait."""
ACCEPTED_S = 0.25
"""A probe without an answer within this time waits in the queue, or its refusal is far too late."""


class HttpProbe:
    """Sends requests over keep-alive connections."""

    def __init__(self, server, name: str):
        self.path, self.server, self.body = f"/v2/models/{name}/infer", server, json.dumps(one("FP32", [1, 2], [1, 2]))
        self.idle, self.waiting = [], []
        for _ in range(64):
            connection = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
            connection.connect()
            self.idle.append(connection)

    def baseline(self):
        """Sends a request that never waits."""
        self.idle[-1].request("GET", "/v2/health/live")
        self.idle[-1].getresponse().read()

    def ask(self) -> bool:
        """Sends one request; returns whether it was refused. A request that waits in the queue is set aside."""
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
        """Reads an answer; returns whether it is a refusal."""
        connection.sock.settimeout(DEADLINE_S)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200 or (response.status == 503 and REFUSED in text), text
        return response.status == 503

    def late(self) -> int:
        """Returns how many of the requests that were set aside were refused in the end."""
        waiting, self.waiting = self.waiting, []
        self.idle += waiting
        return sum(self.is_refused(connection) for connection in waiting)

    def close(self):
        """Disconnects."""
        for connection in self.idle + self.waiting:
            connection.close()


class GrpcProbe:
    """Sends requests over one channel."""

    def __init__(self, server, name: str):
        self.channel, self.waiting = grpc.insecure_channel(server.grpc), []
        case = grpc_infer("", name, [grpc_tensor("INPUT0", "FP32", [1, 2], fp32_contents=[1, 2])])
        self.request = case.message.SerializeToString()
        service = "/inference.GRPCInferenceService/"
        self.infer = self.channel.unary_unary(service + "ModelInfer", bytes, bytes)
        self.live = self.channel.unary_unary(service + "ServerLive", bytes, bytes)

    def baseline(self):
        """Sends a request that never waits."""
        self.live(b"", timeout=DEADLINE_S)

    def ask(self) -> bool:
        """Sends one request; returns whether it was refused. A request that waits in the queue is set aside."""
        call = self.infer.future(self.request, timeout=DEADLINE_S)
        try:
            return self.is_refused(call.exception(ACCEPTED_S))
        except grpc.FutureTimeoutError:
            self.waiting.append(call)
            return False

    def is_refused(self, error) -> bool:
        """Checks an answer; returns whether it is a refusal."""
        assert error is None or (error.code() == grpc.StatusCode.UNAVAILABLE and REFUSED in error.details()), error
        return error is not None

    def late(self) -> int:
        """Returns how many of the requests that were set aside were refused in the end."""
        waiting, self.waiting = self.waiting, []
        return sum(self.is_refused(call.exception(DEADLINE_S)) for call in waiting)

    def close(self):
        """Disconnects."""
        self.channel.close()


def percentile(times: list, share: float) -> float:
    """Returns this percentile of the times."""
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def summary(times: list) -> str:
    """Returns the statistics of the times as text."""
    middle, most = percentile(times, 0.5) * 1e3, max(times) * 1e3
    return f"{len(times)} probes, median {middle:.2f}, p99 {percentile(times, 0.99) * 1e3:.2f}, at most {most:.2f} ms"


def probe_until(end: float, probe) -> tuple:
    """Probes until the time `end`; returns the latencies of refusals and of requests that never wait, and the number of waiting
    requests."""
    refusals, baseline, accepted = [], [], 0
    while time.monotonic() < end:
        started = time.perf_counter()
        probe.baseline()
        between = time.perf_counter()
        refused = probe.ask()
        baseline.append(between - started)
        if refused:
            refusals.append(time.perf_counter() - between)
        else:
            accepted += 1
        pause_as_client(0.001)
    return refusals, baseline, accepted


def resident_kib(pid: int) -> int:
    """Returns the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS")))


@contextlib.contextmanager
def clients(protocol: str, address: str, name: str):
    """Starts the clients' process and waits until it is connected."""
    command = [sys.executable, "-m", "scheduling.load_clients", protocol, address, name, str(CLIENTS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT / "tests/python", **pipes) as process:
        try:
            assert process.stdout.readline() == "connected\n"
            yield process
        finally:
            process.stdin.close()
            process.wait(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_thousand_clients_and_a_queue_limit(start, tmp_path, protocol):
    """In each of five rounds, every request gets a result or a refusal with the reason."""
    policy = "dynamic_batching {\n  default_queue_policy { max_queue_size: 32 }\n}\n"
    name, config, _ = model("limited", "delay", one_to_one("FP32"), extra=policy, delay_ms=200)
    (tmp_path / "models" / name / "1").mkdir(parents=True)
    (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    server = start([], repository=tmp_path / "models")
    refusals, baseline, accepted, memory, counts = [], [], 0, [], collections.Counter()
    probe = {"http": HttpProbe, "grpc": GrpcProbe}[protocol](server, name)
    with clients(protocol, getattr(server, protocol), name) as process, contextlib.closing(probe):
        for _ in range(ROUNDS):
            process.stdin.write(f"{ROUND_S}\n")
            process.stdin.flush()
            # The first requests of the round fill the queue, and the last ones end after it: neither is probed.
            run_for("the clients of a round begin within 0.3 s", 0.3)
            some, none, more = probe_until(time.monotonic() + ROUND_S - 0.4, probe)
            refusals, baseline, accepted = refusals + some, baseline + none, accepted + more
            assert probe.late() == 0, "refusals are immediate"
            counts.update(json.loads(process.stdout.readline()))
            memory.append(resident_kib(server.process.pid))
    assert len(refusals) >= 100, "the queue is full most of the time"
    print(f"{protocol}: {dict(counts)}; refusals: {summary(refusals)}; baseline: {summary(baseline)}; {memory} KiB resident")
    sent = counts.pop("sent")
    assert set(counts) == {"ok", "refused"}, counts
    assert counts["ok"] + counts["refused"] == sent >= CLIENTS * ROUNDS
    statistics = server.statistics(name)["inference_stats"]
    assert statistics["success"]["count"] == counts["ok"] + accepted
    assert statistics["fail"]["count"] == 0
    pending = "nv_inference_pending_request_count"
    eventually("nothing waits", lambda: total(server.scrape(), pending, model=name) == 0)
    # The last percent is the machine's: when it is busy, a few of either kind wait for a processor.
    assert percentile(refusals, 0.9) < LIMIT_S + percentile(baseline, 0.9)
    assert percentile(refusals, 0.99) < ACCEPTED_S
    assert memory[4] < memory[1] * 1.05 + 2048, f"{memory} KiB resident after each round"
