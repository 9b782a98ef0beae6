"""The command line of TorchServe's launcher: its output, its exit codes, the files that it leaves. Each check also runs
against a real TorchServe, if installed."""

import json
import re
import shutil
import stat
import subprocess

import pytest

from harness.server import Process, alive, binary, command_line
from harness.waiting import DEADLINE_S, eventually, run_for
from torchserve.home import Home, has_worker
from torchserve.launcher import COMMANDS, Launcher, answers


def test_start_and_stop(launcher):
    """The server runs in the background, refuses a second start, and stops; a second stop reports that it does not run."""
    words = ["--ts-config", str(launcher.config), "--model-store", str(launcher.store), "--ncs", "--disable-token-auth"]
    assert launcher.started(*words, "--models", "renamed=echo.mar").returncode == 0
    pid = launcher.pid()
    assert alive(pid)
    # SageMaker's toolkit waits for the process that has exactly this argument.
    assert b"org.pytorch.serve.ModelServer" in command_line(pid)
    eventually("the model is ready", lambda: answers(launcher, "/predictions/renamed") == 200)
    again = launcher.run("--start", *words)
    assert (again.returncode, alive(pid)) == (1, True)
    assert "TorchServe is already running, please use torchserve --stop to stop TorchServe." in again.stdout
    assert "TorchServe has stopped." in launcher.run("--stop").stdout
    eventually("the process is gone", lambda: not alive(pid))
    assert not (launcher.folder / "tmp/.model_server.pid").exists()
    stopped = launcher.run("--stop")
    assert stopped.returncode == 0 and "TorchServe is not currently running." in stopped.stdout
    if launcher.command[-1] == "torchserve" and len(launcher.command) == 2:
        assert f"there is no process id file '{launcher.folder}/tmp/.model_server.pid'" in stopped.stdout


def test_version(launcher):
    """Scripts compare this line."""
    for word in ("--version", "-v"):
        done = launcher.run(word)
        assert (done.returncode, bool(re.search(r"TorchServe Version is 0\.12\.0", done.stdout))) == (0, True), (
            done.stdout
        )


def test_missing_paths(launcher):
    """The error names the missing path, and the launcher fails."""
    for words, text in (
        (
            ["--ts-config", "absent.properties", "--model-store", str(launcher.store)],
            "--ts-config file not found: absent.properties",
        ),
        (["--model-store", "absent"], "--model-store directory not found: absent"),
        (["--ts-config", str(launcher.config)], "Missing mandatory parameter --model-store"),
    ):
        done = launcher.run("--start", "--ncs", *words)
        assert done.returncode == 1 and text in done.stdout, done.stdout


def test_only_the_owner_can_read_the_tokens(launcher):
    """Three keys that no other user can read; they are required, and removed after `--stop`."""
    launcher.started(
        "--ts-config", str(launcher.config), "--model-store", str(launcher.store), "--ncs", "--models", "echo.mar"
    )
    file = launcher.folder / "key_file.json"
    keys = json.loads(file.read_text())
    assert {name: sorted(said) for name, said in keys.items()} == {
        "management": ["expiration time", "key"],
        "inference": ["expiration time", "key"],
        "API": ["key"],
    }
    assert all(re.fullmatch(r"\S{8}", said["key"]) for said in keys.values())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert answers(launcher, "/ping") == 400
    assert answers(launcher, "/ping", keys["inference"]["key"]) == 200
    launcher.run("--stop")
    eventually("the keys are gone", lambda: not file.exists())


def test_the_configuration_comes_from_the_environment(launcher):
    """`TS_CONFIG_FILE` overrides the option; `LOG_LOCATION` and `METRICS_LOCATION` set the folders of the logs."""
    logs, metrics = launcher.folder / "elsewhere", launcher.folder / "numbers"
    launcher.started(
        "--ts-config", "absent.properties", "--model-store", str(launcher.store), "--ncs", "--disable-token-auth",
        TS_CONFIG_FILE=str(launcher.config), LOG_LOCATION=str(logs), METRICS_LOCATION=str(metrics),
    )  # fmt: skip
    assert answers(launcher, "/ping") == 200
    eventually("the access is logged", lambda: "GET /ping" in (logs / "access_log.log").read_text())
    assert {path.name for path in logs.glob("*.log")} >= {"access_log.log", "model_log.log", "ts_log.log"}
    assert {path.name for path in metrics.glob("*.log")} == {"ts_metrics.log", "model_metrics.log"}


def test_snapshots(launcher):
    """Without `--ncs`, registered models are restored by a restart without a configuration."""
    words = ["--model-store", str(launcher.store), "--disable-token-auth"]
    config = launcher.config.read_text()
    launcher.started("--ts-config", str(launcher.config), *words, "--models", "kept=echo.mar")
    eventually("the model is ready", lambda: answers(launcher, "/predictions/kept") == 200)
    written = lambda: [path.name for path in (launcher.folder / "logs/config").glob("*.cfg")]  # noqa: E731
    eventually("the snapshot at startup", lambda: any(re.fullmatch(r"\d{17}-startup\.cfg", n) for n in written()))
    launcher.run("--stop", "--foreground")
    eventually("the snapshot at shutdown", lambda: any(re.fullmatch(r"\d{17}-shutdown\.cfg", n) for n in written()))
    assert config == launcher.config.read_text()
    run_for("names of snapshots have a resolution of one second", 1)
    launcher.started(*words)
    eventually("the model is ready again", lambda: answers(launcher, "/predictions/kept") == 200)


def test_the_script_is_there():
    """`torchserve`, if the server is installed: a script that calls the server with the same arguments."""
    script = shutil.which("torchserve", path=f"{binary().parent}")
    if script is None:
        pytest.skip("the script is not in the server's folder")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert "TorchServe Version is 0.12.0" in done.stdout


@pytest.mark.skipif(not has_worker, reason="needs the package pharos-worker")
@pytest.mark.parametrize(("key", "name"), [("grpc_management_port", "the gRPC management API"), ("metrics_address", "the metrics API")])
def test_two_listeners_do_not_share_a_port(tmp_path, key, name):
    """The start fails before models are loaded, with both keys. The REST APIs may share one address, but not a part of it."""
    home = Home(tmp_path)
    taken = {"grpc_management_port": ("grpc_inference_port", home.grpc), "metrics_address": ("inference_address", home.inference)}
    other, port = taken[key]
    value = f"http://0.0.0.0:{port}" if key == "metrics_address" else port
    with (home.folder / "config.properties").open("a") as config:
        config.write(f"{key}={value}\n")
    with pytest.raises(AssertionError) as failed, home:
        pass
    text = str(failed.value)
    assert f"{name} cannot listen on " in text and f"({key}): the " in text and f"({other}). Give each its own port" in text, text


def test_a_process_id_file_with_the_own_id_is_left_from_before(tmp_path):
    """In a container that was killed and restarted, with a temporary directory that stays, the server has the same id again."""
    launcher = Launcher(tmp_path / "launcher", *COMMANDS["pharos"]())
    begin = ["sh", "-c", 'echo $$ > "$TMPDIR/.model_server.pid"; exec "$@"', "sh", *launcher.command, "--foreground", "--ncs"]
    options = ["--ts-config", launcher.config, "--model-store", launcher.store, "--disable-token-auth", "--models", "echo.mar"]
    with open(tmp_path / "log", "wb") as log:
        process = Process(list(map(str, [*begin, *options])), stdout=log, stderr=log, env=launcher.environment, cwd=launcher.folder)
    try:
        eventually("the server is ready", lambda: process.poll() is not None or is_ready(launcher))
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert launcher.pid() == process.pid
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def is_ready(launcher) -> bool:
    """Returns whether the server answers that it is healthy."""
    try:
        return answers(launcher, "/ping") == 200
    except OSError:
        return False


def test_stop_ends_no_server_that_was_started_otherwise(start, tmp_path):
    """Its id may be that of a server that was killed."""
    server = start([], "--model-control-mode=explicit", repository=tmp_path)
    launcher = Launcher(tmp_path / "launcher", *COMMANDS["pharos"]())
    file = launcher.folder / "tmp/.model_server.pid"
    file.write_text(str(server.process.pid))
    stopped = launcher.run("--stop").stdout
    assert "TorchServe is not currently running." in stopped
    assert f"the process {server.process.pid} in '{file}' is not a server that `pharos torchserve` has started" in stopped
    assert server.get("/v2/health/live")[0] == 200 and not file.exists()
