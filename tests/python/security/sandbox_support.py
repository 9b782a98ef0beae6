"""Whether the kernel can make a whole sandbox, and environments whose parts lead out of them."""

import subprocess
import sys
import tarfile
from pathlib import Path

from harness.server import binary

PROGRAM = f"#!/bin/sh\nexec {sys.executable} \"$@\"\n"
"""An interpreter of a model that is a file of the model: it runs the Python of the tests, which is that of the server."""


def lacking() -> str:
    """Returns what the kernel lacks for a whole sandbox; empty if it lacks nothing."""
    check = [binary().with_name("pharos-worker"), "--check-sandbox"]
    return subprocess.run(check, capture_output=True, text=True, check=True).stdout


def write_interpreter(home: Path, is_environment: bool = False):
    """Writes the interpreter of an environment; it is marked as a virtual environment, or only has its directories."""
    (home / "bin").mkdir(parents=True)
    (home / "bin/python3").write_text(PROGRAM)
    (home / "bin/python3").chmod(0o755)
    if is_environment:
        (home / "pyvenv.cfg").write_text("home = /usr/bin\n")


def write_archive(path: Path, folder: Path):
    """Writes an archive of an environment whose `lib` is the root directory."""
    write_interpreter(folder / "packed")
    (folder / "packed/lib").symlink_to("/")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder / "packed", ".")


def named(config: Path, environment):
    """Adds the parameter that names an environment to a configuration."""
    with config.open("a") as file:
        file.write(f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{environment}" }} }}\n')
