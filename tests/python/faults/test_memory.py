"""A model that uses up the memory of the server's control group: the kernel ends its process, and nothing else."""

import os
from pathlib import Path

import pytest

from harness.inference import one
from harness.models import copy_models, write
from harness.server import Server
from harness.waiting import eventually
from harness.wire import tensor

LIMIT = 400 << 20
"""Bytes of memory for the server and its workers."""
GREEDY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        sizes = [int(pb_utils.get_input_tensor_by_name(request, "MIB").as_numpy()[0]) for request in requests]
        used = [np.ones(size << 20, np.uint8).nbytes >> 20 for size in sizes]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("USED", np.array([mib], np.int32))]) for mib in used]
"""
CONFIG = """
backend: "python"
input { name: "MIB" data_type: TYPE_INT32 dims: 1 }
output { name: "USED" data_type: TYPE_INT32 dims: 1 }
"""


def home() -> tuple:
    """Returns the directory of this process in the hierarchy of memory, and the name of the file with the limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
        if not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup" + path), "memory.max"
    return None, ""


def missing() -> str:
    """Returns why no group with a limit can be made; empty if it can."""
    parent, limit = home()
    if parent is None:
        return "no control groups for memory"
    group = parent / f"pharos-{os.getpid()}"
    try:
        group.mkdir()
        try:
            (group / limit).write_text(str(LIMIT))
        finally:
            group.rmdir()
    except OSError as error:
        return f"no control group with a limit can be made: {error}"
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


class Limited(Server):
    """A server in a new control group."""

    def __init__(self, folder: Path, repository: Path):
        super().__init__(folder, [repository])
        parent, limit = home()
        self.group = parent / f"pharos-{os.getpid()}-{self.http_port}"
        self.group.mkdir()
        (self.group / limit).write_text(str(LIMIT))
        self.command = ["sh", "-e", "-c", f'echo $$ > {self.group}/cgroup.procs\nexec "$@"', "sh", *self.command]

    def __exit__(self, *failure):
        super().__exit__(*failure)
        eventually("the group is empty", lambda: not (self.group / "cgroup.procs").read_text())
        self.group.rmdir()


def adjusted(pid: int) -> int:
    """Returns how much earlier than others the kernel ends a process."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def used(server, mib: int) -> tuple:
    """Makes the model use memory; returns the status and the answer."""
    return server.infer("greedy", {"inputs": [tensor("MIB", "INT32", [1], [mib])]})


def test_a_model_that_uses_up_the_memory_loses_its_process(tmp_path):
    """Its request fails, the other model serves, and the process is started again. Workers are ended before the server."""
    models = copy_models(tmp_path / "models", ["identity_fp32"])
    write(models, "greedy", CONFIG)
    (models / "greedy/1/model.py").write_text(GREEDY)
    with Limited(tmp_path, models) as server:
        first = min(1000, adjusted(server.process.pid) + 300)
        assert {adjusted(worker) for worker in server.workers()} == {first}
        assert used(server, 8)[0] == 200
        for _ in range(3):
            status, answer = used(server, LIMIT >> 20)
            assert status >= 500, answer
            assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
            eventually("the model serves again", lambda: used(server, 8)[0] == 200)
        assert "killed by signal 9" in server.log.read_text()
