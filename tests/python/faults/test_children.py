"""Processes that a model starts, as engines of language models do, end with the process of the model, however it ends."""

import os
import signal

import pytest

from harness.server import Server, alive, kill_all
from harness.waiting import eventually

MODEL = '''
import subprocess
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        # Its pipes are closed at its start: no end of a pipe ends it.
        null = subprocess.DEVNULL
        self.child = subprocess.Popen(["sleep", "600"], stdin=null, stdout=null, stderr=null)
        with open("FILE", "a") as file:
            file.write(f"{self.child.pid}\\n")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
'''


@pytest.fixture
def started(tmp_path):
    """A server with a model that has started a process, and a function that returns the numbers of these processes."""
    version = tmp_path / "models/m/1"
    version.mkdir(parents=True)
    pids = tmp_path / "pids"
    (version / "model.py").write_text(MODEL.replace("FILE", str(pids)))
    (tmp_path / "models/m/config.pbtxt").write_text('backend: "python"\n')
    server = Server(tmp_path, [tmp_path / "models"])
    server.launch()
    server.wait_until_ready()
    yield server, lambda: [int(pid) for pid in pids.read_text().split()]
    kill_all([server])


def kill_worker(server):
    """Kills the process of the model."""
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)


def kill_server(server):
    """Kills the server, which cleans up nothing."""
    server.process.kill()


def stop_server(server):
    """Stops the server."""
    server.stop()


@pytest.mark.parametrize("end", [kill_worker, kill_server, stop_server])
def test_the_processes_of_a_model_end_with_it(started, end):
    """No process remains that keeps memory or a device."""
    server, pids = started
    (child,) = pids()
    assert alive(child)
    end(server)
    eventually("the process has ended", lambda: not alive(child))
