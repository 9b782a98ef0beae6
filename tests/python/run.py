"""Runs the tests in several processes, then the tests that measure in one process, then up to three failed tests again.

The tests with the marker `alone` run one after the other, after all other tests. On a loaded machine a test can exceed its time
limit. A test that fails once and then passes is printed as FLAKY: the test or the server has a fault that is still to be found.
The run fails if a test fails twice, or if more than three tests fail. `PHAROS_TEST_PROCESSES` sets the number of processes
(default: one for each core, 8 at most).
"""

import os
import sys

import pytest

RETRIED = 3
MOST_PROCESSES = 8
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class Failures:
    """Collects the identifiers of failed tests."""

    def __init__(self):
        self.root = None
        self.nodes = []

    def pytest_configure(self, config):
        """Stores the folder that the identifiers are relative to."""
        self.root = config.rootpath

    def pytest_runtest_logreport(self, report):
        """Stores the identifier of a failed test; pytest calls it for each phase of each test."""
        node = f"{self.root}/{report.nodeid}"
        if report.failed and node not in self.nodes:
            self.nodes.append(node)


def processes() -> int:
    """Returns the number of processes that run tests."""
    return int(os.environ.get("PHAROS_TEST_PROCESSES") or min(MOST_PROCESSES, len(os.sched_getaffinity(0))))


def parts(arguments: list) -> list:
    """Returns the title and the arguments of each run, in order. A marker expression of the caller applies to both runs."""
    wanted, rest = "", list(arguments)
    if "-m" in rest:
        at = rest.index("-m")
        wanted, rest = f"({rest[at + 1]}) and ", rest[:at] + rest[at + 2 :]
    # The tests of one file run in one process, so that their shared server is started once.
    several = ["-n", str(processes()), "--dist", "loadfile"] if processes() > 1 else []
    return [
        (f"{processes()} processes", [*rest, *several, "-m", f"{wanted}not alone"]),
        ("one process, tests that measure", [*rest, "-m", f"{wanted}alone"]),
    ]


def main(arguments) -> int:
    """Returns the exit status of pytest."""
    failures, status = Failures(), pytest.ExitCode.OK
    for title, part in parts(arguments):
        print(f"== {title}", flush=True)
        ended = pytest.main(part, plugins=[failures])
        if ended not in (*PASSED, pytest.ExitCode.TESTS_FAILED):
            return ended
        status = status if ended in PASSED else ended
    if status == pytest.ExitCode.OK or len(failures.nodes) > RETRIED:
        return status
    print(f"== a second run of the failed tests: {' '.join(failures.nodes)}", flush=True)
    status = pytest.main([*options(arguments), *failures.nodes], plugins=[])
    if status == pytest.ExitCode.OK:
        for node in failures.nodes:
            print(f"FLAKY: {node} failed once, then passed", flush=True)
    return status


def options(arguments: list) -> list:
    """Returns the arguments without paths and marker expressions."""
    markers = {arguments.index("-m"), arguments.index("-m") + 1} if "-m" in arguments else set()
    return [a for n, a in enumerate(arguments) if a.startswith("-") and n not in markers]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
