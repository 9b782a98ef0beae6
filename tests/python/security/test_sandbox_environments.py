"""Environments that a model brings or names do not lead out of its sandbox: links in them, interpreters elsewhere, and directories
that another model can change."""

import json
import os

import pytest

from harness.server import Server
from security.hostile import attack, write_model
from security.sandbox_support import lacking, named, write_archive, write_interpreter

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="without root, a model could not read the files of others anyway")
OPTIONS = ["--worker-sandbox=on", "--exit-on-error=false", "--strict-readiness=false"]


@pytest.fixture(scope="module", autouse=True)
def kernel():
    """Skips the tests on a kernel that cannot make a whole sandbox."""
    if why := lacking():
        pytest.skip(f"this kernel cannot make a whole sandbox: {why}")


def reason(server, model="hostile") -> str:
    """Returns why a model does not serve."""
    return server.index()[model][0].get("reason", "")


def link_in_the_environment(model, _folder):
    write_interpreter(model / ".venv")
    (model / ".venv/lib").symlink_to("/")


def link_in_a_virtual_environment(model, _folder):
    write_interpreter(model / "venv", is_environment=True)
    (model / "venv/lib").symlink_to("/")


def link_in_an_archive(model, folder):
    write_archive(model / "env.tar.gz", folder)
    named(model / "config.pbtxt", "$$TRITON_MODEL_DIRECTORY/env.tar.gz")


def link_in_a_named_environment(model, folder):
    write_interpreter(folder / "named")
    (folder / "named/lib").symlink_to("/")
    named(model / "config.pbtxt", folder / "named")


LINKS = [link_in_the_environment, link_in_a_virtual_environment, link_in_an_archive, link_in_a_named_environment]


@pytest.mark.parametrize("prepare", LINKS)
def test_a_link_in_an_environment_opens_nothing(tmp_path, prepare):
    write_model(tmp_path / "models", "hostile")
    prepare(tmp_path / "models/hostile", tmp_path)
    with Server(tmp_path, [tmp_path / "models"], [*OPTIONS, f"--environment-cache-directory={tmp_path / 'cache'}"]) as server:
        found = {path: attack(server, "read", path) for path in ("/etc/shadow", "/root", f"{server.log_path}")}
        assert set(found.values()) == {"PermissionError"}, found
        assert attack(server, "write", tmp_path / "new") == "PermissionError"
        assert attack(server, "numpy") == "done" and attack(server, "temporary file") == "done"


def environment_elsewhere(model, folder):
    write_interpreter(folder / "outside", is_environment=True)
    (model / ".venv").symlink_to(folder / "outside")


def interpreter_elsewhere(model, folder):
    write_interpreter(folder / "outside")
    (model / ".venv/bin").mkdir(parents=True)
    (model / ".venv/bin/python3").symlink_to(folder / "outside/bin/python3")


def archive_elsewhere(model, folder):
    write_archive(folder / "private.tar.gz", folder)
    (model / "env.tar.gz").symlink_to(folder / "private.tar.gz")
    named(model / "config.pbtxt", "$$TRITON_MODEL_DIRECTORY/env.tar.gz")


@pytest.mark.parametrize("prepare", [environment_elsewhere, interpreter_elsewhere, archive_elsewhere])
def test_an_environment_elsewhere_needs_the_permission_of_the_operator(tmp_path, prepare):
    write_model(tmp_path / "models", "hostile")
    prepare(tmp_path / "models/hostile", tmp_path)
    options = [*OPTIONS, f"--environment-cache-directory={tmp_path / 'cache'}"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        assert "in its sandbox" in reason(server) or "in a sandbox" in reason(server), reason(server)
        assert "--worker-sandbox-read=PATH" in reason(server)
        assert not list(tmp_path.glob("cache/*/*/bin")), "the archive was unpacked"
    permitted = [f"--worker-sandbox-read={tmp_path / name}" for name in ("outside", "private.tar.gz") if (tmp_path / name).exists()]
    with Server(tmp_path, [tmp_path / "models"], [*options, *permitted]) as server:
        assert attack(server, "read", "/etc/shadow") == "PermissionError"


def test_a_version_elsewhere_is_not_read(tmp_path):
    write_model(tmp_path / "models", "hostile")
    (tmp_path / "models/hostile/1").rename(tmp_path / "outside")
    (tmp_path / "models/hostile/1").symlink_to(tmp_path / "outside")
    with Server(tmp_path, [tmp_path / "models"], OPTIONS) as server:
        assert server.index()["hostile"][0]["state"] == "UNAVAILABLE"
    with Server(tmp_path, [tmp_path / "models"], [*OPTIONS, f"--worker-sandbox-read={tmp_path / 'outside'}"]) as server:
        assert attack(server, "threads") == "done"


def test_an_environment_that_a_model_can_change_is_not_used(tmp_path):
    """A model that runs makes an environment in its directory for temporary files; the configuration of another names it."""
    for name in ("hostile", "second"):
        write_model(tmp_path / "models", name)
    options = [*OPTIONS, "--model-control-mode=explicit", "--load-model=hostile"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        environment = f"{attack(server, 'temporary directory')}/e"
        write_interpreter(tmp_path / "made")
        (tmp_path / "made/lib").symlink_to("/")
        (tmp_path / "made").rename(environment)
        named(tmp_path / "models/second/config.pbtxt", environment)
        status, answer = server.ask("POST", "/v2/repository/models/second/load", b"")
        assert status == 400 and "a model can change it" in json.loads(answer)["error"], answer
