"""Compares the logs and scrapes of a real TorchServe 0.12.0 in five configurations (`tests/golden_torchserve`) with those of this
server for the same metrics.yaml and the same lines printed by a worker: log lines, families, types, units, label sets.

Each folder has the output of TorchServe's example model `mnist_custom_metrics` after one inference."""

import re
import socket

import pytest

from harness.inference import one
from harness.server import MODELS, samples
from harness.waiting import eventually
from metrics.log_lines import LINE, by_name, lines, raw
from torchserve.golden import DECLARED, DETECTED, GOLDEN, SHIPPED, golden_scrape, kinds

HOST = socket.gethostname()
MODEL = "mnist_custom_metrics"
MODES = {"log_default": None, "log": DECLARED, "prometheus": DECLARED, "prometheus_auto": DETECTED, "legacy_auto": DETECTED}

RUNTIME = {"HandlerTime", "PredictionTime"}
"""The metrics that a worker itself records: TorchServe's in Python, to two decimals of a millisecond; ours over the ring, to the
nanosecond, so the values differ. TorchServe's lines are replayed nevertheless."""

DIFFERENCES = {
    "no GPU, no family": {"GPUUtilization", "GPUMemoryUtilization", "GPUMemoryUsed"},
    "counted from 0, before there is anything to count": {"Requests4XX", "Requests5XX"},
    "bounds by unit: all percentages are beyond those of TorchServe": {"ExamplePercentMetric_bucket"},
}
"""The intended differences of /metrics: reason -> families, or names of samples. All families have labels
without a trailing comma, integers without `.0`, and help texts that describe the metric. See also `same`."""


def off(mode: str) -> set:
    """Returns the metrics of `RUNTIME` that the mode's file leaves out: they are off here, also with detection; see the table of
    differences in docs/src/torchserve/metrics.md."""
    return {name for name in RUNTIME if name not in (MODES[mode] or SHIPPED)}


ONLY_OURS = {"Requests4XX"}
"""Lines of ts_metrics.log that only this server writes, because the test polls for readiness."""


def config(mode: str) -> dict:
    """Returns the config.properties of a golden folder."""
    return dict(line.split("=", 1) for line in (GOLDEN / mode / "config.properties").read_text().splitlines())


def golden(mode: str, name: str) -> list:
    """Returns the parsed lines of a golden file."""
    found = [LINE.match(line) for line in (GOLDEN / mode / name).read_text().splitlines()]
    assert all(found), f"{mode}/{name}"
    return [match.groupdict() for match in found]


def same(name: str, value: str) -> str:
    """Returns a label's value without intended differences: the machine; the version, which TorchServe calls `default` unless a
    request names it and which is always the number here; a worker's name, which has a port in TorchServe."""
    if name.lower() == "hostname":
        assert value in ("vm", HOST)
        return "*"
    if name == "model_version":
        assert value in ("default", "1")
        return "*"
    if name == "WorkerName":
        assert value in (f"W-29000-{MODEL}_1.0", f"W-0-{MODEL}_1")
        return "*"
    return value


def series(text: str) -> dict:
    """Returns name and labels -> value, without intended differences."""
    found = {}
    for (name, labels), value in samples(text).items():
        found[name, frozenset((label, same(label, text)) for label, text in labels)] = value
    return found


def orders(text: str) -> dict:
    """Returns the name of each sample -> the names of its labels, in the order of the text."""
    lines = re.findall(r"^(\w+)\{(.*)\} ", text, re.M)
    return {name: re.findall(r'(\w+)="', labels) for name, labels in lines}


def shape(fields: dict) -> tuple:
    """Returns the common part of all lines of a series, without intended differences."""
    pairs = [pair.split(":") for pair in fields["dims"].split(",")] if fields["dims"] else []
    dimensions = tuple((name, same(name, value)) for name, value in pairs)
    return fields["name"], fields["unit"], dimensions, fields["rid"] is None


def body(fields: dict) -> tuple:
    """Returns all fields of a line except its times."""
    return tuple(fields[name] for name in ("name", "unit", "value", "dims", "host", "rid"))


def printed(mode: str) -> list:
    """Returns the ten lines that TorchServe's worker printed in this run or, where no log has them, in the run `legacy_auto`."""
    types = kinds(golden_scrape("prometheus")) | kinds(golden_scrape("prometheus_auto"))
    units = {"ms": "Milliseconds", "count": "Count"}
    shown = {name: value for (name, _), value in series(golden_scrape(mode)).items()}
    result = []
    for fields in golden("legacy_auto", "model_metrics.log"):
        name, unit = fields["name"], units.get(fields["unit"], fields["unit"])
        logged = by_name(golden(mode, "model_metrics.log"), name)
        value = float(logged[0]["value"]) if logged else shown.get(name, float(fields["value"]))
        value = int(value) if value.is_integer() else value
        rid = (logged or [fields])[0]["rid"]
        rid = "" if rid == "null" else f",{rid}"
        kind = types[name].upper()
        result.append(f"[METRICS]{name}.{unit}:{value}|#{fields['dims']}|#type:{kind}|#hostname:vm,{fields['epoch']}{rid}")
    return result


@pytest.fixture(params=MODES)
def replayed(request, start, tmp_path):
    """A server with TorchServe's configuration whose worker has printed TorchServe's lines; and the mode's name."""
    mode = request.param
    models = tmp_path / "models" / MODEL
    (models / "1").mkdir(parents=True)
    text = (MODELS / "print/config.pbtxt").read_text()
    (models / "config.pbtxt").write_text(text.replace('name: "print"', f'name: "{MODEL}"'))
    file = tmp_path / "metrics.yaml"
    own = MODES[mode]
    file.write_text(SHIPPED.partition("model_metrics:\n")[0] + f"model_metrics:\n{own}" if own else SHIPPED)
    said = config(mode)
    options = [f"--metrics-config={file}", f"--metrics-mode={said.get('metrics_mode', 'log')}", "--tslog-stdout"]
    if said.get("model_metrics_auto_detect") == "true":
        options.append("--model-metrics-auto-detect")
    server = start([], *options, repository=models.parent)
    sent = printed(mode)
    assert len(sent) == 10
    status, answer = server.infer(MODEL, one("BYTES", [len(sent)], sent))
    assert status == 200, answer
    return server, mode


def test_a_workers_lines_and_series_are_those_of_torchserve(replayed):
    """The lines are identical byte for byte, and the series have the same values."""
    server, mode = replayed
    recorded = [fields for fields in golden(mode, "model_metrics.log") if fields["name"] not in off(mode)]
    wanted = sorted(map(body, recorded))
    exact = {key: value for key, value in series(golden_scrape(mode)).items() if key[0] not in DIFFERENCES["no GPU, no family"]}
    custom = {name for name in (line.split("]")[1].split(".")[0] for line in printed(mode)) if name not in RUNTIME}

    def all_there():
        if not set(wanted) <= set(map(body, lines(server, "model_metrics"))):
            return False
        found = series(server.get("/metrics", server.metrics)[1])
        return all(found.get(key) == value for key, value in exact.items() if key[0] in custom)

    eventually("all lines and values of TorchServe", all_there)
    rest = lines(server, "model_metrics")
    for fields in recorded:
        rest.remove(next(line for line in rest if body(line) == body(fields)))
    logged = {fields["name"] for fields in golden(mode, "model_metrics.log")}
    assert {fields["name"] for fields in rest} <= RUNTIME & logged
    shapes = set(map(shape, golden(mode, "model_metrics.log")))
    assert {shape(fields) for fields in rest} <= shapes
    assert len(rest) == len(RUNTIME & {fields["name"] for fields in rest}), "one of each for the one batch"


def test_the_frontends_lines_are_those_of_torchserve(replayed):
    """Name, unit and dimensions of all lines in ts_metrics.log, and no line that TorchServe does not write there."""
    server, mode = replayed
    wanted = set(map(shape, golden(mode, "ts_metrics.log")))
    eventually("all of them", lambda: wanted <= set(map(shape, lines(server, "ts_metrics"))))
    more = set(map(shape, lines(server, "ts_metrics"))) - wanted
    assert {name for name, *_ in more} <= (ONLY_OURS if wanted else set())


def test_a_scrape_has_torchserves_families_and_series(replayed):
    """Types and label sets are equal in both directions, except for the listed differences."""
    server, mode = replayed
    torchserve = golden_scrape(mode)
    different = set().union(*DIFFERENCES.values(), off(mode))
    wanted, wanted_kinds = set(series(torchserve)), kinds(torchserve)

    def shown():
        text = server.get("/metrics", server.metrics)[1]
        missing = {key for key in wanted - set(series(text)) if key[0] not in different}
        return None if missing else text or "\n"

    text = eventually("every series of TorchServe's", shown)
    absent = DIFFERENCES["no GPU, no family"] | off(mode)
    assert kinds(text) == {name: kind for name, kind in wanted_kinds.items() if name not in absent}
    assert {name for name, _ in set(series(text)) ^ wanted} <= different
    shown_orders = orders(text)
    for name, labels in orders(torchserve).items():
        assert shown_orders.get(name, labels) == labels, name


def test_every_line_is_read_by_torchserves_expression(replayed):
    """In the files, and with level, thread and logger on standard output; both have the same number of lines."""
    server, mode = replayed
    logs = {name: lambda name=name: raw(server, name) for name in ("ts_metrics", "model_metrics")}
    loggers = {fields["logger"] for fields in golden(mode, "console_metrics_lines.log")}

    def console():
        found = re.findall(r"^.* (?:TS|MODEL)_METRICS - .*$", server.log.read_text(errors="replace"), re.M)
        return found if len(found) == sum(len(log()) for log in logs.values()) else None

    eventually("lines of each logger", lambda: loggers == {LINE.match(line)["logger"] for line in console() or []})
    assert server.stop() == 0
    for name, log in logs.items():
        assert bool(log()) == bool((GOLDEN / mode / f"{name}.log").read_text()), name
        assert all(LINE.match(line) for line in log())
    found = console()
    assert found is not None and all(LINE.match(line)["lvl"] == "INFO " for line in found)


@pytest.mark.parametrize("mode", [mode for mode, own in MODES.items() if own != DETECTED and mode != "log_default"])
def test_the_definition_has_the_metrics_of_the_run(mode):
    """The metrics.yaml above has the names and units in TorchServe's help texts and lines."""
    used = dict(re.findall(r"^# HELP (\S+) .* metric with unit: (\S+)$", golden_scrape(mode), re.M))
    used |= {fields["name"]: fields["unit"] for fields in golden(mode, "model_metrics.log")}
    declared = dict(re.findall(r"name: (\w+)(?:,|\n *)\s*unit: (\w+)", SHIPPED + MODES[mode]))
    assert used.items() <= declared.items()
    assert mode == "log" or used == declared
