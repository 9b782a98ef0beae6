"""`context.metrics` in a server: the server's definition applies, and samples are typed records in shared memory."""

from ts.metrics import sink
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.metrics.metric_type_enum import MetricTypes

from pharos_worker import _native

# TorchServe appends the host name to the dimensions of handlers.
HOST = ("Hostname", "hostname", "host")
TYPES = {"counter": MetricTypes.COUNTER, "gauge": MetricTypes.GAUGE}


def _record(metric, dimensions, value, request_ids):
    _native.record(metric, dimensions, float(value), request_ids)


class ServerMetrics(MetricsCacheYamlImpl):
    """The metrics in the section `model_metrics` of the server's metrics.yaml, and those that a handler adds."""

    def __init__(self, model_name):
        # Skips the base class, which would read a file.
        super(MetricsCacheYamlImpl, self).__init__(None)
        self.model_name = model_name
        sink.record = _record
        self.initialize_cache()

    def initialize_cache(self):
        for kind, name, unit, dimensions in _native.defined():
            names = [dimension for dimension in dimensions if dimension not in HOST]
            self.add_metric_to_cache(name, unit, names, TYPES.get(kind, MetricTypes.HISTOGRAM))
