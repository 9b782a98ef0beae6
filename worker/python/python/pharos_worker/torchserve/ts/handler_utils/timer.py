"""Measures a handler's steps if `model-config.yaml` enables it: `handler: {profile: true}`."""

import functools
import sys
import time


def timed(function):
    """Records the time of a handler's method as `ts_handler_NAME`, in milliseconds."""

    @functools.wraps(function)
    def wrapped(self, *args, **kwargs):
        if not _is_profiled(getattr(self, "context", None)):
            return function(self, *args, **kwargs)
        begun = _now()
        result = function(self, *args, **kwargs)
        self.context.metrics.add_time(f"ts_handler_{function.__name__}", (_now() - begun) * 1000)
        return result

    return wrapped


def _is_profiled(context):
    handler = (getattr(context, "model_yaml_config", None) or {}).get("handler")
    return bool(isinstance(handler, dict) and handler.get("profile"))


def _now():
    """Returns the time after pending GPU work has finished, if PyTorch is loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
