"""Steps of `check.py`: missing devices, kernels that fault, killed processes."""

import os
import signal

import numpy as np

from correctness import ends
from harness.server import alive
from world import Client, World, answered, eventually, is_ready, parameters, reason_of

ABSENT = 97
"""A device number that no machine has."""
NUMBER = ends({"X": ("INT32", [1])}, {"Y": ("INT32", [1])})


def plain(world: World, name: str, group=None):
    """Writes a model of builtin."""
    sides = ends({"INPUT0": ("FP32", [-1])}, {"OUTPUT0": ("FP32", [-1])})
    config = 'backend: "builtin"\nmax_batch_size: 0\n' + sides + parameters(function="identity")
    world.model(name, config, group=group)


def ask_plain(client: Client, name: str) -> bool:
    """Whether the model answers correctly."""
    given = np.arange(5, dtype=np.float32)
    return bool((client.infer(name, {"INPUT0": ("FP32", given)})["OUTPUT0"] == given).all())


def ask_number(server, number: int) -> int:
    """Returns the answer of `mortal` to a number: the next number. Each request uses a new connection."""
    found = Client(server.http).infer("mortal", {"X": ("INT32", np.array([number], np.int32))})
    return int(found["Y"][0])


def missing_device(world: World):
    """An instance group on a missing device is refused, and another model is served; a model beyond a memory limit is also
    refused."""
    plain(world, "absent", world.group(device=ABSENT))
    plain(world, "present")
    with world.any_server() as server:
        known = lambda: is_ready(server, "models/present/ready") or reason_of(server, "present")  # noqa: E731
        eventually("the other model is served or refused", known)
        reason = eventually("the model is refused", lambda: reason_of(server, "absent"))
        wanted = "no GPUs are available" if world.cpu else f"gpu id {ABSENT}"
        world.rows.check("a missing device", wanted in reason, reason, wanted)
        world.rows.check("other models are served", ask_plain(Client(server.http), "present"))
    if world.cpu:
        return world.rows.skip("--model-load-gpu-limit", "needs a device")
    holder = world.lacks_cuda() or hold(world)
    if not world.used_mib():
        return world.rows.skip("--model-load-gpu-limit", "no memory of the device is in use")
    with world.any_server(f"--model-load-gpu-limit={world.device}:0.0") as server:
        reason = eventually("the model is refused", lambda: reason_of(server, "present"))
        wanted = f"memory limit set for GPU {world.device}"
        world.rows.check("--model-load-gpu-limit", wanted in reason, reason, wanted)
    del holder
    return None


def hold(world: World):
    """Allocates memory on the device."""
    import torch

    return torch.zeros(1 << 28, dtype=torch.uint8, device=world.where())


def mortal(world: World) -> str:
    """Writes a model that holds 2 GiB and fails in a kernel on input 1. Returns why it is unavailable, if it is."""
    reason = world.lacks_cuda()
    if not reason:
        world.python_model("mortal", "mortal", NUMBER)
    return reason


def fault(world: World):
    """A kernel that faults affects only its instance, which restarts; another model is unaffected."""
    reason = mortal(world)
    if reason:
        return world.rows.skip("a kernel that faults", reason)
    plain(world, "witness")
    with world.server() as server:
        witness, before = Client(server.http), server.workers()
        world.rows.check("the model answers", ask_number(server, 5) == 6)
        try:
            world.rows.check("the request fails", False, str(ask_number(server, 1)))
        except RuntimeError as error:
            world.rows.check("the request fails", True, str(error)[:160])
        world.rows.check("another model answers", ask_plain(witness, "witness"))
        answered(lambda: ask_number(server, 6) == 7)
        world.rows.check("the model answers again", True)
        world.rows.check("one process was replaced", len(server.workers() - before) == 1, f"{server.workers() - before}")
        world.rows.check("another model still answers", ask_plain(witness, "witness"))
    return None


def killed(world: World):
    """SIGKILL of a worker frees its memory on the device, and a new process replaces it. SIGKILL of the server ends its workers."""
    before = 0.0 if world.cpu else world.settled_mib()
    reason = mortal(world)
    if reason:
        return world.rows.skip("SIGKILL of a worker", reason)
    with world.server() as server:
        loaded = 0.0 if world.cpu else world.settled_mib()
        # The next process waits before it allocates memory, so that the freed memory can be observed.
        (world.models / "mortal" / "1" / "slow").write_text("")
        (worker,) = server.workers()
        os.kill(worker, signal.SIGKILL)
        freed(world, "its memory is free", before, loaded)
        answered(lambda: ask_number(server, 6) == 7)
        left = server.workers()
        world.rows.check("a new process answers", worker not in left)
        server.process.kill()
        server.process.wait()
        eventually("the workers of a killed server end", lambda: not any(alive(pid) for pid in left))
        freed(world, "the memory of a killed server is free", before, loaded)
    return None


def freed(world: World, name: str, before: float, loaded: float):
    """Adds a row when more than half of the memory that was used after loading is free again."""
    if world.cpu:
        return world.rows.skip(name, "runs without a device")
    half = (before + loaded) / 2
    found = eventually(name, lambda: (world.used_mib(),) if world.used_mib() < half else None)
    told = f"{before:.0f}, {loaded:.0f}, {found[0]:.0f} MiB before, loaded, killed"
    return world.rows.check(name, loaded - before >= 2048, told)
