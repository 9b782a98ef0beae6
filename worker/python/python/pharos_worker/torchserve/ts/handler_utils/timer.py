"""Times of a handler's steps, where `model-config.yaml` asks for them: `handler: {profile: true}`."""

import functools
import sys
import time


def timed(function):
    """A method of a handler whose time is recorded as `ts_handler_NAME`, in milliseconds."""

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
    """The time when what was started on a GPU is done, if PyTorch is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
