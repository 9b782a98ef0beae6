"""What a server with many models costs while nothing happens."""

from pathlib import Path

import pytest

from harness.processes import sleeps
from harness.server import EXAMPLES, Server
from harness.waiting import run_for

MODELS = 30
SECONDS = 4
MOST_SWITCHES = 8
"""A second: two ticks of all instances together, and half a measurement of the system."""
pytestmark = [pytest.mark.alone, pytest.mark.slow]


def switches(pid: int) -> int:
    """Returns how often the threads of a process have gone to sleep."""
    return sum(sleeps(task) for task in Path(f"/proc/{pid}/task").iterdir())


def test_idle_instances_wake_the_server_together(tmp_path):
    config = (EXAMPLES / "simple/config.pbtxt").read_text()
    for number in range(MODELS):
        version = tmp_path / f"models/simple_{number}/1"
        version.mkdir(parents=True)
        version.with_name("config.pbtxt").write_text(config.replace('"simple"', f'"simple_{number}"'))
    with Server(tmp_path, [tmp_path / "models"]) as server:
        before = switches(server.process.pid)
        run_for("the interval over which wake-ups are counted", SECONDS)
        rate = (switches(server.process.pid) - before) / SECONDS
    assert rate < MOST_SWITCHES, f"{rate} switches a second with {MODELS} models"
