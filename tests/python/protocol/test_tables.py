"""Every valid and invalid request of the tables gets the answer of the tables and of a real Triton."""

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
    """Status and text are those of the table; status, headers and body are Triton's, except for listed differences."""
    answer = send(server.http, server.grpc, case)
    if reason_for(case.name) is None:
        assert answer.status == case.status, answer.text
        assert case.fragment in answer.text
    assert difference(case, answer, GOLDEN[case.name]) == ""


def test_server_survived_the_tables(server):
    """After all requests the server is ready."""
    assert server.process.poll() is None
    assert server.get("/v2/health/ready") == (200, '{"ready":true}')


def test_every_case_has_its_own_name():
    """Names are the keys of the golden file."""
    names = collections.Counter(case.name for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []


def test_golden_file_is_complete():
    """The golden file has exactly the cases of the tables; `python -m protocol.compare_triton record` rewrites it."""
    assert set(GOLDEN) == {case.name for case in CASES}


def test_every_difference_is_about_a_case():
    """A pattern that matches no case belongs to an obsolete difference."""
    names = [case.name for case in CASES]
    unused = [p for entry in DIFFERENCES for p in entry.cases if not fnmatch.filter(names, p)]
    assert unused == []


def test_the_tables_explain_every_difference():
    """If the table expects another status or text than Triton's, the list of differences has the reason."""
    unexplained = []
    for case in CASES:
        theirs = GOLDEN[case.name]
        same = theirs.status == case.status and case.fragment in theirs.text
        if not same and reason_for(case.name) is None:
            unexplained.append(case.name)
    assert unexplained == []


def test_comparison_sees_differences():
    """The comparison reports another status, another body, another key and another number."""
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
    """The Content-Type of an error must be JSON, that of a success must be Triton's; the only additional parameter that the
    configuration may have is `engine`."""
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
    """A test double of a Triton that the case before has crashed: its process still exists, but no longer answers."""

    http = grpc = "nowhere"
    ends = 0

    def ensure(self):
        """Does nothing."""

    def is_ready(self):
        """Returns whether the dying process has ended."""
        return self.ends > 0

    def wait_for_end(self):
        """Marks the dying process as ended."""
        self.ends += 1


@pytest.mark.parametrize("lives, status", [(1, 200), (2, compare_triton.CRASHED)])
def test_a_crash_is_recorded_only_for_a_fresh_process(monkeypatch, lives, status):
    """A case that a dying Triton did not answer is sent again; it counts as a crash only if a fresh process fails as well."""
    triton = DyingTriton()

    def send_to_it(http, grpc, case):
        if triton.ends < lives:
            raise ConnectionRefusedError
        return compare_triton.Answer(200, "")

    monkeypatch.setattr(compare_triton, "send", send_to_it)
    assert compare_triton.ask_triton(triton, CASES[0]).status == status


def test_test_models_are_what_their_script_writes():
    """No generated configuration was edited by hand."""
    for path, text in generate.files().items():
        assert path.read_text() == text, f"{path} differs: run tests/models/generate.py"
