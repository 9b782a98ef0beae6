"""The life of an instance: its removal while it works, restarts or is lost, the end of its process, and failures while others start.

The model is a Python model that files in a folder hold back, so that each state lasts as long as a test needs it."""

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.inference import tensor
from harness.processes import instance
from harness.server import Server, alive, fork_servers, total
from harness.waiting import eventually
from python_backend.worker import PYTHON, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")

CONFIG = """backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
CODE = """
import struct, threading, time
from pathlib import Path
import triton_python_backend_utils as utils

FOLDER = Path({folder!r})


def note(what):
    with open(FOLDER / what, "a") as file:
        file.write("x")


def corrupt_frames():
    # As a stray pointer of a native library does.
    for line in open("/proc/self/maps"):
        if "pharos-frames" in line:
            start = int(line.split("-")[0], 16)
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                for position in (0, 64):
                    memory.seek(start + position)
                    memory.write(struct.pack("<Q", 1 << 41))
            return


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        note(f"started {{self.name}}")
        if (FOLDER / f"fail {{self.name}}").exists():
            raise RuntimeError("there is no licence left")
        self.wait("hold " + self.name)

    def wait(self, name):
        while (FOLDER / name).exists():
            time.sleep(0.01)

    def execute(self, requests):
        note(f"executed {{self.name}}")
        if (FOLDER / "corrupt").exists():
            (FOLDER / "corrupt").unlink()
            threading.Timer(0.1, corrupt_frames).start()
        self.wait("busy")
        return [utils.InferenceResponse([utils.Tensor("OUT", request.inputs()[0].as_numpy())]) for request in requests]

    def finalize(self):
        is_first = not (FOLDER / "ends").exists()
        note("ends")
        if is_first:
            time.sleep({end_s})
        note("ended")
"""
REQUEST = {"inputs": [tensor("IN", "FP32", [1], [1])]}


class World:
    """A server with the model `m`, and the files that hold its instances."""

    def __init__(self, folder, count: int, options=(), end_s=0.0, config=CONFIG):
        self.folder, self.config = folder, config
        (folder / "models/m/1").mkdir(parents=True)
        (folder / "models/m/1/model.py").write_text(CODE.format(folder=str(folder), end_s=end_s))
        self.write(count)
        # Of a repeated flag, the last one counts.
        self.server = Server(folder, [folder / "models"], [f"--python={PYTHON}", "--model-control-mode=explicit", *options])

    def write(self, count: int, more=""):
        """Writes the configuration with this number of instances."""
        (self.folder / "models/m/config.pbtxt").write_text(
            f"{self.config}instance_group [ {{ kind: KIND_CPU count: {count} {more} }} ]\n"
        )

    def load(self) -> tuple:
        return self.server.ask("POST", "/v2/repository/models/m/load")

    def unload(self):
        assert self.server.ask("POST", "/v2/repository/models/m/unload")[0] == 200

    def names(self) -> set:
        """Returns the names of the instances with a process."""
        return {instance(pid).strip() for pid in self.server.workers()}

    def pid(self, name: str) -> int:
        return next(pid for pid in self.server.workers() if instance(pid).strip() == name)

    def kill(self, name: str):
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        eventually("the worker is gone", lambda: not alive(pid))

    def count(self, what: str) -> int:
        """Returns how often the model has noted this."""
        return len((self.folder / what).read_bytes()) if (self.folder / what).exists() else 0

    def put(self, *files: str):
        for file in files:
            (self.folder / file).touch()

    def remove(self, *files: str):
        for file in files:
            (self.folder / file).unlink()

    def infer(self) -> tuple:
        return self.server.infer("m", REQUEST)

    def until_configured(self, count: int):
        """Waits until a load has changed the number of instances. Its answer follows the ends of the removed ones."""
        groups = lambda: json.loads(self.server.get("/v2/models/m/config")[1])["instance_group"]  # noqa: E731
        eventually(f"the model has {count} instances", lambda: [group["count"] for group in groups()] == [count])

    def __enter__(self):
        self.server.__enter__()
        return self

    def __exit__(self, *error):
        for file in [*self.folder.glob("hold *"), *self.folder.glob("busy")]:
            file.unlink()
        self.server.__exit__(*error)


def test_a_removed_instance_that_is_lost_is_not_restarted(tmp_path):
    """The load waits for the removed instances. The request of the lost one is executed by the instance that stays."""
    with World(tmp_path, 3) as world, ThreadPoolExecutor(4) as pool:
        assert world.load()[0] == 200
        world.put("busy")
        answers = [pool.submit(world.infer) for _ in range(3)]
        eventually("all execute", lambda: all(world.count(f"executed m_0_{n}") for n in range(3)))
        world.write(1)
        load = pool.submit(world.load)
        world.until_configured(1)
        assert world.names() == {"m_0_0", "m_0_1", "m_0_2"}
        world.kill("m_0_2")
        eventually("the loss is logged", lambda: "it is being removed and is not restarted" in world.server.log_tail())
        world.remove("busy")
        assert [answer.result()[0] for answer in [*answers, load]] == [200] * 4
        assert world.names() == {"m_0_0"}
        assert world.count("started m_0_2") == 1 and world.infer()[0] == 200


def test_an_instance_that_restarts_when_it_is_removed_is_ended_at_once(tmp_path):
    """Even while another removed instance works; an instance that loads its model cannot finish anything."""
    with World(tmp_path, 3) as world, ThreadPoolExecutor(3) as pool:
        assert world.load()[0] == 200
        world.put("busy", "hold m_0_2")
        world.kill("m_0_2")
        eventually("it restarts", lambda: world.count("started m_0_2") == 2)
        answers = [pool.submit(world.infer) for _ in range(2)]
        eventually("the others execute", lambda: world.count("executed m_0_0") and world.count("executed m_0_1"))
        world.write(1)
        load = pool.submit(world.load)
        eventually("it has ended", lambda: world.names() == {"m_0_0", "m_0_1"})
        assert not load.done()
        world.remove("busy")
        assert [answer.result()[0] for answer in [*answers, load]] == [200] * 3
        assert world.names() == {"m_0_0"}
        assert "worker killed" not in world.server.log_tail()


def test_the_memory_of_a_removed_instance_counts_until_its_end(tmp_path):
    """Other models must not get it before."""
    with World(tmp_path, 2, [f"--model-memory-limit={1 << 30}"]) as world, ThreadPoolExecutor(3) as pool:
        assert world.load()[0] == 200
        used = lambda: total(world.server.scrape(), "pharos_model_memory_used_bytes")  # noqa: E731
        world.put("busy")
        answers = [pool.submit(world.infer) for _ in range(2)]
        eventually("both execute", lambda: world.count("executed m_0_0") and world.count("executed m_0_1"))
        world.write(1)
        before = used()
        load = pool.submit(world.load)
        world.until_configured(1)
        assert used() >= 0.9 * before > 0
        world.remove("busy")
        assert [answer.result()[0] for answer in [*answers, load]] == [200] * 3
        eventually("the memory is free", lambda: used() <= 0.7 * before)


@pytest.mark.parametrize("kind", ["unload", "resize", "reload"])
def test_the_exit_waits_for_a_model_that_already_ends(tmp_path, kind):
    """SIGTERM during `finalize` of a worker that no longer serves."""
    with World(tmp_path, 2 if kind == "resize" else 1, end_s=1.0) as world:
        assert world.load()[0] == 200
        if kind == "reload":
            (tmp_path / "models/m/1/model.py").write_text((tmp_path / "models/m/1/model.py").read_text() + "\n")
        world.write(1)
        change = threading.Thread(target=world.unload if kind == "unload" else world.load, daemon=True)
        change.start()
        eventually("it ends", lambda: world.count("ends"))
        world.server.stop()
        change.join()
        assert world.count("ended") == world.count("ends") == (1 if kind == "unload" else 2)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_another_host_policy_starts_another_instance(tmp_path):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    policies = [f"--host-policy={name},cpu-cores={core}-{core}" for name, core in (("a", first), ("b", second))]
    with World(tmp_path, 1, policies) as world:
        affinity = lambda: [os.sched_getaffinity(pid) for pid in world.server.workers()]  # noqa: E731
        for name, core in (("a", first), ("b", second)):
            world.write(1, f'host_policy: "{name}"')
            assert world.load()[0] == 200
            assert affinity() == [{core}]


def test_instances_that_failed_are_not_counted_after_their_end(tmp_path):
    """`pharos_instances` after a change that failed."""
    with World(tmp_path, 1) as world:
        assert world.load()[0] == 200
        world.put("fail m_0_1")
        world.write(2)
        status, answer = world.load()
        assert status == 400 and "there is no licence left" in answer, answer
        states = {dict(labels)["state"]: n for (name, labels), n in world.server.scrape().items() if name == "pharos_instances" and n}
        assert states == {"ready": 1}


def test_a_failed_instance_ends_the_load_while_others_start(tmp_path):
    """The first failure is the answer, not that of the first instance; workers that still load are ended at once."""
    with World(tmp_path, 2, ["--worker-start-timeout-secs=8"]) as world:
        world.put("hold m_0_0", "fail m_0_1")
        status, answer = world.load()
        assert status == 400 and "there is no licence left" in answer, answer
        assert world.names() == set() and "worker killed" not in world.server.log_tail()


def test_a_worker_that_loads_is_ended_at_once(tmp_path):
    """At an unload: it cannot read the request to stop, and has nothing to finish."""
    with World(tmp_path, 1) as world:
        assert world.load()[0] == 200
        world.put("hold m_0_0")
        world.kill("m_0_0")
        eventually("it restarts", lambda: world.count("started m_0_0") == 2)
        world.unload()
        eventually("it is gone", lambda: not world.names())
        assert "worker killed" not in world.server.log_tail()


def test_requests_wait_again_after_an_instance_has_recovered(tmp_path):
    """After three consecutive losses, requests do not wait for an instance. Once it has been ready, they do."""
    with World(tmp_path, 1, ["--worker-max-backoff-secs=1"]) as world, ThreadPoolExecutor(1) as pool:
        assert world.load()[0] == 200
        world.put("fail m_0_0")
        world.kill("m_0_0")
        eventually("requests are refused", lambda: world.infer()[0] == 503)
        world.remove("fail m_0_0")
        eventually("requests succeed", lambda: world.infer()[0] == 200)
        servers = fork_servers(world.server.process.pid)
        assert servers
        # Until the fork server reports the exit status, or a time limit has passed, the loss has no reason.
        for server in servers:
            os.kill(server, signal.SIGSTOP)
        os.kill(world.pid("m_0_0"), signal.SIGKILL)
        eventually("the loss is seen", lambda: world.server.get("/v2/models/m/ready")[0] != 200)
        answer = pool.submit(world.infer)
        pending = lambda: total(world.server.scrape(), "nv_inference_pending_request_count") > 0  # noqa: E731
        eventually("the request waits or is refused", lambda: pending() or answer.done())
        for server in servers:
            os.kill(server, signal.SIGCONT)
        assert answer.result()[0] == 200, answer.result()


def test_a_start_that_does_not_end_stops_neither_limits_nor_the_exit(tmp_path):
    """A stopped fork server: requests wait as long as `--worker-max-wait-secs` permits, and the server exits."""
    with World(tmp_path, 1, ["--worker-max-wait-secs=1"]) as world:
        assert world.load()[0] == 200
        servers = fork_servers(world.server.process.pid)
        assert servers
        for server in servers:
            os.kill(server, signal.SIGSTOP)
        os.kill(world.pid("m_0_0"), signal.SIGKILL)
        status, answer = world.infer()
        assert status == 503 and "--worker-max-wait-secs" in answer["error"], answer
        world.server.stop()
        assert "it did not answer within" not in world.server.log_tail()


def test_an_examination_that_does_not_end_does_not_delay_the_exit(tmp_path):
    """The interpreter of a worker that did not start is examined for up to 30 s."""
    hangs, examined, python = tmp_path / "hangs", tmp_path / "examined", tmp_path / "python3"
    script = f'if [ -e {hangs} ]; then [ "$1" != -c ] && exit 3; touch {examined}; exec sleep 100; fi; exec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with World(tmp_path, 1, ["--worker-fork=false", f"--python={python}"]) as world:
        assert world.load()[0] == 200
        hangs.touch()
        world.kill("m_0_0")
        eventually("the interpreter is examined", examined.exists)
        world.server.stop()
        assert "did not import 'pharos_worker' within" not in world.server.log_tail()


def test_a_corrupt_ring_is_the_reason_of_the_loss(tmp_path):
    """Not how the process ends because of it, if the server finds it. The worker logs it if it finds it first."""
    with World(tmp_path, 1) as world:
        assert world.load()[0] == 200
        world.put("corrupt")
        assert world.infer()[0] == 200
        eventually("a message finds the fault", lambda: world.infer()[0] and "instance lost" in world.server.log_tail())
        (lost,) = [line for line in world.server.log_tail().splitlines() if "instance lost" in line]
        log = world.server.log_tail()
        by_worker = "pharos-worker: the ring of frames is corrupt" in log
        assert (by_worker or "the connection to the worker process was lost: " in lost) and "signal" not in lost, log


def test_a_configuration_that_is_too_long_for_a_worker_is_refused(tmp_path):
    """With the number of bytes, instead of a worker that waits for its model until the start timeout. `metrics.yaml` is part of the
    message."""
    long = f'{CONFIG}parameters {{ key: "long" value {{ string_value: "{"x" * ((64 << 20) - 4096)}" }} }}\n'
    with World(tmp_path, 1, ["--worker-start-timeout-secs=8"], config=long) as world:
        status, answer = world.load()
        assert status == 400 and f"{64 << 20} are allowed" in answer, answer[:500]
