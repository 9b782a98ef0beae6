"""`deploy/Containerfile`: built with podman from the wheel, on a base of Debian that mmdebstrap makes, and run.

The image's command runs in bubblewrap on the image's file system: with its user, variables and arguments, a read-only root and no
capabilities. A container of podman needs rights on limits and control groups that test machines may lack.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy import schemas
from deploy.containers import DEPLOY
from deploy.wheels import NATIVE, packed
from harness.inference import one
from harness.models import write
from harness.ports import free_ports
from harness.server import EXAMPLES, STOP_S, Process, Server, binary, children, command_line, kill_all
from harness.waiting import eventually

FILE = DEPLOY / "Containerfile"
BASE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pharos-container/bookworm-tini.tar"
TOOLS = [name for name in ("podman", "mmdebstrap", "bwrap") if not shutil.which(name)]
LABEL = "org.opencontainers.image."
CONFIG = """backend: "python"
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
ORPHANS = """
import os, subprocess, time
import numpy as np
import triton_python_backend_utils as utils


def remains(pid):
    return os.path.exists(f"/proc/{pid}")


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TritonPythonModel:
    def initialize(self, args):
        shell = subprocess.run(["/bin/sh", "-c", "sleep 0.1 >&2 & echo $!"], stdout=subprocess.PIPE, check=True)
        self.orphan = int(shell.stdout)
        while runs(self.orphan):
            time.sleep(0.01)

    def execute(self, requests):
        out = np.array([remains(self.orphan)], dtype=np.int32)
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", out)]) for _ in requests]
"""
"""A model with a process that has lost its parent and ended. It answers whether the process remains, as a zombie."""


def missing() -> str:
    """Returns why no image can be built; empty if it can."""
    if TOOLS:
        return f"not installed: {', '.join(TOOLS)}"
    if os.geteuid() != 0:
        return "images are built as root"
    return "" if NATIVE.exists() else f"{NATIVE} does not exist: make python-worker builds it"


def run(command: list, limit_s=600) -> str:
    """Runs a program; returns its output."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def base() -> Path:
    """Returns a minimal Debian, which is made once."""
    if not BASE.exists():
        BASE.parent.mkdir(parents=True, exist_ok=True)
        made = BASE.with_suffix(f".{os.getpid()}.tar")
        try:
            run(["mmdebstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv,tini", "bookworm", made])
        except AssertionError as error:
            pytest.skip(f"mmdebstrap cannot make the base: {error}")
        made.rename(BASE)
    return BASE


@pytest.fixture(scope="module")
def podman():
    """Returns a function that runs podman with its own store, whose path must be short."""
    home = Path(tempfile.mkdtemp(prefix="pharos-", dir="/tmp"))
    store = ["--root", home / "root", "--runroot", home / "run", "--storage-driver=overlay", "--cgroup-manager=cgroupfs"]
    works = subprocess.run(list(map(str, ["podman", *store, "info"])), capture_output=True, text=True)
    if works.returncode != 0:
        pytest.skip(f"podman does not work here: {works.stderr.strip()[-300:]}")
    yield lambda *arguments: run(["podman", *store, *arguments])
    for arguments in (["image", "unmount", "--all"], ["rmi", "--all", "--force"]):
        subprocess.run(list(map(str, ["podman", *store, *arguments])), capture_output=True)
    # podman leaves its store mounted on itself.
    subprocess.run(["umount", home / "root/overlay"], capture_output=True)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def images(podman, tmp_path_factory):
    """Builds both images; returns their names."""
    context = tmp_path_factory.mktemp("context")
    packed(context / "wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    run([*command, "--python-version=3.11", "--dest", context / "wheels", "numpy<2.4", "iniconfig"])
    podman("import", base(), "localhost/base:1")
    arguments = {"BASE": "localhost/base:1", "WHEEL": "wheels/*.whl", "EXTRAS": "", "PACKAGES": "iniconfig", "PIP_NO_INDEX": "1"}
    options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    options += ["--isolation=chroot", "--network=host", "--format=docker", f"--file={FILE}"]
    for target in ("slim", "full"):
        podman("build", *options, f"--target={target}", "--tag", f"localhost/{target}:1", context)
    return {target: f"localhost/{target}:1" for target in ("slim", "full")}


class Boxed(Server):
    """The command of an image, in bubblewrap on the image's file system."""

    def __init__(self, folder: Path, root: str, config: dict, models: Path):
        super().__init__(folder, [])
        variables = dict(entry.split("=", 1) for entry in config["Env"])
        user, group = config["User"].split(":")
        self.box = ["bwrap", "--ro-bind", root, "/", "--ro-bind", models, "/mnt/models", "--tmpfs", "/tmp", "--proc", "/proc"]
        self.box += ["--dev", "/dev", "--die-with-parent", "--unshare-pid", "--as-pid-1"]
        self.box += ["--unshare-user", "--uid", user, "--gid", group, "--cap-drop", "ALL", "--clearenv"]
        self.box += [word for name, value in variables.items() for word in ("--setenv", name, value)]
        self.box += ["--chdir", config["WorkingDir"]]
        ports = [argument for argument in self.command[1:] if argument.startswith("--")]
        self.command = list(map(str, [*self.box, *config["Entrypoint"], *config["Cmd"], *ports]))

    def launch(self, **_):
        """Starts the process in the image."""
        with open(self.log_path, "wb") as log:
            self.process = Process(self.command, stdout=log, stderr=log)

    def terminate(self) -> int:
        """Sends SIGTERM to process 1; returns the exit code."""
        (init,) = children(self.process.pid)
        os.kill(init, signal.SIGTERM)
        return self.process.wait(STOP_S)

    def inside(self, *command) -> subprocess.CompletedProcess:
        """Runs another program in the image."""
        return subprocess.run(list(map(str, [*self.box, *command])), capture_output=True, text=True, timeout=60)


@pytest.fixture
def boxed(podman, images, tmp_path):
    """Returns a function that starts the command of an image with models. With `wrong` flags, it does not become ready."""
    started = []

    def begin(target: str, models: Path, *wrong) -> Boxed:
        (found,) = json.loads(podman("image", "inspect", images[target]))
        root = podman("image", "mount", images[target]).strip()
        server = Boxed(tmp_path, root, found["Config"], models)
        started.append(server)
        server.command += wrong
        server.launch()
        if not wrong:
            server.wait_until_ready()
        return server

    yield begin
    kill_all(started)


@pytest.fixture
def models(tmp_path_factory):
    """The example `digits`, readable for other users."""
    folder = tmp_path_factory.mktemp("mounted")
    shutil.copytree(EXAMPLES / "digits", folder / "digits")
    return folder


@pytest.mark.skipif(bool(schemas.missing("hadolint")), reason=schemas.missing("hadolint"))
def test_the_linter_finds_nothing(tmp_path):
    assert schemas.hadolint(FILE) == ""
    (tmp_path / "Containerfile").write_text(FILE.read_text().replace("--no-install-recommends", ""))
    assert "DL3015" in schemas.hadolint(tmp_path / "Containerfile")


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("target", ["slim", "full"])
def test_the_image_serves_without_rights(podman, images, boxed, models, target):
    """As user 1000 with a read-only root; `pharos health` is the health check."""
    (found,) = json.loads(podman("image", "inspect", images[target]))
    config = found["Config"]
    assert config["User"] == "1000:1000" and config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "/usr/bin/pharos"]
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp", "8082/tcp"}
    assert config["Labels"][f"{LABEL}title"] == "Pharos" and config["Labels"][f"{LABEL}licenses"] == "Apache-2.0"
    check = found["Healthcheck"]["Test"]
    assert check == ["CMD", "/usr/bin/pharos", "health"]
    server = boxed(target, models)
    assert set(server.index()) == {"digits"}
    assert server.inside(*check[1:], server.http).returncode == 0
    unused = server.inside(*check[1:], f"127.0.0.1:{free_ports(1)[0]}")
    assert unused.returncode == 1 and "is not ready" in unused.stderr
    written = server.inside("/usr/bin/touch", "/usr/bin/x")
    assert "Read-only file system" in written.stderr
    assert server.inside("/usr/bin/id", "-u").stdout == "1000\n"
    python = server.inside("/opt/pharos/bin/python3", "-c", "import pharos_worker, numpy, iniconfig; print(pharos_worker.__version__)")
    assert (python.returncode == 0) == (target == "full"), python.stderr
    (init,) = children(server.process.pid)
    assert [command_line(pid)[0] for pid in (init, *children(init))] == [b"/usr/bin/tini", b"/usr/bin/pharos"]
    assert server.terminate() == 0, server.log_tail()


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_process_1_of_the_image_reaps_processes(boxed, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("orphans"), "orphans", CONFIG)
    (folder / "orphans/1/model.py").write_text(ORPHANS)
    server = boxed("full", folder)

    def remains() -> bool:
        status, answer = server.infer("orphans", one("INT32", [1], [0]))
        assert status == 200, answer
        return answer["outputs"][0]["data"] == [1]

    eventually("the process is reaped", lambda: not remains())
    assert server.terminate() == 0, server.log_tail()


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_exit_code_of_the_server_is_that_of_the_container(boxed, tmp_path_factory):
    server = boxed("slim", tmp_path_factory.mktemp("nothing"), "--no-such-flag")
    assert server.process.wait(STOP_S) == 2 and "--no-such-flag" in server.log_path.read_text()
