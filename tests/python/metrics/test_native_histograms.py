"""Scrapes in Prometheus' protobuf format: the same numbers as in the text format, and native histograms, whose quantiles a real
Prometheus computes."""

import math
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import metric_families, prometheus
from harness.inference import one, simple
from harness.metric_families import CONTENT_TYPE, KINDS, is_native, labels, native_buckets
from harness.models import write
from harness.prometheus import Prometheus
from harness.server import EXAMPLES, ROOT, Server, binary, samples
from harness.waiting import eventually, settled

REQUEST = "pharos_request_duration_seconds"
"""The histogram of the durations of requests, and its unit in seconds."""
NATIVE = {
    REQUEST,
    "pharos_queue_duration_seconds",
    "pharos_compute_infer_duration_seconds",
}
"""The metrics with native buckets in the shipped metrics.yaml."""
GROWTH = 2 ** (1 / 8)
"""The factor between the bounds of neighbouring buckets with `native: true`."""
DELAYS_MS = (200, 400, 800)
"""Long enough that the time of the client itself is a small part of a bucket's width."""
REQUESTS = 8
"""Requests to each model."""

needs_prometheus = pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())


def text_samples(server) -> dict:
    """Returns the samples of a text scrape in the form of `metric_families.samples`."""
    number = {"le", "quantile"}
    text = metric_families.fetch(server.metrics, accept="text/plain")[1].decode()
    return {
        (name, frozenset((key, float(value) if key in number else value) for key, value in pairs)): value
        for (name, pairs), value in samples(text).items()
    }


def histograms(families: dict, name: str) -> dict:
    """Returns the histograms of a family by model."""
    return {labels(metric)["model"]: metric.histogram for metric in families[name].metric}


def settle(server):
    steady = lambda: {key: value for key, value in text_samples(server).items() if key[0].startswith(("nv_inf", "pharos_request_duration"))}
    settled("the series of requests", steady, 0.2)


@pytest.mark.smoke
def test_protobuf_has_the_samples_of_the_text_format(server):
    """All series, with equal values, except for those that change between scrapes."""
    for _ in range(3):
        server.infer("simple", simple())
    settle(server)
    before, families, after = text_samples(server), metric_families.scrape(server.metrics), text_samples(server)
    found = metric_families.samples(families)
    steady = {key: value for key, value in before.items() if after.get(key) == value}
    assert len(steady) > 0.9 * len(before) and any(name == f"{REQUEST}_bucket" for name, _ in steady)
    assert {key: found.get(key) for key in steady} == steady
    assert found.keys() - before.keys() - after.keys() == set()
    text = metric_families.fetch(server.metrics, accept="text/plain")[1].decode()
    described = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE "))
    assert {name: KINDS[family.type] for name, family in families.items()} == described


def test_native_buckets_contain_the_observations_of_the_classic_ones(server):
    """Counts and bounds agree; only the metrics that the shipped file names have native buckets."""
    for _ in range(20):
        server.infer("simple", simple())
    settle(server)
    families = metric_families.scrape(server.metrics)
    with_native = {name for name, family in families.items() if any(is_native(metric.histogram) for metric in family.metric)}
    assert with_native == NATIVE
    for name in NATIVE:
        histogram = histograms(families, name)["simple"]
        buckets = native_buckets(histogram)
        assert histogram.sample_count >= 20 and histogram.schema == 3
        assert sum(count for _, _, count in buckets) == histogram.sample_count == histogram.bucket[-1].cumulative_count
        low, high = (sum(bucket[at] * bucket[2] for bucket in buckets) for at in (0, 1))
        assert low <= histogram.sample_sum <= high
        for classic in histogram.bucket:
            surely = sum(count for _, upper, count in buckets if upper <= classic.upper_bound)
            perhaps = sum(count for lower, _, count in buckets if lower < classic.upper_bound)
            assert surely <= classic.cumulative_count <= perhaps, classic


def test_the_definition_chooses_schema_and_bucket_limit(tmp_path):
    """A series with more buckets than allowed has a lower schema and all its observations."""
    shipped = (ROOT / "metrics.yaml").read_text()
    before, _, rest = shipped.partition(f"- name: {REQUEST}\n")
    assert "native: true" in rest
    definition = tmp_path / "metrics.yaml"
    chosen = rest.replace("native: true", "native: {schema: 8, max_buckets: 20}", 1).replace("native: true", "native: {factor: 1.5}", 1)
    definition.write_text(f"{before}- name: {REQUEST}\n{chosen}")
    with Server(tmp_path, [EXAMPLES], [f"--metrics-config={definition}"]) as server:
        for _ in range(200):
            server.infer("simple", simple())
        settle(server)
        families = metric_families.scrape(server.metrics)
    request = histograms(families, REQUEST)["simple"]
    buckets = native_buckets(request)
    assert request.schema < 8 and len(buckets) <= 20
    assert sum(count for _, _, count in buckets) == request.sample_count == 200
    (other,) = {histograms(families, name)["simple"].schema for name in NATIVE - {REQUEST}} - {3}
    assert other == 1


def test_a_wrong_native_key_is_refused(tmp_path):
    """The message names the place, the value and what is allowed."""
    definition = tmp_path / "metrics.yaml"
    definition.write_text("model_metrics:\n  histogram:\n    - {name: a, unit: s, native: {schema: 9}}\n")
    done = subprocess.run([binary(), "metrics", "check", definition], capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "metrics.yaml:3:" in text, text
    assert "`schema` is `9`; allowed is a whole number from -4 to 8" in text, text


def test_formats_are_negotiated(server):
    """The highest weight decides; text without a preference."""
    message = CONTENT_TYPE.replace(" ", "")
    for accept, expected in [
        (f"{message};q=0.5,application/openmetrics-text;version=1.0.0;q=0.4,text/plain;q=0.2,*/*;q=0.1", CONTENT_TYPE),
        (f"{message};q=0.5,application/openmetrics-text;q=0.6", "application/openmetrics-text"),
        (f"{message};q=0.5,text/plain", "text/plain"),
        (f"{message};q=0", "text/plain"),
        ("application/vnd.google.protobuf", "text/plain"),
        ("*/*", "text/plain"),
    ]:
        assert metric_families.fetch(server.metrics, accept=accept)[0].startswith(expected), accept


def test_a_requested_sample_selects_its_family(server):
    assert set(metric_families.scrape(server.metrics, f"?name[]={REQUEST}_sum&name[]=nv_inference_count")) == {
        REQUEST,
        "nv_inference_count",
    }
    assert metric_families.scrape(server.metrics, "?name[]=none") == {}


def test_an_exemplar_of_a_native_histogram_has_its_time(server):
    """Both kinds of buckets have it."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4799"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "Content-Type": "application/json"}
    body = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
    assert server.ask("POST", "/v2/models/identity_fp32/infer", body, headers=headers)[0] == 200
    histogram = histograms(metric_families.scrape(server.metrics), REQUEST)["identity_fp32"]
    found = [one for one in histogram.exemplars if labels(one) == {"trace_id": trace}]
    assert len(found) == 1 and found[0].value > 0
    assert abs(found[0].timestamp.seconds + found[0].timestamp.nanos / 1e9 - time.time()) < 60
    assert [bucket.exemplar for bucket in histogram.bucket if labels(bucket.exemplar) == {"trace_id": trace}] == found


@pytest.mark.slow
@needs_prometheus
def test_prometheus_computes_the_latencies_of_the_load(tmp_path):
    """Quantiles agree with the client's own within one bucket's width. They would not with the classic buckets, whose bounds
    grow by 2 and more."""
    models = tmp_path / "models"
    for delay in DELAYS_MS:
        write(models, f"delay_{delay}", DELAY % delay)
    with Server(tmp_path, [models]) as server, Prometheus(tmp_path, server.metrics, native=True) as running:
        eventually("Prometheus has scraped the server", running.ready)
        for delay in DELAYS_MS:
            server.infer(f"delay_{delay}", one("FP32", [1], [1]))
        with ThreadPoolExecutor(len(DELAYS_MS)) as pool:
            latencies = sorted(sum(pool.map(lambda delay: latencies_of(server, f"delay_{delay}"), DELAYS_MS), []))
        every = len(DELAYS_MS) * (REQUESTS + 1)
        total = f"sum({REQUEST})"
        eventually("all requests are scraped", lambda: scalar(running, f"histogram_count({total})") == every)
        # In the middle of the requests to one model.
        for quantile in (1 / 6, 3 / 6, 5 / 6):
            measured = latencies[math.floor(quantile * len(latencies))]
            computed = scalar(running, f"histogram_quantile({quantile}, {total})")
            assert measured / GROWTH <= computed <= measured * GROWTH, (quantile, measured, computed)
        for delay in DELAYS_MS:
            series = f'{REQUEST}{{model="delay_{delay}"}}'
            text = f'{REQUEST}_sum{{model="delay_{delay}",version="1"}}'
            sums = [line for line in server.get("/metrics", server.metrics)[1].splitlines() if line.startswith(text)]
            assert scalar(running, f"histogram_sum({series})") == pytest.approx(float(sums[0].split()[-1]))
        assert running.query(f"histogram_quantile(0.9, sum by (model) (rate({REQUEST}[1m])))")


DELAY = """
backend: "test"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "function" value { string_value: "delay" } }
parameters { key: "delay_ms" value { string_value: "%s" } }
"""


def latencies_of(server, model: str) -> list:
    """Sends requests one after the other; returns their latencies in seconds."""
    found = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        status, answer = server.infer(model, one("FP32", [1], [1]))
        found.append(time.perf_counter() - begun)
        assert status == 200, answer
    return found


def scalar(running, expression: str) -> float:
    """Returns the value of an expression with one sample; NaN without one."""
    result = running.query(expression)
    assert len(result) <= 1, result
    return float(result[0]["value"][1]) if result else math.nan
