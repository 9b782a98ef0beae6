"""Runs a loaded handler on batches and converts its errors."""

import inspect
import logging
import os
import sys
import time

import ts
from ts.context import Context
from ts.utils.util import PredictionException, get_yaml_config

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A failure of all requests of a batch, with the status and the message for clients."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code, self.message = code, message


class Service:
    """The entry point of a handler and its context."""

    def __init__(
        self,
        model_name,
        model_dir,
        manifest,
        entry_point,
        gpu,
        batch_size,
        limit_max_image_pixels=True,
        metrics_cache=None,
    ):
        config = yaml_config(model_dir, manifest)
        self._context = Context(
            model_name, model_dir, manifest, batch_size, gpu, ts.__version__, limit_max_image_pixels, metrics_cache, config
        )
        self._entry_point = entry_point

    @property
    def context(self):
        """The context of the handler."""
        return self._context

    @property
    def is_async(self):
        """Whether the handler's entry point is an `async def`."""
        return inspect.iscoroutinefunction(self._entry_point)

    @staticmethod
    def begin(context, processors, request_ids):
        """Sets the batch of a context."""
        context.request_ids = request_ids
        context.request_processor = processors
        context.stopping_criteria = None
        if context.metrics is not None:
            context.metrics.set_request_ids(request_ids)

    def run(self, processors, data, request_ids):
        """Runs the handler on a batch; returns one result for each item of `data`. Raises `Refused`."""
        self.begin(self._context, processors, request_ids)
        begun = time.perf_counter()
        try:
            results = self._entry_point(data, self._context)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: B902: also CancelledError and exceptions of the handler's own
            raise refusal(error) from error
        return self.checked(results, len(data), self._context, begun)

    async def run_async(self, context, data):
        """Like `run`, for an `async def` handler with a separate context, on which `begin` has been called."""
        begun = time.perf_counter()
        try:
            results = await self._entry_point(data, context)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: B902: as in `run`
            raise refusal(error) from error
        return self.checked(results, len(data), context, begun)

    @staticmethod
    def checked(results, expected, context, begun):
        """Checks the type and length of a handler's result; records the elapsed time."""
        name = context.model_name
        if not isinstance(results, list):
            logger.warning("model %s returned %s, which must be a list", name, type(results))
            raise Refused(503, "Invalid model predict output")
        if len(results) != expected:
            logger.warning("model %s returned %d answers to %d requests", name, len(results), expected)
            raise Refused(503, "number of batch response mismatched")
        if context.metrics is not None:
            context.metrics.add_time("PredictionTime", round((time.perf_counter() - begun) * 1000, 2))
        return results


def refusal(error):
    """Logs an exception of a handler; returns the error for clients."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, PredictionException):
        logger.error("the handler refuses the batch", exc_info=error)
        return Refused(error.error_code, error.message)
    if isinstance(error, MemoryError) or "CUDA" in str(error):
        logger.error("the handler is out of memory", exc_info=error)
        return Refused(507, "Out of resources")
    logger.warning("the handler failed", exc_info=error)
    return Refused(503, "Prediction failed")


def yaml_config(model_dir, manifest):
    """Returns the contents of the configuration file that a manifest names; empty without a file."""
    named = ((manifest or {}).get("model") or {}).get("configFile")
    return (get_yaml_config(os.path.join(model_dir, named)) or {}) if named else {}


def emit_metrics(metrics):
    """Records the samples of a list of `ts.metrics.metric.Metric`, such as `MetricsStore.store`."""
    for metric in metrics or ():
        if hasattr(metric, "emit"):
            metric.emit()
        else:
            print(f"[METRICS]{metric}", file=sys.stdout)
