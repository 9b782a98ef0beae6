#!/usr/bin/env python3
"""Publishes the images and the chart of a release in a registry, with skopeo and helm. A published version is never replaced.

    python3 deploy/release/registry.py images --from target/images --to ghcr.io/OWNER
    python3 deploy/release/registry.py chart --from target/release-files --to ghcr.io/OWNER/charts

`images` takes the folders NAME-MACHINE that `deploy/build-images --save` wrote on each machine, and pushes one manifest list for each
name, tagged with the version. The tag `latest` follows if no later version is published. `chart` pushes the chart of
`release.py release`. If the registry has the same content already, nothing is pushed; with other content for the version, the command
fails before it pushes anything. Both print a line NAME=DIGEST for each name.

`docker login`, `podman login` and `skopeo login` give access; helm reads the first. With `--plain-http`, the registry has no TLS: a
registry on this machine, to try a release.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from release import CHART, version

IMAGES = ("pharos", "pharos-slim")
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The machines of a release, and their names in images."""
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
"""The media type of a list of images in docker's format, the only format with health checks."""
LATEST = "latest"
ABSENT = re.compile(r"(manifest|name) unknown|repository name not known", re.I)
"""What registries answer if they have no such tag, or no such repository."""


def digest(content: bytes) -> str:
    """Returns the digest by which registries name a content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def blob(folder: Path, name: str) -> Path:
    """Returns the file with a digest in a folder of the format `dir`."""
    return folder / name.removeprefix("sha256:")


def entry(folder: Path, machine: str) -> dict:
    """Returns the entry of a saved image in a manifest list."""
    content = (folder / "manifest.json").read_bytes()
    manifest = json.loads(content)
    config = json.loads(blob(folder, manifest["config"]["digest"]).read_bytes())
    if config["architecture"] != MACHINES[machine]:
        raise SystemExit(f"{folder} has an image for {config['architecture']}: expected {MACHINES[machine]}")
    platform = {name: config[name] for name in ("architecture", "os", "variant") if config.get(name)}
    return {"mediaType": manifest["mediaType"], "size": len(content), "digest": digest(content), "platform": platform}


def join(source: Path, name: str, target: Path) -> str:
    """Writes the images of all machines and a manifest list in skopeo's format `dir`; returns the digest of the list.

    The same images make the same list, so a second run can compare it with the published one.
    """
    target.mkdir()
    entries = []
    for machine in MACHINES:
        folder = source / f"{name}-{machine}"
        if not folder.is_dir():
            raise SystemExit(f"{folder} does not exist: deploy/build-images --save writes it on a machine of this architecture")
        entries.append(entry(folder, machine))
        os.link(folder / "manifest.json", blob(target, f"{entries[-1]['digest']}.manifest.json"))
        # Images of different machines can share a layer.
        for path in folder.iterdir():
            if path.name not in ("manifest.json", "version") and not (target / path.name).exists():
                os.link(path, target / path.name)
    content = json.dumps({"schemaVersion": 2, "mediaType": LIST, "manifests": entries}, indent=1).encode()
    (target / "manifest.json").write_bytes(content)
    (target / "version").write_text("Directory Transport Version: 1.1\n")
    return digest(content)


def numbers(tag: str) -> tuple:
    """Returns a tag that is a version as numbers; empty for other tags."""
    return tuple(map(int, tag.split("."))) if re.fullmatch(r"\d+\.\d+\.\d+", tag) else ()


class Registry:
    """A registry, and the path in it under which the names are."""

    def __init__(self, address: str, plain_http: bool):
        # Paths in registries are in lower case; the names of owners may not be.
        self.address = address.lower()
        self.plain_http = plain_http

    def run(self, command: list) -> subprocess.CompletedProcess:
        """Runs a program."""
        return subprocess.run(list(map(str, command)), capture_output=True)

    def done(self, command: list) -> bytes:
        """Runs a program that must succeed; returns its output."""
        done = self.run(command)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout

    def manifest(self, reference: str) -> bytes:
        """Returns the published manifest; empty if none is published."""
        command = ["skopeo", "inspect", f"--tls-verify={self.verify()}", "--raw", f"docker://{self.address}/{reference}"]
        done = self.run(command)
        if done.returncode == 0:
            return done.stdout
        message = done.stderr.decode(errors="replace").strip()
        # Another error, such as a lost connection, does not show that the version is absent.
        if not ABSENT.search(message):
            raise SystemExit(f"cannot read {self.address}/{reference}: {message}")
        return b""

    def versions(self, name: str) -> list:
        """Returns the published versions of an image, as numbers."""
        listed = self.done(["skopeo", "list-tags", f"--tls-verify={self.verify()}", f"docker://{self.address}/{name}"])
        return [numbers(tag) for tag in json.loads(listed)["Tags"]]

    def push_image(self, folder: Path, reference: str):
        """Pushes a manifest list with its images."""
        copy = ["skopeo", "copy", "--quiet", "--all", "--preserve-digests", f"--dest-tls-verify={self.verify()}"]
        self.done([*copy, f"dir:{folder}", f"docker://{self.address}/{reference}"])
        print(f"pushed {self.address}/{reference}", file=sys.stderr)

    def push_chart(self, package: Path):
        """Pushes a chart, whose name and version are in the package."""
        self.done(["helm", "push", *(["--plain-http"] if self.plain_http else []), package, f"oci://{self.address}"])
        print(f"pushed {package.name} to {self.address}", file=sys.stderr)

    def verify(self) -> str:
        """Returns the value of skopeo's option for certificates."""
        return "false" if self.plain_http else "true"


def publish_images(registry: Registry, source: Path, number: str) -> dict:
    """Publishes the images of a version; returns the digests of their lists."""
    with tempfile.TemporaryDirectory(dir=source) as folder:
        joined = {name: Path(folder) / name for name in IMAGES}
        digests = {name: join(source, name, target) for name, target in joined.items()}
        published = {name: registry.manifest(f"{name}:{number}") for name in IMAGES}
        for name, found in published.items():
            if found and digest(found) != digests[name]:
                other = f"as {digest(found)}, and these images are {digests[name]}"
                raise SystemExit(f"{registry.address}/{name}:{number} is published already, {other}")
        for name in IMAGES:
            if not published[name]:
                registry.push_image(joined[name], f"{name}:{number}")
        for name in IMAGES:
            if max(registry.versions(name)) <= numbers(number):
                registry.push_image(joined[name], f"{name}:{LATEST}")
    return digests


def publish_chart(registry: Registry, package: Path, number: str) -> dict:
    """Publishes the chart of a version; returns the digest of its manifest, which contains the time of the push."""
    found = registry.manifest(f"{CHART}:{number}")
    if found and digest(package.read_bytes()) not in [layer["digest"] for layer in json.loads(found).get("layers", [])]:
        raise SystemExit(f"{registry.address}/{CHART}:{number} is published already, and is not {package}")
    if not found:
        registry.push_chart(package)
    return {CHART: digest(found or registry.manifest(f"{CHART}:{number}"))}


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Publishes the images and the chart of a release in a registry.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, folder in (("images", "the folder of the saved images"), ("chart", "the folder of the files of the release")):
        command = commands.add_parser(name)
        command.add_argument("--from", dest="source", type=Path, required=True, help=folder)
        command.add_argument("--to", dest="address", required=True, help="the registry, with the path in it")
        command.add_argument("--plain-http", action="store_true", help="the registry has no TLS")
    options = parser.parse_args()
    registry = Registry(options.address, options.plain_http)
    if options.command == "images":
        digests = publish_images(registry, options.source, version())
    else:
        digests = publish_chart(registry, options.source / f"{CHART}-{version()}.tgz", version())
    for name, found in digests.items():
        print(f"{name}={found}")


if __name__ == "__main__":
    main()
