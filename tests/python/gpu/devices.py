"""A made-up CUDA driver, and memory of its devices."""

import base64
import subprocess

import numpy as np

from harness.server import ROOT


class Devices:
    """The made-up driver's library, and memory of its devices: a file for each allocation."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        source = ROOT / "tests/python/gpu/fake_cuda/cuda.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so", source], check=True)
        self.environment = {"LD_LIBRARY_PATH": str(folder), "PHAROS_FAKE_CUDA": str(folder)}

    def allocate(self, name, content: bytes):
        """Memory of a device; gives its handle as text."""
        (self.folder / name).write_bytes(content)
        return base64.b64encode(name.encode().ljust(64, b"\0")).decode()

    def floats(self, name, count, offset=0):
        """What is in it."""
        return np.frombuffer((self.folder / name).read_bytes(), np.float32, count, offset).tolist()

    def calls(self, what, name):
        """How often that was done with it."""
        log = self.folder / "log"
        return log.read_text().splitlines().count(f"{what} {name}") if log.exists() else 0
