"""Whether tests fail if a server crashes or panics, or if a thread of the test fails."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.connections import connect, read_response
from harness.server import Server, kill_all
from harness.waiting import DEADLINE_S, eventually

CONFIGURATION = Path(__file__).resolve().parents[1] / "pytest.ini"
PANIC = "thread 'loop-0' (77) panicked at frontend/src/main.rs:1:2:"


@pytest.fixture
def started(tmp_path):
    """Starts a shell command as a server: `started(command)`."""
    servers = []

    def begin(command: str) -> Server:
        server = Server(tmp_path, [])
        server.command = ["sh", "-c", command]
        server.launch()
        servers.append(server)
        return server

    yield begin
    for server in servers:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("end", ["exit 0", "exit 1", "kill -SEGV $$"])
def test_a_server_that_ends_by_itself_fails_the_test(started, end):
    server = started(end)
    eventually("the process has ended", lambda: server.process.poll() is not None)
    for check in (server.launch, server.stop, lambda: server.__exit__(None, None, None), lambda: kill_all([server])):
        with pytest.raises(AssertionError, match="the test did not end it"):
            check()


def test_a_server_that_a_signal_ends_fails_the_test(started):
    """Also if the test has waited for the end."""
    server = started("kill -SEGV $$")
    server.process.wait(DEADLINE_S)
    with pytest.raises(AssertionError, match="signal 11 ended the server"):
        kill_all([server])


def test_a_server_that_the_test_ends_passes(started):
    server = started("sleep 600")
    server.kill()
    kill_all([server])
    server.launch()
    server.process.terminate()
    eventually("the process has ended", lambda: server.process.poll() is not None)
    kill_all([server])
    server = started("exit 1")
    assert server.process.wait(DEADLINE_S) == 1
    kill_all([server])


def test_a_panic_fails_the_test(started):
    server = started(f'echo "{PANIC}"; exec sleep 600')
    eventually("the line is written", lambda: PANIC in server.log.read_text())
    with pytest.raises(AssertionError, match="panicked at frontend/src/main.rs"):
        kill_all([server])
    server.may_panic = True
    kill_all([server])


def run(folder: Path, test: str) -> str:
    """Runs a test with the configuration of these tests; returns what pytest prints."""
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", CONFIGURATION, f"--rootdir={folder}", folder]
    environment = os.environ | {"PYTHONPATH": str(CONFIGURATION.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, cwd=folder).stdout


def test_an_exception_of_a_thread_fails_the_test(tmp_path):
    text = "import threading\n\ndef test_it():\n    thread = threading.Thread(target=lambda: 1 / 0)\n    thread.start()\n    thread.join()\n"
    assert "1 failed" in run(tmp_path, text)
    assert "1 passed" in run(tmp_path, text.replace("1 / 0", "1 / 1"))


def test_a_table_without_cases_fails(tmp_path):
    output = run(tmp_path, 'import pytest\n\n@pytest.mark.parametrize("case", [])\ndef test_it(case):\n    pass\n')
    assert "Empty parameter set" in output and "1 error" in output, output


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", b"HTTP/1.1 200 OK\r\n"])
def test_a_truncated_answer_is_no_answer(answer):
    """Within the body it is an error, within the head it has the status 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with listener.accept()[0] as connection:
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with connect(listener.getsockname()[1]) as connection:
            if b"abc" in answer:
                with pytest.raises(ConnectionError):
                    read_response(connection)
            else:
                assert read_response(connection)[0] == 0
        thread.join()
