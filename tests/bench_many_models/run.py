#!/usr/bin/env python3
"""Measures what a server with many models needs: time until they are ready, memory, the first request to a model that is loaded on
demand, the size of a scrape, and a load of which only a part of the models fits into the memory.

    make bench-many-models
    make bench-many-models BENCH_FLAGS="--only python --seconds 300"

Prints one line for each number, with its goal. See docs/src/internals/performance.md.
"""

import argparse
import collections
import concurrent.futures
import http.client
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

from harness.processes import mapped, used_bytes  # noqa: E402
from harness.server import EXAMPLES, Server, total, workers  # noqa: E402

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
CLIENTS = 8
KEPT = (0, 1)
"""The models that stay loaded in the load on a limited memory, those with the most requests. A request to another model may wait for
its load, which its answer does not tell."""
TURN_S = 20
"""How long each of two servers that are compared gets requests before it is the turn of the other."""
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


class Sent(typing.NamedTuple):
    """A request of a client: when it was sent, to which model, how long it took, and status and text of the answer if it was an
    error."""

    began: float
    model: int
    seconds: float
    failure: str


def client(address: str, seed: int, models: int, seconds: float) -> list:
    """Sends requests on one connection for `seconds`, to models chosen by Zipf's law, with a random pause of 20 ms on average after
    each answer. Returns the requests."""
    chance, connection = random.Random(seed), http.client.HTTPConnection(address, timeout=60)
    weights = [1 / (rank + 1) for rank in range(models)]
    body, until = json.dumps(REQUEST), time.monotonic() + seconds
    sent = []
    while time.monotonic() < until:
        (model,) = chance.choices(range(models), weights)
        began = time.monotonic()
        connection.request("POST", f"/v2/models/m{model}/infer", body)
        response = connection.getresponse()
        text = response.read()
        took = time.monotonic() - began
        failure = "" if response.status == 200 else f"{response.status} {text.decode(errors='replace')}"
        sent.append(Sent(began, model, took, failure))
        time.sleep(chance.uniform(0, 0.04))
    return sent


def most_memory(pid: int, ended) -> int:
    """Returns the most bytes that the workers of a server have used at the same time until `ended` is set. A look takes milliseconds,
    so only those count during which no worker began or ended: others would count a worker and its successor."""
    most = 0
    while not ended.wait(0.05):
        before = set(workers(pid))
        used = sum(map(used_bytes, before))
        if set(workers(pid)) == before:
            most = max(most, used)
    return most


def largest_model(folder: Path, models: Path, count: int) -> int:
    """Returns the bytes that the server counts for the largest of these models after a request to each."""
    with Server(folder, [models], ["--model-memory-limit=1000000000"]) as server:
        for number in range(count):
            assert server.infer(f"m{number}", REQUEST)[0] == 200
        return max(used_bytes(pid) for pid in server.workers())


def load(server: Server, models: int, seconds: float, memory: bool = False, turn: int = 0) -> tuple:
    """Runs eight clients, each in its own process, so that they do not wait for each other; each `turn` has other requests. Returns
    the requests and, if the memory of the models is sampled, the most of it: samples need a processor, so times are measured
    without."""
    with multiprocessing.Manager() as manager, concurrent.futures.ProcessPoolExecutor(CLIENTS + 1) as pool:
        ended = manager.Event()
        sampled = pool.submit(most_memory, server.process.pid, ended) if memory else None
        seeds = range(turn * CLIENTS, (turn + 1) * CLIENTS)
        clients = [pool.submit(client, server.http, seed, models, seconds) for seed in seeds]
        sent = [each for done in clients for each in done.result()]
        ended.set()
        return sent, sampled and sampled.result()


def record(file: Path, about: str, sent: list):
    """Writes one line for each request: milliseconds since the first, and the number of the model."""
    first = min(sent).began
    lines = [f"# {about}", *(f"{1e3 * (each.began - first):.0f} {each.model}" for each in sorted(sent))]
    file.write_text("\n".join(lines) + "\n")


def p99_of_kept(sent: list) -> float:
    """Returns the 99th percentile of the requests to models that stay loaded."""
    times = sorted(each.seconds for each in sent if each.model in KEPT)
    return times[int(0.99 * len(times))]


def waits_for_kept(server: Server) -> int:
    """Returns the number of requests that have waited for the load of a model that stays loaded."""
    scraped = server.scrape()
    return sum(int(total(scraped, "pharos_on_demand_wait_seconds_count", model=f"m{number}")) for number in KEPT)


def limited_memory(folder: Path, options):
    """A thousand models, memory for twenty, eight clients; in turn with a server of twenty models that are all loaded, because the
    speed of a machine changes within minutes."""
    models = repository(folder, 1000, BUILTIN)
    for number in KEPT:
        with (models / f"m{number}/config.pbtxt").open("a") as config:
            config.write('parameters { key: "min_loaded" value { string_value: "1" } }\n')
    alone = repository(folder / "alone", 20, BUILTIN)
    usual, sent = [], []
    limit = int(20 * 1.1 * largest_model(folder / "alone", alone, 20))
    with Server(folder / "alone", [alone], []) as plain:
        with Server(folder, [models], [MODE, f"--model-memory-limit={limit}"]) as server:
            for number in KEPT:
                assert server.infer(f"m{number}", REQUEST)[0] == 200
            waits = waits_for_kept(server)
            turns = max(1, round(options.seconds / TURN_S))
            for turn in range(turns):
                usual += load(plain, 20, options.seconds / turns, turn=turn)[0]
                sent += load(server, 1000, options.seconds / turns, turn=turn)[0]
            scraped = server.scrape()
            loads = int(total(scraped, "pharos_on_demand_loads_total", result="success"))
            waited = int(total(scraped, "pharos_on_demand_wait_seconds_count"))
            # All requests to these models are requests to loaded models.
            assert waits_for_kept(server) == waits
            others, most = load(server, 1000, min(options.seconds, 60), memory=True)
    about = f"1,000 models, memory for 20, {options.seconds:g} s"
    if options.record:
        record(options.record, f"{about}, eight clients, Zipf's law: milliseconds since the first, model", sent)
    print(f"{about}: {len(sent)} requests, {loads} loads, {waited} requests waited")
    failed = failures(usual + sent + others)
    told("failed requests", len(failed), "requests", 0)
    for text, count in collections.Counter(failed).most_common(10):
        print(f"  {count} times: {text}")
    told("most memory of the models", most / limit, "of the limit", 1)
    before, after = p99_of_kept(usual), p99_of_kept(sent)
    kept = sum(each.model in KEPT for each in sent)
    told(f"p99 of {kept} requests to loaded models", after / before, f"of {1e3 * before:.2f} ms without the others", 1.3)


def failures(sent: list) -> list:
    """Returns the answers to requests that failed."""
    return [each.failure for each in sent if each.failure]


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
