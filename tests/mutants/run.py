#!/usr/bin/env python3
"""Puts one deliberate fault after the other into the source (`*.patch`), and checks that the simulation finds each.

    make mutants
    make mutants MUTANTS="arena-leak step-never-ends"

Runs the simulation without a fault first, which must pass. Prints for each fault the time until the simulation has reported it, without
the build, and the report. Fails if a fault is not found; one whose test does not end is not found, because the machine may only be slow.
Do not edit the patched files meanwhile: each patch is reverted at its end.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROFILE = os.environ.get("PROFILE", "--release").split()
TESTS = ["simulation::nothing_is_lost", "simulation::loading::every_load"]
TEST = [os.environ.get("CARGO", "cargo"), "test", *PROFILE, "--locked", "-p", "pharos-engine", "--lib", "--", "--nocapture", *TESTS]
FAILED_SEED = re.compile(r"^seed \d+, after .*", re.MULTILINE)
LIMIT_S = 600


def git_apply(patch: Path, *options: str):
    """Applies a patch to the working tree."""
    subprocess.run(["git", "apply", "--unidiff-zero", *options, str(patch)], cwd=ROOT, check=True)


def run_test() -> tuple:
    """Builds the test, then runs it until it ends or reports a failed seed. Returns whether it passed (`None` if it did not end in time),
    its output, and its time without the build."""
    subprocess.run([*TEST[: TEST.index("--")], "--no-run"], cwd=ROOT, check=True, capture_output=True)
    began, output, late = time.monotonic(), [], []
    started = subprocess.Popen(
        TEST, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )

    def kill():
        # cargo does not end the test that it runs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)

    limit = threading.Timer(LIMIT_S, lambda: (late.append(True), kill()))
    limit.start()
    try:
        for line in started.stdout:
            output.append(line)
            if FAILED_SEED.match(line):
                return False, "".join(output), time.monotonic() - began
        passed = None if late else started.wait() == 0
        return passed, "".join(output), time.monotonic() - began
    finally:
        limit.cancel()
        kill()
        started.wait()


def find(patch: Path) -> tuple:
    """Returns whether the simulation finds a fault, and what it says."""
    git_apply(patch)
    try:
        passed, output, seconds = run_test()
    finally:
        git_apply(patch, "--reverse")
    reported = FAILED_SEED.search(output)
    if passed is None:
        return False, f"NOT FOUND: no end within {LIMIT_S} s"
    if not reported:
        return False, f"NOT FOUND: the test {'passed' if passed else 'failed without a seed'} after {seconds:.1f} s"
    return True, f"{seconds:.1f} s: {reported[0][:160]}"


def main(names: list) -> int:
    """Runs the named faults, or all of them."""
    patches = [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))
    unknown = [patch.stem for patch in patches if not patch.exists()]
    if unknown:
        every = ", ".join(sorted(patch.stem for patch in HERE.glob("*.patch")))
        print(f"unknown faults: {', '.join(unknown)}; there are {every}", file=sys.stderr)
        return 2
    passed, output, seconds = run_test()
    if not passed:
        print(f"{output[-4000:]}\nthe simulation {'fails' if passed is False else 'does not end'} without a fault", file=sys.stderr)
        return 1
    print(f"without a fault: passed in {seconds:.1f} s", flush=True)
    missed = []
    for patch in patches:
        found, said = find(patch)
        print(f"{patch.stem}: {said}", flush=True)
        missed += [] if found else [patch.stem]
    print(f"{len(patches) - len(missed)} of {len(patches)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
