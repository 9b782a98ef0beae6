"""Runs one instance of a model in Python for the Pharos inference server, which starts it: `python3 -m pharos_worker`.

Models import `triton_python_backend_utils`, as under Triton; what is only here is `pharos_worker.metrics`.
"""

from pharos_worker._native import WIRE_VERSION, __version__

__all__ = ["WIRE_VERSION", "__version__"]
