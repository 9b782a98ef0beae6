#!/usr/bin/env python3
"""Collects into one folder what `check.py` needs on another machine, where nothing is built and nothing is fetched.

    python tests/gpu/pack.py [--to target/gpu] [--wheels FOLDER] [--fetch 3.12] [--archive FILE.tar.xz]

Takes the executables (`PHAROS_BIN`, else those of `target/release`; the copies are stripped), the wheel of pharos-worker
(`make python-worker`), and the files of the tests. `--wheels` takes further wheels along, `--fetch` first has pip download those of
the clients for that version of Python. Prints the size and what is missing.
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

from server import binary  # noqa: E402

FILES = (
    "tests/models/generate.py",
    *(f"tests/python/{name}.py" for name in ("server", "peers", "stream_models", "onnx_file", "torchserve_models")),
    "tests/python/gpu_shared_memory.py",
)
EXECUTABLES = ("pharos", "pharos-worker")
CLIENTS = (
    "tritonclient", "python-rapidjson", "geventhttpclient", "gevent", "greenlet", "zope.event", "zope.interface",
    "brotli", "certifi", "urllib3",
)  # fmt: skip
"""What tritonclient needs over HTTP; grpcio, protobuf, numpy and the driver's Python packages come with most installations of
PyTorch's companions, and are taken along if they are in `--wheels`."""
OPTIONAL = {"tritonclient": "shared_memory", "cuda_bindings": "shared_memory", "onnxruntime_gpu": "onnxruntime and tensorrt"}
"""Wheels that may be left out, and the steps that then need them in the other machine's Python."""
WARNED_MIB = 64
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def copy(source: Path, target: Path):
    """Copies a file with its mode."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def executables(folder: Path):
    """Copies of the executables without symbols."""
    for name in EXECUTABLES:
        source = binary().with_name(name)
        if not source.exists():
            sys.exit(f"{source} is not there: build it with `cargo build --release`, or set PHAROS_BIN")
        copy(source, folder / "bin" / name)
        if shutil.which("strip"):
            subprocess.run(["strip", folder / "bin" / name], check=True)


def own_wheel(folder: Path):
    """The wheel of pharos-worker, which lies beside the executables' folder."""
    found = sorted((binary().parent.parent / "wheels").glob("pharos_worker-*.whl"))
    if not found:
        sys.exit(f"there is no wheel of pharos-worker in {binary().parent.parent / 'wheels'}: make python-worker")
    copy(found[-1], folder / "wheels" / found[-1].name)


def fetch(version: str, folder: Path):
    """Downloads the clients' wheels for another Python; what cannot be had is only reported."""
    for name in CLIENTS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"-d{folder}"]
        command += [f"--python-version={version}", "--implementation=cp", *(f"--platform={p}" for p in PLATFORMS), name]
        if subprocess.run(command, check=False).returncode:
            print(f"not fetched: {name}")


def size_mib(folder: Path) -> float:
    """MiB of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / (1 << 20)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "target/gpu", help="the folder, which is made anew")
    parser.add_argument("--wheels", type=Path, help="a folder of further wheels")
    parser.add_argument("--fetch", metavar="VERSION", help="the Python for which the clients' wheels are downloaded")
    parser.add_argument("--archive", type=Path, help="also write everything into one compressed file")
    given = parser.parse_args()
    shutil.rmtree(given.to, ignore_errors=True)
    executables(given.to)
    own_wheel(given.to)
    for wheel in given.wheels.glob("*.whl") if given.wheels else ():
        copy(wheel, given.to / "wheels" / wheel.name)
    if given.fetch:
        fetch(given.fetch, given.to / "wheels")
    for file in FILES:
        copy(ROOT / file, given.to / file)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE, given.to / "tests/gpu", ignore=ignored)
    present = {wheel.name.partition("-")[0] for wheel in (given.to / "wheels").glob("*.whl")}
    for name, steps in OPTIONAL.items():
        if name not in present:
            print(f"no wheel of {name}: {steps} need it in the other machine's Python, and say so if it is not there")
    size = size_mib(given.to)
    print(f"{given.to}: {size:.1f} MiB" + (f", which is more than {WARNED_MIB}" if size > WARNED_MIB else ""))
    if given.archive:
        with tarfile.open(given.archive, "w:xz") as file:
            file.add(given.to, "gpu")
        print(f"{given.archive}: {given.archive.stat().st_size / (1 << 20):.1f} MiB")
    print("there: python3 tests/gpu/check.py --out FOLDER")


if __name__ == "__main__":
    main()
