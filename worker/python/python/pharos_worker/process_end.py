"""Ends the process of an instance."""

import atexit
import gc
import io
import sys
import threading

from pharos_worker import _native


def leave(code):
    """Ends the process with a status, as the interpreter does at its end: waits for threads, calls the functions of `atexit`, and
    writes what open files have buffered. Only the objects that still exist are not destroyed, which takes most of the time that
    the interpreter needs to end: with numpy about 30 ms of the processor. `multiprocessing` ends its processes in the same way.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    # Without the objects that a fork server has made: a look at them would copy their memory. Its only files are the standard
    # streams. By type, because `isinstance` asks the object too, and proxies may answer with an exception.
    files = [found for found in gc.get_objects() if issubclass(type(found), (io.TextIOWrapper, io.BufferedWriter))]
    for file in [sys.stdout, sys.stderr, *files]:
        try:
            file.flush()
        except (AttributeError, OSError, ValueError):
            # No file, a full disk, or a closed file. The interpreter ignores all of them.
            pass
    _native.exit(code)
