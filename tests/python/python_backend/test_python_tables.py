"""Python models answer as a real Triton's do: `python_tables.py` beside what `golden_python.json` has of it, and, where
the peer is installed, beside what it answers now."""

import collections
import fnmatch
import os
import sys

import pytest

from harness.peers import missing
from harness.server import Server
from python_backend import python_peers
from python_backend.python_differences import DIFFERENCES, difference, plain
from python_backend.python_peers import Peer, golden
from python_backend.python_repository import OPTIONS, build
from python_backend.python_tables import ROWS

WHY_NOT = missing("triton", "triton")


def interpreter() -> str:
    """The Python that has the package `pharos-worker`: `PHAROS_PYTHON`, else that of the tests."""
    return os.environ.get("PHAROS_PYTHON") or sys.executable


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """This server, with the repository that Triton has."""
    folder = tmp_path_factory.mktemp("python")
    repository = build(folder / "models")
    with Server(folder, [repository], [*OPTIONS, f"--python={interpreter()}"]) as server:
        yield Peer(server, str(repository), 0.1)


@pytest.fixture(scope="module")
def recorded():
    """What Triton answered."""
    return golden()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(peer, recorded, row):
    """Answers, statistics and custom metrics as Triton's, or as the list of differences says."""
    assert difference(row.name, peer.run(row), recorded[row.name]) == ""


def test_server_survived_the_rows(peer):
    """After all of them the server lives and answers. It is not ready: models that cannot be loaded were asked for."""
    assert peer.server.process.poll() is None
    assert peer.server.get("/v2/health/live")[0] == 200
    answers = peer.run(next(row for row in ROWS if row.name == "plain"))["answers"]
    assert [answer["status"] for answer in answers] == [200]


def test_every_row_has_its_own_name():
    """Names are the keys of the golden file."""
    names = collections.Counter(row.name for row in ROWS)
    assert [name for name, count in names.items() if count > 1] == []


def test_golden_file_is_complete(recorded):
    """The golden file has exactly the rows of the tables; `python -m python_backend.python_peers record` writes it anew."""
    assert set(recorded) == {row.name for row in ROWS}


def test_every_difference_is_about_a_row():
    """A pattern that matches nothing is a difference that is no more."""
    names = [row.name for row in ROWS]
    assert [p for entry in DIFFERENCES for p in entry.rows if not fnmatch.filter(names, p)] == []


def test_comparison_sees_differences(recorded):
    """The comparison itself can fail: another value, another error, another count, another metric."""
    name = "batch: of three"
    theirs = recorded[name]
    assert difference(name, theirs, theirs) == ""
    answer = theirs["answers"][0]
    for changed in (
        {"answers": [answer | {"status": 500}]},
        {"answers": [answer | {"outputs": {}}]},
        {"counted": {"rows 1": theirs["counted"]["rows 1"] | {"inferences": 4}}},
        {"metrics": ["asked_total 1"]},
    ):
        assert difference(name, theirs | changed, theirs) != ""
    name = "error: an exception"
    theirs = recorded[name]
    text = theirs["answers"][0]["error"]
    for old, new in (("ValueError", "KeyError"), ("): fail", "): fall"), ("plain_0_0", "plain_0_1")):
        changed = [theirs["answers"][0] | {"error": text.replace(old, new)}, theirs["answers"][1]]
        assert difference(name, theirs | {"answers": changed}, theirs) != ""


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_live_triton_answers_as_recorded(tmp_path, recorded):
    """The recorded answers are still those of a real Triton."""
    live = python_peers.ask_triton(tmp_path)
    changed = {name for name, outcome in live.items() if plain(outcome) != plain(recorded[name])}
    assert {name: (live[name], recorded[name]) for name in changed} == {}
