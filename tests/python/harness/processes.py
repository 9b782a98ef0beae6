"""Memory and names of the processes of a server."""

import contextlib
import os
import re
import signal
from pathlib import Path


@contextlib.contextmanager
def held(server, *models: str):
    """Stops the workers of these models, or of all: what is sent to them stays where it is, dispatched or queued, until the block ends."""
    names = {pid: instance(pid) for pid in server.workers()}
    chosen = lambda name: not models or any(re.fullmatch(rf"{re.escape(m)}_\d+(_\d+)?", name) for m in models)  # noqa: E731
    workers = [pid for pid, name in names.items() if chosen(name)]
    assert len(workers) >= len(models), f"not all of {models} have a worker in {sorted(names.values())}"
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def memory(server) -> int:
    """Resident bytes of the server and its workers, shared memory counted where it is mapped."""
    total_kb = 0
    for pid in {server.process.pid, *server.workers()}:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            total_kb += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return total_kb * 1024


def resident_kb(server) -> int:
    """The frontend's memory."""
    text = open(f"/proc/{server.process.pid}/status").read()
    return int(text.split("VmRSS:")[1].split()[0])


def instance(pid: int) -> str:
    """The instance of a worker process: `MODEL_NUMBER`, or `MODEL_GROUP_NUMBER` of a model with several instance groups."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1].decode()


def worker_model(pid: int) -> str:
    """The model of a worker process, from its instance's name."""
    return instance(pid).rsplit("_", 1)[0]
