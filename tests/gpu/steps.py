"""Runs one step of `check.py` in this process: `python steps.py STEP FOLDER DEVICE [--cpu]`."""

import importlib
import sys
from pathlib import Path

from check import STEPS
from world import World


def main():
    """Runs the command line."""
    name, folder, device = sys.argv[1:4]
    work = getattr(importlib.import_module(STEPS[name][0]), name)
    work(World(Path(folder), name, int(device), "--cpu" in sys.argv))


if __name__ == "__main__":
    main()
