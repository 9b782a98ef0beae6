"""Starts this server as TorchServe is started, and gives the reason why tests cannot run here."""

import os
import sys
from pathlib import Path

from harness.server import binary
from torchserve.peer import Launched, missing, torch_folder
from torchserve.repository import archiver

WHY_NOT = missing()
NO_ARCHIVER = archiver()[1]


def interpreter() -> str:
    """Returns the Python that has the package `pharos-worker`: `PHAROS_PYTHON`, or that of the tests."""
    return os.environ.get("PHAROS_PYTHON") or sys.executable


def pharos(folder: Path, store: Path, properties: str, options: tuple, torch: bool = False):
    """Starts this server as TorchServe is started."""
    own = {"PHAROS_PYTHON": interpreter()} | ({"PYTHONPATH": torch_folder()} if torch else {})
    return Launched(folder, store, properties, options, [str(binary()), "torchserve"], own)
