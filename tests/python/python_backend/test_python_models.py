"""Python models: behaviour that cannot be compared with Triton's answers (`test_python_tables.py` compares those). Covers the
memory of tensors, threads that answer late, processes that end, fork or print, and metrics.

The tests need a Python with the package `pharos-worker`: `PHAROS_PYTHON`, or by default the Python of the tests."""

import json
import queue
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

from harness.server import Server, total
from harness.statistics import dispatched, until_dispatched
from harness.waiting import DEADLINE_S, eventually
from python_backend.worker import PYTHON, has_worker, model

DECOUPLED = "model_transaction_policy { decoupled: true }\n"
BATCHED = "max_batch_size: 8\ndynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 2000000 }\n"
STRICT = 'parameters { key: "strict_output_types" value: { string_value: "true" } }\n'
ITERATIVE = "max_batch_size: 4\nsequence_batching { iterative_sequence: true }\n"
THROUGH = """platform: "ensemble"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling {
  step { model_name: "ready" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
}
"""
METRICS = """
ts_metrics:
  counter:
    - {name: pharos_batches_total, unit: Count, dimensions: [model, version, reason]}
    - {name: pharos_output_mismatches_total, unit: Count, dimensions: [model, version]}
model_metrics:
  counter:
    - {name: Orders, unit: Count, dimensions: [shop]}
  gauge:
    - {name: Level, unit: m}
"""

has_torch = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")


def test_a_process_ends_completely(tmp_path):
    """Threads, `atexit` and what files and C's library have buffered, as at the end of every Python program."""
    model(tmp_path / "models", "end", "own_end")
    with Server(tmp_path, [tmp_path / "models"], [f"--python={PYTHON}", "--model-control-mode=explicit", "--load-model=end"]) as server:
        (worker,) = server.workers()
        assert server.ask("POST", "/v2/repository/models/end/unload", b"")[0] == 200
        eventually("the process has ended", lambda: worker not in server.workers())
        for line in ("the model is finalized", "the object is finalized", "the thread has ended", "atexit is called", "C has printed"):
            eventually(f"the log has '{line}'", lambda line=line: line in server.log_tail())
        assert "Traceback" not in server.log_tail()
        read = {name: (tmp_path / "models/end/1" / name).read_text() for name in ("text", "bytes", "own", "closed")}
        assert read == {"text": "text", "bytes": "bytes", "own": "own", "closed": ""}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with all models of this module."""
    folder = tmp_path_factory.mktemp("own")
    models = folder / "models"
    model(models, "memory", "own_memory")
    model(models, "memory_batched", "own_memory", BATCHED)
    model(models, "memory_ragged", "own_memory", BATCHED)
    model(models, "process", "own_process")
    model(models, "unlike", "own_unlike", BATCHED)
    model(models, "unlike_strict", "own_unlike", BATCHED + STRICT)
    for name in ("ready", "never_ready"):
        model(models, name, "own_ready")
        (models / name / "ready").write_text("no")
    (models / "through/1").mkdir(parents=True)
    (models / "through/config.pbtxt").write_text(THROUGH)
    for name in ("labels", "more_labels"):
        model(models, name, "own_labels")
    model(models, "endless", "own_endless", DECOUPLED)
    model(models, "canceller", "own_canceller")
    model(models, "returns", "own_unlike", DECOUPLED)
    model(models, "late", "own_late")
    model(models, "late_stream", "own_late", DECOUPLED)
    model(models, "again", "own_iterative", ITERATIVE, dims="[ 1 ]")
    model(models, "again_stream", "own_iterative", ITERATIVE + DECOUPLED, dims="[ 1 ]")
    (folder / "metrics.yaml").write_text(METRICS)
    with Server(folder, [models], [f"--python={PYTHON}", f"--metrics-config={folder / 'metrics.yaml'}"]) as server:
        server.models = models
        yield server


def ask(server, name, values, **parameters):
    """Sends one request over HTTP; returns the output and the response's parameters."""
    with http.InferenceServerClient(server.http, network_timeout=DEADLINE_S, connection_timeout=DEADLINE_S) as client:
        given = http.InferInput("IN", list(values.shape), "FP32")
        given.set_data_from_numpy(values)
        result = client.infer(name, [given], parameters=parameters)
        return result.as_numpy("OUT"), result.get_response().get("parameters", {})


FLOATS = np.arange(300_000, dtype=np.float32)


@pytest.mark.parametrize("how, expected", [
    ("view", FLOATS), ("copy", FLOATS), ("part", FLOATS[1:]), ("strided", FLOATS[::2]), ("changed", FLOATS + 1), ("dlpack", FLOATS),
])
def test_inputs_are_views_of_the_servers_memory(served, how, expected):
    """Arrays of inputs do not own their memory and are writeable; each form of output arrives unchanged."""
    output, given = ask(served, "memory", FLOATS, how=how)
    np.testing.assert_array_equal(output, expected)
    assert (given["owns"], given["writeable"]) == (False, True)


@pytest.mark.skipif(not has_torch, reason=f"{PYTHON} does not have torch")
def test_torch_takes_and_gives_tensors(served):
    """Inputs and outputs are passed to and from PyTorch with DLPack."""
    output, _ = ask(served, "memory", FLOATS, how="torch")
    np.testing.assert_array_equal(output, FLOATS * 2)


def test_a_kept_input_is_unchanged(served):
    """Later requests do not overwrite a view that outlives its request."""
    first = [ask(served, "memory", np.full(1000, 1, np.float32), how="kept")[0].tolist()]
    for value in range(2, 40):
        first.append(ask(served, "memory", np.full(1000, value, np.float32), how="kept")[0].tolist())
    assert first[-1] == [1000.0 * value for value in range(1, 40)]


@pytest.mark.smoke
def test_requests_of_a_batch_have_their_own_rows(served):
    """Requests that are executed in one batch each get their own rows back."""
    before = served.statistics("memory_batched").get("execution_count", 0)
    rows = [np.full((n + 1, 3), n, np.float32) for n in range(2)] + [np.full((1, 3), 9, np.float32)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda values: ask(served, "memory_batched", values), rows))
    for values, (output, given) in zip(rows, answers):
        np.testing.assert_array_equal(output, values)
        assert given["rows"] == len(values)
    assert served.statistics("memory_batched")["execution_count"] == before + 1


def test_ragged_requests_keep_their_shapes(served):
    """Inputs of different lengths are executed in one batch."""
    shapes = [(1, 2), (1, 5), (2, 3)]
    values = [np.random.default_rng(0).random(shape, np.float32) for shape in shapes]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda given: ask(served, "memory_ragged", given), values))
    for given, (output, _) in zip(values, answers):
        np.testing.assert_array_equal(output, given)
    assert served.statistics("memory_ragged")["execution_count"] == 1


@pytest.mark.slow
def test_an_output_unlike_its_configuration_is_counted_and_warned_of_once(served):
    """Clients receive the model's output; the log has one warning for the output, with both types and the fix."""
    mismatches = lambda: total(served.scrape(), "pharos_output_mismatches_total", model="unlike")  # noqa: E731
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    assert ask(served, "unlike", values)[0].dtype == np.float32 and mismatches() == 0
    for _ in range(3):
        output, _ = ask(served, "unlike", values, dtype="float64")
        assert output.dtype == np.float64
        np.testing.assert_array_equal(output, values)
    output, _ = ask(served, "unlike", values, short=1)
    np.testing.assert_array_equal(output, values[1:])
    assert mismatches() == 4
    lines = [line for line in served.log.read_text().splitlines() if "strict_output_types" in line and "WARN" in line]
    assert len(lines) == 1 and "the output is FP64, but its configured datatype is FP32" in lines[0], lines
    assert "data_type: TYPE_FP64" in lines[0] and "unlike" in lines[0] and "OUT" in lines[0]


def test_strict_output_types_refuses_them(served):
    """With this parameter another datatype or number of rows fails the request, and no mismatch is counted."""
    values = np.ones((2, 2), np.float32)
    np.testing.assert_array_equal(ask(served, "unlike_strict", values)[0], values)
    with pytest.raises(http.InferenceServerException, match="output 'OUT' is FP64, but its configured datatype is FP32"):
        ask(served, "unlike_strict", values, dtype="float64")
    with pytest.raises(http.InferenceServerException, match=r"output 'OUT' has shape \[1, 2\] for a batch of 2"):
        ask(served, "unlike_strict", values, short=1)
    assert total(served.scrape(), "pharos_output_mismatches_total", model="unlike_strict") == 0


def test_a_thread_answers_after_execute(served):
    """Each request is answered once, by a sender that is created after its batch has ended."""
    values = [np.full(5, n, np.float32) for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda given: ask(served, "late", given)[0], values))
    for given, output in zip(values, outputs):
        np.testing.assert_array_equal(output, given * 2)


def stream(server, name, values, count, request_id=""):
    """Sends a request to a decoupled model over a stream, waits for `count` responses and returns their first elements."""
    got = []
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: got.append((result, error)))
        given = grpc.InferInput("IN", list(values.shape), "FP32")
        given.set_data_from_numpy(values)
        client.async_stream_infer(name, [given], request_id=request_id)
        eventually(f"{count} responses", lambda: len(got) >= count)
        client.stop_stream()
    assert [error for _, error in got if error] == []
    return [float(result.as_numpy("OUT").flat[0]) for result, _ in got]


def test_rescheduled_requests_are_executed_again(served):
    """The model decides how often a request is executed, with one response at the end or one for each execution. Each request is a
    separate sequence, with START in its first execution."""
    def count(times):
        # The client uses gevent, which does not support threads that share one.
        with http.InferenceServerClient(served.http, network_timeout=DEADLINE_S, connection_timeout=DEADLINE_S) as client:
            given = http.InferInput("IN", [1, 1], "FP32")
            given.set_data_from_numpy(np.full((1, 1), times, np.float32))
            return client.infer("again", [given]).as_numpy("OUT").item()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(count, [1, 5, 50])) == [1, 5, 50]
    assert stream(served, "again_stream", np.full((1, 1), 40, np.float32), 40, "s") == list(range(1, 41))


def test_a_thread_streams_after_execute(served):
    """A thread can send more responses than the server buffers for one request."""
    assert stream(served, "late_stream", np.arange(100, dtype=np.float32), 100) == [float(n) for n in range(100)]


def test_the_log_has_the_whole_traceback_of_an_exception(served):
    """The client gets the type, the text and the frames; the log has the whole traceback at level ERROR."""
    one = np.ones(1, np.float32)
    with pytest.raises(http.InferenceServerException) as raised:
        ask(served, "process", one, do="deep")
    assert raised.value.message().startswith(
        "Failed to process the request(s) for model 'process_0', message: ValueError: deep down\n\nAt:\n"
    )
    assert re.findall(r"\(\d+\): (\w+)", raised.value.message()) == ["deeper", "deep", "execute"]
    for line in (r"ERROR Traceback \(most recent call last\):.*process_0", r"ERROR     raise ValueError\(.deep down.\)"):
        # The lines reach the log through a pipe, and the answer another way.
        eventually(f"the log has '{line}'", lambda line=line: re.search(line, served.log.read_text()))


def test_what_a_model_prints_is_in_the_log_at_once(served):
    """Standard output is logged at level INFO, standard error at level WARN, without a delay by buffers."""
    ask(served, "process", np.ones(1, np.float32), do="print")
    eventually("both lines", lambda: re.search(r"INFO printed by the model", served.log.read_text()) and re.search(
        r"WARN and to standard error", served.log.read_text()))


def test_an_exit_in_execute_is_an_error_of_the_request(served):
    """SystemExit fails the request like other exceptions; the worker ignores SIGINT."""
    one = np.ones(1, np.float32)
    with pytest.raises(http.InferenceServerException, match="SystemExit: 3"):
        ask(served, "process", one, do="exit", status=3)
    assert ask(served, "process", one, do="interrupt")[0] == one


@pytest.mark.parametrize("how", ["os_exit", "kill"])
def test_a_process_that_ends_is_restarted(served, how):
    """The request fails, the instance is restarted, and other models are unaffected."""
    one = np.ones(1, np.float32)
    with pytest.raises(http.InferenceServerException, match="died|instance"):
        ask(served, "process", one, do=how)
    assert ask(served, "memory", one)[0] == one

    def back():
        try:
            return ask(served, "process", one)[0] == one
        except http.InferenceServerException:
            return False

    eventually("the instance answers again", back)


def test_a_forked_child_does_not_reach_the_server(served):
    """A forked child that returns from execute ends; the metrics that it records are discarded."""
    one = np.ones(1, np.float32)
    for _ in range(5):
        assert ask(served, "process", one, do="fork")[0] == one
    assert ask(served, "process", one)[0] == one
    shown = served.ask("GET", "/metrics", address=served.metrics)[1]
    assert "own_forked" not in shown
    assert re.search(r"^own_parents 0(\.0)?$", shown, re.M)
    eventually("the log has the child's error", lambda: "forked by the model cannot record metrics" in served.log.read_text())


@pytest.mark.smoke
def test_defined_metrics_are_recorded(served):
    """`pharos_worker.metrics`: add, get, add_or_update, flush; a metric that is not defined is refused with a hint."""
    one = np.ones(1, np.float32)
    ask(served, "process", one, do="record")
    shown = served.ask("GET", "/metrics", address=served.metrics)[1]
    for line in ('Orders{shop="north"} 2', 'Orders{shop="south"} 3', "Level 7"):
        assert re.search(re.escape(line) + r"(\.0)?$", shown, re.M), line
    with pytest.raises(http.InferenceServerException, match="metrics.yaml"):
        ask(served, "process", one, do="undefined")


def test_series_of_a_family_may_have_different_labels(served):
    """This holds for series of one model and of several, in any order, as in a real Triton; each increment counts once."""
    one = np.ones(1, np.float32)
    for name in ("labels", "more_labels", "labels"):
        ask(served, name, one)
    ask(served, "labels", one, labels='{"zone": "n", "writer": "x"}')
    ask(served, "more_labels", one, labels="{}")
    ask(served, "labels", one)
    shown = served.ask("GET", "/metrics", address=served.metrics)[1]
    lines = sorted(re.sub(r"\.0$", "", line) for line in shown.splitlines() if line.startswith("own_shared_total"))
    assert lines == [
        "own_shared_total 10",
        'own_shared_total{version="1",writer="more_labels"} 2',
        'own_shared_total{writer="labels"} 4',
        'own_shared_total{writer="x",zone="n"} 10',
    ]
    assert shown.count("# TYPE own_shared_total counter") == 1
    assert "metric samples were refused: metric `own_shared_total`" not in served.log.read_text()


def test_an_increment_is_cheap(served):
    """Incrementing a counter takes less than 500 ns in the fastest round."""
    ask(served, "process", np.ones(1, np.float32), do="time")
    found = eventually("the time", lambda: re.findall(r"an increment took (\d+) ns", served.log.read_text()))
    assert int(found[-1]) < 500


def says_ready(server, name, told=None):
    """Returns whether a model is ready over HTTP and gRPC; `told` sets the result of its `is_ready`."""
    if told is not None:
        (server.models / name / "ready").write_text(told)
    status = server.get(f"/v2/models/{name}/ready")[0]
    with grpc.InferenceServerClient(server.grpc) as client:
        assert client.is_model_ready(name) == (status == 200)
    return status == 200


def test_readiness_requests_call_is_ready(served):
    """`is_ready` is called only for a readiness request: a model that returns False is loaded and serves, and may return True
    later. Any other value counts as not ready, and the log has the reason."""
    assert not says_ready(served, "never_ready")
    assert ask(served, "never_ready", np.zeros(1, np.float32))[0] == [0]
    for told, ready in (("yes", True), ("no", False), ("coroutine", True), ("one", False), ("unknown", False), ("yes", True)):
        assert says_ready(served, "ready", told) == ready, told
        assert says_ready(served, "through") == ready, f"an ensemble of it: {told}"
    log = served.log.read_text()
    assert "TypeError: is_ready() must return True or False, not 1" in log and "KeyError: 'unknown'" in log
    assert served.get("/v2/health/ready")[0] == 200, "the readiness of the server does not depend on `is_ready` of models"
    assert served.index()["never_ready"][0]["state"] == "READY"


def test_is_ready_is_called_during_an_execution(served):
    """`is_ready` does not wait for a batch, and a model may query its own readiness."""
    says_ready(served, "ready", "yes")
    with ThreadPoolExecutor(1) as pool:
        before = dispatched(served, "ready")
        executing = pool.submit(ask, served, "ready", np.ones(1, np.float32))
        until_dispatched(served, "ready", before + 1)
        assert says_ready(served, "ready")
        assert not executing.done()
        (served.models / "ready/end").touch()
        assert executing.result()[1] == {"itself": True, "another": True}
    says_ready(served, "ready", "no")
    assert ask(served, "ready", np.zeros(1, np.float32))[1] == {"itself": False, "another": True}


def test_a_model_whose_is_ready_exceeds_its_time_limit_is_not_ready(served):
    """The limit is five seconds; a later result counts for later requests."""
    assert says_ready(served, "ready", "yes")
    (served.models / "ready/ready").write_text("slow")
    begin = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        assert [status for status, _ in pool.map(lambda _: served.get("/v2/models/ready/ready"), range(3))] == [400] * 3
    assert time.monotonic() - begin > 4.5
    assert says_ready(served, "ready", "yes"), "shares the call in progress, or calls again"



def test_a_cancelled_call_gives_what_has_come_and_then_an_error(served):
    """The called model is cancelled; another iteration returns the same responses again."""
    _, told = ask(served, "canceller", np.ones(1, np.float32))
    assert told["good"] >= 3 and told["errors"] == 1 and told["cancelled"], told
    assert told["again"] == told["good"] + told["errors"], told
    eventually("the called model has ended", lambda: served.statistics("endless").get("execution_count") == 1)


def test_a_decoupled_model_that_returns_something_names_its_instance(served):
    """The error names the instance."""
    with grpc.InferenceServerClient(served.grpc) as client:
        got = queue.Queue()
        client.start_stream(lambda result, error: got.put(error or result))
        given = grpc.InferInput("IN", [1], "FP32")
        given.set_data_from_numpy(np.ones(1, np.float32))
        client.async_stream_infer("returns", [given])
        error = str(got.get(timeout=DEADLINE_S))
        client.stop_stream()
    assert "Python model 'returns_0' is using the decoupled mode and the execute function must return None." in error


def test_a_model_may_load_and_unload_another_while_it_is_loaded_at_the_start(tmp_path):
    """The server starts and serves the model, and the other model is unloaded."""
    models = tmp_path / "models"
    model(models, "loader", "own_loader")
    model(models, "other", "own_trace")
    options = ["--model-control-mode=explicit", "--load-model=loader", f"--python={PYTHON}"]
    with Server(tmp_path, [models], options) as server:
        assert ask(server, "loader", np.zeros(1, np.float32))[0] == [1]
        eventually("the other is unloaded", lambda: server.index()["other"][0]["state"] == "UNAVAILABLE")
        assert server.get("/v2/health/ready")[0] == 200


def test_a_malformed_version_is_an_error(tmp_path):
    """`is_model_ready` raises an exception for it, as in Triton; an unknown version is not ready."""
    model(tmp_path / "models", "asks", "own_asks")
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
    with Server(tmp_path, [tmp_path / "models"], [f"--python={PYTHON}"]) as server:
        parameters = server.infer("asks", body)[1]["parameters"]
    text = "error: failed to get model version from specified version string"
    assert [parameters[version] for version in ("latest", "1", "9")] == ["True", "True", "False"]
    assert parameters["abc"].startswith(f"{text} 'abc'") and parameters["-1"].startswith(f"{text} '-1'"), parameters


def test_a_model_has_the_context_of_its_requests_trace(tmp_path):
    """In the mode `opentelemetry` the context is a W3C traceparent as JSON, of the client's trace; without a trace it is None."""
    model(tmp_path / "models", "traced", "own_trace")
    options = ["--trace-config=mode=opentelemetry", "--trace-config=opentelemetry,url=http://127.0.0.1:9/v1/traces"]
    options += ["--trace-config=rate=1", "--trace-config=level=TIMESTAMPS", f"--python={PYTHON}"]
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
    trace = "0af7651916cd43dd8448eb211c80319c"

    def context(server, **headers):
        status, text = server.ask("POST", "/v2/models/traced/infer", json.dumps(body), headers=headers)
        assert status == 200, text
        return json.loads(json.loads(text)["parameters"]["context"] or "null")

    with Server(tmp_path, [tmp_path / "models"], options) as server:
        own = context(server)
        assert list(own) == ["traceparent"] and re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", own["traceparent"])
        named = context(server, traceparent=f"00-{trace}-b7ad6b7169203331-01", tracestate="a=b")
        assert named["tracestate"] == "a=b" and named["traceparent"].split("-")[1] == trace
        assert named["traceparent"].split("-")[2] != "b7ad6b7169203331"
        status, _ = server.ask("POST", "/v2/trace/setting", json.dumps({"trace_level": ["OFF"]}))
        assert status == 200
        assert context(server) is None
