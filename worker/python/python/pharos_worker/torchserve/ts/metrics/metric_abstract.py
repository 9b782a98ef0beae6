"""The base class of metrics."""

import abc

from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import UNITS, Units

MetricUnit = Units()


class MetricAbstract(abc.ABC):
    """A metric with a name, a unit, a type and the names of its dimensions."""

    def __init__(self, metric_name, unit, dimension_names=None, metric_type=MetricTypes.COUNTER):
        self.metric_name = metric_name
        self.unit = UNITS.get(unit, unit)
        self.dimension_names = dimension_names or []
        self.metric_type = metric_type

    @abc.abstractmethod
    def add_or_update(self, value, dimension_values, request_id=""):
        """Records a sample."""
