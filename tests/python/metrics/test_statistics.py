"""The statistics extension and `/metrics` are exact, up to date when the answer arrives, and always agree."""

import concurrent.futures
import json
import re
import time

import pytest
import tritonclient.grpc
from google.protobuf.json_format import MessageToDict

from harness.inference import ROW, one, simple
from harness.processes import held
from harness.server import samples, total
from harness.statistics import until_dispatched, until_received
from harness.waiting import eventually
from harness.wire import HttpCase, grpc_infer, grpc_tensor, infer, send_grpc, send_http, tensor

DURATIONS = ["success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"]


def batch(rows: int) -> dict:
    """Returns a request for `simple` with this many rows."""
    return {"inputs": [tensor(name, "INT32", [rows, 16], ROW * rows) for name in ("INPUT0", "INPUT1")]}


def counts(statistics: dict) -> dict:
    """Returns the counts of the statistics, without the durations."""
    result = {name: statistics["inference_stats"][name]["count"] for name in DURATIONS}
    result |= {key: statistics[key] for key in ("inference_count", "execution_count")}
    return result | {
        f"batch {entry['batch_size']}": entry["compute_infer"]["count"] for entry in statistics["batch_stats"]
    }


def risen(before: dict, after: dict) -> dict:
    """Returns the increases between two snapshots."""
    return {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_request_is_counted_before_it_is_answered(server, rows):
    """Sequential requests: each is one execution, and is visible as soon as its answer has arrived."""
    for _ in range(5):
        before = counts(server.statistics("simple"))
        started = time.time() * 1000
        status, answer = server.infer("simple", batch(rows))
        assert status == 200, answer
        after = server.statistics("simple")
        once = dict.fromkeys(["success", "queue", "compute_input", "compute_infer", "compute_output"], 1)
        assert risen(before, counts(after)) == once | {
            "inference_count": rows,
            "execution_count": 1,
            f"batch {rows}": 1,
        }
        assert started - 1000 <= after["last_inference"] <= time.time() * 1000 + 1000


@pytest.mark.smoke
def test_format_of_the_statistics(server):
    """Every key exists, every count and duration is an integer, and batch sizes are sorted."""
    server.infer("simple", batch(2))
    server.infer("simple", batch(1))
    statistics = server.statistics("simple")
    assert list(statistics)[:5] == ["name", "version", "last_inference", "inference_count", "execution_count"]
    assert (statistics["name"], statistics["version"]) == ("simple", "1")
    assert list(statistics["inference_stats"]) == DURATIONS
    for duration in statistics["inference_stats"].values():
        assert list(duration) == ["count", "ns"]
        assert all(isinstance(number, int) and number >= 0 for number in duration.values())
    sizes = [entry["batch_size"] for entry in statistics["batch_stats"]]
    assert sizes == sorted(set(sizes))
    assert statistics["response_stats"] == {}
    assert isinstance(statistics["memory_usage"], list)


def test_durations_are_plausible(start):
    """For a model that takes 200 ms, compute_infer shows that time, and the parts do not exceed the total."""
    server = start(["delay_200"])
    server.infer("delay_200", one("FP32", [1, 1], [1]))
    stats = server.statistics("delay_200")["inference_stats"]
    assert 200e6 <= stats["compute_infer"]["ns"] <= stats["success"]["ns"] < 5e9
    parts = sum(stats[name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert parts <= stats["success"]["ns"]


def test_grpc_and_http_show_the_same_statistics(server):
    """Both protocols show the same numbers; gRPC has 64-bit integers as text in JSON."""
    server.infer("simple", simple())
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        message = client.get_inference_statistics("simple")
    over_grpc = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    text = re.sub(r'"(\d+)"', r"\1", json.dumps(over_grpc["model_stats"][0]["inference_stats"], sort_keys=True))
    assert json.loads(text) == server.statistics("simple")["inference_stats"]


def test_all_models_are_listed(server):
    """Without a name, all ready versions are in one list."""
    status, text = server.get("/v2/models/stats")
    assert status == 200
    listed = {(entry["name"], entry["version"]) for entry in json.loads(text)["model_stats"]}
    assert {("simple", "1"), ("versions_all", "1"), ("versions_all", "3")} <= listed
    assert ("versions_default", "1") not in listed


def test_failures_of_the_model_count_as_failures(server):
    """A backend that fails: fail + 1 with its duration, one execution, the reason BACKEND; no success."""
    before, metrics = server.statistics("fail"), server.scrape()
    assert server.infer("fail", one("FP32", [1], [1]))[0] == 500
    after = server.statistics("fail")
    rose = risen(counts(before), counts(after))
    assert rose["fail"] == 1
    assert "success" not in rose and "inference_count" not in rose
    assert after["inference_stats"]["fail"]["ns"] > before["inference_stats"]["fail"]["ns"]
    failures = risen(by_reason(metrics, "fail"), by_reason(server.scrape(), "fail"))
    assert failures == {"BACKEND": 1}


def by_reason(metrics: dict, model: str) -> dict:
    """Returns the failures of a model by reason."""
    name = "nv_inference_request_failure"
    return {
        dict(labels)["reason"]: v for (n, labels), v in metrics.items() if n == name and dict(labels)["model"] == model
    }


REFUSED = [
    infer("bad JSON", "simple", b"{", status=500),
    infer("too few inputs", "simple", {"inputs": []}, status=400),
    infer(
        "wrong shape",
        "simple",
        {"inputs": [tensor(n, "INT32", [1, 8], ROW[:8]) for n in ("INPUT0", "INPUT1")]},
        status=400,
    ),
    infer("unknown model", "no_such_model", simple(), status=400),
    infer("unknown version", "simple", simple(), version=99, status=404),
    infer("unknown encoding", "simple", simple(), headers={"Content-Encoding": "br"}, status=501),
    HttpCase("unknown path", "GET", "/v2/nothing", status=404),
    HttpCase("wrong method", "GET", "/v2/models/simple/infer", status=405),
]
REFUSED_CALLS = [
    grpc_infer("no inputs", "simple", [], status="INVALID_ARGUMENT"),
    grpc_infer("unknown model", "no_such_model", [], status="INVALID_ARGUMENT"),
    grpc_infer(
        "no data", "simple", [grpc_tensor(n, "INT32", [1, 16]) for n in ("INPUT0", "INPUT1")], status="INVALID_ARGUMENT"
    ),
]


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_CALLS], ids=lambda case: f"{case.name} {type(case).__name__[:4]}")
def test_refused_requests_are_counted_separately(server, case):
    """A refused request is in no statistic of the model, and exactly once in a separate family."""
    before, metrics = server.statistics("simple"), server.scrape()
    answer = send_http(server.http, case) if isinstance(case, HttpCase) else send_grpc(server.grpc, case)
    assert answer.status == case.status
    after = server.scrape()
    protocol = "http" if isinstance(case, HttpCase) else "grpc"
    assert refusals(after, protocol) - refusals(metrics, protocol) == 1
    assert server.statistics("simple") == before
    model = {key: value for key, value in metrics.items() if key[0].startswith("nv_inference")}
    assert model == {key: value for key, value in after.items() if key[0].startswith("nv_inference")}


def refusals(metrics: dict, protocol: str) -> float:
    """Returns the refused and failed requests of a protocol, over all routes and reasons."""
    family = "pharos_request_failures_total"
    found = [v for (n, labels), v in metrics.items() if n == family and dict(labels)["protocol"].lower() == protocol]
    assert found, f"no series of {family} for {protocol}"
    return sum(found)


def test_metrics_and_statistics_agree(server):
    """After valid and invalid requests of many clients, every number of one view is in the other."""

    def load(n: int):
        cases = [
            ("simple", batch(1 + n % 8)),
            ("identity_fp32", one("FP32", [1, 2], [1, 2])),
            ("fail", one("FP32", [1], [1])),
        ]
        server.infer(*cases[n % 3])
        server.infer("simple", {"inputs": []})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(load, range(120)))
    metrics = server.scrape()
    models = json.loads(server.get("/v2/models/stats")[1])["model_stats"]
    assert len(models) > 10
    for entry in models:
        compare(entry, metrics)


def compare(entry: dict, metrics: dict):
    """Checks that the metrics and the statistics of one version of a model agree."""
    labels, stats = {"model": entry["name"], "version": entry["version"]}, entry["inference_stats"]
    exact = {
        "nv_inference_request_success": stats["success"]["count"],
        "nv_inference_request_failure": stats["fail"]["count"],
        "nv_inference_count": entry["inference_count"],
        "nv_inference_exec_count": entry["execution_count"],
        "nv_inference_pending_request_count": 0,
    }
    for name, value in exact.items():
        assert total(metrics, name, **labels) == value, (name, labels)
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        microseconds = total(metrics, f"nv_inference_{part}_duration_us", **labels)
        assert abs(microseconds - stats[part]["ns"] / 1000) <= 1, (part, labels)
    assert entry["execution_count"] == sum(size["compute_infer"]["count"] for size in entry["batch_stats"])


@pytest.mark.smoke
def test_series_exist_from_the_start(start):
    """Before the first request every family has its series, at 0."""
    server = start(["identity_fp32"])
    metrics = server.scrape()
    for name in (
        "request_success", "count", "exec_count", "request_duration_us", "queue_duration_us",
        "compute_input_duration_us", "compute_infer_duration_us", "compute_output_duration_us", "pending_request_count",
    ):  # fmt: skip
        assert metrics[f"nv_inference_{name}", (("model", "identity_fp32"), ("version", "1"))] == 0
    assert by_reason(metrics, "identity_fp32") == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}
    assert total(metrics, "nv_model_load_duration_secs", model="identity_fp32") > 0
    names = {name for name, _ in metrics}
    assert {
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    } <= names


def test_torchserve_counters_rise(server):
    """The counters of TorchServe; latencies are in microseconds."""
    before = server.scrape()
    server.infer("simple", simple())
    after = server.scrape()
    labels = {"model_name": "simple", "model_version": "1"}

    def rise(name: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert rise("ts_inference_requests_total") == 1
    assert 0 < rise("ts_inference_latency_microseconds") < 5e6
    assert 0 <= rise("ts_queue_latency_microseconds") < 5e6


@pytest.mark.smoke
def test_text_format(server):
    """The format of Prometheus: HELP and TYPE before the samples, numbers without `.0`, the right content type."""
    server.infer("simple", simple())
    case = HttpCase("metrics", "GET", "/metrics")
    answer = send_http(server.metrics, case)
    assert answer.headers["content-type"].startswith("text/plain")
    families = set()
    for line in answer.text.splitlines():
        kind = re.fullmatch(r"# (HELP|TYPE) (\w+) .+", line)
        if kind:
            families.add(kind[2])
            continue
        sample = re.fullmatch(r'(\w+)(\{(\w+="[^"]*",?)+\})? (\S+)', line)
        assert sample, line
        base = re.sub(r"_(bucket|sum|count)$", "", sample[1])
        assert sample[1] in families or base in families, f"{line}: no TYPE before it"
        assert not sample[4].endswith(".0"), line
    assert "# TYPE nv_inference_request_success counter" in answer.text
    assert "nv_inference_request_success_total" not in answer.text
    assert samples(answer.text) != {}


def test_openmetrics(server):
    """A client that accepts OpenMetrics gets it, with the end mark."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = send_http(server.metrics, HttpCase("metrics", "GET", "/metrics", headers=accept))
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_pending_gauge(start):
    """The gauge counts requests while they wait, and is 0 when all are answered."""
    server, name = start(["delay_200"]), "nv_inference_pending_request_count"
    ask = lambda: server.infer("delay_200", one("FP32", [1, 1], [1]))  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        with held(server, "delay_200"):
            futures = [pool.submit(ask)]
            until_dispatched(server, "delay_200", 1)
            futures += [pool.submit(ask) for _ in range(3)]
            until_received(server, "delay_200", 4)
            assert total(server.scrape(), name, model="delay_200") == 3
        assert {future.result()[0] for future in futures} == {200}
    assert total(server.scrape(), name, model="delay_200") == 0


def test_statistics_of_a_batch(start):
    """Requests that are executed together: one execution, and each has the durations of the whole batch."""
    server = start(["preferred"])
    request = one("FP32", [1, 2], [1, 2])
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.infer("preferred", request), range(4)))
    assert [status for status, _ in answers] == [200] * 4
    statistics = server.statistics("preferred")
    once = dict.fromkeys(["success", "queue", "compute_input", "compute_infer", "compute_output"], 4)
    expected = once | {"inference_count": 4, "execution_count": 1, "batch 4": 1}
    assert {key: value for key, value in counts(statistics).items() if value} == expected
    batch_infer = statistics["batch_stats"][0]["compute_infer"]["ns"]
    assert statistics["inference_stats"]["compute_infer"]["ns"] == 4 * batch_infer


def test_the_comparison_can_fail():
    """The comparison detects a count that is one too high."""
    entry = {"name": "m", "version": "1", "inference_count": 1, "execution_count": 0, "batch_stats": []}
    entry["inference_stats"] = {name: {"count": 0, "ns": 0} for name in DURATIONS}
    with pytest.raises(AssertionError, match="nv_inference_count"):
        compare(entry, {})
