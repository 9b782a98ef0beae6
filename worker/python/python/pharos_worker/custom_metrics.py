"""`pb_utils.MetricFamily`: metrics with a description and labels of the model, exported with the server's metrics."""

import enum
import re

from pharos_worker import _native


class MetricKind(enum.IntEnum):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_NAME = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*")
# The kind and description of each metric name in this process, from the first family of that name.
_KNOWN = {}


class MetricFamily:
    """A metric family. `Metric` creates its series, which are valid while the family exists. All families of a name must have
    the same kind; the description of the first one is exported."""

    MetricKind = MetricKind
    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name, description, kind):
        for what, value in (("name", name), ("description", description)):
            if not isinstance(value, str):
                raise TypeError(f"the {what} of a MetricFamily must be a str, not {type(value).__name__}")
        self.name, self.description, self.kind = name, description, MetricKind(kind)
        if not _NAME.fullmatch(name):
            raise _native.TritonModelException(
                f"Error when creating MetricFamily: '{name}' is no name of a metric: letters, digits, '_' and ':' only"
            )
        known, self.description = _KNOWN.setdefault(name, (self.kind, description))
        if known is not self.kind:
            raise _native.TritonModelException(
                f"Error when creating MetricFamily: '{name}' is a {known.name.lower()} already"
            )
        self._family = _native.Family()

    def Metric(self, labels=None, buckets=None):  # noqa: N802 (Triton's name)
        """Creates the series with these labels. A histogram needs the ascending upper bounds of its buckets."""
        fail = _native.TritonModelException
        if labels is not None and not isinstance(labels, dict):
            raise fail("Failed to create metric. Labels must be a dictionary.")
        if self.kind is not MetricKind.HISTOGRAM:
            if buckets is not None:
                raise fail("Failed to create metric. Unexpected buckets found.")
            buckets = []
        elif buckets is None:
            raise fail("Failed to create metric. Missing required buckets.")
        elif not isinstance(buckets, list):
            raise fail("Failed to create metric. Buckets must be a list.")
        named = sorted((str(name), str(value)) for name, value in (labels or {}).items())
        described = (self.name, self.description, self.kind.name.lower())
        return self._family.series(described, [float(end) for end in buckets], named)
