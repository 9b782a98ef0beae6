"""The wheel `pharos-server` for aarch64: installed by pip beside a Debian for that architecture, and run by QEMU.

QEMU emulates the instructions, not the kernel: page sizes and the order of memory accesses of real machines are not tested.
"""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from harness.server import EXAMPLES, Server, binary

QEMU = shutil.which("qemu-aarch64-static")
WHEELS = sorted((binary().parents[1] / "wheels").glob("pharos_server-*_aarch64.whl"))
PYTHON = "python3.11"
"""The Python of Debian bookworm."""
MODEL = """
import platform
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        name = np.array([platform.machine()], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("MACHINE", name)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "MACHINE" data_type: TYPE_STRING dims: 1 }
"""


def missing() -> str:
    """Returns why the wheel cannot be run; empty if it can."""
    if not WHEELS:
        return "no wheel for aarch64: make wheel builds it"
    if WHEELS[-1].stat().st_mtime < binary().stat().st_mtime:
        return f"{WHEELS[-1].name} is older than the tested executables: make wheel builds it again"
    return "" if QEMU and shutil.which("mmdebstrap") else "not installed: qemu-user-static, mmdebstrap"


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


def run(*command):
    """Runs a program, which must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


@functools.cache
def skipped_without(*command):
    """Runs a program that fetches packages; skips the test if it cannot."""
    try:
        run(*command)
    except AssertionError as error:
        pytest.skip(f"packages for aarch64 cannot be fetched: {error}")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> dict:
    """Programs that run their aarch64 counterparts, by name: the server, the worker and Python."""
    home = tmp_path_factory.mktemp("aarch64")
    root, packages, programs = home / "root", home / "packages", home / "bin"
    skipped_without("mmdebstrap", "--variant=extract", "--architectures=arm64", f"--include={PYTHON},libstdc++6", "bookworm", root)
    platforms = [f"--platform={name}_aarch64" for name in ("manylinux_2_28", "manylinux2014")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", packages, *platforms]
    skipped_without(*pip, "--python-version=3.11", "--only-binary=:all:", WHEELS[-1], "numpy<2.4")
    programs.mkdir()
    originals = {
        "python3": root / "usr/bin" / PYTHON,
        "pharos": packages / "pharos_worker/_bin/pharos",
        "pharos-worker": packages / "pharos_worker/_bin/pharos-worker",
    }
    for name, original in originals.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {QEMU} -L {root} {original} "$@"\n')
        (programs / name).chmod(0o755)
    return {name: programs / name for name in originals} | {"packages": packages}


class Emulated(Server):
    """The server of the wheel."""

    def __init__(self, folder: Path, repository: Path, emulated: dict):
        super().__init__(folder, [repository], [f"--worker-binary={emulated['pharos-worker']}"])
        self.command[0] = str(emulated["pharos"])
        self.environment = {
            "PATH": f"{emulated['python3'].parent}:/usr/bin:/bin",
            "PYTHONPATH": str(emulated["packages"]),
            "PHAROS_PYTHON": str(emulated["python3"]),
        }


def test_onnx_models_and_ensembles_run(emulated, tmp_path, monkeypatch):
    """The embedded ONNX runtime has other code for this architecture; the pipeline is an ensemble of ONNX models."""
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    from classify import classify, classify_scanned

    held_out = np.load(EXAMPLES.parent / "digits_held_out.npz")
    images, labels = held_out["images"][:32].astype(np.float32), held_out["labels"][:32]
    with Emulated(tmp_path, EXAMPLES, emulated) as server:
        assert set(server.index()) == {path.name for path in EXAMPLES.iterdir()}
        client = grpcclient.InferenceServerClient(server.grpc)
        for ask in (classify, classify_scanned):
            digits, probabilities = ask(client, grpcclient, images)
            assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)
            print(sum(digits == labels))
        client.close()
    assert False


def test_python_models_run(emulated, tmp_path):
    (tmp_path / "models/where/1").mkdir(parents=True)
    (tmp_path / "models/where/config.pbtxt").write_text(CONFIG)
    (tmp_path / "models/where/1/model.py").write_text(MODEL)
    with Emulated(tmp_path, tmp_path / "models", emulated) as server:
        status, answer = server.infer("where", {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [0]}]})
        assert status == 200 and answer["outputs"][0]["data"] == ["aarch64"], answer
