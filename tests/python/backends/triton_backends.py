"""Compiles backends in C with Triton's interface, places them in a folder for `--backend-directory`, and writes models for them."""

import json
import shutil
import subprocess
from pathlib import Path

from backends.native_backends import write
from harness.server import ROOT, Server
from harness.waiting import eventually

SOURCES = ROOT / "tests/python/backends/triton"
MISSING = "" if shutil.which("cc") else "no C compiler is installed: install gcc or clang"
"""The reason to skip tests that compile; empty if a compiler is installed."""

IO = """
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_STRING dims: [ -1 ] optional: true } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
"""The tensors of the backends that return their inputs."""


def compile(source: str, folder: Path, name="", *options: str) -> Path:
    """Compiles a source of `triton` as the backend `name` (default: as the source) into its folder of the backend directory `folder`."""
    backend = name or Path(source).stem
    library = folder / backend / f"libtriton_{backend}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden"]
    done = subprocess.run(["cc", *flags, *options, f"-I{SOURCES}", "-o", library, SOURCES / source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def model(repository: Path, name: str, backend: str, more="", batch=8, io=IO) -> Path:
    """Writes a model; returns its version's directory."""
    return write(repository, name, f'backend: "{backend}" max_batch_size: {batch}\n{io}\n{more}')


def states(running: Server) -> dict:
    """Returns the state of each model and its reason, when all loads have ended: `(state, reason)` by name."""

    def ended():
        found = {name: (entries[0].get("state", ""), entries[0].get("reason", "")) for name, entries in running.index().items()}
        return found if all(state == "READY" or (state == "UNAVAILABLE" and reason) for state, reason in found.values()) else None

    return eventually("all loads have ended", ended)


def config(running: Server, name: str) -> dict:
    """Returns the configuration of a model."""
    status, text = running.get(f"/v2/models/{name}/config")
    assert status == 200, text
    return json.loads(text)


def server(folder: Path, backends: Path, *options: str) -> Server:
    """Returns a server of the models in `folder / "models"`, which serves the ones that can be loaded."""
    settings = [f"--backend-directory={backends}", "--exit-on-error=false", "--strict-readiness=false"]
    return Server(folder, [folder / "models"], [*settings, *options])
