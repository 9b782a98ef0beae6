"""A made-up library in place of NVIDIA's management library (NVML), built of `tests/fake_nvml/nvml.c`, whose head says what
its devices can tell."""

import subprocess
from pathlib import Path

from harness.server import ROOT

AT_WORK = """0 uuid GPU-0
0 utilization 37 12
0 memory 85899345920 8589934592
0 power 250500
0 power_limit 400000
0 energy 5000
0 temperature 55
"""
"""What a device tells that is at work: the first one."""


class Gpus:
    """The library in NVML's place, and what its devices tell."""

    def __init__(self, folder: Path):
        self.library = folder / "libfake.so"
        source = ROOT / "tests/fake_nvml/nvml.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self.library, source], check=True)

    def tell(self, text: str):
        """Changes what the devices tell, all at once."""
        fresh = self.library.with_name("fresh")
        fresh.write_text(text)
        fresh.rename(f"{self.library}.devices")

    def option(self) -> str:
        """The option that names the library."""
        return f"--nvml-library={self.library}"
