#!/usr/bin/env python3
"""Collects the files of `check.py` for another machine into one folder; nothing is built or downloaded there.

    python tests/gpu/pack.py [--to target/gpu] [--wheels FOLDER] [--fetch 3.12] [--archive FILE.tar.gz]

Copies the executables (`PHAROS_BIN`, by default those of `target/release`; the copies are stripped), the wheel of pharos-worker
(`make python-worker`), and the files of the tests. `--wheels` adds further wheels, which replace packages of the Python there for
models and clients; `--fetch` downloads those of the clients for that version of Python with pip. Prints sizes, and
missing packages.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "python"))

from harness.server import binary  # noqa: E402

FILES = (
    "tests/models/generate.py",
    *(f"tests/python/harness/{name}.py" for name in ("__init__", "server", "ports", "waiting")),
    *(f"tests/python/harness/{name}.py" for name in ("generate", "stream_models", "onnx_file")),
    *(f"tests/python/torchserve/{name}.py" for name in ("__init__", "models")),
    "tests/python/gpu/gpu_shared_memory.py",
)
EXECUTABLES = ("pharos", "pharos-worker")
CLIENTS = (
    "tritonclient", "python-rapidjson", "urllib3", "ml-dtypes<=0.5.4",
    "geventhttpclient", "gevent", "greenlet<3.4.0", "zope.event", "zope.interface", "brotli", "certifi",
    "grpcio>=1.81.1", "protobuf>=6.30,<7", "packaging", "typing-extensions",
)  # fmt: skip
"""The packages that tritonclient needs besides numpy: for itself, over HTTP, over gRPC. Most Pythons have some of them in other
versions, which models keep: only clients use these."""
OPTIONAL = {
    "tritonclient": "shared_memory", "cuda_bindings": "shared_memory", "onnxruntime_gpu": "onnxruntime and tensorrt",
    "xgboost": "xgboost",
}  # fmt: skip
"""Optional wheels, and the steps that then need them in the other machine's Python."""
MIB = 1 << 20
WARNED_MIB = 64
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def copy(source: Path, target: Path):
    """Copies a file with its mode."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def executables(folder: Path):
    """Copies the executables without symbols."""
    for name in EXECUTABLES:
        source = binary().with_name(name)
        if not source.exists():
            sys.exit(f"{source} does not exist: build it with `cargo build --release`, or set PHAROS_BIN")
        copy(source, folder / "bin" / name)
        if shutil.which("strip"):
            subprocess.run(["strip", folder / "bin" / name], check=True)


def own_wheel(folder: Path):
    """Copies the wheel of pharos-worker, which is beside the executables' folder."""
    found = sorted((binary().parent.parent / "wheels").glob("pharos_worker-*.whl"))
    if not found:
        sys.exit(f"no wheel of pharos-worker in {binary().parent.parent / 'wheels'}; run make python-worker")
    copy(found[-1], folder / "wheels" / found[-1].name)


def fetch(version: str, folder: Path):
    """Downloads the clients' wheels for another Python, in compatible versions; exits with an error if they are unavailable."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"-d{folder}"]
    command += [f"--python-version={version}", "--implementation=cp", *(f"--platform={p}" for p in PLATFORMS)]
    if subprocess.run([*command, *CLIENTS], check=False).returncode:
        sys.exit(f"cannot download the clients' wheels for Python {version}")


def sizes(folder: Path):
    """Prints the large files, largest first."""
    files = sorted(((path.stat().st_size, path) for path in folder.rglob("*") if path.is_file()), reverse=True)
    for size, path in files:
        if size > MIB // 10:
            print(f"{size / MIB:8.1f} MiB  {path.relative_to(folder)}")


def size_mib(folder: Path) -> float:
    """Returns the size of all files of a folder in MiB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MIB


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "target/gpu", help="the target folder, which is replaced")
    parser.add_argument("--wheels", type=Path, help="a folder of further wheels")
    parser.add_argument("--fetch", metavar="VERSION", help="download the clients' wheels for this version of Python")
    parser.add_argument("--archive", type=Path, help="also write everything into one compressed file: .tar.gz or .tar.xz")
    given = parser.parse_args()
    shutil.rmtree(given.to, ignore_errors=True)
    executables(given.to)
    own_wheel(given.to)
    for wheel in given.wheels.glob("*.whl") if given.wheels else ():
        copy(wheel, given.to / "wheels" / wheel.name)
    if given.fetch:
        fetch(given.fetch, given.to / "wheels/clients")
    for file in FILES:
        copy(ROOT / file, given.to / file)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE, given.to / "tests/gpu", ignore=ignored)
    present = {wheel.name.partition("-")[0] for wheel in (given.to / "wheels").rglob("*.whl")}
    for name, steps in OPTIONAL.items():
        if name not in present:
            print(f"no wheel of {name}: {steps} need it in the other machine's Python and report if it is missing")
    sizes(given.to)
    size = size_mib(given.to)
    print(f"{given.to}: {size:.1f} MiB")
    if given.archive:
        with tarfile.open(given.archive, f"w:{given.archive.suffix[1:]}") as file:
            file.add(given.to, "gpu")
        size = given.archive.stat().st_size / MIB
        print(f"{given.archive}: {size:.1f} MiB")
    if size > WARNED_MIB:
        print(f"warning: more than {WARNED_MIB} MiB")
    print("there: python3 tests/gpu/check.py --out FOLDER")


if __name__ == "__main__":
    main()
