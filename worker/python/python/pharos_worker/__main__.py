"""The program that the server starts for an instance of a model, and to complete a configuration.

    python3 -m pharos_worker INSTANCE                     with the descriptors that a worker inherits
    python3 -m pharos_worker --auto-complete OUT.json     with a description of the model on standard input
"""

import os
import signal
import sys


def _print_lines_at_once():
    """A model's print() is read by the server's log: line by line, not when a buffer is full."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def _forget_the_working_directory():
    """`-m` puts it first where modules are looked for: what lies where the server was started is not the model's."""
    if sys.path and os.path.realpath(sys.path[0] or ".") == os.path.realpath("."):
        del sys.path[0]


def main():
    """Runs the instance. Models see an empty `sys.argv`, as with Triton: one that calls `argparse` or `unittest.main()` must not
    read the worker's arguments."""
    _print_lines_at_once()
    _forget_the_working_directory()
    # Ctrl-C is the server's affair: it lets requests end before it ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments, sys.argv = sys.argv[1:], [""]
    if len(arguments) == 2 and arguments[0] == "--auto-complete":
        from pharos_worker import autocomplete

        return autocomplete.main(arguments[1])
    from pharos_worker import _native, driver

    driver.watch_forks()
    return _native.run()


if __name__ == "__main__":
    sys.exit(main())
