"""Flags for optional packages, with TorchServe's names, such as `PROFILER_AVAILABLE`. They are evaluated on first access,
because that imports PyTorch."""

import functools
import importlib.util
import os
import re

TORCH = {"PROFILER_AVAILABLE": (1, 8, 1), "PT2_AVAILABLE": (2, 0, 0), "PT230_AVAILABLE": (2, 2, 3)}
"""The minimum version of PyTorch for each flag."""
PACKAGES = {"XLA_AVAILABLE": ("torch_xla",), "ONNX_AVAILABLE": ("onnxruntime", "psutil")}
"""The packages that each flag requires."""
ALL = frozenset((*TORCH, *PACKAGES, "IPEX_AVAILABLE"))


@functools.lru_cache(maxsize=None)
def flag(name):
    """Returns the value of a flag. Raises KeyError for an unknown name."""
    if name in TORCH:
        return torch_version() >= TORCH[name]
    if name == "IPEX_AVAILABLE":
        return os.environ.get("TS_IPEX_ENABLE", "false") == "true" and _has("intel_extension_for_pytorch")
    return all(_has(package) for package in PACKAGES[name])


def torch_version():
    """Returns the version of PyTorch as three numbers; zeros if it is not installed."""
    try:
        import torch
    except ImportError:
        return 0, 0, 0
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(torch.__version__))
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else (0, 0, 0)


def attribute_of(module, names):
    """Returns a `__getattr__` for a module that provides these flags."""

    def found(name):
        if name in names:
            return flag(name)
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return found


def _has(package):
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
