"""Runs `sequence_tables.py` row by row: batches, controls, statistics and errors are those of a real Triton."""

import json

import pytest

from harness.peers import missing
from sequences import runner as sequences
from sequences.sequence_tables import DIFFERENCES, LOAD_DIFFERENCES, LOADS, ROWS, Row

pytestmark = [pytest.mark.slow, pytest.mark.alone]

WHY_NOT = missing("triton", "triton")
NAMES = [row.name for row in ROWS]
AGAIN = 2
"""How often a row with another outcome is retried alone: its batches depend on milliseconds, which a busy machine may delay when
all rows run concurrently. A faulty scheduler fails each time."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Returns this server's outcomes of all rows, which run concurrently because they mostly sleep."""
    return sequences.run_ours(ROWS, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def recorded():
    """Returns Triton's recorded outcomes."""
    return json.loads(sequences.GOLDEN.read_text())


def joined(groups: list, recorded: list) -> list:
    """Joins groups of simultaneous answers that are one in the recording: on a busy machine, any two answers can be far apart. The
    statistics show which requests were in one batch."""
    result, rest = [], list(groups)
    for wanted in recorded:
        group = []
        while rest and len(group) < len(wanted) and set(rest[0]) <= set(wanted):
            group += rest.pop(0)
        result.append(sorted(group))
    return result + rest


@pytest.mark.parametrize("name", NAMES)
def test_row(ours, recorded, name, tmp_path):
    """The outcome is Triton's, with the differences in `DIFFERENCES`."""
    expected = recorded[name] | DIFFERENCES.get(name, {})
    comparable = lambda facts: facts | {"answers": joined(facts["answers"], expected["answers"])}  # noqa: E731
    outcome = comparable(ours[name])
    for attempt in range(AGAIN):
        if outcome == expected:
            break
        row = [row for row in ROWS if row.name == name]
        outcome = comparable(sequences.run_ours(row, tmp_path / str(attempt))[name])
    assert outcome == expected


def test_every_row_is_recorded_and_every_difference_differs(recorded):
    """Every listed difference differs from Triton's outcome."""
    assert list(recorded) == NAMES
    for name, different in DIFFERENCES.items():
        assert all(recorded[name][key] != value for key, value in different.items()), name


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """Returns the reason why each of `LOADS` is not loaded here, and the log."""
    return sequences.load_here(tmp_path_factory.mktemp("loads"))


LOADED_BY_TRITON = json.loads(sequences.GOLDEN_LOADS.read_text())


@pytest.mark.parametrize("name", LOADS)
def test_load(loads, name):
    """The model is loaded if a real Triton loads it, and otherwise refused with Triton's text, which the values may follow."""
    ours, theirs, model = loads[0][name], LOADED_BY_TRITON[name], Row(name, "", "").model
    if name in LOAD_DIFFERENCES:
        assert ours == LOAD_DIFFERENCES[name].format(model) and ours != theirs
        return
    assert ours == theirs or (theirs and ours.startswith(f"{theirs}: "))


def test_every_load_is_recorded():
    """The golden file and the table have the same names."""
    assert list(LOADED_BY_TRITON) == list(LOADS)


@pytest.mark.parametrize(
    "name, shown_value",
    [
        ("preferred size beyond the batch", "9 is given, the maximum is 4"),
        ("preferred size of zero", "0 is given"),
        ("utilization beyond one", "it is 1.5"),
        ("a fraction for an id", "it is TYPE_FP32"),
    ],
)
def test_refusals_show_the_value(loads, name, shown_value):
    """The reason has the wrong value after Triton's text, which has only the allowed ones."""
    assert loads[0][name].endswith(f": {shown_value}")


def test_a_control_without_a_kind_is_logged(loads):
    """The model is loaded nevertheless, as by Triton."""
    assert "the control input 'EXTRA' has no 'control': the model is not given this input" in loads[1]


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_live_triton_loads_as_recorded(tmp_path):
    """The recorded reasons are still those of a real Triton."""
    assert sequences.load_on_triton(tmp_path) == LOADED_BY_TRITON


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_live_triton_schedules_as_recorded(recorded, tmp_path):
    """The recorded outcomes are still those of a real Triton. Its answers depend on thread timing, so that differing rows run
    again alone."""
    live = sequences.run_triton(ROWS, tmp_path / "first")
    again = [row for row in ROWS if live[row.name] != recorded[row.name]]
    if again:
        live |= sequences.run_triton(again, tmp_path / "again")
    assert live == recorded
