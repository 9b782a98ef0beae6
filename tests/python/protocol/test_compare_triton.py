"""Checks that the recorded answers are still those of a real Triton. Needs the peer; see `peers.py`."""

import pytest

from harness.peers import Triton, missing
from harness.triton_repository import build
from protocol import compare_triton

WHY_NOT = missing("triton", "triton")


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_server_and_live_triton_answer_equally(server, tmp_path):
    """Sends every request to both servers and compares the answers with each other instead of with the recorded ones."""
    triton = Triton(build(tmp_path / "models"), tmp_path / "triton.log")
    found = {}
    try:
        for case in compare_triton.CASES:
            theirs = compare_triton.ask_triton(triton, case)
            text = compare_triton.difference(case, compare_triton.send(server.http, server.grpc, case), theirs)
            if text:
                found[case.name] = text
    finally:
        triton.stop()
    assert found == {}
