"""The launcher `torchserve`, this server's and the real one."""

import os
import subprocess

from harness.ports import free_ports
from harness.server import binary
from harness.waiting import eventually
from torchserve.launched import interpreter
from torchserve.peer import HOME, LISTENERS, PEER_PYTHON, PROPERTIES, STARTED
from torchserve.peers import Peer
from torchserve.repository import make, of
from torchserve.row_types import Rest


class Launcher:
    """`torchserve` in a separate folder, with a model store and a configuration."""

    def __init__(self, folder, command: list, environment: dict):
        self.folder, self.command = folder, command
        self.ports = dict(zip(LISTENERS, free_ports(len(LISTENERS))))
        self.store = folder / "store"
        self.store.mkdir(parents=True)
        (folder / "tmp").mkdir()
        make(next(archive for archive in of("start") if archive.name == "echo"), self.store)
        self.config = folder / "own.properties"
        self.config.write_text(PROPERTIES.format(**self.ports))
        temporary = str(folder / "tmp")
        self.environment = os.environ | {"TMPDIR": temporary, "TEMP": temporary} | environment

    def run(self, *words, **environment) -> subprocess.CompletedProcess:
        """Runs the launcher until it exits. The background server writes its output to a file."""
        with open(self.folder / "console.log", "a+b") as log:
            at = log.tell()
            done = subprocess.run(
                [*self.command, *words],
                stdout=log,
                stderr=log,
                env=self.environment | environment,
                cwd=self.folder,
                timeout=90,
            )
        text = (self.folder / "console.log").read_bytes()[at:].decode(errors="replace")
        return subprocess.CompletedProcess(words, done.returncode, text)

    def address(self, listener: str) -> str:
        """Returns the host and port of a listener."""
        return f"127.0.0.1:{self.ports[listener]}"

    def pid(self) -> int:
        """Returns the process id in the PID file."""
        return int((self.folder / "tmp/.model_server.pid").read_text())

    def started(self, *words, **environment) -> subprocess.CompletedProcess:
        """Starts the server in the background and waits until it logs that it has started."""
        (self.folder / "console.log").unlink(missing_ok=True)
        done = self.run("--start", *words, **environment)
        eventually("the server logs that it has started", lambda: STARTED in (self.folder / "console.log").read_text())
        return done


COMMANDS = {
    "pharos": lambda: ([str(binary()), "torchserve"], {"PHAROS_PYTHON": interpreter()}),
    "torchserve": lambda: (
        [str(PEER_PYTHON.parent / "torchserve")],
        {"PYTHONPATH": str(HOME / "stub"), "PATH": f"{PEER_PYTHON.parent}:{os.environ['PATH']}"},
    ),
}


def answers(launcher: Launcher, path: str, token: str = "") -> int:
    """Returns the status of a GET."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return Peer(launcher).rest(Rest(path, headers=headers))["status"]
