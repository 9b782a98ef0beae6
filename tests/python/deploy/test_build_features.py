"""The server and its tests are compiled once: each package has the same features, whether it is built for one or for the other."""

import re
import shutil
import subprocess
from collections import defaultdict

import pytest

from harness.server import ROOT

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed: the features of the builds are not compared")
SERVER = ["pharos", "pharos-base", "pharos-metrics", "pharos-frontend", "pharos-worker"]
"""What `make serve` builds: the default members of the workspace."""
TEST_WORKERS = ["pharos", "pharos-frontend", "pharos-worker", "pharos-worker-scale", "pharos-test-backends"]
"""What `make test-workers` builds."""


def features(*selection, edges="normal,build") -> dict:
    """Returns the sets of features of each package of crates.io that a build of the selection has."""
    command = ["cargo", "tree", "--locked", "--offline", "--edges", edges, "--prefix=none", "--format={p}|{f}", "--no-dedupe", *selection]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = defaultdict(set)
    for line in filter(None, done.stdout.splitlines()):
        package, names = line.split("|", 1)
        if "(/" not in package:
            found[re.sub(r" \(.*", "", package)].add(names.removesuffix(" (*)"))
    return found


@pytest.mark.parametrize("packages", [SERVER, TEST_WORKERS], ids=["serve", "test-workers"])
def test_tests_compile_no_dependency_again(packages):
    """A package with other features would be compiled again, with all that depend on it."""
    tests = features("--workspace", edges="normal,build,dev")
    build = features(*(f"--package={name}" for name in packages))
    assert {name: sets - tests[name] for name, sets in build.items() if not sets <= tests[name]} == {}
