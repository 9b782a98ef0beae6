"""Programs from Debian's packages: those of the PATH, or of a package unpacked in the user's cache, without root and without an
installation."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FETCH_S = 300


def cache(folder: str) -> Path:
    """Returns a folder that packages are unpacked in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / folder


def program(name: str, folder: Path) -> str | None:
    """Returns the path of a program, or None."""
    return shutil.which(name) or shutil.which(name, path=str(folder / "usr/bin"))


def fetch(package: str, folder: Path) -> str:
    """Unpacks a package in a folder. Returns why that failed; empty if it did not."""
    skipped = "the tests that need it will be skipped"
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return f"{package} is not installed and apt-get or dpkg is missing: {skipped}"
    with tempfile.TemporaryDirectory() as downloads:
        # apt's sandbox user cannot write into this folder; apt then warns and downloads as the caller.
        commands = [["apt-get", "download", "-q", package]]
        if os.geteuid() == 0:
            # The lists of a machine may name versions that the mirrors no longer have.
            commands += [["apt-get", "update", "-q"], ["apt-get", "download", "-q", package]]
        archive = None
        while archive is None and commands:
            try:
                done = subprocess.run(commands.pop(0), cwd=downloads, capture_output=True, text=True, timeout=FETCH_S)
            except subprocess.TimeoutExpired:
                return f"apt-get download {package} took over {FETCH_S} s: {skipped}"
            archive = next(Path(downloads).glob("*.deb"), None)
        if archive is None:
            return f"{package} cannot be downloaded, {skipped}: {done.stderr.strip()}"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)
    return ""
