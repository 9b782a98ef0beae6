"""Writes a repository for a real Triton from models without files (see `triton_models/model.py`)."""

import re
import shutil
from pathlib import Path

from harness.server import ROOT, TRITON_MODELS

COMPARED = [
    "examples/models/simple",
    "examples/models/simple_string",
    "examples/models/simple_identity",
    *(f"tests/models/identity_{t}" for t in ("fp32", "fp64", "uint64", "bytes")),
    *(
        f"tests/models/identity_{t}_nobatch"
        for t in (
            "bool",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "fp16",
            "fp32",
            "fp64",
            "bytes",
        )
    ),
    *(
        f"tests/models/{name}"
        for name in ("optional", "fail", "one_string", "two_dims", "fixed_and_free", "versions_specific")
    ),
]
"""The models that both servers serve. Triton's Python backend starts a process for each, so the list is short."""


def build(target: Path) -> Path:
    """Writes the repository of [`COMPARED`] models into the folder `target` and returns it."""
    for model in COMPARED:
        source = ROOT / model
        copy = target / source.name
        shutil.copytree(source, copy)
        config = (copy / "config.pbtxt").read_text()
        config = re.sub('backend: "(builtin|test)"', 'backend: "python"', config)
        if "instance_group" not in config:
            config += "instance_group [ { kind: KIND_CPU } ]\n"
        (copy / "config.pbtxt").write_text(config)
        for version in copy.glob("[0-9]*"):
            shutil.copy(TRITON_MODELS / "model.py", version / "model.py")
    return target
