"""Stops the worker processes of a server, and reads the memory and names of its processes."""

import contextlib
import os
import re
import signal
from pathlib import Path


@contextlib.contextmanager
def held(server, *models: str):
    """Stops the workers of these models, or all workers, until the block ends; requests stay dispatched or queued meanwhile."""
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
            with contextlib.suppress(ProcessLookupError):  # the test has killed it
                os.kill(pid, signal.SIGCONT)


def memory(server) -> int:
    """Returns the proportional set size of the server and its workers in bytes; shared memory counts once."""
    total_kb = 0
    for pid in {server.process.pid, *server.workers()}:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            total_kb += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return total_kb * 1024


def resident_kb(server) -> int:
    """Returns the resident memory of the frontend in KiB."""
    text = open(f"/proc/{server.process.pid}/status").read()
    return int(text.split("VmRSS:")[1].split()[0])


def instance(pid: int) -> str:
    """Returns the instance name of a worker process: `MODEL_NUMBER`, or `MODEL_GROUP_NUMBER` if the model has several groups."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2].decode()


def worker_model(pid: int) -> str:
    """Returns the model of a worker process, from its instance's name."""
    return instance(pid).rsplit("_", 1)[0]
