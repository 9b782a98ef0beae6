"""Free ports for servers and clients, never the same for two processes of tests.

Each process that asks takes a range of ports and locks its file for as long as it lives, so that several processes of pytest, or
several checkouts on one machine, have different ports. The ranges are below those that the system gives to outgoing connections.
"""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

FIRST, RANGE, RANGES = 10_240, 512, 40
LOCKS = Path(tempfile.gettempdir()) / f"pharos-test-ports-{os.getuid()}"


class Ports:
    """The range of this process, used in turn."""

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
        """The next port of the range that can be bound."""
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
    """Ports that are free now, all different; none is given again before the whole range was."""
    global _ports
    if _ports is None or _ports.process != os.getpid():
        _ports = Ports()
    return [_ports.take() for _ in range(count)]
