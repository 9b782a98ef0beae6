"""Steps of `check.py`: compares the server's readings of the device with those of `nvidia-smi`, checks clients' memory on it, and
measures the memory of an idle instance."""

import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import rows
from correctness import ends
from harness.server import total
from speed import LARGE, PlainLoop
from world import HERE, MIB, Client, World, eventually, parameters

LOADED_S = 8
"""How long the device is busy while both are read."""
BUSY_S, PASSES = 5, 500
"""How long an instance is busy, and how many passes over its 2 GiB each request makes: about half a second."""
CHECKS_S = 100
"""Time limit of `gpu_shared_memory.py`."""
PACKAGES = ("numpy", "torch", "cupy", "onnxruntime", "cuda.bindings", "xgboost")
IMPORT = """
import importlib, sys, time
begun = time.time()
module = importlib.import_module(sys.argv[1])
print(f"{getattr(module, '__version__', 'of no version')}, imported in {time.time() - begun:.1f} s", end="")
begun = time.time()
if sys.argv[1] == "torch" and sys.argv[2] != "cpu":
    module.zeros(1, device=sys.argv[2])
    print(f", a context in {time.time() - begun:.1f} s", end="")
"""
PAIRS = {
    "nv_gpu_memory_used_bytes": ("memory.used", MIB, 64),
    "nv_gpu_memory_total_bytes": ("memory.total", MIB, 1),
    "nv_gpu_power_usage": ("power.draw", 1, None),
    "nv_gpu_power_limit": ("power.limit", 1, 1),
    "pharos_gpu_temperature_celsius": ("temperature.gpu", 1, 3),
    "nv_gpu_utilization": ("utilization.gpu", 0.01, 15),
}
"""The server's metric -> nvidia-smi's field, the server's units per nvidia-smi unit, and the tolerance in nvidia-smi's units. The
tolerance of power is a tenth, at least 15 W, because the readings are not simultaneous."""


def shared_memory(world: World):
    """Runs the checks of `gpu_shared_memory.py` with instances on the device, and compares its times: 256 MiB in and out without
    the host."""
    reason = "needs a device" if world.cpu else world.lacks("cuda.bindings") or no_client(world)
    if reason:
        return world.rows.skip("CUDA shared memory", reason)
    code, printed = checked(world)
    lines = [line for line in printed.splitlines() if line.startswith(("ok ", "FAIL ", "none "))]
    wrong = [line[5:] for line in lines if line.startswith("FAIL")]
    done = [line for line in lines if not line.startswith("none")]
    trouble = "; ".join(wrong) or f"exited with {code}: {printed.strip().rpartition(chr(10))[2]}"
    world.rows.check("all its checks pass", code == 0 and done, f"{len(done) - len(wrong)} of {len(done)}", reason=trouble)
    for what, _, why in (line[5:].partition(": ") for line in lines if line.startswith("none")):
        world.rows.skip(what, why)
    times = [float(found) for found in re.findall(r"256 MiB, median ([\d.]+) ms", printed)]
    if world.lacks_cuda():
        return world.rows.skip("256 MiB without the host", world.lacks_cuda())
    limit = round_trip_ms(world) / 2
    fast = bool(times) and max(times) < limit
    return world.rows.check("256 MiB without the host", fast, f"{times} ms", f"< {limit:.1f} ms, half of a round trip")


def no_client(world: World) -> str:
    """Returns why there is no tritonclient, packed or in this Python; empty if there is one."""
    return "" if (world.clients / "tritonclient").exists() else world.lacks("tritonclient")


def checked(world: World) -> tuple:
    """Runs `gpu_shared_memory.py`; returns its exit status, or a message about the timeout, and its output. Keeps its server's
    log."""
    command = [sys.executable, str(HERE.parent / "python/gpu/gpu_shared_memory.py"), f"--device={world.device}", "--on-device"]
    command += [f"--work={world.folder}", *([f"--clients={world.clients}"] if world.clients.exists() else [])]
    command += ["--", *os.environ.get("CHECK_SERVER_FLAGS", "").split()]
    log = world.folder / "gpu_shared_memory.log"
    shutil.rmtree(world.folder / "regions", ignore_errors=True)
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        code = process.wait(CHECKS_S)
    except subprocess.TimeoutExpired:
        code = f"no end within {CHECKS_S} s"
    finally:
        rows.end(process)
    return code, log.read_text(errors="replace")


def round_trip_ms(world: World) -> float:
    """Returns the time of copying 256 MiB to pinned host memory and back."""
    import torch

    there = torch.zeros(256 * MIB, dtype=torch.uint8, device=world.where())
    here = torch.empty(256 * MIB, dtype=torch.uint8).pin_memory()
    times = []
    for _ in range(6):
        torch.cuda.synchronize(world.where())
        begun = time.perf_counter()
        here.copy_(there)
        there.copy_(here)
        torch.cuda.synchronize(world.where())
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


def held(world: World) -> str:
    """Writes a model that holds memory of the device, with PyTorch if available, otherwise of builtin. Returns its name."""
    if world.lacks_cuda():
        one = {"INPUT0": ("FP32", [-1])}
        config = 'backend: "builtin"\nmax_batch_size: 0\n' + ends(one, {"OUTPUT0": ("FP32", [-1])})
        world.model("builtin", config + parameters(function="identity"))
        return "builtin"
    world.python_model("mortal", "mortal", ends({"X": ("INT32", [1])}, {"Y": ("INT32", [1])}))
    return "mortal"


def metrics(world: World):
    """Checks the metrics of the device, of pinned memory and of models' memory, and the times of copies in the statistics."""
    name = held(world)
    one = {"INPUT0": ("FP32", [-1])}
    config = 'backend: "builtin"\nmax_batch_size: 0\n' + ends(one, {"OUTPUT0": ("FP32", [-1])})
    world.model("large", config + parameters(function="identity"))
    with world.server("--metrics-interval-ms=500") as server:
        client = Client(server.http)
        for _ in range(10):
            client.infer("large", {"INPUT0": ("FP32", np.ones(LARGE // 4, np.float32))})
        times_of(world, server, "large")
        size, used = (total(server.scrape(), f"nv_pinned_memory_pool_{of}_bytes") / MIB for of in ("total", "used"))
        if world.cpu:
            return world.rows.check("nothing is pinned without a device", size == used == 0, f"{size} and {used} MiB")
        world.rows.check("nv_pinned_memory_pool_total_bytes", size > 0, f"{size:.0f} MiB", "> 0")
        world.rows.check("nv_pinned_memory_pool_used_bytes", 0 < used <= size, f"{used:.0f} MiB", f"0 < x <= {size:.0f}")
        of_models(world, server, name)
        idle = compared(world, server, 3)
        world.rows.check("utilization when idle", max(idle["nv_gpu_utilization"]) <= 5, str(idle["nv_gpu_utilization"]), "<= 5 %")
        if world.lacks_cuda():
            return world.rows.skip("the device under load", world.lacks_cuda())
        under_load(world, server)
    return None


def times_of(world: World, server, name: str):
    """Checks the parts of a request's time in the statistics; on processors nothing has to be copied."""
    told = server.statistics(name)["inference_stats"]
    for part in ("compute_input", "compute_infer", "compute_output"):
        mean = told[part]["ns"] / max(told[part]["count"], 1) / 1e6
        least = part == "compute_infer" or not world.cpu
        world.rows.check(f"{part} of 16 MiB", mean > 0 or not least, f"{mean:.3f} ms", "> 0" if least else "")


def series(server, world: World, name: str) -> float:
    """Returns the value of a gauge of the device."""
    return total(server.scrape(), name, gpu_uuid=world.smi("uuid")[0])


def compared(world: World, server, seconds: float) -> dict:
    """Returns the medians of both sides over some seconds in nvidia-smi's units."""
    uuid, found, end = world.smi("uuid")[0], {name: [] for name in PAIRS}, time.monotonic() + seconds
    while time.monotonic() < end:
        theirs, scrape = world.smi(*(field for field, _, _ in PAIRS.values())), server.scrape()
        for (name, (_, unit, _)), their in zip(PAIRS.items(), theirs):
            ours = [value for (n, labels), value in scrape.items() if n == name and ("gpu_uuid", uuid) in labels]
            found[name].append((ours[0] / unit if ours else None, their))
        time.sleep(0.3)
    return {name: medians(readings) for name, readings in found.items()}


def medians(readings: list) -> tuple:
    """Returns the medians of both sides; 0 for a side without values."""
    sides = ([value for value in side if isinstance(value, float)] for side in zip(*readings))
    return tuple(round(statistics.median(side), 2) if side else 0.0 for side in sides)


def under_load(world: World, server):
    """Compares the readings while another process keeps the device busy."""
    with PlainLoop(world, 1024, 4096) as plain:
        plain.ask(do="run", seconds=1)
        plain.send(do="run", seconds=LOADED_S + 3)
        time.sleep(2)
        begun, energy = time.monotonic(), series(server, world, "nv_energy_consumption")
        found = compared(world, server, LOADED_S)
        joules = series(server, world, "nv_energy_consumption") - energy
        spent = time.monotonic() - begun
    for name, (ours, theirs) in found.items():
        tolerance = PAIRS[name][2] or max(theirs / 10, 15)
        world.rows.near(name, ours, theirs, tolerance, PAIRS[name][0])
    watts = found["nv_gpu_power_usage"][1]
    if watts:
        world.rows.near("nv_energy_consumption", joules / spent, watts, watts * 0.15, "W, of joules")
    else:
        world.rows.skip("nv_energy_consumption", "nvidia-smi reports no power")


def of_models(world: World, server, name: str):
    """Compares the memory of the model's process on the device as reported by the server and by nvidia-smi."""
    by_process = world.of_processes()
    known = set(by_process) & server.workers()
    family = "pharos_worker_gpu_memory_bytes"
    if not known:
        return world.rows.skip(family, "nvidia-smi does not report the memory of these processes")
    wanted = sum(by_process[pid] for pid in known)

    def shown():
        return total(server.scrape(), family) / MIB

    eventually("the memory is measured", lambda: shown() > 0)
    world.rows.near(family, shown(), wanted, 64, "MiB")
    of_one = total(server.scrape(), family, model=name) / MIB
    least = 2048 if name == "mortal" else 1
    world.rows.check(f"{family} of {name}", of_one >= least, f"{of_one:.0f} MiB", f">= {least}")
    busy(world, server, name)
    usage = server.statistics(name).get("memory_usage", [])
    return world.rows.check("memory_usage in statistics", any(e["type"] == "GPU" for e in usage), str(usage), "type GPU")


def busy(world: World, server, name: str):
    """Checks the share of time in which kernels of an instance run, while it is busy and afterwards."""
    family = "pharos_worker_gpu_utilization"
    if name != "mortal":
        return world.rows.skip(family, "builtin's kernels are too short")
    client, read, end = Client(server.http), [], time.monotonic() + BUSY_S
    while time.monotonic() < end:
        client.infer(name, {"X": ("INT32", np.array([-PASSES], np.int32))})
        read.append(total(server.scrape(), family, model=name))
    median = statistics.median(read)
    told = f"median {median:.2f} of {len(read)} readings, {min(read):.2f} to {max(read):.2f}"
    world.rows.check(f"{family} at work", median > 0.05, told, "> 0.05")
    eventually("the instance is idle", lambda: total(server.scrape(), family, model=name) < 0.05)
    shown = [value for (found, labels), value in server.scrape().items() if found == family and ("model", name) in labels]
    return world.rows.check(f"{family} when idle", bool(shown) and max(shown) < 0.05, str(shown), "< 0.05, and shown")


def resident_mib(pid: int) -> tuple:
    """Returns the MiB of a process and what they count: shared memory proportionally (Pss) or, if the kernel does not report
    that, completely (VmRSS)."""
    for file, name in (("smaps_rollup", "Pss"), ("status", "VmRSS")):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return int(line.split()[1]) / 1024, name
    return 0.0, "unknown"


def packages(world: World):
    """Reports the packages of this Python and the times of their first import, which may read from a slow disk and would
    otherwise count in later steps."""
    for name in PACKAGES:
        reason = world.lacks(name)
        if reason:
            world.rows.skip(name, reason)
            continue
        done = subprocess.run([sys.executable, "-c", IMPORT, name, world.where()], capture_output=True, text=True)
        trouble = done.stderr.strip().rpartition("\n")[2]
        world.rows.check(name, done.returncode == 0, done.stdout, reason=trouble)


def idle(world: World):
    """Measures the memory of the server, of an idle builtin instance, and of the device."""
    before = 0.0 if world.cpu else world.settled_mib()
    one = {"INPUT0": ("FP32", [-1])}
    config = 'backend: "builtin"\nmax_batch_size: 0\n' + ends(one, {"OUTPUT0": ("FP32", [-1])})
    world.model("identity", config + parameters(function="identity"))
    with world.server() as server:
        Client(server.http).infer("identity", {"INPUT0": ("FP32", np.ones(4, np.float32))})
        (worker,) = server.workers()
        (frontend, counted), (instance, _) = resident_mib(server.process.pid), resident_mib(worker)
        world.rows.check("the frontend, host", 0 < frontend < 100, f"{frontend:.1f} MiB {counted}", "< 100")
        world.rows.check("an idle instance, host", instance > 0, f"{instance:.1f} MiB {counted}")
        if world.cpu:
            return world.rows.skip("an idle instance, device", "runs without a device")
        world.rows.check("an idle instance, device", True, f"{world.settled_mib() - before:.0f} MiB")
        return world.rows.check("the frontend, device", server.process.pid not in world.of_processes(), "nothing")
