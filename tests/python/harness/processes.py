"""Stops the worker processes of a server, and reads the memory and names of its processes."""

import contextlib
import os
import re
import signal
from pathlib import Path

from harness.server import command_line
from harness.waiting import eventually


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


def sleeps(task: Path) -> int:
    """Returns how often a thread has gone to sleep, or the first thread of a process. `task` is its folder in `/proc`."""
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.M)[1])


def mapped(pid: int, *kinds: str) -> int:
    """Returns the bytes of these kinds of memory of a process, for example `Rss`; see proc_pid_smaps(5)."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {line[0].rstrip(":"): int(line[1]) for line in lines}
    return 1024 * sum(kilobytes[kind] for kind in kinds)


def memory(server) -> int:
    """Returns the proportional set size of the server and its workers in bytes; shared memory counts once."""
    return sum(mapped(pid, "Pss") for pid in {server.process.pid, *server.workers()})


def used_bytes(pid: int) -> int:
    """Returns the bytes that a worker uses, counted as the server counts them (`written_memory`): private pages that it has written,
    swapped pages, and the memory that it shares with the server, half of which is its proportional share. An ended process uses none."""
    # The file of an ended process is missing, unreadable or empty.
    with contextlib.suppress(OSError, KeyError):
        return mapped(pid, "Private_Dirty", "SwapPss") + 2 * mapped(pid, "Pss_Shmem")
    return 0


def resident_kb(server) -> int:
    """Returns the resident memory of the frontend in KiB."""
    text = open(f"/proc/{server.process.pid}/status").read()
    return int(text.split("VmRSS:")[1].split()[0])


def instance(pid: int) -> str:
    """Returns the instance name of a worker process: `MODEL_NUMBER`, or `MODEL_GROUP_NUMBER` if the model has several groups. Returns
    an empty name if the process has ended."""
    return (command_line(pid) or [b""])[-1].decode()


def worker_model(pid: int) -> str:
    """Returns the model of a worker process, from its instance's name."""
    return instance(pid).rsplit("_", 1)[0]


def thread_seconds(pid: int) -> dict:
    """Returns the processor time of the threads of a process in seconds, summed over threads of the same name."""
    seconds = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            name, spent = (task / "comm").read_text().rstrip("\n"), int((task / "schedstat").read_text().split()[0])
            seconds[name] = seconds.get(name, 0) + spent / 1e9
    return seconds


def restart(server, model: str):
    """Kills the only worker and waits until another one serves the model."""
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    eventually("the worker starts again", lambda: set(server.workers()) - {worker})
    eventually("the model is ready", lambda: server.get(f"/v2/models/{model}/ready")[0] == 200)


def writer(pipe: Path) -> int:
    """Waits until a process reads a named pipe; returns a descriptor to write to it."""

    def opened():
        # Without a reader, a pipe that does not block cannot be opened.
        with contextlib.suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)

    return eventually(f"the pipe {pipe.name} is read", opened)
