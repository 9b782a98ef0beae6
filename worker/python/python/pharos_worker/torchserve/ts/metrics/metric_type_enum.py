"""The types of metrics."""

import enum


class MetricTypes(enum.Enum):
    """Also the names of the lists in `metrics.yaml`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
