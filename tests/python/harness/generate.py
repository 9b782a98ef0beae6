"""The functions of `tests/models/generate.py`, which writes the test models, for tests that write similar models."""

import importlib.util

from harness.server import MODELS

_spec = importlib.util.spec_from_file_location("generate", MODELS / "generate.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({name: value for name, value in vars(_module).items() if not name.startswith("_")})
