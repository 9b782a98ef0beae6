"""What runs handlers of TorchServe: the package `ts` that they import, and the archives that they come in.

`ts` lies in here, not beside `pharos_worker`: where the real `torchserve` is installed too, both stay whole. It is put on
the path of modules when a model of TorchServe is run, or by `activate()`, for tests of handlers without a server.
"""

import os
import sys

HOME = os.path.dirname(os.path.abspath(__file__))
"""The directory that holds the package `ts`."""


def activate():
    """Makes `import ts` find the package here, before any other of this name."""
    if HOME not in sys.path:
        sys.path.insert(0, HOME)
    other = sys.modules.get("ts")
    if other is not None and not os.path.abspath(getattr(other, "__file__", None) or "").startswith(HOME + os.sep):
        for name in [name for name in sys.modules if name == "ts" or name.startswith("ts.")]:
            del sys.modules[name]
