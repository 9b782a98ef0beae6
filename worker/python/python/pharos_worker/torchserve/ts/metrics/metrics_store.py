"""A list of samples that `ts.service.emit_metrics` sends, for handlers of older releases."""

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_cache_abstract import SIZES, TIMES


class MetricsStore:
    """A store of metrics: `store` is the list, `cache` maps name, unit, request and dimensions to a metric."""

    def __init__(self, request_ids, model_name):
        self.store = []
        self.cache = {}
        self.request_ids = request_ids
        self.model_name = model_name

    def add_metric(self, name, value, unit, idx=None, dimensions=None):
        """Adds a sample of a metric."""
        self._add_or_update(name, value, self._get_req(idx), unit, dimensions=dimensions)

    def add_counter(self, name, value, idx=None, dimensions=None):
        """Increments a counter."""
        self._add_or_update(name, value, self._get_req(idx), "count", "counter", dimensions)

    def add_time(self, name, value, idx=None, unit="ms", dimensions=None):
        """Adds a time, in `ms` or `s`."""
        if unit not in TIMES:
            raise ValueError(f"the unit for a timed metric should be one of {list(TIMES)}")
        self._add_or_update(name, value, self._get_req(idx), unit, dimensions=dimensions)

    def add_size(self, name, value, idx=None, unit="MB", dimensions=None):
        """Adds a size, in `MB`, `kB`, `GB` or `B`."""
        if unit not in SIZES:
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self._add_or_update(name, value, self._get_req(idx), unit, dimensions=dimensions)

    def add_percent(self, name, value, idx=None, dimensions=None):
        """Adds a percentage."""
        self._add_or_update(name, value, self._get_req(idx), "percent", dimensions=dimensions)

    def add_error(self, name, value, dimensions=None):
        """Adds an error that belongs to no request."""
        self._add_or_update(name, value, None, "", dimensions=dimensions)

    def _add_or_update(self, name, value, req_id, unit, metrics_method=None, dimensions=None):
        if dimensions is None:
            dimensions = []
        elif not isinstance(dimensions, list):
            raise ValueError("Please provide a list of dimensions")
        if req_id is None:
            dimensions.append(Dimension("Level", "Error"))
        else:
            dimensions += [Dimension("ModelName", self.model_name), Dimension("Level", "Model")]
        key = "-".join([name, unit, str(req_id), *map(str, dimensions)])
        if key in self.cache:
            self.cache[key].update(value)
        else:
            self.cache[key] = Metric(name, value, unit, dimensions, req_id, metrics_method)
            self.store.append(self.cache[key])

    def _get_req(self, idx):
        ids = self.request_ids
        if isinstance(ids, dict):
            return ids[idx] if idx is not None and idx in ids else ",".join(ids.values())
        return ids
