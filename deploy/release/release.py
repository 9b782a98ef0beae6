#!/usr/bin/env python3
"""Writes the files of a release: wheels, archives of the executables, the Helm chart, SBOM, third-party licences, changes, checksums.

    python3 deploy/release/release.py notices --to target/notices
    python3 deploy/release/release.py release --wheels target/wheels --to target/release-files
    python3 deploy/release/release.py check-tag vVERSION

`notices` writes the SBOM and the licences of the crates that are compiled into the executables; `deploy/wheel/pack.py` puts them
into wheels. `release` collects everything of one version. `check-tag` fails unless a tag has the version of the source and of the
chart, and the changelog a section for it. Files have no times, so the same inputs make the same release.
"""

import argparse
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import uuid
import zipfile
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {
    ROOT: ("pharos-frontend", "pharos-worker", "pharos-worker-text", "pharos-worker-tract", "pharos-worker-python"),
    ROOT / "worker/llamacpp": ("pharos-llamacpp",),
}
"""The workspaces, and their packages whose executables and libraries are released."""
FEATURES = {ROOT / "worker/llamacpp": ["--features=variants"]}
"""The features with which packages of a workspace are released."""
EXECUTABLES = "pharos_worker/_bin/"
"""The folder of the executables and backends in wheels."""
SBOM, LICENSES = "pharos.cdx.json", "THIRD_PARTY_LICENSES.txt"
CHART = "pharos"
"""The name of the Helm chart, which is in `deploy/helm`."""
BUNDLED = {"llama-cpp-sys-2": ["llama.cpp"]}
"""Packages with the source of another project, and its folders."""
LICENSE_FILE = re.compile(r"(licen[cs]e|copying|notice|unlicense)", re.I)


def version() -> str:
    """Returns the version of the workspace."""
    return re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]


def metadata(workspace: Path) -> dict:
    """Returns what cargo knows about the packages of a workspace; it fetches those that are missing."""
    command = ["cargo", "metadata", "--locked", "--format-version=1", "--filter-platform=x86_64-unknown-linux-gnu"]
    command += FEATURES.get(workspace, [])
    return json.loads(subprocess.run(command, cwd=workspace, check=True, capture_output=True).stdout)


def shipped() -> list:
    """Returns the packages of other projects that are compiled into the executables and libraries, by name and version."""
    found = {}
    for workspace, names in SHIPPED.items():
        for package in compiled(metadata(workspace), names):
            found[package["name"], package["version"]] = package
    return [package for _, package in sorted(found.items())]


def compiled(found: dict, names: tuple) -> list:
    """Returns the packages of other projects that are compiled into some packages of a workspace."""
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    packages = {package["id"]: package for package in found["packages"]}
    todo, seen = [key for key, package in packages.items() if package["name"] in names], set()
    while todo:
        key = todo.pop()
        if key not in seen:
            seen.add(key)
            # Dependencies of tests and of build scripts are not in the executables.
            used = [edge for edge in nodes[key]["deps"] if any(kind["kind"] is None for kind in edge["dep_kinds"])]
            todo += [edge["pkg"] for edge in used]
    return [packages[key] for key in seen if packages[key]["source"]]


def checksums() -> dict:
    """Returns the checksums of each `Cargo.lock` by name and version."""
    text = "".join((workspace / "Cargo.lock").read_text() for workspace in SHIPPED)
    entries = re.findall(r'name = "(.*)"\nversion = "(.*)"\nsource = ".*"\nchecksum = "(.*)"', text)
    return {(name, number): digest for name, number, digest in entries}


def expression(package: dict) -> str:
    """Returns the licence of a package as an SPDX expression; old packages separate alternatives by `/`."""
    return re.sub(r" ?/ ?", " OR ", package["license"])


def component(package: dict, digests: dict) -> dict:
    """Returns a package as a component of CycloneDX."""
    name, number = package["name"], package["version"]
    found = {
        "type": "library",
        "bom-ref": f"pkg:cargo/{name}@{number}",
        "name": name,
        "version": number,
        "hashes": [{"alg": "SHA-256", "content": digests[name, number]}],
        "licenses": [{"expression": expression(package)}],
        "purl": f"pkg:cargo/{name}@{number}",
    }
    if package["repository"]:
        found["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return found


def sbom(packages: list) -> str:
    """Returns the list of components in the format of CycloneDX 1.5."""
    digests = checksums()
    own = {"type": "application", "bom-ref": "pharos", "name": "pharos", "version": version()}
    components = [component(package, digests) for package in packages]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own | {"licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": components,
    }
    # Attestations need a number. It depends on the content alone, so that the same source makes the same files.
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document)).urn
    return json.dumps(document, indent=1) + "\n"


def licenses(packages: list) -> str:
    """Returns the licences of the packages; a text that several packages have is written once."""
    texts, parts = {}, []
    for package in packages:
        folder = Path(package["manifest_path"]).parent
        places = [folder, *(folder / name for name in BUNDLED.get(package["name"], ()))]
        files = sorted(path for place in places for path in place.iterdir() if path.is_file() and LICENSE_FILE.match(path.name))
        found = [path.read_text(errors="replace").strip() for path in files]
        numbers = [str(texts.setdefault(text, len(texts) + 1)) for text in found]
        where = f"texts {', '.join(numbers)}" if numbers else f"no text in the package, see {package['repository']}"
        parts.append(f"{package['name']} {package['version']}: {expression(package)} ({where})")
    body = [f"\n{'=' * 20} text {number} {'=' * 20}\n\n{text}" for text, number in texts.items()]
    return "\n".join(["Crates in the executables of Pharos, and their licences.", "", *parts, *body]) + "\n"


def write_notices(target: Path):
    """Writes the SBOM and the licences."""
    packages = shipped()
    target.mkdir(parents=True, exist_ok=True)
    (target / SBOM).write_text(sbom(packages))
    (target / LICENSES).write_text(licenses(packages))


def changes(text: str, number: str) -> str:
    """Returns the section of a version in the changelog."""
    found = re.search(rf"^## {re.escape(number)}\b.*?(?=^## |\Z)", text, re.M | re.S)
    if not found:
        raise SystemExit(f"CHANGELOG.md has no section for version {number}")
    return found[0]


def check_tag(tag: str, number: str, changelog: str, chart_yaml: str):
    """Fails unless the tag and the chart have the version `number`, and the changelog a section for it."""
    if tag != f"v{number}":
        raise SystemExit(f"the tag {tag} is not the version of Cargo.toml: expected v{number}")
    changes(changelog, number)
    # The chart installs the image of its version.
    for field in ("version", "appVersion"):
        found = re.search(rf'^{field}: *["\']?([^"\'\s]*)', chart_yaml, re.M)
        if not found or found[1] != number:
            raise SystemExit(f"the chart has {field} {found[1] if found else 'nothing'}: expected {number}")


def archive(wheel: Path, notices: Path, target: Path) -> Path:
    """Writes the executables of a wheel, the unit of systemd and the licences as an archive; returns its path."""
    machine = re.search(r"_(x86_64|aarch64)\.whl$", wheel.name)[1]
    folder = f"pharos-{version()}-linux-{machine}"
    with zipfile.ZipFile(wheel) as packed:
        executables = [name for name in packed.namelist() if name.startswith(EXECUTABLES)]
        names = {name: name.removeprefix(EXECUTABLES) for name in executables}
        files = {("lib/pharos/" if "/" in short else "bin/") + short: packed.read(name) for name, short in names.items()}
    files |= {"LICENSE": (ROOT / "LICENSE").read_bytes(), "pharos.service": (ROOT / "deploy/systemd/pharos.service").read_bytes()}
    files |= {name: (notices / name).read_bytes() for name in (SBOM, LICENSES)}
    programs = {name for name in files if name.startswith("bin/") or Path(name).name.startswith("pharos-worker-")}
    return pack(target / f"{folder}.tar.gz", folder, files, programs)


def chart(target: Path) -> Path:
    """Writes the Helm chart as `helm package` does, but without times; returns its path."""
    source = ROOT / "deploy/helm" / CHART
    ignored = (source / ".helmignore").read_text().split()
    found = [path for path in source.rglob("*") if path.is_file() and not any(fnmatch(path.name, name) for name in ignored)]
    files = {str(path.relative_to(source)): path.read_bytes() for path in found}
    return pack(target / f"{CHART}-{version()}.tgz", CHART, files, set())


def pack(path: Path, folder: str, files: dict, programs: set) -> Path:
    """Writes files in a folder, of which some are programs, as an archive; returns its path."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name, content in sorted(files.items()):
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode = len(content), 0o755 if name in programs else 0o644
                tar.addfile(entry, io.BytesIO(content))
    return path


def release(wheels: Path, target: Path) -> list:
    """Writes a release of the wheels of this version; returns its files."""
    found = sorted(wheels.glob(f"pharos_server-{version()}-*.whl"))
    if not found:
        raise SystemExit(f"{wheels} has no wheel of version {version()}: make wheel builds them")
    shutil.rmtree(target, ignore_errors=True)
    write_notices(target)
    for wheel in found:
        shutil.copy(wheel, target)
        archive(wheel, target, target)
    chart(target)
    (target / "CHANGES.md").write_text(changes((ROOT / "CHANGELOG.md").read_text(), version()))
    files = sorted(target.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (target / "SHA256SUMS").write_text(sums)
    return [*files, target / "SHA256SUMS"]


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Writes the files of a release.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("notices", "release"):
        command = commands.add_parser(name)
        command.add_argument("--to", dest="target", type=Path, required=True, help="the folder to write to; `release` replaces it")
    commands.choices["release"].add_argument("--wheels", type=Path, required=True, help="the folder of the wheels")
    commands.add_parser("check-tag").add_argument("tag")
    options = parser.parse_args()
    if options.command == "notices":
        write_notices(options.target)
    elif options.command == "check-tag":
        chart_yaml = (ROOT / "deploy/helm" / CHART / "Chart.yaml").read_text()
        check_tag(options.tag, version(), (ROOT / "CHANGELOG.md").read_text(), chart_yaml)
    else:
        for path in release(options.wheels, options.target):
            print(path)


if __name__ == "__main__":
    main()
