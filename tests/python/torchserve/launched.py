"""Starts this server as TorchServe is started, and says why tests cannot run here."""

import os
import sys
from pathlib import Path

from harness.server import binary
from torchserve.peer import Launched, missing, torch_folder
from torchserve.repository import archiver

WHY_NOT = missing()
NO_ARCHIVER = archiver()[1]


def interpreter() -> str:
    """The Python that has the package `pharos-worker`: `PHAROS_PYTHON`, else that of the tests."""
    return os.environ.get("PHAROS_PYTHON") or sys.executable


def pharos(folder: Path, store: Path, properties: str, options: tuple, torch: bool = False):
    """This server, started as TorchServe is."""
    own = {"PHAROS_PYTHON": interpreter()} | ({"PYTHONPATH": torch_folder()} if torch else {})
    return Launched(folder, store, properties, options, [str(binary()), "torchserve"], own)
