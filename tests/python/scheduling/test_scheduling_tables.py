"""Runs `scheduling_tables.py` row by row: batches, statistics, gauge and errors are those of a real Triton."""

import json

import pytest

from harness.peers import missing
from protocol.triton_differences import SCHEDULING_DIFFERENCES, SCHEDULING_RACES
from scheduling import runner as scheduling
from scheduling.scheduling_tables import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.alone]

WHY_NOT = missing("triton", "triton")
NAMES = [row.name for row in ROWS]
AGAIN = 2
"""How often a row with another outcome is retried alone: its batches depend on milliseconds, which a busy machine may delay when
all rows run concurrently. A faulty scheduler fails each time."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Returns this server's outcomes of all rows, which run concurrently because they mostly sleep."""
    return scheduling.run_ours(ROWS, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def recorded():
    """Returns Triton's recorded outcomes of each row."""
    return json.loads(scheduling.GOLDEN.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_row(ours, recorded, name, tmp_path):
    """The outcome is Triton's, with the differences in `SCHEDULING_DIFFERENCES`."""
    different = {}
    for difference in SCHEDULING_DIFFERENCES:
        different |= difference.rows.get(name, {})
    expected = [facts | different for facts in recorded[name]]
    outcome = ours[name]
    for attempt in range(AGAIN):
        if outcome in expected:
            break
        row = [row for row in ROWS if row.name == name]
        outcome = scheduling.run_ours(row, tmp_path / str(attempt))[name]
    assert outcome == expected[0] or outcome in expected[1:]


def test_every_row_is_recorded_and_every_difference_differs(recorded):
    """Every listed difference differs from Triton's outcome; only races have more than one outcome."""
    assert list(recorded) == NAMES
    for difference in SCHEDULING_DIFFERENCES:
        for name, different in difference.rows.items():
            assert all(facts[key] != value for facts in recorded[name] for key, value in different.items()), name
    assert {name for name, outcomes in recorded.items() if len(outcomes) != 1} <= set(SCHEDULING_RACES) <= set(NAMES)


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_live_triton_schedules_as_recorded(recorded, tmp_path):
    """The recorded outcomes are still those of a real Triton; outcomes that depend on chance may be new."""
    live = scheduling.run_triton([row for row in ROWS if row.name not in SCHEDULING_RACES], tmp_path)
    assert live == {name: recorded[name][0] for name in live}
