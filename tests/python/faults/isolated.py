"""Servers in separate namespaces, whose file systems and networks a test can break without effect on the machine."""

import ctypes
import http.client
import os
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

from harness.server import Server
from harness.waiting import DEADLINE_S

CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def missing(kind: str, *programs: str) -> str:
    """Returns why no server can be started in a namespace of a kind (`mount` or `net`); empty if it can."""
    absent = [name for name in ("unshare", "nsenter", *programs) if not shutil.which(name)]
    if absent:
        return f"not installed: {', '.join(absent)}"
    done = subprocess.run(["unshare", f"--{kind}", "true"], capture_output=True, text=True)
    return f"no namespace can be made: {done.stderr.strip()}" if done.returncode else ""


class Isolated(Server):
    """A server in a separate namespace. `prepare` is a shell command that runs there before the server."""

    def __init__(self, kind: str, prepare: str, *arguments):
        super().__init__(*arguments)
        self.kind = kind
        self.command = ["unshare", f"--{kind}", "sh", "-e", "-c", f'{prepare}\nexec "$@"', "sh", *self.command]

    def inside(self, command: str):
        """Runs a shell command in the namespace."""
        enter = ["nsenter", f"--target={self.process.pid}", f"--{self.kind}", "sh", "-e", "-c", command]
        done = subprocess.run(enter, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr


class Network(Isolated):
    """A server with a separate loopback interface. Connections to it are made by a thread that is in its namespace."""

    def __init__(self, *arguments):
        super().__init__("net", "ip link set lo up", *arguments)
        self.thread = None

    def opened(self, port: int, client: str = "127.0.0.1") -> socket.socket:
        """Opens a connection in the namespace, from the address of a client."""
        if self.thread is None:
            if os.readlink(f"/proc/{self.process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                raise ConnectionRefusedError("the process has not left the namespace of the tests yet")
            self.thread = ThreadPoolExecutor(1, initializer=self.enter)
        return self.thread.submit(socket.create_connection, ("127.0.0.1", port), DEADLINE_S, (client, 0)).result()

    def enter(self):
        """Moves this thread into the namespace."""
        descriptor = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY)
        try:
            if LIBC.setns(descriptor, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)

    def connect(self, address: str = "") -> http.client.HTTPConnection:
        """Returns a connection that stays open."""
        connection = super().connect(address)
        connection._create_connection = lambda place, *_: self.opened(place[1])
        return connection

    def __exit__(self, *failure):
        super().__exit__(*failure)
        if self.thread is not None:
            self.thread.shutdown()
