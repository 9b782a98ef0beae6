"""Attacks on the locked-down start of the guide (`docs/src/guides/security.md`), with its options; the test of the documents runs the
commands themselves. The server also loads models by request, which the guide leaves off: only a client with a token reaches that."""

import contextlib
import json
import os
import re
import subprocess

import grpc
import pytest

from faults.isolated import Isolated
from harness.scrapers import CONNECTIONS, scraper
from harness.server import ROOT, Server, binary
from harness.waiting import DEADLINE_S, eventually
from repository.object_stores import CREDENTIALS, Between, Store
from security import other_user
from security.hostile import CODE, attack, configuration, load, write_model
from security.sandbox_support import lacking, named, write_archive, write_interpreter
from torchserve.home import Home, call, has_worker
from traces.trace_files import pharos_trace

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
        headers = MANAGER if headers is None else headers
        return super().ask(method, path, body, address, headers)


class LockedDownForUser(LockedDown, Isolated):
    """The server in a separate mount namespace, where another user reaches its programs."""


MANAGER, CLIENT = {"Authorization": "Bearer manager"}, {"Authorization": "Bearer client"}


def restrictions(folder) -> list:
    """Returns the options of the guide's start, with token files in `folder`."""
    for kind, token in (("inference", "client"), ("management", "manager")):
        (folder / f"{kind}-tokens").write_text(f"{token}\n")
    return [*options(), *(f"--{kind}-token-file={folder / kind}-tokens" for kind in ("inference", "management"))]


EXPLICIT = "--model-control-mode=explicit"


@pytest.fixture(scope="module")
def sandboxes():
    """Skips a test on a kernel that cannot make a whole sandbox."""
    if why := lacking():
        pytest.skip(f"this kernel cannot make a whole sandbox: {why}")


@pytest.fixture(scope="module")
def server(tmp_path_factory, sandboxes):
    """The server with hostile models, each with another environment."""
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
    loading = [EXPLICIT, *(f"--load-model={name}" for name in ("hostile", "innocent", "linked", "archived"))]
    more = ["--allow-client-shm=false", f"--environment-cache-directory={folder / 'cache'}"]
    traces = [f"--trace-config=triton,file={folder / 'trace.json'}", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1"]
    with LockedDown(folder, [folder / "models"], [*restrictions(folder), *loading, *more, *traces]) as started:
        started.folder = folder
        yield started


def test_the_guide_has_the_options():
    assert set(options()) == {"--worker-sandbox=on", "--allow-model-upload=false"}


def test_a_client_without_a_token_does_nothing(server):
    for method, path in (("GET", "/v2/models/hostile"), ("POST", "/v2/repository/models/innocent/load"), ("POST", "/v2/repository/index")):
        assert server.ask(method, path, b"", headers={})[0] == 401, path
    assert server.ask("POST", "/v2/repository/models/innocent/load", b"", headers=CLIENT)[0] == 403


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
    before = server.resident_bytes()
    status, answer = override(server, instance_group=[{"count": 150, "kind": "KIND_CPU"}])
    assert status == 400 and "--load-request-max-instances" in answer, answer
    sample = {"ATTACK": {"data_type": "TYPE_STRING", "dims": [1 << 28], "zero_data": True}}
    status, answer = override(server, model_warmup=[{"name": f"w{number}", "inputs": sample} for number in range(3)])
    assert status == 400 and "--load-request-max-warmup-byte-size" in answer, answer
    assert server.resident_bytes() - before < 64 << 20


def test_no_classification_reads_a_file(server):
    """5.5: a file of the model as labels."""
    output = [{"name": "RESULT", "data_type": "TYPE_STRING", "dims": [1], "label_filename": "1/model.py"}]
    status, answer = override(server, output=output)
    assert status == 400 and "label file '1/model.py'" in answer, answer


def test_scrapes_that_are_not_read_take_little_memory(server):
    """5.8."""
    before = server.resident_bytes()
    with contextlib.ExitStack() as open_:
        for _ in range(CONNECTIONS):
            open_.enter_context(scraper(server))
        for _ in range(100):
            assert server.get("/v2/health/ready", headers=CLIENT)[0] == 200
        assert server.resident_bytes() - before < 200 << 20


def test_no_error_shows_a_file(server):
    """5.6: an environment that is no archive, and a file whose end never comes."""
    for model, expected in (("reader", "it is neither a tar file nor one that is compressed with gzip"), ("blocked", "it is empty")):
        status, answer = server.ask("POST", f"/v2/repository/models/{model}/load", b"")
        assert status == 400 and expected in answer and "TOP-SECRET" not in answer, answer
    assert "TOP-SECRET" not in server.log.read_text()


@pytest.mark.skipif(bool(other_user.WHY_NOT), reason=other_user.WHY_NOT)
def test_no_archive_of_root_is_unpacked_for_the_user_of_models(open_path, sandboxes):
    """5.7: with `--worker-user`, an archive that only root can read."""
    write_model(open_path / "models", "archived")
    write_archive(open_path / "models/archived/env.tar.gz", open_path)
    (open_path / "models/archived/env.tar.gz").chmod(0o600)
    named(open_path / "models/archived/config.pbtxt", "$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    cache = open_path / "new/environments"
    flags = [*restrictions(open_path), EXPLICIT, f"--environment-cache-directory={cache}"]
    with other_user.started(open_path, [open_path / "models"], *flags, kind=LockedDownForUser) as server:
        status, answer = server.ask("POST", "/v2/repository/models/archived/load", b"")
        assert status == 400 and f"the user '{other_user.USER}' cannot read it: Permission denied" in answer, answer
        assert not list(cache.rglob("python3"))


HOSTILE_TEXT = "a\x1b[31mb\u202ec\u2066d\u200be"


def unprintable(text: str) -> list:
    """Returns the characters of a text that control a terminal or are invisible."""
    return [hex(ord(character)) for character in text if not character.isprintable() and character != "\n"]


def test_no_client_and_no_model_controls_a_terminal(server):
    """5.9: texts of a client and of a model, in `pharos top`, `pharos trace summary` and the log. `pharos metrics check` asks no server:
    see `test_what_a_file_contains_does_not_control_the_terminal`."""
    assert attack(server, "publish", HOSTILE_TEXT) == "done"
    inputs = [{"name": "ATTACK", "datatype": "BYTES", "shape": [2], "data": ["threads", ""]}]
    body = json.dumps({"id": HOSTILE_TEXT, "inputs": inputs})
    assert server.ask("POST", "/v2/models/hostile/infer", body)[0] == 200
    assert server.ask("POST", "/v2/models/a%1b%5b31m/infer", body)[0] == 400
    eventually("the trace is written", lambda: "\u202ec" in (server.folder / "trace.json").read_text())
    # Both have the text.
    assert "\u202ec" in (server.folder / "trace.json").read_text() and "\u202ec" in server.get("/metrics", server.metrics)[1]
    top = subprocess.run([binary(), "top", "--once", "--interval=0.2", server.metrics], capture_output=True, text=True, timeout=DEADLINE_S)
    assert top.returncode == 0 and "hostile" in top.stdout, top
    for shown in (top.stdout, pharos_trace("summary", server.folder / "trace.json")):
        assert unprintable(shown) == [], shown
    assert "a\\u{1b}[31mb" in server.log.read_text() and "\x1b" not in server.log.read_text()


@pytest.mark.skipif(not has_worker, reason="needs the package pharos-worker")
@pytest.mark.parametrize("has_tokens", [True, False])
def test_no_client_of_torchserve_reads_or_changes_settings(tmp_path, sandboxes, has_tokens):
    """5.9: the log and trace settings of the v2 protocol at TorchServe's inference port, which has no keys here."""
    home = Home(tmp_path, arguments=["--disable-token-auth"])
    home.command += restrictions(tmp_path) if has_tokens else options()
    expected = b"needs a token for management" if has_tokens else b"Log and trace settings are disabled"
    with home:
        for path in ("/v2/logging", "/v2/trace/setting", "/v2/models/m/trace/setting"):
            for method in ("GET", "POST"):
                status, _, answer = home.ask(method, path, b"{}" if method == "POST" else None, CLIENT)
                assert status == 403 and expected in answer, (method, path, status, answer)
        for name in ("LogSettings", "TraceSetting"):
            with pytest.raises(grpc.RpcError, match=expected.decode()):
                call(home.grpc, f"/inference.GRPCInferenceService/{name}", metadata=[("authorization", "Bearer client")])


def test_two_servers_do_not_mix_their_metric_logs(server, tmp_path):
    """5.9: a second server with the same directory writes nothing there."""
    assert attack(server, "threads") == "done"
    files = lambda: list(server.logs.glob("*.log"))  # noqa: E731
    eventually("the first server writes", lambda: any(path.stat().st_size for path in files()))
    write_model(tmp_path / "models", "hostile")
    flags = [*restrictions(tmp_path), f"--metrics-location={server.logs}"]
    with LockedDown(tmp_path, [tmp_path / "models"], flags) as second:
        for _ in range(10):
            assert attack(second, "threads") == attack(server, "threads") == "done"
        eventually("the second server reports it", lambda: "another server writes its metric logs to" in second.log.read_text())
    assert [path for path in files() if "\n\n" in path.read_text() or path.read_text().startswith("\n")] == []


PAGE = b"""<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>next</NextContinuationToken>
<CommonPrefixes><Prefix>m/one/</Prefix></CommonPrefixes></ListBucketResult>"""


@pytest.mark.slow
def test_a_listing_that_never_ends_does_not_hold_up_the_server(tmp_path, sandboxes):
    """5.9: each page of an object store names a next one. The start ends with the reason, after the time limit of a listing."""
    with Store(tmp_path) as store, Between(store) as between:
        between.trouble = lambda path: (200, PAGE) if not between.ended.wait(0.05) else 500
        server = LockedDown(tmp_path, [between.url()], restrictions(tmp_path))
        server.environment = CREDENTIALS
        server.launch()
        assert server.process.wait(4 * DEADLINE_S) == 1
        assert "the listing of its objects has not ended within" in server.log_tail()


def test_no_model_reaches_the_server_or_a_network(server):
    for kind, target in (("connect", server.http_port), ("kill", server.process.pid), ("ptrace", server.process.pid), ("write", server.folder / "new")):
        assert attack(server, kind, target) == "PermissionError", kind


def test_a_model_of_another_kind_is_not_changed_by_a_load_of_its_name(server):
    """A load without files leaves the operator's model and its sandbox."""
    assert server.ask("POST", "/v2/repository/models/innocent/load", b"")[0] == 200
    assert attack(server, "read", "/etc/shadow", "innocent") == "PermissionError"
