"""A loaded handler: gives it a batch, and says what the answers are or why there are none."""

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
    """The requests of a batch have no answer: the status and the text that clients are told."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code, self.message = code, message


class Service:
    """The entry point of a handler and the context that it is called with."""

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
        """What the handler is called with."""
        return self._context

    @property
    def is_async(self):
        """Whether the handler's entry point is an `async def`."""
        return inspect.iscoroutinefunction(self._entry_point)

    @staticmethod
    def begin(context, processors, request_ids):
        """Says in a context whose batch begins."""
        context.request_ids = request_ids
        context.request_processor = processors
        context.stopping_criteria = None
        if context.metrics is not None:
            context.metrics.set_request_ids(request_ids)

    def run(self, processors, data, request_ids):
        """The handler's answers to a batch, one for each of `data`. Raises `Refused`."""
        self.begin(self._context, processors, request_ids)
        begun = time.perf_counter()
        try:
            results = self._entry_point(data, self._context)
        except Exception as error:
            raise refusal(error) from error
        return self.checked(results, len(data), self._context, begun)

    async def run_async(self, context, data):
        """As `run`, for a handler with `async def`, with a context of its own that has begun."""
        begun = time.perf_counter()
        try:
            results = await self._entry_point(data, context)
        except Exception as error:
            raise refusal(error) from error
        return self.checked(results, len(data), context, begun)

    @staticmethod
    def checked(results, expected, context, begun):
        """What a handler has returned, if that is what it must be; records how long it took."""
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
    """What clients are told of an exception of a handler; the log is told all of it."""
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
    """The content of the file that a manifest names as the model's configuration; empty if there is none."""
    named = ((manifest or {}).get("model") or {}).get("configFile")
    return (get_yaml_config(os.path.join(model_dir, named)) or {}) if named else {}


def emit_metrics(metrics):
    """Records the samples of a list of `ts.metrics.metric.Metric`, such as `MetricsStore.store`."""
    for metric in metrics or ():
        if hasattr(metric, "emit"):
            metric.emit()
        else:
            print(f"[METRICS]{metric}", file=sys.stdout)
