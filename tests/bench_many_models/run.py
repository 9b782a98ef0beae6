#!/usr/bin/env python3
"""Measures what a server with many models needs: time until they are ready, memory, the first request to a model that is loaded on
demand, the size of a scrape, and a load of which only a part of the models fits into the memory.

    make bench-many-models
    make bench-many-models BENCH_FLAGS="--only python --seconds 300"

Prints one line for each number, with its goal. See docs/src/internals/performance.md.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

from harness.processes import mapped, written  # noqa: E402
from harness.server import EXAMPLES, Server, total  # noqa: E402

IO = """max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }
"""
BUILTIN = f'backend: "builtin"\n{IO}parameters {{ key: "function" value {{ string_value: "identity" }} }}\n'
PYTHON = f'backend: "python"\n{IO}'
CODE = """import numpy
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", numpy.copy(tensor))]) for tensor in tensors]
"""
REQUEST = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]}]}
MODE = "--model-control-mode=on-demand"
THIS_PYTHON = f"--python={sys.executable}"


def repository(folder: Path, count: int, config: str, code: str = "") -> Path:
    """Writes `count` models `m0`, `m1`, ... and returns the repository."""
    for number in range(count):
        version = folder / f"models/m{number}/1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        if code:
            (version / "model.py").write_text(code)
    return folder / "models"


def private_bytes(pid: int) -> int:
    """Returns the bytes that only this process uses."""
    return mapped(pid, "Private_Clean", "Private_Dirty")


def told(what: str, value: float, unit: str, goal: float):
    """Prints a number that should be at most `goal`."""
    verdict = "reached" if value <= goal else "MISSED"
    print(f"{what}: {value:.4g} {unit} (goal: at most {goal:g} {unit}, {verdict})", flush=True)


def python_workers(folder: Path, options):
    """Start, memory and end of many Python models."""
    server = Server(folder, [repository(folder, options.models, PYTHON, CODE)], [THIS_PYTHON])
    began = time.monotonic()
    with server:
        told(f"{options.models} Python models ready", time.monotonic() - began, "s", 6)
        memory = [private_bytes(pid) for pid in server.workers()]
        told("private memory of an idle Python worker", statistics.median(memory) / 1e6, "MB", 6)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        told(f"exit with {options.models} Python workers", time.monotonic() - began, "s", 1)


def onnx_workers(folder: Path, options):
    """Memory of workers with ONNX Runtime and a small model."""
    for number in range(10):
        copy = folder / f"models/digits{number}"
        shutil.copytree(EXAMPLES / "digits", copy)
        config = copy / "config.pbtxt"
        config.write_text(config.read_text().replace('"digits"', f'"digits{number}"', 1))
    with Server(folder, [folder / "models"], []) as server:
        memory = [private_bytes(pid) for pid in server.workers()]
        told("private memory of an idle ONNX Runtime worker", statistics.median(memory) / 1e6, "MB", 5)


def first_requests(folder: Path, options):
    """The time of the first request to a Python model that is not loaded."""
    with Server(folder, [repository(folder, 20, PYTHON, CODE)], [MODE, THIS_PYTHON]) as server:
        times = []
        for number in range(20):
            began = time.monotonic()
            status, answer = server.infer(f"m{number}", REQUEST)
            times.append(time.monotonic() - began)
            assert status == 200, answer
        told("first request to an unloaded Python model, median of 20", 1e3 * statistics.median(times), "ms", 150)


def scrapes(folder: Path, options):
    """Time and size of a scrape with a thousand models of which twenty are loaded."""
    with Server(folder, [repository(folder, 1000, BUILTIN)], [MODE]) as server:
        for number in range(20):
            assert server.infer(f"m{number}", REQUEST)[0] == 200
        times = []
        for _ in range(20):
            began = time.monotonic()
            text = server.get("/metrics", server.metrics)[1]
            times.append(time.monotonic() - began)
        told("scrape with 1,000 models, 20 of them loaded, median of 20", 1e3 * statistics.median(times), "ms", 30)
        told("its size", len(text) / 1e6, "MB", 1)


class Load:
    """Closed-loop clients that choose models by Zipf's law, with a random pause of 20 ms on average after each answer."""

    def __init__(self, server, models: int, seconds: float):
        self.server, self.began, self.until = server, time.monotonic(), time.monotonic() + seconds
        self.names = [f"m{number}" for number in range(models)]
        self.weights = [1 / (rank + 1) for rank in range(models)]
        self.times, self.failures, self.requests = [], [], []

    def client(self, seed: int):
        """Sends requests on one connection until the end."""
        chance, connection = random.Random(seed), self.server.connect()
        body = json.dumps(REQUEST)
        while time.monotonic() < self.until:
            (name,) = chance.choices(self.names, self.weights)
            began = time.monotonic()
            self.requests.append((round(1e3 * (began - self.began)), int(name[1:])))
            connection.request("POST", f"/v2/models/{name}/infer", body)
            response = connection.getresponse()
            text = response.read()
            self.times.append(time.monotonic() - began)
            if response.status != 200:
                self.failures.append(text)
            time.sleep(chance.uniform(0, 0.04))

    def run(self, clients: int):
        """Runs all clients to their end."""
        threads = [threading.Thread(target=self.client, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


    def record(self, file: Path, about: str):
        """Writes one line for each request: milliseconds since the start, and the number of the model."""
        lines = [f"# {about}", *(f"{ms} {model}" for ms, model in sorted(self.requests))]
        file.write_text("\n".join(lines) + "\n")


def p99_of_fastest(times: list, slowest: int) -> float:
    """Returns the 99th percentile without the `slowest` longest times, those of requests that waited for a load."""
    fast = sorted(times)[: len(times) - slowest]
    return fast[int(0.99 * len(fast))]


def limited_memory(folder: Path, options):
    """A thousand models, memory for twenty, eight clients; compared with twenty models that are all loaded."""
    models = repository(folder, 1000, BUILTIN)
    alone = repository(folder / "alone", 20, BUILTIN)
    with Server(folder, [alone], []) as server:
        size = max(written([pid]) for pid in server.workers())
        load = Load(server, 20, min(options.seconds, 60))
        load.run(8)
        assert not load.failures, load.failures[:3]
        usual = p99_of_fastest(load.times, 0)
    limit = int(20 * 1.1 * size)
    with Server(folder, [models], [MODE, f"--model-memory-limit={limit}"]) as server:
        load, most, ended = Load(server, 1000, options.seconds), [0], threading.Event()

        def sample():
            while not ended.is_set():
                most[0] = max(most[0], written(server.workers()))
                time.sleep(0.02)

        sampler = threading.Thread(target=sample)
        sampler.start()
        load.run(8)
        ended.set()
        sampler.join()
        scraped = server.scrape()
        loads = int(total(scraped, "pharos_on_demand_loads_total", result="success"))
        waited = int(total(scraped, "pharos_on_demand_wait_seconds_count"))
    about = f"1,000 models, memory for 20, {options.seconds:g} s"
    if options.record:
        load.record(options.record, f"{about}, eight clients, Zipf's law: milliseconds since the start, model")
    print(f"{about}: {len(load.times)} requests, {loads} loads, {waited} requests waited")
    told("failed requests", len(load.failures), "requests", 0)
    told("most memory of the models", most[0] / limit, "of the limit", 1)
    told("p99 of requests to loaded models", p99_of_fastest(load.times, waited) / usual, f"of {1e3 * usual:.1f} ms without the others", 1.3)


PARTS = {
    "python": python_workers,
    "onnx": onnx_workers,
    "first": first_requests,
    "scrape": scrapes,
    "limit": limited_memory,
}


def main():
    """Runs the chosen parts, each with a new server."""
    parser = argparse.ArgumentParser(description="Measures a server with many models.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts to measure (default: all)")
    parser.add_argument("--models", type=int, default=100, help="number of Python models (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the load (default: %(default)s)")
    parser.add_argument("--record", type=Path, help="write the requests of the part `limit` to this file")
    options = parser.parse_args()
    print(f"processors: {len(os.sched_getaffinity(0))}")
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](Path(folder), options)


if __name__ == "__main__":
    main()
