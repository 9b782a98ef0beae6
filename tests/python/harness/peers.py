"""Starts a real Triton and a real perf_analyzer, where they are installed.

`PHAROS_PEERS` names the folder with the scripts `triton` and `perf_analyzer` that start them (default: `shared/peers`
in this repository or in the folder above it). The first call of a script installs the peer, which takes minutes and needs
the network. The tests therefore use a peer only if it is installed already or if `PHAROS_PEERS` is set.
"""

import os
import signal
import subprocess
import urllib.request
from pathlib import Path

from harness.ports import free_ports
from harness.server import ROOT
from harness.waiting import every

START_S = 180


def script(name: str) -> Path | None:
    """Returns the script that starts the peer `name`, or None if there is no script."""
    named = os.environ.get("PHAROS_PEERS")
    # PHAROS_PEERS replaces the default folders: `PHAROS_PEERS=none` skips the tests with peers even if the defaults exist.
    folders = [Path(named)] if named else [ROOT / "shared/peers", ROOT.parent / "shared/peers"]
    found = [folder / name for folder in folders]
    return next((path for path in found if os.access(path, os.X_OK)), None)


def missing(name: str, folder: str) -> str:
    """Returns why the peer `name` cannot be used; empty if it can. `folder` is its installation folder in the peers' home."""
    if script(name) is None:
        return f"the peer script `{name}` is not in PHAROS_PEERS, or else in ../shared/peers"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(os.environ.get("PEERS_HOME") or Path(cache) / "pharos-peers")
    if "PHAROS_PEERS" in os.environ or (home / folder / "ready").exists():
        return ""
    return f"the peer `{name}` is not installed in {home}; run its script once, or set PHAROS_PEERS"


def wait_or_kill(process: subprocess.Popen, limit_s: float):
    """Waits until a process has ended, and kills it after `limit_s` seconds."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Triton:
    """A real Triton that serves a repository. It is started at the first use and again after a crash. `environment` holds
    additional environment variables, `options` additional options of its command line."""

    def __init__(self, repository: Path, log: Path, environment=None, options=()):
        self.repository, self.log, self.environment = repository, log, environment or {}
        self.options = list(options)
        self.http = self.grpc = self.metrics = ""
        self.process = None

    def launch(self):
        """Starts Triton and does not wait until it is ready."""
        http, grpc, metrics = free_ports(3)
        ports = {"HTTP_PORT": http, "GRPC_PORT": grpc, "METRICS_PORT": metrics}
        environment = os.environ | {key: str(port) for key, port in ports.items()} | self.environment
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in (http, grpc, metrics))
        with open(self.log, "ab") as log:
            command = [str(script("triton")), str(self.repository), *self.options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def ensure(self):
        """Starts Triton unless it runs; raises an error if it does not become ready."""
        if self.process and self.process.poll() is None:
            return
        self.launch()
        for _ in every(0.2, START_S):
            if self.is_ready():
                return
            if self.process.poll() is not None:
                break
        raise RuntimeError(f"the Triton peer did not become ready within {START_S} s, see {self.log}")

    def wait_for_end(self):
        """Waits until a process that no longer answers has ended, which may take seconds after a crash; kills it after 20 s."""
        wait_or_kill(self.process, 20)

    def is_ready(self) -> bool:
        """Returns whether Triton reports that it is ready."""
        try:
            return urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=2).status == 200
        except OSError:
            return False

    def stop(self):
        """Terminates the process that this object started."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            wait_or_kill(self.process, 40)
