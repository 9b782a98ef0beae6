"""The sequence batcher row by row (`sequence_tables.py`): batches, what the model is told, statistics and errors are a real
Triton's."""

import json

import pytest

from harness.peers import missing
from sequences import runner as sequences
from sequences.sequence_tables import DIFFERENCES, LOAD_DIFFERENCES, LOADS, ROWS, Row

pytestmark = [pytest.mark.slow, pytest.mark.alone]

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


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """Why each of `LOADS` is not loaded here, and the log."""
    return sequences.load_here(tmp_path_factory.mktemp("loads"))


LOADED_BY_TRITON = json.loads(sequences.GOLDEN_LOADS.read_text())


@pytest.mark.parametrize("name", LOADS)
def test_load(loads, name):
    """It is loaded if a real Triton loads it, and refused in Triton's words, which the values given may follow."""
    ours, theirs, model = loads[0][name], LOADED_BY_TRITON[name], Row(name, "", "").model
    if name in LOAD_DIFFERENCES:
        assert ours == LOAD_DIFFERENCES[name].format(model) and ours != theirs
        return
    assert ours == theirs or (theirs and ours.startswith(f"{theirs}: "))


def test_every_load_is_recorded():
    """The golden file has what the table has."""
    assert list(LOADED_BY_TRITON) == list(LOADS)


@pytest.mark.parametrize(
    "name, told",
    [
        ("preferred size beyond the batch", "9 is given, the maximum is 4"),
        ("preferred size of zero", "0 is given"),
        ("utilization beyond one", "it is 1.5"),
        ("a fraction for an id", "it is TYPE_FP32"),
    ],
)
def test_refusals_show_the_value(loads, name, told):
    """Triton says what is allowed, not what was given."""
    assert loads[0][name].endswith(f": {told}")


def test_a_control_without_a_kind_is_told_in_the_log(loads):
    """It is loaded all the same, as by Triton."""
    assert "the control input 'EXTRA' has no 'control': the model is not given this input" in loads[1]


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_live_triton_loads_as_recorded(tmp_path):
    """A real Triton of this moment."""
    assert sequences.load_on_triton(tmp_path) == LOADED_BY_TRITON


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_live_triton_does_as_recorded(recorded, tmp_path):
    """A real Triton of this moment. Its answers hang on when its threads run: what differs is asked once more, by itself."""
    live = sequences.run_triton(ROWS, tmp_path / "first")
    again = [row for row in ROWS if live[row.name] != recorded[row.name]]
    if again:
        live |= sequences.run_triton(again, tmp_path / "again")
    assert live == recorded
