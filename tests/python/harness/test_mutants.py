"""The deliberate faults of `tests/mutants` fit the source: `make mutants` takes too long for each change."""

import shutil
import subprocess

import pytest

from harness.server import ROOT

PATCHES = sorted((ROOT / "tests/mutants").glob("*.patch"))


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_fault_can_be_put_into_the_source(patch):
    command = ["git", "apply", "--unidiff-zero", "--check", str(patch)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
