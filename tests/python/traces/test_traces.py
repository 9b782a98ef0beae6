"""Trace files: their content (compared with Triton's), which requests are in which file, their state after a crash, and what
`pharos trace` reads from them. Spans are in `test_otlp.py`, settings in `test_trace_settings.py`."""

import http.client
import json
import random
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from harness.connections import connect, post, read_response
from harness.inference import one, simple
from harness.models import write
from harness.peers import missing, script
from harness.processes import held
from harness.server import Server, binary, kill_all, total
from harness.statistics import until_dispatched
from harness.stream_models import COMPARED, build as build_streams
from harness.waiting import DEADLINE_S, eventually, every
from sequences.iterative_models import MODELS, count_of
from traces.trace_files import pharos_trace, summary
from traces.trace_requests import GOLDEN, OPTIONS, ask_all, build, collect, records_of_triton, structure

WHY_NOT = missing("perf_analyzer", "perf")
WHY_NO_TRITON = missing("triton", "triton")
RECEIVED = ["HTTP_RECV_START", "HTTP_RECV_END"]
SENT = ["INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]
COMPUTED = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
ORDER = [*RECEIVED, "REQUEST_START", "QUEUE_START", *COMPUTED, "REQUEST_END", *SENT]


@pytest.fixture
def traced(tmp_path):
    """Starts a server that traces into `trace.json`: `traced("rate=1", ...)` takes values of `--trace-config`."""
    started = []

    def begin(*configs, options=(), repository=None):
        file = tmp_path / "trace.json"
        chosen = [f"--trace-config={config}" for config in (f"triton,file={file}", *configs)]
        models = repository or build(tmp_path / "models")
        server = Server(tmp_path, [models], [*chosen, "--cache-config=local,size=1048576", *options])
        started.append(server)
        server.launch()
        server.wait_until_ready()
        return server, file

    yield begin
    kill_all(started)


def written(server) -> float:
    """Returns the number of traces in files."""
    return total(server.scrape(), "pharos_traces_total", result="written")


def ask(server, model="plain", count=1):
    """Sends `count` requests, one after the other."""
    for _ in range(count):
        status, answer = server.infer(model, simple())
        assert status == 200, answer


def keep_asking(server):
    """Sends requests until the server is gone."""
    try:
        while True:
            server.infer("plain", simple())
    except (OSError, http.client.HTTPException, ValueError):
        pass


@pytest.mark.smoke
def test_a_file_has_the_content_of_tritons(traced):
    """The same requests give the same structure; timestamps are in the order of processing; both summaries are alike."""
    server, file = traced(*OPTIONS)
    ask_all(server.http, server.grpc)
    server.stop()
    records = json.loads(file.read_text())
    assert structure(records) == structure(json.loads(GOLDEN.read_text()))
    for trace in collect(records).values():
        times = [trace["stamps"][name][0] for name in ORDER if name in trace["stamps"]]
        assert times == sorted(times)
    ours, theirs = summary(file), summary(GOLDEN)
    counts = ("traces", "steps", "not_executed", "failed", "unfinished")
    assert {name: [model[key] for key in counts] for name, model in ours.items()} == {
        name: [model[key] for key in counts] for name, model in theirs.items()
    } == {"plain": [4, 2, 0, 0, 0], "cached": [2, 0, 1, 0, 0], "pipe": [1, 0, 1, 0, 0]}
    stages = {name: [(stage["stage"], stage["count"]) for stage in model["stages"]] for name, model in ours.items()}
    assert stages == {
        name: [(stage["stage"], stage["count"]) for stage in model["stages"]] for name, model in theirs.items()
    }
    table = pharos_trace("summary", file)
    assert "plain version 1: 4 traces, 2 steps of ensembles" in table and "compute infer" in table


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NO_TRITON), reason=WHY_NO_TRITON)
def test_the_live_tritons_file_is_as_recorded(tmp_path):
    """A real Triton writes the recorded trace file, and `pharos trace` reads it."""
    records = records_of_triton(tmp_path)
    assert structure(records) == structure(json.loads(GOLDEN.read_text()))
    assert summary(tmp_path / "trace.json.0")["plain"]["traces"] == 4


def test_a_timeline_for_perfetto(traced, tmp_path):
    """Slices of one track are nested or disjoint; each step has an arrow that begins in the slice of its ensemble."""
    server, file = traced(*OPTIONS)
    threads = [threading.Thread(target=ask_all, args=(server.http, server.grpc)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.stop()
    pharos_trace("chrome", file, "-o", tmp_path / "chrome.json")
    for timeline in (json.loads((tmp_path / "chrome.json").read_text()), json.loads(pharos_trace("chrome", GOLDEN))):
        events = timeline["traceEvents"]
        processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert processes == {"requests", "plain version 1", "cached version 1", "pipe version 1"}
        rows = {}
        for event in events:
            if event["ph"] == "X":
                begin = round(event["ts"] * 1000)
                rows.setdefault((event["pid"], event["tid"]), []).append((begin, begin + round(event["dur"] * 1000)))
        for row in rows.values():
            for begin, end in row:
                assert all(b >= end or e <= begin or (b <= begin and end <= e) or (begin <= b and e <= end) for b, e in row)
        starts = {event["id"]: event for event in events if event["ph"] == "s"}
        ends = {event["id"]: event for event in events if event["ph"] == "f"}
        steps = sum(model["steps"] for model in summary(GOLDEN if len(starts) == 2 else file).values())
        assert starts.keys() == ends.keys() and len(starts) == steps


def test_rate_count_and_files(traced):
    """rate=2 samples every second request; a file has three; `count` ends sampling; a change of settings restarts counts; file
    indices continue."""
    server, file = traced("level=TIMESTAMPS", "rate=2", "triton,log-frequency=3")
    ask(server, count=14)
    eventually("seven traces are written", lambda: written(server) == 7)

    def ids(index):
        return sorted({record["id"] for record in json.loads(file.with_name(f"trace.json.{index}").read_text())})

    assert [ids(index) for index in (0, 1, 2)] == [[1, 2, 3], [4, 5, 6], [7]]
    assert not file.exists()
    update = {"trace_rate": "1", "trace_count": "2", "log_frequency": "0"}
    status, shown = server.ask("POST", "/v2/trace/setting", json.dumps(update))
    assert status == 200, shown
    ask(server, count=4)
    eventually("nine traces are written", lambda: written(server) == 9)
    assert ids(3) == [8, 9] and not file.with_name("trace.json.4").exists()
    assert json.loads(server.get("/v2/trace/setting")[1])["trace_count"] == "0"
    update = {"trace_count": None, "trace_rate": None, "log_frequency": "0"}
    assert server.ask("POST", "/v2/trace/setting", json.dumps(update))[0] == 200
    ask(server, count=2)
    eventually("the file without an index has a trace", lambda: written(server) == 10 and json.loads(file.read_text()))


def test_only_configured_events_are_traced(traced):
    """Level OFF: no file. One model's settings do not affect others. Timestamps without tensors; tensors without timestamps."""
    server, file = traced()
    ask(server)
    for path, level, model in [("models/cached/", "TENSORS", "cached"), ("", "TIMESTAMPS", "plain")]:
        update = {"trace_level": [level], "trace_rate": "1"}
        assert server.ask("POST", f"/v2/{path}trace/setting", json.dumps(update))[0] == 200
        ask(server)
        ask(server, "cached")
        want = 1 if model == "cached" else 3
        eventually(f"{want} traces are written", lambda want=want: written(server) == want)
    server.stop()
    traces = collect(json.loads(file.read_text())).values()
    found = sorted((trace["model_name"], bool(trace["stamps"]), bool(trace["tensors"])) for trace in traces)
    assert found == [("cached", False, True), ("cached", False, True), ("plain", True, False)]


def test_failures_and_clients_that_go_away(traced):
    """A failure is recorded. A disconnected client has no events of sending; a request refused before any model has no trace."""
    server, file = traced("level=TIMESTAMPS", "rate=1")
    assert server.infer("fail", one("FP32", [1], [1]))[0] == 500
    assert server.infer("plain", one("FP32", [1], [1]))[0] == 400
    body = post("/v2/models/slow/infer", json.dumps(one("FP32", [1, 1], [1])).encode())
    with connect(server.http_port) as first, connect(server.http_port) as second:
        with held(server, "slow"):
            first.sendall(body)
            until_dispatched(server, "slow", 1)
            second.sendall(body)
            pending = lambda: total(server.scrape(), "nv_inference_pending_request_count", model="slow")  # noqa: E731
            eventually("the other request waits", lambda: pending() == 1)
            second.close()
            eventually("the other request is cancelled", lambda: pending() == 0)
        assert read_response(first)[0] == 200
    eventually("three traces are written", lambda: written(server) == 3)
    server.stop()
    traces = list(collect(json.loads(file.read_text())).values())
    failed = next(trace for trace in traces if trace["model_name"] == "fail")
    assert failed["error"] and set(failed["stamps"]) == set(ORDER)
    gone = next(trace for trace in traces if trace["model_name"] == "slow" and "error" in trace)
    assert set(gone["stamps"]) == {*RECEIVED, "REQUEST_START", "QUEUE_START", "REQUEST_END"}
    assert [model["failed"] for model in summary(file).values()] == [1, 1]


def test_a_decoupled_model(traced, tmp_path):
    """Each response has its own events of sending; the model is executed once."""
    repository = build_streams(tmp_path / "streams", {"repeat": COMPARED["repeat"]})
    server, file = traced(*OPTIONS, repository=repository)
    answers = []
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        tensor = tritonclient.grpc.InferInput("IN", [3], "INT32")
        tensor.set_data_from_numpy(np.array([4, 5, 6], np.int32))
        client.async_stream_infer("repeat", [tensor], request_id="r")
        eventually("three answers are received", lambda: len(answers) >= 3)
        client.stop_stream()
    status, text = server.ask("POST", "/v2/models/repeat/generate_stream", json.dumps({"IN": [7, 8]}))
    assert status == 200 and text.count("data: ") == 2
    eventually("two traces are written", lambda: written(server) == 2)
    server.stop()
    stream, generated = (trace for _, trace in sorted(collect(json.loads(file.read_text())).items()))
    counts = {name: len(times) for name, times in stream["stamps"].items()}
    assert counts == dict.fromkeys(["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", *COMPUTED], 1) | {
        "REQUEST_START": 1, "QUEUE_START": 1, "REQUEST_END": 1, "INFER_RESPONSE_COMPLETE": 1,
        "GRPC_SEND_START": 3, "GRPC_SEND_END": 3,
    }  # fmt: skip
    outputs = [(name, data) for activity, name, data, *_ in stream["tensors"] if activity == "TENSOR_BACKEND_OUTPUT"]
    assert [data for name, data in outputs if name == "OUT"] == ["4", "5", "6"]
    assert set(ORDER) == set(generated["stamps"])


def test_files_are_whole_json_at_any_time_and_survive_a_kill(traced):
    """While the file is written it is valid JSON. After SIGKILL too; a file cut at any point is read up to the cut."""
    server, file = traced(*OPTIONS)
    asking = [threading.Thread(target=keep_asking, args=(server,)) for _ in range(2)]
    for thread in asking:
        thread.start()
    eventually("a hundred traces are written", lambda: written(server) > 100)
    sizes = set()

    def has_grown():
        sizes.add(len(file.read_text()))
        assert summary(file)["plain"]["traces"] > 50
        return len(sizes) > 5

    eventually("the file has had six sizes", has_grown)
    server.kill()
    for thread in asking:
        thread.join()
    whole = summary(file)["plain"]["traces"]
    assert whole > 100
    text, chance = file.read_bytes(), random.Random(5)
    cut = file.with_name("cut.json")
    for _ in range(20):
        cut.write_bytes(text[: chance.randrange(1000, len(text) - 3)])
        result = subprocess.run([str(binary()), "trace", "summary", str(cut)], capture_output=True, text=True)
        assert result.returncode == 0 and "the file is cut" in result.stderr
        # The repair for other readers, from docs/src/guides/traces.md.
        lines = cut.read_bytes().decode(errors="replace")
        repaired = json.loads(lines[: lines.rfind(",\n")] + "]")
        assert repaired == json.loads(text)[: len(repaired)] and len(repaired) > lines.count("\n") - 1
    cut.write_bytes(text[: len(text) // 2])
    assert 0.4 * whole < summary(cut)["plain"]["traces"] < 0.6 * whole


@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.rename(file.with_name("old")), lambda file: file.write_bytes(b"")])
def test_a_deleted_moved_or_truncated_file_is_begun_again(traced, change):
    """As a tool that rotates files does. Each trace that counts as written is in the file of this name."""
    server, file = traced("level=TIMESTAMPS", "rate=1")
    ask(server, count=3)
    eventually("the traces are written", lambda: written(server) == 3)
    change(file)
    ask(server, count=2)
    eventually("the next traces are written", lambda: written(server) == 5)
    assert len(collect(json.loads(file.read_text()))) == 2


def test_lost_traces_are_counted_and_logged_once(tmp_path):
    """A full disk loses traces but no requests, and writes one log line, not one per trace."""
    configs = ["triton,file=/dev/full", "level=TIMESTAMPS", "rate=1"]
    options = [f"--trace-config={config}" for config in configs]
    with Server(tmp_path, [build(tmp_path / "models")], options) as server:
        ask(server, count=200)
        dropped = {"result": "dropped"}
        eventually("all lost traces are counted", lambda: total(server.scrape(), "pharos_traces_total", **dropped) == 200)
        assert written(server) == 0
    assert 1 <= server.log_tail().count("cannot write traces") <= 3


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    """The error has the file, the reason and the allowed values; a full disk does not prevent the start."""
    models = build(tmp_path / "models")
    (tmp_path / "folder").mkdir()
    for path, reason in [
        (tmp_path / "nowhere/trace.json", "No such file"),
        (tmp_path / "folder", "is a directory"),
        (tmp_path / "models/plain/config.pbtxt/trace.json", "Not a directory"),
    ]:
        server = Server(tmp_path, [models], [f"--trace-config=triton,file={path}"])
        server.launch()
        assert server.process.wait(DEADLINE_S) == 1
        said = server.log_tail()
        assert f"the trace file '{path}': " in said and reason in said and "in an existing folder" in said
    assert not (tmp_path / "nowhere").exists()


def test_the_commands_report_invalid_files(tmp_path):
    """A missing file, and a file that is not a trace file."""
    (tmp_path / "other.json").write_text("{}")
    for file, words in [("nowhere.json", "nowhere.json: No such file"), ("other.json", "not a trace file: expected a JSON array")]:
        result = subprocess.run([str(binary()), "trace", "chrome", str(tmp_path / file)], capture_output=True, text=True)
        assert result.returncode == 1 and words in result.stderr
    assert subprocess.run([str(binary()), "trace", "summary"], capture_output=True).returncode == 2


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_perf_analyzer_sets_what_is_traced(traced):
    """Its --trace-* options change the server's settings."""
    server, file = traced()
    command = [
        str(script("perf_analyzer")), "-m", "plain", "-u", server.http, "--trace-level", "TIMESTAMPS", "--trace-rate", "1",
        "--trace-count", "50", "--log-frequency", "20", "--measurement-interval", "300", "--max-trials", "3",
        "--stability-percentage", "999",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    eventually("fifty traces are written", lambda: written(server) == 50)
    assert [summary(file.with_name(f"trace.json.{n}"))["plain"]["traces"] for n in range(3)] == [20, 20, 10]
    assert json.loads(server.get("/v2/trace/setting")[1])["log_frequency"] == "20"


def test_clients_report_refused_updates(traced):
    """An update that enables tracing without a file is refused."""
    server, _ = traced("level=OFF")
    with tritonclient.http.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match="sample rate must be non-zero"):
            client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "0"})


def test_a_request_that_is_executed_several_times(traced, tmp_path):
    """An iterative sequence has a queue and a computation per iteration; both commands count all of them."""
    repository = write(tmp_path / "iterative", "direct", MODELS["direct"])
    server, file = traced("level=TIMESTAMPS", "rate=1", repository=repository)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        client.infer("direct", count_of(tritonclient.http, 4), sequence_id=7, sequence_start=True, sequence_end=True)
    server.stop()
    (trace,) = collect(json.loads(file.read_text())).values()
    times = trace["stamps"]
    executions = len(times["COMPUTE_START"])
    assert executions > 1 and {len(times[name]) for name in ("QUEUE_START", *COMPUTED)} == {executions}
    infer = sum(end - start for start, end in zip(times["COMPUTE_INPUT_END"], times["COMPUTE_OUTPUT_START"]))
    stage = next(stage for stage in summary(file)["direct"]["stages"] if stage["stage"] == "compute infer")
    assert (stage["count"], round(stage["max_us"] * 1000)) == (1, infer)
    slices = [event["name"] for event in json.loads(pharos_trace("chrome", file))["traceEvents"] if event["ph"] == "X"]
    assert slices.count("queue") == slices.count("infer") == executions


def test_a_summary_does_not_control_the_terminal(tmp_path):
    """The name of a model in a trace file may have any characters."""
    file = tmp_path / "trace.json"
    file.write_text(json.dumps([{"id": 1, "model_name": "a\x1b[31m\u202eb", "model_version": 1}]))
    printed = pharos_trace("summary", file)
    assert "a\\u{1b}[31m\\u{202e}b version 1" in printed and "\x1b" not in printed, printed
