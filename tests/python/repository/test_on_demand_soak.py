"""A long random run with models on demand within a memory limit: requests, loads and unloads by request, changes of files, and
kills of workers and fork servers. `make soak SOAK_SECONDS=3600` is the long form; it prints its measurements."""

import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time

import pytest

from harness.inference import one
from harness.models import IO
from harness.processes import mapped
from harness.server import EXAMPLES, Server, alive, fork_servers, total
from harness.waiting import eventually, pause_as_client, settled
from python_backend.worker import PYTHON, has_worker
from repository.repository_tables import model

SECONDS = int(os.environ.get("PHAROS_SOAK_S", "0"))
CLIENTS = 6
MB = 1 << 20
LIMIT = 400 * MB
"""Six models in Python fit at the same time, also those whose fork server was killed, and which share nothing any more."""
CODE = """import numpy
import triton_python_backend_utils as utils

HELD = numpy.ones({bytes}, dtype=numpy.uint8)


class TritonPythonModel:
    def execute(self, requests):
        tensors = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", numpy.copy(tensor))]) for tensor in tensors]
"""
PICTURE = {"inputs": [{"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]}


def build(folder):
    """Writes 30 models of the builtin backend, 4 of ONNX Runtime and, if there is a worker for Python, 12 in Python."""
    for number in range(30):
        put(folder, f"builtin{number}", model())
    for number in range(4):
        copy = folder / f"digits{number}"
        shutil.copytree(EXAMPLES / "digits", copy)
        config = copy / "config.pbtxt"
        config.write_text(config.read_text().replace('"digits"', f'"digits{number}"', 1))
    for number in range(12 if has_worker else 0):
        put(folder, f"python{number}", f'backend: "python" max_batch_size: 4 {IO}')
        (folder / f"python{number}/1/model.py").write_text(CODE.format(bytes=40 * MB))


def put(folder, name, config):
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(config if "backend" in config else f'backend: "builtin"\n{config}')


class Run:
    """Clients and disturbances until a point in time, and what they saw."""

    def __init__(self, server, names, folder):
        self.server, self.names, self.folder = server, names, folder
        self.until = time.monotonic() + SECONDS
        self.answered, self.wrong, self.lost, self.unloaded = 0, [], [], []
        self.done = {"kill": 0, "kill_fork_server": 0, "load": 0, "unload": 0, "change": 0}
        self.refused, self.lock = [], threading.Lock()
        self.mib = []

    def client(self, seed: int):
        """Sends requests to random models, the first ones more often, and checks each answer."""
        chance = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(len(self.names))]
        while time.monotonic() < self.until:
            (name,) = chance.choices(self.names, weights)
            values = [chance.randrange(1000), chance.randrange(1000)]
            body = PICTURE if name.startswith("digits") else one("FP32", [1, 2], values)
            status, answer = self.server.infer(name, body)
            with self.lock:
                self.note(name, values, status, answer)
            pause_as_client(chance.uniform(0, 0.02))

    def note(self, name, values, status, answer):
        text = json.dumps(answer)
        if status == 200:
            self.answered += 1
            if not name.startswith("digits") and answer["outputs"][0]["data"] != values:
                self.wrong.append((name, values, text))
        elif "instance lost" in text or "worker process ended" in text:
            self.lost.append((status, text))
        elif "it was unloaded during the load" in text and "is accepted in" not in text:
            self.unloaded.append((status, text))
        else:
            self.wrong.append((name, status, text))

    def disturb(self, seed: int):
        """Kills, loads, unloads and changes, at random."""
        chance = random.Random(seed)
        while time.monotonic() < self.until:
            kind, name = chance.choice(list(self.done)), chance.choice(self.names)
            processes = fork_servers(self.server.process.pid) if kind == "kill_fork_server" else list(self.server.workers())
            if kind.startswith("kill"):
                self.done[kind] += bool(processes) and kill(chance.choice(sorted(processes)))
            elif kind in ("load", "unload"):
                status, answer = self.server.ask("POST", f"/v2/repository/models/{name}/{kind}", b"")
                if status != 200:
                    self.refused.append((kind, name, status, answer))
                if kind == "load":
                    # A model that a client has loaded stays; without this, none could make room in the end.
                    self.server.ask("POST", f"/v2/repository/models/{name}/unload", b"")
            elif kind == "change":
                (self.folder / name / "1/changed").write_text(str(chance.random()))
            self.done[kind] += not kind.startswith("kill")
            pause_as_client(chance.uniform(0, 0.4))

    def measure(self):
        """Measures the memory of the frontend twenty times: a leak grows evenly, while an allocator reaches a level."""
        while time.monotonic() < self.until:
            self.mib.append(round(held(self.server)["mib"]))
            pause_as_client(SECONDS / 20)

    def run(self):
        """Runs all to their end."""
        threads = [threading.Thread(target=self.client, args=(seed,)) for seed in range(CLIENTS)]
        threads += [threading.Thread(target=self.disturb, args=(CLIENTS,)), threading.Thread(target=self.measure)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def kill(pid: int) -> bool:
    """Kills a process; returns whether it was alive. Ids of ended processes are not used again within this time."""
    try:
        is_alive = alive(pid)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return is_alive


def held(server) -> dict:
    """Returns what the frontend holds while no model is loaded."""
    pid = server.process.pid
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": len(os.listdir(f"/proc/{pid}/task")),
        "mib": mapped(pid, "Private_Dirty") / MB, "files": len(os.listdir(tempfile.gettempdir())),
    }  # fmt: skip


def empty(server, names):
    """Unloads all models, and waits for the ends of their processes."""
    for name in names:
        server.ask("POST", f"/v2/repository/models/{name}/unload", b"")
    eventually("all workers have ended", lambda: server.workers() == set())


@pytest.mark.alone
@pytest.mark.soak
@pytest.mark.skipif(not SECONDS, reason="a long run with random disturbances: make soak")
@pytest.mark.skipif(not has_worker, reason="needs models of some size: make python-worker")
def test_random_loads_kills_and_unloads(tmp_path):
    """Each request is answered correctly, except those that a killed worker was executing, and those that waited for a load that a
    client has ended; nothing is left behind."""
    build(tmp_path / "models")
    names = sorted(path.name for path in (tmp_path / "models").iterdir())
    random.Random(1).shuffle(names)
    options = ["--model-control-mode=on-demand", f"--model-memory-limit={LIMIT}", f"--python={PYTHON}"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        # The first loads allocate memory that later ones use again.
        for name in names:
            server.infer(name, PICTURE if name.startswith("digits") else one("FP32", [1, 2], [1, 2]))
        empty(server, names)
        settled("the number of descriptors", lambda: held(server)["descriptors"], 1)
        before = held(server)
        run = Run(server, names, tmp_path / "models")
        run.run()
        empty(server, names)
        # Threads for blocking calls end when they have had none for 10 s.
        eventually("idle threads have ended", lambda: held(server)["threads"] <= before["threads"] + 8)
        after = held(server)
        scraped = server.scrape()
    loads = int(total(scraped, "pharos_on_demand_loads_total", result="success"))
    evictions = int(total(scraped, "pharos_on_demand_unloads_total", reason="memory"))
    print(f"\n{SECONDS} s: {run.answered} answers, {len(run.lost)} lost with killed workers, {loads} loads on demand, "
          f"{evictions} models made room, {run.done}; {before} -> {after}; MiB meanwhile: {run.mib}")  # fmt: skip
    assert run.wrong == [] and run.refused == [], json.dumps((run.wrong[:5], run.refused[:5]))
    assert min(run.done.values()) > 0, run.done
    assert run.answered > 20 * SECONDS and evictions > 0
    assert len(run.lost) <= CLIENTS * run.done["kill"], run.lost[:5]
    assert len(run.unloaded) <= CLIENTS * (run.done["load"] + run.done["unload"]), run.unloaded[:5]
    assert abs(after["descriptors"] - before["descriptors"]) <= 8, (before, after)
    assert after["files"] <= before["files"] + 4, (before, after)
    assert after["mib"] - before["mib"] < 40, (before, after)
