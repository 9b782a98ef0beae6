"""The wheel `pharos-server`: packed from the built files, installed into an empty environment, and used through its commands."""

import os
import re
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from deploy.wheels import NATIVE, elf, packed, packer
from documents import document_blocks
from harness.gguf import write_model
from harness.llamacpp import LIBRARY, client_of, needs_llamacpp
from harness.ports import free_ports
from harness.server import EXAMPLES, ROOT, Process, Server, binary
from harness.waiting import DEADLINE_S, eventually

MOST_BYTES = 55e6
HANDLER = "def handle(data, context):\n    return None if data is None else ['from the archive'] * len(data)\n"
PROPERTIES = """
inference_address=http://127.0.0.1:{}
management_address=http://127.0.0.1:{}
metrics_address=http://127.0.0.1:{}
grpc_inference_port={}
grpc_management_port={}
disable_token_authorization=true
"""
MODEL = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        prefix = np.array([sys.prefix], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PREFIX", prefix)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "PREFIX" data_type: TYPE_STRING dims: 1 }
"""
pytestmark = pytest.mark.skipif(not NATIVE.exists(), reason=f"{NATIVE} does not exist: make python-worker builds it")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of the tested executables."""
    return packed(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def scripts(wheel, tmp_path_factory) -> Path:
    """The folder of the commands of an environment that has only this package; numpy and ONNX Runtime are those of the tests."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python3"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True, timeout=120)
    (packages,) = home.glob("lib/python*/site-packages")
    # Later in the search path than the installed package.
    (packages / "tests.pth").write_text(sysconfig.get_path("platlib") + "\n")
    return home / "bin"


class Installed(Server):
    """A server that is started by a command of the environment, which is not activated."""

    def __init__(self, folder: Path, command: list):
        super().__init__(folder, [])
        self.command = command + [argument for argument in self.command[1:] if argument.startswith("--")]

    def launch(self, **_):
        """Starts the process with the variables of a plain login."""
        with open(self.log_path, "wb") as log:
            environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.log_path.parent)}
            self.process = Process(self.command, stdout=log, stderr=log, env=environment, cwd=self.log_path.parent)


def test_the_wheel_has_every_file_and_is_small(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as found:
        names = set(found.namelist())
        assert {"triton_python_backend_utils.py", "pharos_worker/_native.abi3.so", "pharos_worker/torchserve/ts/context.py"} <= names
        modes = {name.partition("/_bin/")[2]: found.getinfo(name).external_attr >> 16 & 0o777 for name in names if "/_bin/" in name}
        llamacpp = {f"backends/llamacpp/{path.name}": 0o755 for path in LIBRARY.parent.glob("*.so*")}
        workers = {f"backends/{name}/pharos-worker-{name}": 0o755 for name in ("text", "tract")}
        assert modes == {"pharos": 0o755, "pharos-worker": 0o755} | workers | llamacpp
        recorded = found.read(next(name for name in names if name.endswith("RECORD"))).decode().splitlines()
        assert {line.split(",")[0] for line in recorded} == names


def test_the_extras_install_what_onnx_runtime_needs(wheel):
    """The version that workers require; for GPUs also the libraries without which the CUDA provider does not load."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().splitlines()
    # A long string of Rust continues on the next line after a backslash.
    text = re.sub(r"\\\n\s*", "", (ROOT / "worker/src/backend/onnxruntime.rs").read_text())
    version = re.search(r"it needs version ([\d.]+) or later", text)[1]
    assert f'Requires-Dist: onnxruntime>={version}; extra == "onnx"' in lines, lines
    assert f'Requires-Dist: onnxruntime-gpu[cuda,cudnn]>={version}; extra == "onnx-gpu"' in lines, lines


def test_the_same_files_make_the_same_wheel(tmp_path):
    for name in ("pharos", "pharos-worker", "pharos-worker-text", "pharos-worker-tract", "lib_native.so"):
        (tmp_path / name).write_bytes(elf(183, b"GLIBC_2.17"))
    first, second = (packer().pack(tmp_path, tmp_path / folder) for folder in ("a", "b"))
    assert first.name == second.name and first.name.endswith("-cp39-abi3-manylinux_2_17_aarch64.whl")
    assert first.read_bytes() == second.read_bytes()


def test_files_of_other_systems_are_refused(tmp_path):
    """A missing file, a text, and two architectures."""
    pack = packer()
    with pytest.raises(SystemExit, match="does not have pharos, pharos-worker, pharos-worker-text, pharos-worker-tract, lib_native.so"):
        pack.pack(tmp_path, tmp_path)
    with pytest.raises(SystemExit, match="is not an ELF file"):
        pack.machine(b"#!/bin/sh", "pharos")
    with pytest.raises(SystemExit, match="several architectures"):
        pack.platform_tag({"a": elf(62), "b": elf(183)})
    with pytest.raises(SystemExit, match="architecture 40"):
        pack.platform_tag({"a": elf(40)})
    several = {"a": elf(62, b"GLIBC_2.9", b"GLIBC_2.28", b"GLIBC_2.2.5"), "b": elf(62, b"GLIBC_2.17")}
    assert pack.platform_tag(several) == "manylinux_2_28_x86_64"


def test_the_commands_find_each_other(scripts):
    for command in ("pharos", "tritonserver", "torchserve", "pharos-worker"):
        assert os.access(scripts / command, os.X_OK)
    text = {c: subprocess.run([scripts / c, "--help"], env={}, capture_output=True, text=True) for c in ("pharos", "tritonserver", "torchserve")}
    assert [done.returncode for done in text.values()] == [0] * 3
    assert "[default: 8082]" in text["pharos"].stdout and "[default: 8002]" in text["tritonserver"].stdout
    assert "--model-store" in text["torchserve"].stdout
    alone = subprocess.run([scripts / "pharos-worker"], env={}, capture_output=True, text=True)
    assert "must be started by the pharos frontend" in alone.stderr


def test_serve_takes_a_model_file(scripts, tmp_path):
    """ONNX Runtime of the environment is used, although the environment is not activated."""
    model = tmp_path / "digits.onnx"
    model.write_bytes((EXAMPLES / "digits/1/model.onnx").read_bytes())
    with Installed(tmp_path, [str(scripts / "pharos"), "serve", str(model)]) as server:
        assert set(server.index()) == {"digits"}
        assert "onnxruntime" in server.log.read_text()


def test_the_first_request_of_the_readme_needs_only_the_wheel(scripts, tmp_path):
    """The commands of the section, in an empty directory, except for the ports."""
    readme = (ROOT / "README.md").read_text()
    assert "pharos serve --example digits" in readme.partition("## Install and start")[2].partition("## First request")[0]
    section = readme.partition("## First request")[2].partition("\n## ")[0].partition("A request from Python")[0]
    commands = [line for line in section.splitlines() if line.startswith("curl ")]
    (tmp_path / "empty").mkdir()
    answers = []
    with Installed(tmp_path, [str(scripts / "pharos"), "serve", "--example", "digits"]) as server:
        for command in commands:
            shell = document_blocks.curl_at(command, server)
            done = subprocess.run(shell, cwd=tmp_path / "empty", capture_output=True, text=True, timeout=DEADLINE_S)
            assert done.returncode == 0, f"{shell[-1]}\n{done.stdout}{done.stderr}"
            answers.append(done.stdout)
    ready, metadata, answer, metrics = answers
    assert "200 OK" in ready and '"name":"digits"' in metadata
    assert '"name":"label","datatype":"INT64","shape":[1,1],"data":[7]' in answer
    assert 'nv_inference_request_success{model="digits",version="1"} 1' in metrics


@needs_llamacpp
def test_serve_takes_a_language_model(scripts, tmp_path):
    """The backend of GGUF files is in the package: nothing else is installed."""
    write_model(tmp_path / "little.gguf")
    with Installed(tmp_path, [str(scripts / "pharos"), "serve", str(tmp_path / "little.gguf")]) as server:
        messages = [{"role": "user", "content": "hello"}]
        answer = client_of(server).chat.completions.create(model="little", messages=messages)
        assert answer.usage.completion_tokens > 0 and answer.choices[0].message.content


def test_python_models_run_with_the_python_of_the_environment(scripts, tmp_path):
    (tmp_path / "models/where/1").mkdir(parents=True)
    (tmp_path / "models/where/config.pbtxt").write_text(CONFIG)
    (tmp_path / "models/where/1/model.py").write_text(MODEL)
    with Installed(tmp_path, [str(scripts / "tritonserver"), "--model-store=models"]) as server:
        tensor = {"name": "IN", "shape": [1], "datatype": "FP32", "data": [0]}
        status, answer = server.infer("where", {"inputs": [tensor]})
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == [str(scripts.parent)]


def test_torchserve_serves_an_archive(scripts, tmp_path):
    """An archive of PyPI's torch-model-archiver."""
    (tmp_path / "handler.py").write_text(HANDLER)
    (tmp_path / "store").mkdir()
    pack = [sys.executable, "-m", "model_archiver.model_packaging", "--model-name=m", "--version=1.0", "--handler=handler.py"]
    subprocess.run([*pack, "--export-path=store"], cwd=tmp_path, check=True, capture_output=True, timeout=DEADLINE_S)
    ports = free_ports(5)
    (tmp_path / "config.properties").write_text(PROPERTIES.format(*ports))
    command = [scripts / "torchserve", "--start", "--foreground", "--model-store=store", "--models=m=m.mar", "--ts-config=config.properties"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, cwd=tmp_path)
    try:

        def predicted() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/predictions/m", b"x", DEADLINE_S) as answer:
                    return answer.read() == b"from the archive"
            except OSError:
                return False

        eventually("the model answers", predicted)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
