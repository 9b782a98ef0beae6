"""Runs one instance of a Python model for the Pharos inference server, which starts `python3 -m pharos_worker`.

Models import `triton_python_backend_utils`, as in Triton. `pharos_worker.metrics` is the only addition.
"""

from pharos_worker._native import WIRE_VERSION, __version__

__all__ = ["WIRE_VERSION", "__version__"]
