"""A thousand clients of one model with a queue limit: exactly the requests beyond the limit are refused, without waiting for an
execution; the others are answered; memory does not grow.

The clients are a separate process (`load_clients.py`). The worker of the model is stopped until all refusals have arrived: a
refusal that waited for the queue would never arrive.
"""

import contextlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.generate import model, one_to_one
from harness.inference import one
from harness.processes import held, resident_kb
from harness.server import ROOT, total
from harness.statistics import dispatched, until_dispatched
from harness.waiting import DEADLINE_S, eventually

NAME = "limited"
CLIENTS = 1000
ROUNDS = 5
QUEUE = 32


@contextlib.contextmanager
def clients(protocol: str, address: str):
    """Starts the clients' process and waits until it is connected."""
    command = [sys.executable, "-m", "scheduling.load_clients", protocol, address, NAME, str(CLIENTS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT / "tests/python", **pipes) as process:
        try:
            assert process.stdout.readline() == "connected\n"
            yield process
        finally:
            process.stdin.close()
            process.wait(DEADLINE_S)


def waiting(server) -> float:
    """Returns the number of waiting requests."""
    return total(server.scrape(), "nv_inference_pending_request_count", model=NAME)


def full_queue(server, process, pool):
    """One round: a request executes, a part of the clients' requests fills the queue, and the others are refused."""
    before = dispatched(server, NAME)
    with held(server, NAME):
        executing = pool.submit(server.infer, NAME, one("FP32", [1, 2], [1, 2]))
        until_dispatched(server, NAME, before + 1)
        process.stdin.write(f"{CLIENTS - QUEUE}\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"refused": CLIENTS - QUEUE}
        assert waiting(server) == QUEUE
        assert dispatched(server, NAME) == before + 1
    assert json.loads(process.stdout.readline()) == {"refused": CLIENTS - QUEUE, "ok": QUEUE}
    assert executing.result()[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_thousand_clients_and_a_queue_limit(start, tmp_path, protocol):
    """In each of five rounds, 32 requests wait and get a result; the others are refused with the reason meanwhile."""
    policy = f"dynamic_batching {{\n  default_queue_policy {{ max_queue_size: {QUEUE} }}\n}}\n"
    name, config, _ = model(NAME, "delay", one_to_one("FP32"), extra=policy, delay_ms=1)
    (tmp_path / "models" / name / "1").mkdir(parents=True)
    (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    server, memory = start([], repository=tmp_path / "models"), []
    with clients(protocol, getattr(server, protocol)) as process, ThreadPoolExecutor(1) as pool:
        for _ in range(ROUNDS):
            full_queue(server, process, pool)
            memory.append(resident_kb(server))
    statistics = server.statistics(NAME)
    assert statistics["inference_stats"]["success"]["count"] == ROUNDS * (QUEUE + 1)
    assert statistics["inference_stats"]["fail"]["count"] == 0
    refusals = total(server.scrape(), "pharos_request_failures_total", route="infer", reason="QUEUE_FULL")
    assert refusals == ROUNDS * (CLIENTS - QUEUE)
    eventually("nothing waits", lambda: waiting(server) == 0)
    assert memory[4] < memory[1] * 1.05 + 2048, f"{memory} KiB resident after each round"
