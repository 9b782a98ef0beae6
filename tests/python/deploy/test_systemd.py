"""`deploy/systemd/pharos.service`: systemd's own checks, and the messages of `Type=notify`."""

import fnmatch
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from deploy.containers import DEPLOY, EXIT_STEPS_S, default, help_text
from harness.models import copy_models
from harness.server import Server
from harness.waiting import eventually

UNIT = DEPLOY / "systemd/pharos.service"
GUIDE = DEPLOY.parent / "docs/src/guides/production.md"
UNITS = Path("/usr/lib/systemd/system")
needs_systemd = pytest.mark.skipif(not (shutil.which("systemd-analyze") and UNITS.is_dir()), reason="systemd-analyze is not installed")


def setting(name: str) -> str:
    """Returns the only value of a setting of the unit."""
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.M)
    return value


def duration(text: str) -> float:
    """Returns a duration of a unit in seconds."""
    number, unit = re.fullmatch(r"(\d+)(s|min)", text).groups()
    return int(number) * {"s": 1, "min": 60}[unit]


@pytest.fixture
def root(tmp_path):
    """A root directory with the units of this system, the unit, and the programs that it starts."""
    folder = tmp_path / "root"
    for program in re.findall(r"^Exec\w+=(\S+)", UNIT.read_text(), re.M):
        path = folder / program.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
    (folder / "etc/systemd/system").mkdir(parents=True)
    shutil.copytree(UNITS, folder / "usr/lib/systemd/system", symlinks=True)
    (folder / "lib").symlink_to("usr/lib")
    return folder


def analyze(root: Path, text: str, *command) -> subprocess.CompletedProcess:
    """Runs systemd-analyze on a unit with this text."""
    (root / "etc/systemd/system/pharos.service").write_text(text)
    command = ["systemd-analyze", f"--root={root}", *command, "pharos.service"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@needs_systemd
def test_systemd_accepts_the_unit(root):
    done = analyze(root, UNIT.read_text(), "verify")
    assert (done.returncode, done.stderr) == (0, "")
    unknown = analyze(root, UNIT.read_text().replace("NoNewPrivileges=", "NoNewPrivilege="), "verify")
    assert "Unknown key" in unknown.stderr


@needs_systemd
def test_the_service_is_confined(root):
    """systemd rates the exposure from 0 to 10; below 2 is its best class with network access."""
    limit = ["security", "--offline=true", "--threshold=20"]
    assert analyze(root, UNIT.read_text(), *limit).returncode == 0
    assert analyze(root, UNIT.read_text().replace("ProtectSystem=strict", "").replace("DynamicUser=yes", ""), *limit).returncode


def test_the_drop_in_for_gpus_permits_their_devices():
    """The patterns match the groups in `/proc/devices` of drivers before and since 550, and no others."""
    found = re.findall(r"DeviceAllow=char-(\S+) rw\b", GUIDE.read_text() + UNIT.read_text())
    assert len(found) == 2, found
    for pattern in found:
        for name in ("nvidia-frontend", "nvidia", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
            assert fnmatch.fnmatch(name, pattern), (name, pattern)
        assert not any(fnmatch.fnmatch(name, pattern) for name in ("mem", "input", "drm", "hidraw"))


@needs_systemd
def test_systemd_accepts_the_files_for_gpus(root):
    creates, drop_in = (found for found in re.findall(r"```ini\n(.*?)```", GUIDE.read_text(), re.S) if "GPU" in found or "nvidia" in found)
    units = root / "etc/systemd/system"
    for program in re.findall(r"^ExecStart=(\S+)", creates, re.M):
        (root / program.removeprefix("/")).touch(0o755)
    (units / "pharos-gpus.service").write_text(creates)
    (units / "pharos.service.d").mkdir()
    (units / "pharos.service.d/gpus.conf").write_text(drop_in)
    done = analyze(root, UNIT.read_text(), "verify")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_timeouts_cover_the_steps_of_the_server():
    # The guide recommends a delay of 10 s behind a load balancer.
    assert duration(setting("TimeoutStopSec")) >= 10 + float(default("exit-timeout-secs")) + EXIT_STEPS_S
    assert duration(setting("TimeoutStartSec")) >= float(default("worker-start-timeout-secs"))
    assert (setting("Type"), setting("NotifyAccess"), setting("KillMode")) == ("notify", "main", "mixed")


def test_failures_of_workers_and_of_other_services_do_not_end_the_service():
    """systemd neither stops the server when the kernel ends a worker for want of memory, nor gives up after some starts."""
    assert (setting("OOMPolicy"), setting("Restart"), setting("StartLimitIntervalSec")) == ("continue", "on-failure", "0")


def test_no_directory_of_the_unit_is_below_another():
    """Before version 252, systemd cannot create them with `DynamicUser=`."""
    for kind in ("State", "Cache", "Logs"):
        names = setting(f"{kind}Directory").split()
        assert not [name for name in names for other in names if name.startswith(f"{other}/")], names


def test_variables_of_the_unit_are_flags():
    for name in re.findall(r"^Environment=PHAROS_(\w+)=", UNIT.read_text(), re.M):
        assert f"--{name.lower().replace('_', '-')} <" in help_text()


class Manager:
    """The socket of a service manager: an abstract one, as systemd's own, or one with a path."""

    def __init__(self, address: str):
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0"))
        self.socket.settimeout(30)
        self.received = []

    def collect(self):
        """Appends the messages that have arrived, as maps of their lines."""
        self.socket.setblocking(False)
        try:
            while True:
                lines = self.socket.recv(4096).decode().splitlines()
                self.received.append(dict(line.split("=", 1) for line in lines))
        except BlockingIOError:
            pass

    def has(self, name: str, count: int = 1) -> bool:
        """Returns whether at least `count` messages with this variable have arrived."""
        self.collect()
        return sum(name in message for message in self.received) >= count


@pytest.fixture(params=["abstract", "path"])
def manager(request, tmp_path):
    """A service manager."""
    found = Manager(f"@pharos-{tmp_path.name}-{id(request)}" if request.param == "abstract" else str(tmp_path / "notify"))
    yield found
    found.socket.close()


def hidden(pid: int) -> bool:
    """Returns whether a process has none of the variables of systemd."""
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return "NOTIFY_SOCKET" not in text and "WATCHDOG" not in text


@pytest.fixture
def launch(tmp_path):
    """Returns a function that starts a server with variables of systemd and does not wait."""
    started = []

    def begin(repository, **variables) -> Server:
        server = Server(tmp_path, [repository])
        server.environment = variables
        started.append(server)
        server.launch()
        return server

    yield begin
    for server in started:
        server.kill()


def test_the_server_reports_its_state(launch, manager, tmp_path):
    """READY=1 after the models are loaded, WATCHDOG=1 twice in each interval, STOPPING=1 at the exit. Workers have none of the
    variables: they could report for the server."""
    models = copy_models(tmp_path / "models", ["identity_fp32"])
    server = launch(models, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="400000")
    eventually("READY=1 is sent", lambda: manager.has("READY"))
    assert server.get("/v2/models/identity_fp32/ready")[0] == 200
    eventually("the watchdog is served", lambda: manager.has("WATCHDOG", 4))
    assert server.workers() and all(hidden(pid) for pid in server.workers())
    assert not manager.has("STOPPING")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert manager.has("STOPPING")
    assert [message["READY"] for message in manager.received if "READY" in message] == ["1"]


def test_a_failed_load_is_not_ready(launch, manager, tmp_path):
    """The unit fails with the exit code of the server."""
    (tmp_path / "models/broken/1").mkdir(parents=True)
    (tmp_path / "models/broken/1/model.onnx").write_bytes(b"no model")
    server = launch(tmp_path / "models", NOTIFY_SOCKET=manager.address)
    assert server.process.wait(60) == 1
    assert manager.has("STOPPING") and not manager.has("READY")


def test_an_address_of_another_kind_is_ignored(launch, tmp_path):
    server = launch(copy_models(tmp_path / "models", ["identity_fp32"]), NOTIFY_SOCKET="vsock:2:1234")
    server.wait_until_ready()
    assert "expected an absolute path, or @NAME for an abstract socket" in server.log.read_text()
