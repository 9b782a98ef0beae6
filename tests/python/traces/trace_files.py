"""Runs `pharos trace` on trace files."""

import json
import subprocess

from harness.server import binary


def pharos_trace(*args) -> str:
    """Returns the output of `pharos trace`, which must succeed."""
    result = subprocess.run([str(binary()), "trace", *map(str, args)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def summary(*files) -> dict:
    """Returns the summary by model."""
    return {model["model"]: model for model in json.loads(pharos_trace("summary", "--json", *files))["models"]}
