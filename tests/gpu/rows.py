"""The table of `check.py`: rows that steps write as lines of JSON, and how a step is run so that it costs only itself."""

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
"""Of a column of the table; the JSON has everything."""
PATIENCE_S = 10
"""How long a process that was ended may take to be gone."""
PR_SET_CHILD_SUBREAPER = 36
"""Of Linux's `prctl.h`."""


class Rows:
    """Rows of one step. Each is in the file as soon as it is known, so that a step that hangs later keeps it."""

    def __init__(self, file: Path, step: str):
        self.file, self.step = file, step

    def add(self, name: str, state: str, value="", limit="", reason=""):
        """One row."""
        row = {"step": self.step, "name": name, "value": value, "limit": limit, "state": state, "reason": reason}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def check(self, name: str, right, value="", limit="", reason=""):
        """A row that is as it should be, or not."""
        self.add(name, OK if right else FAIL, value, limit, "" if right else reason)

    def near(self, name: str, value: float, wanted: float, tolerance: float, unit=""):
        """A row whose value must be near another."""
        limit = f"{wanted:.4g} ± {tolerance:.3g} {unit}".strip()
        self.check(name, abs(value - wanted) <= tolerance, f"{value:.4g} {unit}".strip(), limit)

    def skip(self, name: str, reason: str):
        """A row that cannot be had here."""
        self.add(name, SKIPPED, reason=reason)


def read(file: Path) -> list:
    """The rows that are in a file."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # The process was ended while it wrote.
    return rows


def descendants(pid: int) -> list:
    """A process's children and theirs; some of them have a process group of their own."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def end(process: subprocess.Popen):
    """Ends a process and all that it has started. One that the driver holds on to is not waited for."""
    kill([process.pid, *descendants(process.pid)])
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_S)


def kill(pids: list):
    """SIGKILL for those that are still there."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def adopt():
    """Makes this process the parent of what its children leave behind, so that it can be found and ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_adopted():
    """Ends all that is still there of what this process's children have started."""
    kill(descendants(os.getpid()))
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(step: str, command: list, limit_s: float, folder: Path, environment=None) -> list:
    """Runs a step in a process of its own: its rows. One that fails, or takes longer than its limit, gets a row that
    says so beside those that it has written."""
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / "rows.jsonl", folder / "log.txt"
    file.unlink(missing_ok=True)
    begun = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        code = process.wait(limit_s)
        trouble = f"it ended with {code}: {last_line(log)}" if code else ""
    except subprocess.TimeoutExpired:
        trouble = f"no end within {limit_s:.0f} s"
    finally:
        end(process)
    rows = read(file)
    if trouble or not rows:
        trouble = trouble or "it has written no row"
        rows.append({"step": step, "name": step, "value": "", "limit": "", "state": FAIL, "reason": trouble})
    for row in rows:
        row["seconds"] = round(time.monotonic() - begun, 1)
    return rows


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def table(rows: list) -> str:
    """The rows in columns."""
    lines = [("step", "name", "value", "limit", "")]
    for row in rows:
        state = row["state"] + (f": {row['reason']}" if row["reason"] else "")
        lines.append((row["step"], row["name"], str(row["value"])[:WIDTH], str(row["limit"])[:WIDTH], state))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    cells = lambda line: [cell.ljust(width) for cell, width in zip(line, widths)]  # noqa: E731
    return "\n".join("  ".join([*cells(line), line[4]]).rstrip() for line in lines)


def summary(rows: list) -> str:
    """How many rows there are of each kind."""
    counts = {state: sum(row["state"] == state for row in rows) for state in (OK, FAIL, SKIPPED)}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]))))
