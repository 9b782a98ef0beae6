"""A handler that records metrics with every available call."""

from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.metrics_store import MetricsStore
from ts.service import emit_metrics


class Measured:
    def initialize(self, context):
        metrics = context.metrics
        metrics.add_counter("Loads", 1)
        self.own = metrics.add_metric_to_cache("Own", "tokens/s", ["ModelName", "Level"], MetricTypes.GAUGE)

    def handle(self, data, context):
        metrics = context.metrics
        for row in data:
            getattr(self, row["body"]["do"])(metrics, row["body"], context)
        return [context.get_request_id(at) for at in range(len(data))]

    def all(self, metrics, told, context):
        metrics.add_counter("Calls", 2)
        metrics.add_counter("Calls", 1, 0, None)
        metrics.add_time("Took", 12.5, None, "ms", [Dimension("Step", "pre:a,b/c")])
        metrics.add_size("Picture", 3, 0, "kB")
        metrics.add_percent("Share", 50.5)
        metrics.add_error("Errors", 1, [])
        metrics.add_metric("Spread", 0.3, "s", 0, [], MetricTypes.HISTOGRAM)
        metrics.get_metric("Declared", MetricTypes.GAUGE).add_or_update(4.5, ["north"], "given-id")
        metrics.get_metric("Declared", MetricTypes.GAUGE).add_or_update(5.5, ["south"])
        metrics.get_metric("Declared", MetricTypes.GAUGE).add_or_update(5.5, [])
        self.own.update(9, "", [Dimension("ModelName", "x"), Dimension("Level", "y")])
        metrics.add_counter("Calls", -5)
        metrics.add_counter("Undeclared", 1)

    def values(self, metrics, told, context):
        metrics.add_time("Took", float("nan"), None, "ms", [Dimension("Step", "nan")])
        metrics.add_time("Took", 1e16, None, "ms", [Dimension("Step", "large")])
        metrics.add_time("Took", float("inf"), None, "ms", [Dimension("Step", "http://h:1/?q=1,2")])
        metrics.add_time("Took", 10**400, None, "ms", [Dimension("Step", "huge")])

    def burst(self, metrics, told, context):
        for _ in range(told["times"]):
            metrics.add_counter("Calls", 1)

    def store(self, metrics, told, context):
        store = MetricsStore(context.request_ids, context.model_name)
        store.add_counter("Calls", 10)
        store.add_time("Stored", 7, 0, "ms", None)
        store.add_error("Errors", "not a number")
        emit_metrics(store.store)
