#!/usr/bin/env python3
"""Checks and measures everything that needs a GPU in one run, and reports the results as a table and as JSON.

    python check.py [--out FOLDER] [--work FOLDER] [--python X] [--only STEP,STEP] [--minutes 8] [--device 0] [--cpu]
                    [--server-flags=--worker-sandbox=on]

It builds and downloads nothing; its files are beside it (see `pack.py`), and packages are in the Python that runs the models.
Each step has a time limit and does not affect others if it fails or hangs. Results are written after each step. Exits with 1 if
a row failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
STEPS = {
    "packages": ("readings", 120),
    "builtin": ("correctness", 90),
    "instances": ("correctness", 60),
    "torch": ("correctness", 100),
    "copies": ("speed", 100),
    "throughput": ("speed", 170),
    "shared_memory": ("readings", 125),
    "metrics": ("readings", 100),
    "missing_device": ("failures", 40),
    "fault": ("failures", 100),
    "killed": ("failures", 80),
    "on_demand": ("on_demand", 110),
    "sandbox": ("correctness", 60),
    "idle": ("readings", 40),
    "cupy": ("correctness", 90),
    "file_copies": ("speed", 70),
    "libtorch": ("correctness", 90),
    "torchserve": ("correctness", 60),
    "onnxruntime": ("correctness", 90),
    "xgboost": ("correctness", 60),
    "tensorrt": ("correctness", 150),
}
"""The steps, each with its file and its time limit in seconds, by priority if there is not enough time for all."""
LEAST_S = 10
"""A step with less time left is skipped."""
LINES = 100
"""Number of lines of each log of a failed step."""
ASK = """
import importlib.util as i, json, sys
print(json.dumps([list(sys.version_info[:2]), [name for name in ("numpy", "pharos_worker") if i.find_spec(name)]]))
"""


def fits(wheel: str, version: tuple) -> bool:
    """Whether a wheel is for this Python, by its name."""
    python, abi, _ = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    found = re.fullmatch(r"cp(\d)(\d+)", python)
    if not found:
        return "py3" in python.split(".")
    needed = tuple(int(part) for part in found.groups())
    return needed <= version if abi == "abi3" else needed == version


def unpack(wheel: Path, site: Path):
    """Extracts a wheel's packages into a folder; a wheel is an archive of them."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    for part in site.glob("*.data"):
        for kind in ("purelib", "platlib"):
            if (part / kind).is_dir():
                shutil.copytree(part / kind, site, dirs_exist_ok=True)
        shutil.rmtree(part)


def unpack_all(wheels: Path, version: tuple, site: Path) -> list:
    """Extracts the wheels of a folder that fit this Python into an emptied folder; returns their names and versions."""
    shutil.rmtree(site, ignore_errors=True)
    taken = [wheel for wheel in sorted(wheels.glob("*.whl")) if fits(wheel.name, version)]
    for wheel in taken:
        unpack(wheel, site)
    return ["-".join(wheel.name.split("-")[:2]) for wheel in taken]


def install(python: str, work: Path) -> list:
    """Extracts the packed wheels, which take precedence over packages of this Python: into `site` for all steps, and those of the
    clients into `clients` for clients only. Returns what it has extracted."""
    asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=120)
    if asked.returncode:
        sys.exit(f"{python} cannot be used: {asked.stderr.strip()}")
    version, present = json.loads(asked.stdout)
    taken = unpack_all(ROOT / "wheels", tuple(version), work / "site")
    if "numpy" not in present and not any(name.startswith("numpy-") for name in taken):
        sys.exit(f"{python} has no numpy")
    if "pharos_worker" not in present and not any(name.startswith("pharos_worker-") for name in taken):
        sys.exit(f"{python} has no package pharos-worker, and there is no wheel of it in {ROOT / 'wheels'}")
    return taken + unpack_all(ROOT / "wheels/clients", tuple(version), work / "clients")


def environment_of(site: Path, flags: str) -> dict:
    """Returns the environment of the steps: the packed executables and packages, devices in the driver's order, and flags of their
    servers."""
    environment = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CHECK_SERVER_FLAGS": flags}
    if (ROOT / "bin/pharos").exists():
        environment["PHAROS_BIN"] = str(ROOT / "bin/pharos")
    paths = [str(site), os.environ.get("PYTHONPATH", "")] if site.exists() else [os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def write(out: Path, work: Path, found: list) -> str:
    """Writes the results as JSON and as a table, and the ends of all logs of failed steps. Returns the table."""
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    text = f"{rows.table(found)}\n{rows.summary(found)}"
    (out / "results.txt").write_text(text + "\n")
    parts = []
    for step in dict.fromkeys(row["step"] for row in found if row["state"] == rows.FAIL):
        for log in sorted([*(work / step).glob("*.log"), work / step / "log.txt"]):
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            parts.append("\n".join([f"== {step}: {log.name}", *lines[-LINES:]]))
    (out / "failed.txt").write_text("\n".join(parts) + "\n")
    return text


def no_device(device: int) -> str:
    """Returns why the device cannot be used; empty if it can."""
    try:
        command = ["nvidia-smi", f"--id={device}", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    print(f"device {device}: {done.stdout.strip()}", flush=True)
    return "" if done.returncode == 0 else f"nvidia-smi: {(done.stdout + done.stderr).strip()}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "target/gpu-check", help="where results are written")
    parser.add_argument("--work", type=Path, help="where models, packages and logs are written [default: work, in --out]")
    parser.add_argument("--python", default=sys.executable, help="the Python for models and clients")
    parser.add_argument("--only", default="", help=f"steps, separated by commas: {', '.join(STEPS)}")
    parser.add_argument("--minutes", type=float, default=8, help="total time; steps that do not fit are skipped")
    parser.add_argument("--device", type=int, default=0, help="the device's number in nvidia-smi")
    parser.add_argument("--server-flags", default="", help="further flags of the servers of all steps")
    parser.add_argument("--cpu", action="store_true", help="run without a device: instances on processors")
    given = parser.parse_args()
    given.only = [name for name in given.only.split(",") if name] or list(STEPS)
    unknown = [name for name in given.only if name not in STEPS]
    if unknown:
        parser.error(f"unknown steps: {', '.join(unknown)}; allowed are {', '.join(STEPS)}")
    return given


def step(name: str, given: argparse.Namespace, work: Path, left: float) -> list:
    """Runs one step and returns its rows."""
    command = [given.python, str(HERE / "steps.py"), name, str(work / name), str(given.device)]
    command += ["--cpu"] if given.cpu else []
    found = rows.run(name, command, min(STEPS[name][1], left), work / name, environment_of(work / "site", given.server_flags))
    rows.end_adopted()
    return found


def no_time(name: str, work: Path) -> list:
    """Returns the row of a skipped step."""
    (work / name).mkdir(parents=True, exist_ok=True)
    file = work / name / "rows.jsonl"
    file.unlink(missing_ok=True)
    rows.Rows(file, name).skip(name, "no time was left")
    return rows.read(file)


def main() -> int:
    """Runs all steps, one after the other."""
    given = arguments()
    end = time.monotonic() + given.minutes * 60
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    work = (given.work or out / "work").resolve()
    trouble = "" if given.cpu else no_device(given.device)
    if trouble:
        sys.exit(f"no device to check: {trouble} (--cpu tests everything else)")
    print(f"unpacked: {', '.join(install(given.python, work)) or 'nothing'}", flush=True)
    rows.adopt()
    found, text = [], ""
    for name in given.only:
        left = end - time.monotonic()
        found += step(name, given, work, left) if left >= LEAST_S else no_time(name, work)
        print(rows.table([row for row in found if row["step"] == name]).partition("\n")[2], flush=True)
        # Written after each step, so that results are kept if this process is killed.
        text = write(out, work, found)
    print(f"\n{text}")
    return 1 if any(row["state"] == rows.FAIL for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
