"""The launcher at its start: restored snapshots, models that are registered before a port opens, environment variables,
requests that wait for the first worker, archives that are kept. Each check also runs against a real TorchServe, if
installed."""

import http.client
import http.server
import json
import os
import re
import socket
import subprocess
import threading
import zipfile

import pytest

from harness.ports import free_ports
from harness.waiting import DEADLINE_S, eventually, holds_for, join_all
from torchserve.launcher import Launcher, answers
from torchserve.peer import STARTED
from torchserve.peers import Peer
from torchserve.row_types import Rest

ECHO = "def handle(data, context):\n    return [bytes(item['body']) for item in data] if data else None\n"
GATED = "import os, time\nwhile not os.path.exists({gate!r}):\n    time.sleep(0.05)\n"
"""A handler that loads as soon as a file exists."""
COMMON = ("--disable-token-auth", "--enable-model-api")


def archive(path, name: str, source: str = ECHO):
    """Writes an archive with a handler."""
    model = {"modelName": name, "modelVersion": "1.0", "handler": "service.py:handle"}
    manifest = {"createdOn": "today", "runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        made.writestr("service.py", source)


def is_real(launcher: Launcher) -> bool:
    """Returns whether the launcher is the real one."""
    return launcher.command[-1] != "torchserve"


def managed(launcher: Launcher, path: str, method: str = "GET") -> tuple:
    """Returns the status and JSON of a request to the management port."""
    body = b"" if method in ("POST", "PUT") else None
    answer = Peer(launcher).rest(Rest(path, body, method=method, at="management"))
    return answer["status"], json.loads(answer["body"])


def predicted(launcher: Launcher, model: str) -> tuple:
    """Returns the status and body of a prediction."""
    answer = Peer(launcher).rest(Rest(f"/predictions/{model}", b"x"))
    return answer["status"], answer["body"]


def configured(launcher: Launcher, *words, properties: str = "") -> list:
    """Returns the arguments of a start with the launcher's configuration and additional lines."""
    with launcher.config.open("a") as config:
        config.write(properties)
    return ["--ts-config", str(launcher.config), "--model-store", str(launcher.store), *words]


def snapshots(launcher: Launcher) -> list:
    """Returns the names of the snapshots, the oldest first."""
    return sorted(path.name for path in (launcher.folder / "logs/config").glob("*.cfg"))


def snapshot(launcher: Launcher) -> dict:
    """Returns the models of the newest snapshot."""
    text = (launcher.folder / "logs/config" / snapshots(launcher)[-1]).read_text()
    line = next(line for line in text.splitlines() if line.startswith("model_snapshot="))
    escapes = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
    plain = re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), line.partition("=")[2])
    return json.loads(plain)["models"]


def stopped(launcher: Launcher):
    """Stops the server and waits for its last snapshot."""
    before = snapshots(launcher)
    launcher.run("--stop", "--foreground")
    eventually("the snapshot at shutdown", lambda: snapshots(launcher)[len(before) :])


def is_open(launcher: Launcher, listener: str) -> bool:
    """Returns whether connections are accepted."""
    try:
        socket.create_connection(("127.0.0.1", launcher.ports[listener]), 5).close()
    except OSError:
        return False
    return True


class Web:
    """An HTTP server with archives; with a gate it answers only after the gate is set."""

    def __init__(self, files: dict, gate: threading.Event | None = None):
        self.asked = threading.Event()
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                site.asked.set()
                if gate is not None:
                    gate.wait(DEADLINE_S)
                content = files.get(self.path)
                self.send_response(404 if content is None else 200)
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_a_snapshot_is_not_restored_without_its_archives(launcher):
    """If the snapshot names a missing archive, the server exits with the name of the archive. This server keeps the snapshots, so
    that the models are restored when the archive is back."""
    archive(launcher.store / "other.mar", "other")
    launcher.started(*configured(launcher, *COMMON, "--models", "echo.mar", "other.mar"))
    stopped(launcher)
    assert set(snapshot(launcher)) == {"echo", "other"}
    before = snapshots(launcher)
    (launcher.store / "other.mar").rename(launcher.folder / "other.mar")
    for words in (["--foreground"], []):
        done = launcher.run("--start", *words, "--model-store", str(launcher.store), *COMMON)
        if is_real(launcher):
            # TorchServe's Java process exits by itself; in the background its log has the error.
            text = (launcher.folder / "console.log").read_text(errors="replace")
        else:
            assert done.returncode == 1, done.stdout
            text = done.stdout
        if words:
            assert "Model archive file for model other, version 1.0 not found in model store" in text
            assert STARTED not in done.stdout
        if is_real(launcher):
            return
        assert snapshots(launcher) == before
    (launcher.folder / "other.mar").rename(launcher.store / "other.mar")
    launcher.started("--model-store", str(launcher.store), *COMMON)
    for model in ("echo", "other"):
        assert predicted(launcher, model)[0] == 200


def test_an_unreadable_archive_does_not_change_snapshots(launcher):
    """An unreadable archive ends the start as well: a snapshot without it would lose the model."""
    if is_real(launcher):
        pytest.skip("TorchServe starts without it; its next snapshot lacks the model")
    launcher.started(*configured(launcher, *COMMON, "--models", "echo.mar"))
    stopped(launcher)
    before, whole = snapshots(launcher), (launcher.store / "echo.mar").read_bytes()
    (launcher.store / "echo.mar").write_bytes(whole[:-30])
    done = launcher.run("--start", "--foreground", "--model-store", str(launcher.store), *COMMON)
    assert done.returncode == 1 and "cannot restore the snapshot: failed to register model echo" in done.stdout
    assert STARTED not in done.stdout and snapshots(launcher) == before
    (launcher.store / "echo.mar").write_bytes(whole)
    launcher.started("--model-store", str(launcher.store), *COMMON)
    assert predicted(launcher, "echo")[0] == 200


def test_variables_override_the_command_line(launcher):
    """If the file has `enable_envvars_config=true`: options of a script must not disable protective settings."""
    words = configured(launcher, *COMMON, "--ncs", "--models", "echo.mar", properties="enable_envvars_config=true\n")
    launcher.started(*words, TS_DISABLE_TOKEN_AUTHORIZATION="false", TS_ENABLE_MODEL_API="false")
    keys = json.loads((launcher.folder / "key_file.json").read_text())
    assert (answers(launcher, "/ping"), answers(launcher, "/ping", keys["inference"]["key"])) == (400, 200)
    token = {"Authorization": f"Bearer {keys['management']['key']}"}
    register = Rest("/models?url=echo.mar&model_name=more", b"", token, "POST", "management")
    assert Peer(launcher).rest(register)["status"] in ((400, 405) if is_real(launcher) else (405,))
    listed = Rest("/models", headers=token, at="management")
    assert [model["modelName"] for model in json.loads(Peer(launcher).rest(listed)["body"])["models"]] == ["echo"]


def test_variables_apply_only_if_the_file_enables_them(launcher):
    """Without `enable_envvars_config` the command line applies."""
    words = configured(launcher, *COMMON, "--ncs", "--models", "echo.mar")
    launcher.started(*words, TS_DISABLE_TOKEN_AUTHORIZATION="false", TS_ENABLE_MODEL_API="false")
    assert answers(launcher, "/ping") == 200
    assert managed(launcher, "/models?url=echo.mar&model_name=more", "POST")[0] == 200


def test_ports_open_when_models_are_registered(launcher):
    """Order: archives, their snapshot, the ports, `Model server started.`, and a healthy state."""
    path = launcher.folder / "far.mar"
    archive(path, "far")
    gate = threading.Event()
    with Web({"/far.mar": path.read_bytes()}, gate) as web:
        words = configured(launcher, *COMMON, "--models", f"{web.base}/far.mar")
        assert launcher.run("--start", *words).returncode == 0
        assert web.asked.wait(DEADLINE_S), "the server must fetch the archive"
        assert not is_open(launcher, "inference") and not is_open(launcher, "management")
        assert STARTED not in (launcher.folder / "console.log").read_text() and snapshots(launcher) == []
        gate.set()
        eventually("the server has started", lambda: STARTED in (launcher.folder / "console.log").read_text())
    assert (answers(launcher, "/ping"), managed(launcher, "/models")[1]["models"][0]["modelName"]) == (200, "far")
    assert [name.partition("-")[2] for name in snapshots(launcher)] == ["startup.cfg"]
    assert snapshot(launcher)["far"]["1.0"]["marName"] == "far.mar"
    assert predicted(launcher, "far") == (200, "x")


def test_the_port_of_the_v2_protocol_is_not_ready_before_models_are_registered(launcher):
    """Health checks use it, because `/ping` needs a token. It is open while the archive is fetched."""
    if is_real(launcher):
        pytest.skip("TorchServe has no such port")
    path = launcher.folder / "far.mar"
    archive(path, "far")
    (port,), gate = free_ports(1), threading.Event()

    def health(what: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        connection.request("GET", f"/v2/health/{what}")
        return connection.getresponse().status

    with Web({"/far.mar": path.read_bytes()}, gate) as web:
        words = configured(launcher, *COMMON, "--ncs", "--models", f"{web.base}/far.mar", "--", f"--http-port={port}")
        assert launcher.run("--start", *words).returncode == 0
        assert web.asked.wait(DEADLINE_S), "the server must fetch the archive"
        holds_for("live and not ready", 1, lambda: (health("live"), health("ready")) == (200, 400))
        gate.set()
        eventually("the server is ready", lambda: health("ready") == 200)
    assert predicted(launcher, "far") == (200, "x")


def test_requests_wait_for_the_first_worker(launcher):
    """Predictions wait while it loads the model, and a description lists it; also after scaling from zero to one."""
    gate = launcher.folder / "gate"
    archive(launcher.store / "gated.mar", "gated", GATED.format(gate=str(gate)) + ECHO)
    launcher.started(*configured(launcher, *COMMON, "--ncs", "--models", "gated.mar", "echo.mar"))
    found = []
    for _ in range(2):
        assert answers(launcher, "/ping") == 200
        workers = managed(launcher, "/models/gated")[1][0]["workers"]
        assert [worker["status"] for worker in workers] == ["UNLOADING"]
        asking = threading.Thread(target=lambda: found.append(predicted(launcher, "gated")))
        asking.start()
        assert predicted(launcher, "echo")[0] == 200, "other models must not wait"
        assert asking.is_alive() and not found
        gate.touch()
        join_all([asking])
        assert found.pop() == (200, "x")
        assert [worker["status"] for worker in managed(launcher, "/models/gated")[1][0]["workers"]] == ["READY"]
        gate.unlink()
        assert managed(launcher, "/models/gated?min_worker=0&synchronous=true", "PUT")[0] == 200
        assert managed(launcher, "/models/gated")[1][0]["workers"] == [] and predicted(launcher, "gated")[0] == 503
        assert managed(launcher, "/models/gated?min_worker=1", "PUT")[0] == 202


def test_workers_that_are_started_again_are_listed(launcher):
    """A model whose handler cannot be loaded has a worker that is not ready; waiting requests are refused in the end."""
    archive(launcher.store / "dies.mar", "dies", "raise Exception('never')\n")
    launcher.started(*configured(launcher, *COMMON, "--ncs", "--models", "dies.mar"))
    workers = managed(launcher, "/models/dies")[1][0]["workers"]
    assert [worker["status"] for worker in workers] == ["UNLOADING"]
    refused = []
    asking = threading.Thread(target=lambda: refused.append(predicted(launcher, "dies")))
    asking.start()
    status, answer = managed(launcher, "/models/dies", "DELETE")
    assert (status, answer["status"]) == (200, 'Model "dies" unregistered')
    if not is_real(launcher):
        join_all([asking])
        assert refused[0][0] in (404, 503), refused
    asking.join(0 if is_real(launcher) else 30)


def test_the_wait_for_the_first_worker_is_limited(launcher):
    """`clientTimeoutInMills` limits the wait, and `jobQueueSize` the number of waiting requests."""
    if is_real(launcher):
        pytest.skip("TorchServe does not end the wait before the worker is ready")
    gate = launcher.folder / "gate"
    archive(launcher.store / "gated.mar", "gated", GATED.format(gate=str(gate)) + ECHO)
    with zipfile.ZipFile(launcher.store / "gated.mar", "a") as made:
        made.writestr("model-config.yaml", "clientTimeoutInMills: 3000\njobQueueSize: 1\n")
    launcher.started(*configured(launcher, *COMMON, "--ncs", "--models", "gated.mar"))
    status, body = predicted(launcher, "gated")
    assert status == 408 and "clientTimeoutInMills" in body
    found = []
    asking = [threading.Thread(target=lambda: found.append(predicted(launcher, "gated"))) for _ in range(2)]
    for thread in asking:
        thread.start()
    join_all(asking)
    assert sorted(status for status, _ in found) == [408, 503]
    assert "Its queue is full" in next(body for status, body in found if status == 503)
    gate.touch()
    eventually("the model is ready", lambda: predicted(launcher, "gated") == (200, "x"))


def test_archives_of_urls_are_kept_in_the_store(launcher):
    """Under the file's name, which the snapshot has; a repeated registration fails with 500 by URL and 409 by name. Unregistering
    the model removes the archive."""
    path = launcher.folder / "far.mar"
    archive(path, "far")
    kept = launcher.store / "far.mar"
    with Web({"/far.mar": path.read_bytes(), "/echo.mar": path.read_bytes()}) as web:
        launcher.started(*configured(launcher, *COMMON))
        register = f"/models?url={web.base}/far.mar"
        assert managed(launcher, register, "POST")[0] == 200
        assert kept.read_bytes() == path.read_bytes()
        assert managed(launcher, "/models/far")[1][0]["modelUrl"] == f"{web.base}/far.mar"
        again = {"code": 500, "type": "InternalServerException", "message": "Model file already exists far.mar"}
        assert managed(launcher, register, "POST") == (500, again)
        assert managed(launcher, f"/models?url={web.base}/echo.mar", "POST")[1]["message"].endswith("exists echo.mar")
        by_name = managed(launcher, "/models?url=far.mar", "POST")
        assert (by_name[0], by_name[1]["type"]) == (409, "ConflictStatusException")
        missing = managed(launcher, f"/models?url={web.base}/none.mar", "POST")
        assert (missing[0], missing[1]["type"]) == (400, "DownloadArchiveException")
        assert sorted(os.listdir(launcher.store)) == ["echo.mar", "far.mar"]
        eventually("a snapshot", lambda: "far" in snapshot(launcher))
        assert snapshot(launcher)["far"]["1.0"]["marName"] == "far.mar"
        assert managed(launcher, "/models/far", "DELETE")[0] == 200
        assert not kept.exists()
        assert managed(launcher, register, "POST")[0] == 200
        stopped(launcher)
    launcher.started("--model-store", str(launcher.store), *COMMON)
    assert predicted(launcher, "far") == (200, "x"), "the archive must be kept although the URL is unavailable"


def test_an_archive_that_was_fetched_is_not_fetched_again_at_the_start(launcher):
    """A restart with the same configuration and the same store; TorchServe starts without the model."""
    if is_real(launcher):
        pytest.skip("TorchServe logs that the file exists, and does not register the model")
    path = launcher.folder / "far.mar"
    archive(path, "far")
    with Web({"/far.mar": path.read_bytes()}) as web:
        words = configured(launcher, *COMMON, "--ncs", "--models", f"{web.base}/far.mar")
        launcher.started(*words)
        launcher.run("--stop", "--foreground")
        web.asked.clear()
        launcher.started(*words)
        assert not web.asked.is_set() and predicted(launcher, "far") == (200, "x")


def test_files_of_failed_downloads_are_removed(launcher):
    """A file that cannot be served, or whose model is already registered, is removed from the store; also after a kill."""
    if is_real(launcher):
        pytest.skip("TorchServe keeps the file and then refuses the URL")
    path = launcher.folder / "far.mar"
    archive(path, "echo")
    left = launcher.store / ".pharos-1-0-cut.mar.part"
    left.touch()
    with Web({"/far.mar": path.read_bytes(), "/junk.mar": b"PK junk"}) as web:
        launcher.started(*configured(launcher, *COMMON, "--ncs", "--models", "echo.mar"))
        for _ in range(2):
            assert managed(launcher, f"/models?url={web.base}/far.mar", "POST")[0] == 409
            assert managed(launcher, f"/models?url={web.base}/junk.mar", "POST")[0] == 400
        assert os.listdir(launcher.store) == ["echo.mar"]


def test_a_read_only_store_is_reported(launcher):
    """The archive is then fetched again at each start."""
    if is_real(launcher):
        pytest.skip("TorchServe refuses the archive")
    path = launcher.folder / "far.mar"
    archive(path, "far")
    # Even root cannot create a file in /sys.
    store = "/sys/kernel"
    with Web({"/far.mar": path.read_bytes()}) as web:
        config = ["--ts-config", str(launcher.config), "--model-store", store]
        launcher.started(*config, *COMMON, "--models", f"{web.base}/far.mar")
        assert predicted(launcher, "far") == (200, "x")
        assert "cannot write to the model store '/sys/kernel'" in (launcher.folder / "console.log").read_text()
        assert snapshot(launcher)["far"]["1.0"]["marName"] == f"{web.base}/far.mar"


def test_the_runtime_of_a_model_is_kept(launcher):
    """`runtime` of a registration is in the description, in the snapshot, and kept after a restart."""
    launcher.started(*configured(launcher, *COMMON))
    assert managed(launcher, "/models?url=echo.mar&runtime=python3", "POST")[0] == 200
    described = lambda: managed(launcher, "/models/echo")[1][0]["runtime"]  # noqa: E731
    assert described() == "python3"
    eventually("a snapshot", lambda: snapshot(launcher).get("echo", {}).get("1.0", {}).get("runtimeType") == "python3")
    stopped(launcher)
    launcher.started("--model-store", str(launcher.store), *COMMON)
    # TorchServe writes it and does not read it.
    assert described() == ("python" if is_real(launcher) else "python3")


def test_keys_that_are_too_short_are_refused(launcher):
    """TLS with a key of 1024 bits: the error has the reason and the command for a longer key."""
    if is_real(launcher):
        pytest.skip("Java accepts such keys")
    key, certificate = launcher.folder / "short.key", launcher.folder / "short.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:1024", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    lines = f"enable_grpc_ssl=true\ncertificate_file={certificate}\nprivate_key_file={key}\n"
    done = launcher.run("--start", "--foreground", *configured(launcher, *COMMON, "--ncs", properties=lines))
    assert done.returncode == 1 and STARTED not in done.stdout
    assert f"the RSA key in '{key}' is too short: 2048 bits or more are needed" in done.stdout, done.stdout
    assert "openssl req -x509 -newkey rsa:2048" in done.stdout
