"""A simulated CUDA driver, and memory of its devices."""

import base64
import subprocess

import numpy as np

from harness.server import ROOT


class Devices:
    """The library of the simulated driver, and memory of its devices: a file for each allocation."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        source = ROOT / "tests/python/gpu/fake_cuda/cuda.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so", source], check=True)
        self.environment = {"LD_LIBRARY_PATH": str(folder), "PHAROS_FAKE_CUDA": str(folder), "PHAROS_WORKER_VARIABLES": "PHAROS_FAKE_CUDA"}

    def allocate(self, name, content: bytes):
        """Allocates memory of a device; returns its handle as text."""
        (self.folder / name).write_bytes(content)
        return base64.b64encode(name.encode().ljust(64, b"\0")).decode()

    def floats(self, name, count, offset=0):
        """Returns `count` floats of an allocation."""
        return np.frombuffer((self.folder / name).read_bytes(), np.float32, count, offset).tolist()

    def calls(self, what, name):
        """Returns how many calls of this kind an allocation had."""
        log = self.folder / "log"
        return log.read_text().splitlines().count(f"{what} {name}") if log.exists() else 0
