"""Limits of workers with real control groups. Runs in a guest, as root (`test_worker_limits.py`)."""

import json
import subprocess
from pathlib import Path

import pytest

from harness.inference import one
from harness.models import copy_models, write
from harness.processes import worker_model
from harness.server import Server, alive, fork_servers
from harness.waiting import DEADLINE_S, eventually
from harness.wire import tensor
from security.other_user import FLAG, GROUP, USER, identity, reachable

GROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20
CODE = """
import json
import subprocess
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def use(resource, amount):
    if resource == "memory":
        return np.ones(amount << 20, np.uint8).nbytes
    if resource == "processes":
        return len([subprocess.Popen(["sleep", "100000"]) for _ in range(amount)])
    begun = time.process_time()
    while time.process_time() - begun < amount / 1000:
        pass
    return amount


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        kept = json.loads(config.as_dict()["parameters"].get("complete_mib", {"string_value": "0"})["string_value"])
        use("memory", kept)
        return config

    def execute(self, requests):
        answers = []
        for request in requests:
            resource = pb_utils.get_input_tensor_by_name(request, "RESOURCE").as_numpy()[0].decode()
            amount = int(pb_utils.get_input_tensor_by_name(request, "AMOUNT").as_numpy()[0])
            used = np.array([use(resource, amount)], np.int64)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("USED", used)]))
        return answers
"""
CONFIG = """
backend: "python"
input [ {{ name: "RESOURCE" data_type: TYPE_STRING dims: 1 }}, {{ name: "AMOUNT" data_type: TYPE_INT32 dims: 1 }} ]
output {{ name: "USED" data_type: TYPE_INT64 dims: 1 }}
{}
"""


@pytest.fixture(scope="module", autouse=True)
def controllers():
    """Enables the controllers for the groups of the servers."""
    (GROUPS / "cgroup.subtree_control").write_text("+memory +pids +cpu")


class Service(Server):
    """A server in a new control group, as systemd makes one for a service with `Delegate=`. The command `through` starts it."""

    def __init__(self, folder: Path, repository: Path, *options, through=()):
        super().__init__(folder, [repository], options)
        self.group = GROUPS / f"service-{self.http_port}"
        self.group.mkdir()
        self.command = ["sh", "-e", "-c", f'echo $$ > {self.group}/cgroup.procs\nexec "$@"', "sh", *through, *self.command]

    def worker(self, model: str) -> int:
        """Returns the process id of a model's worker."""
        pids = [pid for pid in self.workers() if worker_model(pid) == model]
        assert len(pids) == 1, pids
        return pids[0]

    def groups(self) -> set:
        """Returns the names of the groups below that of the service."""
        return {path.name for path in self.group.iterdir() if path.is_dir()}

    def load(self, model: str) -> tuple:
        """Loads a model by request; returns the status and the text."""
        return self.ask("POST", f"/v2/repository/models/{model}/load", b"")


def repository(folder: Path, **parameters) -> Path:
    """Writes the model `user`, which uses resources, with these parameters, and an innocent one."""
    models = copy_models(folder / "models", ["identity_fp32"])
    return with_model(models, "user", **parameters)


def with_model(models: Path, name: str, **parameters) -> Path:
    """Adds a model that uses resources."""
    texts = (f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items())
    write(models, name, CONFIG.format("\n".join(texts)))
    (models / name / "1/model.py").write_text(CODE)
    return models


def group_of(pid: int) -> Path:
    """Returns the control group of a process."""
    return GROUPS / Path(f"/proc/{pid}/cgroup").read_text().strip().removeprefix("0::/")


def use(server, resource: str, amount: int, model="user") -> tuple:
    """Makes the model use a resource; returns the status and the answer."""
    inputs = [tensor("RESOURCE", "BYTES", [1], [resource]), tensor("AMOUNT", "INT32", [1], [amount])]
    return server.infer(model, {"inputs": inputs})


def serves(server) -> bool:
    """Returns whether both models serve."""
    return server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200 and use(server, "memory", 1)[0] == 200


@pytest.mark.parametrize("forks", ["true", "false"])
def test_each_worker_has_a_group_with_the_limits(tmp_path, forks):
    options = ["--worker-memory-limit=314572800", "--worker-task-limit=200", "--worker-cpu-limit=0.5", f"--worker-fork={forks}"]
    with Service(tmp_path, repository(tmp_path), *options) as server:
        assert serves(server)
        own = server.process.pid
        assert group_of(own) == server.group / f"pharos-{own}-server"
        groups = [group_of(pid) for pid in server.workers()]
        assert len(set(groups)) == 2
        for group in groups:
            assert group.parent == server.group and group.name.startswith(f"pharos-{own}-worker-"), group
            names = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max")
            values = {name: (group / name).read_text().strip() for name in names if (group / name).exists()}
            assert values.pop("memory.swap.max", "0") == "0"
            expected = {"memory.max": "314572800", "memory.oom.group": "1", "pids.max": "200", "cpu.max": "50000 100000"}
            assert values == expected
        descriptors = {Path(f"/proc/{server.worker('user')}/fd/{number}") for number in range(10, 20)}
        assert not [path for path in descriptors if path.exists() and "cgroup" in str(path.readlink())]
    assert server.groups() == {f"pharos-{own}-server"}
    # A server that ended by SIGKILL leaves groups; the next one removes them. No process can enter a group that has controllers for
    # its children; systemd and containers make a new one.
    (server.group / f"pharos-{own}-worker-77").mkdir()
    (server.group / "cgroup.subtree_control").write_text("-memory -pids -cpu")
    server.launch()
    server.wait_until_ready()
    assert not [name for name in server.groups() if name.startswith(f"pharos-{own}-")]
    server.stop()


def test_workers_of_another_user_have_groups_that_they_cannot_change(open_path):
    mounts, environment = reachable(open_path)
    options = [FLAG, f"--worker-memory-limit={300 * MIB}"]
    through = ["unshare", "--mount", "sh", "-e", "-c", f'{mounts}\nexec "$@"', "sh"]
    server = Service(open_path, repository(open_path), *options, through=through)
    server.environment = environment
    with server:
        assert serves(server)
        assert not fork_servers(server.process.pid)
        worker = server.worker("user")
        group = group_of(worker)
        assert identity(worker) == (USER, GROUP, [GROUP], {"0" * 16}) and group.name.startswith("pharos-")
        for file, text in (("memory.max", "max"), ("cgroup.procs", "0"), ("../cgroup.procs", "0"), ("../../cgroup.procs", "0")):
            write = ["setpriv", f"--reuid={USER}", f"--regid={GROUP}", "--clear-groups", "sh", "-c", f"echo {text} > {group}/{file}"]
            done = subprocess.run(write, capture_output=True, text=True)
            assert done.returncode != 0 and "Permission denied" in done.stderr, (file, done)


def test_a_worker_that_exceeds_its_memory_is_restarted(tmp_path):
    with Service(tmp_path, repository(tmp_path), f"--worker-memory-limit={300 * MIB}") as server:
        assert use(server, "memory", 100)[0] == 200
        before = group_of(server.worker("user"))
        status, answer = use(server, "memory", 400)
        assert status >= 500, answer
        eventually("both models serve", lambda: serves(server))
        assert f"killed by signal 9: it exceeded its memory limit of {300 * MIB} bytes" in server.log.read_text()
        eventually("its group is removed", lambda: not before.exists())
        assert group_of(server.worker("user")).exists()


def test_processes_are_limited_and_end_with_their_worker(tmp_path):
    options = ["--worker-task-limit=60", "--model-control-mode=explicit", "--load-model=user", "--load-model=identity_fp32"]
    with Service(tmp_path, repository(tmp_path), *options) as server:
        assert use(server, "processes", 20)[0] == 200
        group = group_of(server.worker("user"))
        members = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        assert len(members) == 21
        status, answer = use(server, "processes", 60)
        assert status == 500 and "Resource temporarily unavailable" in answer["error"], answer
        assert serves(server)
        assert server.ask("POST", "/v2/repository/models/user/unload", b"")[0] == 200
        eventually("the group is removed", lambda: not group.exists())
        assert not [pid for pid in members if alive(pid)]


def test_processor_time_is_limited(tmp_path):
    with Service(tmp_path, repository(tmp_path, cpu_limit="0.1")) as server:
        assert use(server, "processor", 100)[0] == 200
        group = group_of(server.worker("user"))
        assert (group / "cpu.max").read_text() == "10000 100000\n"
        statistics = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        assert int(statistics["nr_throttled"]) > 0
        assert not (group / "memory.max").exists(), "the controller of memory is not needed"


def test_parameters_lower_the_limits(tmp_path):
    models = with_model(repository(tmp_path, memory_limit=200 * MIB), "greedy", memory_limit=301 * MIB)
    with_model(models, "wrong", task_limit="many")
    options = [f"--worker-memory-limit={300 * MIB}", "--model-control-mode=explicit"]
    with Service(tmp_path, models, *options) as server:
        assert server.load("user")[0] == 200 and server.load("identity_fp32")[0] == 200
        limits = [int((group_of(server.worker(model)) / "memory.max").read_text()) // MIB for model in ("user", "identity_fp32")]
        assert limits == [200, 300]
        status, text = server.load("greedy")
        assert status == 400 and "'memory_limit' is '315621376'; allowed is at most 314572800" in json.loads(text)["error"], text
        status, text = server.load("wrong")
        assert status == 400 and "'task_limit' is 'many'; allowed is a number" in json.loads(text)["error"], text


def test_a_server_without_limits_moves_when_a_model_has_one(tmp_path):
    options = ["--model-control-mode=explicit", "--load-model=identity_fp32"]
    with Service(tmp_path, repository(tmp_path, memory_limit=200 * MIB), *options) as server:
        other = server.worker("identity_fp32")
        assert group_of(server.process.pid) == group_of(other) == server.group and server.groups() == set()
        assert server.load("user")[0] == 200
        own = server.group / f"pharos-{server.process.pid}-server"
        assert group_of(server.process.pid) == group_of(other) == own
        assert group_of(server.worker("user")).parent == server.group
        assert serves(server)


def test_code_that_completes_a_configuration_is_limited(tmp_path):
    models = repository(tmp_path, memory_limit=200 * MIB, complete_mib=400)
    with Service(tmp_path, models, "--model-control-mode=explicit") as server:
        status, text = server.load("user")
        error = json.loads(text)["error"]
        assert status == 400 and "auto-complete" in error and "exceeded its memory limit" in error, text
        eventually("its group is removed", lambda: server.groups() == {f"pharos-{server.process.pid}-server"})


def ended(server) -> str:
    """Starts a server that does not serve; returns its output."""
    server.launch()
    assert server.process.wait(DEADLINE_S) == 1
    return server.log_path.read_text()


def test_limits_that_cannot_be_enforced_prevent_the_start(tmp_path):
    models, limit = repository(tmp_path), f"--worker-memory-limit={300 * MIB}"
    shared = Service(tmp_path, models, limit)
    other = subprocess.Popen(["sh", "-c", f"echo $$ > {shared.group}/cgroup.procs; exec sleep 1000"])
    try:
        eventually("another process is in the group", lambda: (shared.group / "cgroup.procs").read_text())
        text = ended(shared)
        assert "--worker-memory-limit" in text and "contains processes other than this server" in text, text
        assert shared.groups() == set()
    finally:
        other.kill()
        other.wait()
    through = ["unshare", "--mount", "sh", "-e", "-c", f'mount -o bind,remount,ro {GROUPS}\nexec "$@"', "sh"]
    text = ended(Service(tmp_path, models, limit, through=through))
    assert "Read-only file system" in text and "Delegate=" in text, text
    text = ended(Server(tmp_path, [models], [limit, f"--cgroup-root={tmp_path}"]))
    assert "is not a control group of version 2" in text, text
