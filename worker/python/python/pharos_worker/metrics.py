"""Metrics that a model records, by their definition in `metrics.yaml` (or detected): the names of TorchServe's API.

    from pharos_worker import metrics
    orders = metrics.add_counter("Orders", "Count", ["shop"])
    orders.add_or_update(1, ["north"])

A sample is with the server when `add_or_update` returns. For metrics that Triton's clients expect, with a description and
labels of the model's own, there is `triton_python_backend_utils.MetricFamily`.
"""

from pharos_worker import _native
from pharos_worker._native import flush

__all__ = ["add_metric", "add_counter", "add_gauge", "add_histogram", "get", "get_metric", "add_or_update", "flush"]


def add_metric(name, unit="", dimension_names=(), metric_type="counter"):
    """The metric of this name: defined in metrics.yaml, or detected with these dimensions if the server detects metrics."""
    return _native.add_metric(name, unit, list(dimension_names), metric_type)


def add_counter(name, unit="", dimension_names=()):
    """A metric that only grows."""
    return add_metric(name, unit, dimension_names, "counter")


def add_gauge(name, unit="", dimension_names=()):
    """A metric that goes up and down."""
    return add_metric(name, unit, dimension_names, "gauge")


def add_histogram(name, unit="", dimension_names=()):
    """A distribution by buckets, which metrics.yaml names."""
    return add_metric(name, unit, dimension_names, "histogram")


def get_metric(name, metric_type="counter"):
    """A metric that was added or is defined."""
    return _native.get_metric(name, metric_type)


get = get_metric


def add_or_update(name, value, dimension_values=(), metric_type="counter", request_id=None):
    """Records one sample of a metric by its name. For many samples keep what `add_metric` or `get_metric` gives."""
    get_metric(name, metric_type).add_or_update(value, list(dimension_values), request_id)
