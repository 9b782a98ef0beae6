"""Metrics recorded by a model, as defined in `metrics.yaml` or auto-detected. The names are those of TorchServe's API.

    from pharos_worker import metrics
    orders = metrics.add_counter("Orders", "Count", ["shop"])
    orders.add_or_update(1, ["north"])

`add_or_update` passes the sample to the server before it returns. For metrics as in Triton, with a description and labels of
the model, use `triton_python_backend_utils.MetricFamily`.
"""

from pharos_worker import _native
from pharos_worker._native import flush

__all__ = ["add_metric", "add_counter", "add_gauge", "add_histogram", "get", "get_metric", "add_or_update", "flush"]


def add_metric(name, unit="", dimension_names=(), metric_type="counter"):
    """Returns the metric of this name: defined in metrics.yaml, or auto-detected with these dimensions if enabled."""
    return _native.add_metric(name, unit, list(dimension_names), metric_type)


def add_counter(name, unit="", dimension_names=()):
    """Returns a metric that only increases."""
    return add_metric(name, unit, dimension_names, "counter")


def add_gauge(name, unit="", dimension_names=()):
    """Returns a metric that can increase and decrease."""
    return add_metric(name, unit, dimension_names, "gauge")


def add_histogram(name, unit="", dimension_names=()):
    """Returns a distribution over the buckets defined in metrics.yaml."""
    return add_metric(name, unit, dimension_names, "histogram")


def get_metric(name, metric_type="counter"):
    """Returns a metric that has been added or is defined."""
    return _native.get_metric(name, metric_type)


get = get_metric


def add_or_update(name, value, dimension_values=(), metric_type="counter", request_id=None):
    """Records a sample of a metric by name. For many samples, keep the result of `add_metric` or `get_metric`."""
    get_metric(name, metric_type).add_or_update(value, list(dimension_values), request_id)
