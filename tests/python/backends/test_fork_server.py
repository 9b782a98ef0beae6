"""Fork servers: workers of backends without Python are copies of a process that has loaded their runtime (`--worker-fork`)."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from backends.native_backends import MISSING, compile
from harness.inference import one
from harness.processes import instance, mapped
from harness.server import EXAMPLES, alive, binary, fork_servers, parent_of
from harness.waiting import eventually

IDENTITY = """backend: "builtin"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "function" value { string_value: "identity" } }
"""
THREADS = """#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *wait(void *nothing) {
    pause();
    return nothing;
}

__attribute__((constructor)) static void start(void) {
    pthread_t thread;
    const char *threads = getenv("OMP_NUM_THREADS");
    int failed = pthread_create(&thread, NULL, wait, NULL);
    fprintf(stderr, "OMP_NUM_THREADS=%s tasks=%d\\n", threads ? threads : "", failed ? 1 : 2);
}
"""
PICTURE = {"inputs": [{"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]}


def put(folder: Path, name: str, more: str = ""):
    """Writes a model that returns its input."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(IDENTITY + more)


def digits(folder: Path, count: int) -> Path:
    """Writes copies of the ONNX model `digits`, which have the names `digits0`, `digits1`, ..."""
    for number in range(count):
        copy = folder / f"digits{number}"
        shutil.copytree(EXAMPLES / "digits", copy)
        config = copy / "config.pbtxt"
        config.write_text(config.read_text().replace('"digits"', f'"digits{number}"', 1))
    return folder


def infer(server, name: str) -> bool:
    """Sends a request; returns whether it was answered."""
    return server.infer(name, one("FP32", [1], [1]))[0] == 200


def process_of(server, name: str) -> int:
    """Returns the process of the first instance of a model."""
    (found,) = {pid for pid in server.workers() if instance(pid).startswith(f"{name}_")}
    return found


def parent(pid: int) -> int:
    return parent_of(Path(f"/proc/{pid}/stat"))


@pytest.fixture
def models(tmp_path):
    """A repository with three models."""
    for name in ("one", "two", "three"):
        put(tmp_path / "models", name)
    return tmp_path / "models"


def test_workers_with_onnx_runtime_share_its_memory(start, tmp_path):
    """What the library builds at its start, 7 MB, exists once."""
    server = start([], repository=digits(tmp_path / "models", 3))
    (shared,) = fork_servers(server.process.pid)
    assert {instance(pid) for pid in server.workers()} == {f"digits{number}_0" for number in range(3)}
    assert {parent(pid) for pid in server.workers()} == {shared}
    memory = [mapped(pid, "Private_Clean", "Private_Dirty") for pid in server.workers()]
    assert max(memory) < 4_000_000, f"{memory}: 10 MB as programs, 1 MB as copies"
    for number in range(3):
        status, answer = server.infer(f"digits{number}", PICTURE)
        assert status == 200, answer
    server.stop()
    eventually("the fork server has ended", lambda: not alive(shared))


def test_each_worker_can_be_a_program(start, models):
    """`--worker-fork=false` starts no fork server; the workers have the same files as copies."""
    server, copies = start([], "--worker-fork=false", repository=models), start([], repository=models)
    assert fork_servers(server.process.pid) == []
    alone, copy = process_of(server, "one"), process_of(copies, "one")
    assert (parent(alone), os.getpgid(alone), os.getpgid(copy)) == (server.process.pid, alone, copy)

    def files(pid):
        names = {number: os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")}
        return sorted((int(number), text.partition(":[")[0]) for number, text in names.items())

    assert files(alone) == files(copy)


def test_a_killed_worker_is_started_again(start, models):
    server = start([], repository=models)
    killed = process_of(server, "one")
    os.kill(killed, signal.SIGKILL)
    assert infer(server, "one") and process_of(server, "one") != killed
    assert "instance lost: the worker process ended: killed by signal 9" in server.log.read_text()


def test_workers_outlive_their_fork_server(start, models):
    """Without it they go on; a worker that is needed then is a copy of a new one."""
    server = start([], repository=models)
    (shared,) = fork_servers(server.process.pid)
    before = server.workers()
    killed = process_of(server, "one")
    os.kill(shared, signal.SIGKILL)
    eventually("the fork server is gone", lambda: not alive(shared))
    told = "a fork server ended (killed by signal 9); the next worker of its kind starts another one"
    eventually("the log says so", lambda: told in server.log.read_text())
    assert all(infer(server, name) for name in ("one", "two", "three"))
    assert all(alive(pid) for pid in before) and fork_servers(server.process.pid) == []
    os.kill(killed, signal.SIGKILL)
    assert infer(server, "one")
    assert [parent(process_of(server, "one"))] == fork_servers(server.process.pid) != [shared]
    everything = before | server.workers()
    server.stop()
    eventually("all workers are gone", lambda: not any(alive(pid) for pid in everything))


def test_nothing_outlives_the_server(start, models):
    server = start([], repository=models)
    processes = server.workers() | set(fork_servers(server.process.pid))
    assert len(processes) == 4
    server.kill()
    eventually("all processes are gone", lambda: not any(alive(pid) for pid in processes))


def test_processors_of_a_host_policy(start, tmp_path):
    last = max(os.sched_getaffinity(0))
    put(tmp_path / "models", "bound", 'instance_group [ { kind: KIND_CPU host_policy: "last" } ]')
    put(tmp_path / "models", "free")
    server = start([], f"--host-policy=last,cpu-cores={last}-{last}", repository=tmp_path / "models")
    assert os.sched_getaffinity(process_of(server, "bound")) == {last}
    assert os.sched_getaffinity(process_of(server, "free")) == os.sched_getaffinity(0)


def test_a_replaced_program_is_used_for_later_workers(start, models, tmp_path):
    """A model that is loaded after an update of the worker's program runs in the new one; others stay in the old one."""
    program = tmp_path / "pharos-worker"
    shutil.copy(binary().parent / "pharos-worker", program)
    options = [f"--worker-binary={program}", "--model-control-mode=explicit", "--load-model=*"]
    server = start([], *options, repository=models)
    before = process_of(server, "two")
    shutil.copy(program, tmp_path / "new")
    (tmp_path / "new").rename(program)
    for ask in ("unload", "load"):
        status, answer = server.ask("POST", f"/v2/repository/models/one/{ask}", b"")
        assert status == 200, answer
    assert infer(server, "one")
    eventually("both run", lambda: len(fork_servers(server.process.pid)) == 2)
    programs = {os.readlink(f"/proc/{process_of(server, name)}/exe") for name in ("one", "two")}
    assert programs == {str(program), f"{program} (deleted)"} and process_of(server, "two") == before


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_variables_and_threads_of_a_library(start, tmp_path):
    """A library is loaded by the copy, with the variables of its instance, and may start threads."""
    source = tmp_path / "threads.c"
    source.write_text(THREADS)
    compile(source, tmp_path / "backends/threads/libpharos_threads.so")
    more = f"instance_group [ {{ count: {2 * (os.cpu_count() or 1)} }} ]"
    for name, group in (("one", ""), ("many", more)):
        put(tmp_path / "models", name, group)
        config = tmp_path / "models" / name / "config.pbtxt"
        config.write_text(config.read_text().replace('"builtin"', '"threads"'))
    options = [f"--backend-directory={tmp_path / 'backends'}", "--exit-on-error=false", "--strict-readiness=false"]
    server = start([], *options, repository=tmp_path / "models", wait=False)
    cores = len(os.sched_getaffinity(0))
    for name, threads in (("one", cores), ("many", 1)):
        eventually(f"{name} was started", lambda: f"OMP_NUM_THREADS={threads} tasks=" in server.log.read_text())


def test_nothing_is_sent_about_the_use_of_onnx_runtime(start, tmp_path):
    """From version 1.29 on, the library writes an identifier and a database to the user's cache directory, and sends events, if it
    is not told otherwise before it starts."""
    digits(tmp_path / "models", 1)

    def written(name: str, options, more):
        home = tmp_path / name
        home.mkdir()
        # In continuous integration, which this variable tells, the library does neither.
        environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "CI": ""} | more
        server = start([], *options, repository=tmp_path / "models", environment=environment)
        assert server.infer("digits0", PICTURE)[0] == 200
        server.stop()
        return [path.relative_to(home) for path in home.rglob("*") if path.is_file()]

    assert written("copies", [], {}) == []
    assert written("programs", ["--worker-fork=false"], {}) == []
    if not written("allowed", [], {"ORT_DISABLE_TELEMETRY": "0"}):
        pytest.skip("this ONNX Runtime writes nothing either if it is allowed to")
