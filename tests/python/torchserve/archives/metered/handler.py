"""Makes the calls of TorchServe's metrics that a request names: a list of calls, each with the name of the call, its
positional arguments and its keyword arguments. It returns the exception of each, or the type of its result."""

import logging

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.metrics_store import MetricsStore
from ts.service import emit_metrics

SPECIAL = {
    "COUNTER": MetricTypes.COUNTER,
    "GAUGE": MetricTypes.GAUGE,
    "HISTOGRAM": MetricTypes.HISTOGRAM,
    "NAN": float("nan"),
    "INF": float("inf"),
}


def argument(value):
    """Converts values that JSON lacks: `"$GAUGE"`, and dimensions as `{"dim": [name, value]}`."""
    if isinstance(value, str) and value.startswith("$"):
        return SPECIAL[value[1:]]
    if isinstance(value, dict) and "dim" in value:
        return Dimension(*value["dim"])
    return [argument(item) for item in value] if isinstance(value, list) else value


class Metered:
    """Holds metrics that are created once, as in TorchServe's examples."""

    def initialize(self, context):
        """Creates metrics at the start."""
        metrics = context.metrics
        self.kept = metrics.add_metric_to_cache("KeptGauge", "count", ["ModelName", "Kind"], MetricTypes.GAUGE)
        self.kept.add_or_update(1, [context.model_name, "start"])
        metrics.add_time("StartTime", 12.5, unit="ms")

    def handle(self, data, context):
        """Returns an answer for each request."""
        answers = []
        for request in data:
            answers.append([self.call(context, *call) for call in request["body"]])
        return answers

    def call(self, context, name, args=(), kwargs=None):
        """Makes one call and returns its outcome."""
        args = [argument(value) for value in args]
        kwargs = {key: argument(value) for key, value in (kwargs or {}).items()}
        try:
            return type(self.made(context, name, args, kwargs)).__name__
        except Exception as error:
            # In texts of built-in errors, the class name may differ between versions of Python.
            return [type(error).__name__, str(error) if "metric" in type(error).__module__ else ""]

    def made(self, context, name, args, kwargs):
        """Makes the call."""
        metrics = context.metrics
        if name == "kept":
            return self.kept.add_or_update(*args, **kwargs)
        if name == "kept_with_ids":
            return self.kept.add_or_update(*args, request_id=context.get_request_id(0))
        if name == "get_and_update":
            return metrics.get_metric(args[0], args[1]).add_or_update(*args[2:])
        if name == "update":
            return metrics.get_metric(args[0], args[1]).update(*args[2:], **kwargs)
        if name == "store":
            store = MetricsStore(context.request_ids, context.model_name)
            for kind, *rest in args:
                getattr(store, kind)(*rest)
            return emit_metrics(store.store)
        if name == "metric":
            metric = Metric(*args, **kwargs)
            metric.update(1)
            return emit_metrics([metric])
        if name == "print":
            return print(*args, flush=True)
        if name == "log":
            return logging.getLogger(__name__).info(*args)
        return getattr(metrics, name)(*args, **kwargs)
