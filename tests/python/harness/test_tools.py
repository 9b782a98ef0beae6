"""The programs that run tests and measure: what they report if something fails."""

import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.server import ROOT, alive
from harness.waiting import DEADLINE_S, eventually


def tool(path: str):
    """Returns a program as a module."""
    spec = importlib.util.spec_from_file_location(f"tool_{Path(path).parent.name}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ended", "status"), [((5, 5), 5), ((0, 5), 0), ((5, 0), 0), ((0, 1), 1), ((1, 5), 1), ((2, 0), 2), ((4, 5), 4)]
)
def test_a_run_without_tests_is_no_success(monkeypatch, ended, status):
    """pytest's exit status is 5 if no test is selected. One of the two parts may have none."""
    run, ends = tool("tests/python/run.py"), iter(ended)
    monkeypatch.setattr(run.pytest, "main", lambda *_, **__: pytest.ExitCode(next(ends)))
    assert run.run_parts(["-k", "typo"], run.Outcomes()) == status


TESTS = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_skipped(number):
    pytest.skip("needs a part")

@pytest.mark.alone
def test_skipped_alone():
    pytest.skip("needs a part")

def test_failed():
    assert False
"""
FILE_SKIPPED = """
import pytest

pytest.skip("another system", allow_module_level=True)
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_run_ends_with_what_was_skipped_and_what_failed(tmp_path, processes):
    """Over both parts, and with several processes."""
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text(FILE_SKIPPED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: in one process\n")
    command = [sys.executable, ROOT / "tests/python/run.py", "-q", "-pno:cacheprovider", tmp_path]
    environment = os.environ | {"PHAROS_TEST_PROCESSES": processes}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1, done.stderr
    skipped = ["== skipped tests: 4", "   1 another system (test_two.py)", "   3 needs a part (test_one.py)"]
    assert done.stdout.splitlines()[-4:] == [*skipped, f"FAILED: {tmp_path}/test_one.py::test_failed"], done.stdout


class Empty(http.server.BaseHTTPRequestHandler):
    """Answers with an error without a body."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_an_error_without_a_body_is_a_failure():
    many_models = tool("tests/bench_many_models/run.py")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        sent = many_models.client(f"127.0.0.1:{server.server_port}", 1, 10, 0.05)
        server.shutdown()
    assert sent and many_models.failures(sent) == ["503 "] * len(sent)


def test_the_p99_is_that_of_requests_that_did_not_wait():
    """A request to another model that waited, for less time than slow requests to loaded models took, hides none of these."""
    many_models = tool("tests/bench_many_models/run.py")
    request = lambda model, seconds: many_models.Sent(0, model, seconds, "")  # noqa: E731
    kept = [request(number % 2, 0.020 if number % 20 == 0 else 0.001) for number in range(1000)]
    assert many_models.p99_of_kept(kept + [request(7, 0.003)] * 1500) == 0.020


@pytest.fixture
def mutants(monkeypatch, tmp_path):
    """The program of the deliberate faults; `test(text)` replaces cargo by a script, and `applied` has the patches."""
    module = tool("tests/mutants/run.py")
    module.applied = []
    monkeypatch.setattr(module, "git_apply", lambda patch, *options: module.applied.append((patch.stem, *options)))

    def test(text: str):
        script = tmp_path / "cargo"
        script.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\nif '--no-run' not in sys.argv:\n{text}")
        script.chmod(0o700)
        monkeypatch.setattr(module, "TEST", [str(script), "test", "--", "x"])

    module.test = test
    return module


def test_the_simulation_must_pass_without_a_fault(mutants, capsys):
    mutants.test("    print('seed 1, after 2 s: broken')\n    sys.exit(101)\n")
    assert mutants.main([]) == 1 and not mutants.applied
    assert "fails without a fault" in capsys.readouterr().err


def test_a_fault_is_found_only_if_the_simulation_reports_it(mutants):
    patch = Path("arena-leak.patch")
    for text, expected in (
        ("    print('seed 1, after 2 s: broken')\n    sys.exit(101)\n", (True, "seed 1, after 2 s: broken")),
        ("    sys.exit(101)\n", (False, "NOT FOUND: the test failed without a seed")),
        ("    print('seed 1 passed')\n", (False, "NOT FOUND: the test passed")),
    ):
        mutants.test(text)
        found, said = mutants.find(patch)
        assert (found, expected[1] in said) == (expected[0], True), said
    assert mutants.applied == [("arena-leak",), ("arena-leak", "--reverse")] * 3


def test_a_test_without_end_is_killed_and_finds_nothing(mutants, monkeypatch, tmp_path):
    """With the process that cargo has started."""
    monkeypatch.setattr(mutants, "LIMIT_S", 1)
    file = tmp_path / "pid"
    mutants.test(f"    child = subprocess.Popen(['sleep', '60'])\n    open({str(file)!r}, 'w').write(str(child.pid))\n    child.wait()\n")
    assert mutants.find(Path("arena-leak.patch")) == (False, "NOT FOUND: no end within 1 s")
    eventually("the test is killed", lambda: not alive(int(file.read_text())))
