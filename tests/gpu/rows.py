"""The table of `check.py`: rows that steps write as lines of JSON, and code that runs a step in isolation."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))

from harness.server import children  # noqa: E402

OK, FAIL, SKIPPED = "ok", "FAIL", "skipped"
WIDTH = 60
"""Width of a column of the table; the JSON is complete."""
EXIT_WAIT_S = 10
"""Seconds to wait for a killed process to exit."""
PR_SET_CHILD_SUBREAPER = 36
"""From Linux's `prctl.h`."""


class Rows:
    """Rows of one step. Each is written to the file immediately, so that it is kept if the step hangs later."""

    def __init__(self, file: Path, step: str):
        self.file, self.step = file, step

    def add(self, name: str, state: str, value="", limit="", reason=""):
        """Adds a row."""
        row = {"step": self.step, "name": name, "value": value, "limit": limit, "state": state, "reason": reason}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def check(self, name: str, right, value="", limit="", reason=""):
        """Adds a row that is correct or failed."""
        self.add(name, OK if right else FAIL, value, limit, "" if right else reason)

    def near(self, name: str, value: float, wanted: float, tolerance: float, unit=""):
        """Adds a row whose value must be near another."""
        limit = f"{wanted:.4g} ± {tolerance:.3g} {unit}".strip()
        self.check(name, abs(value - wanted) <= tolerance, f"{value:.4g} {unit}".strip(), limit)

    def skip(self, name: str, reason: str):
        """Adds a row for a check that is impossible here."""
        self.add(name, SKIPPED, reason=reason)


def read(file: Path) -> list:
    """Reads the rows in a file."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # The process was killed while it wrote.
    return rows


def descendants(pid: int) -> list:
    """Returns all descendants of a process; some of them have a separate process group."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def end(process: subprocess.Popen):
    """Kills a process and its descendants. Does not wait for a process that is stuck in the driver."""
    kill([process.pid, *descendants(process.pid)])
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_WAIT_S)


def kill(pids: list):
    """Sends SIGKILL to processes that still exist."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def adopt():
    """Makes this process the parent of orphans of its children, so that they can be found and killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_adopted():
    """Kills all remaining descendants of this process."""
    kill(descendants(os.getpid()))
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(step: str, command: list, limit_s: float, folder: Path, environment=None) -> list:
    """Runs a step in a separate process and returns its rows. A step that fails, or exceeds its time limit, gets an additional
    row that reports it."""
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / "rows.jsonl", folder / "log.txt"
    file.unlink(missing_ok=True)
    begun = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        code = process.wait(limit_s)
        trouble = f"exited with {code}: {last_line(log)}" if code else ""
    except subprocess.TimeoutExpired:
        trouble = f"no end within {limit_s:.0f} s"
    finally:
        end(process)
    rows = read(file)
    if trouble or not rows:
        trouble = trouble or "no row was written"
        rows.append({"step": step, "name": step, "value": "", "limit": "", "state": FAIL, "reason": trouble})
    for row in rows:
        row["seconds"] = round(time.monotonic() - begun, 1)
    return rows


def last_line(log: Path) -> str:
    """Returns the last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"


def table(rows: list) -> str:
    """Formats the rows in columns."""
    lines = [("step", "name", "value", "limit", "")]
    for row in rows:
        state = row["state"] + (f": {row['reason']}" if row["reason"] else "")
        lines.append((row["step"], row["name"], str(row["value"])[:WIDTH], str(row["limit"])[:WIDTH], state))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    cells = lambda line: [cell.ljust(width) for cell, width in zip(line, widths)]  # noqa: E731
    return "\n".join("  ".join([*cells(line), line[4]]).rstrip() for line in lines)


def summary(rows: list) -> str:
    """Returns the number of rows in each state."""
    counts = {state: sum(row["state"] == state for row in rows) for state in (OK, FAIL, SKIPPED)}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]))))
