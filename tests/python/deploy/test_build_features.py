"""The server and its tests are compiled once: a build of one finds all packages of crates.io that the other has compiled."""

import json
import os
import shutil
import subprocess

import pytest

from harness.server import ROOT

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed: its builds are not compared")
SERVE = ["build"]
TEST_WORKERS = ["build", "-p", "pharos", "-p", "pharos-frontend", "-p", "pharos-worker", "-p", "pharos-worker-scale", "-p", "pharos-test-backends"]
"""As `make test-workers`."""
TESTS = ["test", "--no-run", "--workspace", "--exclude", "pharos-worker-text", "--exclude", "pharos-worker-tract"]
"""As `.ci/test-rust`."""
WITH_BACKENDS = [*TEST_WORKERS, "-p", "pharos-worker-text", "-p", "pharos-worker-tract"], TESTS[:-4]
"""Both where `make text tract` has built these backends."""


def units(command: list) -> set:
    """Returns what cargo compiles of other projects: packages with their features and settings. The plan of a build is an unstable
    feature of cargo, hence the variable."""
    options = ["--release", "--locked", "--offline", "--unit-graph", "-Z", "unstable-options"]
    environment = os.environ | {"RUSTC_BOOTSTRAP": "1"}
    done = subprocess.run(["cargo", *command, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = set()
    for unit in json.loads(done.stdout)["units"]:
        if "path+file" not in unit["pkg_id"]:
            kind = (*unit["target"]["kind"], unit["mode"], unit["platform"], unit["profile"]["opt_level"])
            found.add((unit["pkg_id"].split("#")[-1], *kind, *sorted(unit["features"])))
    return found


@pytest.mark.parametrize(
    ("command", "tests"),
    [(SERVE, TESTS), (TEST_WORKERS, TESTS), (SERVE, WITH_BACKENDS[0]), WITH_BACKENDS],
    ids=["serve", "test-workers", "backends after serve", "with backends"],
)
def test_tests_compile_no_dependency_again(command, tests):
    """A package with other features would be compiled again, with all that depend on it."""
    assert units(command) - units(tests) == set()
