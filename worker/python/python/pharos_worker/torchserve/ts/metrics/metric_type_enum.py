"""The types of metrics."""

import enum


class MetricTypes(enum.Enum):
    """The types of metrics; the values are the names of the lists in `metrics.yaml`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
