"""A fake of NVIDIA's management library (NVML), built from `tests/fake_nvml/nvml.c`. The head of that file describes the
values that its devices can report."""

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
"""The values that the first device reports while it is busy."""


class Gpus:
    """The fake NVML library, and the values that its devices report."""

    def __init__(self, folder: Path):
        self.library = folder / "libfake.so"
        source = ROOT / "tests/fake_nvml/nvml.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self.library, source], check=True)

    def tell(self, text: str):
        """Replaces the values that the devices report, in one atomic step."""
        fresh = self.library.with_name("fresh")
        fresh.write_text(text)
        fresh.rename(f"{self.library}.devices")

    def option(self) -> str:
        """Returns the option that names the library."""
        return f"--nvml-library={self.library}"
