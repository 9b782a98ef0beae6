"""Free ports for servers and clients; two test processes never get the same port.

Each process reserves a range of ports with a lock on a file, which it holds until it ends. Several processes of pytest, or
several checkouts on one machine, therefore use different ports. The ranges are below the system's ephemeral ports.
"""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

FIRST, RANGE, RANGES = 10_240, 512, 40
LOCKS = Path(tempfile.gettempdir()) / f"pharos-test-ports-{os.getuid()}"


class Ports:
    """The range of ports of this process, used in turn."""

    def __init__(self):
        LOCKS.mkdir(exist_ok=True)
        for number in range(RANGES):
            self.lock = open(LOCKS / str(number), "w")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.lock.close()
                continue
            self.process, self.first, self.next = os.getpid(), FIRST + number * RANGE, 0
            return
        raise RuntimeError(f"all {RANGES} ranges of ports are in use, see {LOCKS}")

    def take(self) -> int:
        """Returns the next port of the range that can be bound."""
        for _ in range(RANGE):
            port, self.next = self.first + self.next, (self.next + 1) % RANGE
            with socket.socket() as probe:
                try:
                    probe.bind(("", port))
                    return port
                except OSError:
                    pass
        raise RuntimeError(f"no port from {self.first} to {self.first + RANGE - 1} is free")


_ports = None


def free_ports(count: int) -> list:
    """Returns different ports that are free now. A port is returned again only after all others of the range."""
    global _ports
    if _ports is None or _ports.process != os.getpid():
        _ports = Ports()
    return [_ports.take() for _ in range(count)]
