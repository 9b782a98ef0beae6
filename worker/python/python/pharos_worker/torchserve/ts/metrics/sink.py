"""Where samples go. In a server the worker puts the native recorder here: typed records over shared memory. Anywhere else,
as in a test of a handler, a sample is a line of the log in TorchServe's form."""

import logging
import socket
import time

logger = logging.getLogger(__name__)


def line(metric, dimensions, value, request_ids):
    """A sample as a line: `metric` is its name, unit and type, the type may be empty."""
    name, unit, kind = metric
    labels = ",".join(f"{name}:{value}" for name, value in dimensions)
    kind = f"|#type:{kind.upper()}" if kind else ""
    ids = f",{request_ids}" if request_ids else ""
    return f"{name}.{unit}:{value}|#{labels}{kind}|#hostname:{socket.gethostname()},{int(time.time())}{ids}"


def log(metric, dimensions, value, request_ids):
    """Logs a sample."""
    logger.info("[METRICS]%s", line(metric, dimensions, value, request_ids))


record = log
"""What takes samples: `record((name, unit, type), [(dimension, value), ...], value, request_ids)`."""
