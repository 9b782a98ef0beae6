"""`deploy/release/release.py`: the files of a release, made from wheels of small files. `deploy/release/registry.py`: small images of
both architectures and a chart, published in a double of a registry, and in a real one where Debian's docker-registry is installed."""

import gzip
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

from deploy import schemas
from deploy.containers import DEPLOY
from deploy.wheels import elf, packer
from harness.ports import free_ports
from harness.server import ROOT
from harness.waiting import eventually

pytestmark = pytest.mark.skipif(not shutil.which("cargo"), reason="cargo is not installed")


def module(name="release"):
    """Returns the module `deploy/release/NAME.py`."""
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"release/{name}.py")
    found = importlib.util.module_from_spec(spec)
    # The scripts import each other.
    sys.path.insert(0, str(DEPLOY / "release"))
    try:
        spec.loader.exec_module(found)
    finally:
        sys.path.pop(0)
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
        for name in ("pharos", "pharos-worker", "pharos-worker-text", "pharos-worker-tract", "lib_native.so"):
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


def test_the_sbom_has_what_an_attestation_needs(notices):
    """GitHub's action `attest` takes these fields for CycloneDX, and refuses other files. The same components have the same number."""
    text = (notices / "pharos.cdx.json").read_text()
    found = json.loads(text)
    assert found["bomFormat"] == "CycloneDX" and found["specVersion"] == "1.5"
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found["serialNumber"])
    release = module()
    packages = release.shipped()
    assert release.sbom(packages) == text
    assert json.loads(release.sbom(packages[1:]))["serialNumber"] != found["serialNumber"]


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
        f"pharos-{version}.tgz", "pharos.cdx.json", "THIRD_PARTY_LICENSES.txt", "CHANGES.md", "SHA256SUMS",
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


def test_a_tag_has_the_version_of_the_source_and_of_the_chart():
    changelog = "# Changelog\n\n## 1.1.0 (date)\na\n"
    chart = 'apiVersion: v2\nversion: 1.1.0\nappVersion: "1.1.0"\n'
    module().check_tag("v1.1.0", "1.1.0", changelog, chart)
    for tag, number, text, expected in (
        ("v1.1", "1.1.0", chart, "expected v1.1.0"),
        ("v1.2.0", "1.2.0", chart, "no section for version 1.2.0"),
        ("v1.1.0", "1.1.0", chart.replace("version: 1.1.0", "version: 1.1.01"), "version 1.1.01: expected 1.1.0"),
        ("v1.1.0", "1.1.0", chart.replace('"1.1.0"', "1.0.0"), "appVersion 1.0.0: expected 1.1.0"),
        ("v1.1.0", "1.1.0", "apiVersion: v2\n", "version nothing"),
    ):
        with pytest.raises(SystemExit, match=expected):
            module().check_tag(tag, number, changelog, text)


def test_the_chart_is_that_of_the_source(tmp_path):
    source = DEPLOY / "helm/pharos"
    with tarfile.open(module().chart(tmp_path)) as found:
        packed = {entry.name: found.extractfile(entry).read() for entry in found.getmembers()}
    assert packed["pharos/Chart.yaml"] == (source / "Chart.yaml").read_bytes()
    assert {"pharos/values.yaml", "pharos/templates/_helpers.tpl"} <= packed.keys()
    assert all(content == (source.parent / name).read_bytes() for name, content in packed.items())


def saved(folder, name: str, machine: str, text="") -> Path:
    """Writes a small image as `deploy/build-images --save` does. Both architectures share a layer."""
    target = folder / f"{name}-{machine}"
    target.mkdir(parents=True)

    def blob(content: bytes, kind: str) -> dict:
        number = hashlib.sha256(content).hexdigest()
        (target / number).write_bytes(content)
        return {"mediaType": f"application/vnd.docker.{kind}", "size": len(content), "digest": f"sha256:{number}"}

    def layer(text: str) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            entry = tarfile.TarInfo("file")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
        return packed.getvalue()

    layers = [layer("shared"), layer(machine + text)]
    config = {"architecture": {"x86_64": "amd64", "aarch64": "arm64"}[machine], "os": "linux"}
    config["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]}
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
    manifest["config"] = blob(json.dumps(config).encode(), "container.image.v1+json")
    manifest["layers"] = [blob(gzip.compress(one, mtime=0), "image.rootfs.diff.tar.gzip") for one in layers]
    (target / "manifest.json").write_text(json.dumps(manifest))
    (target / "version").write_text("Directory Transport Version: 1.1\n")
    return target


@pytest.fixture
def images(tmp_path):
    """The saved images of both architectures."""
    for machine in ("x86_64", "aarch64"):
        for name in ("pharos", "pharos-slim"):
            saved(tmp_path / "images", name, machine)
    return tmp_path / "images"


class Double:
    """A registry that keeps manifests, and the pushes in their order."""

    def __init__(self):
        self.address = "double"
        self.manifests = {}
        self.pushes = []

    def manifest(self, reference: str) -> bytes:
        """Returns a pushed manifest."""
        return self.manifests.get(reference, b"")

    def versions(self, name: str) -> list:
        """Returns the pushed versions of an image."""
        tags = [reference.partition(":")[2] for reference in self.manifests if reference.startswith(f"{name}:")]
        return [module("registry").numbers(tag) for tag in tags]

    def push_image(self, folder, reference: str):
        """Keeps a manifest list."""
        self.pushes.append(reference)
        self.manifests[reference] = (folder / "manifest.json").read_bytes()

    def push_chart(self, package):
        """Keeps the manifest of a chart."""
        self.pushes.append(package.name)
        layer = {"digest": module("registry").digest(package.read_bytes())}
        self.manifests["pharos:1.0.0"] = json.dumps({"layers": [layer], "pushed": len(self.pushes)}).encode()


def test_images_of_both_architectures_are_one_image(images):
    registry = Double()
    digests = module("registry").publish_images(registry, images, "1.0.0")
    assert registry.pushes == ["pharos:1.0.0", "pharos-slim:1.0.0", "pharos:latest", "pharos-slim:latest"]
    content = registry.manifests["pharos:1.0.0"]
    assert digests["pharos"] == f"sha256:{hashlib.sha256(content).hexdigest()}" and set(digests) == {"pharos", "pharos-slim"}
    entries = json.loads(content)["manifests"]
    assert [entry["platform"] for entry in entries] == [{"architecture": "amd64", "os": "linux"}, {"architecture": "arm64", "os": "linux"}]
    for entry, machine in zip(entries, ("x86_64", "aarch64")):
        assert entry["digest"] == f"sha256:{hashlib.sha256((images / f'pharos-{machine}/manifest.json').read_bytes()).hexdigest()}"


def test_a_second_run_replaces_nothing(images):
    registry = Double()
    digests = module("registry").publish_images(registry, images, "1.0.0")
    registry.pushes.clear()
    assert module("registry").publish_images(registry, images, "1.0.0") == digests
    assert registry.pushes == ["pharos:latest", "pharos-slim:latest"]
    # An interrupted run is continued.
    del registry.manifests["pharos-slim:1.0.0"]
    registry.pushes.clear()
    module("registry").publish_images(registry, images, "1.0.0")
    assert registry.pushes[0] == "pharos-slim:1.0.0" and "pharos:1.0.0" not in registry.pushes
    # Another image of the second name stops the run before the first name is pushed.
    del registry.manifests["pharos:1.0.0"]
    shutil.rmtree(images / "pharos-slim-aarch64")
    saved(images, "pharos-slim", "aarch64", "another")
    registry.pushes.clear()
    with pytest.raises(SystemExit, match="double/pharos-slim:1.0.0 is published already"):
        module("registry").publish_images(registry, images, "1.0.0")
    assert registry.pushes == []


def test_latest_is_the_highest_version(images):
    registry = Double()
    for number in ("1.9.0", "1.10.0", "1.9.1"):
        module("registry").publish_images(registry, images, number)
    assert registry.pushes.count("pharos:latest") == 2 and registry.pushes[-1] == "pharos-slim:1.9.1"


def test_an_image_of_another_or_no_architecture_is_refused(images):
    shutil.rmtree(images / "pharos-aarch64")
    with pytest.raises(SystemExit, match="pharos-aarch64 does not exist"):
        module("registry").publish_images(Double(), images, "1.0.0")
    shutil.copytree(images / "pharos-x86_64", images / "pharos-aarch64")
    with pytest.raises(SystemExit, match="an image for amd64: expected arm64"):
        module("registry").publish_images(Double(), images, "1.0.0")


def test_a_published_chart_is_not_replaced(tmp_path):
    registry, package = Double(), tmp_path / "pharos-1.0.0.tgz"
    package.write_bytes(b"chart")
    digests = module("registry").publish_chart(registry, package, "1.0.0")
    assert module("registry").publish_chart(registry, package, "1.0.0") == digests and len(registry.pushes) == 1
    package.write_bytes(b"another chart")
    with pytest.raises(SystemExit, match="double/pharos:1.0.0 is published already"):
        module("registry").publish_chart(registry, package, "1.0.0")


@pytest.mark.parametrize(
    ("message", "is_absent"),
    [
        ("reading manifest 1.0.0 in ghcr.io/owner/pharos: manifest unknown", True),
        ("reading manifest 1.0.0 in registry/pharos: name unknown: repository name not known to registry", True),
        ("dial tcp: lookup ghcr.io: no such host", False),
        ("denied: permission_denied: read_package", False),
    ],
)
def test_only_an_unknown_manifest_is_absent(message, is_absent):
    registry = module("registry").Registry("ghcr.io/Owner", plain_http=False)
    registry.run = lambda command: subprocess.CompletedProcess(command, 1, b"", message.encode())
    if is_absent:
        assert registry.manifest("pharos:1.0.0") == b""
    else:
        with pytest.raises(SystemExit, match="cannot read ghcr.io/owner/pharos:1.0.0"):
            registry.manifest("pharos:1.0.0")


@pytest.fixture
def real_registry(tmp_path):
    """The address of a registry of Debian's package docker-registry."""
    for name in ("skopeo", "docker-registry"):
        if not shutil.which(name):
            pytest.skip(f"{name} is not installed")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    settings = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}, "http": {"addr": address}}
    (tmp_path / "registry.yml").write_text(json.dumps(settings))
    command = ["docker-registry", "serve", tmp_path / "registry.yml"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None
        try:
            return urllib.request.urlopen(f"http://{address}/v2/", timeout=10).status == 200
        except OSError:
            return False

    try:
        eventually("the registry answers", answers)
        yield address
    finally:
        process.kill()
        process.wait()


def test_the_commands_publish_in_a_real_registry(images, real_registry, tmp_path):
    environment = os.environ | {"PATH": f"{schemas.home() / 'helm'}:{os.environ['PATH']}"}

    def publish(what: str, source, path: str) -> str:
        command = [sys.executable, DEPLOY / "release/registry.py", what, "--from", source, "--plain-http"]
        done = subprocess.run([*command, "--to", f"{real_registry}/{path}"], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = publish("images", images, "Owner")
    assert printed == publish("images", images, "Owner")
    inspect = ["skopeo", "inspect", "--tls-verify=false", "--override-arch=arm64", f"docker://{real_registry}/owner/pharos:latest"]
    found = json.loads(subprocess.run(inspect, check=True, capture_output=True).stdout)
    assert found["Architecture"] == "arm64" and f"pharos={found['Digest']}" in printed.splitlines()
    assert set(found["RepoTags"]) == {module().version(), "latest"}
    if not schemas.missing("helm"):
        module().chart(tmp_path)
        # A push writes its time: the second command pushes nothing.
        assert publish("chart", tmp_path, "Owner/charts") == publish("chart", tmp_path, "Owner/charts")
