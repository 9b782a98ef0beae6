"""Converts OTLP metrics to the samples of a scrape."""

import collections
import math

from opentelemetry.proto.metrics.v1 import metrics_pb2

DELTA = metrics_pb2.AGGREGATION_TEMPORALITY_DELTA


def normal(samples: dict) -> dict:
    """Returns the samples of `Server.scrape`, or of this module, with bounds as numbers and without the order of labels.
    Quantiles without observations are omitted."""

    def label(name: str, value: str):
        return (name, float(value) if name in ("le", "quantile") else value)

    found = {}
    for (name, labels), value in samples.items():
        if not math.isnan(value):
            found[name, frozenset(label(*pair) for pair in labels)] = value
    return found


def samples(message) -> dict:
    """Returns the samples of one export: name and labels `(name, ((label, value), ...))` -> value."""
    found = {}

    def put(name: str, value, *labels):
        assert (name, labels) not in found, f"duplicate series {name} {labels}"
        found[name, labels] = float(value)

    for metric in metrics_of(message):
        data = getattr(metric, metric.WhichOneof("data"))
        for point in data.data_points:
            labels = [(item.key, item.value.string_value) for item in point.attributes]
            if metric.HasField("exponential_histogram"):
                count = point.zero_count + sum(point.positive.bucket_counts) + sum(point.negative.bucket_counts)
                assert point.count == count, metric.name
            elif metric.HasField("histogram"):
                bounds, count = [*point.explicit_bounds, math.inf], 0
                assert len(bounds) == len(point.bucket_counts) and point.count == sum(point.bucket_counts), metric.name
                for bound, own in zip(bounds, point.bucket_counts):
                    count += own
                    put(f"{metric.name}_bucket", count, *labels, ("le", str(bound)))
            elif metric.HasField("summary"):
                for item in point.quantile_values:
                    put(metric.name, item.value, *labels, ("quantile", str(item.quantile)))
            else:
                put(metric.name, getattr(point, point.WhichOneof("value")), *labels)
                continue
            put(f"{metric.name}_sum", point.sum, *labels)
            put(f"{metric.name}_count", point.count, *labels)
    return found


def metrics_of(message) -> list:
    """Returns the metrics of one export."""
    return [metric for resource in message.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics]


def names(message, delta: bool) -> set:
    """Returns the names of sums and histograms with this temporality, as samples have them."""
    found = set()
    for metric in metrics_of(message):
        data = getattr(metric, metric.WhichOneof("data"))
        if metric.WhichOneof("data") in ("sum", "histogram", "exponential_histogram") and (data.aggregation_temporality == DELTA) == delta:
            found |= {metric.name + suffix for suffix in ("", "_bucket", "_sum", "_count")}
    return found


def summed(messages) -> dict:
    """Returns the sums over the deltas of all messages, in the form of [`normal`]."""
    totals = collections.Counter()
    for message in messages:
        deltas = names(message, delta=True)
        for key, value in normal(samples(message)).items():
            if key[0] in deltas:
                totals[key] += value
    return dict(totals)


def exponential_buckets(point) -> dict:
    """Returns the upper bound -> count of each bucket of positive values that is not empty. The bucket at `offset + position` ends
    at base^(offset + position + 1), where base is 2^(2^-scale)."""
    found = enumerate(point.positive.bucket_counts, start=point.positive.offset + 1)
    return {2.0 ** (index / 2.0**point.scale): count for index, count in found if count}
