"""`prometheus.yaml`, the rules and the Grafana dashboards are well formed and use only existing metrics; a real Prometheus that
scrapes a loaded server returns data for each of their expressions."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from itertools import combinations

import pytest
import tritonclient.grpc

from ensembles.ensemble_tables import Ensemble, chain
from harness import prometheus, text_models
from harness.dashboards import DASHBOARDS, expressions, filled, load, panels
from harness.inference import one, simple
from harness.models import copy_models, write
from harness.ports import free_ports
from harness.prometheus import RULE_TESTS, RULES, Prometheus, promtool
from harness.server import EXAMPLES, ROOT, Server, binary
from harness.waiting import DEADLINE_S, eventually, every
from sequences import iterative_models
from sequences.state_models import TWO, sequences, stateful_model, tensors

COLUMNS = 24
LANGUAGE_MODELS = ROOT / "examples/language_model/models"
LOAD_S = 25
"""The maximum time until an expression has data."""

needs_prometheus = pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())

NOT_SHOWN = {"pharos_llm_adapters_info": "off by default: its labels are for endpoint pickers, and pharos_llm_adapter_requests has the numbers"}
"""Metrics of metrics.yaml that no dashboard shows -> the reason."""

NO_DATA = {
    r"nv_gpu_\w+|nv_energy_consumption|GPU\w+|pharos_gpu_\w+|pharos_worker_gpu_\w+": "there is no GPU on this machine",
    r"pharos_credential_reloads_total": "no certificates and tokens are given",
    r"pharos_metric_series_overflowed_total": "no metric has more series than allowed",
    r"pharos_ensemble_inflight_requests": "no ensemble has max_inflight_requests",
    r"pharos_rate_limiter_\w+": "the rate limiter is off",
    r"pharos_repository_\w+": "no repository is in an object store",
    r"pharos_slo_\w+": "no objectives are given",
    r"pharos_tenant_\w+": "no tenants are distinguished",
    r"pharos_model_(gpu_)?memory_\w+": "no limit of the memory of models is set",
    r"pharos_on_demand_\w+": "no model is loaded on demand",
    r"pharos_model_load_progress_ratio": "no model loads",
    r"pharos_llm_(running_requests|waiting_requests|kv_cache_usage_ratio|kv_cache_tokens|adapter_requests|adapter_slots)": "no engine of language models runs",
    r"pharos_text_\w+": "the backend of text models is not built: make text",
    r"pharos_otlp_\w+": "nothing is pushed to a collector",
    r"pharos_tslog_\w+": "no line was written, skipped or refused",
}
"""Families that may have no series here -> the reason. A family with series must have data in every expression that reads it."""

QUIET = {
    r"pharos_request_failures_total|nv_inference_request_failure": "no such failure happened",
    r"pharos_model_last_load_successful": "no load failed",
    r"pharos_instance_restarts_total": "no worker was lost in the time of this point",
}
"""A filter (`> 0`) on one of these may have an empty result."""


def all_expressions() -> list:
    return [pair for path in DASHBOARDS for pair in expressions(load(path))]


def metric_names(expression: str) -> set:
    """Returns the metrics that a PromQL expression reads."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\boffset\s+\w+", "", text)
    words = re.findall(r"(?<![\w.])([A-Za-z_:][\w:]*)(?!\w)(?!\s*\()", text)
    return {word for word in words if word not in {"and", "or", "unless", "bool", "e"}}


def rule_lines(kind: str) -> list:
    """Returns (name, expression) of the rules of a kind, `record` or `alert`; needs no YAML library."""
    found = []
    for path in RULES:
        for block in re.split(r"(?m)^ +- (?=record:|alert:)", path.read_text())[1:]:
            name = re.match(rf"{kind}: (\S+)", block)
            text = re.search(r"expr: (?:>-\n)?(.*?)(?=\n +(?:for|labels|annotations):|\n +#|\n\n|\Z)", block, re.S)
            if name:
                found.append((name[1], " ".join(text[1].split())))
    return found


def declared() -> list:
    """Returns the names of the metrics in metrics.yaml, in its order."""
    names = re.findall(r"(?m)^ +- name: (\w+)", (ROOT / "metrics.yaml").read_text())
    assert len(names) > 50
    return names


def family(name: str, known) -> str:
    """Returns the metric of a sample name: histograms and summaries have `_bucket`, `_sum` and `_count`."""
    short = re.sub(r"_(bucket|sum|count)$", "", name)
    return short if name not in known and short in known else name


# ---- the files alone --------------------------------------------------------------------------------------------------


def test_names_are_read_from_expressions():
    """Checks `metric_names`, which other tests use."""
    for text, names in [
        ("sum by (job, le) (rate(a_bucket{x=~\"b|c\", y!=\"sum\"}[5m])) / (b:c:d > 0) or vector(0)", {"a_bucket", "b:c:d"}),
        ("histogram_quantile(0.5, sum without (z) (d)) / 1e6 unless e1 offset 1h", {"d", "e1"}),
        ('count(up{job="a}b"} == 1) and on (f) g', {"up", "g"}),
    ]:
        assert metric_names(text) == names, text


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_is_well_formed(path):
    """Unique ids, panels that do not overlap, titles, units, a data source that users can select, and filters that are used."""
    dashboard = load(path)
    every = panels(dashboard)
    assert [n for n, count in Counter(panel["id"] for panel in every).items() if count > 1] == []
    assert dashboard["uid"] == f"pharos-{path.stem}" and dashboard["title"].startswith("Pharos / ")
    for panel in every:
        place = panel["gridPos"]
        assert panel["title"] and place["x"] + place["w"] <= COLUMNS, panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)), panel["title"]
    for one_, other in combinations((panel for panel in every), 2):
        a, b = one_["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one_['title']} overlaps {other['title']}"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) - {"__rate_interval", "__all"}
    assert used == variables


def test_dashboards_have_unique_uids_and_titles():
    """Dashboards exist, and no two have the same uid or title."""
    assert len(DASHBOARDS) >= 6
    for key in ("uid", "title"):
        assert len({load(path)[key] for path in DASHBOARDS}) == len(DASHBOARDS)


def test_only_existing_metrics_are_used():
    """Every name in dashboards and rules is in metrics.yaml, is recorded by a rule, or belongs to Prometheus."""
    known = set(declared()) | {name for name, _ in rule_lines("record")}
    known |= {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
    uses = all_expressions() + rule_lines("record") + rule_lines("alert")
    unknown = {
        f"{where}: {name}" for where, expression in uses for name in metric_names(expression) if family(name, known) not in known
    }
    assert unknown == set()


def test_every_metric_is_shown():
    """Every metric is on a dashboard, except for those in NOT_SHOWN."""
    names = declared()
    shown = {family(name, names) for _, expression in all_expressions() for name in metric_names(expression)}
    assert set(names) - shown == set(NOT_SHOWN), "on no dashboard, or in NOT_SHOWN although on a dashboard"


@needs_prometheus
def test_promtool_accepts_the_configuration_and_the_rules():
    """Runs `promtool check config` on prometheus.yaml, which also checks the rules that it names."""
    result = promtool("check", "config", ROOT / "prometheus.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(RULES)} rule files found" in result.stdout


@needs_prometheus
def test_promtool_finds_nothing_in_the_names_of_this_server():
    """`promtool check metrics` accepts every metric `pharos_*` of the definition: base units, suffixes, help."""
    listed = subprocess.run([binary(), "metrics", "list", "--format", "json"], capture_output=True, check=True, timeout=DEADLINE_S)
    own = [metric for metric in json.loads(listed.stdout) if metric["name"].startswith("pharos_")]
    assert len(own) > 60
    checked = promtool("check", "metrics", text="".join(map(one_series, own)))
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    # The check does find a name against the convention.
    bad = promtool("check", "metrics", text="# HELP pharos_a_us A\n# TYPE pharos_a_us counter\npharos_a_us 0\n")
    assert "pharos_a_us" in bad.stdout + bad.stderr


def one_series(metric: dict) -> str:
    """Returns the text format of a metric with one series at 0."""
    name, kind = metric["name"], metric["type"]
    labels = "".join(f'{label}="x",' for label in metric["dimensions"])
    series = f"{{{labels.rstrip(',')}}}" if labels else ""
    samples = [f"{name}{series} 0"]
    if kind == "histogram":
        samples = [f'{name}_bucket{{{labels}le="+Inf"}} 0', f"{name}_sum{series} 0", f"{name}_count{series} 0"]
    return "\n".join([f"# HELP {name} {metric['help']}", f"# TYPE {name} {kind}", *samples, ""])


@needs_prometheus
def test_promtool_tests_of_the_rules_pass():
    """Runs `promtool test rules`: percentiles, ratios, and each alert with and without its cause."""
    result = promtool("test", "rules", *RULE_TESTS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test():
    """A test expects each alert to fire."""
    text = "".join(path.read_text() for path in RULE_TESTS)
    alerts = [name for name, _ in rule_lines("alert")]
    assert len(alerts) >= 15
    assert [name for name in alerts if f'alertname="{name}"' not in text] == []


# ---- a real Prometheus at a loaded server -----------------------------------------------------------------------------


class Load:
    """Sends valid, invalid and refused requests over HTTP and gRPC, and StatsD datagrams, until it is stopped."""

    def __init__(self, server, statsd: str):
        self.server, self.statsd, self.over, self.begun = server, statsd, threading.Event(), 0
        steps = (self.good, self.bad, self.grpc, self.datagrams, self.sequences, self.stream, self.tokens)
        self.threads = [threading.Thread(target=self.repeat, args=(step,)) for step in steps]
        self.threads += [threading.Thread(target=self.repeat, args=(self.full,)) for _ in range(6)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()

    def repeat(self, step):
        while not self.over.is_set():
            try:
                step()
            except (OSError, ValueError, tritonclient.grpc.InferenceServerException):
                pass
            self.over.wait(0.05)

    def good(self):
        self.server.infer("simple", simple())
        # A miss, a hit, an entry that evicts the first, and one that does not fit.
        for numbers in ([1] * 4, [1] * 4, [2] * 4, [3] * 64):
            self.server.infer("identity_fp32", one("FP32", [1, len(numbers)], numbers))
        picture = {"name": "picture", "datatype": "UINT8", "shape": [1, 64, 64], "data": [255] * 4096}
        self.server.infer("digits_pipeline", {"inputs": [picture]})

    def bad(self):
        self.server.ask("POST", "/v2/models/simple/infer", "{")
        self.server.infer("fail", one("FP32", [4], [1, 2, 3, 4]))

    def sequences(self):
        # Each sequence starts and ends only by its idle timeout; the last request belongs to no sequence.
        self.begun += 1
        tensor = {"name": "X", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
        for parameters in ({"sequence_id": self.begun, "sequence_start": True}, {"sequence_id": 10**9}):
            self.server.infer("sums", {"inputs": [tensor], "parameters": parameters})

    def stream(self):
        self.server.ask("POST", "/v2/models/stream/generate_stream", '{"COUNT":3}')

    def tokens(self):
        body = {"model": "words", "prompt": "one two three", "stream": True, "vllm_xargs": {"delay_ms": 1}}
        self.server.ask("POST", "/v1/completions", json.dumps(body))
        # Two lengths, which are computed together; the longer one is cut off.
        body = {"model": "vectors", "inputs": ["a b c d", "a " * 100], "truncate": True}
        self.server.ask("POST", "/embed", json.dumps(body))

    def full(self):
        self.server.infer("queue_limit", one("FP32", [1, 1], [1]))

    def datagrams(self):
        host, port = self.statsd.split(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"nothing that StatsD knows", (host, int(port)))

    def grpc(self):
        with tritonclient.grpc.InferenceServerClient(self.server.grpc) as client:
            client.is_server_live()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """Starts a loaded server and a Prometheus that scrapes it; ends the load after the module."""
    folder = tmp_path_factory.mktemp("prometheus")
    models = copy_models(folder / "models", ["identity_fp32", "fail", "queue_limit"])
    write(models, "sums", stateful_model("accumulate") + sequences(TWO, "max_sequence_idle_microseconds: 300000") + tensors("2"))
    write(models, "stream", iterative_models.MODELS["stream"])
    if text_models.PROGRAM.is_file():
        text_models.TextModel(models / "vectors/1").sentence_transformer()
    limited = Ensemble("limited", ("  max_inflight_requests: 4\n", *chain("identity_fp32")))
    write(models, limited.name, limited.configuration())
    cached = models / "identity_fp32" / "config.pbtxt"
    cached.write_text(cached.read_text() + "response_cache { enable: true }\n")
    statsd = f"127.0.0.1:{free_ports(1)[0]}"
    # The cache has room for one response: each new one evicts the last, and a large one does not fit.
    cache = "--cache-config=local,size=700"
    options = ["--metrics-config=summary_latencies=true", f"--statsd-address={statsd}", cache]
    with (
        Server(folder, [EXAMPLES, LANGUAGE_MODELS, models], options) as server,
        Load(server, statsd),
        Prometheus(folder, server.metrics) as running,
    ):
        eventually("Prometheus has scraped the server", running.ready)
        running.started = time.time()
        os.kill(next(iter(server.workers())), signal.SIGKILL)
        server.process.send_signal(signal.SIGHUP)
        eventually("the restart is scraped", lambda: running.query("pharos_instance_restarts_total > 0"))
        yield running


def has_data(running, expression: str) -> bool:
    """Returns whether the expression has a numeric sample at any second since the start."""
    end = time.time()
    answer = running.ask("query_range", query=expression, start=running.started, end=end, step=1)
    return any(value != "NaN" for series in answer["result"] for _, value in series["values"])


def excuse(running, expression: str) -> str:
    """Returns why an expression may have no data here, depending on the metrics that it reads; empty if it must have data."""
    names = declared()
    for name in metric_names(expression):
        for pattern, reason in NO_DATA.items():
            if re.fullmatch(pattern, family(name, names)) and not running.query(name):
                return reason
        for pattern, reason in QUIET.items():
            if re.fullmatch(pattern, name) and re.search(r"> 0\s*$", expression):
                return reason
    return ""


def answered(running, pairs: list) -> tuple:
    """Waits until each (location, expression) has data or an excuse; returns the excused ones and those without either."""
    waiting = dict.fromkeys(pairs)
    for _ in every(1, LOAD_S):
        waiting = {pair: None for pair in waiting if not has_data(running, pair[1])}
        excused = {pair: excuse(running, pair[1]) for pair in waiting}
        if all(excused.values()):
            return excused, []
    excused = {pair: excuse(running, pair[1]) for pair in waiting}
    return excused, [pair for pair, reason in excused.items() if not reason]


def report(capsys, title: str, count: int, excused: dict):
    """Prints the expressions without data and the reasons."""
    with capsys.disabled():
        print(f"\n{title}: {count - len(excused)} of {count} expressions have data; the others, and why:")
        for (where, _), reason in sorted(excused.items()):
            print(f"  {where}: {reason}")


@needs_prometheus
def test_every_panel_has_data(scraped, capsys):
    """Sends each expression of each dashboard to Prometheus, as Grafana would."""
    pairs = all_expressions()
    excused, empty = answered(scraped, pairs)
    report(capsys, "dashboards", len(pairs), excused)
    assert empty == []


@needs_prometheus
def test_every_variable_has_values(scraped):
    """The dashboards' variables have values to select from."""
    for path in DASHBOARDS:
        for variable in load(path)["templating"]["list"]:
            if variable["type"] != "query":
                continue
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            values = scraped.ask(f"label/{label}/values", **{"match[]": filled(selector)})
            without_data = any(re.fullmatch(pattern, name) for pattern in NO_DATA for name in metric_names(selector))
            assert values or label == "gpu_uuid" or without_data, f"{path.stem}: {variable['name']}"


@needs_prometheus
def test_every_rule_works(scraped, capsys):
    """Recording rules have recorded; alerts are evaluated without an error, and their metrics exist."""
    groups = eventually(
        "all rules are evaluated",
        lambda: (groups := scraped.ask("rules")["groups"])
        and all(rule["health"] != "unknown" for group in groups for rule in group["rules"])
        and groups,
    )
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    assert {rule["name"] for rule in rules} == {name for kind in ("record", "alert") for name, _ in rule_lines(kind)}
    pairs = [(rule["name"], rule["name"]) for rule in rules if rule["type"] == "recording"]
    alerts = [rule for rule in rules if rule["type"] == "alerting"]
    pairs += [(rule["name"], name) for rule in alerts for name in metric_names(rule["query"])]
    excused, empty = answered(scraped, pairs)
    report(capsys, "rules", len(pairs), excused)
    assert empty == []
