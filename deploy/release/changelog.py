#!/usr/bin/env python3
"""The changelog: fragments in `changelog.d`, from which a release is cut.

    python3 deploy/release/changelog.py check          prints what is wrong with the fragments
    python3 deploy/release/changelog.py show           prints the section that a release would have
    python3 deploy/release/changelog.py cut 0.3.0      cuts the release in the working tree

A fragment is a file `SUBJECT.KIND.md` with what changed for the user, in one to three sentences. Its links are relative to its folder.
`cut` moves all fragments into CHANGELOG.md, and writes the version into the files that contain it. It commits and tags nothing.
"""

import argparse
import datetime
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "migration": "Migration",
    "added": "Added",
    "changed": "Changed",
    "removed": "Removed",
    "fixed": "Fixed",
    "security": "Security",
}
"""The kinds of fragments and their headings, in the order of a release."""
NAME = re.compile(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md")
MOST_WORDS = 90
"""A fragment is short: the documents describe the feature. Tables are not counted."""
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
WITH_VERSION = (
    "worker/llamacpp/Cargo.toml",
    "deploy/Containerfile",
    "deploy/compose/compose.yaml",
    "deploy/compose/gpu.yaml",
    "deploy/compose/torchserve.yaml",
    "deploy/compose/triton.yaml",
    "deploy/gitops/argo_cd.yaml",
    "deploy/gitops/flux.yaml",
    "deploy/helm/pharos/Chart.yaml",
    "deploy/kubernetes/base/kustomization.yaml",
    "deploy/kserve/kustomization.yaml",
    "docs/src/guides/compose.md",
    "docs/src/start/install.md",
    "docs/src/reference/http-examples.md",
    "docs/src/reference/grpc-examples.md",
)
"""Files that contain the version, beside `Cargo.toml` and the lock files. The Python packages have the version of `Cargo.toml`."""


def fragments(folder: Path) -> list:
    """Returns the paths of the fragments, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def mistake(name: str, text: str) -> str:
    """Returns what is wrong with a fragment; empty if it is well-formed."""
    if not NAME.fullmatch(name):
        return f"the name must be SUBJECT.KIND.md, with lower-case words and one of the kinds {', '.join(KINDS)}"
    if not text.endswith("\n") or text.endswith("\n\n") or text.startswith((" ", "\n")):
        return "the text must begin at once and end with one line break"
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    if any(line.startswith(("#", "- ", "* ")) for line in prose):
        return "the text must be sentences, without headings and items of lists: a release makes it an item"
    last = [line for line in prose if line][-1:]
    if not last or not last[0].endswith((".", ":")):
        return "the text must end with a full stop"
    words = sum(len(line.split()) for line in prose)
    if words > MOST_WORDS:
        return f"the text has {words} words, at most {MOST_WORDS} are allowed: write what changed, and link the documents"
    if re.search(r"\]\((?!\.\./|https?://)", text):
        return "links must begin with ../ or be addresses"
    return ""


def mistakes(folder: Path) -> list:
    """Returns a line for each malformed fragment."""
    found = [(path, mistake(path.name, path.read_text())) for path in fragments(folder)]
    return [f"{path.relative_to(folder.parent)}: {wrong}" for path, wrong in found if wrong]


def item(text: str) -> str:
    """Returns a fragment as an item of a list, with links relative to the root."""
    lines = text.replace("](../", "](").rstrip("\n").split("\n")
    return "\n".join([f"- {lines[0]}", *(f"  {line}" if line else "" for line in lines[1:])])


def section(folder: Path, version: str, day: str) -> str:
    """Returns the section of a version."""
    parts = [f"## {version} ({day})"]
    for kind, heading in KINDS.items():
        items = [item(path.read_text()) for path in fragments(folder) if path.name.endswith(f".{kind}.md")]
        if items:
            parts.append("\n".join([f"### {heading}", *items]))
    return "\n\n".join(parts) + "\n"


def with_section(changelog: str, text: str) -> str:
    """Returns the changelog with a new section before the others."""
    begin = re.search(r"^## ", changelog, re.M)
    at = begin.start() if begin else len(changelog)
    return f"{changelog[:at]}{text}\n{changelog[at:]}"


def current(root: Path) -> str:
    """Returns the version of the workspace."""
    return re.search(r'^version = "(.*)"$', (root / "Cargo.toml").read_text(), re.M)[1]


def set_version(root: Path, new: str):
    """Writes the version into `Cargo.toml`, the lock files and the files that quote it."""
    old = current(root)
    manifest = root / "Cargo.toml"
    manifest.write_text(manifest.read_text().replace(f'\nversion = "{old}"\n', f'\nversion = "{new}"\n', 1))
    for path in WITH_VERSION:
        text = (root / path).read_text()
        if old not in text:
            raise SystemExit(f"{path} does not contain the version {old}")
        (root / path).write_text(re.sub(rf"(?<![\d.]){re.escape(old)}(?![\d.]*\d)", new, text))
    for folder in (".", "tests/fuzz", "worker/llamacpp"):
        lock = root / folder / "Cargo.lock"
        if lock.exists():
            # Own packages have no source.
            own = re.compile(rf'(\[\[package\]\]\nname = "[^"]*"\nversion = "){re.escape(old)}("\n(?!source))')
            lock.write_text(own.sub(rf"\g<1>{new}\g<2>", lock.read_text()))


def cut(root: Path, version: str, day: str):
    """Cuts a release in the working tree."""
    if not VERSION.fullmatch(version):
        raise SystemExit(f"invalid version '{version}': expected three numbers, such as 0.3.0")
    if [int(part) for part in version.split(".")] <= [int(part) for part in current(root).split(".")]:
        raise SystemExit(f"the version must be higher than {current(root)}")
    folder = root / "changelog.d"
    if wrong := mistakes(folder):
        raise SystemExit("\n".join(wrong))
    if not fragments(folder):
        raise SystemExit("changelog.d has no fragments: nothing has changed")
    changelog = root / "CHANGELOG.md"
    changelog.write_text(with_section(changelog.read_text(), section(folder, version, day)))
    set_version(root, version)
    for path in fragments(folder):
        path.unlink()


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Checks the fragments of the changelog, and cuts releases from them.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="print malformed fragments; exits with 1 if there are any")
    commands.add_parser("show", help="print the section that a release would have")
    commands.add_parser("cut", help="cut a release").add_argument("version")
    options = parser.parse_args()
    today = datetime.date.today().isoformat()
    if options.command == "check":
        raise SystemExit("\n".join(mistakes(ROOT / "changelog.d")) or 0)
    if options.command == "show":
        print(section(ROOT / "changelog.d", "unreleased", today), end="")
        return
    cut(ROOT, options.version, today)
    print(subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True, text=True).stdout)
    print(f"check the changes, then: git commit -am 'Release {options.version}' && git tag v{options.version}")


if __name__ == "__main__":
    main()
