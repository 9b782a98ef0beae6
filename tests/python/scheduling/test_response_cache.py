"""The response cache: which requests are equal, the counters, the eviction, and that no failure of a cache ever changes or delays
an answer."""

import concurrent.futures
import http.client
import json
import re
import subprocess
import time

import numpy
import pytest
import tritonclient.grpc
import tritonclient.http

from harness import redis_server
from harness.certificates import Files
from harness.inference import one, simple
from harness.ports import free_ports
from harness.processes import held
from harness.redis_server import NoRedis, Redis
from harness.server import EXAMPLES, MODELS, Server, binary, total
from harness.statistics import dispatched, received, until_received
from harness.waiting import DEADLINE_S, eventually, holds_for, pause_as_client

needs_redis = pytest.mark.skipif(bool(redis_server.missing()), reason=redis_server.missing())
LOCAL = "--cache-config=local,size=1048576"
STAGES = ("compute_input", "compute_infer", "compute_output")


def repository(folder, *models, batching="dynamic_batching { }"):
    """Writes a repository of `models` (of the tests and examples) with the cache enabled; returns its folder."""
    folder.mkdir(exist_ok=True)
    for model in models:
        source = EXAMPLES / model if (EXAMPLES / model).exists() else MODELS / model
        (folder / model / "1").mkdir(parents=True)
        text = (source / "config.pbtxt").read_text()
        text = text.replace("dynamic_batching { }", batching)
        (folder / model / "config.pbtxt").write_text(f"{text}\nresponse_cache {{ enable: true }}\n")
    return folder


@pytest.fixture
def cached(start, tmp_path):
    """Starts a server with models that use the cache: `cached(["model", ...], *options)`."""

    def begin(names, *options, **changes):
        folder = repository(tmp_path / f"cached-{len(list(tmp_path.iterdir()))}", *names, **changes)
        return start(names, *(options or (LOCAL,)), repository=folder)

    return begin


def counts(server, model: str) -> dict:
    """Returns the counts of the statistics: successes, hits, misses, inferences, executions, failures."""
    entry = server.statistics(model)
    of = {key: entry["inference_stats"][key]["count"] for key in ("success", "cache_hit", "cache_miss", "fail")}
    return {**of, "inferences": entry["inference_count"], "executions": entry["execution_count"]}


def hits(server, model: str) -> tuple:
    """Returns (hits, misses)."""
    counted = counts(server, model)
    return counted["cache_hit"], counted["cache_miss"]


def answer(server, model: str, request: dict):
    """Sends a request, which must succeed, and returns the answer."""
    status, got = server.infer(model, request)
    assert status == 200, got
    return got


def at_once(server, model: str, requests: list) -> list:
    """Sends all requests concurrently; returns the answers in the order of the requests."""
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: server.infer(model, request), requests))


def test_hits_and_misses_are_counted(cached):
    """As in the specification (4.5): a hit is a success without an inference, a miss is one with an additional cost."""
    server = cached(["simple"], LOCAL, "--metrics-config=summary_latencies=true")
    for n in range(5):
        got = answer(server, "simple", simple(id=f"r{n}"))
        assert got["id"] == f"r{n}", "the id is that of the request"
        assert got["outputs"][0]["data"] == [n + 1 for n in range(16)]
    expected = {"success": 5, "cache_hit": 4, "cache_miss": 1, "fail": 0, "inferences": 1, "executions": 1}
    assert counts(server, "simple") == expected
    stats = server.statistics("simple")["inference_stats"]
    assert stats["queue"]["count"] == 5
    assert all(stats[stage]["count"] == 1 for stage in STAGES)
    assert stats["success"]["ns"] > stats["cache_hit"]["ns"] + stats["cache_miss"]["ns"] > stats["cache_miss"]["ns"] > 0
    metrics = server.scrape()
    for name, value in {
        "nv_inference_request_success": 5,
        "nv_inference_count": 1,
        "nv_inference_exec_count": 1,
        "nv_cache_num_hits_per_model": 4,
        "nv_cache_num_misses_per_model": 1,
        "nv_cache_hit_duration_per_model": stats["cache_hit"]["ns"] // 1000,
        "nv_cache_miss_duration_per_model": stats["cache_miss"]["ns"] // 1000,
        "nv_cache_hit_summary_per_model_count": 4,
        "nv_cache_miss_summary_per_model_count": 1,
        "nv_inference_queue_summary_us_count": 5,
        "nv_inference_compute_infer_summary_us_count": 1,
        "pharos_request_duration_seconds_count": 5,
        "pharos_compute_infer_duration_seconds_count": 1,
    }.items():
        assert total(metrics, name, model="simple") == value, name
    assert not any(name.startswith("nv_inference_request_summary_us") for name, _ in metrics)
    assert metrics["pharos_cache_entries", ()] == 1 and metrics["pharos_cache_bytes", ()] > 128


def test_grpc_shares_with_http(cached):
    """Equal requests over both protocols, in JSON and binary, are executed once; gRPC's statistics count them too."""
    server = cached(["simple"])
    answer(server, "simple", simple())
    for client in (tritonclient.http, tritonclient.grpc):
        inputs = [client.InferInput(f"INPUT{n}", [1, 16], "INT32") for n in range(2)]
        for tensor, value in zip(inputs, (numpy.arange(16), numpy.ones(16))):
            tensor.set_data_from_numpy(value.astype(numpy.int32).reshape(1, 16))
        address = server.http if client is tritonclient.http else server.grpc
        with client.InferenceServerClient(address) as connection:
            result = connection.infer("simple", inputs, request_id="mine")
            assert result.as_numpy("OUTPUT0").tolist() == [list(range(1, 17))]
            if client is tritonclient.grpc:
                assert result.get_response().id == "mine"
                stats = connection.get_inference_statistics("simple").model_stats[0].inference_stats
                assert (stats.cache_hit.count, stats.cache_miss.count) == (2, 1)
    assert hits(server, "simple") == (2, 1)


def test_different_requests_do_not_hit(cached):
    """Each of these requests has or could have a different answer; Triton treats most of them as equal."""
    server = cached(["simple", "identity_fp32"])
    both = answer(server, "simple", simple())
    one_output = answer(server, "simple", simple(outputs=[{"name": "OUTPUT1"}]))
    assert [output["name"] for output in both["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert [output["name"] for output in one_output["outputs"]] == ["OUTPUT1"]
    answer(server, "simple", simple(parameters={"key": 1}))
    answer(server, "simple", simple(parameters={"key": 2}))
    answer(server, "simple", simple(parameters={"key": "2"}))
    assert hits(server, "simple") == (0, 5)
    shapes = [[1, 4], [2, 2], [4, 1]]
    for shape in shapes * 2:
        assert answer(server, "identity_fp32", one("FP32", shape, [1, 2, 3, 4]))["outputs"][0]["shape"] == shape
    assert hits(server, "identity_fp32") == (3, 3)


def test_irrelevant_differences_hit(cached):
    """The order of inputs, outputs and parameters, the id, the outputs' encoding, the priority and the timeout are irrelevant."""
    server = cached(["simple"])
    names = [{"name": "OUTPUT0"}, {"name": "OUTPUT1"}]
    base = simple(outputs=names, parameters={"a": 1, "b": 2})
    turned = {"inputs": base["inputs"][::-1], "outputs": names[::-1], "parameters": {"b": 2, "a": 1}}
    others = [{**base, "parameters": {"a": 1, "b": 2, **more}} for more in ({"timeout": 9_000_000}, {"priority": 1})]
    for request in (base, turned, {**base, "id": "x"}, *others):
        got = answer(server, "simple", request)
        assert [output["name"] for output in got["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    binary_output = [{"name": name, "parameters": {"binary_data": True}} for name in ("OUTPUT0", "OUTPUT1")]
    assert server.ask("POST", "/v2/models/simple/infer", json.dumps({**base, "outputs": binary_output}))[0] == 200
    assert hits(server, "simple") == (5, 1)


def test_without_a_cache_the_model_works(cached, start, tmp_path):
    """A model may enable a cache that the server does not have; a server may have a cache that no model enables."""
    server = cached(["simple"], "--log-info=true")
    for running in (server, start(["identity_fp32"], LOCAL)):
        model = "simple" if running is server else "identity_fp32"
        for _ in range(3):
            answer(running, model, simple() if model == "simple" else one("FP32", [1, 1], [1]))
        assert counts(running, model)["executions"] == 3 and hits(running, model) == (0, 0)
        assert not any(name.startswith("nv_cache") for name, _ in running.scrape())
    assert "but --cache-config is not set" in server.log_tail()


def test_the_least_recently_used_entries_are_evicted(cached):
    """With space for few entries, the most recently used ones stay; an entry larger than the cache is not stored."""
    server = cached(["identity_fp32"], "--cache-config=local,size=2000")

    def ask(number, count=4):
        return answer(server, "identity_fp32", one("FP32", [1, count], [number] * count))

    for number in (1, 2, 3):
        ask(number)
    metrics = server.scrape()
    assert metrics["pharos_cache_entries", ()] == 3 and metrics["pharos_cache_evictions_total", ()] == 0
    assert metrics["pharos_cache_bytes", ()] <= 2000
    ask(1)
    ask(4)
    assert hits(server, "identity_fp32") == (1, 4)
    ask(1)
    assert hits(server, "identity_fp32") == (2, 4), "1 was used after 2 and 3"
    ask(2)
    assert hits(server, "identity_fp32") == (2, 5), "2 was evicted"
    for _ in range(2):
        ask(5, 1000)
    assert hits(server, "identity_fp32") == (2, 7), "4,000 bytes do not fit"
    metrics = server.scrape()
    assert metrics["pharos_cache_entries", ()] == 3 and metrics["pharos_cache_evictions_total", ()] == 2
    assert total(metrics, "pharos_cache_errors_total", reason="too_large") == 2
    assert "larger than the cache" in server.log_tail()


def test_failures_are_not_cached(cached):
    """Only successful answers are stored: a failed request is executed again."""
    server = cached(["fail"])
    for _ in range(3):
        assert server.infer("fail", one("FP32", [4], [1, 2, 3, 4]))[0] != 200
    counted = counts(server, "fail")
    assert (counted["fail"], counted["executions"], counted["cache_hit"], counted["cache_miss"]) == (3, 3, 0, 0)


def test_entries_do_not_hold_the_workers_memory(cached):
    """Entries are copies: the answer's memory in the arena is released."""
    server = cached(["identity_fp32"], "--cache-config=local,size=100000000")
    for number in range(10):
        answer(server, "identity_fp32", one("FP32", [1, 10_000], [number] * 10_000))

    def held():
        metrics = server.scrape()
        assert metrics["pharos_cache_bytes", ()] > 400_000
        return total(metrics, "pharos_arena_used_bytes", direction="output") == 0

    eventually("the outputs are released", held)


SMALL = "--cache-config=local,size=64"
"""No response fits."""


@pytest.mark.parametrize(("options", "executed"), [(LOCAL, 8), (LOCAL + ",single_flight=true", 1), (SMALL + ",single_flight=true", 1)])
def test_single_flight(cached, options, executed):
    """With single_flight, concurrent equal requests are executed once, each with its id; without it, each is executed."""
    ask_at_once(cached(["delay_200"], options), executed)


def ask_at_once(server, executed: int):
    """Sends equal requests that wait for an execution together; fails unless this many are executed."""
    requests = [{**one("FP32", [1, 2], [1, 2]), "id": f"r{n}"} for n in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with held(server, "delay_200"):
            answers = [pool.submit(server.infer, "delay_200", request) for request in requests]
            until_received(server, "delay_200", 8)
    for n, (status, got) in enumerate(answer.result() for answer in answers):
        assert (status, got["id"], got["outputs"][0]["data"]) == (200, f"r{n}", [1, 2])
    counted = counts(server, "delay_200")
    assert counted["success"] == 8 == counted["cache_hit"] + counted["cache_miss"]
    assert counted["inferences"] == executed


def test_a_follower_replaces_a_leader_that_fails(cached):
    """If a leader fails or is cancelled, the next request is executed, and no request waits forever."""
    server = cached(["fail", "delay_200"], LOCAL + ",single_flight=true")
    assert {status for status, _ in at_once(server, "fail", [one("FP32", [4], [1, 2, 3, 4])] * 6)} == {500}
    assert counts(server, "fail")["fail"] == 6
    # Four requests that block the instance, a leader that is cancelled in the queue, and a follower that waits for it.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with held(server, "delay_200"):
            blocking = [
                pool.submit(server.infer, "delay_200", one("FP32", [1, 1 + n], [0] * (1 + n))) for n in range(4)
            ]
            until_received(server, "delay_200", len(blocking))
            host, port = server.http.split(":")
            leader = http.client.HTTPConnection(host, int(port))
            wanted = json.dumps(one("FP32", [1, 2], [7, 7]))
            leader.request("POST", "/v2/models/delay_200/infer", wanted)
            until_received(server, "delay_200", len(blocking) + 1)
            follower = pool.submit(server.infer, "delay_200", one("FP32", [1, 2], [7, 7]))
            until_received(server, "delay_200", len(blocking) + 2)
            leader.close()
        assert follower.result(DEADLINE_S)[1]["outputs"][0]["data"] == [7, 7]
        assert all(done.result(DEADLINE_S)[0] == 200 for done in blocking)


def test_order_is_kept_with_hits(cached):
    """`preserve_ordering`: a hit is answered after slower misses that arrived earlier, also as a leader or follower."""
    batching = "dynamic_batching { preserve_ordering: true }"
    for option in (LOCAL, LOCAL + ",single_flight=true"):
        server = cached(["delay_200"], option, batching=batching)
        answer(server, "delay_200", one("FP32", [1, 1], [1]))
        before, sent = received(server, "delay_200"), dispatched(server, "delay_200")
        waits = lambda: total(server.scrape(), "nv_inference_pending_request_count", model="delay_200")  # noqa: E731
        # Odd requests are hits; 0 and 4 are equal, so that the later one may wait for the other's answer.
        requests = [one("FP32", [1, 1], [1 if n % 2 else 5 + n % 4]) for n in range(6)]

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            with held(server, "delay_200"):
                answers = []
                for n, request in enumerate(requests):
                    until_received(server, "delay_200", before + n)
                    # A request is counted before it takes its place. A later one must not be faster meanwhile; a follower has none.
                    misses = min((n + 1) // 2, 2 if "flight" in option else 3)
                    eventually("the misses wait", lambda misses=misses: dispatched(server, "delay_200") - sent + waits() >= misses)
                    answers.append(pool.submit(answer, server, "delay_200", request))
                until_received(server, "delay_200", before + len(requests))
                holds_for("no hit is answered before the misses", 0.3, lambda: not any(done.done() for done in answers))
            assert all(done.result() for done in answers)
        assert hits(server, "delay_200")[0] == (4 if "flight" in option else 3)


def test_a_random_load_counts_every_request_once(cached):
    """With many threads and few different requests, answers are correct and hits plus misses are complete."""
    server = cached(["simple"], LOCAL + ",single_flight=true")

    def ask(n):
        row = [n % 7] * 16
        request = simple(id=str(n))
        request["inputs"][0]["data"] = row
        got = answer(server, "simple", request)
        assert (got["id"], got["outputs"][0]["data"]) == (str(n), [n % 7 + 1] * 16)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(600)))
    counted = counts(server, "simple")
    assert counted["success"] == 600 == counted["cache_hit"] + counted["cache_miss"]
    assert counted["inferences"] == counted["cache_miss"] == 7


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--cache-config=disk,size=1"], r"there is no cache 'disk'; allowed are local,size=BYTES"),
        (["--cache-config=local,size=much"], r"size is 'much'; allowed are whole numbers"),
        (["--cache-config=local,size=1", "--cache-config=redis,host=h"], r"found multiple cache configurations, but only"),
        (["--cache-config=local,size=1", "--response-cache-byte-size=1"], r"Incompatible flags --response-cache-byte-size"),
    ],
)
def test_wrong_options_are_refused(options, expected):
    """The server exits with the allowed values."""
    command = [str(binary()), f"--model-repository={EXAMPLES}", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode != 0 and re.search(expected, result.stderr), result.stderr


def test_the_deprecated_flag(cached):
    """The flag selects a local cache, and the log says that it is deprecated."""
    server = cached(["simple"], "--response-cache-byte-size=100000")
    for _ in range(2):
        answer(server, "simple", simple())
    assert hits(server, "simple") == (1, 1) and "--response-cache-byte-size is deprecated" in server.log_tail()


# ---- Redis ------------------------------------------------------------------------------------------------------------


def connected(server):
    """Waits until the server is connected to Redis."""
    eventually("connected to Redis", lambda: "connected to Redis" in server.log.read_text())
    return server


def stored(redis, count: int):
    eventually(f"{count} entries in Redis", lambda: len(redis.keys()) == count)


@needs_redis
def test_servers_share_a_redis_cache(cached, tmp_path):
    """One server hits entries of another, also after both restart; other files are another model."""
    with Redis(tmp_path) as redis:
        options = ["--cache-config=redis,host=127.0.0.1", f"--cache-config=redis,port={redis.port},single_flight=true,timeout_ms=2000"]
        first, second = (connected(cached(["simple"], *options)) for _ in range(2))
        expected = answer(first, "simple", simple())
        stored(redis, 1)
        assert answer(second, "simple", simple(id="mine")) == {**expected, "id": "mine"}
        assert (hits(first, "simple"), hits(second, "simple")) == ((0, 1), (1, 0))
        assert counts(second, "simple")["executions"] == 0
        for server in (first, second):
            server.stop()
        third = connected(cached(["simple"], *options))
        assert answer(third, "simple", simple()) == expected and hits(third, "simple") == (1, 0)
        other = repository(tmp_path / "other", "simple")
        (other / "simple" / "1" / "weights").write_text("changed")
        with Server(tmp_path, [other], options) as fourth:
            connected(fourth)
            answer(fourth, "simple", simple())
            assert hits(fourth, "simple") == (0, 1)


@needs_redis
def test_single_flight_with_redis(cached, tmp_path):
    with Redis(tmp_path) as redis:
        options = ["--cache-config=redis,host=127.0.0.1", f"--cache-config=redis,port={redis.port},single_flight=true,timeout_ms=2000"]
        ask_at_once(connected(cached(["delay_200"], *options)), 1)


@needs_redis
def test_redis_password_database_and_ttl(cached, tmp_path):
    """`password`, `db` and `ttl`; with a wrong password all requests miss, and the log has the reason."""
    login = [("AUTH", "secret"), ("SELECT", 3)]
    with Redis(tmp_path, options=["--requirepass", "secret"], login=login) as redis:
        base = f"--cache-config=redis,host=127.0.0.1,port={redis.port}"
        server = connected(cached(["simple"], f"{base},password=secret,db=3,ttl=100,timeout_ms=1000"))
        for _ in range(2):
            answer(server, "simple", simple())
            stored(redis, 1)
        assert hits(server, "simple") == (1, 1) and "secret" not in server.log.read_text()
        (key,) = redis.keys()
        assert re.fullmatch(rb":(\d+)\r\n", redis.ask("TTL", key)) and 0 < int(redis.ask("TTL", key)[1:-2]) <= 100
        refused = cached(["simple"], f"{base},password=wrong")
        eventually("the login is refused", lambda: "the server rejected the login: WRONGPASS" in refused.log.read_text())
        answer(refused, "simple", simple())
        assert hits(refused, "simple") == (0, 1)


@needs_redis
def test_redis_over_tls(cached, tmp_path):
    """`tls_enabled` with a CA and a client certificate; a server with a certificate of another CA is refused."""
    files, other = Files(tmp_path / "tls"), Files(tmp_path / "other")
    port = free_ports(1)[0]
    options = ["--tls-port", str(port), "--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key)]
    options += ["--tls-ca-cert-file", str(files.root), "--tls-auth-clients", "yes", "--requirepass", "secret"]
    with Redis(tmp_path, options=options):
        base = f"--cache-config=redis,host=127.0.0.1,port={port},password=secret,timeout_ms=1000,tls_enabled=true"
        server = connected(cached(["simple"], f"{base},cacert={files.root},cert={files.client_cert},key={files.client_key}"))
        answer(server, "simple", simple())
        eventually("the entry is stored", lambda: answer(server, "simple", simple()) and hits(server, "simple")[0] > 0)
        for settings, words in [
            (f"cacert={other.root},cert={files.client_cert},key={files.client_key}", "certificate"),
            (f"cacert={files.root}", "response cache: Redis at 127.0.0.1"),
            (f"cacert={tmp_path / 'none.pem'}", "cannot read"),
        ]:
            refused = cached(["simple"], f"{base},{settings}")
            eventually(words, lambda: words in refused.log.read_text())
            answer(refused, "simple", simple())
            assert hits(refused, "simple") == (0, 1)


@needs_redis
def test_redis_cluster(cached, tmp_path):
    """`cluster` with a node that has all slots: its redirects contain the node for each key."""
    # The default, the port plus 10,000, may be in use.
    bus = ["--cluster-port", str(free_ports(1)[0])]
    options = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes"), *bus]
    with Redis(tmp_path, options=options) as redis:
        redis.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        eventually("the cluster is ready", lambda: b"cluster_state:ok" in redis.ask("CLUSTER", "INFO"))
        option = f"--cache-config=redis,host=127.0.0.1,port={redis.port},cluster=true,timeout_ms=1000"
        first, second = (connected(cached(["simple"], option)) for _ in range(2))
        expected = answer(first, "simple", simple())
        stored(redis, 1)
        assert answer(second, "simple", simple()) == expected and hits(second, "simple") == (1, 0)


@needs_redis
def test_a_redis_outage_causes_only_misses(cached, tmp_path):
    """Every request is answered, none waits longer than the timeout, and hits resume with Redis."""
    options = ["--cache-config=redis,host=127.0.0.1,timeout_ms=2000,port="]
    with Redis(tmp_path) as redis:
        server = connected(cached(["simple"], options[0] + str(redis.port)))
        answer(server, "simple", simple())
        stored(redis, 1)
        answer(server, "simple", simple())
        assert hits(server, "simple") == (1, 1)
        redis.pause()
        started = time.monotonic()
        for _ in range(10):
            answer(server, "simple", simple())
        assert time.monotonic() - started < 15, "one request waits 2 s, the others have no connection"
        assert hits(server, "simple") == (1, 11)
        port = redis.port
    assert total(server.scrape(), "pharos_cache_errors_total", reason="timeout") >= 1
    for _ in range(3):
        answer(server, "simple", simple())
    assert total(server.scrape(), "pharos_cache_errors_total", reason="connection") >= 3
    with Redis(tmp_path, port) as redis:

        def hit():
            before = hits(server, "simple")[0]
            answer(server, "simple", simple())
            return hits(server, "simple")[0] > before

        eventually("hits resume", hit)
    logged_errors = server.log.read_text().count("response cache:")
    assert logged_errors < 20, "errors are logged once a second"


@needs_redis
def test_redis_values_are_validated(cached, tmp_path):
    """Truncated or changed values and values of other keys are misses, and are replaced."""
    with Redis(tmp_path) as redis:
        server = connected(cached(["simple"], f"--cache-config=redis,host=127.0.0.1,port={redis.port},timeout_ms=2000"))
        expected = answer(server, "simple", simple())
        stored(redis, 1)
        key = redis.keys()[0]
        value = redis.ask("GET", key).split(b"\r\n", 1)[1][:-2]
        bad = [b"", b"x", value[:-1], value + b"x", value.replace(b"OUTPUT1", b"OUTPUT9"), value[:40] + b"\xff" * 40]
        bad.append(value.replace(b"PHRC\x01", b"PHRC\x02"))
        for n, wrong in enumerate(bad):
            redis.ask("SET", key, wrong)
            assert answer(server, "simple", simple()) == expected
            assert hits(server, "simple") == (0, n + 2)
            eventually("the value is replaced", lambda: redis.ask("GET", key).split(b"\r\n", 1)[1][:-2] == value)
        redis.ask("DEL", key)
        redis.ask("LPUSH", key, "a list")
        assert answer(server, "simple", simple()) == expected
        metrics = server.scrape()
        assert total(metrics, "pharos_cache_errors_total", reason="entry") == len(bad)
        assert total(metrics, "pharos_cache_errors_total", reason="reply") >= 1


def later(answer):
    """Answers the handshake like Redis, then sends `answer`."""
    return lambda piece: b"+OK\r\n" if b"SELECT" in piece else answer


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\xff" * 3000,
        None,
        later(b"$99999999999999\r\n"),
        later(b"$5\r\nabc"),
        later(b"*3\r\n:1\r\n"),
        later(b"+OK\r\n+OK\r\n+OK\r\n"),
        later(None),
    ],
    ids=["http", "rubbish", "silence", "huge", "cut", "array", "more", "then-silence"],
)
def test_an_invalid_redis_server_causes_only_misses(cached, reply):
    """Whatever the peer sends or omits, answers are correct, and no request waits for it longer than the time limit."""
    with NoRedis(reply) as other:
        server = cached(["simple"], f"--cache-config=redis,host=127.0.0.1,port={other.port},timeout_ms=100")
        eventually("a connection was attempted", lambda: other.connections > 0)
        for n in range(20):
            assert answer(server, "simple", simple())["outputs"][0]["data"] == [n + 1 for n in range(16)]
            pause_as_client(0.02)
        assert hits(server, "simple") == (0, 20)
        assert total(server.scrape(), "pharos_cache_errors_total") >= 1
        server.stop()
