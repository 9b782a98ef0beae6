"""The package that TorchServe handlers import, on the worker of Pharos: TorchServe's names with their behavior for handlers.

No module imports PyTorch before a handler uses it.
"""

from ts.version import __version__

__all__ = ["__version__"]
