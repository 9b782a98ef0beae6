"""Archives of TorchServe for tests: handlers of `handlers/` as `.mar`, `.tar.gz` or directories."""

import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

HANDLERS = Path(__file__).resolve().parent / "handlers"


def contents(handler, yaml="", files=None, manifest=None):
    """Returns the files of an archive: names and bytes."""
    code = (HANDLERS / f"{handler.partition(':')[0]}.py").read_bytes()
    model = {"modelName": handler.partition(":")[0], "modelVersion": "2.1", "handler": handler}
    found = {f"{handler.partition(':')[0]}.py": code, **(files or {})}
    if yaml:
        model["configFile"] = "model-config.yaml"
        found["model-config.yaml"] = yaml.encode()
    whole = {"createdOn": "20/11/2026 10:00:00", "runtime": "python", "archiverVersion": "0.12.0", "model": model}
    found["MAR-INF/MANIFEST.json"] = json.dumps(whole | (manifest or {})).encode()
    return found


def write(version, name, found, kind="mar"):
    """Writes an archive, or its files, into the directory of a version."""
    version.mkdir(parents=True)
    if kind == "mar":
        with zipfile.ZipFile(version / f"{name}.mar", "w", zipfile.ZIP_DEFLATED) as file:
            for path, content in found.items():
                file.writestr(path, content)
    elif kind == "tar.gz":
        with tarfile.open(version / f"{name}.tar.gz", "w:gz") as file:
            for path, content in found.items():
                entry = tarfile.TarInfo(f"{name}/{path}")
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    else:
        for path, content in found.items():
            (version / path).parent.mkdir(parents=True, exist_ok=True)
            (version / path).write_bytes(content)


def model(repository, name, handler, yaml="", kind="mar", config='backend: "torchserve"\n', **more):
    """Writes a model of a repository; without `config` it has only its archive."""
    write(repository / name / "1", name, contents(handler, yaml, **more), kind)
    if config:
        (repository / name / "config.pbtxt").write_text(config)


def remove(repository, name):
    """Removes a model."""
    shutil.rmtree(repository / name)
