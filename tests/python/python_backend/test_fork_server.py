"""Fork servers: Python workers are copies of a process that has imported the runtime (`--python-preload`)."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from harness.inference import one
from harness.processes import instance, mapped
from harness.server import alive, binary, children, fork_servers, total
from harness.waiting import eventually
from python_backend.worker import PYTHON, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason="this Python has no package pharos_worker")

OPTION = f"--python={PYTHON}"

CONFIG = """backend: "python"
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_STRING dims: [ 1 ] }}
{more}
"""

CODE = """import json
import os
import random
import sys

import numpy
import triton_python_backend_utils as utils

DRAWN = [random.random(), float(numpy.random.rand())]


class TritonPythonModel:
    def execute(self, requests):
        known = {
            "process": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "drawn": DRAWN, "arguments": sys.argv,
            "processors": sorted(os.sched_getaffinity(0)), "threads": os.environ.get("OMP_NUM_THREADS"),
            "telemetry": os.environ.get("ORT_DISABLE_TELEMETRY"),
            "files": {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                      if os.path.exists(f"/proc/self/fd/{name}")},
            "preloaded": getattr(sys.modules.get("preloaded"), "VALUE", None),
        }
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", numpy.array([json.dumps(known)], dtype=object))])]
"""


def put(folder: Path, name: str, more: str = "", code: str = CODE):
    """Writes a model that describes its process."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(CONFIG.format(more=more))
    (folder / name / "1/model.py").write_text(code)


def described(server, name: str) -> dict:
    """Returns what a model says of its process."""
    status, answer = server.infer(name, one("FP32", [1], [1]))
    assert status == 200, answer
    return json.loads(answer["outputs"][0]["data"][0])


def load(server, name: str):
    status, answer = server.ask("POST", f"/v2/repository/models/{name}/load", b"")
    assert status == 200, answer


@pytest.fixture
def models(tmp_path):
    """A repository with three models."""
    folder = tmp_path / "models"
    for name in ("one", "two", "three"):
        put(folder, name)
    return folder


def test_workers_are_copies_of_one_process(start, models):
    """They share its memory, and have the names of their instances, process groups, and only their own files."""
    server = start([], OPTION, repository=models)
    (shared,) = fork_servers(server.process.pid)
    assert {instance(pid) for pid in server.workers()} == {"one_0", "two_0", "three_0"}
    memory = [mapped(pid, "Private_Clean", "Private_Dirty") for pid in server.workers()]
    assert max(memory) < 9_000_000, f"{memory}: 20 MB without a fork server, 6 MB with one"
    for name in ("one", "two", "three"):
        found = described(server, name)
        assert (found["parent"], found["group"], found["arguments"]) == (shared, found["process"], [""])
        assert instance(found["process"]) == f"{name}_0"
    server.stop()
    eventually("the fork server has ended", lambda: not alive(shared))


def test_each_worker_can_be_a_program(start, models):
    """`--worker-fork=false` starts none; the workers have the same files and variables as copies."""
    server, copies = start([], OPTION, "--worker-fork=false", repository=models), start([], OPTION, repository=models)
    assert fork_servers(server.process.pid) == []
    alone, copy = described(server, "one"), described(copies, "one")
    assert alone["parent"] == server.process.pid
    assert alone["threads"] == copy["threads"]
    assert (alone["telemetry"], copy["telemetry"]) == ("1", "1")

    def kinds(files):
        return sorted(text.partition(":")[0].partition(" ")[0] for text in files.values())

    assert kinds(alone["files"]) == kinds(copy["files"])


def test_a_fork_server_that_is_stopped_does_not_hide_the_end_of_a_worker(start, models):
    """It reports neither that end nor a new process. After ten seconds it is replaced, and the request is answered."""
    server = start([], OPTION, repository=models)
    (shared,) = fork_servers(server.process.pid)
    (worker,) = (pid for pid in server.workers() if instance(pid) == "one_0")
    os.kill(shared, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    assert described(server, "one")["process"] != worker
    assert not alive(shared) and shared not in fork_servers(server.process.pid)
    assert "a fork server did not answer within 10 s and is ended" in server.log.read_text()


def test_copies_draw_different_random_numbers(start, models):
    server = start([], OPTION, repository=models)
    drawn = [described(server, name)["drawn"] for name in ("one", "two", "three")]
    for generator in zip(*drawn):
        assert len(set(generator)) == 3, drawn


def test_threads_are_those_of_the_model(start, tmp_path):
    """Libraries read the number of threads when they are imported, so each number has its own process."""
    put(tmp_path / "models", "one")
    put(tmp_path / "models", "many", f"instance_group [ {{ count: {2 * (os.cpu_count() or 1)} }} ]")
    server = start([], OPTION, repository=tmp_path / "models")
    cores = len(os.sched_getaffinity(0))
    assert (described(server, "one")["threads"], described(server, "many")["threads"]) == (str(cores), "1")
    assert len(fork_servers(server.process.pid)) == len({cores, 1})


def test_processors_of_a_host_policy(start, tmp_path):
    last = max(os.sched_getaffinity(0))
    put(tmp_path / "models", "bound", 'instance_group [ { kind: KIND_CPU host_policy: "last" } ]')
    put(tmp_path / "models", "free")
    server = start([], OPTION, f"--host-policy=last,cpu-cores={last}-{last}", repository=tmp_path / "models")
    assert described(server, "bound")["processors"] == [last]
    assert described(server, "free")["processors"] == sorted(os.sched_getaffinity(0))


def test_resources_of_copies_are_measured(start, models):
    """They are no children of the server, but have the metrics of its workers."""
    server = start([], OPTION, "--metrics-interval-ms=100", repository=models)
    found = described(server, "one")["process"]
    resident = int(Path(f"/proc/{found}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def measured(name):
        return total(server.scrape(), name, model="one")

    eventually("its memory is measured", lambda: measured("pharos_worker_resident_bytes") > resident / 2)
    eventually("its time is measured", lambda: described(server, "one") and measured("pharos_worker_cpu_seconds_total") > 0)


def test_a_killed_worker_is_started_again(start, models):
    server = start([], OPTION, repository=models)
    killed = described(server, "one")["process"]
    os.kill(killed, signal.SIGKILL)
    found = described(server, "one")
    assert found["process"] != killed and [found["parent"]] == fork_servers(server.process.pid)
    assert "instance lost: the worker process ended: killed by signal 9" in server.log.read_text()


def test_workers_outlive_their_fork_server(start, models):
    """Without it they go on; a worker that is needed then is a copy of a new one."""
    server = start([], OPTION, repository=models)
    (killed,) = fork_servers(server.process.pid)
    before = described(server, "one")["process"]
    os.kill(killed, signal.SIGKILL)
    eventually("the fork server is gone", lambda: not alive(killed))
    assert described(server, "one")["process"] == before
    os.kill(before, signal.SIGKILL)
    found = described(server, "one")
    assert found["process"] != before and [found["parent"]] == fork_servers(server.process.pid) != [killed]
    assert described(server, "two")["parent"] not in (killed, found["parent"])
    workers = server.workers() | {described(server, name)["process"] for name in ("two", "three")}
    server.stop()
    eventually("all workers are gone", lambda: not any(alive(pid) for pid in workers))


def test_nothing_outlives_the_server(start, models):
    server = start([], OPTION, repository=models)
    processes = server.workers() | set(fork_servers(server.process.pid))
    assert len(processes) == 4
    server.kill()
    eventually("all processes are gone", lambda: not any(alive(pid) for pid in processes))


def test_a_module_that_cannot_be_imported_is_reported(start, models):
    """The models that do not need it are served."""
    server = start([], OPTION, "--python-preload=numpy,no_such_module", repository=models)
    assert [described(server, "one")["parent"]] == fork_servers(server.process.pid)
    expected = "cannot import 'no_such_module' (--python-preload): ModuleNotFoundError: No module named 'no_such_module'"
    assert expected in server.log.read_text()


@pytest.mark.parametrize("code, limit_s, reason", [
    ("import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", 60, "1 threads were started"),
    ("import os; os._exit(3)", 60, "it ended (exit status 3)"),
    # Workers have the same limit, and start in seconds on a machine that is busy eightfold.
    ("import time; time.sleep(600)", 12, "it did not start within 12 s"),
], ids=["threads", "exit", "hangs"])
def test_without_a_fork_server_workers_are_programs(start, models, tmp_path, code, limit_s, reason):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/preloaded.py").write_text(code)
    options = [OPTION, "--python-preload=preloaded", f"--worker-start-timeout-secs={limit_s}", "--worker-variables=PYTHONPATH"]
    server = start([], *options, repository=models, environment={"PYTHONPATH": str(tmp_path / "modules")})
    assert described(server, "one")["parent"] == server.process.pid
    assert f"are started without a fork server: {reason}" in server.log.read_text()
    eventually("it has ended", lambda: fork_servers(server.process.pid) == [])


DIES = """import os

FORKS = 0


def count():
    global FORKS
    FORKS += 1
    # The first one is a trial.
    if FORKS == 2 and not os.path.exists({died!r}):
        open({died!r}, "w").close()
        os._exit(3)


def note():
    with open({copies!r}, "a") as file:
        print(os.getpid(), file=file)


os.register_at_fork(after_in_parent=count, after_in_child=note)
"""


def test_a_fork_server_that_dies_after_a_fork_leaves_no_second_worker(start, tmp_path):
    """The copy exists, and nothing says so: the next attempt must not share the connection with it."""
    put(tmp_path / "models", "one")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/preloaded.py").write_text(DIES.format(died=str(tmp_path / "died"), copies=str(tmp_path / "copies")))
    options = [OPTION, "--python-preload=preloaded", "--worker-variables=PYTHONPATH"]
    environment = {"PYTHONPATH": str(tmp_path / "modules")}
    server = start([], *options, repository=tmp_path / "models", environment=environment)
    assert (tmp_path / "died").exists()
    processes = {described(server, "one")["process"] for _ in range(50)}
    assert len(processes) == 1
    others = {int(pid) for pid in (tmp_path / "copies").read_text().split()} - processes
    eventually("the other copies have ended", lambda: not any(map(alive, others)))
    assert "corrupt" not in server.log.read_text()


def test_changed_modules_are_imported_again(start, models, tmp_path):
    """A model that is loaded after an update of a package gets the new one; others keep theirs until then."""
    module = tmp_path / "modules/preloaded.py"
    module.parent.mkdir()
    module.write_text("VALUE = 1\n")
    options = [OPTION, "--python-preload=preloaded", "--model-control-mode=explicit", "--load-model=*"]
    server = start([], *options, repository=models, environment={"PYTHONPATH": str(module.parent)})
    assert described(server, "one")["preloaded"] == 1
    module.write_text("VALUE = 23\n")
    (models / "one/1/changed").write_text("x")
    load(server, "one")
    assert [described(server, name)["preloaded"] for name in ("one", "two", "three")] == [23, 1, 1]
    eventually("both run", lambda: len(fork_servers(server.process.pid)) == 2)
    # The first one has passed the files of the new worker on, and keeps none: the end of the worker is seen.
    killed = described(server, "one")["process"]
    os.kill(killed, signal.SIGKILL)
    assert described(server, "one")["process"] != killed


def test_a_process_that_completes_a_configuration_is_a_copy(start, tmp_path):
    code = CODE + """
    @staticmethod
    def auto_complete_config(config):
        print("completed by a child of", os.getppid(), os.getpgid(0) == os.getpid(), flush=True)
        config.set_max_batch_size(0)
        return config
"""
    put(tmp_path / "models", "one", code=code)
    server = start([], OPTION, repository=tmp_path / "models")
    (shared,) = fork_servers(server.process.pid)
    assert f"completed by a child of {shared} True" in server.log.read_text()


def test_output_that_is_not_flushed_is_not_lost(start, tmp_path):
    """A worker writes at its end what its standard streams still hold."""
    code = CODE + """
    def finalize(self):
        sys.stdout.reconfigure(line_buffering=False)
        sys.stdout.write("the last words")
"""
    put(tmp_path / "models", "one", code=code)
    server = start([], OPTION, repository=tmp_path / "models")
    server.stop()
    assert "the last words" in server.log_tail()


def test_models_load_in_parallel_and_in_turns(start, tmp_path):
    """Many loads, unloads and kills leave no process and no descriptor behind."""
    for number in range(12):
        put(tmp_path / "models", f"m{number}")
    server = start([], OPTION, "--model-control-mode=explicit", "--load-model=*", repository=tmp_path / "models")
    (shared,) = fork_servers(server.process.pid)

    def descriptors(pid):
        return len(os.listdir(f"/proc/{pid}/fd"))

    before = descriptors(server.process.pid), descriptors(shared)
    for turn in range(3):
        for number in range(12):
            status, answer = server.ask("POST", f"/v2/repository/models/m{number}/unload", b"")
            assert status == 200, answer
        eventually("the workers have ended", lambda: children(shared) == [])
        for number in range(12):
            load(server, f"m{number}")
        for pid in sorted(server.workers())[turn::4]:
            os.kill(pid, signal.SIGKILL)
        eventually("all are back", lambda: all(described(server, f"m{number}")["parent"] == shared for number in range(12)))
    eventually("the killed ones are gone", lambda: len(server.workers()) == 12)
    eventually("no descriptor is left", lambda: (descriptors(server.process.pid), descriptors(shared)) <= before)
    assert total(server.scrape(), "pharos_instances", state="ready") == 12


@pytest.mark.parametrize("value", ["numpy;os", "1st", "a..b", "-m"])
def test_names_of_modules_are_checked(tmp_path, value):
    command = [binary(), f"--model-repository={tmp_path}", f"--python-preload={value}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    text = f"'{value}' is not the name of a Python module; allowed are names separated by commas"
    assert ended.returncode == 2 and text in ended.stderr, ended.stderr
