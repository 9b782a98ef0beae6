"""The sequence batcher row by row (`sequence_tables.py`): batches, what the model is told, statistics and errors are a real
Triton's."""

import json

import pytest

import sequences
from peers import missing
from sequence_tables import DIFFERENCES, ROWS

WHY_NOT = missing("triton", "triton")
NAMES = [row.name for row in ROWS]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """What came of all rows here: they run side by side, since they mostly sleep."""
    return sequences.run_ours(ROWS, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def recorded():
    """What came of them on a real Triton."""
    return json.loads(sequences.GOLDEN.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_row(ours, recorded, name):
    """It is as it was on a real Triton, or as `DIFFERENCES` promises."""
    assert ours[name] == recorded[name] | DIFFERENCES.get(name, {})


def test_every_row_is_recorded_and_every_difference_is_one(recorded):
    """A promise that is what Triton does is no difference."""
    assert list(recorded) == NAMES
    for name, promised in DIFFERENCES.items():
        assert all(recorded[name][key] != value for key, value in promised.items()), name


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_live_triton_does_as_recorded(recorded, tmp_path):
    """A real Triton of this moment."""
    assert sequences.run_triton(ROWS, tmp_path) == recorded
