"""Memory and names of the processes of a server."""

from pathlib import Path


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


def worker_model(pid: int) -> str:
    """The model of a worker process, from its instance's name."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1].decode().rsplit("_", 1)[0]
