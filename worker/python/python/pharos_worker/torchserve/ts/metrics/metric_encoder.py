"""Metrics in JSON."""

import json

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric


class MetricEncoder(json.JSONEncoder):
    """Encodes `Metric` and `Dimension` too."""

    def default(self, obj):
        return obj.to_dict() if isinstance(obj, (Metric, Dimension)) else super().default(obj)
