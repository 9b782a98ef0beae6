"""`examples/cluster`: three real servers behind a real Envoy, with an S3-compatible store and a Redis. Restarts and a killed server
lose no request that a client may not send again, and sequences stay with their server."""

import http.client
import importlib.util
import json
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from deploy import schemas
from harness import prometheus, redis_server
from harness.dashboards import DASHBOARDS, expressions, load
from harness.ports import free_ports
from harness.prometheus import Prometheus
from harness.server import ROOT, binary
from harness.waiting import DEADLINE_S, eventually, run_for

WHY_NOT = schemas.missing("envoy") or redis_server.missing()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.slow]

spec = importlib.util.spec_from_file_location("cluster", ROOT / "examples/cluster/cluster.py")
cluster_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cluster_module)
PROXY, SERVERS, fetch = cluster_module.PROXY, cluster_module.SERVERS, cluster_module.fetch
SIMPLE = cluster_module.request_of_simple()
SEQUENCES = range(1, 13)
"""Fewer than one server has slots, and so many that some are on another one."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """All processes on free ports."""
    envoy = schemas.home() / "envoy/envoy/_bin/envoy"
    ports = dict(zip(cluster_module.PORTS, free_ports(len(cluster_module.PORTS))))
    with cluster_module.Cluster(tmp_path_factory.mktemp("cluster"), str(binary()), str(envoy), ports) as running:
        yield running


@pytest.fixture
def cluster(processes):
    """The cluster with all servers, even if an earlier test has failed."""
    for at, server in enumerate(processes.servers):
        if server.poll() is not None:
            processes.recover(at)
    return processes


def http_answer(cluster) -> str:
    """Sends one request over HTTP; returns the status, `wrong` for a wrong answer, or the error of the connection."""
    try:
        status, body = fetch(cluster.ports[PROXY], "/v2/models/simple/infer", SIMPLE)
    except (OSError, HTTPException) as error:
        return type(error).__name__
    if status != 200:
        return str(status)
    return "ok" if json.loads(body)["outputs"][0]["data"] == [2] * 16 else "wrong"


def grpc_answer(client) -> str:
    """Sends one request over gRPC; returns the status."""
    tensors = [grpcclient.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in tensors:
        tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
    try:
        answer = client.infer("simple", tensors, client_timeout=DEADLINE_S)
    except InferenceServerException as error:
        return error.status()
    return "ok" if answer.as_numpy("OUTPUT0").tolist() == [[2] * 16] else "wrong"


class Load:
    """Clients that send requests one after the other, four over HTTP and two over gRPC. Use it with `with`."""

    def __init__(self, cluster):
        self.cluster, self.answers = cluster, {"http": Counter(), "grpc": Counter()}
        self.ended, self.lock = threading.Event(), threading.Lock()
        self.threads = [threading.Thread(target=self.send, args=(kind,)) for kind in ["http"] * 4 + ["grpc"] * 2]

    def send(self, kind: str):
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{self.cluster.ports[PROXY]}") if kind == "grpc" else None
        while not self.ended.is_set():
            answer = grpc_answer(client) if client else http_answer(self.cluster)
            with self.lock:
                self.answers[kind][answer] += 1
        if client:
            client.close()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        try:
            eventually("requests are answered", lambda: min(count["ok"] for count in self.answers.values()) > 20)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()


def successes(cluster, at: int) -> float:
    """Returns the number of successful requests of one server since its start."""
    return cluster.metric(at, "nv_inference_request_success", model="simple")


def test_a_rolling_restart_loses_no_request(cluster):
    """Readiness fails before the server stops serving, so Envoy needs no client to send a request again."""
    with Load(cluster) as load:
        for at in range(len(SERVERS)):
            cluster.restart(at)
            eventually(f"server {at} gets requests again", lambda: successes(cluster, at) > 20)
    assert {kind: set(count) for kind, count in load.answers.items()} == {"http": {"ok"}, "grpc": {"ok"}}


def test_a_killed_server_loses_no_request_that_may_not_be_sent_again(cluster):
    """Envoy ejects the server and sends requests again. It cannot do so if the response had begun; then a client can. Without the
    retries of Envoy, at least three requests of each protocol fail before the server is ejected."""
    ejected = cluster.ejections()
    with Load(cluster) as load:
        cluster.kill(1)
        eventually("Envoy has ejected it", lambda: cluster.ejections() > ejected)
        eventually("Envoy sends it no requests", lambda: cluster.healthy() < len(SERVERS))
        before = sum(load.answers["http"].values())
        eventually("the others answer", lambda: sum(load.answers["http"].values()) > before + 100)
        cluster.recover(1)
        eventually("the server gets requests again", lambda: successes(cluster, 1) > 20)
    retryable = {"http": {"ok", "502", "503", "IncompleteRead"}, "grpc": {"ok", "StatusCode.UNAVAILABLE"}}
    for kind, count in load.answers.items():
        assert set(count) <= retryable[kind] and sum(count.values()) - count["ok"] <= 2, count


def add(cluster, sequence: int, value: int, **flags) -> tuple:
    """Sends a value of a sequence over HTTP; returns the status and the sum, or the text of the error."""
    tensor = {"name": "VALUE", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    body = json.dumps({"parameters": {"sequence_id": sequence} | flags, "inputs": [tensor]}).encode()
    headers = {"sequence-id": str(sequence)}
    status, text = fetch(cluster.ports[PROXY], "/v2/models/running_sum/infer", body, headers)
    return status, json.loads(text)["outputs"][0]["data"][0] if status == 200 else text.decode()


def add_over_grpc(cluster, sequence: int, value: int, **flags) -> int:
    """Sends a value of a sequence over gRPC; returns the sum."""
    tensor = grpcclient.InferInput("VALUE", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    with grpcclient.InferenceServerClient(f"127.0.0.1:{cluster.ports[PROXY]}") as client:
        headers = {"sequence-id": str(sequence)}
        answer = client.infer("running_sum", [tensor], headers=headers, sequence_id=sequence, client_timeout=DEADLINE_S, **flags)
    return int(answer.as_numpy("SUM")[0, 0])


START, END = {"sequence_start": True}, {"sequence_end": True}


def active(cluster) -> list:
    """Returns the number of running sequences on each server."""
    return [cluster.metric(at, "pharos_sequences", state="active") for at in range(len(SERVERS))]


def started(cluster) -> dict:
    """Starts sequences; returns the server of each."""
    holders = {}
    for sequence in SEQUENCES:
        before = active(cluster)
        assert add(cluster, sequence, sequence, **START) == (200, sequence)
        (holders[sequence],) = [at for at, (old, new) in enumerate(zip(before, active(cluster))) if new == old + 1]
    return holders


class Adding:
    """A client that adds 1 to sequences by turns. Use it with `with`."""

    def __init__(self, cluster, sequences: list):
        self.cluster, self.sums, self.wrong = cluster, {sequence: sequence for sequence in sequences}, []
        self.ended, self.thread = threading.Event(), threading.Thread(target=self.add)

    def add(self):
        while not self.ended.is_set():
            for sequence in self.sums:
                self.sums[sequence] += 1
                answer = add(self.cluster, sequence, 1)
                if answer != (200, self.sums[sequence]):
                    self.wrong.append((sequence, answer))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def test_sequences_survive_the_restart_of_another_server(cluster):
    """Those of the restarted server continue too while its exit waits for them. New ones then start on another server."""
    holders = started(cluster)
    leaving = Counter(holders.values()).most_common(1)[0][0]
    kept = [sequence for sequence, at in holders.items() if at != leaving]
    left = [sequence for sequence, at in holders.items() if at == leaving]
    assert len(kept) > 2 and len(left) > 2, holders
    with Adding(cluster, kept) as client:
        restart = threading.Thread(target=cluster.restart, args=(leaving,))
        restart.start()
        log = cluster.folder / f"server-{leaving}.log"
        eventually("the server waits for its sequences", lambda: "waiting up to" in log.read_text().rpartition("ready\n")[2])
        last, again = left.pop(), left[0]
        assert [add(cluster, sequence, 1, **END) for sequence in left] == [(200, sequence + 1) for sequence in left]
        # The server still waits for the last one and refuses this one.
        assert add(cluster, again, 5, **START) == (200, 5)
        assert add(cluster, again, 6) == (200, 11)
        assert add_over_grpc(cluster, again, 7, **END) == 18
        assert add_over_grpc(cluster, again, 8, **START) == 8
        assert restart.is_alive() and add(cluster, last, 1, **END) == (200, last + 1)
        restart.join()
        # The server is back and does not have the sequence that began elsewhere.
        assert add_over_grpc(cluster, again, 9) == 17 and add(cluster, again, 10, **END) == (200, 27)
        run_for("requests of the sequences after the restart", 1)
    assert client.wrong == [] and min(client.sums[sequence] - sequence for sequence in kept) > 20
    for sequence in kept:
        assert add(cluster, sequence, 1, **END) == (200, client.sums[sequence] + 1)


def test_sequences_of_a_killed_server_start_again(cluster):
    """They do so on another server, and continue there after the return of the killed one."""
    holders = started(cluster)
    killed = holders[1]
    lost = [sequence for sequence, at in holders.items() if at == killed]
    cluster.kill(killed)
    # The first request may be on a connection that the killed server has closed: 503.
    eventually("the sequence is unknown", lambda: "must specify the START flag" in str(add(cluster, lost[0], 1)[1]))
    for sequence in lost:
        assert add(cluster, sequence, 5, **START) == (200, 5)
        assert add(cluster, sequence, 6) == (200, 11)
    cluster.recover(killed)
    for sequence in set(holders) - set(lost):
        assert add(cluster, sequence, 1, **END) == (200, sequence + 1)
    for sequence in lost:
        assert add(cluster, sequence, 7, **END) == (200, 18)


def test_requests_of_a_sequence_over_grpc_stay_with_their_server(cluster):
    """The header is metadata of the call. Both protocols lead to the same server."""
    for sequence in SEQUENCES:
        assert add(cluster, sequence, 1, **START) == (200, 1)
        assert [add_over_grpc(cluster, sequence, value) for value in range(10)] == [1, 2, 4, 7, 11, 16, 22, 29, 37, 46]
        assert add(cluster, sequence, 1, **END) == (200, 47)


def test_the_servers_share_the_response_cache(cluster):
    """Once a response is stored, which is after its answer, equal requests are not executed, whichever servers get them, unless the
    cache does not answer in time."""
    image = np.random.default_rng(7).uniform(0, 16, 64).round(2).tolist()
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": image}
    body = json.dumps({"inputs": [tensor]}).encode()

    def counts(name: str) -> list:
        return [cluster.metric(at, name, model="digits") for at in range(len(SERVERS))]

    def ask() -> tuple:
        return fetch(cluster.ports[PROXY], "/v2/models/digits/infer", body)

    def stored() -> bool:
        before = sum(counts("nv_cache_num_hits_per_model"))
        return ask()[0] == 200 and sum(counts("nv_cache_num_hits_per_model")) > before

    eventually("the response is stored", stored)
    failures = lambda: sum(cluster.metric(at, "pharos_cache_errors_total") for at in range(len(SERVERS)))  # noqa: E731
    hits, executed, failed = counts("nv_cache_num_hits_per_model"), sum(counts("nv_inference_exec_count")), failures()
    answers = {ask() for _ in range(30)}
    assert len(answers) == 1 and answers.pop()[0] == 200
    found = [new - old for old, new in zip(hits, counts("nv_cache_num_hits_per_model"))]
    again = sum(counts("nv_inference_exec_count")) - executed
    assert again <= failures() - failed
    assert sum(found) == 30 - again and sum(count > 0 for count in found) >= 2


def test_the_proxy_knows_the_load_of_each_server(cluster):
    """The weights of servers come from their load reports; clients over HTTP do not get these."""
    with Load(cluster):

        def weighted() -> bool:
            weights = re.findall(r"(?m)^http::127\.0\.0\.1:\d+::weight::(\d+)$", cluster.admin("/clusters"))
            return len(weights) == len(SERVERS) and all(int(weight) > 1 for weight in weights)

        eventually("each server has a weight", weighted)
        connection = http.client.HTTPConnection("127.0.0.1", cluster.ports[PROXY], timeout=DEADLINE_S)
        connection.request("POST", "/v2/models/simple/infer", SIMPLE)
        assert "endpoint-load-metrics" not in connection.getresponse().headers
        connection.close()


def value(seen: Prometheus, expression: str) -> float:
    """Returns the value of an expression with one result; 0 without one."""
    results = seen.query(expression) if seen.ready() else []
    return float(results[0]["value"][1]) if results else 0.0


SUM = re.compile(r"sum( by \([^)]*\))? ?\((?P<summed>[^()]+|rate\([^()]+\))\)")
"""An expression that is a sum of series or of their rates."""


def by_labels(results: list) -> dict:
    """Returns the values of an instant vector by their labels."""
    return {tuple(sorted(result["metric"].items())): float(result["value"][1]) for result in results}


def check_sums_of_dashboards(seen: Prometheus, addresses: list) -> int:
    """Checks that each sum in a dashboard over all servers is that of the sums of each server at the same time. Returns the number of
    the sums with data."""
    at, checked = time.time(), 0
    # The time of a sample is the start of its scrape: from now on, no scrape adds one before that time between two queries.
    eventually("each server is scraped after this time", lambda: value(seen, "min(timestamp(up))") > at)
    for where, expression in {pair for path in DASHBOARDS for pair in expressions(load(path)) if SUM.fullmatch(pair[1])}:
        assert 'instance=~".*"' in expression, where
        whole = by_labels(seen.ask("query", query=expression, time=at)["result"])
        parts = Counter()
        for address in addresses:
            of_one = expression.replace('instance=~".*"', f'instance="{address}"')
            for labels, found in by_labels(seen.ask("query", query=of_one, time=at)["result"]).items():
                parts[labels] += found
        assert whole == pytest.approx(dict(parts)), where
        checked += bool(whole)
    return checked


@pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())
def test_prometheus_adds_up_the_servers(cluster, tmp_path):
    """It sees each server, and sums over them equal the numbers that the servers have."""
    addresses = [f"127.0.0.1:{cluster.ports[port + 2]}" for port in SERVERS]
    with Load(cluster), Prometheus(tmp_path, *addresses) as seen:
        eventually("it sees all servers", lambda: value(seen, "sum(up)") == len(SERVERS))
        quantile = 'fleet:pharos_request_duration_seconds:p99_5m{model="simple"}'
        eventually("the rule over all servers has a value", lambda: value(seen, quantile) > 0)
        eventually("requests have gone to all", lambda: value(seen, 'count(rate(nv_inference_request_success{model="simple"}[10s]) > 0)') == 3)
        assert check_sums_of_dashboards(seen, addresses) > 30
    # Without load both have the same numbers.
    with Prometheus(tmp_path, *addresses) as seen:
        expected = sum(successes(cluster, at) for at in range(len(SERVERS)))
        eventually("the sums are equal", lambda: value(seen, 'sum(nv_inference_request_success{model="simple"})') == expected)


def test_a_new_version_is_rolled_out_with_a_share(cluster):
    """The share of the canary gets the new version, and the rest the old one, without a failed request."""

    def versions() -> dict:
        return {
            version: sum(cluster.metric(at, "nv_inference_request_success", model="simple", version=version) for at in range(len(SERVERS)))
            for version in ("1", "2")
        }

    with Load(cluster) as load:
        cluster.add_version(2)
    assert {kind: set(count) for kind, count in load.answers.items()} == {"http": {"ok"}, "grpc": {"ok"}}
    for percent, low, high in [(0, 0, 0), (25, 0.15, 0.35), (100, 1, 1), (0, 0, 0)]:
        cluster.set_canary(percent)
        run_for("the new share reaches each thread of Envoy", 0.5)
        before = versions()
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda _: http_answer(cluster), range(400))) == {"ok"}
        grown = {version: count - before[version] for version, count in versions().items()}
        assert sum(grown.values()) == 400 and low <= grown["2"] / 400 <= high, (percent, grown)
