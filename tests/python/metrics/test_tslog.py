"""Metrics as log lines: TorchServe's format byte for byte, every lost line counted, and no effect on inference."""

import calendar
import concurrent.futures
import json
import os
import random
import re
import signal
import socket
import threading
import time
import urllib.parse
from collections import defaultdict
from pathlib import Path

import pytest

from harness.inference import ROW, one, simple
from harness.processes import held, sleeps
from harness.server import EXAMPLES, total
from harness.statistics import until_dispatched, until_received
from harness.waiting import DEADLINE_S, eventually, holds_for, run_for, settled
from harness.wire import tensor
from metrics.log_lines import LINE, by_name, folder, lines, raw, sums

LOGS_ONLY = (
    "# metrics mode is tslog (log): metrics go to the logs; mode both or prometheus (metrics_mode in config.properties) shows them here\n"
)
"""The scrape in mode tslog."""

HOST = socket.gethostname()

TORCHSERVE = {
    "Requests2XX.Count": "Level:Host",
    "Requests4XX.Count": "Level:Host",
    "ts_inference_requests_total.Count": "model_name:simple,model_version:1",
    "ts_inference_latency_microseconds.Microseconds": "model_name:simple,model_version:1",
    "ts_queue_latency_microseconds.Microseconds": "model_name:simple,model_version:1",
    "QueueTime.Milliseconds": "Level:Host",
    "WorkerThreadTime.Milliseconds": "Level:Host",
    "WorkerLoadTime.Milliseconds": "WorkerName:W-0-simple_1,Level:Host",
    "HandlerTime.ms": "ModelName:simple,Level:Model",
    "PredictionTime.ms": "ModelName:simple,Level:Model",
}
"""Name, unit and dimensions of the lines that a real TorchServe writes for the model `simple`."""


@pytest.fixture(params=["UTC", "Asia/Kolkata"])
def zone(request, monkeypatch):
    """Sets a time zone for the server and for the test."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.smoke
@pytest.mark.usefixtures("zone")
def test_lines_are_those_of_torchserve(start):
    """Names, units and dimensions of a real TorchServe; current timestamps, local and in seconds; files from the start."""
    server = start([], repository=EXAMPLES)
    eventually("both files exist", lambda: len(list(folder(server).glob("*.log"))) == 2)
    before = int(time.time())
    assert server.infer("simple", simple(id="my-id"))[0] == 200
    assert server.get("/v2/models/unknown")[0] == 400

    def seen():
        found = lines(server, "ts_metrics") + lines(server, "model_metrics")
        pairs = {(f"{fields['name']}.{fields['unit']}", fields["dims"]) for fields in found}
        return found if set(TORCHSERVE.items()) <= pairs else None

    found = eventually("every line that TorchServe writes", seen)
    for fields in found:
        assert fields["host"] == HOST
        seconds = int(fields["epoch"])
        assert before - 60 <= seconds <= time.time() + 1
        local = time.strptime(fields["ts"].split(",")[0], "%Y-%m-%dT%H:%M:%S")
        assert calendar.timegm(local) - seconds == time.localtime(seconds).tm_gmtoff
    # Readiness probes before the server was ready were also answered with 400.
    refused = total(server.scrape(), "Requests4XX")
    line_sum = lambda: sum(float(fields["value"]) for fields in by_name(lines(server, "ts_metrics"), "Requests4XX"))  # noqa: E731
    assert refused >= 1 and eventually("the lines of all refusals", lambda: line_sum() == refused)
    assert {fields["rid"] for fields in by_name(found, "PredictionTime")} == {"my-id"}
    assert re.fullmatch(r"\d+\.0", by_name(found, "QueueTime")[0]["value"])
    assert re.fullmatch(r"\d+\.\d{1,3}", by_name(found, "ts_queue_latency_microseconds")[0]["value"])


def test_one_line_for_each_request_at_low_rates(start):
    """Sequential requests produce one line with `1.0` each, as with TorchServe."""
    server = start([], repository=EXAMPLES)
    for count in range(1, 4):
        server.infer("simple", simple())
        eventually(
            "the line", lambda: len(by_name(lines(server, "ts_metrics"), "ts_inference_requests_total")) == count
        )
    values = [fields["value"] for fields in by_name(lines(server, "ts_metrics"), "ts_inference_requests_total")]
    assert values == ["1.0"] * 3


def test_one_line_for_each_request_of_many_at_once(start):
    """Below half of the line limit each request has separate latency lines, even if several requests fall between two writes."""
    server = start([], repository=EXAMPLES)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert {status for status, _ in pool.map(lambda _: server.infer("simple", simple()), range(400))} == {200}

    counters = ("ts_inference_requests_total", "Requests2XX")

    def line_sum():
        found = lines(server, "ts_metrics")
        names = ("ts_inference_latency_microseconds", "ts_queue_latency_microseconds", *counters)
        return found if all(len(by_name(found, name)) >= 400 for name in names) else None

    found = eventually("the lines", line_sum)
    stats = server.statistics("simple")["inference_stats"]
    for name, sum_ns in [("ts_inference_latency", stats["success"]["ns"]), ("ts_queue_latency", stats["queue"]["ns"])]:
        values = [float(fields["value"]) for fields in by_name(found, f"{name}_microseconds")]
        assert len(values) == 400 and round(sum(values) * 1000) == sum_ns
        assert min(values) > 0 or name == "ts_queue_latency"
    for name in counters:
        values = [fields["value"] for fields in by_name(found, name)]
        assert set(values) == {"1.0"} and len(values) >= 400, name


def test_request_ids_of_a_batch_are_joined_and_cannot_forge(start):
    """A batch has the ids of its requests in order; ids with separators and line feeds are restored by percent-decoding."""
    server = start(["delay_200"])
    forged = "a,b|#hostname:evil,timestamp:1\n2026-11-20T15:50:37,608 - Fake.ms:1.0|#|#hostname:h,timestamp:1"
    ids = [forged, "second", "drittes ü %2C", "fourth"]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        with held(server, "delay_200"):
            first = pool.submit(server.infer, "delay_200", one("FP32", [1, 1], [1]) | {"id": "alone"})
            until_dispatched(server, "delay_200", 1)
            rest = [pool.submit(server.infer, "delay_200", one("FP32", [1, 1], [1]) | {"id": text}) for text in ids]
            until_received(server, "delay_200", 5)
        answers = [future.result() for future in [first, *rest]]
    assert {status for status, _ in answers} == {200}, answers

    def batches():
        found = by_name(lines(server, "model_metrics"), "PredictionTime")
        batches = [[urllib.parse.unquote(text) for text in fields["rid"].split(",")] for fields in found]
        return batches if sorted(sum(batches, [])) == sorted(["alone", *ids]) else None

    found = eventually("every id", batches)
    assert sorted(len(batch) for batch in found) == [1, 4]
    assert not by_name(lines(server, "model_metrics"), "Fake")


def test_a_missing_request_id_is_null(start):
    """`requestID` is on every line of model_metrics and on no line of ts_metrics (checked by `lines`)."""
    server = start([], repository=EXAMPLES)
    server.infer("simple", simple())
    found = eventually("a line", lambda: by_name(lines(server, "model_metrics"), "PredictionTime"))
    assert [fields["rid"] for fields in found] == ["null"]


def ask(server, number: int):
    """Sends a random request, valid or invalid."""
    choice = random.Random(number).choice(["good", "good", "good", "rows", "shape", "model", "crash", "fail", "json"])
    if choice == "good":
        server.infer("simple", simple(id=f"id-{number}"))
    elif choice == "rows":
        server.infer("simple", {"inputs": [tensor(name, "INT32", [3, 16], ROW * 3) for name in ("INPUT0", "INPUT1")]})
    elif choice == "shape":
        server.infer("simple", {"inputs": [tensor("INPUT0", "INT32", [1, 3], [1, 2, 3])]})
    elif choice == "model":
        server.get("/v2/models/unknown/ready")
    elif choice == "json":
        server.ask("POST", "/v2/models/simple/infer", "{")
    else:
        server.infer(choice, one("FP32", [1], [1]))


@pytest.mark.parametrize("bound", [10_000, 20])
def test_sums_over_lines_equal_the_metrics_and_the_statistics(start, bound, tmp_path):
    """After a random load with failures and worker crashes the sums are exact, including archived files. With a line limit that
    is far too low, counters are still exact; other lines are skipped and counted."""
    models = tmp_path / "all"
    models.mkdir()
    for source in [EXAMPLES / "simple", *(EXAMPLES.parent.parent / "tests/models" / name for name in ("crash", "fail"))]:
        (models / source.name).symlink_to(source)
    options = [f"--tslog-lines-per-second={bound}", "--tslog-max-bytes=20000", "--tslog-keep=1000"]
    server = start([], *options, repository=models)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ask(server, number), range(600)))
    counters = ["Requests2XX", "Requests4XX", "Requests5XX", "ts_inference_requests_total"]
    counters += ["ts_inference_latency_microseconds", "ts_queue_latency_microseconds"]

    def agree():
        found, metrics = sums(lines(server, "ts_metrics")), server.scrape()
        line_sum = {name: sum(value for (other, _), value in found.items() if other == name) for name in counters}
        return line_sum if all(round(line_sum[name] * 1000) == expected(metrics, name) for name in counters) else None

    def expected(metrics, name):
        shown = total(metrics, name)
        if name.startswith("Requests"):
            # The same answers, by status class.
            shown = total_by_class(metrics, name[8])
        return round(shown * 1000)

    line_sum = eventually("lines and /metrics agree", agree)
    assert line_sum["Requests2XX"] > 200 and line_sum["Requests4XX"] > 50 and line_sum["Requests5XX"] > 0
    statistics = {name: server.statistics(name)["inference_stats"]["success"]["ns"] for name in ("simple", "fail")}

    def latencies():
        # Polls, because restarted workers write lines and a file may be rotated between two reads.
        found = sums(lines(server, "ts_metrics"))
        of_model = {name: ("ts_inference_latency_microseconds", f"model_name:{name},model_version:1") for name in statistics}
        return statistics == {name: round(found.get(key, 0) * 1000) for name, key in of_model.items()}

    eventually("lines and statistics agree", latencies)
    # Restarted workers may still write lines.
    metrics, written = eventually("all lines are counted", lambda: counted(server))
    successes = int(total(metrics, "nv_inference_request_success"))
    batches = int(total(metrics, "nv_inference_exec_count"))
    queue_lines = len(by_name(written[0], "QueueTime")) + len(by_name(written[0], "WorkerThreadTime"))
    queue_lines += len(by_name(written[0], "WorkerLoadTime"))
    skipped = total(metrics, "pharos_tslog_lines_skipped_total", file="ts_metrics")
    if bound == 20:
        assert skipped > 0 and len(written[0]) + len(written[1]) < 2000
    else:
        assert skipped == 0 and queue_lines >= successes + batches
        assert list(folder(server).glob("ts_metrics.*.log.gz"))


def counted(server):
    """Returns the metrics and the lines of both files once the metrics count as many lines as the files have, else None."""
    names = ("ts_metrics", "model_metrics")
    written, metrics = [lines(server, name) for name in names], server.scrape()
    line_sum = [total(metrics, "pharos_tslog_lines_total", file=name) for name in names]
    return (metrics, written) if line_sum == [len(found) for found in written] else None


def total_by_class(metrics: dict, digit: str) -> float:
    """Returns the number of HTTP answers in `pharos_requests_total` whose status begins with this digit."""
    result = 0
    for (name, labels), value in metrics.items():
        labels = dict(labels)
        if name == "pharos_requests_total" and labels["protocol"] == "http" and labels["code"].startswith(digit):
            result += value
    return result


@pytest.mark.parametrize("mode", ["prometheus", "log", "legacy", "both"])
def test_modes(start, mode):
    """The outputs of each mode: no files in prometheus, a scrape with only a comment in log, three families in legacy."""
    server = start([], f"--metrics-mode={mode}", repository=EXAMPLES)
    server.infer("simple", simple())
    status, text = server.get("/metrics", server.metrics)
    families = set(re.findall("^# TYPE (\\S+)", text, re.MULTILINE))
    legacy = {"ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"}
    assert status == 200
    if mode == "prometheus":
        assert legacy < families
        holds_for("no files are written", 0.3, lambda: not folder(server).exists())
        return
    assert (families == set()) == (mode == "log") and (families == legacy) == (mode == "legacy")
    assert mode != "log" or text == LOGS_ONLY
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    # OpenMetrics allows no comments except for its own keywords.
    assert mode != "log" or server.get("/metrics", server.metrics, headers=accept) == (200, "# EOF\n")
    eventually("a line", lambda: by_name(lines(server, "model_metrics"), "PredictionTime"))
    eventually("a line", lambda: by_name(lines(server, "ts_metrics"), "QueueTime"))
    assert (by_name(lines(server, "ts_metrics"), "ts_inference_requests_total") == []) == (mode == "legacy")


def test_a_new_definition_opens_and_closes_the_files(start, tmp_path):
    """SIGHUP changes the mode from prometheus to both and back; a file that is no longer written stays unchanged."""
    definition = tmp_path / "metrics.yaml"
    shipped = (EXAMPLES.parent.parent / "metrics.yaml").read_text()

    def define(mode):
        definition.write_text(re.sub("^mode: .*$", f"mode: {mode}", shipped, flags=re.MULTILINE))

    def queue_times():
        return len(by_name(lines(server, "ts_metrics"), "QueueTime"))

    define("prometheus")
    server = start([], f"--metrics-config={definition}", repository=EXAMPLES)
    server.infer("simple", simple())
    assert not folder(server).exists()
    define("both")
    server.process.send_signal(signal.SIGHUP)
    eventually("the files exist", lambda: len(list(folder(server).glob("*.log"))) == 2)
    server.infer("simple", simple())
    eventually("the line", lambda: queue_times() == 1)
    # Counters in the log start at the time when logging was enabled.
    assert [fields["value"] for fields in by_name(lines(server, "ts_metrics"), "ts_inference_requests_total")] == ["1.0"]
    define("prometheus")
    server.process.send_signal(signal.SIGHUP)
    eventually("the definition is reloaded", lambda: server.log.read_text().count("metrics reloaded from") == 2)
    run_for("earlier samples are written", 0.2)
    server.infer("simple", simple())
    holds_for("no line is added", 0.2, lambda: queue_times() == 1)


def test_variables_of_torchserve(start, tmp_path, monkeypatch):
    """`TS_METRICS_MODE` has the same meaning as in TorchServe."""
    monkeypatch.setenv("TS_METRICS_MODE", "prometheus")
    server = start([], repository=EXAMPLES)
    server.infer("simple", simple())
    holds_for("no files are written", 0.3, lambda: not folder(server).exists())
    server.stop()
    monkeypatch.setenv("TS_METRICS_MODE", "LOG")
    server = start([], repository=EXAMPLES)
    assert server.get("/metrics", server.metrics) == (200, LOGS_ONLY)
    server.stop()
    monkeypatch.setenv("TS_METRICS_MODE", "nonsense")
    server = start([], repository=EXAMPLES, wait=False)
    assert server.process.wait(DEADLINE_S) != 0
    assert server.log_tail().splitlines()[0].startswith('error: invalid --metrics-mode "nonsense": allowed are tslog')
    assert "(from TS_METRICS_MODE)" in server.log_tail()


def test_lines_on_standard_output(start):
    """The lines have TorchServe's console format, with level, thread and logger; the same lines are in the files."""
    server = start([], "--tslog-stdout", repository=EXAMPLES)
    server.infer("simple", simple())

    def seen():
        matches = [LINE.match(line) for line in server.log.read_text().splitlines()]
        loggers = defaultdict(set)
        for match in filter(None, matches):
            loggers[match["logger"]].add(match["name"])
            assert match["lvl"] == "INFO "
        return "PredictionTime" in loggers["MODEL_METRICS"] and "QueueTime" in loggers["TS_METRICS"]

    eventually("both loggers' lines", seen)


def test_a_full_standard_output_does_not_block_inference(start, tmp_path):
    """If no process reads the pipe, inference and files continue, and lines that do not fit are counted."""
    read_end, write_end = os.pipe()
    server = start([], "--tslog-stdout", "--tslog-lines-per-second=0", repository=EXAMPLES, wait=False)
    server.kill()
    server.launch(stdout=write_end)
    os.close(write_end)
    try:
        server.wait_until_ready()
        for _ in range(400):
            assert server.infer("simple", simple())[0] == 200
        eventually("the lines", lambda: len(by_name(lines(server, "ts_metrics"), "QueueTime")) == 400)
        assert server.stop() == 0
        os.set_blocking(read_end, False)
        assert all(LINE.match(line) for line in os.read(read_end, 1 << 20).decode().split("\n")[:-1])
    finally:
        os.close(read_end)


def test_json_lines(start):
    """One object per line, with the keys that TorchServe's layout intends."""
    server = start([], "--tslog-format=json", "--tslog-stdout", repository=EXAMPLES)
    server.infer("simple", simple(id='a"b'))
    found = eventually("lines", lambda: [json.loads(line) for line in raw(server, "model_metrics")])
    prediction = next(entry for entry in found if entry["MetricName"] == "PredictionTime")
    assert prediction.pop("Value") > 0 and abs(prediction.pop("Timestamp") - time.time()) < 60
    assert prediction == {
        "MetricName": "PredictionTime", "Unit": "ms", "Type": "GAUGE", "HostName": HOST, "RequestId": 'a"b',
        "Dimensions": [{"Name": "ModelName", "Value": "simple"}, {"Name": "Level", "Value": "Model"}],
        "DimensionNames": ["ModelName", "Level"], "DimensionValues": ["simple", "Model"], "Logger": "MODEL_METRICS",
    }  # fmt: skip
    entries = eventually("lines", lambda: [json.loads(line) for line in raw(server, "ts_metrics")])
    assert all(entry["RequestId"] is None and entry["Logger"] == "TS_METRICS" for entry in entries)
    assert any(line.startswith('{"MetricName"') for line in server.log.read_text().splitlines())


def test_a_full_disk_does_not_affect_inference_and_is_logged_once(start):
    """With `/dev/full` as the file, inference continues, the error is logged once and counted; later the disk has space again."""
    server = start([], repository=EXAMPLES)
    path = folder(server) / "ts_metrics.log"
    path.unlink()
    path.symlink_to("/dev/full")
    for _ in range(20):
        assert server.infer("simple", simple())[0] == 200
    errors = ("pharos_tslog_write_errors_total", (("file", "ts_metrics"),))
    eventually("the error is counted", lambda: server.scrape().get(errors, 0) >= 1)
    eventually("the write is retried", lambda: server.scrape().get(errors, 0) >= 3)
    assert server.log.read_text().count("cannot log metrics to") == 1
    path.unlink()
    eventually("writing works again", lambda: "logging metrics to" in server.log.read_text() and path.is_file())
    eventually("no line was lost", lambda: len(by_name(lines(server, "ts_metrics"), "QueueTime")) == 20)
    assert sums(lines(server, "ts_metrics"))["ts_inference_requests_total", "model_name:simple,model_version:1"] == 20


def test_a_directory_that_cannot_be_written(start, tmp_path):
    """A file has the path of the directory: the server starts, answers, and logs once the file is removed."""
    place = tmp_path / "taken"
    place.write_text("in the way")
    server = start([], f"--metrics-location={place}", repository=EXAMPLES)
    server.logs = place
    assert server.infer("simple", simple())[0] == 200
    assert server.log.read_text().count("cannot log metrics to") == 2
    place.unlink()
    eventually("the line", lambda: by_name(lines(server, "ts_metrics"), "QueueTime"))


def test_two_servers_do_not_share_a_directory(start):
    """The lines of two writers would be mixed: the second writes nothing there and reports why; its inference is not affected."""
    first = start([], repository=EXAMPLES)
    assert first.infer("simple", simple())[0] == 200
    eventually("the first writes", lambda: by_name(lines(first, "ts_metrics"), "QueueTime"))
    second = start([], f"--metrics-location={first.logs}", repository=EXAMPLES)
    for _ in range(50):
        assert second.infer("simple", simple())[0] == 200
        assert first.infer("simple", simple())[0] == 200
    eventually("the second reports it", lambda: "another server writes its metric logs to" in second.log.read_text())
    written = "".join(path.read_text() for path in first.logs.glob("*.log"))
    assert "\n\n" not in written and not written.startswith("\n")
    first.stop()
    assert second.infer("simple", simple())[0] == 200
    eventually("the second writes when the first has ended", lambda: "logging metrics to" in second.log.read_text())


def test_moved_or_deleted_files_are_created_again(start):
    """As with logrotate: no signal is needed, and no line goes to the wrong file."""
    server = start([], repository=EXAMPLES)
    path = folder(server) / "ts_metrics.log"
    eventually("the file exists", path.exists)
    path.rename(folder(server) / "moved")
    server.infer("simple", simple())
    eventually("a new file has the line", lambda: path.exists() and by_name(lines(server, "ts_metrics"), "QueueTime"))
    path.unlink()
    server.infer("simple", simple())
    eventually("another new file has the line", lambda: path.exists() and by_name(lines(server, "ts_metrics"), "QueueTime"))


def test_lines_of_all_answers_are_written_before_exit(start):
    """SIGTERM follows directly after the answers; every line is in the files."""
    server = start([], repository=EXAMPLES)
    for _ in range(10):
        assert server.infer("simple", simple())[0] == 200
    assert server.stop() == 0
    assert len(by_name(lines(server, "ts_metrics"), "QueueTime")) == 10
    assert len(by_name(lines(server, "model_metrics"), "PredictionTime")) == 10
    found = sums(lines(server, "ts_metrics"))
    assert found["ts_inference_requests_total", "model_name:simple,model_version:1"] == 10


def test_rotation_keeps_the_newest_files(start):
    """Files are rotated by size and compressed; the newest two are kept."""
    server = start([], "--tslog-max-bytes=2000", "--tslog-keep=2", repository=EXAMPLES)
    stop = threading.Event()

    def load():
        while not stop.is_set():
            server.infer("simple", simple())

    thread = threading.Thread(target=load)
    thread.start()

    def archived():
        return sorted(int(path.name.split(".")[2]) for path in folder(server).glob("ts_metrics.*.log.gz"))

    try:
        eventually("five rotations, two archived files", lambda: len(archived()) == 2 and archived()[-1] >= 5)
    finally:
        stop.set()
        thread.join()
    assert server.stop() == 0
    assert len(archived()) == 2 and not list(folder(server).glob("*.part"))
    assert lines(server, "ts_metrics")


def switches(server) -> int:
    """Returns how often the writer thread has gone to sleep."""
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "tslog":
            return sleeps(task)
    raise AssertionError("no thread tslog")


def test_the_writer_does_not_wake_up_when_idle(start):
    """The writer sleeps until something is recorded."""
    server = start([], repository=EXAMPLES)
    server.infer("simple", simple())
    settled("the number of times that the writer has gone to sleep", lambda: switches(server), 2)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE_S) == 0
