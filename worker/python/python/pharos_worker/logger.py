"""`pb_utils.Logger`: log lines with their level and location in the model.

A line that begins with the character RS (0x1e) and a letter has that level; the server removes both. Any other line on
standard error is logged as a warning, on standard output as information.
"""

import enum
import os
import sys

_MARK = "\x1e"


class LogLevel(enum.IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LETTERS = {LogLevel.INFO: "I", LogLevel.WARNING: "W", LogLevel.ERROR: "E", LogLevel.VERBOSE: "V"}


def _write(message, level, depth):
    if isinstance(message, bytes):
        message = message.decode("utf-8", "replace")
    if not isinstance(message, str):
        raise TypeError(f"a log message must be a str, not {type(message).__name__}")
    frame = sys._getframe(depth)
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}] "
    lines = (place + message).splitlines() or [place]
    sys.stderr.write("".join(f"{_MARK}{_LETTERS[level]}{line}\n" for line in lines))


def whole(text):
    """Logs the lines of an error unchanged, such as a traceback."""
    sys.stderr.write("".join(f"{_MARK}E{line}\n" for line in text.splitlines()))


class Logger:
    """A logger that writes to the server's log."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message, level=LogLevel.INFO):
        if not isinstance(level, LogLevel):
            raise TypeError(f"the level of a log message must be a LogLevel such as Logger.INFO, not {level!r}")
        _write(message, level, 2)

    @staticmethod
    def log_info(message):
        _write(message, LogLevel.INFO, 2)

    @staticmethod
    def log_warn(message):
        _write(message, LogLevel.WARNING, 2)

    @staticmethod
    def log_error(message):
        _write(message, LogLevel.ERROR, 2)

    @staticmethod
    def log_verbose(message):
        _write(message, LogLevel.VERBOSE, 2)
