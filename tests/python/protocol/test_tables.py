"""Every request of the tables, good and bad, is answered as the tables say and as a real Triton answered."""

import collections
import fnmatch

import pytest

from harness import generate
from harness.wire import HttpCase
from protocol import compare_triton
from protocol.compare_triton import CASES, DIFFERENCES, difference, load_golden, reason_for, send

GOLDEN = load_golden()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answer(server, case):
    """Status and text as in the table; status, headers and body as Triton's, but for listed differences."""
    answer = send(server.http, server.grpc, case)
    if reason_for(case.name) is None:
        assert answer.status == case.status, answer.text
        assert case.fragment in answer.text
    assert difference(case, answer, GOLDEN[case.name]) == ""


def test_server_survived_the_tables(server):
    """After all of them the server is ready and no worker was lost."""
    assert server.process.poll() is None
    assert server.get("/v2/health/ready") == (200, '{"ready":true}')


def test_every_case_has_its_own_name():
    """Names are the keys of the golden file."""
    names = collections.Counter(case.name for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []


def test_golden_file_is_complete():
    """The golden file has exactly the cases of the tables; `python -m protocol.compare_triton record` writes it anew."""
    assert set(GOLDEN) == {case.name for case in CASES}


def test_every_difference_is_about_a_case():
    """A pattern that matches nothing is a difference that is no more."""
    names = [case.name for case in CASES]
    unused = [p for entry in DIFFERENCES for p in entry.cases if not fnmatch.filter(names, p)]
    assert unused == []


def test_the_tables_explain_every_difference():
    """Where the table wants another status or text than Triton gave, the list of differences says why."""
    unexplained = []
    for case in CASES:
        theirs = GOLDEN[case.name]
        same = theirs.status == case.status and case.fragment in theirs.text
        if not same and reason_for(case.name) is None:
            unexplained.append(case.name)
    assert unexplained == []


def test_comparison_sees_differences():
    """The comparison itself can fail: another status, another body, another order of keys, another number."""
    case = next(case for case in CASES if case.name == "json FP32")
    theirs = GOLDEN[case.name]
    assert difference(case, theirs, theirs) == ""
    for old, new in [("0.10000000149011612", "0.2"), ('"datatype"', '"Datatype"'), ("-1.5", "1.5")]:
        changed = compare_triton.Answer(200, theirs.text.replace(old, new), headers=theirs.headers)
        assert "body" in difference(case, changed, theirs)
    shorter = compare_triton.Answer(200, theirs.text.replace("0.10000000149011612", "0.1"), headers=theirs.headers)
    assert difference(case, shorter, theirs) == ""
    refused = compare_triton.Answer(400, theirs.text, headers=theirs.headers)
    assert "status" in difference(case, refused, theirs)


def test_comparison_allows_only_the_general_differences():
    """An error is JSON even where Triton says otherwise, a success is what Triton says; the configuration may have the
    parameter `engine` and no other."""
    case = HttpCase("any", "GET", "/")
    plain, text = {"content-type": "text/plain"}, {"content-type": "application/json"}
    for status, ours, expected in [(404, text, ""), (404, plain, "header"), (200, plain, ""), (200, text, "header")]:
        answer = compare_triton.Answer(status, "{}", headers=ours)
        theirs = compare_triton.Answer(status, "{}", headers=plain)
        assert difference(case, answer, theirs).partition(" ")[0] == expected
    theirs = compare_triton.Answer(200, '{"parameters":{"a":{}}}', headers=text)
    for name, expected in [("engine", ""), ("other", "body")]:
        ours = compare_triton.Answer(200, f'{{"parameters":{{"{name}":{{}},"a":{{}}}}}}', headers=text)
        assert difference(case, ours, theirs).partition(" ")[0] == expected


class DyingTriton:
    """Stands for a Triton that the case before ended: its process is there a little longer, but answers no more."""

    http = grpc = "nowhere"
    ends = 0

    def ensure(self):
        """Nothing to start."""

    def is_ready(self):
        """Ready once the dying process is gone."""
        return self.ends > 0

    def wait_for_end(self):
        """The dying process is gone."""
        self.ends += 1


@pytest.mark.parametrize("lives, status", [(1, 200), (2, compare_triton.CRASHED)])
def test_a_crash_is_believed_only_of_a_fresh_process(monkeypatch, lives, status):
    """A case that a dying Triton did not answer is asked again; only one that a fresh one does not answer ended it."""
    triton = DyingTriton()

    def send_to_it(http, grpc, case):
        if triton.ends < lives:
            raise ConnectionRefusedError
        return compare_triton.Answer(200, "")

    monkeypatch.setattr(compare_triton, "send", send_to_it)
    assert compare_triton.ask_triton(triton, CASES[0]).status == status


def test_test_models_are_what_their_script_writes():
    """Nobody edited a generated configuration by hand."""
    for path, text in generate.files().items():
        assert path.read_text() == text, f"{path} differs: run tests/models/generate.py"
