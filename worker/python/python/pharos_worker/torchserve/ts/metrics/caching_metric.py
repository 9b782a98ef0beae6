"""A metric that records each sample: the increment of a counter, the value of a gauge, or an observation."""

import logging

from ts.metrics import sink
from ts.metrics.metric_abstract import MetricAbstract
from ts.metrics.metric_type_enum import MetricTypes

logger = logging.getLogger(__name__)


class CachingMetric(MetricAbstract):
    """The metric that `add_metric_to_cache` and `get_metric` return."""

    def emit_metrics(self, request_id, value, dimensions, unit=None):
        """Records a sample; `dimensions` are pairs of name and value, and `unit` is that of the value, by default the metric's."""
        metric = (self.metric_name, unit or self.unit or "unit", self.metric_type.value)
        sink.record(metric, dimensions, value, request_id or "")

    def add_or_update(self, value, dimension_values=(), request_id=""):
        """Records a sample. Logs an invalid sample instead of raising an error."""
        if dimension_values is None or len(dimension_values) != len(self.dimension_names):
            self._lost(value, f"its dimensions are {self.dimension_names}, but the values are {dimension_values!r}")
        else:
            self.record(value, list(zip(self.dimension_names, dimension_values)), request_id)

    def record(self, value, dimensions, request_id="", unit=None):
        """Records a sample with pairs of dimension names and values. The server converts a value in another unit of time or size
        than the definition's."""
        try:
            if self.metric_type is MetricTypes.COUNTER and value < 0:
                raise ValueError("a counter cannot be incremented by a negative value")
            self.emit_metrics(request_id, value, [(str(name), str(value)) for name, value in dimensions], unit)
        except (ValueError, TypeError, OverflowError) as error:
            self._lost(value, error)

    def _lost(self, value, why):
        logger.error("the metric '%s' cannot take the value %r: %s", self.metric_name, value, why)

    def update(self, value, request_id="", dimensions=()):
        """Records a sample in the style of older handlers: the given dimensions, with names, replace those of the metric."""
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.add_or_update(value, [dimension.value for dimension in dimensions], request_id)
