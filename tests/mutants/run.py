#!/usr/bin/env python3
"""Puts one deliberate fault after the other into the source (`*.patch`), and checks that the simulation finds each.

    make mutants
    make mutants MUTANTS="arena-leak step-never-ends"

Prints for each fault the time of the test without the build, and what the simulation reported. Fails if a fault is not found. Do not
edit the patched files meanwhile: each patch is reverted at its end.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROFILE = os.environ.get("PROFILE", "--release").split()
TESTS = ["simulation::nothing_is_lost", "simulation::loading::every_load"]
TEST = [os.environ.get("CARGO", "cargo"), "test", *PROFILE, "--locked", "-p", "pharos-engine", "--lib", "--", *TESTS]
LIMIT_S = 600


def git_apply(patch: Path, *options: str):
    """Applies a patch to the working tree."""
    subprocess.run(["git", "apply", "--unidiff-zero", *options, str(patch)], cwd=ROOT, check=True)


def find(patch: Path) -> str:
    """Returns what the simulation says of a fault, and after which time; an empty text if it finds nothing."""
    git_apply(patch)
    try:
        subprocess.run([*TEST[: TEST.index("--")], "--no-run"], cwd=ROOT, check=True, capture_output=True)
        began = time.monotonic()
        try:
            done = subprocess.run(TEST, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"no end within {LIMIT_S} s"
        seconds = time.monotonic() - began
    finally:
        git_apply(patch, "--reverse")
    reported = re.search(r"^seed \d+, after .*", done.stdout + done.stderr, re.MULTILINE)
    return f"{seconds:.1f} s: {reported[0][:160]}" if done.returncode and reported else ""


def main(names: list) -> int:
    """Runs the named faults, or all of them."""
    patches = [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))
    unknown = [patch.stem for patch in patches if not patch.exists()]
    if unknown:
        every = ", ".join(sorted(patch.stem for patch in HERE.glob("*.patch")))
        print(f"unknown faults: {', '.join(unknown)}; there are {every}", file=sys.stderr)
        return 2
    missed = []
    for patch in patches:
        found = find(patch)
        print(f"{patch.stem}: {found or 'NOT FOUND'}", flush=True)
        missed += [] if found else [patch.stem]
    print(f"{len(patches) - len(missed)} of {len(patches)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
