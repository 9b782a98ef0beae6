"""`pharos torchserve`: configurations, valid and hostile archives from files and URLs, time-outs, logs. Uses the real server and
real workers; archives are written here, byte by byte where no archiver would produce them.

Requires a Python with the package `pharos-worker`: `PHAROS_PYTHON`, or that of the tests."""

import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest

from harness.ports import free_ports
from harness.server import ROOT, Process, alive, binary, check_process
from harness.waiting import DEADLINE_S, eventually
from torchserve.archive_files import ECHO, files, manifest, tarred, wheel, zipped

PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
has_worker = subprocess.run([PYTHON, "-c", "import pharos_worker"], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")

STARTED = "Model server started."
LISTENERS = ("inference", "management", "metrics", "grpc_inference", "grpc_management")


class TorchServe:
    """`pharos torchserve --foreground` in a separate folder. `archives` are files of the model store."""

    def __init__(self, folder: Path, archives=None, properties: str = "", words=(), options=()):
        self.folder = folder
        self.ports = dict(zip(LISTENERS, free_ports(len(LISTENERS))))
        self.store = folder / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        for name, content in (archives or {}).items():
            (self.store / name).write_bytes(content)
        (folder / "tmp").mkdir(exist_ok=True)
        self.config = folder / "config.properties"
        self.config.write_text(properties)
        self.words = ["--start", "--foreground", "--ncs", "--disable-token-auth", "--enable-model-api", *words]
        self.options = list(options)
        self.environment = {}
        self.log = folder / "console.log"
        self.process = None

    def own_ports(self) -> str:
        """Returns lines that configure a separate free port for every listener."""
        rest = "".join(f"{name}_address=http://127.0.0.1:{self.ports[name]}\n" for name in LISTENERS[:3])
        return rest + "".join(f"{name}_port={self.ports[name]}\n" for name in LISTENERS[3:])

    def __enter__(self):
        self.config.write_text(self.own_ports() + self.config.read_text())
        words = [*self.words, "--ts-config", str(self.config), "--model-store", str(self.store)]
        command = [str(binary()), "torchserve", *words, *(["--", *self.options] if self.options else [])]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PHAROS_", "TS_"))}
        environment |= {"TMPDIR": str(self.folder / "tmp"), "PHAROS_PYTHON": PYTHON} | self.environment
        with open(self.log, "wb") as log:
            self.process = Process(command, stdout=log, stderr=log, env=environment, cwd=self.folder)
        eventually("the server logs that it has started", lambda: STARTED in self.console() or self.process.poll())
        assert self.process.poll() is None, self.console()
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            check_process(self.process, self.log)
        if self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(DEADLINE_S) == 0, self.console()[-4000:]
            check_process(self.process, self.log)

    def console(self) -> str:
        """Returns the console output so far."""
        return self.log.read_text(errors="replace")

    def ask(self, path: str, body=None, method: str = "", at: str = "inference", headers=None) -> tuple:
        """Sends one request; returns the status and the body."""
        connection = HTTPConnection("127.0.0.1", self.ports[at], timeout=DEADLINE_S)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def predict(self, model: str, body: str = "x") -> tuple:
        """Sends a prediction."""
        return self.ask(f"/predictions/{model}", body)

    def register(self, url: str, **more) -> tuple:
        """Sends POST /models."""
        query = urlencode({"url": url, "initial_workers": 1, "synchronous": "true"} | more)
        return self.ask(f"/models?{query}", method="POST", at="management")

    def ready(self, model: str):
        """Waits until a model answers."""
        eventually(f"{model} answers", lambda: self.predict(model)[0] == 200)


GOLDEN = sorted((ROOT / "tests/golden_torchserve").glob("*/config.properties"))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.parent.name)
def test_configurations_of_a_real_torchserve_start_the_server(tmp_path, golden):
    """Only the ports are changed; a missing metrics.yaml is reported and not required."""
    text = golden.read_text()
    server = TorchServe(tmp_path, {"echo.mar": zipped(files("echo"))}, words=["--models", "echo.mar"])
    for name in LISTENERS:
        text = re.sub(rf"(?m)^({name}_(?:address=http://127\.0\.0\.1:|port=))\d+$", rf"\g<1>{server.ports[name]}", text)
    server.config.write_text(text)
    server.own_ports = lambda: ""
    with server:
        server.ready("echo")
        assert server.ask("/ping") == (200, '{\n  "status": "Healthy"\n}\n')
        assert server.ask("/metrics", at="metrics")[0] == 200
        assert {path.name for path in (tmp_path / "logs").glob("*.log")} == {
            "access_log.log", "model_log.log", "ts_log.log", "ts_metrics.log", "model_metrics.log",
        }  # fmt: skip
        warning = "does not exist; using the built-in metrics"
        assert ("metrics_config=" in text) == (warning in server.console())


def test_archives_of_every_form_and_place(tmp_path):
    """Files and directories of the store, file:// and http:// URLs, also with redirects."""
    content = files("named", "def handle(data, context):\n    return ['%s'] * len(data) if data else None\n")
    of = lambda name: {key: text.replace("named", name).replace("%s", name) for key, text in content.items()}  # noqa: E731
    inside = {"top/" + key: text for key, text in of("inner").items()}
    archives = {"zip.mar": zipped(of("zip")), "tar.tar.gz": tarred(of("tar")), "inner.tar.gz": tarred(inside)}
    web = {"/far.mar": zipped(of("far")), "/net.mar": zipped(of("net")), "/private/far.mar": zipped(of("private"))}

    class Web(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            path = self.path.split("?")[0]
            if path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", path[3:])
                self.end_headers()
                return
            self.send_response(200 if path in web else 404)
            self.end_headers()
            self.wfile.write(web.get(path, b""))

        def log_message(self, *_):
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{site.server_port}"
    outside = tmp_path / "outside"
    for name, text in of("folder").items():
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_text(text)
    (tmp_path / "file.mar").write_bytes(zipped(of("file")))
    allowed = f"allowed_urls=file://{tmp_path}/.*,{base}/far.mar,{base}/net.mar,{base}/to/.*,{base}/none.mar\n"
    with TorchServe(tmp_path / "own", archives, f"default_workers_per_model=1\n{allowed}", ["--models", "all"]) as server:
        for name in ("zip", "tar", "inner"):
            server.ready(name)
            assert server.predict(name) == (200, name)
        for url, name in (
            (f"file://{tmp_path}/file.mar", "file"),
            (str(outside), "folder"),
            (f"{base}/far.mar", "far"),
            (f"{base}/to//127.0.0.1:{site.server_port}/net.mar", "net"),
            (f"{base}/to/far.mar", "again"),
        ):
            asked = {"model_name": "again"} if name == "again" else {}
            if asked:
                # Both URLs end in the same name, under which the archive is stored.
                assert server.register(url, **asked)[0] == 500
                assert server.ask("/models/far", method="DELETE", at="management")[0] == 200
            assert server.register(url, **asked)[0] == 200, url
            assert server.predict(name) == (200, "far" if name == "again" else name)
        for url, status, part in (
            (f"{base}/private/far.mar", 400, "does not match any allowed URL(s)"),
            (f"{base}/to/private/other.mar", 400, "does not match any allowed URL(s)"),
            (f"{base}/to//localhost:{site.server_port}/away.mar", 400, "does not match any allowed URL(s)"),
            (f"{base}/none.mar", 400, "Failed to download archive from"),
            ("file:///etc/passwd", 400, "does not match any allowed URL(s)"),
            ("/etc", 400, "does not match any allowed URL(s)"),
            ("../file.mar", 404, "Relative path is not allowed in url: ../file.mar"),
            ("absent.mar", 404, "Model not found at: absent.mar"),
        ):
            got = server.register(url, model_name="other")
            assert (got[0], part in got[1]) == (status, True), (url, got)
        assert server.ask("/models/file", method="DELETE", at="management")[0] == 200
        assert (tmp_path / "file.mar").is_file(), "the user's file must be kept"
    site.shutdown()
    assert list((tmp_path / "own/tmp").iterdir()) == [], "temporary files must be removed"


def symlinked() -> bytes:
    """Returns a .mar with a symbolic link."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo("out")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc")
        for name, text in files("hostile").items():
            archive.writestr(name, text)
    return out.getvalue()


def boasting() -> bytes:
    """Returns a .mar with a file that declares 2 GiB. (Unit tests unpack one that really has this size.)"""
    content = zipped(files("hostile") | {"zeros": "0" * 1_234_567})
    return content.replace((1_234_567).to_bytes(4, "little"), (2**31 - 1).to_bytes(4, "little"))


HOSTILE = {
    "slip.mar": (zipped(files("hostile") | {"../../slipped": "x"}), "is outside the archive"),
    "root.mar": (zipped(files("hostile") | {"/tmp/slipped": "x"}), "is outside the archive"),
    "link.mar": (symlinked(), "is a link or a device"),
    "link.tar.gz": (tarred(files("hostile"), ("out", "/etc")), "is a link or a device"),
    "slip.tar.gz": (tarred(files("hostile") | {"../slipped": "x"}), "is outside the archive"),
    "bomb.mar": (boasting(), "the unpacked size exceeds"),
    "cut.mar": (zipped(files("hostile"))[:-30], "broken zip file"),
    "text.mar": (b"no archive", "Model name is not defined."),
    "empty.mar": (b"", "Model name is not defined."),
    "manifest.mar": (zipped({"MAR-INF/MANIFEST.json": "{"}), "invalid manifest"),
    "lsp.mar": (zipped({"MAR-INF/MANIFEST.json": manifest("l").replace('"python"', '"LSP"')}), "its runtime is 'LSP'"),
    "yaml.mar": (zipped(files("hostile", yaml="a: [\n")), "model-config.yaml is invalid"),
    "handler.mar": (zipped({"service.py": ECHO}), "names no handler"),
}


def test_hostile_archives_are_refused_and_the_others_served(tmp_path):
    """At the start and by request, with the archive's name and the reason; no files of them remain."""
    archives = {name: content for name, (content, _) in HOSTILE.items()} | {"echo.mar": zipped(files("echo"))}
    with TorchServe(tmp_path, archives, "default_workers_per_model=1\n", ["--models", "all"]) as server:
        server.ready("echo")
        for name, (_, part) in HOSTILE.items():
            # A file that is not an archive is treated as an empty one: at the start the file's name is the model's.
            at_start = "names no handler" if part == "Model name is not defined." else part
            assert any(name in line and at_start in line for line in server.console().splitlines()), (name, server.console())
            status, text = server.register(name)
            assert (status, part in json.loads(text)["message"]) == (400, True), text
        assert server.predict("echo", "still there") == (200, "still there")
        kept = lambda: list((tmp_path / "tmp").glob("pharos-torchserve-*/models/*"))  # noqa: E731
        eventually("only the files of the other archive are kept", lambda: len(kept()) == 1)
        assert not list(tmp_path.rglob("slipped")) and not Path("/tmp/slipped").exists()


def test_a_file_that_is_not_an_archive_has_the_default_manifest(tmp_path):
    """As in TorchServe: a request with a model name and a handler (of `ts`, or installed) registers the file."""
    with TorchServe(tmp_path, {"text.mar": b"no archive"}, "default_workers_per_model=1\n") as server:
        answer = server.register("text.mar", model_name="bare", handler="service:handle", initial_workers=0)
        assert answer[0] == 200 and 'Model \\"bare\\" Version: 1.0 registered with 0 initial workers' in answer[1], answer
        described = json.loads(server.ask("/models/bare", at="management")[1])[0]
        assert (described["modelUrl"], described["runtime"], described["minWorkers"]) == ("text.mar", "python", 0)
        status, text = server.register("text.mar", model_name="other", handler="service:handle")
        assert status == 500 and "Failed to start workers for model other version: 1.0" in text


def test_settings_of_the_yaml_file_are_used(tmp_path):
    """Overrides `models` and the defaults, and is overridden by the request; invalid values are reported."""
    yaml = "minWorkers: 1\nmaxWorkers: 3\nbatchSize: 4\nmaxBatchDelay: 7\nresponseTimeout: soon\njobQueueSize: 9\nown: {a: 1}\n"
    said = {"said": {"1.0": {"marName": "said.mar", "batchSize": 2, "responseTimeout": 33, "minWorkers": 2}}}
    properties = f"models={json.dumps(said)}\ndefault_response_timeout=44\njob_queue_size=5\n"
    with TorchServe(tmp_path, {"said.mar": zipped(files("said", yaml=yaml))}, properties, ["--models", "said.mar"]) as server:
        server.ready("said")
        shown = json.loads(server.ask("/models/said", at="management")[1])[0]
        expected = {"minWorkers": 1, "maxWorkers": 3, "batchSize": 4, "maxBatchDelay": 7, "responseTimeout": 33}
        assert {key: shown[key] for key in expected} == expected
        assert shown["jobQueueStatus"]["remainingCapacity"] == 9
        assert 'model-config.yaml: responseTimeout is "soon"' in server.console()


SLOW = """import time
def handle(data, context):
    if data is None:
        return
    text = bytes(data[0]["body"])
    if text == b"hang":
        time.sleep(600)
    return [text] * len(data)
"""


def test_a_worker_that_hangs_is_replaced(tmp_path):
    """`responseTimeout` ends the batch with TorchServe's error text, and the worker restarts after one second."""
    archive = zipped(files("slow", SLOW, yaml="responseTimeout: 1\nminWorkers: 1\n"))
    with TorchServe(tmp_path, {"slow.mar": archive}, words=["--models", "slow.mar"]) as server:
        server.ready("slow")
        began = time.monotonic()
        status, text = server.predict("slow", "hang")
        took = time.monotonic() - began
        assert (status, json.loads(text)["message"]) == (500, "Worker died."), text
        assert took >= 1
        server.ready("slow")
        assert time.monotonic() - began >= 1.8


def test_a_model_that_takes_too_long_to_load_is_refused(tmp_path):
    """`startupTimeout` of the archive, or of the request."""
    slow = "import time\ntime.sleep(600)\n" + ECHO
    archives = {"slow.mar": zipped(files("slow", slow)), "said.mar": zipped(files("said", slow, yaml="startupTimeout: 1\n"))}
    with TorchServe(tmp_path, archives) as server:
        for url, more in (("slow.mar", {"startup_timeout": 1}), ("said.mar", {})):
            status, text = server.register(url, **more)
            assert status == 500, text
        assert json.loads(server.ask("/models", at="management")[1])["models"] == []


def test_what_a_handler_leaves_beside_its_files_is_removed(tmp_path):
    """Also directories of any depth."""
    source = (
        "import os\n"
        "def handle(data, context):\n"
        "    if data:\n"
        "        os.chdir(os.path.dirname(__file__))\n"
        "        for _ in range(30_000):\n"
        "            os.mkdir('d')\n"
        "            os.chdir('d')\n"
        "        return ['done'] * len(data)\n"
    )
    with TorchServe(tmp_path, {"deep.mar": zipped(files("deep", source)), "echo.mar": zipped(files("echo", ECHO))}) as server:
        for name in ("deep", "echo"):
            assert server.register(f"{name}.mar")[0] == 200
        assert server.predict("deep") == (200, "done")
        unpacked = lambda: len(list((tmp_path / "tmp").glob("pharos-torchserve-*/models/*")))  # noqa: E731
        assert unpacked() == 2
        assert server.ask("/models/deep", method="DELETE", at="management")[0] == 200
        eventually("its files are removed", lambda: unpacked() == 1)
        assert server.predict("echo") == (200, "x")


def test_requirements_are_installed_if_the_configuration_says_so(tmp_path):
    """Beside the handler (for a directory, in a directory of the server), for that model only; a failed installation is an error
    of the archive."""
    if subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no pip")
    source = "import pharos_tried\ndef handle(data, context):\n    return [pharos_tried.WORD] * len(data) if data else None\n"
    asking = {"requirementsFile": "requirements.txt"}
    with_wheel = files("good", source, **asking) | {"requirements.txt": f"{wheel(tmp_path)}\n"}
    without = files("bad", source, **asking) | {"requirements.txt": f"{tmp_path}/none-1.0-py3-none-any.whl\n"}
    outside = files("out", source, requirementsFile="../r.txt")
    archives = {"good.mar": zipped(with_wheel), "bad.mar": zipped(without), "out.mar": zipped(outside)}
    own = tmp_path / "on/store/own"
    for name, text in (files("own", source, **asking) | {"requirements.txt": f"{wheel(tmp_path)}\n"}).items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    before = sorted(path.relative_to(own) for path in own.rglob("*"))
    with TorchServe(tmp_path / "on", archives, "install_py_dep_per_model=true\n") as server:
        for name in ("good.mar", "own"):
            assert server.register(name)[0] == 200, server.console()
            assert server.predict(name.removesuffix(".mar")) == (200, "installed")
        found = sorted(path.relative_to(own) for path in own.rglob("*") if "__pycache__" not in path.parts)
        assert found == before, "the user's directory must not change"
        status, text = server.register("bad.mar")
        assert (status, "Custom pip package installation failed for model bad" in text) == (400, True), text
        assert "is outside the archive" in server.register("out.mar")[1]
    with TorchServe(tmp_path / "off", archives) as server:
        assert server.register("good.mar")[0] == 500


def test_variables_that_workers_do_not_get(tmp_path):
    """`blacklist_env_vars` hides variables whose whole name it matches, and the server hides those that are not usual."""
    source = "import os\ndef handle(data, context):\n    return [' '.join(sorted(os.environ))] * len(data) if data else None\n"
    server = TorchServe(
        tmp_path, {"env.mar": zipped(files("env", source))}, "blacklist_env_vars=.*SECRET.*|ONE\n", ["--models", "env.mar"],
        ["--worker-variables=ONE.*|A_.*"],
    )
    server.environment = {"A_SECRET_KEY": "1", "ONE": "1", "ONE_MORE": "1", "OTHER": "1"}
    with server:
        server.ready("env")
        names = server.predict("env")[1].split()
        assert "ONE_MORE" in names and not {"A_SECRET_KEY", "ONE", "OTHER"} & set(names)


TS = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"


def test_lines_are_in_torchserves_files_and_on_the_console(tmp_path):
    """Requests, output of handlers, and the server's own log lines, each in its layout."""
    source = "def handle(data, context):\n    print('said by the handler')\n    return ['x'] * len(data) if data else None\n"
    with TorchServe(tmp_path, {"m.mar": zipped(files("m", source))}, words=["--models", "m.mar"]) as server:
        server.ready("m")
        server.ask("/predictions/none", "x")

        def shown(name: str, pattern: str):
            text = (tmp_path / "logs" / name).read_text() if name else server.console()
            return re.search(rf"(?m)^{TS} {pattern}$", text)

        for name, pattern in (
            ("access_log.log", r'- /127\.0\.0\.1:\d+ "POST /predictions/m HTTP/1\.1" 200 \d+'),
            ("access_log.log", r'- /127\.0\.0\.1:\d+ "POST /predictions/none HTTP/1\.1" 404 \d+'),
            ("model_log.log", r"\[INFO \] \S+ MODEL_LOG - said by the handler"),
            ("ts_log.log", r"\[INFO \] \S+ \S+ - .*read configuration from .*"),
            ("ts_metrics.log", r"- Requests2XX\.Count:1\.0\|#Level:Host\|#hostname:[^,]+,timestamp:\d+"),
            ("model_metrics.log", r"- PredictionTime\.ms:[0-9.E-]+\|#ModelName:m,Level:Model\|#hostname:[^,]+,requestID:\S+,timestamp:\d+"),
            ("", r'\[INFO \] \S+ ACCESS_LOG - /127\.0\.0\.1:\d+ "POST /predictions/m HTTP/1\.1" 200 \d+'),
            ("", r"\[INFO \] \S+ MODEL_LOG - said by the handler"),
            ("", r"\[INFO \] \S+ TS_METRICS - Requests4XX\.Count:1\.0\|#Level:Host\|#hostname:[^,]+,timestamp:\d+"),
        ):  # fmt: skip
            eventually(f"{pattern} in {name or 'the console'}", lambda: shown(name, pattern))


def test_keys_are_used_reported_or_refused(tmp_path):
    """Keys without effect, unknown keys, invalid values; environment variables if the file enables them."""
    server = TorchServe(
        tmp_path,
        properties="number_of_netty_threads=4\njob_queue_siz=3\nenable_envvars_config=true\nmodel_store=$$HERE$$\n",
        options=["--http-port", str(free_ports(1)[0])],
    )
    server.environment = {"HERE": "/nowhere", "TS_ENABLE_METRICS_API": "false"}
    with server:
        for text in (
            "number_of_netty_threads=4 has no effect:",
            "unknown key 'job_queue_siz' in config.properties is ignored; did you mean 'job_queue_size'?",
        ):
            eventually(text, lambda: text in server.console())
        port = int(server.options[1])
        ask = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        ask.request("GET", "/v2/health/live")
        assert ask.getresponse().status == 200, "the KServe port is open if an option of pharos names it"
        with pytest.raises(ConnectionRefusedError):
            server.ask("/metrics", at="metrics")
    for text, part in (
        ("job_queue_size=many\n", "job_queue_size=many: allowed are whole numbers"),
        ("inference_address=localhost\n", "inference_address=localhost: "),
        ("model_store=$$NOWHERE$$\n", "Invalid Environment Variable NOWHERE"),
        ("keystore=k.p12\nmetrics_address=https://127.0.0.1:1\n", "Java key stores are not supported"),
    ):
        config = tmp_path / "wrong.properties"
        config.write_text(text)
        for words in ([], ["--foreground"]):
            command = [binary(), "torchserve", *words, "--ncs", "--ts-config", config, "--model-store", server.store]
            environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=DEADLINE_S)
            assert done.returncode == 1 and part in done.stderr, done
    assert list((tmp_path / "tmp").iterdir()) == []


def test_files_of_a_killed_server_are_removed(tmp_path):
    """Its workers end with it, and the next server removes its directory."""
    archives = {"echo.mar": zipped(files("echo"))}
    with TorchServe(tmp_path, archives, words=["--models", "echo.mar"]) as server:
        server.ready("echo")
        pids = [worker["pid"] for worker in json.loads(server.ask("/models/echo", at="management")[1])[0]["workers"]]
        assert pids and all(alive(pid) for pid in pids)
        server.process.kill()
        server.process.wait()
    eventually("the workers are gone", lambda: not any(alive(pid) for pid in pids))
    assert len(list((tmp_path / "tmp").glob("pharos-torchserve-*"))) == 1
    with TorchServe(tmp_path, archives) as server:
        assert len(list((tmp_path / "tmp").glob("pharos-torchserve-*"))) == 1


def test_the_script_is_the_launcher(tmp_path):
    """The Python package's `torchserve` finds the server, and passes on the arguments and this Python for its models."""
    script = Path(PYTHON).parent / "torchserve"
    if not script.exists():
        pytest.skip(f"{PYTHON} has no script torchserve")
    run = lambda **more: subprocess.run(  # noqa: E731
        [script, "--version"], capture_output=True, text=True, timeout=DEADLINE_S, env={"PATH": "/usr/bin", **more}
    )
    assert "TorchServe Version is 0.12.0" in run(PHAROS_BIN=str(binary())).stdout
    assert "TorchServe Version is 0.12.0" in run(PATH=f"{binary().parent}:/usr/bin").stdout
    if not (script.parent / "pharos").exists():
        assert "set PHAROS_BIN" in run().stderr
    assert "cannot start '/nowhere'" in run(PHAROS_BIN="/nowhere").stderr
