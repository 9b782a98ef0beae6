"""Compiles backends in C for tests, places them in a folder for `--backend-directory`, and writes models for them."""

import shutil
import subprocess
from pathlib import Path

from harness.server import ROOT, Server

HEADERS = ROOT / "worker/include"
EXAMPLE = ROOT / "examples/backend_c"
TESTING = ROOT / "tests/python/backends/native/testing.c"
MISSING = "" if shutil.which("cc") else "no C compiler is installed: install gcc or clang"
"""The reason to skip tests that compile; empty if a compiler is installed."""


def compile(source: Path, library: Path, *options: str) -> Path:
    """Compiles a backend; warnings are errors."""
    library.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC", "-pthread"]
    command = ["cc", *flags, f"-I{HEADERS}", *options, "-o", library, source, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def place(folder: Path, backend: str) -> Path:
    """Returns the path of a backend's library in the backend directory `folder`."""
    return folder / backend / f"libpharos_{backend}.so"


def write(repository: Path, name: str, config: str) -> Path:
    """Writes a model of a repository; returns its version's directory."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    version.with_name("config.pbtxt").write_text(config)
    return version


def parameter(name: str, text: str) -> str:
    """Returns a parameter of a configuration."""
    return f'parameters {{ key: "{name}" value {{ string_value: "{text}" }} }}\n'


def config_of(more="", batch=8, backend="testing") -> str:
    """Returns the configuration of a model of the backend of `testing.c`."""
    return (
        f'backend: "{backend}" max_batch_size: {batch}\n'
        'input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        'output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
        f"{more}"
    )


def server(folder: Path, repository: Path, backends: Path, *options: str) -> Server:
    """Returns a server with a backend directory, which serves the models that can be loaded."""
    settings = [f"--backend-directory={backends}", "--exit-on-error=false", "--strict-readiness=false"]
    return Server(folder, [repository], [*settings, *options])
