"""Runs pytest, and runs at most three failed tests a second time, alone.

On a loaded machine a test can exceed its time limit. A test that fails once and then passes is printed as FLAKY: it hides a
fault of the test or of the server, which is still to be found. A second failure, or more failures, fail the run.
"""

import sys

import pytest

RETRIED = 3


class Failures:
    """Collects the identifiers of failed tests."""

    def __init__(self):
        self.root = None
        self.nodes = []

    def pytest_configure(self, config):
        """Identifiers are relative to this folder."""
        self.root = config.rootpath

    def pytest_runtest_logreport(self, report):
        """Called for each phase of each test."""
        node = f"{self.root}/{report.nodeid}"
        if report.failed and node not in self.nodes:
            self.nodes.append(node)


def main(arguments):
    """Returns the exit status of pytest."""
    failures = Failures()
    status = pytest.main(arguments, plugins=[failures])
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures.nodes) <= RETRIED:
        return status
    print(f"== a second run of what failed: {' '.join(failures.nodes)}", flush=True)
    status = pytest.main([*(argument for argument in arguments if argument.startswith("-")), *failures.nodes])
    if status == pytest.ExitCode.OK:
        for node in failures.nodes:
            print(f"FLAKY: {node} failed once and passed then", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
