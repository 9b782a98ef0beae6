"""Statistics, `/metrics` and the sums over the log lines agree exactly for every counter: with hits and misses of the response
cache, ensembles, iterative sequences, lost instances, reloaded definitions, models of one name in two repositories,
`metric_tags`, and TorchServe's names."""

import json
import os
import signal
import statistics
import time
import urllib.parse
from collections import defaultdict
from decimal import Decimal

import numpy as np
import pytest
import tritonclient.http

from harness.inference import one
from harness.models import write
from harness.processes import worker_model
from harness.server import ROOT, Server, samples, total
from harness.waiting import DEADLINE_S, eventually
from metrics.log_lines import lines
from repository.repository_tables import CPU, ensemble, model
from sequences.iterative_models import OLDEST, config
from torchserve.home import Home, has_worker

CACHED = "response_cache { enable: true }\n"
TAGS = 'metric_tags { key: "team" value: "a,b" }\n'
HITS = 20


def repositories(folder) -> list:
    """Writes `same` in two repositories, ensembles that use it, one of them cached too, and an iterative model."""
    single = model(extra=CPU, delay_ms=1) + 'backend: "builtin"\n' + CACHED
    write(folder / "a", "same", single + TAGS)
    write(folder / "b", "same", single)
    write(folder / "a", "of_a", ensemble("of_a", "same"))
    write(folder / "a", "cached_of_a", ensemble("cached_of_a", "same") + CACHED)
    write(folder / "b", "of_b", ensemble("of_b", "same"))
    write(folder / "a", "iterative", config(OLDEST, delay=1))
    return [folder / "a", folder / "b"]


def counters(text: str) -> dict:
    """Returns the non-zero counters of a scrape: name and labels -> value. Excludes counters that change without requests: CPU
    time, and the own counters of the metric logs and the metrics listener."""
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE") and line.endswith(" counter")}
    changing = ("pharos_tslog_", "pharos_connections_")
    found = {}
    for (name, pairs), value in samples(text).items():
        labels = {(key, label) for key, label in pairs if key.lower() != "hostname"}
        if name in names and not name.endswith("_seconds_total") and not name.startswith(changing) and value:
            found[name, frozenset(labels)] = value
    return found


def scraped(server) -> dict:
    """Returns the counters that Prometheus scrapes."""
    return counters(server.get("/metrics", server.metrics)[1])


def line_sums(server, wanted) -> dict:
    """Returns the exact sums over the lines of the metrics `wanted`: name and labels -> value."""
    sums = defaultdict(Decimal)
    for line in [*lines(server, "ts_metrics"), *lines(server, "model_metrics")]:
        if line["name"] in wanted:
            pairs = (pair.split(":") for pair in line["dims"].split(",") if pair)
            labels = frozenset((key, urllib.parse.unquote(label)) for key, label in pairs)
            sums[line["name"], labels] += Decimal(line["value"])
    return {key: float(value) for key, value in sums.items()}


def infer(server, name: str, value: float):
    """Sends one request, which must succeed."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        tensor = tritonclient.http.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
        client.infer(name, [tensor])


def iterate(server, times: int):
    """Sends one request that is executed this many times."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        tensor = tritonclient.http.InferInput("COUNT", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.full((1, 1), times, np.int32))
        client.infer("iterative", [tensor])


def end_a_worker(server) -> None:
    """Kills an instance of one of the models `same`; waits until both are ready again."""
    victim = next(pid for pid in server.workers() if worker_model(pid).rsplit("_", 1)[0].endswith("same"))
    os.kill(victim, signal.SIGKILL)

    def is_back():
        now = server.scrape()
        ready = [total(now, "pharos_instances", state="ready", model=entry) for entry in names(now)]
        return total(now, "pharos_instance_restarts_total") == 1 and ready == [1, 1]

    def names(now: dict) -> set:
        models = {dict(pairs).get("model", "") for name, pairs in now if name == "pharos_instances"}
        return {model for model in models if model.endswith("/same")}

    eventually("the instance is ready again", is_back)


def everywhere(folder):
    """Writes a definition of the metrics with every counter in the logs too, and with summaries."""
    definition = folder / "metrics.yaml"
    shipped = (ROOT / "metrics.yaml").read_text()
    lines_of = (line for line in shipped.splitlines(True) if line.strip() != "modes: [prometheus]")
    definition.write_text("".join(line.replace("enabled: false", "enabled: true") for line in lines_of))
    return definition


def reload(server, definition, times: int):
    """Changes the definition and makes the server reload it, this many times."""
    text = definition.read_text()
    for at in range(times):
        head, counters, rest = text.rpartition("  counter:\n")
        definition.write_text(f"{head}{counters}    - {{name: Extra{at}, unit: Count}}\n{rest}")
        before = reloads(server)
        server.process.send_signal(signal.SIGHUP)
        eventually("the definition is reloaded", lambda before=before: reloads(server) > before)


def reloads(server) -> float:
    """Returns the number of reloads."""
    return total(server.scrape(), "pharos_metrics_reloads_total")


def lines_agree(scrape, server):
    """Waits until the sums over the lines equal the counters that `scrape` returns."""
    metrics = {}

    def agree():
        metrics.update({"": scrape()})
        return metrics[""] == line_sums(server, {name for name, _ in metrics[""]})

    try:
        eventually("the lines agree", agree)
    except AssertionError:
        shown = metrics[""]
        assert line_sums(server, {name for name, _ in shown}) == shown
    return metrics[""]


def test_statistics_metrics_and_line_sums_agree(tmp_path):
    """Every counter has the same labels and the same value in `/metrics` and in the sums over its lines."""
    definition = everywhere(tmp_path)
    folders = repositories(tmp_path)
    options = ["--model-namespacing", "--cache-config=local,size=1048576", f"--metrics-config={definition}"]
    with Server(tmp_path, folders, options) as server:
        for name in ("of_a", "cached_of_a", "of_b"):
            infer(server, name, 1)
            for _ in range(HITS):
                infer(server, name, 1)
        reload(server, definition, 3)
        infer(server, "of_b", 2)
        iterate(server, 5)
        end_a_worker(server)
        infer(server, "of_b", 3)
        metrics = lines_agree(lambda: scraped(server), server)
        model_names_follow_one_rule(metrics, folders)
        statistics_agree(server, server.scrape())
        assert total(server.scrape(), "nv_cache_num_hits_per_model") > 3 * HITS


def model_names_follow_one_rule(metrics: dict, folders: list):
    """With namespaces: the bare name and the label `namespace` in Triton's and TorchServe's families, else the full name."""
    spaces = {str(folder) for folder in folders}
    rules = {"tagged": 0, "full": 0}
    for name, pairs in metrics:
        labels = dict(pairs)
        model = labels.get("model", labels.get("model_name"))
        if model is None or name.startswith("pharos_ensemble"):
            continue
        if name.startswith(("nv_", "ts_")):
            assert "/" not in model and labels["namespace"] in spaces, (name, labels)
            rules["tagged"] += 1
        else:
            assert model.rpartition("/")[0] in spaces and "namespace" not in labels, (name, labels)
            rules["full"] += 1
    assert min(rules.values()) > 3, rules


def test_families_come_in_the_order_of_the_definition(tmp_path):
    """Including those that prometheus-client cannot encode: summaries, and histograms with exemplars."""
    definition = everywhere(tmp_path)
    shipped = [line.split()[-1] for line in definition.read_text().splitlines() if line.strip().startswith("- name: ")]
    write(tmp_path / "models", "same", model(extra=CPU) + 'backend: "builtin"\n')
    with Server(tmp_path, [tmp_path / "models"], [f"--metrics-config={definition}"]) as server:
        infer(server, "same", 1)
        eventually("a worker's metric", lambda: total(server.scrape(), "HandlerTime") > 0)
        trace = {"traceparent": f"00-{'4bf92f3577b34da6' * 2}-00f067aa0ba902b7-01"}
        request = json.dumps(one("FP32", [1, 1], [1]))
        assert server.ask("POST", "/v2/models/same/infer", request, headers=trace)[0] == 200
        for accept in ("text/plain", "application/openmetrics-text"):
            text = server.get("/metrics", server.metrics, {"accept": accept})[1]
            names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
            # In OpenMetrics a counter's family is its sample's name without `_total`.
            names = [name if name in shipped else f"{name}_total" for name in names]
            assert names == sorted(names, key=shipped.index), accept
            assert {"nv_inference_request_summary_us", "HandlerTime"} <= set(names)


@pytest.mark.skipif(not has_worker, reason="there is no Python with the package pharos-worker: make python-worker")
def test_the_views_of_torchserve_agree(tmp_path):
    """Requests counted by client-visible names: TorchServe's scrape, the sums over its lines and the statistics agree, with
    versions by name and by default, reloaded definitions and a killed worker."""
    definition = everywhere(tmp_path)
    options = [f"metrics_config={definition}", "load_models=mortal-1.0.mar"]
    home = Home(tmp_path, options, ("--disable-token-auth", "--enable-model-api"))
    home.command += ["--metrics-mode=both"]
    home.archive("mortal", "mortal", f"ill: {tmp_path / 'ill'}\n")
    home.logs = tmp_path / "logs"
    scrape = lambda: home.ask("GET", "/metrics", port=home.metrics)[2].decode().replace(",}", "}")  # noqa: E731
    home.scrape = lambda: samples(scrape())
    with home:
        answers = lambda path="": home.predict("mortal", b"x", path=path)[0] == 200  # noqa: E731
        eventually("mortal answers", answers)
        assert answers("/1.0") and answers("/1.0")
        reload(home, definition, 2)
        home.predict("mortal", b"die")
        eventually("mortal answers again", answers)
        assert home.predict("absent", b"x")[0] == 404
        metrics = lines_agree(lambda: counters(scrape()), home)
        by_version = {dict(pairs)["model_version"]: value for (name, pairs), value in metrics.items() if name == "ts_inference_requests_total"}
        assert by_version["1.0"] == 2 and by_version.keys() == {"1.0", "default"}, by_version
        (entry,) = json.loads(home.ask("GET", "/v2/models/mortal/stats")[2])["model_stats"]
        stats = entry["inference_stats"]
        assert total(home.scrape(), "nv_inference_request_success") == stats["success"]["count"] > 3
        for family, part in (("inference", "success"), ("queue", "queue")):
            shown = total(home.scrape(), f"ts_{family}_latency_microseconds")
            assert round(shown * 1000) == stats[part]["ns"], family


def statistics_agree(server, metrics: dict):
    """Checks that the statistics of all models of one name are equal to their metrics."""
    entries = json.loads(server.get("/v2/models/stats")[1])["model_stats"]
    names = {entry["name"].rpartition("/")[2] for entry in entries}
    assert names == {"same", "of_a", "cached_of_a", "of_b", "iterative"}
    for name in names:
        stats = [entry["inference_stats"] for entry in entries if entry["name"].rpartition("/")[2] == name]

        def value(family: str, label: str) -> Decimal:
            return sum(Decimal(str(v)) for (n, pairs), v in metrics.items() if n == family and (label, name) in pairs)

        def ns(part: str) -> int:
            return sum(entry[part]["ns"] for entry in stats)

        def count(part: str) -> int:
            return sum(entry[part]["count"] for entry in stats)

        assert value("ts_inference_latency_microseconds", "model_name") * 1000 == ns("success"), name
        assert value("ts_queue_latency_microseconds", "model_name") * 1000 == ns("queue"), name
        assert value("nv_inference_request_success", "model") == count("success") > 0, name
        assert value("nv_cache_num_hits_per_model", "model") == count("cache_hit"), name
        assert value("nv_cache_num_misses_per_model", "model") == count("cache_miss"), name


def line_delay(server, log) -> float:
    """Returns the seconds from the answer to a request until its line is in the file."""
    assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    answered, text = time.monotonic(), b""

    def is_there():
        nonlocal text
        text += log.read()
        return b"ts_inference_latency_microseconds" in text

    while not is_there():
        assert time.monotonic() - answered < DEADLINE_S, "the line is not written"
    return time.monotonic() - answered


@pytest.mark.alone
def test_lines_are_written_soon_after_the_answer(start):
    """Within 5 ms in the median of many requests, about half of which are usual."""
    server = start(["identity_fp32"])
    with open(server.logs / "ts_metrics.log", "rb") as log:
        log.seek(0, os.SEEK_END)
        assert statistics.median(line_delay(server, log) for _ in range(150)) < 0.005
