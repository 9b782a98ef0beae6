"""Free ports for servers and clients; two test processes never get the same port.

Each process reserves a range of ports until it ends: it binds a Unix socket with the number of the range as its abstract name.
Such names are unique in a network namespace, as ports are. Several processes of pytest, several checkouts and several users of
one machine therefore use different ports. The ranges are below the system's ephemeral ports.
"""

import os
import socket

FIRST, RANGE, RANGES = 10_240, 512, 40


class Ports:
    """The range of ports of this process, used in turn."""

    def __init__(self):
        for number in reversed(range(RANGES)):
            self.lock = socket.socket(socket.AF_UNIX)
            try:
                self.lock.bind(f"\0pharos-test-ports-{number}")
            except OSError:
                self.lock.close()
                continue
            self.process, self.first, self.next = os.getpid(), FIRST + number * RANGE, 0
            return
        raise RuntimeError(f"all {RANGES} ranges of ports are in use, see /proc/net/unix")

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
