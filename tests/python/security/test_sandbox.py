"""What a hostile model can reach: variables, files, processes, sockets and system calls, with and without `--worker-sandbox`."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import worker_model
from harness.server import EXAMPLES, Server, binary
from harness.waiting import eventually
from security.hostile import CODE, attack, write_environment, write_model

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the attacks need root, which could do most harm")


@pytest.fixture(scope="module", autouse=True)
def kernel():
    """Skips the tests on a kernel that cannot make a whole sandbox."""
    worker = binary().with_name("pharos-worker")
    lacking = subprocess.run([worker, "--check-sandbox"], capture_output=True, text=True, check=True).stdout
    if lacking:
        pytest.skip(f"this kernel cannot make a whole sandbox: {lacking}")


AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
VARIABLES = {
    "AWS_SECRET_ACCESS_KEY": "secret",
    "PHAROS_HTTP_RESTRICTED_API": "trace:admin-key=secret",
    "HF_TOKEN": "secret",
    "HF_HOME": "/data/models",
    "MY_SETTING": "7",
}


def started(tmp_path, *options, parameter="") -> Server:
    """Returns a server with the hostile model and an innocent one."""
    repository = tmp_path / "models"
    write_model(repository, "hostile", parameter)
    write_model(repository, "innocent")
    server = Server(tmp_path, [repository], options)
    server.environment = dict(VARIABLES)
    return server


def worker(server, model: str) -> int:
    """Returns the process id of a model's worker."""
    pids = [pid for pid in server.workers() if worker_model(pid) == model]
    assert len(pids) == 1, pids
    return pids[0]


def test_workers_inherit_no_credentials(tmp_path):
    with started(tmp_path) as server:
        environment = json.loads(attack(server, "environment"))
        assert environment["HF_HOME"] == "/data/models" and "PATH" in environment and "PHAROS_BIN" not in environment
        assert not {"AWS_SECRET_ACCESS_KEY", "PHAROS_HTTP_RESTRICTED_API", "HF_TOKEN", "MY_SETTING"} & set(environment)
        # Neither do they inherit descriptors of the server or of other workers.
        opened = json.loads(attack(server, "descriptors"))
        assert set(opened) <= {str(number) for number in range(12)}, opened
        assert attack(server, "new privileges") == "1"
    with started(tmp_path / "named", "--worker-variables=MY_.*|HF_TOKEN", "--worker-hidden-variables=HF_.*") as server:
        environment = json.loads(attack(server, "environment"))
        assert environment["MY_SETTING"] == "7" and "HF_TOKEN" not in environment and "HF_HOME" not in environment


def test_the_server_is_closed_to_processes_of_its_user(open_path):
    # Root may read every process, so that the server runs as another user here.
    programs = open_path / "programs"
    programs.mkdir()
    for name in ("pharos", "pharos-worker"):
        (programs / name).write_bytes(binary().with_name(name).read_bytes())
        (programs / name).chmod(0o755)
    home = open_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    (open_path / "models").mkdir()
    server = Server(open_path, [open_path / "models"])
    server.command[0] = str(programs / "pharos")
    server.command = [*AS_NOBODY, *server.command]
    server.environment = {"HOME": str(home), "PHAROS_METRICS_LOCATION": str(home / "logs"), "SECRET": "value"}
    with server:
        read = [*AS_NOBODY, "cat", f"/proc/{server.process.pid}/environ"]
        result = subprocess.run(read, capture_output=True, text=True)
        assert result.returncode != 0 and "Permission denied" in result.stderr and "SECRET" not in result.stdout
        assert server.get("/v2/health/ready")[0] == 200 and "pharos_" in server.get("/metrics", server.metrics)[1]


REFUSED = {
    ("read", "/etc/shadow"): "PermissionError",
    ("read", "/root"): "PermissionError",
    ("read", "/proc/{server}/environ"): "PermissionError",
    ("read", "/proc/{innocent}/environ"): "PermissionError",
    ("read", "/proc/{innocent}/mem"): "PermissionError",
    ("link", "/proc/{innocent}/fd/0"): "PermissionError",
    ("list", "/dev/shm"): "PermissionError",
    ("list", "{folder}"): "PermissionError",
    ("read", "{innocent_code}"): "PermissionError",
    ("write", "{folder}/new"): "PermissionError",
    ("write", "{code}"): "PermissionError",
    ("write", "/dev/shm/new"): "PermissionError",
    ("truncate", "{code}"): "PermissionError",
    ("kill", "{innocent}"): "PermissionError",
    ("kill", "{server}"): "PermissionError",
    ("ptrace", "{innocent}"): "PermissionError",
    ("read memory", "{innocent}"): "PermissionError",
    ("unshare", ""): "PermissionError",
    ("io_uring", ""): "PermissionError",
    ("connect", "{port}"): "PermissionError",
    ("abstract socket", ""): "PermissionError",
    ("limit files", "{innocent}"): "PermissionError",
    ("priority of the user", ""): "PermissionError",
    ("datagram", "{datagram}"): "PermissionError",
    ("system v memory", ""): "PermissionError",
    ("change mode", "{innocent_code}"): "PermissionError",
    ("watch", "{folder}"): "PermissionError",
    ("type into terminal", ""): "PermissionError",
    ("read", "/etc/ssl/private"): "PermissionError",
    ("write", "/proc/sys/kernel/hostname"): "PermissionError",
    ("write", "/proc/self/oom_score_adj"): "PermissionError",
    ("write", "/proc/{innocent}/task/{innocent}/oom_score_adj"): "PermissionError",
}
"""Each attack, and the error that a sandbox gives to it."""
GROUPS = next((path for path in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")) if (path / "cgroup.procs").exists()), None)
"""The file system of control groups of version 2, if there is one."""
if GROUPS and os.access(GROUPS / "cgroup.procs", os.W_OK):
    REFUSED["enter control group", "{group}"] = "PermissionError"

PERMITTED = {
    ("read", "{code}"): "done",
    ("read", "/proc/cpuinfo"): "done",
    ("write", "/dev/null"): "done",
    ("temporary file", ""): "done",
    ("child process", ""): "done",
    ("threads", ""): "done",
    ("name a thread", ""): "done",
    ("socket pair", ""): "done",
    ("numpy", ""): "done",
    ("copy file", ""): "done",
}


def targets(server, tmp_path) -> dict:
    """Returns the values in the names of attacks."""
    code = tmp_path / "models/hostile/1/model.py"
    group = re.search(r"^0::(.*)", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    return {
        "group": f"{GROUPS}{group[1]}" if group else "",
        "server": server.process.pid,
        "innocent": worker(server, "innocent"),
        "folder": tmp_path,
        "code": code,
        "innocent_code": tmp_path / "models/innocent/1/model.py",
        "port": server.http_port,
        "datagram": tmp_path / "datagram",
    }


def outcomes(server, attacks, values, model="hostile") -> dict:
    """Returns the result of each attack; files that were read count as `done`."""
    found = {}
    for kind, target in attacks:
        found[kind, target] = attack(server, kind, target.format(**values), model)
    return found


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_sandbox_stops_a_hostile_model(tmp_path, mode):
    with started(tmp_path, f"--worker-sandbox={mode}") as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        values = targets(server, tmp_path)
        datagrams.bind(str(values["datagram"]))
        expected = REFUSED | PERMITTED
        assert outcomes(server, expected, values) == expected
        # The directory for temporary files is removed when the process ends.
        directory = Path(attack(server, "temporary directory"))
        assert attack(server, "deep directories") == "done"
        assert directory.is_dir() and directory.parent.stat().st_mode & 0o777 == 0o700
        assert not (tmp_path / "new").exists() and CODE.read_text() == values["code"].read_text()
        os.kill(worker(server, "hostile"), signal.SIGKILL)
        eventually("the temporary files are removed", lambda: not directory.parent.exists())
        eventually("the model is back", lambda: server.get("/v2/models/hostile/ready")[0] == 200)
        last = Path(attack(server, "temporary directory"))
    assert not last.exists()


def test_threads_can_be_named_after_the_kernel_has_emptied_its_caches(tmp_path):
    """The permission is one for a directory of `/proc`, which the kernel creates again if it was removed from the cache."""
    with started(tmp_path, "--worker-sandbox=on") as server:
        Path("/proc/sys/vm/drop_caches").write_text("2")
        assert attack(server, "name a thread") == "done"


SEQUENCED = """
import errno, os, socket, sys
def tried(work):
    try:
        work()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
kinds = {name: tried(lambda: socket.socket(socket.AF_UNIX, getattr(socket, name)).close()) for name in
         ("SOCK_SEQPACKET", "SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW")}
kinds["AF_INET"] = tried(lambda: socket.socket().close())
if kinds["SOCK_SEQPACKET"] == "done":
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kinds["listen"] = tried(lambda: (listener.bind(chr(0) + f"pharos-test-{os.getpid()}"), listener.listen()))
    kinds["connect"] = tried(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1]))
print(kinds)
"""


@pytest.mark.parametrize("options", [(), ("--cuda",), ("--cuda", "--network")])
def test_cuda_gets_the_socket_without_which_it_does_not_start(tmp_path, options):
    """The worker's executable gets the option on machines with NVIDIA's devices. CUDA listens on the socket; without the permission
    for a network, it cannot be connected to others."""
    system = [f"--read={path}" for path in ("/bin", "/lib", "/lib64", "/usr", "/proc", sys.prefix, sys.base_prefix)]
    sandbox = [binary().with_name("pharos-worker"), "--sandbox", *options, *(part for one in system for part in one.split("="))]
    path = str(tmp_path / "service")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as service:
        service.bind(path)
        service.listen()
        printed = subprocess.run([*sandbox, "--", sys.executable, "-c", SEQUENCED, path], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    refused = dict.fromkeys(["SOCK_SEQPACKET", "SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW", "AF_INET"], "EACCES")
    if options:
        refused |= {"SOCK_SEQPACKET": "done", "listen": "done", "connect": "EACCES"}
    if "--network" in options:
        refused |= {"AF_INET": "done", "connect": "done"}
    assert ast.literal_eval(printed.stdout) == refused


def test_compiled_code_is_kept_in_the_directory_for_temporary_files(tmp_path):
    """Libraries that could write their caches only in the home directory, such as CuPy's, would fail. Variables of the server
    remain."""
    caches = ("CUDA_CACHE_PATH", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
    server = started(tmp_path, "--worker-sandbox=auto")
    server.environment["CUDA_CACHE_PATH"] = "/data/cuda"
    with server:
        environment = json.loads(attack(server, "environment"))
        directory = attack(server, "temporary directory")
    assert environment["CUDA_CACHE_PATH"] == "/data/cuda"
    assert [name for name in caches[1:] if not environment[name].startswith(f"{directory}/")] == []
    with started(tmp_path / "without") as server:
        assert not set(caches) & set(json.loads(attack(server, "environment")))


def test_without_a_sandbox_the_attacks_succeed(tmp_path):
    """Shows that the attacks work where nothing prevents them."""
    with started(tmp_path) as server:
        values = targets(server, tmp_path)
        harmful = ("kill", "ptrace", "read memory", "unshare", "io_uring", "truncate", "limit files", "type into terminal", "priority of the user")
        attacks = [key for key in REFUSED if key[0] not in harmful and key not in (("write", "{code}"), ("read", "/etc/ssl/private"))]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
            datagrams.bind(str(values["datagram"]))
            found = outcomes(server, attacks, values)
        assert set(found.values()) == {"done"}, found
        Path("/dev/shm/new").unlink()


def test_models_choose_their_sandbox_within_the_flag(tmp_path):
    with started(tmp_path, parameter="on") as server:
        values = targets(server, tmp_path)
        assert attack(server, "read", "/etc/shadow") == "PermissionError"
        assert attack(server, "read", "/etc/shadow", "innocent") == "done"
    with started(tmp_path / "network", "--worker-sandbox=on", parameter="network") as server:
        assert attack(server, "connect", server.http_port) == "done"
        assert attack(server, "unix socket") == "PermissionError"
        assert attack(server, "read", "/etc/shadow") == "PermissionError"
        assert attack(server, "connect", values["port"], "innocent") == "PermissionError"
    with started(tmp_path / "off", "--worker-sandbox=auto", parameter="off") as server:
        assert attack(server, "read", "/etc/shadow") == "done"
    with started(tmp_path / "refused", "--worker-sandbox=on", "--exit-on-error=false", "--strict-readiness=false", parameter="off") as server:
        reason = server.index()["hostile"][0]["reason"]
        assert "its parameter 'sandbox' is 'off', which --worker-sandbox=on does not allow" in reason, reason
        assert attack(server, "read", "/etc/shadow", "innocent") == "PermissionError"


def test_further_paths_are_permitted(tmp_path):
    data, cache = tmp_path / "data", tmp_path / "cache"
    for folder in (data, cache):
        folder.mkdir()
        (folder / "file").write_text("x")
    options = [f"--worker-sandbox-read={data}", f"--worker-sandbox-write={cache}"]
    with started(tmp_path, "--worker-sandbox=on", *options) as server:
        found = {
            (kind, folder.name): attack(server, kind, folder / "file") for kind in ("read", "write") for folder in (data, cache)
        }
    assert found.pop(("write", "data")) == "PermissionError"
    assert set(found.values()) == {"done"}, found


def test_other_backends_run_in_a_sandbox(tmp_path):
    """ONNX Runtime or the embedded runtime, `builtin`, and an ensemble."""
    with Server(tmp_path, [EXAMPLES], ["--worker-sandbox=on"]) as server:
        assert {entry["state"] for entries in server.index().values() for entry in entries} == {"READY"}
        image = {"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": [0.0] * 64}
        status, answer = server.infer("digits", {"inputs": [image]})
        assert status == 200 and len(answer["outputs"]) == 2, answer


def test_code_of_an_environment_runs_in_a_sandbox(tmp_path):
    """The script `conda-unpack` of an archive, which runs before the model is loaded."""
    repository = tmp_path / "models"
    write_model(repository, "hostile")
    script = (
        "open(home + '/relocated', 'w').close()\n"
        "try: open('/etc/shadow')\n"
        "except PermissionError: sys.exit('the script was restricted, TOKEN ' + os.environ.get('HF_TOKEN', 'hidden'))\n"
    )
    write_environment(repository, tmp_path, script)
    options = ["--worker-sandbox=on", "--exit-on-error=false", "--strict-readiness=false"]
    server = Server(tmp_path, [repository], [*options, f"--environment-cache-directory={tmp_path / 'environments'}"])
    server.environment = dict(VARIABLES)
    with server:
        reason = server.index()["hostile"][0]["reason"]
        assert "the script was restricted, TOKEN hidden" in reason, reason


@pytest.mark.parametrize(
    "option, code, text",
    [
        ("--worker-sandbox=yes", 2, "allowed are off, uploads, auto and on"),
        ("--worker-sandbox-write=/nowhere", 1, "--worker-sandbox-write: '/nowhere' cannot be permitted: No such file"),
    ],
)
def test_invalid_options_are_refused(tmp_path, option, code, text):
    (tmp_path / "models").mkdir()
    result = subprocess.run([binary(), f"--model-repository={tmp_path / 'models'}", option], capture_output=True, text=True)
    assert result.returncode == code and text in result.stderr, result.stderr


def test_the_answer_of_auto_complete_may_be_anything(tmp_path):
    """A pipe, or a link to a file of the server, in place of the answer: the model fails, and the server continues."""
    code = "import os, tempfile\nclass TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n        {}\n        os._exit(0)\n"
    answers = {"pipe": "os.mkfifo(tempfile.gettempdir() + '/answer.json')", "link": "os.symlink('/etc/hosts', tempfile.gettempdir() + '/answer.json')"}
    for name, line in answers.items():
        directory = tmp_path / "models" / name / "1"
        directory.mkdir(parents=True)
        (directory / "model.py").write_text(code.format(line))
    options = ["--worker-sandbox=on", "--exit-on-error=false", "--strict-readiness=false"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        reasons = {name: entries[0]["reason"] for name, entries in server.index().items()}
    assert set(reasons) == set(answers) and all("its answer cannot be read" in reason for reason in reasons.values()), reasons
