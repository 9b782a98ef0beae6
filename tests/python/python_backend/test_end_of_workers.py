"""The end of a worker is seen whatever processes it leaves behind, and no worker outlives the server, whatever it computes."""

import contextlib
import http.client
import os
import signal
import threading

import pytest

from harness.inference import one
from harness.models import write
from harness.processes import instance
from harness.server import alive, command_line
from harness.waiting import DEADLINE_S, eventually, join_all
from python_backend.worker import PYTHON, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")

STARTS = {"fork server": [], "programs": ["--worker-fork=false"]}
ways_to_start = pytest.mark.parametrize("start_options", STARTS.values(), ids=STARTS)
CONFIG = """backend: "python"
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
ANSWERS, EXITS, HANGS = 0, 1, 2
FORKING = """
import ctypes, os, time
import triton_python_backend_utils as utils

libc = ctypes.PyDLL(None)


class TritonPythonModel:
    def initialize(self, args):
        # As a C library does: without exec, and not with Python's functions. The copy has all descriptors of the worker.
        copy = libc.fork()
        if copy == 0:
            libc.sleep({seconds})
            libc._exit(0)
        with open({forked!r}, "a") as file:
            print(copy, file=file)

    def execute(self, requests):
        value = utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
        if value[0] == {EXITS}:
            os._exit(3)
        if value[0] == {HANGS}:
            time.sleep({seconds})
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", value)]) for _ in requests]
"""
COMPUTING = """
import numpy as np
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        matrix = np.random.rand(1500, 1500)
        matrix = (matrix @ matrix) % 1
        open({computing!r}, "w").close()
        while True:
            matrix = (matrix @ matrix) % 1
"""
COMPLETING = """
import time


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        open({completing!r}, "w").close()
        time.sleep({seconds})

    def execute(self, requests):
        return []
"""
NAMES = {"EXITS": EXITS, "HANGS": HANGS, "seconds": 10 * DEADLINE_S}
"""The names in the code of models. What sleeps, sleeps longer than the tests wait."""


def put(folder, code: str, config=CONFIG, **paths):
    """Writes the model `m`, whose code has these paths; returns the repository."""
    write(folder / "models", "m", config)
    (folder / "models/m/1/model.py").write_text(code.format(**NAMES, **{name: str(path) for name, path in paths.items()}))
    return folder / "models"


def request(value: int) -> dict:
    return one("INT32", [1], [value])


def answered(server):
    """Checks that the model answers."""
    status, answer = server.infer("m", request(ANSWERS))
    assert status == 200, answer


def worker(server) -> int:
    """Returns the process of the model."""
    (found,) = (pid for pid in server.workers() if instance(pid) == "m_0")
    return found


def kill_if(pid: int, argument: bytes):
    """Kills a process that has this argument. Its id may belong to another process if it has ended."""
    if argument in command_line(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def forking(start, tmp_path):
    """Returns a function that starts a server with a model that forks a process in C, and waits until the model answers."""
    forked = tmp_path / "forked"
    repository = put(tmp_path, FORKING, forked=forked)

    def begin(*options):
        server = start([], f"--python={PYTHON}", *options, repository=repository)
        answered(server)
        (copy,) = map(int, forked.read_text().split())
        assert alive(copy) and instance(copy) == "m_0"
        return server

    yield begin
    for copy in map(int, forked.read_text().split()):
        kill_if(copy, b"m_0")


@ways_to_start
def test_an_exit_is_seen_while_a_forked_process_runs(forking, start_options):
    """The process holds the socket of the worker. The request gets an error, and the worker is restarted."""
    server = forking(*start_options)
    before = worker(server)
    status, answer = server.infer("m", request(EXITS))
    assert status == 503 and "died" in answer["error"], answer
    answered(server)
    assert worker(server) != before and not alive(before)
    assert "instance lost: the worker process ended: exit status 3" in server.log.read_text()
    server.stop()


@ways_to_start
def test_a_worker_that_hangs_is_replaced_while_a_forked_process_runs(forking, start_options):
    server = forking(*start_options, "--worker-execution-timeout-secs=1")
    before = worker(server)
    status, answer = server.infer("m", request(HANGS))
    assert status == 503, answer
    answered(server)
    assert worker(server) != before and not alive(before)
    server.stop()


@ways_to_start
def test_an_unload_ends_while_a_forked_process_runs(forking, start_options):
    """The version becomes UNAVAILABLE, and can be loaded again."""
    server = forking(*start_options, "--model-control-mode=explicit", "--load-model=m")
    before = worker(server)
    status, answer = server.ask("POST", "/v2/repository/models/m/unload", b"")
    assert status == 200, answer
    eventually("the version is unloaded", lambda: server.index()["m"][0]["state"] == "UNAVAILABLE")
    assert not alive(before)
    status, answer = server.ask("POST", "/v2/repository/models/m/load", b"")
    assert status == 200, answer
    answered(server)


@ways_to_start
def test_the_server_ends_while_a_forked_process_runs(forking, start_options):
    server = forking(*start_options)
    server.stop()
    assert "Exit timeout expired" not in server.log_tail()


@pytest.mark.parametrize("turn", range(5))
def test_workers_that_compute_do_not_outlive_the_server(start, tmp_path, turn):
    """Threads of a library compute when the server is killed; exit handlers of such a library wait for them."""
    computing = tmp_path / "computing"
    options = [f"--python={PYTHON}", f"--worker-fork={'false' if turn % 2 else 'true'}"]
    server = start([], *options, repository=put(tmp_path, COMPUTING, computing=computing))
    process = worker(server)

    def ask():
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            server.infer("m", request(ANSWERS))

    client = threading.Thread(target=ask)
    client.start()
    try:
        eventually("the model computes", computing.exists)
        server.kill()
        join_all([client])
        eventually("the worker is gone", lambda: not alive(process))
    finally:
        kill_if(process, b"m_0")


@ways_to_start
def test_a_process_that_completes_a_configuration_does_not_outlive_the_server(start, tmp_path, start_options):
    completing = tmp_path / "completing"
    repository = put(tmp_path, COMPLETING, config='backend: "python"', completing=completing)
    server = start([], f"--python={PYTHON}", *start_options, repository=repository, wait=False)
    eventually("auto_complete_config runs", completing.exists)
    (process,) = (pid for pid in server.workers() if b"--auto-complete" in command_line(pid))
    try:
        server.kill()
        eventually("the process is gone", lambda: not alive(process))
    finally:
        kill_if(process, b"--auto-complete")
