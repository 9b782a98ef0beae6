"""The commands of the packages: each replaces itself by the server or the worker.

The package pharos-server contains the executables. The package pharos-worker only has the command `torchserve`, and finds a
server that is installed elsewhere.
"""

import os
import shutil
import sys
from pathlib import Path

PACKAGED = Path(__file__).resolve().parent / "_bin"
"""The executables of the package pharos-server."""


def find_server() -> str:
    """Returns the path of `pharos`: `PHAROS_BIN`, in this package, beside this script or Python, or on the `PATH`; empty if not
    found."""
    named = os.environ.get("PHAROS_BIN")
    if named:
        return named
    for folder in (PACKAGED, Path(sys.argv[0]).resolve().parent, Path(sys.executable).parent):
        if os.access(folder / "pharos", os.X_OK):
            return str(folder / "pharos")
    return shutil.which("pharos") or ""


def use_this_python():
    """Makes the server use this Python and its packages, such as ONNX Runtime, whether or not its environment is activated."""
    os.environ.setdefault("PHAROS_PYTHON", sys.executable)
    folder = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", os.defpath)
    if folder not in paths.split(os.pathsep):
        os.environ["PATH"] = f"{folder}{os.pathsep}{paths}"


def run(command: str, program: str, arguments: list):
    """Replaces this process by a program."""
    try:
        os.execv(program, [program, *arguments])
    except OSError as error:
        sys.exit(f"{command}: cannot start '{program}': {error.strerror}")


def run_server(command: str, arguments: list):
    """Replaces this process by the server."""
    server = find_server()
    if not server:
        sys.exit(f"{command}: the executable pharos was not found; set PHAROS_BIN, or put it on the PATH")
    use_this_python()
    run(command, server, arguments)


def main():
    """The command `torchserve`."""
    run_server("torchserve", ["torchserve", *sys.argv[1:]])


def pharos():
    """The command `pharos`."""
    run_server("pharos", sys.argv[1:])


def tritonserver():
    """The command `tritonserver`."""
    run_server("tritonserver", ["tritonserver", *sys.argv[1:]])


def pharos_worker():
    """The command `pharos-worker`."""
    run("pharos-worker", str(PACKAGED / "pharos-worker"), sys.argv[1:])
