"""The scheduler row by row (`scheduling_tables.py`): batches, statistics, gauge and errors are a real Triton's."""

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
"""How often a row is tried again alone that came out otherwise: its batches depend on milliseconds, which a busy machine
takes from some of all rows at once. A scheduler that is wrong is wrong each time."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """What came of all rows here: they run side by side, since they mostly sleep."""
    return scheduling.run_ours(ROWS, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def recorded():
    """What came of them on a real Triton: the outcomes of each row."""
    return json.loads(scheduling.GOLDEN.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_row(ours, recorded, name, tmp_path):
    """It is as it was on a real Triton, or as `SCHEDULING_DIFFERENCES` promises."""
    promised = {}
    for difference in SCHEDULING_DIFFERENCES:
        promised |= difference.rows.get(name, {})
    expected = [facts | promised for facts in recorded[name]]
    outcome = ours[name]
    for attempt in range(AGAIN):
        if outcome in expected:
            break
        row = [row for row in ROWS if row.name == name]
        outcome = scheduling.run_ours(row, tmp_path / str(attempt))[name]
    assert outcome == expected[0] or outcome in expected[1:]


def test_every_row_is_recorded_and_every_difference_is_one(recorded):
    """A promise that is what Triton does is no difference; only races have more than one outcome."""
    assert list(recorded) == NAMES
    for difference in SCHEDULING_DIFFERENCES:
        for name, promised in difference.rows.items():
            assert all(facts[key] != value for facts in recorded[name] for key, value in promised.items()), name
    assert {name for name, outcomes in recorded.items() if len(outcomes) != 1} <= set(SCHEDULING_RACES) <= set(NAMES)


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_live_triton_does_as_recorded(recorded, tmp_path):
    """A real Triton of this moment; what it decides by chance may come out otherwise than it ever did."""
    live = scheduling.run_triton([row for row in ROWS if row.name not in SCHEDULING_RACES], tmp_path)
    assert live == {name: recorded[name][0] for name in live}
