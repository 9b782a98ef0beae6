#!/usr/bin/env python3
"""Packs the wheel `pharos-server` from built files: the executables, the Python worker and its native module.

    python3 deploy/wheel/pack.py --from target/release --to target/wheels

Nothing is compiled. With `--notices`, the wheel has the SBOM and the licences that `deploy/release/release.py notices` wrote. The
folder of the built files has `pharos`, the workers and `lib_native.so`, which `make text tract python-worker` or `make wheel` builds, and the libraries of the backend of GGUF files in `backends/llamacpp`, if it is built. The platform tag
has the newest version of glibc that one of them needs. The same files make the same wheel: entries are sorted and have no times.
"""

import argparse
import base64
import hashlib
import re
import stat
import struct
import zipfile
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python before 3.11
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "worker/python/python"
BUILT = {
    "pharos": "pharos_worker/_bin/pharos",
    "pharos-worker": "pharos_worker/_bin/pharos-worker",
    "pharos-worker-text": "pharos_worker/_bin/backends/text/pharos-worker-text",
    "pharos-worker-tract": "pharos_worker/_bin/backends/tract/pharos-worker-tract",
    "lib_native.so": "pharos_worker/_native.abi3.so",
}
"""The built files and their paths in the wheel."""
LLAMACPP = "backends/llamacpp"
"""The folder of the backend of GGUF files, from the folder of the executables."""
MACHINES = {62: "x86_64", 183: "aarch64"}
"""ELF's numbers of processor architectures."""
COMMANDS = {
    "pharos": "pharos",
    "pharos-worker": "pharos_worker",
    "tritonserver": "tritonserver",
    "torchserve": "main",
}
"""The commands, and the functions of `pharos_worker.launcher` that run them."""
EXTRAS = {"onnx": ["onnxruntime>=1.17"], "onnx-gpu": ["onnxruntime-gpu[cuda,cudnn]>=1.17"]}
"""The extras of the wheel, and their packages. The server needs version 1.17. The CUDA provider does not load without the libraries
of CUDA and cuDNN, which are in further packages."""


def machine(content: bytes, name: str) -> str:
    """Returns the architecture of an ELF file."""
    if content[:4] != b"\x7fELF":
        raise SystemExit(f"{name} is not an ELF file")
    number = struct.unpack_from("<H", content, 18)[0]
    if number not in MACHINES:
        raise SystemExit(f"{name} is for architecture {number}; known are {MACHINES}")
    return MACHINES[number]


def glibc(content: bytes) -> tuple:
    """Returns the newest version of glibc whose symbols an ELF file names."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", content)
    return max(((int(major), int(minor)) for major, minor in found), default=(2, 17))


def platform_tag(contents: dict) -> str:
    """Returns the platform tag of the wheel that has these files."""
    machines = {machine(content, name) for name, content in contents.items()}
    if len(machines) != 1:
        raise SystemExit(f"the files are for several architectures: {sorted(machines)}")
    major, minor = max(glibc(content) for content in contents.values())
    return f"manylinux_{major}_{minor}_{machines.pop()}"


def version() -> str:
    """Returns the version of the workspace."""
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def metadata(project: dict) -> str:
    """Returns the METADATA of the wheel."""
    lines = [
        "Metadata-Version: 2.4",
        "Name: pharos-server",
        f"Version: {version()}",
        "Summary: A metrics-centric inference server: KServe v2 over HTTP and gRPC, with Triton's and TorchServe's interfaces",
        f"Keywords: {','.join(project['keywords'])}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
        *(f"Classifier: {name}" for name in project["classifiers"]),
        *(f"Requires-Dist: {name}" for name in project["dependencies"]),
    ]
    for extra, packages in EXTRAS.items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {name}; extra == "{extra}"' for name in packages)]
    text = (ROOT / "deploy/wheel/README.md").read_text()
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", text])


def entries(contents: dict, tag: str, notices) -> dict:
    """Returns the files of the wheel except its RECORD: paths and contents. `notices` is a folder or None."""
    project = tomllib.loads((ROOT / "worker/python/pyproject.toml").read_text())["project"]
    found = {str(path.relative_to(PYTHON)): path.read_bytes() for path in sorted(PYTHON.rglob("*.py"))}
    found |= {BUILT.get(name, f"pharos_worker/_bin/{name}"): content for name, content in contents.items()}
    commands = "".join(f"{name} = pharos_worker.launcher:{function}\n" for name, function in COMMANDS.items())
    info = f"pharos_server-{version()}.dist-info"
    found |= {
        f"{info}/METADATA": metadata(project).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: pharos\nRoot-Is-Purelib: false\nTag: cp39-abi3-{tag}\n".encode(),
        f"{info}/entry_points.txt": f"[console_scripts]\n{commands}".encode(),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    if notices:
        found[f"{info}/licenses/THIRD_PARTY_LICENSES.txt"] = (notices / "THIRD_PARTY_LICENSES.txt").read_bytes()
        found[f"{info}/sboms/pharos.cdx.json"] = (notices / "pharos.cdx.json").read_bytes()
    return found


def record(found: dict, path: str) -> bytes:
    """Returns the RECORD of the wheel: the digest and size of each file."""

    def row(name: str, content: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(content)}\n"

    return ("".join(row(name, content) for name, content in sorted(found.items())) + f"{path},,\n").encode()


def write(target: Path, found: dict):
    """Writes a wheel; its executables are executable."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in sorted(found.items()):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            mode = 0o755 if "/_bin/" in name else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            wheel.writestr(entry, content)


def pack(source: Path, target: Path, notices=None) -> Path:
    """Writes the wheel; returns its path."""
    missing = [name for name in BUILT if not (source / name).is_file()]
    if missing:
        raise SystemExit(f"{source} does not have {', '.join(missing)}: make text tract python-worker builds them")
    contents = {name: (source / name).read_bytes() for name in BUILT}
    contents |= {f"{LLAMACPP}/{path.name}": path.read_bytes() for path in sorted((source / LLAMACPP).glob("*.so*"))}
    tag = platform_tag(contents)
    found = entries(contents, tag, notices)
    path = f"pharos_server-{version()}.dist-info/RECORD"
    target.mkdir(parents=True, exist_ok=True)
    wheel = target / f"pharos_server-{version()}-cp39-abi3-{tag}.whl"
    write(wheel, found | {path: record(found, path)})
    return wheel


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Packs the wheel pharos-server.")
    parser.add_argument("--from", dest="source", type=Path, required=True, help="the folder of the built files")
    parser.add_argument("--to", dest="target", type=Path, required=True, help="the folder to write the wheel to")
    parser.add_argument("--notices", type=Path, help="the folder of the SBOM and the licences")
    options = parser.parse_args()
    wheel = pack(options.source, options.target, options.notices)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
