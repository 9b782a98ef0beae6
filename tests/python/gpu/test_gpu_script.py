"""Runs the script for a machine with a GPU, `tests/gpu/check.py`, without one: its steps run on CPUs, a step that fails or hangs
does not affect others, and the files that `pack.py` collects are sufficient."""

import json
import os
import subprocess
import sys
import time
import zipfile

import pytest

from gpu.devices import Devices
from gpu.world import TWO
from harness.fake_gpus import AT_WORK, Gpus
from harness.server import ROOT, alive, binary
from harness.waiting import DEADLINE_S, eventually

GPU = ROOT / "tests/gpu"
PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
has_worker = subprocess.run([PYTHON, "-c", "import pharos_worker, numpy"], capture_output=True).returncode == 0
has_client = subprocess.run([PYTHON, "-c", "import tritonclient.http"], capture_output=True).returncode == 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")]

sys.path.append(str(GPU))
import rows  # noqa: E402


def check(folder, *arguments, script=GPU / "check.py", environment=None) -> tuple:
    """Runs the script without a device; returns its exit status, its rows and its output."""
    command = [sys.executable, script, "--cpu", f"--python={PYTHON}", f"--out={folder}", *arguments]
    given = os.environ | {"PHAROS_BIN": str(binary().absolute())} | (environment or {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=given, cwd=folder.parent)
    results = folder / "results.json"
    return done.returncode, json.loads(results.read_text()) if results.exists() else [], done.stdout + done.stderr


@pytest.mark.slow
def test_the_quick_steps(tmp_path):
    """All rows are ok or have the reason for which they are skipped, and each step has rows that are ok."""
    steps = ["packages", "builtin", "instances", "onnxruntime", "missing_device", "metrics", "idle", "on_demand", "sandbox"]
    code, found, printed = check(tmp_path / "out", f"--only={','.join(steps)},cupy,shared_memory")
    assert code == 0, printed
    assert [row for row in found if row["state"] == "FAIL"] == []
    assert all(row["reason"] for row in found if row["state"] == "skipped")
    right = [row for row in found if row["state"] == "ok"]
    assert [step for step in steps if step not in {row["step"] for row in right}] == []
    assert {row["name"] for row in right} >= {"identity, 13 datatypes", "add_sub BF16"}
    assert {row["name"] for row in right} >= {"mlp", "convolution", "inputs that are read on the processor"}
    assert {row["step"] for row in found} == {*steps, "cupy", "shared_memory"}
    assert f"{len(right)} ok, 0 FAIL" in printed


def test_a_failure_is_a_row(tmp_path):
    """A server that does not start fails its step with the reason; the next step runs, and the script exits with 1."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "pharos").write_text("#!/bin/sh\necho cannot start; exit 3\n")
    (folder / "pharos").chmod(0o755)
    code, found, printed = check(
        tmp_path / "out", "--only=idle,cupy", environment={"PHAROS_BIN": str(folder / "pharos")}
    )
    assert code == 1, printed
    assert [(row["step"], row["state"]) for row in found] == [("idle", "FAIL"), ("cupy", "skipped")]
    assert "cannot start" in found[0]["reason"]
    assert "cannot start" in (tmp_path / "out/failed.txt").read_text()


def test_no_time_is_left(tmp_path):
    """Steps that do not fit into the total time are listed."""
    code, found, _ = check(tmp_path / "out", "--only=builtin,idle", "--minutes=0")
    assert code == 0
    assert [(row["step"], row["reason"]) for row in found] == [(s, "no time was left") for s in ("builtin", "idle")]


def test_a_step_that_hangs(tmp_path):
    """It is killed with all processes that it has started, and the rows that it has written are kept."""
    code = (
        "import subprocess, sys, time, pathlib; sys.path.append(sys.argv[1]); import rows\n"
        "file = pathlib.Path(sys.argv[2])\n"
        "rows.Rows(file / 'rows.jsonl', 'slow').check('first', True)\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "(file / 'child').write_text(str(child.pid)); time.sleep(600)"
    )
    found = rows.run("slow", [sys.executable, "-c", code, str(GPU), str(tmp_path)], 3, tmp_path)
    assert [(row["name"], row["state"]) for row in found] == [("first", "ok"), ("slow", "FAIL")]
    assert found[1]["reason"] == "no end within 3 s"
    child = int((tmp_path / "child").read_text())
    eventually("its child process is gone", lambda: not alive(child))


def test_processes_that_a_step_leaves_behind_are_killed(tmp_path):
    """Even if the parent has exited and the process has its own session."""
    code = (
        "import subprocess, sys, time; sys.path.append(sys.argv[1]); import rows; rows.adopt()\n"
        "print(subprocess.run(['sh', '-c', 'setsid sleep 100 >/dev/null 2>&1 & echo $!'], capture_output=True, text=True).stdout)\n"
        "time.sleep(0.5); rows.end_adopted()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(GPU)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    eventually("it is gone", lambda: not alive(int(done.stdout)))


def test_an_unknown_step(tmp_path):
    """The error lists the known steps."""
    code, _, printed = check(tmp_path / "out", "--only=nothing")
    assert code == 2 and "unknown steps: nothing; allowed are packages, builtin, instances, " in printed


def test_the_pack_is_complete(tmp_path):
    """It works in another directory, without this repository's executables and packages."""
    wheels = binary().parent.parent / "wheels"
    if not list(wheels.glob("pharos_worker-*.whl")):
        pytest.skip(f"there is no wheel in {wheels}: make python-worker")
    pack = tmp_path / "pack"
    done = subprocess.run([sys.executable, GPU / "pack.py", f"--to={pack}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " MiB" in done.stdout
    script = pack / "tests/gpu/check.py"
    code, found, printed = check(
        tmp_path / "out", "--only=idle,missing_device", script=script, environment={"PHAROS_BIN": "nothing"}
    )
    assert code == 0, printed
    assert "unpacked: pharos_worker-" in printed
    assert {row["state"] for row in found if row["step"] == "idle"} == {"ok", "skipped"}


def test_packed_wheels_come_first(tmp_path):
    """Wheels for this Python are unpacked, whatever packages it has and whatever folders they contain; others are not."""
    import check as script

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    names = {"one-2.0-py3-none-any": "one.py", "two-1.0-cp39-abi3-manylinux_2_28_x86_64": "two-1.0.data/platlib/two/a.py",
             "other-1.0-cp38-cp38-manylinux_2_28_x86_64": "other.py"}  # fmt: skip
    for name, inside in names.items():
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as file:
            file.writestr(inside, "")
    site = tmp_path / "site"
    (site / "two").mkdir(parents=True)
    (site / "two/old.py").write_text("")
    assert script.unpack_all(wheels, (3, 12), site) == ["one-2.0", "two-1.0"]
    assert sorted(str(path.relative_to(site)) for path in site.rglob("*.py")) == ["one.py", "two/a.py"]


def test_a_model_that_cannot_be_served(tmp_path):
    """The step fails with the reason, and not with the time limit of the start."""
    import world

    place = world.World(tmp_path / "step", "any", 0, True)
    place.model("wrong", 'backend: "builtin"\n')
    with pytest.raises(RuntimeError, match="refused: .*wrong"), place.server():
        pass


@pytest.mark.slow
@pytest.mark.skipif(not has_client, reason=f"{PYTHON} does not have tritonclient with HTTP")
def test_the_checks_of_cuda_shared_memory(tmp_path):
    """tritonclient's own code over the simulated driver: all checks pass, also with PyTorch if it is installed."""
    devices, gpus = Devices(tmp_path / "cuda"), Gpus(tmp_path)
    gpus.tell(TWO)
    program = tmp_path / "pharos"
    # Variables with this prefix configure the server under test and are not inherited.
    program.write_text(f'#!/bin/sh\nPHAROS_FAKE_CUDA={devices.folder} PHAROS_WORKER_VARIABLES=PHAROS_FAKE_CUDA exec {binary().absolute()} "$@"\n')
    program.chmod(0o755)
    given = os.environ | devices.environment | {"PHAROS_BIN": str(program)}
    given["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/python/gpu/fake_cuda"), os.environ.get("PYTHONPATH", "")])
    command = [PYTHON, ROOT / "tests/python/gpu/gpu_shared_memory.py", f"--work={tmp_path}", "--", gpus.option()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=given)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "all checks passed"), done.stdout + done.stderr
    assert len([line for line in lines if line.startswith("ok ")]) >= 15


DEVICE = f"""
* devices 1
* driver 550.54.15
{AT_WORK}"""
SMI = """#!/usr/bin/env python3
import sys
values = {"uuid": "GPU-0", "memory.used": "8192", "memory.total": "81920", "power.draw": "250.50",
          "power.limit": "400.00", "temperature.gpu": "%s", "utilization.gpu": "37"}
fields = next(word.partition("=")[2] for word in sys.argv if "--query" in word).split(",")
print("4194305, 512" if "pid" in fields else ", ".join(values.get(field, "[N/A]") for field in fields))
"""


@pytest.mark.parametrize("temperature, wrong", [("55", set()), ("75", {"pharos_gpu_temperature_celsius"})])
def test_readings_beside_nvidia_smi(tmp_path, monkeypatch, temperature, wrong):
    """Compares the server's readings from the driver's library with those of `nvidia-smi`, in the same units; energy is absent
    because the simulated device does not report it."""
    import readings
    import world

    (tmp_path / "nvidia-smi").write_text(SMI % temperature)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus = Gpus(tmp_path)
    gpus.tell(DEVICE)
    place = world.World(tmp_path / "step", "metrics", 0, True)
    with place.server("--metrics-interval-ms=100", gpus.option()) as server:
        eventually("it is measured", lambda: readings.series(server, place, "nv_gpu_power_usage") > 0)
        for name, (ours, theirs) in readings.compared(place, server, 1).items():
            place.rows.near(name, ours, theirs, readings.PAIRS[name][2] or 25)
        readings.of_models(place, server, "none")
    found = rows.read(place.rows.file)
    assert {row["name"] for row in found if row["state"] == "FAIL"} == wrong
    assert len([row for row in found if row["state"] == "ok"]) == len(readings.PAIRS) - len(wrong)
    assert found[-1]["state"] == "skipped" and place.of_processes() == {4194305: 512.0}
    assert place.smi("pstate", "memory.used") == [None, 8192.0]
