"""Compares the answers of Python models with a real Triton's: `python_tables.py` with the recorded answers in
`golden_python.json`, and, if the peer is installed, with its present answers."""

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
    """Returns the Python with the package `pharos-worker`: `PHAROS_PYTHON`, or by default the Python of the tests."""
    return os.environ.get("PHAROS_PYTHON") or sys.executable


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """This server with Triton's repository."""
    folder = tmp_path_factory.mktemp("python")
    repository = build(folder / "models")
    with Server(folder, [repository], [*OPTIONS, f"--python={interpreter()}"]) as server:
        yield Peer(server, str(repository), 0.1)


@pytest.fixture(scope="module")
def recorded():
    """Triton's recorded answers."""
    return golden()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(peer, recorded, row):
    """Answers, statistics and custom metrics are those of Triton, or those of the list of differences."""
    assert difference(row.name, peer.run(row), recorded[row.name]) == ""


def test_server_survived_the_rows(peer):
    """After all rows the server is live and answers. It is not ready, since loads of models failed."""
    assert peer.server.process.poll() is None
    assert peer.server.get("/v2/health/live")[0] == 200
    answers = peer.run(next(row for row in ROWS if row.name == "plain"))["answers"]
    assert [answer["status"] for answer in answers] == [200]


def test_every_row_has_its_own_name():
    """Names are the keys of the golden file."""
    names = collections.Counter(row.name for row in ROWS)
    assert [name for name, count in names.items() if count > 1] == []


def test_golden_file_is_complete(recorded):
    """The golden file has exactly the rows of the tables; `python -m python_backend.python_peers record` rewrites it."""
    assert set(recorded) == {row.name for row in ROWS}


def test_every_difference_is_about_a_row():
    """A pattern that matches no row belongs to an obsolete difference."""
    names = [row.name for row in ROWS]
    assert [p for entry in DIFFERENCES for p in entry.rows if not fnmatch.filter(names, p)] == []


def test_comparison_sees_differences(recorded):
    """The comparison reports another value, another error, another number of answers, another count and another metric."""
    name = "batch: of three"
    theirs = recorded[name]
    assert difference(name, theirs, theirs) == ""
    answer = theirs["answers"][0]
    for changed in (
        {"answers": []},
        {"answers": [*theirs["answers"], answer]},
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
