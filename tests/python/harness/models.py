"""Writes repositories of models: copies of the test models, and models with a given configuration text."""

import shutil

from harness.server import MODELS


def copy_models(target, names=None, source=MODELS):
    """Copies the models `names` (default: all) into the folder `target` and returns it."""
    for config in sorted(source.glob("*/config.pbtxt")):
        if names is None or config.parent.name in names:
            shutil.copytree(config.parent, target / config.parent.name)
    return target


def write(folder, name: str, config: str, onnx=b""):
    """Writes one model into the repository `folder` and returns the folder."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    version.with_name("config.pbtxt").write_text(config)
    if onnx:
        (version / "model.onnx").write_bytes(onnx)
    return folder


IO = """
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
