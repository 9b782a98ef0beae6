"""A real TorchServe 0.12.0, if available: installed from PyPI into `target/torchserve`, with a Java 17 that is already
installed. Handlers without torch use a stub module `torch`, because TorchServe imports it everywhere; the real torch is
used if `PHAROS_TORCH` names a folder of packages that has it, or if the interpreter of the tests has it.

python -m torchserve.peer install     installs it; needs the network and 120 MB
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from harness.peers import ROOT, wait_or_kill
from harness.ports import free_ports
from harness.server import Process, check_process
from harness.waiting import eventually

HOME = Path(os.environ.get("PHAROS_TORCHSERVE_HOME") or ROOT / "target/torchserve")
PEER_PYTHON = HOME / "venv/bin/python"
PACKAGES = (
    "torchserve==0.12.0",
    "torch-model-archiver==0.12.0",
    "psutil",
    "PyYAML",
    "packaging",
    "Pillow",
    "numpy",
    "setuptools",
)
START_S = 120
STARTED = "Model server started."

STUB = '''"""As much of torch as TorchServe's own modules need to be imported. No handler that computes with it runs."""

__version__ = "1.0.0"


class Tensor:
    """No value is an instance."""


class cuda:
    """No device is available."""

    @staticmethod
    def is_available():
        """Never."""
        return False
'''


def missing() -> str:
    """Returns the reason why the real TorchServe is not available here; empty if it is. Tests install it only with
    `PHAROS_TORCHSERVE=install`."""
    if os.environ.get("PHAROS_PEERS") == "none":
        return "PHAROS_PEERS=none"
    if not shutil.which("java"):
        return "TorchServe needs a Java 17, and `java` is not there"
    if (HOME / "ready").exists():
        return ""
    if os.environ.get("PHAROS_TORCHSERVE") == "install":
        return install()
    return f"TorchServe is not installed in {HOME}: `PYTHONPATH=tests/python python -m torchserve.peer install`"


def install() -> str:
    """Installs TorchServe; returns the reason of a failure, or an empty string."""
    pip = [str(PEER_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(HOME / "venv")], [*pip, *PACKAGES]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr[-500:]}"
    (HOME / "stub/torch").mkdir(parents=True, exist_ok=True)
    (HOME / "stub/torch/__init__.py").write_text(STUB)
    (HOME / "ready").touch()
    return ""


def torch_folder() -> str:
    """Returns the folder of packages that has torch: `PHAROS_TORCH`, or that of this interpreter; empty if torch is missing."""
    named = os.environ.get("PHAROS_TORCH", "")
    if named:
        return named if (Path(named) / "torch").is_dir() else ""
    found = importlib.util.find_spec("torch")
    return str(Path(found.origin).parent.parent) if found else ""


PROPERTIES = """inference_address=http://127.0.0.1:{inference}
management_address=http://127.0.0.1:{management}
metrics_address=http://127.0.0.1:{metrics}
grpc_inference_port={grpc_inference}
grpc_management_port={grpc_management}
initial_worker_port={worker}
number_of_gpu=0
default_workers_per_model=1
metric_time_interval=600
"""
"""The first lines of every config.properties here."""

LISTENERS = ("inference", "management", "metrics", "grpc_inference", "grpc_management", "worker")


@dataclass
class Launched:
    """A server started as TorchServe is: with a config.properties, a model store and options, in a separate folder. `command`
    replaces `torchserve`."""

    folder: Path
    store: Path
    properties: str
    options: tuple
    command: list
    environment: dict = field(default_factory=dict)

    def __post_init__(self):
        self.ports = dict(zip(LISTENERS, free_ports(len(LISTENERS))))
        self.log = self.folder / "console.log"
        self.process = None

    def __enter__(self):
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.properties"
        config.write_text(PROPERTIES.format(**self.ports) + self.properties)
        temporary = str(self.folder / "tmp")
        environment = os.environ | {"TMPDIR": temporary, "TEMP": temporary} | self.environment
        words = ["--start", "--foreground", "--ts-config", str(config), "--model-store", str(self.store), *self.options]
        with open(self.log, "wb") as log:
            self.process = Process([*self.command, *words], stdout=log, stderr=log, env=environment, cwd=self.folder)
        self.wait_until_started()
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            check_process(self.process, self.log)
        self.stop()
        if kind is None:
            check_process(self.process, self.log)

    def wait_until_started(self):
        """Waits for the line that the usual harnesses of TorchServe wait for."""
        try:
            eventually("the server has started or ended", lambda: STARTED in self.console() or self.process.poll() is not None, deadline_s=START_S)
            assert STARTED in self.console(), f"the server ended with {self.process.poll()}"
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{self.command[0]} did not start: {error}\n{self.console()[-4000:]}") from None

    def console(self) -> str:
        """Returns the console output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def address(self, listener: str) -> str:
        """Returns the host and port of a listener."""
        return f"127.0.0.1:{self.ports[listener]}"

    def server_pid(self) -> int:
        """Returns the server's process id; TorchServe's launcher is the parent of a Java process."""
        file = self.folder / "tmp/.model_server.pid"
        return int(file.read_text()) if file.exists() else self.process.pid

    def stop(self) -> int:
        """Sends SIGTERM to the server and waits for all of its processes."""
        if self.process.poll() is None:
            os.kill(self.server_pid(), signal.SIGTERM)
            wait_or_kill(self.process, 40)
        return self.process.returncode


def torchserve(folder: Path, store: Path, properties: str, options: tuple, torch: bool = False, **environment):
    """Returns the real TorchServe as a context manager."""
    packages = torch_folder() if torch else str(HOME / "stub")
    own = {"PYTHONPATH": packages, "PATH": f"{PEER_PYTHON.parent}:{os.environ['PATH']}"} | environment
    properties += "vmargs=-Xmx512m\n"
    return Launched(folder, store, properties, options, [str(PEER_PYTHON.parent / "torchserve")], own)


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    sys.exit(install())
