"""`pharos torchserve` answers as a real TorchServe: compares the outcomes of `table.py` with
`golden_torchserve.json`."""

import collections
import fnmatch
import json

import pytest

from harness.server import alive, workers
from harness.waiting import eventually
from torchserve import peers as torchserve_peers
from torchserve.differences import DIFFERENCES, difference, plain, reason_for
from torchserve.launched import NO_ARCHIVER, WHY_NOT, pharos
from torchserve.peer import torch_folder
from torchserve.peers import golden, served
from torchserve.row_types import SETUPS
from torchserve.table import ROWS

NAMES = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def stores():
    """A cache of model stores."""
    return {}


@pytest.fixture(scope="module", params=SETUPS)
def setup(request, stores, tmp_path_factory):
    """A server of each setup, and the setup's name."""
    if NO_ARCHIVER:
        pytest.skip(NO_ARCHIVER)
    if SETUPS[request.param].torch and not torch_folder():
        pytest.skip("no torch: PHAROS_TORCH names a folder of packages that has it")
    with served(pharos, tmp_path_factory.mktemp("ts"), request.param, stores) as peer:
        yield request.param, peer


@pytest.fixture(scope="module")
def recorded():
    """TorchServe's recorded outcomes."""
    return golden()


@pytest.mark.slow
def test_setup(setup, recorded):
    """All rows of a setup, in order: answers, log lines and series equal TorchServe's, or differ as listed. Reports all
    differences at once."""
    name, peer = setup
    wrong, workers = {}, living(peer)
    for row in (row for row in ROWS if row.setup == name):
        found = difference(row.name, peer.run(row), recorded[row.name])
        if found:
            wrong[row.name] = found
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
    assert peer.server.process.poll() is None
    eventually("the number of workers is as before", lambda: living(peer) == workers)


def living(peer) -> int:
    """Returns the number of live processes that a server has started."""
    return sum(alive(pid) for pid in workers(peer.server.server_pid()))


def test_every_row_has_its_own_name():
    """Names are the keys of the golden file."""
    names = collections.Counter(row.name for row in ROWS)
    assert [name for name, count in names.items() if count > 1] == []


def test_golden_file_is_complete(recorded):
    """The golden file has exactly the rows of the table; `python -m torchserve.peers record` rewrites it."""
    assert set(recorded) == set(NAMES)


def test_every_difference_is_about_a_row():
    """Each pattern of a listed difference matches a row."""
    assert [p for entry in DIFFERENCES for p in entry.rows if not fnmatch.filter(NAMES, p)] == []


def test_comparison_sees_differences(recorded):
    """The comparison detects another status, header, body, line or family, and another number of answers."""
    name = "predict: bytes"
    assert reason_for(name) is None
    theirs = recorded[name]
    assert difference(name, theirs, theirs) == ""
    answer = theirs["answers"][0]
    for changed in (
        {"answers": []},
        {"answers": [answer, answer]},
        {"answers": [answer | {"status": 500}]},
        {"answers": [answer | {"headers": answer["headers"] | {"x-request-id": "mine"}}]},
        {"answers": [answer | {"body": answer["body"].replace("0001ff", "0001fe")}]},
        {"logged": theirs["logged"] | {"model_metrics": []}},
        {"logged": theirs["logged"] | {"access_log": ["POST /predictions/echo HTTP/1.1 404"]}},
    ):
        assert difference(name, theirs | changed, theirs) != "", changed
    name = "oip"
    expected = reason_for(name).texts
    answers = [{"body": json.loads(f'"{text}"')} for text in expected]
    assert difference(name, {"answers": answers}, recorded[name]) == ""
    for changed in ([], answers[1:], [*answers[1:], {"status": 500}]):
        assert difference(name, {"answers": changed}, recorded[name]) != "", changed


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT or NO_ARCHIVER), reason=WHY_NOT or NO_ARCHIVER)
@pytest.mark.parametrize("name", ["prometheus", "strict"])
def test_live_torchserve_answers_as_recorded(tmp_path, recorded, stores, name):
    """A real TorchServe still gives the recorded answers of some setups."""
    changed = {}
    with served(torchserve_peers.torchserve, tmp_path, name, stores) as peer:
        for row in (row for row in ROWS if row.setup == name):
            found = peer.run(row)
            if plain(found) != plain(recorded[row.name]):
                changed[row.name] = (found, recorded[row.name])
    assert changed == {}
