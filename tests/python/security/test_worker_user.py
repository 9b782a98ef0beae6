"""Models that run as another user than the server (`--worker-user`): what they can reach, and the files that the server makes for
them. The server's files are only for its user (umask 077), as in its unit of systemd."""

import base64
import json
import os
import platform
import signal
import sys
import sysconfig
from pathlib import Path

import pytest

from faults.isolated import Isolated
from harness.ports import free_ports
from harness.server import binary, fork_servers
from harness.waiting import DEADLINE_S, eventually
from repository.object_stores import CREDENTIALS, Store
from security.hostile import CODE, CONFIG, attack, write_environment, write_model
from security.other_user import FLAG, GROUP, USER, WHY_NOT, identity, reachable, started
from torchserve.archive_files import files, wheel, zipped

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
AS_USER = (USER, GROUP, [GROUP], {"0" * 16})
KEPT = ["chown", "dac_override", "fowner", "kill", "setgid", "setuid"]
"""The capabilities that the server needs."""


WITH_TERMINAL = (
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios\n"
    "os.setsid()\n"
    "controller, terminal = os.openpty()\n"
    "os.set_inheritable(controller, True)\n"
    "fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n",
)
"""Starts a program that has a terminal."""
REFUSES_DESCRIPTORS = tuple(int(number) for number in platform.release().split(".")[:2]) >= (6, 16)


@pytest.fixture
def tmp_path(open_path):
    """A directory that the other user can reach."""
    return open_path


def hostile(tmp_path):
    """Returns a repository with the hostile model."""
    write_model(tmp_path / "models", "hostile")
    return [tmp_path / "models"]


def terminal(pid: int) -> int:
    """Returns the number of the terminal of a process; 0 for none. See proc_pid_stat(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[4])


def leftovers(tmp_path) -> list:
    """Returns the names of the temporary files and directories of servers."""
    return sorted(os.listdir(tmp_path / "tmp"))


@pytest.mark.parametrize("option", ["--worker-fork=true", "--worker-fork=false", "--worker-sandbox=on"])
def test_a_model_cannot_reach_what_is_of_the_server(tmp_path, option):
    secret = tmp_path / "tokens"
    secret.write_text("token")
    secret.chmod(0o600)
    with started(tmp_path, hostile(tmp_path), option, through=WITH_TERMINAL) as server:
        (worker,) = server.workers()
        assert terminal(server.process.pid) != 0
        assert {terminal(pid) for pid in (worker, *fork_servers(server.process.pid))} == {0}
        assert attack(server, "type into terminal") in ("OSError", "PermissionError")
        if REFUSES_DESCRIPTORS:
            # The socket that wakes the server, and that of regions.
            assert [attack(server, "pass descriptor", number) for number in (3, 8)] == ["PermissionError"] * 2
        for pid in (worker, *fork_servers(server.process.pid)):
            assert identity(pid) == AS_USER
        assert (len(fork_servers(server.process.pid)) == 1) == (option == "--worker-fork=true")
        environment = json.loads(attack(server, "environment"))
        assert (environment["HOME"], environment["USER"], environment["LOGNAME"]) == ("/", str(USER), str(USER))
        assert "XDG_CACHE_HOME" not in environment and environment["HF_HOME"] == "/data"
        code, own = tmp_path / "models/hostile/1/model.py", server.process.pid
        targets = {"read": [secret, "/etc/shadow", f"/proc/{own}/environ", f"/proc/{own}/mem"], "list": ["/etc/ssl/private", server.logs]}
        targets |= {kind: [own] for kind in ("kill", "ptrace", "read memory", "limit files")}
        targets |= {"write": [code, tmp_path / "new"], "link": [f"/proc/{own}/fd/0"]}
        found = {(kind, str(target)): attack(server, kind, target) for kind, all in targets.items() for target in all}
        assert set(found.values()) == {"PermissionError"}, found
        for kind, target in (("read", code), ("temporary file", ""), ("child process", ""), ("threads", ""), ("numpy", "")):
            assert attack(server, kind, target) == "done", kind
        # A model of the user can act as its fork server, and the server does not signal processes for it.
        if option == "--worker-fork=true":
            assert attack(server, "forge report", own) == "done"
        # Ended workers are replaced by others of the user, and the server can end them.
        os.kill(worker, signal.SIGKILL)
        eventually("the model has another worker", lambda: server.workers() and worker not in server.workers())
        assert attack(server, "threads") == "done"
        assert [identity(pid) for pid in server.workers()] == [AS_USER]
    assert leftovers(tmp_path) == []


def test_files_of_a_load_are_readable_for_its_model_alone(tmp_path):
    (tmp_path / "models").mkdir()
    options = ["--model-control-mode=explicit", "--allow-model-upload"]
    with started(tmp_path, [tmp_path / "models"], *options) as server:
        config = {"backend": "python", "input": [{"name": "ATTACK", "data_type": "TYPE_STRING", "dims": [2]}]}
        config |= {"output": [{"name": "RESULT", "data_type": "TYPE_STRING", "dims": [1]}]}
        files = {"file:1/model.py": base64.b64encode(CODE.read_bytes()).decode()}
        body = json.dumps({"parameters": files | {"config": json.dumps(config)}})
        assert server.ask("POST", "/v2/repository/models/hostile/load", body) == (200, "")
        (directory,) = (tmp_path / "tmp").glob("pharos-load-*")
        code = next(directory.rglob("model.py"))
        assert attack(server, "read", code) == "done" and attack(server, "write", code) == "PermissionError"
        for path in (directory, *directory.rglob("*")):
            assert not path.stat().st_mode & 0o007, f"{path} is open to every user"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("lasting", [True, False])
def test_copies_of_objects_are_readable_for_their_model(tmp_path, lasting):
    cache = [f"--repository-cache-directory={tmp_path}/new/cache"] if lasting else []
    with Store(tmp_path) as store:
        store.put("m/hostile/1/model.py", CODE.read_text())
        store.put("m/hostile/config.pbtxt", CONFIG.format(""))
        server = started(tmp_path, [f"s3://{store.endpoint}/{store.bucket}/m"], *cache)
        server.environment |= CREDENTIALS
        with server:
            assert attack(server, "threads") == "done"
            assert [identity(pid) for pid in server.workers()] == [AS_USER]
    assert leftovers(tmp_path) == []


def test_an_environment_belongs_to_the_user(tmp_path):
    """Its script `conda-unpack`, which changes its files, runs as the user, too."""
    repository, cache = hostile(tmp_path), tmp_path / "new/environments"
    script = "open(home + '/relocated', 'w').write(str(os.getuid()))\n"
    write_environment(repository[0], tmp_path, script, "--system-site-packages")
    server = started(tmp_path, repository, f"--environment-cache-directory={cache}")
    server.environment |= {"PYTHONPATH": sysconfig.get_path("purelib")}
    for _ in range(2):
        with server:
            assert attack(server, "threads") == "done"
            (relocated,) = cache.rglob("relocated")
            assert relocated.read_text() == str(USER)
            for path in (relocated.parent, relocated, relocated.parent / "bin"):
                assert (path.stat().st_uid, path.stat().st_gid) == (USER, GROUP)
            assert attack(server, "write", relocated.parent.with_suffix(".lock")) == "PermissionError"


def test_an_archive_that_the_user_may_not_read_is_not_unpacked_for_it(tmp_path):
    """The server may read it, because it is root."""
    repository, cache = hostile(tmp_path), tmp_path / "new/environments"
    write_environment(repository[0], tmp_path, "", "--system-site-packages")
    archive = repository[0] / "hostile/env.tar.gz"
    archive.chmod(0o600)
    server = started(tmp_path, repository, f"--environment-cache-directory={cache}", "--model-control-mode=explicit")
    server.environment |= {"PYTHONPATH": sysconfig.get_path("purelib")}
    with server:
        # Also if a link leads there, which the user could replace.
        for is_link in (False, True):
            if is_link:
                archive.rename(tmp_path / "private.tar.gz")
                archive.symlink_to(tmp_path / "private.tar.gz")
            status, answer = server.ask("POST", "/v2/repository/models/hostile/load", b"")
            assert status == 400 and f"cannot be used: the user '{USER}' cannot read it: Permission denied" in answer, answer
            assert not list(cache.rglob("python3"))
        (tmp_path / "private.tar.gz").chmod(0o644)
        assert server.ask("POST", "/v2/repository/models/hostile/load", b"") == (200, "")


def test_an_archive_that_a_request_names_is_read_with_the_rights_of_the_user(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "private").mkdir()
    content = zipped(files("own", "def handle(data, context):\n    return ['x'] * len(data) if data else None\n"))
    for folder, name in (("private", "root_only"), ("private", "readable"), ("store", "of_the_store")):
        (tmp_path / folder / f"{name}.mar").write_bytes(content)
        (tmp_path / folder / f"{name}.mar").chmod(0o644 if name == "readable" else 0o600)
    ports = free_ports(3)
    lines = [f"{name}_address=http://127.0.0.1:{port}\n" for name, port in zip(("inference", "management", "metrics"), ports)]
    (tmp_path / "config.properties").write_text("".join([*lines, "allowed_urls=file://.*\n"]))
    mounts, environment = reachable(tmp_path)
    words = ["torchserve", "--foreground", "--ncs", "--disable-token-auth", "--enable-model-api"]
    words += ["--ts-config", f"{tmp_path}/config.properties", "--model-store", f"{tmp_path}/store", "--", FLAG]
    server = Isolated("mount", f"{mounts}\numask 077", tmp_path, [])
    server.command[server.command.index(str(binary())) :] = [str(binary()), *words]
    server.http = f"127.0.0.1:{ports[0]}"
    server.environment = environment | {"LOG_LOCATION": "", "METRICS_LOCATION": ""}
    server.launch(cwd=tmp_path)
    register = lambda url, name: server.ask("POST", f"/models?url={url}&model_name={name}", b"", f"127.0.0.1:{ports[1]}")  # noqa: E731
    try:
        server.wait_until_ready("/ping")
        for number, prefix in enumerate(("file://", "")):
            status, answer = register(f"{prefix}{tmp_path}/private/root_only.mar", f"refused{number}")
            assert status == 400, answer
            assert not (tmp_path / "store/root_only.mar").exists()
        for url in (f"file://{tmp_path}/private/readable.mar", "of_the_store.mar"):
            assert register(url, f"m{len(url)}")[0] == 200, server.log_tail()
    finally:
        server.stop(check=False)


def test_handlers_of_torchserve_run_as_the_user(tmp_path):
    """So does pip, which can run code of the packages that it installs."""
    (tmp_path / "store").mkdir()
    source = (
        "import os, pharos_tried\n"
        "def handle(data, context):\n"
        "    return [f'{os.getuid()} {os.stat(pharos_tried.__file__).st_uid}'] * len(data) if data else None\n"
    )
    content = files("handler", source, requirementsFile="requirements.txt") | {"requirements.txt": f"{wheel(tmp_path)}\n"}
    (tmp_path / "store/handler.mar").write_bytes(zipped(content))
    ports = free_ports(3)
    lines = [f"{name}_address=http://127.0.0.1:{port}\n" for name, port in zip(("inference", "management", "metrics"), ports)]
    (tmp_path / "config.properties").write_text("".join([*lines, "install_py_dep_per_model=true\n"]))
    mounts, environment = reachable(tmp_path)
    words = ["torchserve", "--foreground", "--ncs", "--disable-token-auth", "--ts-config", f"{tmp_path}/config.properties"]
    words += ["--model-store", f"{tmp_path}/store", "--models", "handler.mar", "--", FLAG]
    server = Isolated("mount", f"{mounts}\numask 077", tmp_path, [])
    server.command[server.command.index(str(binary())) :] = [str(binary()), *words]
    server.http = f"127.0.0.1:{ports[0]}"
    server.environment = environment | {"LOG_LOCATION": "", "METRICS_LOCATION": ""}
    server.launch(cwd=tmp_path)
    try:
        server.wait_until_ready("/ping")
        assert server.ask("POST", "/predictions/handler", "x") == (200, f"{USER} {USER}"), server.log_tail()
    finally:
        server.stop(check=False)
    assert leftovers(tmp_path) == []


def test_a_service_needs_only_some_rights_of_root(tmp_path):
    """The server runs as a third user with these capabilities, as a service of systemd with `AmbientCapabilities`; its workers have
    none."""
    service = 64200
    kept = ",".join(f"+{name}" for name in KEPT)
    through = ["setpriv", f"--reuid={service}", f"--regid={service}", "--clear-groups", f"--inh-caps={kept}", f"--ambient-caps={kept}"]
    server = started(tmp_path, hostile(tmp_path), through=through)
    server.logs.mkdir()
    os.chown(server.logs, service, service)
    with server:
        (worker,) = server.workers()
        assert identity(server.process.pid)[0] == service and identity(worker) == AS_USER
        assert attack(server, "kill", server.process.pid) == "PermissionError"
        assert "without CAP_SYS_NICE and CAP_SYS_PTRACE, the memory of models is not measured" in server.log.read_text()
    assert leftovers(tmp_path) == []


def refused(server) -> str:
    """Starts a server that does not serve; returns its output."""
    server.launch()
    assert server.process.wait(DEADLINE_S) in (1, 2)
    return server.log_path.read_text()


def test_what_the_server_lacks_prevents_its_start(tmp_path):
    models = hostile(tmp_path)
    server = started(tmp_path, models)
    at = server.command.index(str(binary()))
    whole = list(server.command)
    server.command[at:at] = ["setpriv", "--bounding-set=-kill,-setuid"]
    assert "--worker-user needs the rights of root: this process has no CAP_KILL, CAP_SETUID" in refused(server)
    server.command = whole
    models[0].chmod(0o700)
    assert f"--worker-user: the user '{USER}' cannot read '{models[0]}': Permission denied" in refused(server)
    models[0].chmod(0o755)
    (tmp_path / "tmp").chmod(0o755)
    assert f"--worker-user: the user '{USER}' cannot create files in '{tmp_path}/tmp': Permission denied" in refused(server)
    (tmp_path / "tmp").chmod(0o777)
    assert f"'{tmp_path}/tmp' can be changed by other users and has no sticky bit" in refused(server)
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "closed").mkdir(mode=0o700)
    server.command = [*whole, f"--worker-binary={tmp_path}/closed/pharos-worker"]
    (tmp_path / "closed/pharos-worker").symlink_to(binary().with_name("pharos-worker"))
    assert f"the user '{USER}' cannot execute '{tmp_path}/closed/pharos-worker': Permission denied" in refused(server)
    for value, expected in (("root", "'root' is root; allowed is another user"), ("no-such-user", "there is no user 'no-such-user'")):
        server.command = [f"--worker-user={value}" if word == FLAG else word for word in whole]
        assert expected in refused(server)
