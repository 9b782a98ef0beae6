"""The program that the server starts to run an instance of a model, to complete a configuration, or to start further processes.

    python3 -m pharos_worker INSTANCE                     with the inherited descriptors of a worker
    python3 -m pharos_worker --auto-complete OUT.json     with a description of the model on standard input
    python3 -m pharos_worker --fork-server MODULES SPACE  with a socket, see fork_server.py
"""

import os
import signal
import sys


def _flush_after_each_line():
    """Makes print() flush after each line, because the server's log reads the output."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def _remove_working_directory_from_path():
    """Removes the working directory, which `-m` puts first, from the module path: it is not part of the model."""
    if sys.path and os.path.realpath(sys.path[0] or ".") == os.path.realpath("."):
        del sys.path[0]


def main():
    """Runs the instance. As with Triton, models see an empty `sys.argv`, so that `argparse` or `unittest.main()` in a model
    does not read the worker's arguments."""
    _flush_after_each_line()
    _remove_working_directory_from_path()
    # Ctrl-C is handled by the server: it drains requests before it stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments, sys.argv = sys.argv[1:], [""]
    if len(arguments) == 3 and arguments[0] == "--fork-server":
        from pharos_worker import fork_server

        arguments = fork_server.main(arguments[1])
    from pharos_worker import _native, driver, process_end

    if len(arguments) == 2 and arguments[0] == "--auto-complete":
        from pharos_worker import autocomplete

        return process_end.leave(autocomplete.main(arguments[1]))

    driver.watch_forks()
    return process_end.leave(_native.run())


if __name__ == "__main__":
    sys.exit(main())
