"""The destination of samples. In a server, the worker sets it to the native recorder, which writes typed records to shared
memory. Elsewhere, such as in a test of a handler, samples are log lines in TorchServe's format."""

import logging
import socket
import time

logger = logging.getLogger(__name__)


def line(metric, dimensions, value, request_ids):
    """Formats a sample as a log line. `metric` is its name, unit and type; the type may be empty."""
    name, unit, kind = metric
    labels = ",".join(f"{name}:{value}" for name, value in dimensions)
    kind = f"|#type:{kind.upper()}" if kind else ""
    ids = f",{request_ids}" if request_ids else ""
    return f"{name}.{unit}:{value}|#{labels}{kind}|#hostname:{socket.gethostname()},{int(time.time())}{ids}"


def log(metric, dimensions, value, request_ids):
    """Logs a sample."""
    logger.info("[METRICS]%s", line(metric, dimensions, value, request_ids))


record = log
"""The function that receives samples: `record((name, unit, type), [(dimension, value), ...], value, request_ids)`."""
