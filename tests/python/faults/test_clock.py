"""The clock of the machine is set while the server runs: libfaketime changes what the server sees of it."""

import time
from pathlib import Path

import pytest

from harness.inference import one
from harness.server import MODELS, Server

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
WHY_NOT = "" if LIBRARY.exists() else f"{LIBRARY} is missing (Debian: apt-get install faketime)"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
STEPS_S = [0, -7200, 172_800, -1]
"""Differences from the real clock, in their order."""
REQUESTS = 20
MODEL = "delay_20_two_instances"
LONGEST_S = 60
"""More than the requests of a step take, and less than the steps."""


class Clocked(Server):
    """A server whose clock a test sets."""

    def __init__(self, folder):
        super().__init__(folder, [MODELS], ["--model-control-mode=explicit", f"--load-model={MODEL}"])
        self.offset = folder / "offset"
        self.set_clock(0)
        # Monotonic clocks never jump on a real machine.
        self.environment = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self.offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set_clock(self, seconds: int):
        """Sets the clock to this difference from the real one."""
        self.offset.write_text(f"{seconds:+}s")

    def counters(self) -> dict:
        """Returns the samples that never decrease."""
        kinds = ("_total", "_count", "_sum", "_bucket")
        return {key: value for key, value in self.scrape().items() if key[0].endswith(kinds) or key[0].startswith("nv_inference_request_")}


def test_a_clock_that_is_set_changes_no_duration(tmp_path):
    with Clocked(tmp_path) as server:
        before, count = server.counters(), 0
        for step in STEPS_S:
            server.set_clock(step)
            for _ in range(REQUESTS):
                status, answer = server.infer(MODEL, one("FP32", [1], [1]) | {"parameters": {"timeout": LONGEST_S * 1_000_000}})
                assert status == 200, answer
            count += REQUESTS
            after = server.counters()
            assert not {key: (before[key], value) for key, value in after.items() if value < before.get(key, 0)}
            statistics = server.statistics(MODEL)
            assert statistics["inference_stats"]["success"]["count"] == count
            assert statistics["inference_stats"]["success"]["ns"] < LONGEST_S * 1e9
            assert abs(statistics["last_inference"] / 1000 - (time.time() + step)) < LONGEST_S
            assert server.get("/v2/health/ready")[0] == 200
            before = after
