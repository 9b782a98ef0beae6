"""What handlers written for TorchServe import, on the worker of Pharos: its names, and their meaning for a handler.

Nothing in here needs PyTorch before a handler uses it.
"""

from ts.version import __version__

__all__ = ["__version__"]
