"""Runs TorchServe handlers: contains the package `ts` that they import, and support for their archives.

`ts` is in a subdirectory, so that this package can be installed beside the real `torchserve`. It is added to the module path
when a TorchServe model is run, or by `activate()` in tests of handlers without a server.
"""

import os
import sys

HOME = os.path.dirname(os.path.abspath(__file__))
"""The directory of the package `ts`."""


def activate():
    """Makes `import ts` find the package in this directory before any other."""
    if HOME not in sys.path:
        sys.path.insert(0, HOME)
    other = sys.modules.get("ts")
    if other is not None and not os.path.abspath(getattr(other, "__file__", None) or "").startswith(HOME + os.sep):
        for name in [name for name in sys.modules if name == "ts" or name.startswith("ts.")]:
            del sys.modules[name]
