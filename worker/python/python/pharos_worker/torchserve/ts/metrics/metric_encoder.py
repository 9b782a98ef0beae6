"""JSON encoding of metrics."""

import json

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric


class MetricEncoder(json.JSONEncoder):
    """A JSON encoder that supports `Metric` and `Dimension`."""

    def default(self, obj):
        return obj.to_dict() if isinstance(obj, (Metric, Dimension)) else super().default(obj)
