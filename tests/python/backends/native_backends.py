"""Compiles backends in C for tests, lays them out as `--backend-directory` wants them, and writes models for them."""

import shutil
import subprocess
from pathlib import Path

from harness.server import ROOT, Server

HEADERS = ROOT / "worker/include"
EXAMPLE = ROOT / "examples/backend_c"
TESTING = ROOT / "tests/python/backends/native/testing.c"
MISSING = "" if shutil.which("cc") else "there is no C compiler: install gcc or clang"
"""Why nothing can be compiled here; empty if it can."""


def compile(source: Path, library: Path, *options: str) -> Path:
    """Compiles a backend, and takes no warning."""
    library.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC", "-pthread"]
    command = ["cc", *flags, f"-I{HEADERS}", *options, "-o", library, source, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def place(folder: Path, backend: str) -> Path:
    """Where the library of a backend is looked for in the backend directory `folder`."""
    return folder / backend / f"libpharos_{backend}.so"


def write(repository: Path, name: str, config: str) -> Path:
    """A model of a repository; gives its version's directory."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    version.with_name("config.pbtxt").write_text(config)
    return version


def parameter(name: str, text: str) -> str:
    """A parameter of a configuration."""
    return f'parameters {{ key: "{name}" value {{ string_value: "{text}" }} }}\n'


def config_of(more="", batch=8, backend="testing") -> str:
    """The configuration of a model of the backend of `testing.c`."""
    return (
        f'backend: "{backend}" max_batch_size: {batch}\n'
        'input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        'output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
        f"{more}"
    )


def server(folder: Path, repository: Path, backends: Path, *options: str) -> Server:
    """A server with a backend directory, which serves what can be loaded."""
    settings = [f"--backend-directory={backends}", "--exit-on-error=false", "--strict-readiness=false"]
    return Server(folder, [repository], [*settings, *options])
