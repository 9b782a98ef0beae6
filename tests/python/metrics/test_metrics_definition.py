"""The definition of the metrics: errors in metrics.yaml, SIGHUP, modes, Triton's settings, `pharos metrics`."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess

import pytest

from harness.server import MODELS, ROOT, binary, samples, total
from harness.waiting import DEADLINE_S, eventually

SHIPPED = ROOT / "metrics.yaml"
TORCHSERVE = ROOT / "src/metrics/testdata/torchserve.yaml"
MODEL = "add_sub_int32"
HANDLER = "    - {name: HandlerTime, unit: ms, dimensions: [ModelName, Level]}\n"
PREDICTION = "    - {name: PredictionTime, unit: ms, dimensions: [ModelName]}\n"
RELOADS = "  counter:\n    - {name: pharos_metrics_reloads_total, unit: Count, dimensions: [result]}\n"


def definition(*gauges: str) -> str:
    """Returns a small metrics.yaml with these model metrics."""
    return f"mode: both\nts_metrics:\n{RELOADS}model_metrics:\n  gauge:\n" + "".join(gauges)


def laughs() -> str:
    """Returns a YAML bomb: each of nine levels refers to the previous one ten times."""
    levels = [f"  - &l{at} [{', '.join([f'*l{at - 1}'] * 10)}]" for at in range(1, 10)]
    return "\n".join(["dimensions:", "  - &l0 [lol]", *levels, "ts_metrics: *l9", ""])


def gauge(entry: str) -> bytes:
    """Returns a definition with one model gauge."""
    return f"model_metrics:\n  gauge:\n    - {{{entry}}}\n".encode()


BAD = {
    "empty": (b"", ":1:1: found nothing"),
    "comment": (b"# nothing\n", ":2:1: found nothing"),
    "no YAML": (b"ts_metrics: [1\n", ":"),
    "not UTF-8": (b"mode: both\n# \xff\n", ":2:3: the byte 0xff is not UTF-8"),
    "a key": (b"mod: both\n", ":1:1: unknown key `mod`; allowed are `mode`, `dimensions`"),
    "a mode": (b"mode: all\n", ":1:7: mode: unknown mode `all`; allowed are `tslog`, `prometheus`, `both`"),
    "a name": (gauge("name: two words, unit: s"), ":3:14: model_metrics.gauge[0].name: `two words` is not a valid metric name"),
    "no unit": (gauge("name: a"), "metric `a` has no unit"),
    "a unit": (gauge("name: a, unit: 'x|y'"), "`x|y` is not a valid unit; allowed are"),
    "a label": (gauge("name: a, unit: s, dimensions: [b-c]"), ":3:39: model_metrics.gauge[0].dimensions[0]: `b-c` is not a valid label name"),
    "two cases": (gauge("name: a, unit: s, dimensions: [Hostname, hostname]"), "differ only in case"),
    "twice": (gauge("name: a, unit: s}\n    - {name: a, unit: s"), ":4:14: model_metrics.gauge[1].name: metric `a` is defined twice"),
    "reserved": (gauge("name: pharos_mine, unit: s"), "reserved for built-in metrics"),
    "built in": (gauge("name: CPUUtilization, unit: s"), "must be a gauge in ts_metrics"),
    "a slip": (b"ts_metrics:\n  counter:\n    - {name: nv_inference_request_sucess, unit: Count}\n", "; the closest name is `nv_inference_request_success`"),
    "an anchor": (gauge("name: a, unit: s, dimensions: [&a a, *nope]"), ":3:45: unknown anchor `nope`; anchors defined before it: `a`"),
    "a label of the worker's": (gauge("name: HandlerTime, unit: ms, dimensions: [ModelName, Level, Foo]"), ":3:68: model_metrics.gauge[0].dimensions[2]: the label `Foo` is not allowed on `HandlerTime`"),
    "collision": (gauge("name: a_sum, unit: s}\n  histogram:\n    - {name: a, unit: s"), "collides with the gauge `a_sum`"),
    "laughs": (laughs().encode(), ":2:5: "),
    "brackets": (b"[" * 1_000_000, "nested deeper than 1000"),
    "too long": (b"#" * (1 << 21), "the file has more than 1048576 bytes"),
    "a renamed metric": (
        b"ts_metrics:\n  histogram:\n    - {name: nv_inference_request_duration_histogram_us, unit: us}\n",
        "`nv_inference_request_duration_histogram_us` is now named `pharos_request_duration_seconds`",
    ),
    "two metrics with one further name": (
        b"model_metrics:\n  gauge:\n    - {name: a, unit: s, also_as: x}\n    - {name: b, unit: s, also_as: [x]}\n",
        "the name `x` in `also_as` is given twice",
    ),
}


def run(*args, env=None) -> subprocess.CompletedProcess:
    """Runs the executable to its end, which must come soon."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PHAROS_", "TS_"))}
    return subprocess.run([binary(), *args], capture_output=True, text=True, timeout=DEADLINE_S, env={**clean, **(env or {})})


@pytest.mark.parametrize("text,message", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_with_its_position(tmp_path, text, message):
    """`pharos metrics check` and the server start report the same error and exit with 1."""
    file = tmp_path / "metrics.yaml"
    file.write_bytes(text)
    for args in (["metrics", "check", file], [f"--model-repository={MODELS}", "--http-port=0", f"--metrics-config={file}"]):
        result = run(*args)
        assert result.returncode == 1, result
        reported = result.stderr.splitlines()[-1].removeprefix("pharos: ")
        assert re.match(rf"{re.escape(str(file))}:\d+:\d+: .", reported) and message in reported, reported
        assert result.stdout == ""


def test_what_a_file_contains_does_not_control_the_terminal(tmp_path):
    file = tmp_path / "metrics.yaml"
    file.write_text('mode: "a\\e[31m\\u202Eb"\n')
    for args in (["metrics", "check", file], ["metrics", "list", file], ["slo", "rules", f"--metrics-config={file}"]):
        result = run(*args)
        assert result.returncode == 1 and "\\u{1b}[31m\\u{202e}" in result.stderr, result
        assert "\x1b" not in result.stderr + result.stdout and "\u202e" not in result.stderr


@pytest.mark.parametrize("file,message", [("none.yaml", "No such file"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read(tmp_path, file, message):
    """The error has the file and the reason."""
    command, server = ["metrics", "check", tmp_path / file], [f"--model-repository={MODELS}", f"--metrics-config={tmp_path / file}"]
    for args, flag in [(command, ""), (server, "--metrics-config ")]:
        result = run(*args)
        assert result.returncode == 1
        assert f"cannot read {flag}'{tmp_path / file}': {message}" in result.stderr, result.stderr


def test_the_built_in_definition_can_be_edited(start, tmp_path):
    """`pharos metrics default` prints the built-in file, with which a server starts; an edited copy has an effect."""
    printed = run("metrics", "default")
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, SHIPPED.read_text(), "")
    file = tmp_path / "metrics.yaml"
    head, counters, rest = printed.stdout.rpartition("  counter:\n")
    file.write_text(f"{head}{counters}    - {{name: mine, unit: Count}}\n{rest}")
    assert run("metrics", "check", file).returncode == 0
    server = start([MODEL], f"--metrics-config={file}")
    assert total(server.scrape(), "pharos_build_info") == 1
    assert f"metrics from '{file}': " in server.log.read_text()
    names = [{metric["name"] for metric in json.loads(run("metrics", "list", *of, "--format=json").stdout)} for of in ([], [file])]
    assert names[1] - names[0] == {"mine"} and names[0] < names[1]


def test_check_summarises_a_valid_file():
    """Both the shipped file and TorchServe's are valid."""
    result = run("metrics", "check", SHIPPED)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r".*metrics\.yaml: \d+ metrics \(\d+ counters, .*\), \d+ switched off, mode both\n", result.stdout)
    result = run("metrics", "check", TORCHSERVE)
    assert result.returncode == 0
    assert "21 metrics (6 counters, 15 gauges, 0 histograms, 0 summaries)" in result.stdout


@pytest.mark.parametrize(
    "text,warning",
    [
        ("mode: both\n", "no metric is defined: /metrics, the metric logs and every other view stay empty"),
        ("ts_metrics:\n  counter: [{name: Request2XX, unit: Count}]\n", "the server does not record `Request2XX`; did you mean `Requests2XX`?"),
    ],
)
def test_probable_mistakes_are_warnings(start, tmp_path, text, warning):
    """By the command, at the start and at SIGHUP; the file is accepted nevertheless."""
    file = tmp_path / "metrics.yaml"
    file.write_text(text)
    result = run("metrics", "check", file)
    assert (result.returncode, result.stderr) == (0, f"{file}: warning: {warning}\n")
    server = start([MODEL], f"--metrics-config={file}")
    assert re.search(rf"WARN.*{re.escape(warning)}", server.log.read_text())
    send_sighup(server, warning)


def test_list_in_every_form(tmp_path):
    """Table, JSON and Markdown list the same metrics; without a file those of the shipped one."""
    listed = json.loads(run("metrics", "list", "--format", "json").stdout)
    named = set(re.findall(r"^ +- name: (\w+)$", SHIPPED.read_text(), re.M))
    assert {metric["name"] for metric in listed} == named
    assert all(metric["help"] and metric["unit"] for metric in listed)
    off = [metric["name"] for metric in listed if not metric["enabled"]]
    assert off and all("_summary_" in name for name in off if name != "pharos_llm_adapters_info")
    table = run("metrics", "list").stdout.splitlines()
    assert table[0].split() == "NAME TYPE UNIT DIMENSIONS MODES ON RECORDED BY HELP".split()
    assert [line.split()[0] for line in table[1:]] == [metric["name"] for metric in listed]
    file = tmp_path / "m.yaml"
    file.write_text(definition(HANDLER, "    - {name: mine, unit: s, help: 'a|b'}\n"))
    markdown = run("metrics", "list", file, "--format=markdown").stdout
    assert "| HandlerTime | gauge | ms | ModelName,Level | tslog,prometheus | on | worker | Time that the last batch spent in" in markdown
    assert "| on | models | a\\|b |\n" in markdown
    assert "nv_inference_count" not in markdown


def test_help_stays_grouped_and_shows_the_commands():
    """The flags are under their headings; `metrics` has a separate help."""
    text = run("--help").stdout
    assert all(f"\n{heading}:\n" in text for heading in ("Server", "Model repository", "Metrics", "Logging")), text
    commands = text.partition("Commands:\n")[2].partition("\n\n")[0]
    # A description that is too long goes on in lines with a larger indent.
    expected = ["serve", "tritonserver", "health", "metrics", "slo", "trace", "top", "torchserve"]
    assert re.findall(r"^  (\S+)", commands, re.MULTILINE) == expected
    assert "check" in run("metrics", "--help").stdout
    assert run("metrics", "chek", "x").returncode == 2


@pytest.mark.parametrize("arguments", [("metrics", "list"), ("metrics", "default"), ("metrics", "check", ROOT / "metrics.yaml")])
def test_output_that_cannot_be_written(arguments):
    """The exit code says that the output is not complete; a reader that ends early is no error."""
    with open("/dev/full", "w") as full:
        result = subprocess.run([binary(), *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert result.returncode == 1 and "cannot write to standard output: No space left on device" in result.stderr, result.stderr
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([binary(), *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "option,words",
    [
        ("--metrics-mode=all", ['invalid --metrics-mode "all"', "tslog, prometheus, both, log, legacy"]),
        ("--metrics-config=latencies=true", ["--metrics-config", "latencies", "counter_latencies", "or a file"]),
        ("--metrics-config=also_as=sglang", ["--metrics-config", "also_as is 'sglang'", "allowed is vllm"]),
        ("--metrics-config=summary_quantiles=7", ["--metrics-config", "'7'", "0.5:0.05"]),
    ],
)
def test_bad_options(option, words):
    """The error has the flag, the value and the allowed values."""
    result = run(f"--model-repository={MODELS}", option)
    assert result.returncode == 2
    assert all(word in result.stderr for word in words), result.stderr


def infer(server):
    """Sends one inference request, which must succeed."""
    inputs = [{"name": name, "datatype": "INT32", "shape": [1, 4], "data": [1] * 4} for name in ("INPUT0", "INPUT1")]
    status, answer = server.infer(MODEL, {"inputs": inputs})
    assert status == 200, answer


def names(server) -> set:
    """Returns the names of all samples."""
    return {name for name, _ in server.scrape()}


def eventually_shows(server, name: str, **labels):
    """Waits for a series: a worker applies the new definition after the log line."""

    def check():
        infer(server)
        return (name, tuple(sorted(labels.items()))) in server.scrape()

    eventually(f"{name}{labels} is shown", check)


def send_sighup(server, reported: str):
    """Sends SIGHUP and waits until the log has one more line with `reported`."""
    before = server.log.read_text().count(reported)
    server.process.send_signal(signal.SIGHUP)
    eventually(f"the log has {reported!r} again", lambda: server.log.read_text().count(reported) > before)


def test_sighup_adds_and_removes_metrics(start, tmp_path):
    """In the frontend, in running workers, and in those started later."""
    file = tmp_path / "metrics.yaml"
    file.write_text(definition(HANDLER))
    server = start([MODEL], f"--metrics-config={file}")
    infer(server)
    assert "HandlerTime" in names(server) and "PredictionTime" not in names(server)
    reloads = {result: total(server.scrape(), "pharos_metrics_reloads_total", result=result) for result in ("success", "failure")}
    assert reloads == {"success": 0, "failure": 0}

    file.write_text(definition(PREDICTION))
    send_sighup(server, "added PredictionTime; removed HandlerTime")
    eventually_shows(server, "PredictionTime", ModelName=MODEL)
    after = server.scrape()
    assert not any(name == "HandlerTime" for name, _ in after)
    assert total(after, "pharos_metrics_reloads_total", result="success") == 1

    file.write_text(definition(PREDICTION, HANDLER.replace("[ModelName, Level]", "[Level]")))
    send_sighup(server, "added HandlerTime")
    eventually_shows(server, "HandlerTime", Level="Model")

    # A worker that starts now gets the current definition.
    file.write_text(definition(HANDLER))
    send_sighup(server, "removed PredictionTime; changed HandlerTime")
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    eventually("another worker runs", lambda: server.workers() - {worker} and server.get("/v2/health/ready")[0] == 200)
    infer(server)
    assert ("HandlerTime", (("Level", "Model"), ("ModelName", MODEL))) in server.scrape()
    send_sighup(server, "nothing has changed")
    assert server.stop() == 0


def test_a_bad_file_at_sighup_changes_nothing(start, tmp_path):
    """The error is logged with its position, and counted."""
    file = tmp_path / "metrics.yaml"
    file.write_text(definition(HANDLER))
    server = start([MODEL], f"--metrics-config={file}")
    infer(server)
    before = {key for key in server.scrape()}
    file.write_text(definition(PREDICTION, HANDLER.replace("unit", "units")))
    send_sighup(server, f"the previous definition stays in use: {file}:8:")
    file.unlink()
    send_sighup(server, "metrics.yaml': No such file")
    infer(server)
    assert {key for key in server.scrape()} == before
    assert total(server.scrape(), "pharos_metrics_reloads_total", result="failure") == 2
    assert total(server.scrape(), "pharos_metrics_reloads_total", result="success") == 0


def test_sighup_under_load_loses_no_count(start, tmp_path):
    """Counters of metrics that are kept continue while the definition changes continuously."""
    file = tmp_path / "metrics.yaml"
    shipped = SHIPPED.read_text()
    without = shipped.replace("    - name: PredictionTime\n", "    - name: PredictionTime\n      enabled: false\n")
    assert without != shipped
    file.write_text(shipped)
    server = start([MODEL], f"--metrics-config={file}")
    for count in range(1, 41):
        # At once: a signal of the round before may be handled only now, and must not find half of a file.
        (tmp_path / "next.yaml").write_text(without if count % 2 else shipped)
        (tmp_path / "next.yaml").rename(file)
        server.process.send_signal(signal.SIGHUP)
        infer(server)
        metrics = server.scrape()
        assert total(metrics, "nv_inference_request_success", model=MODEL) == count
        assert total(metrics, "ts_inference_requests_total", model_name=MODEL) == count
    assert total(server.scrape(), "pharos_metric_samples_dropped_total") == 0


def test_sighup_without_a_file(start):
    """The built-in definition is reloaded: nothing changes, and the server continues."""
    server = start([MODEL])
    send_sighup(server, "metrics reloaded from the built-in metrics.yaml: nothing has changed")
    infer(server)


THREE = {"ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"}


@pytest.mark.parametrize("mode,expected", [("tslog", set()), ("LOG", set()), ("legacy", THREE)])
def test_modes_enable_and_disable_the_scrape(start, mode, expected):
    """The option overrides the mode in the file, which is both."""
    server = start([MODEL], f"--metrics-mode={mode}")
    infer(server)
    assert names(server) == expected


def test_modes_by_torchserves_variables(start, tmp_path, monkeypatch):
    """Its file and its mode apply, and the command line has precedence."""
    file = tmp_path / "metrics.yaml"
    shutil.copy(TORCHSERVE, file)
    monkeypatch.setenv("TS_METRICS_CONFIG", str(file))
    monkeypatch.setenv("TS_METRICS_MODE", "legacy")
    server = start([MODEL])
    infer(server)
    assert names(server) == THREE
    server = start([MODEL], "--metrics-mode=both")
    infer(server)
    assert THREE | {"HandlerTime", "PredictionTime"} <= names(server)
    assert "nv_inference_count" not in names(server)


def test_torchserves_file_gives_torchserves_series(start):
    """Names and labels of its shipped file."""
    server = start([MODEL], f"--metrics-config={TORCHSERVE}")
    infer(server)
    status, text = server.get("/metrics", server.metrics)
    assert status == 200
    series = samples(text)
    for name in ("HandlerTime", "PredictionTime"):
        assert (name, (("Hostname", socket.gethostname()), ("Level", "Model"), ("ModelName", MODEL))) in series
    labels = [dict(labels) for name, labels in series if name == "ts_inference_requests_total"]
    assert [set(found) for found in labels] == [{"hostname", "model_name", "model_version"}]
    assert all(name in TORCHSERVE.read_text() for name, _ in series)
    assert "# HELP Requests2XX Number of HTTP responses" in text


def test_worker_times_may_have_the_labels_of_the_design(start, tmp_path):
    """Aliases as in TorchServe's design document: `model` and `host`."""
    file = tmp_path / "metrics.yaml"
    aliases = 'dimensions:\n  model_name: &model_name "model"\n  host: &host "host"\n'
    metrics = [f"    - {{name: {name}, unit: ms, dimensions: [*model_name, *host]}}\n" for name in ("HandlerTime", "PredictionTime")]
    file.write_text(aliases + definition(*metrics))
    server = start([MODEL], f"--metrics-config={file}")
    infer(server)
    labels = (("host", socket.gethostname()), ("model", MODEL))
    assert {("HandlerTime", labels), ("PredictionTime", labels)} <= server.scrape().keys()


def test_latency_counters_are_disabled_and_counts_stay(start):
    """Triton's setting, without its side effect on the counts."""
    server = start([MODEL], "--metrics-config", "counter_latencies=false", "--metrics-config=histogram_latencies=false")
    infer(server)
    found = names(server)
    assert {"nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count"} <= found
    assert not any(re.fullmatch(r"nv_inference_\w+_(duration|histogram)_us\w*", name) for name in found), found
    send_sighup(server, "nothing has changed")
    assert "nv_inference_request_duration_us" not in names(server)


def test_histograms_are_not_in_the_namespace_of_triton(start):
    """Without the counters of durations, only this server's histograms have the durations; no name can be mistaken for Triton's."""
    server = start([MODEL], "--metrics-config", "counter_latencies=false")
    infer(server)
    found = names(server)
    assert not any(name.startswith("nv_inference_request_duration") for name in found), found
    assert "pharos_request_duration_seconds_bucket" in found


def test_further_names_for_a_transition(start, tmp_path):
    """`also_as` exports the same series under an old name, in the old unit. After its removal and SIGHUP the old name is gone."""
    new = "    - {name: pharos_request_duration_seconds, unit: Seconds, dimensions: [model, version], buckets: [0.0005, 30]MORE}\n"
    old = "nv_inference_request_duration_histogram_us"
    text = f"mode: both\nts_metrics:\n{RELOADS}  histogram:\n{new}"
    file = tmp_path / "metrics.yaml"
    file.write_text(text.replace("MORE", f", also_as: [request_seconds, {{name: {old}, unit: us}}]"))
    server = start([MODEL], f"--metrics-config={file}", "--tslog-stdout")
    infer(server)
    scraped = server.scrape()
    name, labels = "pharos_request_duration_seconds", (("model", MODEL), ("version", "1"))
    seconds = scraped[f"{name}_sum", labels]
    assert seconds > 0 and scraped["request_seconds_sum", labels] == seconds
    assert scraped[f"{old}_sum", labels] == pytest.approx(seconds * 1e6, rel=1e-12)
    assert scraped[f"{old}_bucket", (("le", "500"), *labels)] == scraped[f"{name}_bucket", (("le", "0.0005"), *labels)]
    assert scraped[f"{old}_bucket", (("le", "30000000"), *labels)] == scraped[f"{old}_count", labels] == 1
    assert f"# HELP {old} Other name of {name}, in us\n" in server.get("/metrics", server.metrics)[1]
    assert old not in server.log.read_text(), "metric logs have the metric's own name only"
    file.write_text(text.replace("MORE", ""))
    send_sighup(server, f"changed {name}")
    assert not {found for found in names(server) if found.startswith((old, "request_seconds"))}
    assert server.scrape()[f"{name}_sum", labels] == seconds
