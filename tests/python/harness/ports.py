"""Free ports for servers and clients."""

import collections
import socket

GIVEN = collections.deque(maxlen=1000)
"""Ports that `free_ports` gave last: who has one may not have bound it yet."""


def free_ports(count: int) -> list:
    """Ports that are free now, all different, and none that was given lately."""
    sockets, ports = [], []
    while len(ports) < count:
        sockets.append(socket.socket())
        sockets[-1].bind(("127.0.0.1", 0))
        port = sockets[-1].getsockname()[1]
        if port not in GIVEN:
            GIVEN.append(port)
            ports.append(port)
    for s in sockets:
        s.close()
    return ports
