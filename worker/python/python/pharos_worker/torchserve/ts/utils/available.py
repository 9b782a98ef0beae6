"""Which packages a handler may use, as the flags that TorchServe's modules have: `PROFILER_AVAILABLE` and the like. They are
found out when one is asked for, since that imports PyTorch."""

import functools
import importlib.util
import os
import re

TORCH = {"PROFILER_AVAILABLE": (1, 8, 1), "PT2_AVAILABLE": (2, 0, 0), "PT230_AVAILABLE": (2, 2, 3)}
"""The version of PyTorch from which a flag is true."""
PACKAGES = {"XLA_AVAILABLE": ("torch_xla",), "ONNX_AVAILABLE": ("onnxruntime", "psutil")}
"""The packages that a flag needs."""
ALL = frozenset((*TORCH, *PACKAGES, "IPEX_AVAILABLE"))


@functools.lru_cache(maxsize=None)
def flag(name):
    """The value of a flag. Raises KeyError for another name."""
    if name in TORCH:
        return torch_version() >= TORCH[name]
    if name == "IPEX_AVAILABLE":
        return os.environ.get("TS_IPEX_ENABLE", "false") == "true" and _has("intel_extension_for_pytorch")
    return all(_has(package) for package in PACKAGES[name])


def torch_version():
    """The version of PyTorch as three numbers; zeros if it is not installed."""
    try:
        import torch
    except ImportError:
        return 0, 0, 0
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(torch.__version__))
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else (0, 0, 0)


def attribute_of(module, names):
    """A module's `__getattr__` that knows these flags."""

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
