"""A package for `requirements.txt`."""

import zipfile
from pathlib import Path


def wheel(folder: Path) -> Path:
    """Builds a package with one module that pip installs without a network."""
    path = folder / "pharos_tried-1.0-py3-none-any.whl"
    info = "pharos_tried-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pharos_tried.py", "WORD = 'installed'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pharos-tried\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
