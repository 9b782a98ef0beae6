"""Packs the wheel `pharos-server` from the tested executables."""

import importlib.util
from pathlib import Path

import pytest

from deploy.containers import DEPLOY
from harness import text_models
from harness.server import binary
from harness.tract import PROGRAM

NATIVE = binary().parent / "lib_native.so"
"""The native module of the Python worker; `make python-worker` builds it beside the executables."""


def packer():
    """Returns the module `deploy/wheel/pack.py`."""
    spec = importlib.util.spec_from_file_location("pack", DEPLOY / "wheel/pack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed(folder: Path) -> Path:
    """Returns the wheel of the tested executables, in this folder. A test is skipped if one of them is not built."""
    for program in (PROGRAM, text_models.PROGRAM):
        if not program.is_file():
            pytest.skip(f"{program} is not built, which the wheel has: `make text tract` builds it")
    return packer().pack(binary().parent, folder)


def elf(machine: int, *symbols: bytes) -> bytes:
    """Returns what the packer reads of an ELF file."""
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + b"".join(b"\0" + symbol for symbol in symbols) + b"\0"
