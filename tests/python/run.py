"""Runs the tests in several processes, then the tests that measure in one process, then up to eight failed tests again.

The tests with the marker `alone` run one after the other, after all other tests. On a loaded machine a test can exceed its time
limit. A test that fails once and then passes is printed as FLAKY: the test or the server has a fault that is still to be found.
The run fails if a test fails twice, or if more than eight tests fail: a machine that is busy for a minute fails several tests that
measure. `PHAROS_TEST_PROCESSES` sets the number of processes (default: three for each core, 8 at most, because most tests wait most
of the time). The output ends with the skipped tests of all processes, by their reasons, and the failed tests.

With `--runs=COUNT` all of this is repeated, without a second run of failed tests: each run ends with one line of its results and
the load average, and the first failure makes the exit status 1 (`make test-under-load`).
"""

import collections
import os
import sys
import time

import pytest

RETRIED = 8
RUNS = "--runs="
MOST_PROCESSES = 8
PROCESSES_OF_A_CORE = 3
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class Outcomes:
    """Counts tests by outcome, and collects the identifiers of failed tests and the reasons for skipped tests."""

    def __init__(self):
        self.root = None
        self.nodes = []
        self.counts = collections.Counter()
        self.skips = collections.defaultdict(set)

    def pytest_configure(self, config):
        """Stores the folder that the identifiers are relative to."""
        self.root = config.rootpath

    def pytest_runtest_logreport(self, report):
        """Counts a test and stores the identifier of a failed one; pytest calls it for each phase of each test."""
        self.counts["passed"] += report.passed and report.when == "call"
        if report.skipped:
            self.counts["skipped"] += 1
            self.add_skip(report)
        node = f"{self.root}/{report.nodeid}"
        if report.failed and node not in self.nodes:
            self.nodes.append(node)

    def pytest_collectreport(self, report):
        """Stores the reason for skipping a whole file."""
        if report.skipped:
            self.add_skip(report)

    def add_skip(self, report):
        """Stores the reason for skipping a test or a file."""
        # A test that is expected to fail has a text instead of a place and a reason.
        reason = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else report.wasxfail
        self.skips[reason.removeprefix("Skipped: ")].add(report.nodeid)

    def skipped(self) -> list:
        """Returns the number of skipped tests, then a line for each reason with its tests' number and files."""
        lines = [f"== skipped tests: {sum(map(len, self.skips.values()))}"]
        for reason, nodes in sorted(self.skips.items()):
            files = sorted({node.partition("::")[0] for node in nodes})
            lines.append(f"{len(nodes):4} {reason} ({', '.join(files)})")
        return lines


def processes() -> int:
    """Returns the number of processes that run tests."""
    usual = min(MOST_PROCESSES, PROCESSES_OF_A_CORE * len(os.sched_getaffinity(0)))
    return int(os.environ.get("PHAROS_TEST_PROCESSES") or usual)


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


def run_parts(arguments: list, outcomes: Outcomes) -> int:
    """Runs all tests once; returns the exit status of pytest, which is not 0 if there was no test in any part."""
    statuses = []
    for title, part in parts(arguments):
        print(f"== {title}", flush=True)
        statuses.append(pytest.main(part, plugins=[outcomes]))
        if statuses[-1] not in (*PASSED, pytest.ExitCode.TESTS_FAILED):
            return statuses[-1]
    for status in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK):
        if status in statuses:
            return status
    return pytest.ExitCode.NO_TESTS_COLLECTED


def run_with_retry(arguments: list) -> int:
    """Runs all tests, and up to eight failed tests again; returns the exit status of pytest."""
    outcomes = Outcomes()
    status = run_parts(arguments, outcomes)
    failed = "FAILED: {}"
    if status == pytest.ExitCode.TESTS_FAILED and len(outcomes.nodes) <= RETRIED:
        print(f"== a second run of the failed tests: {' '.join(outcomes.nodes)}", flush=True)
        status = pytest.main([*options(arguments), *outcomes.nodes], plugins=[])
        if status == pytest.ExitCode.OK:
            failed = "FLAKY: {} failed once, then passed"
    lines = outcomes.skipped() + [failed.format(node) for node in outcomes.nodes]
    print("\n".join(lines), flush=True)
    return status


def run_repeatedly(arguments: list, count: int) -> int:
    """Runs all tests `count` times and prints the results of each run; returns the first exit status that is not 0."""
    first = pytest.ExitCode.OK
    for number in range(1, count + 1):
        begun, outcomes = time.monotonic(), Outcomes()
        status = run_parts(arguments, outcomes)
        results = f"{outcomes.counts['passed']} passed, {len(outcomes.nodes)} failed, {outcomes.counts['skipped']} skipped"
        load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
        print(f"== run {number} of {count}: {results} in {time.monotonic() - begun:.0f} s; load average {load}", flush=True)
        for node in outcomes.nodes:
            print(f"FAILED: {node}", flush=True)
        first = first or status
    return first


def main(arguments: list) -> int:
    """Returns the exit status of pytest."""
    runs = [argument for argument in arguments if argument.startswith(RUNS)]
    if not runs:
        return run_with_retry(arguments)
    return run_repeatedly([argument for argument in arguments if argument not in runs], int(runs[-1].removeprefix(RUNS)))


def options(arguments: list) -> list:
    """Returns the arguments without paths and marker expressions."""
    markers = {arguments.index("-m"), arguments.index("-m") + 1} if "-m" in arguments else set()
    return [a for n, a in enumerate(arguments) if a.startswith("-") and n not in markers]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
