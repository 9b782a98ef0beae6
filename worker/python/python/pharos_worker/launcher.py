"""The script `torchserve`: runs `pharos torchserve` with the same arguments, and with this Python for models."""

import os
import shutil
import sys
from pathlib import Path


def find_server() -> str:
    """Returns the path of `pharos`: `PHAROS_BIN`, beside this script or Python, or on the `PATH`; empty if not found."""
    named = os.environ.get("PHAROS_BIN")
    if named:
        return named
    for folder in (Path(sys.argv[0]).resolve().parent, Path(sys.executable).parent):
        if os.access(folder / "pharos", os.X_OK):
            return str(folder / "pharos")
    return shutil.which("pharos") or ""


def main():
    """Replaces this process by the server's launcher."""
    server = find_server()
    if not server:
        sys.exit("torchserve: the executable pharos was not found; set PHAROS_BIN, or put it on the PATH")
    os.environ.setdefault("PHAROS_PYTHON", sys.executable)
    try:
        os.execv(server, [server, "torchserve", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"torchserve: cannot start '{server}': {error.strerror}")
