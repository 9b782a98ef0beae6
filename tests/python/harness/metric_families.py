"""Prometheus' protobuf format: decodes scrapes, and their native histograms.

The messages have the field numbers of `io/prometheus/client/metrics.proto` of https://github.com/prometheus/client_model.
"""

import http.client
import io

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto

from harness.waiting import DEADLINE_S

PACKAGE = "io.prometheus.client"
CONTENT_TYPE = f"application/vnd.google.protobuf; proto={PACKAGE}.MetricFamily; encoding=delimited"
KINDS = ["counter", "gauge", "summary", "untyped", "histogram", "gauge_histogram"]
TYPES = {"double": 1, "int64": 3, "uint64": 4, "string": 9, "uint32": 13, "sint32": 17, "sint64": 18, "int32": 5}
MESSAGE = 11

MESSAGES = {
    "Timestamp": "seconds=1:int64 nanos=2:int32",
    "LabelPair": "name=1:string value=2:string",
    "Exemplar": "label=1:LabelPair* value=2:double timestamp=3:Timestamp",
    "Gauge": "value=1:double",
    "Counter": "value=1:double exemplar=2:Exemplar",
    "Quantile": "quantile=1:double value=2:double",
    "Summary": "sample_count=1:uint64 sample_sum=2:double quantile=3:Quantile*",
    "Bucket": "cumulative_count=1:uint64 upper_bound=2:double exemplar=3:Exemplar",
    "BucketSpan": "offset=1:sint32 length=2:uint32",
    "Histogram": "sample_count=1:uint64 sample_sum=2:double bucket=3:Bucket* schema=5:sint32 zero_threshold=6:double "
    "zero_count=7:uint64 negative_span=9:BucketSpan* negative_delta=10:sint64* positive_span=12:BucketSpan* "
    "positive_delta=13:sint64* exemplars=16:Exemplar*",
    "Metric": "label=1:LabelPair* gauge=2:Gauge counter=3:Counter summary=4:Summary histogram=7:Histogram",
    "MetricFamily": "name=1:string help=2:string type=3:int32 metric=4:Metric*",
}
"""Message -> its fields, each `name=number:type`; `*` marks a repeated field."""


def _family_class():
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            key, _, kind = field.partition(":")
            key, _, number = key.partition("=")
            added = message.field.add(name=key, number=int(number), label=3 if kind.endswith("*") else 1)
            kind = kind.rstrip("*")
            added.type = TYPES.get(kind, MESSAGE)
            if kind in MESSAGES:
                added.type_name = f".{PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.MetricFamily"))


MetricFamily = _family_class()


def decode(body: bytes) -> dict:
    """Returns the families of an answer by name, in its order. A name that occurs twice is an error."""
    families, stream = {}, io.BytesIO(body)
    while (family := proto.parse_length_prefixed(MetricFamily, stream)) is not None:
        assert family.name not in families, f"duplicate family {family.name}"
        families[family.name] = family
    return families


def fetch(address: str, query: str = "", accept: str = CONTENT_TYPE) -> tuple:
    """Scrapes `/metrics`; returns content type and body."""
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    try:
        connection.request("GET", f"/metrics{query}", headers={"Accept": accept})
        response = connection.getresponse()
        assert response.status == 200, response.status
        return response.headers["content-type"], response.read()
    finally:
        connection.close()


def scrape(address: str, query: str = "") -> dict:
    """Scrapes in protobuf; returns the families by name."""
    kind, body = fetch(address, query)
    assert kind == CONTENT_TYPE
    return decode(body)


def labels(metric) -> dict:
    return {pair.name: pair.value for pair in metric.label}


def samples(families: dict) -> dict:
    """Returns what a text scrape has: (name, set of label pairs) -> value, with `le` and `quantile` as numbers."""
    found = {}
    for family in families.values():
        for metric in family.metric:
            pairs = frozenset(labels(metric).items())
            for suffix, more, value in _values(KINDS[family.type], metric):
                key = (family.name + suffix, pairs | more)
                assert key not in found, key
                found[key] = value
    return found


def _values(kind: str, metric) -> list:
    part = getattr(metric, kind)
    if kind in ("counter", "gauge"):
        return [("", frozenset(), part.value)]
    values = [("_sum", frozenset(), part.sample_sum), ("_count", frozenset(), part.sample_count)]
    if kind == "summary":
        return values + [("", frozenset({("quantile", one.quantile)}), one.value) for one in part.quantile]
    return values + [("_bucket", frozenset({("le", one.upper_bound)}), one.cumulative_count) for one in part.bucket]


def is_native(histogram) -> bool:
    """Returns whether Prometheus recognizes native buckets."""
    return histogram.zero_threshold > 0 or histogram.zero_count > 0 or len(histogram.positive_span) > 0


def native_buckets(histogram) -> list:
    """Returns (lower bound, upper bound, count) of each native bucket that is not empty, in ascending order; the zero bucket
    reaches from the negative to the positive threshold."""
    bound = lambda index: 2.0 ** (index / 2.0**histogram.schema)
    positive = _indexed(histogram.positive_span, histogram.positive_delta)
    negative = _indexed(histogram.negative_span, histogram.negative_delta)
    found = [(-bound(index), -bound(index - 1), count) for index, count in reversed(negative)]
    found.append((-histogram.zero_threshold, histogram.zero_threshold, histogram.zero_count))
    found += [(bound(index - 1), bound(index), count) for index, count in positive]
    return [bucket for bucket in found if bucket[2]]


def _indexed(spans, deltas) -> list:
    found, index, count, rest = [], 0, 0, iter(deltas)
    for span in spans:
        index += span.offset
        for _ in range(span.length):
            count += next(rest)
            found.append((index, count))
            index += 1
    assert next(rest, None) is None, "more counts than the spans have buckets"
    return found
