"""What a model may load and unload (`pb_utils.load_model`): at most what it may do itself."""

import json
import os

import pytest

from harness.server import Server
from harness.waiting import eventually
from security.hostile import CODE, attack, configuration, write_model
from security.sandbox_support import lacking, write_interpreter

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="without root, a model could not read the files of others anyway")
EXPLICIT = ["--model-control-mode=explicit", "--load-model=hostile", "--load-model=innocent"]


@pytest.fixture(scope="module", autouse=True)
def kernel():
    """Skips the tests on a kernel that cannot make a whole sandbox."""
    if why := lacking():
        pytest.skip(f"this kernel cannot make a whole sandbox: {why}")


def started(tmp_path, *options, parameter="") -> Server:
    """Returns a server with the hostile model and an innocent one."""
    write_model(tmp_path / "models", "hostile", parameter)
    write_model(tmp_path / "models", "innocent")
    return Server(tmp_path, [tmp_path / "models"], [*EXPLICIT, *options])


def load(server, name: str, with_files=True, by="hostile", **parameters) -> str:
    """Lets a model load another; returns `done` or the refusal."""
    asked = {"model_name": name, "config": json.dumps(configuration(**parameters))}
    if with_files:
        asked["files"] = {"1/model.py": CODE.read_text()}
    return attack(server, "load", json.dumps(asked), by)


@pytest.mark.parametrize(
    "flag, parameter", [("on", ""), ("on", "on"), ("auto", ""), ("auto", "on"), ("uploads", "on"), ("off", "on")]
)
def test_a_model_does_not_load_itself_out_of_its_sandbox(tmp_path, flag, parameter):
    with started(tmp_path, f"--worker-sandbox={flag}", parameter=parameter) as server:
        assert attack(server, "read", "/etc/shadow") == "PermissionError"
        for value in ("off", "network"):
            assert f"its parameter 'sandbox' is '{value}', which" in load(server, "copy", sandbox=value), value
        assert load(server, "copy") == "done"
        for attacker in ("hostile", "copy"):
            assert attack(server, "read", "/etc/shadow", attacker) == "PermissionError"
            assert attack(server, "connect", server.http_port, attacker) == "PermissionError"
        # Neither does the copy load one with more rights, nor an environment of its choice.
        assert "its parameter 'sandbox' is 'off'" in load(server, "third", by="copy", sandbox="off")
        write_interpreter(tmp_path / "environment", is_environment=True)
        refusal = load(server, "fourth", EXECUTION_ENV_PATH=tmp_path / "environment")
        assert "code that came by request cannot choose it" in refusal, refusal
        # It may replace and unload what it has loaded.
        assert load(server, "copy", sandbox="on") == "done" and attack(server, "unload", "copy") == "done"
        eventually("the copy is unloaded", lambda: "copy" not in server.index())


def test_a_model_with_a_network_gives_no_more(tmp_path):
    with started(tmp_path, "--worker-sandbox=off", parameter="network") as server:
        assert "its parameter 'sandbox' is 'off', which permits more" in load(server, "copy", sandbox="off")
        assert load(server, "copy", sandbox="network") == "done"
        assert attack(server, "connect", server.http_port, "copy") == "done"
        assert attack(server, "read", "/etc/shadow", "copy") == "PermissionError"


def test_a_model_replaces_and_unloads_only_what_it_has_loaded(tmp_path):
    with started(tmp_path, parameter="on") as server:
        refusal = "the model 'hostile' may not replace the model 'innocent', which it has not loaded"
        for with_files in (True, False):
            assert refusal in load(server, "innocent", with_files)
            assert "may not replace the model 'hostile'" in load(server, "hostile", with_files)
        assert "may not unload the model 'innocent'" in attack(server, "unload", "innocent")
        # As clients may: a model of the repositories as it is. That does not make it the model's.
        assert attack(server, "load", json.dumps({"model_name": "innocent"})) == "done"
        assert refusal in load(server, "innocent") and attack(server, "read", "/etc/shadow", "innocent") == "done"
        assert load(server, "copy") == "done"
        # What a client has loaded since is the client's.
        assert server.ask("POST", "/v2/repository/models/copy/load", b"")[0] == 200
        assert "may not replace the model 'copy'" in load(server, "copy")
        assert "may not unload the model 'copy'" in attack(server, "unload", "copy")
        assert attack(server, "unload", "nowhere") == "done"


def test_files_need_the_permission_that_a_client_needs(tmp_path):
    for flag in ("--allow-model-upload=false", "--allow-model-upload=true"):
        with started(tmp_path / flag, flag) as server:
            refused = flag.endswith("false")
            write_model(tmp_path / flag / "models", "idle")
            assert ("--allow-model-upload" in load(server, "copy")) == refused
            # A parameter that the model's own configuration does not have.
            assert ("--allow-model-upload" in load(server, "idle", with_files=False, more="1")) == refused
            assert ("copy" in server.index()) != refused


def test_a_model_of_the_operator_loads_and_unloads_those_of_the_repositories(tmp_path):
    with started(tmp_path) as server:
        assert attack(server, "unload", "innocent") == "done"
        eventually("the model is unloaded", lambda: server.index()["innocent"][0]["state"] == "UNAVAILABLE")
        assert attack(server, "load", json.dumps({"model_name": "innocent"})) == "done"
        assert attack(server, "read", "/etc/shadow", "innocent") == "done"
