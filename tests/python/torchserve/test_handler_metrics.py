"""Metrics that handlers record: each value keeps the name of its dimension and its unit, and no model takes another's samples away."""

import re

import pytest

from harness.waiting import eventually
from torchserve.archive_files import files, zipped
from torchserve.home import PYTHON, Home, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")

HANDLER = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

def record(metrics):
    {record}

def handle(data, context):
    if not data:
        return None
    record(context.metrics)
    return ["recorded"] * len(data)
"""
DEFINED = """
dimensions: [&model "ModelName", &level "Level"]
ts_metrics:
  counter:
    - {name: pharos_metric_samples_dropped_total, unit: Count, dimensions: [model, version]}
model_metrics:
  counter:
    - {name: Answers, unit: Count, dimensions: [*model, *level]}
    - {name: Orders, unit: Count, dimensions: [shop, *model, *level]}
  gauge:
    - {name: Took, unit: Milliseconds, dimensions: [*model]}
    - {name: Picture, unit: kB, dimensions: []}
"""
DROPPED = "pharos_metric_samples_dropped_total"


def home_of(folder, mode, definition=DEFINED, detect=False, **handlers):
    """Returns a server with a model for each of these statements, which record a batch's metrics."""
    home = Home(folder, [
        f"metrics_mode={mode}", f"metrics_config={folder}/metrics.yaml", f"model_metrics_auto_detect={str(detect).lower()}", "load_models=all",
    ])  # fmt: skip
    (folder / "metrics.yaml").write_text(definition)
    for name, record in handlers.items():
        store(home, name, record)
    return home


def store(home, name, record, version="1.0"):
    """Writes the archive of a model to the model store."""
    content = files(name, HANDLER.replace("{record}", record))
    content["MAR-INF/MANIFEST.json"] = content["MAR-INF/MANIFEST.json"].replace('"1.0"', f'"{version}"', 1)
    (home.store / f"{name}-{version}.mar").write_bytes(zipped(content))


def series(home, name) -> dict:
    """Returns the values of a metric by its labels, without the host's and what follows the last comma of TorchServe's form."""
    return {
        tuple((label, value) for label, value in labels if label not in ("", "Hostname")): value
        for (metric, labels), value in home.scrape().items()
        if metric == name
    }


def lines(home, name) -> list:
    """Returns the dimensions and values of a metric's log lines."""
    text = (home.folder / "logs/model_metrics.log").read_text()
    return [(dims, float(value)) for value, dims in re.findall(rf" - {name}\.\w+:([^|]+)\|#([^|]*)\|", text)]


def out(home) -> str:
    """Returns the server's log."""
    return (home.folder / "out").read_text(errors="replace")


MORE = 'metrics.add_counter("Answers", 1, dimensions=[Dimension("tier", "gold")])'
OTHER = 'metrics.add_counter("Orders", 1, dimensions=[Dimension("till", "2")])'


@pytest.mark.parametrize("mode", ["prometheus", "log"])
def test_a_dimension_that_is_not_defined_is_refused_by_name(tmp_path, mode):
    """One dimension more than the definition has, and as many with another name. No value moves to another name."""
    usual = 'metrics.add_counter("Answers", 2); metrics.add_counter("Orders", 4, dimensions=[Dimension("shop", "north")])'
    with home_of(tmp_path, mode, more=MORE, other=OTHER, usual=usual) as home:
        for model in ("more", "other", "usual"):
            assert home.predict(model)[0] == 200
        for model, metric, dimension in (("more", "Answers", "tier"), ("other", "Orders", "till")):
            refusal = f"samples of model {model}/1 were dropped: metric `{metric}` has no dimension `{dimension}`, only ["
            eventually("the log names metric, model and dimension", lambda: refusal in out(home))
            assert out(home).count(refusal) == 1
        if mode == "log":
            eventually("the line is written", lambda: lines(home, "Orders"))
            assert lines(home, "Answers") == [("ModelName:usual,Level:Model", 2)]
            assert lines(home, "Orders") == [("shop:north,ModelName:usual,Level:Model", 4)]
            return
        of_usual = (("Level", "Model"), ("ModelName", "usual"))
        assert {tuple(sorted(labels)): value for labels, value in series(home, "Answers").items()} == {of_usual: 2}
        assert [sorted(labels) for labels in series(home, "Orders")] == [[*of_usual, ("shop", "north")]]
        eventually("both are counted", lambda: sorted(series(home, DROPPED).values()) == [0, 1, 1])


FREE = """metrics.add_counter("Free", 1, dimensions=[Dimension("lang", "en")])
    metrics.add_counter("Free", 2, dimensions=[Dimension("lang", "en"), Dimension("tier", "gold")])"""


@pytest.mark.parametrize("mode", ["prometheus", "log"])
def test_samples_of_a_detected_metric_may_have_different_dimensions(tmp_path, mode):
    """Also in one model. The dimensions of the first sample have no precedence."""
    with home_of(tmp_path, mode, detect=True, free=FREE) as home:
        assert home.predict("free")[0] == 200
        if mode == "log":
            eventually("both lines are written", lambda: len(lines(home, "Free")) == 2)
            by_value = {value: set(dims.split(",")) for dims, value in lines(home, "Free")}
            assert by_value == {1: {"lang:en", "ModelName:free", "Level:Model"}, 2: {"lang:en", "tier:gold", "ModelName:free", "Level:Model"}}
            return
        found = {value: dict(labels) for labels, value in series(home, "Free").items()}
        common = {"lang": "en", "ModelName": "free", "Level": "Model"}
        assert found == {1: common, 2: common | {"tier": "gold"}}
        assert not any(series(home, DROPPED).values())


COUNTER = 'metrics.add_counter("Seen", 1, dimensions=[Dimension("lang", "x")])'
GAUGE = 'metrics.add_metric("Seen", 5, "Count", dimensions=[Dimension("tier", "y")], metric_type=MetricTypes.GAUGE)'
OTHERWISE = 'metrics.add_counter("Seen", 3, dimensions=[Dimension("tier", "y")])'


@pytest.mark.parametrize("mode", ["prometheus", "log"])
@pytest.mark.parametrize("second", ["model", "version"])
def test_a_metric_of_two_models_keeps_the_samples_of_both(tmp_path, mode, second):
    """Another model, or the next version of the same, records a detected metric with other dimensions."""
    name, version = ("b", "1.0") if second == "model" else ("a", "2.0")
    with home_of(tmp_path, mode, detect=True, a=COUNTER) as home:
        store(home, name, OTHERWISE, version)
        home.register(f"{name}-{version}.mar")
        assert home.predict("a")[0] == 200
        assert home.predict(name, path=f"/{version}")[0] == 200
        if mode == "log":
            eventually("both have lines", lambda: sorted(value for _, value in lines(home, "Seen")) == [1, 3])
        else:
            assert {value: dict(labels).get("tier") for labels, value in series(home, "Seen").items()} == {1: None, 3: "y"}
        assert "were dropped" not in out(home) and "were refused" not in out(home)


def test_the_type_of_a_detected_metric_ends_with_its_last_series(tmp_path):
    """A scrape has one type for each name: the samples of the second model wait for the end of the first."""
    with home_of(tmp_path, "prometheus", detect=True, a=COUNTER, b=GAUGE) as home:
        assert (home.predict("a")[0], home.predict("b")[0]) == (200, 200)
        eventually("the second is refused", lambda: "metric `Seen` is a counter, not a gauge" in out(home))
        assert list(series(home, "Seen").values()) == [1]
        assert home.manage("DELETE", "/models/a")[0] == 200
        eventually("the series of the first ends", lambda: not series(home, "Seen"))
        assert home.predict("b")[0] == 200
        assert {value: dict(labels)["tier"] for labels, value in series(home, "Seen").items()} == {5: "y"}


def test_metric_logs_have_both_types(tmp_path):
    """Lines have no type."""
    with home_of(tmp_path, "log", detect=True, a=COUNTER, b=GAUGE) as home:
        assert (home.predict("a")[0], home.predict("b")[0]) == (200, 200)
        eventually("both have lines", lambda: sorted(value for _, value in lines(home, "Seen")) == [1, 5])


@pytest.mark.parametrize("detect", [False, True])
def test_times_that_a_file_leaves_out_are_off(tmp_path, detect):
    """They are neither recorded nor counted as dropped."""
    with home_of(tmp_path, "prometheus", detect=detect, plain="pass") as home:
        assert [home.predict("plain")[0] for _ in range(5)] == [200] * 5
        assert not any(name in ("PredictionTime", "HandlerTime") for name, _ in home.scrape())
        assert series(home, DROPPED) and not any(series(home, DROPPED).values())
        assert "were dropped" not in out(home)


def test_values_in_another_unit_are_converted(tmp_path):
    """The definition has milliseconds and kilobytes; `add_time` and `add_size` are called with others."""
    record = 'metrics.add_time("Took", 0.5, unit="s"); metrics.add_size("Picture", 1.5, unit="MB")'
    with home_of(tmp_path, "prometheus", units=record) as home:
        assert home.predict("units")[0] == 200
        assert (*series(home, "Took").values(), *series(home, "Picture").values()) == (500, 1536)
