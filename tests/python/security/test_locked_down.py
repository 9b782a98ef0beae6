"""Attacks on the locked-down start of the guide (`docs/src/guides/security.md`), with its options; the test of the documents runs the
commands themselves. The server also loads models by request, which the guide leaves off: only a client with a token reaches that."""

import contextlib
import json
import os
import re

import pytest

from harness.server import ROOT, Server
from metrics.test_unread_scrapes import CONNECTIONS, REQUESTS, SCRAPE, resident_bytes, scraper
from security.hostile import CODE, attack, configuration, load, write_model
from security.sandbox_support import lacking, named, write_archive, write_interpreter

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="without root, a model could not read the files of others anyway")
GUIDE = ROOT / "docs/src/guides/security.md"
OF_FILES = re.compile(r"-(ssl|cert|key|repository|token-file)\b|--metrics-address")
"""Options that name files or addresses of the start, and TLS, which changes only how clients connect."""


def options() -> list:
    """Returns the options of the guide's start that limit what models and clients may do."""
    start = re.search(r"test_a_locked_down_start -->\n```sh\n(.*?)```", GUIDE.read_text(), re.S)[1]
    return [word for word in start.replace("\\\n", " ").split() if word.startswith("--") and not OF_FILES.search(word)]


class LockedDown(Server):
    """The server, whose clients send the token of management unless a request has other headers."""

    def ask(self, method, path, body=None, address="", headers=None):
        headers = {"Authorization": "Bearer manager"} if headers is None else headers
        return super().ask(method, path, body, address, headers)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The server with hostile models, each with another environment."""
    if why := lacking():
        pytest.skip(f"this kernel cannot make a whole sandbox: {why}")
    folder = tmp_path_factory.mktemp("locked")
    for name in ("hostile", "innocent", "linked", "archived", "reader", "blocked"):
        write_model(folder / "models", name)
    write_interpreter(folder / "models/linked/.venv")
    (folder / "models/linked/.venv/lib").symlink_to("/")
    write_archive(folder / "models/archived/env.tar.gz", folder)
    named(folder / "models/archived/config.pbtxt", "$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    (folder / "secret").write_text("TOP-SECRET-4711")
    named(folder / "models/reader/config.pbtxt", folder / "secret")
    named(folder / "models/blocked/config.pbtxt", "/proc/kmsg")
    for kind, token in (("inference", "client"), ("management", "manager")):
        (folder / f"{kind}-tokens").write_text(f"{token}\n")
    tokens = [f"--{kind}-token-file={folder / kind}-tokens" for kind in ("inference", "management")]
    loading = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in ("hostile", "innocent", "linked", "archived"))]
    more = ["--allow-client-shm=false", f"--environment-cache-directory={folder / 'cache'}"]
    with LockedDown(folder, [folder / "models"], [*options(), *tokens, *loading, *more]) as started:
        started.folder = folder
        yield started


def test_the_guide_has_the_options():
    assert set(options()) == {"--worker-sandbox=on", "--allow-model-upload=false"}


def test_a_client_without_a_token_does_nothing(server):
    for method, path in (("GET", "/v2/models/hostile"), ("POST", "/v2/repository/models/innocent/load"), ("POST", "/v2/repository/index")):
        assert server.ask(method, path, b"", headers={})[0] == 401, path
    token = {"Authorization": "Bearer client"}
    assert server.ask("POST", "/v2/repository/models/innocent/load", b"", headers=token)[0] == 403


@pytest.mark.parametrize("model", ["hostile", "linked", "archived"])
@pytest.mark.parametrize("target", ["/etc/shadow", "/root", "{folder}/management-tokens", "/proc/{pid}/environ", "{folder}/secret"])
def test_no_model_reads_files_of_others(server, model, target):
    """5.1: links in environments."""
    path = target.format(folder=server.folder, pid=server.process.pid)
    assert attack(server, "read", path, model) == "PermissionError"


@pytest.mark.parametrize("sandbox", ["off", "network", "on", None])
def test_no_model_loads_code(server, sandbox):
    """5.2: a model that loads itself out of its sandbox."""
    parameters = {} if sandbox is None else {"sandbox": sandbox}
    asked = {"config": json.dumps(configuration(**parameters)), "files": {"1/model.py": CODE.read_text()}}
    for name in ("copy", "innocent", "hostile"):
        assert attack(server, "load", json.dumps({"model_name": name} | asked)) != "done", name
    assert "may not unload the model 'innocent'" in attack(server, "unload", "innocent")
    assert attack(server, "threads", model="innocent") == "done"


def test_no_client_brings_code(server):
    """5.4: with a token either."""
    status, answer = load(server, "sent")
    assert status == 501 and "--allow-model-upload" in answer, answer
    parameters = {"config": json.dumps(configuration(EXECUTION_ENV_PATH="/nowhere"))}
    status, answer = server.ask("POST", "/v2/repository/models/innocent/load", json.dumps({"parameters": parameters}))
    assert status == 501 and "--allow-model-upload" in answer, answer


def override(server, **fields) -> tuple:
    """Loads a model of the operator with these fields in its configuration; returns the status and the answer."""
    parameters = {"config": json.dumps(configuration() | fields)}
    return server.ask("POST", "/v2/repository/models/innocent/load", json.dumps({"parameters": parameters}))


def test_no_request_takes_more_than_its_bounds(server):
    """5.3: instances and warm-ups that a few hundred bytes ask for."""
    before = resident_bytes(server)
    status, answer = override(server, instance_group=[{"count": 150, "kind": "KIND_CPU"}])
    assert status == 400 and "--load-request-max-instances" in answer, answer
    sample = {"ATTACK": {"data_type": "TYPE_STRING", "dims": [1 << 28], "zero_data": True}}
    status, answer = override(server, model_warmup=[{"name": f"w{number}", "inputs": sample} for number in range(3)])
    assert status == 400 and "--load-request-max-warmup-byte-size" in answer, answer
    assert resident_bytes(server) - before < 64 << 20


def test_no_classification_reads_a_file(server):
    """5.5: a file of the model as labels."""
    output = [{"name": "RESULT", "data_type": "TYPE_STRING", "dims": [1], "label_filename": "1/model.py"}]
    status, answer = override(server, output=output)
    assert status == 400 and "label file '1/model.py'" in answer, answer


def test_scrapes_that_are_not_read_take_little_memory(server):
    """5.8."""
    before = resident_bytes(server)
    with contextlib.ExitStack() as open_:
        for _ in range(CONNECTIONS):
            open_.enter_context(scraper(server, SCRAPE * REQUESTS))
        for _ in range(100):
            assert server.get("/v2/health/ready", headers={"Authorization": "Bearer client"})[0] == 200
        assert resident_bytes(server) - before < 200 << 20


def test_no_error_shows_a_file(server):
    """5.6: an environment that is no archive, and a file whose end never comes."""
    for model, expected in (("reader", "it is neither a tar file nor one that is compressed with gzip"), ("blocked", "it is empty")):
        status, answer = server.ask("POST", f"/v2/repository/models/{model}/load", b"")
        assert status == 400 and expected in answer and "TOP-SECRET" not in answer, answer
    assert "TOP-SECRET" not in server.log.read_text()


def test_no_model_reaches_the_server_or_a_network(server):
    for kind, target in (("connect", server.http_port), ("kill", server.process.pid), ("ptrace", server.process.pid), ("write", server.folder / "new")):
        assert attack(server, kind, target) == "PermissionError", kind


def test_a_model_of_another_kind_is_not_changed_by_a_load_of_its_name(server):
    """A load without files leaves the operator's model and its sandbox."""
    assert server.ask("POST", "/v2/repository/models/innocent/load", b"")[0] == 200
    assert attack(server, "read", "/etc/shadow", "innocent") == "PermissionError"
