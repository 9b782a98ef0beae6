"""Code that came by request runs in a sandbox by default; models of the operator do not (`--worker-sandbox=uploads`)."""

import base64
import json
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness.ports import free_ports
from harness.server import EXAMPLES, Server
from harness.waiting import eventually
from security.hostile import attack, load, write_model
from security.sandbox_support import lacking
from torchserve.archive_files import files, zipped
from torchserve.home import HOST, Home

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="without root, a model could not read the files of others anyway")


@pytest.fixture(scope="module", autouse=True)
def kernel():
    """Skips the tests on a kernel that cannot make a whole sandbox."""
    if why := lacking():
        pytest.skip(f"this kernel cannot make a whole sandbox: {why}")


def started(tmp_path, *options) -> Server:
    """Returns a server with the hostile model in its repository."""
    write_model(tmp_path / "models", "own")
    return Server(tmp_path, [tmp_path / "models"], ["--model-control-mode=explicit", "--load-model=own", *options])


def test_files_of_a_load_run_in_a_sandbox_by_default(tmp_path):
    with started(tmp_path) as server:
        assert load(server, "sent") == (200, "")
        assert attack(server, "read", "/etc/shadow", "sent") == "PermissionError"
        assert attack(server, "connect", server.http_port, "sent") == "PermissionError"
        assert attack(server, "kill", server.process.pid, "sent") == "PermissionError"
        assert attack(server, "numpy", model="sent") == "done"
        # The models of the operator have the rights of the server, also after a load without files.
        assert server.ask("POST", "/v2/repository/models/own/load", b"")[0] == 200
        assert attack(server, "read", "/etc/shadow", "own") == "done"
        for value in ("off", "network"):
            status, answer = load(server, "sent", sandbox=value)
            text = f"its parameter 'sandbox' is '{value}', which --worker-sandbox=uploads does not allow for code that came by request"
            assert status == 400 and text in json.loads(answer)["error"], answer
        # The previous load serves on.
        assert attack(server, "read", "/etc/shadow", "sent") == "PermissionError"


def test_a_configuration_that_brings_code_counts_and_one_that_does_not_changes_nothing(tmp_path):
    with started(tmp_path) as server:
        _, answer = server.ask("GET", "/v2/models/own/config", b"")
        config = json.loads(answer)
        config["instance_group"] = [{"count": 2, "kind": "KIND_CPU"}]
        again = lambda: server.ask("POST", "/v2/repository/models/own/load", json.dumps({"parameters": {"config": json.dumps(config)}}))  # noqa: E731
        assert again() == (200, "")
        assert attack(server, "read", "/etc/shadow", "own") == "done"
        config["parameters"]["EXECUTION_ENV_PATH"] = {"string_value": "/nowhere"}
        status, answer = again()
        assert status == 400 and "'/nowhere', which does not exist" in answer, answer


@pytest.mark.parametrize("flag, expected", [("off", "done"), ("auto", "PermissionError"), ("on", "PermissionError")])
def test_other_modes(tmp_path, flag, expected):
    with started(tmp_path, f"--worker-sandbox={flag}") as server:
        assert load(server, "sent") == (200, "")
        assert attack(server, "read", "/etc/shadow", "sent") == expected
        assert load(server, "sent", sandbox="off")[0] == (200 if flag == "off" else 400)


def test_a_directory_that_a_request_registers_runs_in_a_sandbox(tmp_path):
    """SageMaker's `POST /models` names a directory."""
    write_model(tmp_path / "other", "hostile", parameter="")
    (port,) = free_ports(1)
    options = ["--allow-sagemaker=true", f"--sagemaker-port={port}", "--model-control-mode=explicit"]
    (tmp_path / "models").mkdir()
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        body = json.dumps({"model_name": "hostile", "url": str(tmp_path / "other/hostile")})
        status, answer = server.ask("POST", "/models", body, address=f"127.0.0.1:{port}")
        assert status == 200, answer
        assert attack(server, "read", "/etc/shadow") == "PermissionError"


HANDLER = """
def handle(data, context):
    if not data:
        return None
    try:
        open("/etc/shadow").close()
        return ["read"] * len(data)
    except PermissionError:
        return ["refused"] * len(data)
"""


class Files(ThreadingHTTPServer):
    """Serves the files of a directory."""

    def __init__(self, folder):
        super().__init__((HOST, 0), partial(SimpleHTTPRequestHandler, directory=folder))
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def remote(tmp_path):
    """A server with archives for downloads, as the URL of its directory."""
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote/far.mar").write_bytes(zipped(files("far", HANDLER)))
    with Files(tmp_path / "remote") as served:
        yield f"http://{HOST}:{served.server_port}"
        served.shutdown()


def test_archives_from_an_address_run_in_a_sandbox_and_those_of_the_store_do_not(tmp_path, remote):
    home = Home(tmp_path / "home", ["allowed_urls=http://.*,file://.*"])
    (home.store / "near.mar").write_bytes(zipped(files("near", HANDLER)))
    (tmp_path / "beside.mar").write_bytes(zipped(files("beside", HANDLER)))
    workers = "&initial_workers=1&synchronous=true"
    with home:
        for url in (f"{remote}/far.mar", "near.mar", f"file://{tmp_path}/beside.mar"):
            home.register(url, workers)
        found = {name: home.predict(name, b"x")[1] for name in ("far", "near", "beside")}
        assert found == {"far": b"refused", "near": b"read", "beside": b"refused"}
        # The download is in the store now. Its name does not make it the operator's.
        assert (home.store / "far.mar").exists()
        home.register("far.mar", f"&model_name=again{workers}")
        assert home.predict("again", b"x") == (200, b"refused")


BUILD = """
import zipfile

def build_wheel(folder, *more):
    try:
        open("/etc/shadow").close()
        word = "read"
    except PermissionError:
        word = "refused"
    name = "built-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("built.py", f"WORD = {word!r}")
        wheel.writestr("built-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: built\\nVersion: 1.0\\n")
        wheel.writestr("built-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: none\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("built-1.0.dist-info/RECORD", "")
    return name
"""
"""A build backend (PEP 517) that pip runs: whether it can read a file of the machine is a constant of the package."""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n[project]\nname = "built"\nversion = "1.0"\n'
BUILT = "import built\ndef handle(data, context):\n    return [built.WORD] * len(data) if data else None\n"


def test_pip_builds_packages_of_an_archive_from_an_address_in_a_sandbox(tmp_path):
    content = files("built", BUILT, requirementsFile="requirements.txt")
    content |= {"requirements.txt": "./package\n", "package/pyproject.toml": PROJECT, "package/build.py": BUILD}
    (tmp_path / "far.mar").write_bytes(zipped(content))
    home = Home(tmp_path / "home", ["allowed_urls=file://.*", "install_py_dep_per_model=true"])
    (home.store / "near.mar").write_bytes(zipped(content))
    with home:
        for url, name in (("near.mar", "near"), (f"file://{tmp_path}/far.mar", "far")):
            home.register(url, f"&model_name={name}&initial_workers=1&synchronous=true")
        assert {name: home.predict(name, b"x")[1] for name in ("near", "far")} == {"near": b"read", "far": b"refused"}
        assert not list(tmp_path.rglob(".pip*")), "files of pip are left behind"


def test_archives_of_the_command_line_are_those_of_the_operator(tmp_path, remote):
    with Home(tmp_path / "home", ["allowed_urls=http://.*", f"load_models=far={remote}/far.mar"]) as home:
        eventually("the handler is loaded", lambda: home.predict("far", b"x") == (200, b"read"))


def test_models_without_code_serve_in_the_sandbox(tmp_path):
    """ONNX files of a load, with ONNX Runtime or the embedded runtime."""
    with Server(tmp_path, [EXAMPLES], ["--model-control-mode=explicit"]) as server:
        model = (EXAMPLES / "digits/1/model.onnx").read_bytes()
        parameters = {"config": json.dumps({"backend": "onnxruntime"}), "file:1/model.onnx": base64.b64encode(model).decode()}
        assert server.ask("POST", "/v2/repository/models/sent/load", json.dumps({"parameters": parameters}))[0] == 200
        image = {"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": [0.0] * 64}
        assert server.infer("sent", {"inputs": [image]})[0] == 200
