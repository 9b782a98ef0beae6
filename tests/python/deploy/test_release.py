"""`deploy/release/release.py`: the files of a release, made from wheels of small files."""

import importlib.util
import json
import re
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from deploy import schemas
from deploy.containers import DEPLOY
from deploy.wheels import elf, packer
from harness.server import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("cargo"), reason="cargo is not installed")


def module():
    """Returns the module `deploy/release/release.py`."""
    spec = importlib.util.spec_from_file_location("release", DEPLOY / "release/release.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def notices(tmp_path_factory):
    """The SBOM and the licences."""
    folder = tmp_path_factory.mktemp("notices")
    module().write_notices(folder)
    return folder


@pytest.fixture(scope="module")
def wheels(notices, tmp_path_factory):
    """Wheels for both architectures, whose executables are small texts behind the head of an ELF file."""
    folder = tmp_path_factory.mktemp("wheels")
    for machine in (62, 183):
        for name in ("pharos", "pharos-worker", "pharos-worker-tract", "lib_native.so"):
            (folder / name).write_bytes(elf(machine, b"GLIBC_2.28") + name.encode())
        library = folder / "backends/llamacpp/libpharos_llamacpp.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(elf(machine))
        packer().pack(folder, folder, notices)
    return folder


@pytest.mark.skipif(bool(schemas.missing("cyclonedx")), reason=schemas.missing("cyclonedx"))
def test_the_sbom_matches_its_schema(notices):
    text = (notices / "pharos.cdx.json").read_text()
    assert schemas.sbom_error(text) == ""
    small = json.loads(text)
    small["components"] = small["components"][:1]
    assert "SHA-257" in schemas.sbom_error(json.dumps(small).replace("SHA-256", "SHA-257"))


def test_the_sbom_has_what_is_compiled_into_the_executables(notices):
    components = json.loads((notices / "pharos.cdx.json").read_text())["components"]
    found = {(one["name"], one["version"]): one["hashes"][0]["content"] for one in components}
    locked = module().checksums()
    assert found.items() <= locked.items()
    names = {name for name, _ in found}
    assert {"tokio", "tonic", "hyper", "tract-onnx", "pyo3", "mimalloc", "ring"} <= names
    assert {"llama-cpp-sys-2", "llguidance"} <= names, "crates of the backend of GGUF files"
    assert not {"criterion", "tempfile", "pharos"} & names, "crates of tests, and own crates"


def test_each_crate_has_an_accepted_licence_and_its_text(notices):
    accepted = re.search(r"allow = \[(.*)\]", (ROOT / "deny.toml").read_text())[1].replace('"', "").split(", ")
    heads = re.findall(r"^(\S+) (\S+): (.*) \((.*)\)$", (notices / "THIRD_PARTY_LICENSES.txt").read_text(), re.M)
    components = json.loads((notices / "pharos.cdx.json").read_text())["components"]
    assert [(name, number) for name, number, _, _ in heads] == [(one["name"], one["version"]) for one in components]
    assert "The ggml authors" in (notices / "THIRD_PARTY_LICENSES.txt").read_text(), "the licence of llama.cpp itself"
    for name, _, expression, _ in heads:
        choices = re.split(r" OR ", expression.replace("(", "").replace(")", ""))
        assert any(all(part in accepted for part in choice.split(" AND ")) for choice in choices), f"{name}: {expression}"
    assert {name for name, _, _, where in heads if where.startswith("no text")} <= {"llama-cpp-2", "tonic-prost", "tract-extra", "nom-language"}


def test_a_release_has_every_file(wheels, tmp_path):
    version = module().version()
    files = {path.name for path in module().release(wheels, tmp_path / "a")}
    platforms = ["manylinux_2_28_x86_64", "manylinux_2_28_aarch64"]
    assert files == {
        *(f"pharos_server-{version}-cp39-abi3-{platform}.whl" for platform in platforms),
        *(f"pharos-{version}-linux-{machine}.tar.gz" for machine in ("x86_64", "aarch64")),
        "pharos.cdx.json", "THIRD_PARTY_LICENSES.txt", "CHANGES.md", "SHA256SUMS",
    }  # fmt: skip
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "a", capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(files) - 1
    assert (tmp_path / "a/CHANGES.md").read_text().startswith(f"## {version}")
    with tarfile.open(tmp_path / f"a/pharos-{version}-linux-x86_64.tar.gz") as found:
        modes = {entry.name.partition("/")[2]: entry.mode for entry in found.getmembers()}
    assert modes["bin/pharos"] == modes["bin/pharos-worker"] == 0o755
    assert modes["lib/pharos/backends/tract/pharos-worker-tract"] == 0o755
    assert "lib/pharos/backends/llamacpp/libpharos_llamacpp.so" in modes, "where the server in bin searches for it"
    assert {"LICENSE", "THIRD_PARTY_LICENSES.txt", "pharos.cdx.json", "pharos.service"} <= modes.keys()
    with zipfile.ZipFile(next((tmp_path / "a").glob("*x86_64.whl"))) as found:
        assert {f"pharos_server-{version}.dist-info/{name}" for name in ("licenses/THIRD_PARTY_LICENSES.txt", "sboms/pharos.cdx.json")} <= set(found.namelist())


def test_the_same_wheels_make_the_same_release(wheels, tmp_path):
    for folder in ("a", "b"):
        module().release(wheels, tmp_path / folder)
    assert (tmp_path / "a/SHA256SUMS").read_text() == (tmp_path / "b/SHA256SUMS").read_text()


def test_the_changes_are_those_of_the_version(tmp_path):
    text = "# Changelog\n\n## 1.1.0\nb\n\n## 1.0.0 (date)\na\n"
    assert module().changes(text, "1.1.0") == "## 1.1.0\nb\n\n"
    assert module().changes(text, "1.0.0") == "## 1.0.0 (date)\na\n"
    with pytest.raises(SystemExit, match="no section for version 1.1"):
        module().changes(text.replace("1.1.0", "1.1.00"), "1.1.0")
    with pytest.raises(SystemExit, match="has no wheel"):
        module().release(tmp_path, tmp_path / "out")


def test_a_tag_has_the_version_of_the_source():
    changelog = "# Changelog\n\n## 1.1.0 (date)\na\n"
    module().check_tag("v1.1.0", "1.1.0", changelog)
    for tag, number, expected in (("v1.1", "1.1.0", "expected v1.1.0"), ("v1.2.0", "1.2.0", "no section for version 1.2.0")):
        with pytest.raises(SystemExit, match=expected):
            module().check_tag(tag, number, changelog)
