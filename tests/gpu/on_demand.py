"""Step of `check.py`: models that are loaded on demand, within a limit of the memory that models use."""

import statistics
import threading
import time

import numpy as np

from correctness import ends
from harness.server import total
from world import MIB, Client, World, eventually, parameters, together

MODELS, FIT = 6, 3
"""Number of models, and how many of them the limit has room for."""
CLIENTS, SECONDS, CPU_SECONDS = 4, 20, 4
SHARES = 1 / np.arange(1, MODELS + 1) / sum(1 / np.arange(1, MODELS + 1))
"""The share of requests of each model: Zipf's law."""
HELD_MIB, HELD_CPU_MIB = 2048, 64
"""What each model holds; its process needs more."""
NUMBER = ends({"X": ("INT32", [1])}, {"Y": ("INT32", [1])})
SIZE = {False: "pharos_model_gpu_memory_bytes", True: "pharos_model_memory_bytes"}
USED = {False: "pharos_model_gpu_memory_used_bytes", True: "pharos_model_memory_used_bytes"}
"""The metrics of a model's memory, and of all models', on a device and without one."""
EXCESS_MIB = 256
"""How much more memory of the device may be in use than the limit: processes of other programs, and rounding."""


def ask(server, number: int) -> float:
    """Sends a request to a model over a new connection; returns its time in milliseconds."""
    begun = time.perf_counter()
    found = Client(server.http).infer(f"model_{number}", {"X": ("INT32", np.array([number], np.int32))})
    if int(found["Y"][0]) != number + 1:
        raise RuntimeError(f"model_{number}: {found}")
    return (time.perf_counter() - begun) * 1000


class Watch:
    """Reads the used memory in MiB repeatedly: of the device, or without one, what the server reports of its models."""

    def __init__(self, world: World, server):
        self.world, self.server, self.read = world, server, []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self):
        while not self.ended.is_set():
            self.read.append(total(self.server.scrape(), USED[True]) / MIB if self.world.cpu else self.world.used_mib())
            self.ended.wait(0.05)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def under_load(world: World, server, limit: float):
    """Sends requests to all models for some seconds, and compares the used memory with the limit. All are in MiB."""
    end = time.monotonic() + (CPU_SECONDS if world.cpu else SECONDS)

    def one(client: int) -> list:
        numbers, times = np.random.default_rng(client), []
        while time.monotonic() < end:
            times.append(ask(server, int(numbers.choice(MODELS, p=SHARES))))
        return times

    with Watch(world, server) as watch:
        times = sorted(sum(together(CLIENTS, one), []))
    loads = total(server.scrape(), "pharos_on_demand_loads_total", result="success")
    failed = total(server.scrape(), "pharos_on_demand_loads_total") - loads
    world.rows.check("requests", True, f"{len(times)}, median {statistics.median(times):.1f} ms, longest {times[-1]:.0f} ms")
    world.rows.check("models are loaded for requests", loads > MODELS and not failed, f"{loads:.0f}, {failed:.0f} failed", f"> {MODELS}")
    value = f"{max(watch.read):.0f} MiB at most of {len(watch.read)} readings"
    world.rows.check("memory is within the limit", 0 < max(watch.read) <= limit, value, f"<= {limit:.0f} MiB")


def on_demand(world: World):
    """Each model's first request loads it. The limit, which is determined from the size of one, has room for some of them."""
    reason = world.lacks_cuda() if not world.cpu else ""
    if reason:
        return world.rows.skip("models on demand", reason)
    before, held = (0.0, HELD_CPU_MIB) if world.cpu else (world.settled_mib(), HELD_MIB)
    for number in range(MODELS):
        world.python_model(f"model_{number}", "holds", NUMBER, 0, parameters(mib=held))
    options = ["--model-control-mode=on-demand", f"--python-preload=numpy{'' if world.cpu else ',torch'}"]
    flag = "--model-memory-limit" if world.cpu else "--model-gpu-memory-limit"
    with world.any_server(*options, f"{flag}=100%") as server:
        server.wait_until_ready()
        first = ask(server, 0)
        size = eventually("its size is measured", lambda: total(server.scrape(), SIZE[world.cpu], model="model_0")) / MIB
        world.rows.check("first request of all", True, f"{first:.0f} ms")
        world.rows.check("first request of another model", True, f"{ask(server, 1):.0f} ms")
        used = size if world.cpu else (world.settled_mib() - before) / 2
        world.rows.near("the size of a model", size, used, max(64, used / 20), "MiB")
    limit = int(size * (FIT + 0.5))
    with world.any_server(*options, f"{flag}={limit * MIB}") as server:
        server.wait_until_ready()
        for number in range(MODELS):
            ask(server, number)
        under_load(world, server, limit if world.cpu else before + limit + EXCESS_MIB)
    return None
