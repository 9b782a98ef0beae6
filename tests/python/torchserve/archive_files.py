"""Contents of model archives, and a package for their `requirements.txt`."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

ECHO = "def handle(data, context):\n    return [bytes(item['body']) for item in data] if data else None\n"


def manifest(name: str, version: str = "1.0", **model) -> str:
    """Returns MAR-INF/MANIFEST.json for a handler `service.py` with a function."""
    model = {"modelName": name, "modelVersion": version, "handler": "service.py:handle"} | model
    return json.dumps({"createdOn": "today", "runtime": "python", "model": model, "archiverVersion": "0.12.0"})


def files(name: str, source: str = ECHO, yaml: str = "", **model) -> dict:
    """Returns the files of an archive."""
    named = {"configFile": "model-config.yaml"} if yaml else {}
    made = {"MAR-INF/MANIFEST.json": manifest(name, **named, **model), "service.py": source}
    return made | ({"model-config.yaml": yaml} if yaml else {})


def zipped(content: dict) -> bytes:
    """Returns a .mar file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return out.getvalue()


def tarred(content: dict, *links) -> bytes:
    """Returns a .tar.gz file; `links` are names and targets."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return out.getvalue()


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
