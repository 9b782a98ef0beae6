"""Runs one instance of a Python model for the Pharos inference server, which starts `python3 -m pharos_worker`.

Models import `triton_python_backend_utils`, as in Triton. `pharos_worker.metrics` and `pharos_worker.report_load_progress` are the
only additions.
"""

from pharos_worker._native import WIRE_VERSION, __version__, report_load_progress

__all__ = ["WIRE_VERSION", "__version__", "report_load_progress"]
