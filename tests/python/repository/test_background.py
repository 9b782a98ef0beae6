"""Loads in the background: processes and threads that load or end models yield to those that serve requests."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.inference import one
from harness.processes import writer
from harness.server import alive, fork_servers
from harness.waiting import eventually
from python_backend.worker import PYTHON, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason="this Python has no package pharos_worker")

CONFIG = """backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""
CODE = """import os
import threading
import triton_python_backend_utils as utils


class TritonPythonModel:
    def initialize(self, args):
        {early}
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        with open("{folder}/waits.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename("{folder}/waits.new", "{folder}/waits")
        open("{folder}/loading").read()

    def execute(self, requests):
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())])
                for request in requests]

    def finalize(self):
        open("{folder}/ending").read()
"""
LOWER = "import os; now = os.getpriority(os.PRIO_PROCESS, 0); os.setpriority(os.PRIO_PROCESS, 0, now + 1); os.setpriority(os.PRIO_PROCESS, 0, now)"
"""Fails without the permission to lower a nice value."""
USUAL, BATCH, IDLE = os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE


@pytest.fixture
def model(tmp_path):
    """Writes a model that waits while it loads and while it ends, each until a pipe is written; returns its repository."""

    def write(early: str = "pass") -> Path:
        version = tmp_path / "models/m/1"
        version.mkdir(parents=True)
        for pipe in ("loading", "ending"):
            os.mkfifo(tmp_path / pipe)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        (version / "model.py").write_text(CODE.format(early=early, folder=tmp_path))
        return tmp_path / "models"

    return write


def attributes(pid: int) -> set:
    """Returns the scheduling policies and nice values of a process's threads."""
    threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    return {(os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)) for thread in threads}


def go_on(folder: Path, pipe: str):
    """Ends the wait of the model, once it waits."""
    os.close(writer(folder / pipe))


def waiting_worker(folder: Path) -> int:
    """Waits for a worker in which the model has started its thread, and returns it."""
    waits = folder / "waits"
    eventually("a worker waits in its load", waits.exists)
    pid = int(waits.read_text())
    waits.unlink()
    return pid


class Loading:
    """A server of which a client loads the model, or that loads it at its start (`wait=False`), and the worker that waits in its
    load."""

    def __init__(self, start, repository: Path, *options, wait=True):
        self.folder = repository.parent
        mode = ["--model-control-mode=explicit", *([] if wait else ["--load-model=m"])]
        self.server = start([], *mode, f"--python={PYTHON}", *options, repository=repository, wait=wait)
        self.load = self.ask("load") if wait else None
        self.unload = None
        self.worker = waiting_worker(self.folder)

    def ask(self, what: str) -> threading.Thread:
        thread = threading.Thread(target=self.server.ask, args=("POST", f"/v2/repository/models/m/{what}", b""))
        thread.start()
        return thread

    def loaded(self):
        """Lets the load end."""
        go_on(self.folder, "loading")
        if self.load:
            self.load.join()
        self.server.wait_until_ready()
        assert self.server.infer("m", one("FP32", [1], [1]))[0] == 200

    def begin_to_end(self):
        """Unloads the model, whose worker then waits in its end."""
        self.unload = self.ask("unload")

    def end(self):
        """Unloads the model, if that has not begun, and lets its worker end."""
        if not self.unload:
            self.begin_to_end()
        go_on(self.folder, "ending")
        self.unload.join()


def expected(server) -> tuple:
    """Returns the attributes of threads that serve, and of those in the background."""
    nice = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    may_lower = subprocess.run([sys.executable, "-c", LOWER], stderr=subprocess.DEVNULL).returncode == 0
    return (USUAL, nice), (BATCH, min(nice + 5, 19) if may_lower else nice)


def kill(worker: int):
    os.kill(worker, signal.SIGKILL)
    eventually("it has ended", lambda: not alive(worker))


@pytest.mark.parametrize("fork", ["true", "false"])
def test_restarts_and_loads_at_the_start_are_not_in_the_background(start, model, fork):
    """Requests wait for them."""
    loading = Loading(start, model(), f"--worker-fork={fork}", wait=False)
    usual, _ = expected(loading.server)
    assert attributes(loading.worker) == {usual}
    loading.loaded()
    kill(loading.worker)
    restarted = waiting_worker(loading.folder)
    assert attributes(restarted) == {usual}
    # An unload before the end of the restart would end the worker without `finalize`.
    loading.loaded()
    loading.end()


@pytest.mark.parametrize("fork", ["true", "false"])
def test_a_restart_after_a_load_by_request_is_not_in_the_background(start, model, fork):
    """Its supervision runs on a thread in the background."""
    loading = Loading(start, model(), f"--worker-fork={fork}")
    loading.loaded()
    kill(loading.worker)
    restarted = waiting_worker(loading.folder)
    assert attributes(restarted) == {expected(loading.server)[0]}
    # An unload before the end of the restart would end the worker without `finalize`.
    loading.loaded()
    loading.end()


@pytest.mark.parametrize("fork", ["true", "false"])
def test_a_worker_is_in_the_background_while_it_loads_and_ends(start, model, fork):
    """All of its threads, also those that the model starts; while it serves, none."""
    loading = Loading(start, model(), f"--worker-fork={fork}")
    usual, background = expected(loading.server)
    assert attributes(loading.worker) == {background}
    loading.loaded()
    assert attributes(loading.worker) == {usual}
    for process in fork_servers(loading.server.process.pid):
        assert attributes(process) == {usual}
    threads = list(Path(f"/proc/{loading.server.process.pid}/task").iterdir())
    in_background = [thread for thread in threads if os.sched_getscheduler(int(thread.name)) == BATCH]
    assert {(thread / "comm").read_text() for thread in in_background} == {"loading\n"}
    loading.begin_to_end()
    eventually("the ending worker is in the background", lambda: attributes(loading.worker) == {background})
    loading.end()


def test_a_policy_that_the_model_has_chosen_stays(start, model):
    """The frontend does not change it at the end of the load, and not when the worker ends."""
    early = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    loading = Loading(start, model(early))
    assert {policy for policy, _ in attributes(loading.worker)} >= {IDLE}
    loading.loaded()
    assert IDLE in {policy for policy, _ in attributes(loading.worker)}
    loading.end()


def test_a_policy_that_the_user_has_chosen_stays(start, model):
    """A server that was started with `SCHED_BATCH` has workers with this policy, before and after their load."""
    os.sched_setscheduler(0, BATCH, os.sched_param(0))
    try:
        loading = Loading(start, model())
    finally:
        os.sched_setscheduler(0, USUAL, os.sched_param(0))
    own = (BATCH, os.getpriority(os.PRIO_PROCESS, loading.server.process.pid))
    assert attributes(loading.worker) == {own}
    loading.loaded()
    assert attributes(loading.worker) == {own}
    loading.end()
