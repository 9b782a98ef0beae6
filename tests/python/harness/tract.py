"""The backend `tract` in tests: whether it is built, and the backends for ONNX models."""

import pytest

from harness.server import binary

PROGRAM = binary().parent / "backends/tract/pharos-worker-tract"
HAS_TRACT = PROGRAM.is_file()
needs_tract = pytest.mark.skipif(not HAS_TRACT, reason=f"{PROGRAM} is not built: `make tract` builds it")
ONNX_BACKENDS = ["onnxruntime", pytest.param("tract", marks=needs_tract)]
"""Each backend for ONNX models, as parameters of a test."""
