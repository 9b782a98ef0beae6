"""Metrics that are pushed to an OpenTelemetry collector: they agree with a scrape, and a collector that is absent, slow or refuses
exports costs no request."""

import json
import socket
import time

import grpc
import numpy as np
import pytest
import tritonclient.grpc

from harness import metric_families
from harness.certificates import Files
from harness.inference import one
from harness.models import copy_models
from harness.otlp_collector import GrpcCollector, HttpCollector, values
from harness.ports import free_ports
from harness.server import Server, kill_all, total
from harness.waiting import eventually
from metrics.otlp_points import exponential_buckets, metrics_of, names, normal, samples, summed

MODEL = {"model": "identity_fp32", "version": "1"}
SUCCESS = "nv_inference_request_success"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
MOVING = ("nv_cpu", "process_", "pharos_worker_", "CPU", "Memory", "Disk", "nv_gpu", "nv_energy", "pharos_gpu", "pharos_connections_open")
"""Prefixes of measurements of the system, and of what a scrape changes itself."""


@pytest.fixture
def pushing(tmp_path):
    """Starts a server that pushes its metrics: `pushing(collector, OTEL_...="...")`."""
    started = []

    def begin(collector, *options, port=None, scheme="http", models=("identity_fp32", "fail"), **environment):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        url = f"--otlp-metrics-endpoint={scheme}://127.0.0.1:{port or collector.port}"
        server = Server(folder, [copy_models(folder / "models", models)], [url, *options])
        protocol = "grpc" if isinstance(collector, GrpcCollector) else "http/protobuf"
        server.environment = {
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            **environment,
        }
        started.append(server)
        server.launch()
        server.wait_until_ready()
        return server

    yield begin
    kill_all(started)


def ask(server, count=1, model="identity_fp32"):
    """Sends `count` requests."""
    for _ in range(count):
        server.infer(model, one("FP32", [1, 1] if model == "identity_fp32" else [1], [1]))


def exports(server, result: str) -> float:
    """Returns the server's count of exports with this result."""
    return total(server.scrape(), "pharos_otlp_exports_total", signal="metrics", result=result)


def successes(message) -> float:
    """Returns the number of successful requests of the model in an export."""
    return total(samples(message), SUCCESS, **MODEL)


def unchanged(before: dict, after: dict) -> dict:
    """Returns the samples that are equal in both scrapes, without measurements of the system."""
    before, after = normal(before), normal(after)
    same = {key: value for key, value in after.items() if before.get(key) == value}
    return {key: value for key, value in same.items() if not key[0].startswith(MOVING)}


@pytest.mark.parametrize("compression", ["gzip", "none"])
@pytest.mark.parametrize("make", [HttpCollector, GrpcCollector])
def test_an_export_agrees_with_a_scrape(pushing, make, compression):
    """Every series of a scrape is in the export between this scrape and the next, with the same labels and value."""
    with make() as collector:
        server = pushing(
            collector,
            "--metrics-config=histogram_latencies=true;summary_latencies=true",
            OTEL_EXPORTER_OTLP_COMPRESSION=compression,
            OTEL_EXPORTER_OTLP_METRICS_HEADERS="x-team=blue%20green",
            OTEL_RESOURCE_ATTRIBUTES="zone=z",
            OTEL_SERVICE_NAME="mine",
        )
        ask(server, count=5)
        ask(server, count=2, model="fail")
        before, received = server.scrape(), len(collector.metrics)
        eventually("two more exports are received", lambda: len(collector.metrics) >= received + 2)
        message = collector.metrics[received + 1]
        after = server.scrape()
        pushed, expected = normal(samples(message)), unchanged(before, after)
        assert {key: pushed.get(key) for key in expected} == expected
        compared = {name for name, _ in expected}
        assert {SUCCESS, "nv_inference_request_failure", "ts_inference_latency_microseconds"} <= compared
        assert {"pharos_request_duration_seconds_bucket", "nv_inference_queue_summary_us"} <= compared
        assert {"pharos_instances", "pharos_batch_size_bucket", "pharos_build_info"} <= compared
        assert set(normal(before)) & set(normal(after)) <= set(pushed)
        assert names(message, delta=True) == set()
        path, headers = collector.requests[-1]
        assert path == ("/v1/metrics" if make is HttpCollector else "Export")
        assert headers["x-team"] == "blue green"
        if make is HttpCollector:
            assert headers.get("content-encoding", "none") == compression
        (resource,) = message.resource_metrics
        attributes = values(resource.resource.attributes)
        assert (attributes["service.name"], attributes["zone"], attributes["telemetry.sdk.name"]) == ("mine", "z", "pharos")
        assert len(attributes["service.instance.id"]) == 36
        assert resource.scope_metrics[0].scope.name == "pharos"
        server.stop()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_exemplar_has_the_trace(pushing, streamed):
    """A traced request is an exemplar of the histogram of its duration, also in a stream over gRPC."""
    with HttpCollector() as collector:
        server = pushing(collector, "--metrics-config=histogram_latencies=true")
        body, headers = json.dumps(one("FP32", [1, 1], [1])), {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        if streamed:
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), "float32"))
            with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
                answers = []
                client.start_stream(lambda result, error: answers.append(error), headers=headers)
                client.async_stream_infer("identity_fp32", [tensor])
                eventually("the stream is answered", lambda: answers == [None])
                client.stop_stream()
        else:
            assert server.ask("POST", "/v2/models/identity_fp32/infer", body, headers=headers)[0] == 200

        def traced():
            histograms = [metric.histogram for message in collector.metrics for metric in metrics_of(message)]
            points = [point for histogram in histograms for point in histogram.data_points]
            return {example.trace_id.hex() for point in points for example in point.exemplars} == {TRACE}

        eventually("an exemplar has the trace", traced)
        server.stop()


@pytest.mark.parametrize("make, busy", [(HttpCollector, 400), (GrpcCollector, grpc.StatusCode.INVALID_ARGUMENT)])
def test_deltas_add_up_although_exports_fail(pushing, make, busy):
    """The sum over all deltas is the number of requests. An export that fails is part of the next one."""
    with make() as collector:
        preference = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}
        server = pushing(collector, **preference)
        for round_ in range(4):
            ask(server, count=5)
            failed = exports(server, "failed")
            collector.refuse = [busy] * 2
            eventually("an export fails", lambda: exports(server, "failed") > failed)
            received = len(collector.metrics)
            eventually("an export is accepted", lambda: len(collector.metrics) > received)
        eventually("all requests are exported", lambda: sum(map(successes, collector.metrics)) == 20)
        scraped = normal(server.scrape())
        server.stop()
        assert sum(map(successes, collector.metrics)) == 20
        pushed = summed(collector.metrics)
        of_model = {key: value for key, value in pushed.items() if frozenset(MODEL.items()) <= key[1]}
        whole = {key: value for key, value in of_model.items() if not key[0].startswith(MOVING)}
        assert whole and {key: scraped.get(key) for key in whole} == pytest.approx(whole)
        metrics = [metric for message in collector.metrics for metric in metrics_of(message) if metric.name == SUCCESS]
        times = [metric.sum.data_points[0] for metric in metrics]
        starts, ends = [point.start_time_unix_nano for point in times], [point.time_unix_nano for point in times]
        assert starts[1:] == ends[:-1], "each delta starts at the end of the last one"


def test_exponential_histograms_have_the_native_buckets_of_a_scrape(pushing):
    """Chosen by OpenTelemetry's variable, for the histograms with `native`; the others keep their bounds."""
    aggregation = {"OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram"}
    with HttpCollector() as collector:
        server = pushing(collector, "--metrics-config=histogram_latencies=true", **aggregation)
        ask(server, count=20)
        received = len(collector.metrics)
        eventually("two more exports are received", lambda: len(collector.metrics) >= received + 2)
        message = collector.metrics[received + 1]
        families = metric_families.scrape(server.metrics)
        server.stop()
    metrics = {metric.name: metric for metric in metrics_of(message)}
    compared = 0
    for name, family in families.items():
        native = [metric for metric in family.metric if metric_families.is_native(metric.histogram)]
        if not native:
            assert name not in metrics or not metrics[name].HasField("exponential_histogram"), name
            continue
        points = {values(point.attributes)["model"]: point for point in metrics[name].exponential_histogram.data_points}
        for metric in native:
            point = points[metric_families.labels(metric)["model"]]
            buckets = {high: count for low, high, count in metric_families.native_buckets(metric.histogram) if low > 0}
            assert (point.scale, point.count, point.sum) == (
                metric.histogram.schema,
                metric.histogram.sample_count,
                pytest.approx(metric.histogram.sample_sum),
            )
            assert exponential_buckets(point) == buckets
            compared += point.count
    assert compared >= 60, "three histograms of 20 requests"


def test_the_last_values_are_exported_at_exit(pushing):
    """At any interval."""
    with HttpCollector() as collector:
        server = pushing(collector, OTEL_METRIC_EXPORT_INTERVAL="600000")
        ask(server, count=7)
        assert collector.metrics == []
        server.stop()
        assert [successes(message) for message in collector.metrics] == [7]


def test_a_collector_that_starts_late(pushing):
    """Exports fail and are counted while it is absent; requests do not. The log has one line for its loss and one for its
    return. The first export contains all values."""
    (port,) = free_ports(1)
    server = pushing(None, port=port, OTEL_METRIC_EXPORT_TIMEOUT="5000")
    ask(server, count=3)
    eventually("exports fail", lambda: exports(server, "failed") >= 2)
    with HttpCollector(port) as collector:
        eventually("an export is received", lambda: collector.metrics)
        assert successes(collector.metrics[0]) == 3
        eventually("it is counted", lambda: exports(server, "accepted") >= 1)
        log = server.log_tail()
        assert (log.count("does not accept exports"), log.count("answers again")) == (1, 1)
        server.stop()


def test_refusals(pushing):
    """429 with Retry-After: the same export is sent again, not earlier. 400: not sent again. Rejected points are counted."""
    with HttpCollector() as collector:
        server = pushing(collector, OTEL_METRIC_EXPORT_INTERVAL="100")
        eventually("an export is received", lambda: collector.metrics)
        refused = len(collector.attempts)
        collector.retry_after, collector.refuse = "2", [429]
        eventually("an export is refused and another one sent", lambda: len(collector.attempts) >= refused + 3)
        attempts = collector.attempts[refused - 1 :]
        longest = max(later - earlier for earlier, later in zip(attempts, attempts[1:]))
        assert longest >= 2 and exports(server, "failed") == 0
        collector.refuse = [400]
        eventually("an export fails", lambda: exports(server, "failed") == 1)
        collector.reject = 2
        points = "pharos_otlp_data_points_total"
        eventually("the rejected points are counted", lambda: total(server.scrape(), points, result="rejected") == 2)
        assert "rejected 2 of" in server.log_tail()
        collector.warning = "old schema"
        warned, warning = len(collector.metrics), "accepted an export with a warning: old schema"
        eventually("exports are accepted with a warning", lambda: len(collector.metrics) >= warned + 3)
        eventually("the warning is logged", lambda: warning in server.log_tail())
        server.stop()
        assert server.log_tail().count(warning) == 1, server.log_tail()


@pytest.mark.parametrize("make", [HttpCollector, GrpcCollector])
def test_tls_with_a_client_certificate(pushing, tmp_path, make):
    """The collector's certificate is verified by a given authority, and the server identifies itself."""
    files = Files(tmp_path / "files")
    with make(files=files) as collector:
        server = pushing(
            collector,
            scheme="https",
            OTEL_EXPORTER_OTLP_CERTIFICATE=str(files.root),
            OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE=str(files.client_cert),
            OTEL_EXPORTER_OTLP_CLIENT_KEY=str(files.client_key),
        )
        ask(server, count=2)
        eventually("the requests are exported", lambda: collector.metrics and successes(collector.metrics[-1]) == 2)
        server.stop()
        # Without the authority, the connection is refused.
        stranger = pushing(collector, scheme="https")
        eventually("exports fail", lambda: "does not accept exports" in stranger.log_tail())
        assert exports(stranger, "accepted") == 0
        stranger.stop()


def test_an_export_ends_at_its_time_limit(pushing):
    """Also while the collector has not answered, which the longer limit of one attempt would allow."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        server = pushing(None, port=deaf.getsockname()[1], OTEL_METRIC_EXPORT_TIMEOUT="300", OTEL_EXPORTER_OTLP_TIMEOUT="600000")
        eventually("several exports have failed", lambda: exports(server, "failed") >= 3)


def test_exit_does_not_wait_for_a_collector_that_hangs(pushing):
    """The server ends within seconds, and logs that metrics were lost."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        server = pushing(None, port=deaf.getsockname()[1])
        ask(server, count=2)
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 12
        assert "the last metrics could not be sent" in server.log_tail()


def test_variables_switch_the_push_off(pushing):
    """The variables take effect although the flag is given, and the log says so."""
    with HttpCollector() as collector:
        server = pushing(collector, OTEL_METRICS_EXPORTER="none")
        ask(server)
        server.stop()
        assert collector.attempts == []
        assert "OTEL_METRICS_EXPORTER does not contain otlp" in server.log_tail()
