"""After a random load with failures, kills, cancellations and reloaded definitions, the statistics, the metrics as text and in
protobuf, those pushed over OTLP, the sums over the lines of the metric logs and the client's own counts agree exactly.

`PHAROS_SEED` repeats a run; `PHAROS_SOAK_S` sets its duration.
"""

import collections
import concurrent.futures
import contextlib
import json
import math
import os
import random
import signal
import threading
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from harness import metric_families
from harness.connections import connect, post
from harness.inference import one
from harness.models import copy_models
from harness.otlp_collector import HttpCollector
from harness.processes import worker_model
from harness.server import ROOT, alive, total
from harness.waiting import DEADLINE_S, eventually, every, join_all, pause_as_client
from harness.wire import grpc_tensor
from metrics.emitter import emitter
from metrics.log_lines import lines, sums
from metrics.otlp_points import names, normal, samples, summed

SECONDS = int(os.environ.get("PHAROS_SOAK_S", "0")) or 6
SEED = int(os.environ.get("PHAROS_SEED", "0")) or random.randrange(1 << 30)
THREADS = 8
MODELS = ["identity_fp32", "batched", "delay_20_two_instances", "fail", "crash", "queue_timeout", "queue_limit", "delay_200"]
KILLED = {"identity_fp32", "batched", "delay_20_two_instances"}
"""Models whose workers are killed; `crash` crashes by itself."""
RING = {"shop": "0", "ModelName": "emit"}
COUNTED = ("nv_inference_", "ts_", "Orders", *(f"pharos_{name}" for name in ("request_duration", "queue_duration", "compute_", "batch")))
"""Prefixes of counters and histograms of models, which no scrape and no passage of time changes."""


class Client:
    """Sends random requests of every kind and counts the requests and the answers."""

    def __init__(self, server, seed: int):
        self.server, self.random = server, random.Random(seed)
        self.sent = collections.Counter()
        """(protocol) -> requests sent"""
        self.codes = collections.Counter()
        """(protocol, code) -> answers"""
        self.good = collections.Counter()
        """model -> successful answers"""
        self.gone = collections.Counter()
        """model -> abandoned requests"""
        self.calls = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(server.grpc))

    def run(self, end: float):
        """Runs until `end`, by the clock `time.monotonic`."""
        while time.monotonic() < end:
            kind = self.random.choices(["http", "grpc", "malformed", "abandoned"], [10, 6, 3, 1])[0]
            getattr(self, kind)()

    def request(self) -> tuple:
        """Returns an unknown model, or a model with a request for it, which is sometimes invalid."""
        model = self.random.choice([*MODELS[:6], *MODELS[:3], *MODELS, "emit", "emit", "no_such_model"])
        if model == "crash":
            return model, one("UINT8", [1], [int(self.random.random() < 0.1)])
        shape = [1] if model in ("fail", "delay_20_two_instances", "emit") else [1, 1]
        if self.random.random() < 0.1:
            shape = [*shape, 1]
        return model, one("FP32", shape, [1]) | {"id": f"r{self.random.random()}"}

    def http(self):
        """Sends a request over HTTP and reads the answer."""
        model, request = self.request()
        self.answered(model, *self.server.ask("POST", f"/v2/models/{model}/infer", json.dumps(request)))

    def malformed(self):
        """Sends bytes that are not a request."""
        model = self.random.choice(MODELS)
        body = self.random.choice(["{", "[]", '{"inputs": []}', '{"inputs": 1}', ""])
        self.answered(model, *self.server.ask("POST", f"/v2/models/{model}/infer", body))

    def answered(self, model: str, status: int, _body: str):
        """Counts an answer."""
        self.sent["http"] += 1
        self.codes["http", str(status)] += 1
        self.good[model] += status == 200

    def grpc(self):
        """Makes a call over gRPC and reads the answer."""
        model, request = self.request()
        (given,) = request["inputs"]
        contents = {"UINT8": "uint_contents", "FP32": "fp32_contents"}[given["datatype"]]
        tensor = grpc_tensor(given["name"], given["datatype"], given["shape"])
        getattr(tensor.contents, contents).extend(given["data"])
        try:
            self.calls.ModelInfer(pb.ModelInferRequest(model_name=model, inputs=[tensor]), timeout=DEADLINE_S)
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
        self.sent["grpc"] += 1
        self.codes["grpc", code] += 1
        self.good[model] += code == "OK"

    def abandoned(self):
        """Sends a request over HTTP and disconnects after the server has begun to read it: one that no handler has begun to read is
        not counted."""
        body = json.dumps(one("FP32", [1, 1], [1])).encode()
        request = post("/v2/models/delay_200/infer", body, "Expect: 100-continue")
        with connect(self.server.http_port) as connection:
            connection.sendall(request.removesuffix(body))
            assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(body)
            pause_as_client(self.random.random() * 0.1)
        self.sent["http"] += 1
        self.gone["delay_200"] += 1


def disturb(server, definition, end: float, dice):
    """Kills workers and makes the server reload its metrics definition, until `end`."""
    text, new = definition.read_text(), definition.with_suffix(".new")

    def reload(content: str):
        # At once: a server that reads half of a file loses what the other half defines.
        new.write_text(content)
        new.replace(definition)
        server.process.send_signal(signal.SIGHUP)

    for _ in every(0.2, end - 1 - time.monotonic()):
        living = [pid for pid in server.workers() if alive(pid)]
        victims = [pid for pid in living if worker_model(pid) in KILLED]
        if victims:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(dice.choice(victims), signal.SIGKILL)
        extra = f"    - {{name: Extra{dice.randrange(3)}, unit: Count}}\n"
        reload(text + extra)
    reload(text)


@pytest.mark.soak
@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_statistics_metrics_and_clients_agree(start, tmp_path, monkeypatch, temporality):
    """A random load from many clients; afterwards all counts are compared."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "300")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", temporality)
    with HttpCollector() as collector:
        agree(start, tmp_path, collector)


def agree(start, tmp_path, collector):
    """Runs the load and the comparison."""
    print(f"\nPHAROS_SEED={SEED}")
    models = copy_models(tmp_path / "models", MODELS)
    emitter(models, "emit", metrics="counter Orders Count shop", samples=3)
    definition = tmp_path / "metrics.yaml"
    shipped, orders = (ROOT / "metrics.yaml").read_text(), "    - {name: Orders, unit: Count, dimensions: [shop, ModelName]}\n"
    head, counters, tail = shipped.rpartition("  counter:\n")
    assert "  gauge:\n    - name: HandlerTime" in tail
    definition.write_text(f"{head}{counters}{orders}{tail}")
    # The requests that are queued for a crashing model wait for its restarts, whose pauses would otherwise double up to 30 s.
    flags = ["--worker-max-backoff-secs=1", f"--metrics-config={definition}"]
    server = start([], *flags, f"--otlp-metrics-endpoint=http://127.0.0.1:{collector.port}", repository=models)
    end = time.monotonic() + SECONDS
    clients = [Client(server, SEED + n) for n in range(THREADS)]
    disturber = threading.Thread(target=disturb, args=(server, definition, end, random.Random(SEED)), daemon=True)
    disturber.start()
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda client: client.run(end), clients))
    join_all([disturber])
    client = clients[0]
    for other in clients[1:]:
        for name in ("sent", "codes", "good", "gone"):
            getattr(client, name).update(getattr(other, name))
    eventually(
        "every request is answered", lambda: total(server.scrape(), "pharos_requests_total", route="infer") == sum(client.sent.values())
        and total(server.scrape(), "nv_inference_pending_request_count") == 0,
    )  # fmt: skip
    metrics = server.scrape()
    requests_agree(client, metrics)
    entries = json.loads(server.get("/v2/models/stats")[1])["model_stats"]
    assert len(entries) == len(MODELS) + 1
    for entry in entries:
        model_agrees(client, entry, metrics)
    assert total(metrics, "Orders", **RING) == 3 * client.good["emit"]
    assert total(metrics, "pharos_metric_samples_dropped_total") == 0
    assert total(metrics, "pharos_instance_restarts_total") > 0
    eventually("the lines are written", lambda: logs_agree(server, metrics))
    counted = {key: value for key, value in normal(metrics).items() if key[0].startswith(COUNTED) and not key[0].endswith("pending_request_count")}
    assert len(counted) > 500
    protobuf = metric_families.samples(metric_families.scrape(server.metrics))
    assert {key: protobuf.get(key) for key in counted} == counted
    eventually("the exports have the same numbers", lambda: pushed(collector, counted))


def pushed(collector, counted: dict) -> bool:
    """Returns whether the last export, or the sum over all deltas, has these numbers."""
    messages = list(collector.metrics)
    last = messages[-1]
    values = summed(messages) if names(last, delta=True) else normal(samples(last))
    # Sums of deltas are rounded at each export.
    return all(math.isclose(values.get(key, 0), value, rel_tol=1e-9, abs_tol=1e-9) for key, value in counted.items())


def requests_agree(client: Client, metrics: dict):
    """Checks the clients' answers against the server's counts, by protocol and code."""
    given = collections.Counter()
    for (name, pairs), value in metrics.items():
        labels = dict(pairs)
        if name == "pharos_requests_total" and labels["route"] == "infer":
            given[labels["protocol"], labels["code"]] += int(value)
    assert len(client.codes) > 5, client.codes
    more = given - client.codes
    assert not client.codes - given, (client.codes, given)
    assert sum(more.values()) == sum(client.gone.values()), "the rest must be the abandoned requests"
    assert set(more) <= {("http", "200"), ("http", "499")}, more
    good = {code: count for (_, code), count in given.items() if code in ("200", "OK")}
    successes = total(metrics, "nv_inference_request_success")
    # A request that was finished when its client disconnected is a success of the model, but not of the request.
    assert 0 <= successes - sum(good.values()) <= more["http", "499"]


def logs_agree(server, metrics: dict) -> bool:
    """Returns whether the sums over the lines of the metric logs are equal to the counters, for each model."""
    added = sums(lines(server, "ts_metrics"))
    for (name, pairs), value in metrics.items():
        if name.startswith("ts_"):
            labels = dict(pairs)
            dims = f"model_name:{labels['model_name']},model_version:{labels['model_version']}"
            if abs(added.pop((name, dims), 0) - value) > 0.01:
                return False
    models = sums(lines(server, "model_metrics"))
    return sum(value for (name, _), value in models.items() if name == "Orders") == total(metrics, "Orders")


def model_agrees(client: Client, entry: dict, metrics: dict):
    """Compares one model: statistics, Triton's, TorchServe's and our own metrics, and the clients' successful answers."""
    name, stats = entry["name"], entry["inference_stats"]

    def metric(family: str, **more) -> float:
        key = "model_name" if family.startswith("ts_") else "model"
        return total(metrics, family, **{key: name, **more})

    success = stats["success"]["count"]
    assert 0 <= success - client.good[name] <= client.gone[name], name
    exact = {
        "nv_inference_request_success": success,
        "nv_inference_request_failure": stats["fail"]["count"],
        "nv_inference_count": entry["inference_count"],
        "nv_inference_exec_count": entry["execution_count"],
        "nv_inference_pending_request_count": 0,
        "nv_inference_request_duration_us": stats["success"]["ns"] // 1000,
        "ts_inference_latency_microseconds": stats["success"]["ns"] / 1000,
        "ts_queue_latency_microseconds": stats["queue"]["ns"] / 1000,
        "pharos_batch_size_count": entry["execution_count"],
        "pharos_batch_size_sum": sum(s["batch_size"] * s["compute_infer"]["count"] for s in entry["batch_stats"]),
    }
    parts = {"request": "success", "queue": "queue"}
    parts |= {part: part for part in ("compute_input", "compute_infer", "compute_output")}
    for part, of in parts.items():
        exact[f"nv_inference_{part}_duration_us"] = stats[of]["ns"] // 1000
        exact[f"pharos_{part}_duration_seconds_count"] = success
        exact[f"pharos_{part}_duration_seconds_sum"] = stats[of]["ns"] / 1e9
    for family, value in exact.items():
        assert metric(family) == value, (name, family)
    assert metric("ts_inference_requests_total") >= success + stats["fail"]["count"]
    assert metric("pharos_batches_total") >= entry["execution_count"] == sum(
        size["compute_infer"]["count"] for size in entry["batch_stats"]
    )
    if name not in KILLED | {"crash"}:
        assert metric("pharos_batches_total") == entry["execution_count"], name
