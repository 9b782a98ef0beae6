"""`examples/log-pipelines`: the configurations of Vector and Fluent Bit read every line of a real server, and each field agrees
with the server's metrics and definition."""

import collections
import concurrent.futures
import contextlib
import json
import math
import re
import socket
import time

import pytest
import yaml

from harness.inference import one
from harness.processes import held
from harness.server import EXAMPLES, ROOT, total
from harness.statistics import until_dispatched
from harness.waiting import eventually
from metrics import log_pipelines
from metrics.log_lines import raw
from metrics.log_pipelines import FLUENT_BIT, NOTE, PARSERS, TOOLS, VECTOR

pytestmark = pytest.mark.skipif(bool(log_pipelines.missing()), reason=log_pipelines.missing())

IDS = ["a,b|#hostname:evil,timestamp:1\n%2C", "second", "", "drittes ü %2C"]
"""The ids of a batch; an empty one is a request without an id."""
SPECS = {
    spec["name"]: {"logger": section.upper(), "type": kind, "unit": spec["unit"], "modes": spec.get("modes", ["tslog"])}
    for section, kinds in yaml.safe_load((ROOT / "metrics.yaml").read_text()).items()
    if section in ("ts_metrics", "model_metrics")
    for kind, specs in kinds.items()
    for spec in specs
}
LAYOUTS = {"file": [], "console": ["--tslog-stdout"], "json": ["--tslog-format=json"]}
COUNTERS = ["Requests2XX", "Requests4XX", "ts_inference_requests_total"]
COUNTERS += ["ts_inference_latency_microseconds", "ts_queue_latency_microseconds"]
GAUGES = ["QueueTime", "WorkerThreadTime", "WorkerLoadTime", "HandlerTime", "PredictionTime"]
"""Gauges that events set, not time."""


@pytest.fixture(autouse=True)
def in_utc(monkeypatch):
    """The servers and this process have one time zone."""
    print(NOTE)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(params=TOOLS)
def tool(request):
    """Vector's programs and those of Fluent Bit."""
    return TOOLS[request.param]()


def waiting(server) -> float:
    """Returns the number of requests in the queue."""
    return total(server.scrape(), "nv_inference_pending_request_count", model="delay_200")


@pytest.fixture
def loaded(start):
    """Starts a server, and sends it one request, a batch with the ids `IDS`, and requests that fail."""

    def begin(*options):
        server = start(["delay_200"], *options)
        request = one("FP32", [1, 1], [1])
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            with held(server, "delay_200"):
                answers = [pool.submit(server.infer, "delay_200", request | {"id": "alone"})]
                until_dispatched(server, "delay_200", 1)
                for at, text in enumerate(IDS):
                    answers.append(pool.submit(server.infer, "delay_200", request | ({"id": text} if text else {})))
                    eventually("it is in the queue", lambda: waiting(server) == at + 1)
            assert [answer.result()[0] for answer in answers] == [200] * 5
        for _ in range(3):
            assert server.get("/v2/models/unknown")[0] == 400
        return server

    return begin


def metric_lines(server, layout: str) -> list:
    """Returns the lines of both metric logs, or those on standard output."""
    if layout != "console":
        return raw(server, "ts_metrics") + raw(server, "model_metrics")
    return [line for line in server.log.read_text().splitlines() if re.search(r"\] tslog (TS|MODEL)_METRICS - ", line)]


def sums(samples: list, names: list) -> dict:
    """Returns the sums of counters by name and labels, in thousandths."""
    result = collections.defaultdict(float)
    for sample in samples:
        if sample["name"] in names:
            result[sample["name"], tuple(sorted(sample["dimensions"].items()))] += sample["value"]
    return {key: round(value * 1000) for key, value in result.items()}


def last(samples: list) -> dict:
    """Returns the last values of `GAUGES` by name and labels, in thousandths, without zeros."""
    gauges = [sample for sample in samples if sample["name"] in GAUGES]
    values = {key: value for sample in gauges for key, value in sums([sample], GAUGES).items()}
    return {key: value for key, value in values.items() if value}


def exposed(server, names: list) -> dict:
    """Returns the same values from `/metrics`, where the host is a label, without zeros."""
    result = {}
    for (name, labels), value in server.scrape().items():
        if name in names and value:
            labels = tuple(sorted((label, text) for label, text in labels if label.lower() != "hostname"))
            result[name, labels] = round(value * 1000)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_have_the_fields_of_the_metrics(loaded, tool, layout):
    """Sums of counters and last values of gauges equal `/metrics`; name, unit, type and logger are those of metrics.yaml; ids are
    those of the clients."""
    before = time.time()
    server = loaded("--metrics-mode=both", *LAYOUTS[layout])

    def agree():
        samples = [tool.sample(line) for line in metric_lines(server, layout)]
        found = sums(samples, COUNTERS)
        ids = [sample["request_ids"] for sample in samples if sample["name"] == "PredictionTime"]
        agrees = (found, last(samples)) == (exposed(server, COUNTERS), exposed(server, GAUGES))
        return samples if agrees and len(found) == 5 and len(ids) == 2 else None

    samples = eventually("lines and /metrics agree", agree)
    assert [sample["request_ids"] for sample in samples if sample["name"] == "PredictionTime"] == [["alone"], IDS]
    for sample in samples:
        spec = SPECS[sample["name"]]
        assert {key: sample[key] for key in ("logger", "type", "unit")} == {key: spec[key] for key in ("logger", "type", "unit")}
        assert sample["host"] == socket.gethostname()
        assert int(before) <= sample["timestamp"] <= time.time() + 1
        assert sample["request_ids"] == [] or spec["logger"] == "MODEL_METRICS"
    assert {sample["name"] for sample in samples} >= set(GAUGES)
    worker = {sample["dimensions"]["WorkerName"] for sample in samples if sample["name"] == "WorkerLoadTime"}
    assert worker == {"W-0-delay_200_1"}


@pytest.mark.parametrize("layout", ["file", "json"])
def test_metric_events_of_vector_sum_to_the_metrics(loaded, layout):
    """Events have the form that `all_metrics` reads: counters are increments, gauges are absolute, tags are the dimensions."""
    server, vector = loaded("--metrics-mode=both", *LAYOUTS[layout]), log_pipelines.Vector()

    def agree():
        events = [vector.run("metric_events", vector.sample(line)) for line in metric_lines(server, layout)]
        counters = [event for event in events if "counter" in event]
        samples = [
            {"name": event["name"], "value": event["counter"]["value"], "dimensions": without_host(event["tags"])}
            for event in counters
        ]
        return events if sums(samples, COUNTERS) == exposed(server, COUNTERS) else None

    for event in eventually("events and /metrics agree", agree):
        kind = SPECS[event["name"]]["type"]
        assert event["kind"] == ("incremental" if kind == "counter" else "absolute")
        assert set(event) == {"name", "kind", "timestamp", "tags", kind} and set(event[kind]) == {"value"}
        assert event["tags"]["host"] == socket.gethostname()


def without_host(tags: dict) -> dict:
    """Returns the tags without the one for the host."""
    return {name: text for name, text in tags.items() if name != "host"}


def test_text_has_the_types_of_the_definition(tool):
    """The expressions that classify names by their type know every metric that the server logs by default."""
    line = "2026-11-20T15:50:37,608 - {}.Count:1.0|#|#hostname:h,timestamp:1795189837"
    logged = {name: spec["type"] for name, spec in SPECS.items() if "tslog" in spec["modes"]}
    assert {"counter", "gauge"} == set(logged.values()) and len(logged) > 15
    assert {name: tool.sample(line.format(name))["type"] for name in logged} == logged


def test_values_and_encoded_fields(tool):
    """All forms of a value, an empty list of dimensions, and percent-encoded names, values, hosts and ids."""
    form = "2026-11-20T15:50:37,608 - My metric.kB/s:{}|#{}|#hostname:h%3A1,requestID:{},timestamp:1795189837"
    for text, value in [("5.0", 5), ("-1.5E-5", -1.5e-5), ("1.23E10", 1.23e10), ("Infinity", float("inf"))]:
        sample = tool.sample(form.format(text, "", "null"))
        assert (sample["value"], sample["dimensions"], sample["request_ids"]) == (value, {}, [])
        assert (sample["name"], sample["unit"], sample["host"]) == ("My metric", "kB/s", "h:1")
        assert sample["timestamp"] == pytest.approx(1795189837.608)
    sample = tool.sample(form.format("NaN", "a%3Ab:c%2Cd,e:", "x%2Cy,null,z%0A"))
    assert sample["value"] == "NaN" or math.isnan(sample["value"])
    assert sample["dimensions"] == {"a:b": "c,d", "e": ""} and sample["request_ids"] == ["x,y", "", "z\n"]


BROKEN = [
    "2026-11-20T15:50:37,608 - QueueTime.ms:1.0|#Level:Host|#hostname:h,timestamp:",
    "2026-11-20T15:50:37 - QueueTime.ms:1.0|#Level:Host|#hostname:h,timestamp:1",
    "2026-11-20T15:50:37,608 - QueueTime.ms:one|#Level:Host|#hostname:h,timestamp:1",
    "2026-11-20T15:50:37,608 - QueueTime.ms:1.0|#Level:Host|#timestamp:1",
    "x 2026-11-20T15:50:37,608 - QueueTime.ms:1.0|#Level:Host|#hostname:h,timestamp:1",
    "2026-11-20T15:50:37,608 [INFO ] tslog ACCESS_LOG - QueueTime.ms:1.0|#Level:Host|#hostname:h,timestamp:1",
]


@pytest.mark.parametrize("line", BROKEN)
def test_other_lines_are_no_samples(tool, line):
    # A program that does not compile raises another error.
    with pytest.raises((RuntimeError, AssertionError)):
        tool.sample(line)


FORMATS = {"default": "pharos_log_default", "ISO8601": "pharos_log_iso8601", "json": "pharos_log_json"}


@pytest.mark.parametrize("form", FORMATS)
def test_lines_of_the_server_are_events(start, tool, form, tmp_path):
    """Every line has a time, a level and a message. The lines of requests agree with the counters of answers."""
    before, path = time.time(), tmp_path / "server.log"
    server = start([], f"--log-format={form}", f"--log-file={path}", "--log-access", repository=EXAMPLES)
    for _ in range(3):
        assert server.get("/v2/models/unknown")[0] == 400

    def read() -> tuple:
        """Returns the events, and the number of answers with statuses of each class, for example 2 for 200 to 299."""
        events = [tool.log(line, FORMATS[form]) for line in path.read_text().splitlines()]
        answered = [event for event in events if event["message"].startswith("answered")]
        status = [event.get("status") or int(re.search(r" status=(\d+) ", event["message"])[1]) for event in answered]
        return events, collections.Counter(code // 100 for code in status)

    metrics = server.scrape()
    # The scrape is counted after it has read the counters.
    counted = {code: total(metrics, f"Requests{code}XX") for code in (2, 4, 5)}
    expected = collections.Counter(counted | {2: counted[2] + 1})
    with contextlib.suppress(AssertionError):
        eventually("lines and counters agree", lambda: read()[1] == expected)
    events, answers = read()
    assert answers == expected
    assert all(int(before) <= event["timestamp"] <= time.time() + 1 for event in events)
    assert {event["level"] for event in events} <= {"INFO", "WARN", "I", "W"}
    ready = next(event for event in events if event["message"] == "ready")
    if form != "default":
        logger = ready.get("logger") or ready["module"]
        assert logger == "pharos_frontend::start"
    assert ready.get("pid", server.process.pid) == server.process.pid


LAYOUT = {
    "ts_log": "2026-11-20T15:50:37,608 [WARN ] W-9000-a b_1.0-stderr MODEL_LOG - it failed - again",
    "access_log": '2026-11-20T15:50:37,608 - /127.0.0.1:1 "GET /ping HTTP/1.1" 200 3',
}


def test_lines_in_torchserves_layout_are_events(tool):
    event = tool.log(LAYOUT["ts_log"], "pharos_log_torchserve")
    assert event.pop("timestamp") == pytest.approx(1795189837.608)
    expected = {"level": "WARN", "thread": "W-9000-a b_1.0-stderr", "logger": "MODEL_LOG", "message": "it failed - again"}
    assert event == expected
    event = tool.log(LAYOUT["access_log"], "pharos_access_torchserve")
    assert event["message"] == '/127.0.0.1:1 "GET /ping HTTP/1.1" 200 3'
    assert event["timestamp"] == pytest.approx(1795189837.608)


def test_names_in_the_configurations_lead_to_each_other():
    """Inputs of Vector's components exist, parsers of Fluent Bit's inputs too, and no program has a variable for Vector."""
    known = {*VECTOR["sources"], *VECTOR["transforms"], "samples.dropped"}
    for component in [*VECTOR["transforms"].values(), *VECTOR["sinks"].values()]:
        assert set(component["inputs"]) <= known
        # Vector replaces $NAME and ${NAME} in the whole file before it reads it.
        assert not re.search(r"\$[\w{$]", component.get("source", ""))
    inputs = FLUENT_BIT["pipeline"]["inputs"]
    assert {entry["parser"] for entry in inputs} <= set(PARSERS)
    assert (log_pipelines.FOLDER / FLUENT_BIT["service"]["parsers_file"]).is_file()
    listed = re.findall(r"`(pharos_\w+)`", (log_pipelines.FOLDER / "README.md").read_text())
    assert set(listed) == set(PARSERS)


def test_the_documented_expression_is_that_of_the_configurations():
    """Names of groups may differ."""
    (documented,) = re.findall(r"^\^\(\?P<time>.*\$$", (ROOT / "docs/src/metrics/tslog.md").read_text(), re.M)
    assert f"r'{documented}'" in VECTOR["transforms"]["samples"]["source"]
    groups = lambda text: re.sub(r"\(\?P?<\w+>", "(", text)  # noqa: E731
    assert groups(PARSERS["pharos_tslog"]["regex"]) == groups(documented).replace(r"(\d{3}))", r"\d{3})")


def test_json_lines_of_standard_output_have_the_logger(loaded):
    """The lines of both metric logs are on one stream."""
    server = loaded("--metrics-mode=both", "--tslog-format=json", "--tslog-stdout")

    def loggers():
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith('{"MetricName"')]
        return {line["Logger"] for line in lines} == {"TS_METRICS", "MODEL_METRICS"}

    eventually("lines of both loggers", loggers)
