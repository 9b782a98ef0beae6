"""Metrics defined by a file in the format of `metrics.yaml`, and those that a handler adds."""

import logging

from ts.metrics import metric_cache_errors as errors
from ts.metrics.caching_metric import CachingMetric
from ts.metrics.metric_cache_abstract import MetricCacheAbstract
from ts.metrics.metric_type_enum import MetricTypes
from ts.utils.util import parse_yaml

logger = logging.getLogger(__name__)


class MetricsCacheYamlImpl(MetricCacheAbstract):
    """The metrics in the section `model_metrics` of a file."""

    def __init__(self, config_file_path):
        super().__init__(config_file_path)
        self._definition = self._read(config_file_path)

    @staticmethod
    def _read(path):
        if not path:
            raise errors.MetricsCacheTypeError("Config file not initialized")
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise errors.MetricsCacheIOError(f"Error reading file {path}: {error}") from error
        try:
            return parse_yaml(text) or {}
        except Exception as error:
            raise errors.MetricsCachePyYamlError(f"Error parsing file {path}: {error}") from error

    def initialize_cache(self):
        if "model_metrics" not in self._definition:
            raise errors.MetricsCacheKeyError("'model_metrics' key not found in yaml file: 'model_metrics'")
        section = self._definition["model_metrics"]
        if not section:
            raise errors.MetricsCacheValueError("Missing `model_metrics` specification")
        for kind, metrics in section.items():
            try:
                metric_type = MetricTypes(kind)
            except ValueError as error:
                raise errors.MetricsCacheKeyError(f"Invalid metric type: {error}") from error
            for metric in metrics:
                missing = [key for key in ("name", "unit", "dimensions") if key not in metric]
                if missing:
                    raise errors.MetricsCacheKeyError(f"Key not found in cache spec: '{missing[0]}'")
                self.add_metric_to_cache(metric["name"], metric["unit"], metric["dimensions"], metric_type)

    def add_metric_to_cache(self, metric_name, unit, dimension_names=(), metric_type=MetricTypes.COUNTER):
        self._check_type(metric_name, str, "`metric_name` must be a str")
        self._check_type(unit, str, "`unit` must be a str")
        self._check_type(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        if dimension_names:
            self._check_type(dimension_names, list, "`dimension_names` should be a list of dimension name strings")
        of_type = self.cache.setdefault(metric_type, {})
        if metric_name in of_type:
            logger.warning("the metric %s:%s replaces an existing one", metric_type, metric_name)
        of_type[metric_name] = CachingMetric(metric_name, unit, list(dimension_names or ()), metric_type)
        return of_type[metric_name]

    def get_metric(self, metric_name, metric_type=MetricTypes.COUNTER):
        self._check_type(metric_name, str, "`metric_name` must be a str")
        self._check_type(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        try:
            return self.cache[metric_type][metric_name]
        except KeyError:
            text = f"Metric of type '{metric_type}' and name '{metric_name}' doesn't exist"
            raise errors.MetricsCacheKeyError(text) from None

    def cache_keys(self):
        """Returns `TYPE:NAME` of all metrics."""
        return [f"{metric_type.value}:{name}" for metric_type, metrics in self.cache.items() for name in metrics]
