"""Statistics, `/metrics` and the sums over the log lines agree exactly for every counter of a model: with hits and misses of
the response cache, ensembles, iterative sequences, lost instances, and models of one name in two repositories."""

import json
import os
import signal
import statistics
import time
import urllib.parse
from collections import defaultdict
from decimal import Decimal

import numpy as np
import tritonclient.http

from repository_tables import CPU, ensemble, model
from request_table import one
from server import ROOT, Server, eventually, total
from test_iterative import OLDEST, config
from test_metrics_load import worker_model
from test_ragged import write
from test_tslog import lines

CACHED = "response_cache { enable: true }\n"
TAGS = 'metric_tags { key: "team" value: "a,b" }\n'
HITS = 20


def repositories(folder) -> list:
    """`same` in two repositories, ensembles that use it, of which one is cached too, and an iterative model."""
    single = model(extra=CPU, delay_ms=1) + 'backend: "builtin"\n' + CACHED
    write(folder / "a", "same", single + TAGS)
    write(folder / "b", "same", single)
    write(folder / "a", "of_a", ensemble("of_a", "same"))
    write(folder / "a", "cached_of_a", ensemble("cached_of_a", "same") + CACHED)
    write(folder / "b", "of_b", ensemble("of_b", "same"))
    write(folder / "a", "iterative", config(OLDEST, delay=1))
    return [folder / "a", folder / "b"]


def counters(server) -> dict:
    """The counters of models in `/metrics` that are not 0: name and labels -> value."""
    text = server.get("/metrics", server.metrics)[1]
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE") and line.endswith(" counter")}
    found = {}
    for (name, pairs), value in server.scrape().items():
        labels = {(key, label) for key, label in pairs if key.lower() != "hostname"}
        is_of_model = {"model", "model_name"} & {key for key, _ in labels}
        if name in names and is_of_model and not name.endswith("_seconds_total") and value:
            found[name, frozenset(labels)] = value
    return found


def line_sums(server, wanted) -> dict:
    """The exact sums over the lines of the metrics `wanted`: name and labels -> value."""
    sums = defaultdict(Decimal)
    for line in [*lines(server, "ts_metrics"), *lines(server, "model_metrics")]:
        if line["name"] in wanted:
            pairs = (pair.split(":") for pair in line["dims"].split(","))
            labels = frozenset((key, urllib.parse.unquote(label)) for key, label in pairs)
            sums[line["name"], labels] += Decimal(line["value"])
    return {key: float(value) for key, value in sums.items()}


def infer(server, name: str, value: float):
    """One request, which must be answered."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        tensor = tritonclient.http.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
        client.infer(name, [tensor])


def iterate(server, times: int):
    """One request that is executed so many times."""
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

    eventually("the instance is ready again", 30, is_back)


def test_statistics_metrics_and_line_sums_agree(tmp_path):
    """Every counter of a model has the same labels and the same value in `/metrics` and in the sums over its lines."""
    definition = tmp_path / "metrics.yaml"
    shipped = (ROOT / "metrics.yaml").read_text()
    definition.write_text("".join(line for line in shipped.splitlines(True) if line.strip() != "modes: [prometheus]"))
    folders = repositories(tmp_path)
    options = ["--model-namespacing", "--cache-config=local,size=1048576", f"--metrics-config={definition}"]
    with Server(tmp_path, folders, options) as server:
        for name in ("of_a", "cached_of_a", "of_b"):
            infer(server, name, 1)
            for _ in range(HITS):
                infer(server, name, 1)
        infer(server, "of_b", 2)
        iterate(server, 5)
        end_a_worker(server)
        metrics = {}

        def agree():
            metrics.update({"": counters(server)})
            return metrics[""] == line_sums(server, {name for name, _ in metrics[""]})

        try:
            eventually("the lines agree", 10, agree)
        except AssertionError:
            shown = metrics[""]
            assert line_sums(server, {name for name, _ in shown}) == shown
        statistics_agree(server, server.scrape())
        assert total(server.scrape(), "nv_cache_num_hits_per_model") > 3 * HITS


def statistics_agree(server, metrics: dict):
    """The statistics of all models of one name are the metrics of these."""
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
    """Seconds from the answer to a request until its line is in the file."""
    assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    answered, text = time.monotonic(), b""

    def is_there():
        nonlocal text
        text += log.read()
        return b"ts_inference_latency_microseconds" in text

    while not is_there():
        assert time.monotonic() - answered < 10, "the line is not written"
    return time.monotonic() - answered


def test_lines_are_written_soon_after_the_answer(start):
    """Within 5 ms, as the median of some requests shows; a busy machine has several tries."""
    server = start(["identity_fp32"])
    with open(server.logs / "ts_metrics.log", "rb") as log:

        def is_soon():
            log.seek(0, os.SEEK_END)
            return statistics.median(line_delay(server, log) for _ in range(20)) < 0.005

        eventually("lines are written within 5 ms", 30, is_soon)
