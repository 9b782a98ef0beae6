"""The fork server: a process that has imported the package, and starts workers as copies of itself. A copy starts in about a
millisecond, because nothing is imported again, and shares the memory of what was imported.

The server and this process exchange packets of JSON, which `src/wire/fork_server.rs` describes. There is one thread, so that
copies have no locks of threads that they do not have.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys

# Most of these are imported for the copies.
import triton_python_backend_utils  # noqa: F401
from pharos_worker import _native, autocomplete, driver, process_end  # noqa: F401

SOCKET = 3
"""The descriptor of the connection to the server."""

LARGEST = 64 << 10
"""The largest message in bytes."""

CONTROL_GROUP = 10
"""The number of a file that makes a copy enter its control group."""

MOST_DESCRIPTORS = 16
"""The largest number of files of a request."""

FREE = 64
"""Descriptors from this number on have no fixed use."""


def main(modules):
    """Serves until the server closes the connection. Returns only in the copies: their arguments."""
    connection = socket.socket(fileno=fcntl.fcntl(SOCKET, fcntl.F_DUPFD_CLOEXEC, FREE))
    os.close(SOCKET)
    for name in filter(None, modules.split(",")):
        _import(name)
    server = ForkServer(connection)
    try:
        threads = server.threads_of_a_copy()
        reason = f"{threads - 1} threads were started by imported modules, and would be missing in copies" if threads > 1 else ""
    except OSError as error:
        reason = f"it cannot start and watch processes: {error}"
    if reason:
        server.report({"failed": reason})
        os._exit(0)
    # Otherwise garbage collections of the copies would write to the objects, and with it copy their memory.
    gc.freeze()
    return server.serve()


def _import(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        # The model that needs it reports it; without a model that does, it is not an error.
        print(f"\x1eWcannot import '{name}' (--python-preload): {type(error).__name__}: {error}", file=sys.stderr)


class ForkServer:
    """Starts copies of this process, and reports their ends."""

    def __init__(self, connection):
        self._connection = connection
        self._poll = select.epoll()
        self._poll.register(connection, select.EPOLLIN)
        self._copies = {}
        self._imported = modification_times(imported_paths())

    def threads_of_a_copy(self):
        """Returns the number of threads of this process after it has made a copy. Before a fork, some libraries end threads that
        they start again when they need them."""
        copy = os.fork()
        if copy == 0:
            os._exit(0)
        try:
            os.close(_native.open_process(copy))
        finally:
            os.waitpid(copy, 0)
        return len(os.listdir("/proc/self/task"))

    def report(self, message, *descriptors):
        """Sends a message."""
        socket.send_fds(self._connection, [json.dumps(message).encode()], descriptors)

    def serve(self):
        """Serves until the connection is closed. Returns only in the copies: their arguments."""
        self.report("ready")
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._connection.fileno():
                    self._ended(descriptor)
                    continue
                flags = socket.MSG_CMSG_CLOEXEC
                message, files, _, _ = socket.recv_fds(self._connection, LARGEST, MOST_DESCRIPTORS, flags)
                if not message:
                    os._exit(0)
                arguments = self._fork(json.loads(message), files)
                if arguments is not None:
                    return arguments

    def _fork(self, request, files):
        """Starts a process. Returns its arguments in the process, None in this one."""
        process = None
        try:
            if modification_times(self._imported) != self._imported:
                self.report("stale")
            else:
                process = os.fork()
                if process:
                    self._watch(process)
        except OSError as error:
            self.report({"failed": str(error)})
        if process == 0:
            self._forget()
            return become(request, files)
        # Always: the server sees the end of a worker only when all copies of these are closed.
        for file in files:
            os.close(file)
        return None

    def _watch(self, process):
        """Reports a copy and watches it; ends it if that fails, because the server then starts a program."""
        descriptor = None
        try:
            descriptor = _native.open_process(process)
            self._poll.register(descriptor, select.EPOLLIN)
            self.report({"forked": process}, descriptor)
        except OSError:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    self._poll.unregister(descriptor)
                os.close(descriptor)
            raise
        self._copies[descriptor] = process

    def _ended(self, descriptor):
        self._poll.unregister(descriptor)
        process = self._copies.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(process, 0)
        self.report({"ended": {"process": process, "status": status}})

    def _forget(self):
        """Closes in a copy what belongs to the fork server."""
        self._poll.close()
        self._connection.close()
        for descriptor in self._copies:
            os.close(descriptor)


def imported_paths():
    """Returns the folders of the module path, and the files of the imported modules and packages."""
    modules = [module for name, module in list(sys.modules.items()) if "." not in name]
    files = [getattr(module, "__file__", None) for module in modules]
    return {path for path in [*sys.path, *files] if isinstance(path, str) and path}


def modification_times(paths):
    """Returns when each file or folder was last changed; None for those that do not exist."""
    return {path: _modification_time(path) for path in paths}


def _modification_time(path):
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def become(request, files):
    """Makes a copy the process that the server has asked for; returns its arguments."""
    os.setpgid(0, 0)
    numbers = request["descriptors"]
    if CONTROL_GROUP in numbers:
        entrance = files.pop(numbers.index(CONTROL_GROUP))
        numbers.remove(CONTROL_GROUP)
        os.write(entrance, b"0")
        os.close(entrance)
    _native.set_arguments("--fork-server", "\0".join(request["arguments"]))
    os.environ.update(request["variables"])
    if request["processors"]:
        # As for programs, processors that do not exist do not prevent the start.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, request["processors"])
    # First away from the numbers that they get.
    for file, number in [(_moved(file), number) for file, number in zip(files, numbers)]:
        os.dup2(file, number, inheritable=number <= 2)
        os.close(file)
    # Otherwise all copies would draw the same numbers. Python's own generator does this itself.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    return request["arguments"]


def _moved(file):
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FREE)
    os.close(file)
    return moved
