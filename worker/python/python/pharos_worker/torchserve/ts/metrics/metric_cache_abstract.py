"""The interface by which handlers record metrics: `context.metrics`."""

import abc

from ts.metrics import metric_cache_errors as errors
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import UNITS

TIMES = ("ms", "s")
SIZES = ("MB", "kB", "GB", "B")


class MetricCacheAbstract(abc.ABC):
    """Metrics by type and name, and the request ids of the batch.

    `idx` is a request's position in the batch (None: all requests). `dimensions` is a list of `Dimension`, or None. As in
    TorchServe, the model's name and `Level:Model` are appended to it if missing, also in the caller's list.
    """

    def __init__(self, config_file_path):
        self.cache = {}
        self.store = []
        self.request_ids = None
        self.model_name = None
        self.config_file_path = config_file_path

    def set_request_ids(self, request_ids):
        """Sets the requests that samples belong to: a dictionary of positions to ids, or a string."""
        self.request_ids = request_ids

    def add_metric(self, name, value, unit, idx=None, dimensions=None, metric_type=MetricTypes.COUNTER):
        """Records a sample of a metric."""
        self._record((name, unit, metric_type), value, self._get_req(idx), dimensions)

    def add_counter(self, name, value, idx=None, dimensions=None):
        """Increments a counter."""
        self._record((name, "count", MetricTypes.COUNTER), value, self._get_req(idx), dimensions)

    def add_time(self, name, value, idx=None, unit="ms", dimensions=None, metric_type=MetricTypes.GAUGE):
        """Records a time, in `ms` or `s`."""
        if unit not in TIMES:
            raise errors.MetricsCacheValueError(f"the unit for a timed metric should be one of {list(TIMES)}")
        self._record((name, unit, metric_type), value, self._get_req(idx), dimensions)

    def add_size(self, name, value, idx=None, unit="MB", dimensions=None, metric_type=MetricTypes.GAUGE):
        """Records a size, in `MB`, `kB`, `GB` or `B`."""
        if unit not in SIZES:
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self._record((name, unit, metric_type), value, self._get_req(idx), dimensions)

    def add_percent(self, name, value, idx=None, dimensions=None, metric_type=MetricTypes.GAUGE):
        """Records a percentage."""
        self._record((name, "percent", metric_type), value, self._get_req(idx), dimensions)

    def add_error(self, name, value, dimensions=None):
        """Counts an error that belongs to no request."""
        self._record((name, "", MetricTypes.COUNTER), value, None, dimensions)

    def _record(self, metric, value, request_ids, dimensions):
        name, unit, metric_type = metric
        dimensions = self._add_default_dims(request_ids, [] if dimensions is None else dimensions)
        named = self._get_or_add_metric(name, unit, dimensions, metric_type)
        named.record(value, [(item.name, item.value) for item in dimensions], request_ids or "", UNITS.get(unit, unit))

    def _get_req(self, idx):
        """Returns the id of the request at a position of the batch; for an unknown position, all ids with commas."""
        ids = self.request_ids
        if isinstance(ids, dict):
            return ids[idx] if idx is not None and idx in ids else ",".join(ids.values())
        return ids

    def _add_default_dims(self, request_ids, dimensions):
        names = [dimension.name for dimension in dimensions]
        if request_ids is not None and "ModelName" not in names:
            dimensions.append(Dimension("ModelName", self.model_name))
        if "Level" not in names:
            dimensions.append(Dimension("Level", "Error" if request_ids is None else "Model"))
        return dimensions

    def _get_or_add_metric(self, metric_name, unit, dimensions, metric_type):
        known = self.cache.get(metric_type, {}).get(metric_name)
        names = [dimension.name for dimension in dimensions]
        return known or self.add_metric_to_cache(metric_name, unit, names, metric_type)

    @staticmethod
    def _check_type(variable, expected_type, helper_text):
        if not isinstance(variable, expected_type):
            raise errors.MetricsCacheTypeError(helper_text)

    @abc.abstractmethod
    def initialize_cache(self):
        """Adds the metrics of the definition."""

    @abc.abstractmethod
    def get_metric(self, metric_name, metric_type=MetricTypes.COUNTER):
        """Returns a metric that is defined or has been added."""

    @abc.abstractmethod
    def add_metric_to_cache(self, metric_name, unit, dimension_names=(), metric_type=MetricTypes.COUNTER):
        """Adds a metric without recording a sample."""
