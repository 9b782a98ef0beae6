"""A sample that is stored, for handlers of older releases."""

import logging
import socket
import time
from collections import OrderedDict

from ts.metrics import sink
from ts.metrics.caching_metric import CachingMetric
from ts.metrics.metric_type_enum import MetricTypes

logger = logging.getLogger(__name__)


class Metric:
    """A metric with one value. Its `str()` is a log line in TorchServe's format, without a type."""

    def __init__(self, name, value, unit, dimensions, request_id=None, metric_method=None):
        self.metric_type = MetricTypes.COUNTER
        self.dimensions = dimensions
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.dimension_values = [dimension.value for dimension in dimensions]
        self._caching_metric = CachingMetric(name, unit, self.dimension_names, self.metric_type)
        self.name = self._caching_metric.metric_name
        self.unit = self._caching_metric.unit
        self.metric_method = metric_method
        self.value = value
        self.request_id = request_id

    def update(self, value):
        """Records another sample immediately."""
        self._caching_metric.add_or_update(value, self.dimension_values, self.request_id)

    def reset(self):
        """Records a sample of 0."""
        self.update(0)

    def emit(self):
        """Records the value. The type is not given: a metric with the unit Count is a counter, any other a gauge."""
        kind = "counter" if self.unit == "Count" else "gauge"
        try:
            sink.record((self.name, self.unit, kind), self._pairs(), self.value, self.request_id or "")
        except (ValueError, TypeError, OverflowError) as error:
            # For example the string that older handlers pass to `add_error`.
            logger.error("the metric '%s' cannot take the value %r: %s", self.name, self.value, error)

    def _pairs(self):
        return [(str(dimension.name), str(dimension.value)) for dimension in self.dimensions]

    def __str__(self):
        return sink.line((self.name, self.unit, ""), self._pairs(), self.value, self.request_id)

    def to_dict(self):
        """Returns the metric as a dictionary for JSON."""
        return OrderedDict(
            MetricName=self.name,
            Value=self.value,
            Unit=self.unit,
            Dimensions=self.dimensions,
            Timestamp=int(time.time()),
            HostName=socket.gethostname(),
            RequestId=self.request_id,
        )
