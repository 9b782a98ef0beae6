"""The progress of a load that its worker reports: in the index, the metrics, `pharos top` and the log."""

import subprocess

import pytest
import tritonclient.grpc as grpc

from backends import native_backends
from backends.native_backends import MISSING, TESTING, compile, config_of, parameter, place, write
from harness.server import Server, binary
from harness.waiting import DEADLINE_S, eventually
from python_backend.worker import PYTHON, has_worker, model

METRIC = "pharos_model_load_progress_ratio"
FOLLOW = parameter("create", "follow")
needs_worker = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture
def native(tmp_path):
    """A server whose models `one`, with one instance, and `two`, with two, report the numbers that `tell` gives them."""
    write(tmp_path / "models", "one", config_of(FOLLOW))
    write(tmp_path / "models", "two", config_of(FOLLOW + "instance_group [ { count: 2 } ]\n"))
    compile(TESTING, place(tmp_path / "backends", "testing"))
    with native_backends.server(tmp_path, tmp_path / "models", tmp_path / "backends", "--model-control-mode=explicit") as server:
        yield server


def tell(folder, instance: str, text):
    """Gives the next number to the worker of an instance, or `end`."""
    version = folder / "models" / instance.split("_")[0] / "1"
    (version / ".next").write_text(str(text))
    (version / ".next").replace(version / instance)


def begin_load(server, name: str):
    """Sends a request to load a model, whose answer `expect_loaded` reads."""
    connection = server.connect()
    connection.request("POST", f"/v2/repository/models/{name}/load", b"")
    return connection


def expect_loaded(server, name: str, connection):
    """Waits until the model is ready: it has neither a reason nor progress."""
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"")
    connection.close()
    assert entry(server, name) == ("READY", "")
    assert progress(server) == {}


def entry(server, name: str) -> tuple:
    """Returns the state and the reason of a model in the index."""
    (found,) = server.index()[name]
    return found.get("state", ""), found.get("reason", "")


def shows(server, name: str, reason: str):
    """Waits for the reason of a model that is loading."""
    eventually(f"'{name}' is loading with '{reason}'", lambda: entry(server, name) == ("LOADING", reason))


def progress(server) -> dict:
    """Returns the values of the metric by model."""
    return {dict(labels)["model"]: value for (name, labels), value in server.scrape().items() if name == METRIC}


@needs_compiler
def test_every_view_has_the_progress_of_a_load(native, tmp_path):
    """The index over both protocols, the metric that the live page reads, `pharos top`, and a line in the log after 5 s."""
    loading = begin_load(native, "one")
    shows(native, "one", "")
    assert progress(native) == {}
    tell(tmp_path, "one_0", 0.25)
    shows(native, "one", "25 % loaded")
    assert progress(native) == {"one": 0.25}
    with grpc.InferenceServerClient(native.grpc) as client:
        models = client.get_model_repository_index(client_timeout=DEADLINE_S).models
        assert [(model.state, model.reason) for model in models if model.name == "one"] == [("LOADING", "25 % loaded")]
    command = [binary(), "top", "--once", "--interval=0.2", native.metrics]
    page = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S).stdout
    assert any(line.split()[:4] == ["one", "1", "25", "%"] for line in page.splitlines()), page
    eventually("the log has a line", lambda: "25 % loaded after " in native.log.read_text())
    tell(tmp_path, "one_0", "end")
    expect_loaded(native, "one", loading)


@needs_compiler
def test_wrong_reports_have_no_effect(native, tmp_path):
    """A number that is smaller than an earlier one is ignored; one that is no fraction is an error of the backend's call."""
    loading = begin_load(native, "one")
    tell(tmp_path, "one_0", 0.43)
    shows(native, "one", "43 % loaded")
    tell(tmp_path, "one_0", 0.2)
    for wrong, shown in [("nan", "NaN"), ("-0.5", "-0.5"), ("1.5", "1.5"), ("inf", "inf")]:
        tell(tmp_path, "one_0", wrong)
        text = f"the progress of a load is {shown}; expected a number from 0 to 1"
        eventually(f"the log has '{text}'", lambda text=text: text in native.log.read_text())
    assert entry(native, "one") == ("LOADING", "43 % loaded")
    tell(tmp_path, "one_0", 0.431)
    tell(tmp_path, "one_0", 1)
    shows(native, "one", "100 % loaded")
    tell(tmp_path, "one_0", "end")
    expect_loaded(native, "one", loading)


@needs_compiler
def test_a_version_has_the_least_progress_of_its_instances(native, tmp_path):
    """Nothing is shown until each instance has reported something; a loaded instance counts as 100 %."""
    loading = begin_load(native, "two")
    tell(tmp_path, "two_0_0", 0.8)
    shows(native, "two", "")
    tell(tmp_path, "two_0_1", 0.3)
    shows(native, "two", "30 % loaded")
    tell(tmp_path, "two_0_0", "end")
    tell(tmp_path, "two_0_1", 0.9)
    shows(native, "two", "90 % loaded")
    tell(tmp_path, "two_0_1", "end")
    expect_loaded(native, "two", loading)


@needs_compiler
def test_an_unload_ends_the_progress(native, tmp_path):
    """After an unload during the load, the index and the metrics have no progress."""
    loading = begin_load(native, "one")
    tell(tmp_path, "one_0", 0.5)
    shows(native, "one", "50 % loaded")
    assert native.ask("POST", "/v2/repository/models/one/unload", b"")[0] == 200
    loading.getresponse().read()
    loading.close()
    eventually("the model is unloaded", lambda: entry(native, "one") == ("UNAVAILABLE", "unloaded"))
    eventually("the metric has no series", lambda: progress(native) == {})


@needs_worker
def test_a_python_model_reports_its_progress(tmp_path):
    """`pharos_worker.report_load_progress` in `initialize`: wrong numbers, and calls after the load, raise."""
    model(tmp_path / "models", "own", "own_progress", "max_batch_size: 1\n")
    with Server(tmp_path, [tmp_path / "models"], [f"--python={PYTHON}", "--model-control-mode=explicit"]) as server:
        loading = begin_load(server, "own")
        shows(server, "own", "25 % loaded")
        (tmp_path / "models/own/1/go_on").touch()
        expect_loaded(server, "own", loading)
        assert "the progress of a load is 1.5; expected a number from 0 to 1" in server.log.read_text()
        body = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        status, answer = server.infer("own", body)
        assert status == 500 and "the progress of a load can be reported only in initialize" in answer["error"]
