"""What becomes of models and versions that cannot be loaded, in poll mode unless a test says otherwise."""

import shutil

import pytest

from harness.inference import one
from harness.server import total
from harness.waiting import eventually
from python_backend.worker import PYTHON, has_worker
from repository.repositories import World
from repository.repository_tables import ensemble, model

POLL = ["--model-control-mode=poll", "--repository-poll-secs=1", "--exit-on-error=false", f"--python={PYTHON}"]
CONFIG = """backend: "python" max_batch_size: 4 version_policy { all { } }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }
"""
CODE = """import triton_python_backend_utils as utils

open("PATH").close()


class TritonPythonModel:
    def execute(self, requests):
        tensors = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""
VALUES = one("FP32", [1, 2], [3, 4])
pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")


def write(folder, name: str, needs):
    """Writes a model whose code opens the file `needs`."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1/model.py").write_text(CODE.replace("PATH", str(needs)))
    (folder / name / "config.pbtxt").write_text(CONFIG)


def entries(server, name: str) -> list:
    return [(one.get("version"), one.get("state")) for one in server.index().get(name, [])]


def test_a_load_that_failed_is_repeated(start, tmp_path):
    """Without a change of its files, after 10 s. A model that was there at the start, and one that was added."""
    folder = tmp_path / "models"
    write(folder, "first", tmp_path / "needed")
    server = start([], *POLL, repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually("the model has failed", lambda: entries(server, "first") == [("1", "UNAVAILABLE")])
    write(folder, "second", tmp_path / "needed")
    eventually("the added model has failed", lambda: entries(server, "second") == [("1", "UNAVAILABLE")])
    (tmp_path / "needed").touch()
    for name in ("first", "second"):
        eventually("the model answers", lambda name=name: server.infer(name, VALUES)[0] == 200)
    server.wait_until_ready()
    repeated = [line for line in server.log.read_text().splitlines() if "models that could not be loaded are tried again" in line]
    assert 1 <= len(repeated) <= 4, repeated


def test_a_model_that_failed_and_was_removed_is_forgotten(start, tmp_path):
    """It does not keep the server from being ready."""
    folder = tmp_path / "models"
    write(folder, "model", "/dev/null")
    server = start([], *POLL, repository=folder)
    write(folder, "broken", tmp_path / "missing")
    eventually("the model has failed", lambda: entries(server, "broken") == [("1", "UNAVAILABLE")])
    assert server.get("/v2/health/ready")[0] == 400
    shutil.rmtree(folder / "broken")
    eventually("the server is ready", lambda: server.get("/v2/health/ready")[0] == 200)
    assert not entries(server, "broken")


def test_the_unload_of_a_model_that_failed_makes_the_server_ready(start, tmp_path):
    """With loads by request. The index has the reason of the failure still, as Triton's."""
    folder = tmp_path / "models"
    write(folder, "broken", tmp_path / "missing")
    server = start([], "--model-control-mode=explicit", f"--python={PYTHON}", repository=folder)
    assert server.ask("POST", "/v2/repository/models/broken/load", b"{}")[0] == 400
    assert server.get("/v2/health/ready")[0] == 400
    assert server.ask("POST", "/v2/repository/models/broken/unload", b"{}")[0] == 200
    assert server.get("/v2/health/ready")[0] == 200
    (entry,) = server.index()["broken"]
    assert entry["state"] == "UNAVAILABLE" and "No such file" in entry["reason"]
    assert server.ask("POST", "/v2/repository/models/broken/load", b"{}")[0] == 400
    assert server.get("/v2/health/ready")[0] == 400


def test_a_version_that_failed_and_was_removed_is_forgotten(start, tmp_path):
    """It is neither in the index, nor keeps the server from being ready. If the model has no version any more, the index says so."""
    folder = tmp_path / "models"
    write(folder, "model", "/dev/null")
    server = start([], *POLL, repository=folder)
    (folder / "model/2").mkdir()
    (folder / "model/2/model.py").write_text("raise RuntimeError('broken')\n")
    eventually("the version has failed", lambda: entries(server, "model") == [("1", "READY"), ("2", "UNAVAILABLE")])
    assert server.get("/v2/health/ready")[0] == 400
    # Python may have written byte code beside the file.
    shutil.rmtree(folder / "model/2")
    eventually("the version is forgotten", lambda: entries(server, "model") == [("1", "READY")])
    assert server.get("/v2/health/ready")[0] == 200

    write(folder, "other", tmp_path / "missing")
    eventually("the other model has failed", lambda: entries(server, "other") == [("1", "UNAVAILABLE")])
    shutil.rmtree(folder / "other/1")

    def reason() -> str:
        (entry,) = server.index()["other"]
        return entry["reason"]

    eventually("the reason is that it has no versions", lambda: "no version to run" in reason())


def test_loads_that_cannot_begin_are_counted(start, tmp_path):
    """In every mode: a configuration that cannot be read, a model without versions, and one that no repository has."""
    folder = tmp_path / "models"
    for name, config in (("typo", CONFIG.replace("max_batch_size", "max_batch_sise")), ("empty", CONFIG)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "typo/1").mkdir()
    (folder / "typo/1/model.py").touch()

    def failures(server) -> float:
        return total(server.scrape(), "pharos_model_changes_total", change="load", result="failure")

    server = start([], "--model-control-mode=explicit", repository=folder)
    for number, name in enumerate(("typo", "empty", "missing"), 1):
        assert server.ask("POST", f"/v2/repository/models/{name}/load", "{}")[0] >= 400
        assert failures(server) == number, name
    started = start([], "--exit-on-error=false", repository=folder, wait=False)
    started.wait_until_ready("/v2/health/live")
    eventually("both loads have failed", lambda: failures(started) == 2)


def last_loads(server) -> dict:
    """Returns 1 for each model whose latest load succeeded, and 0 for the others."""
    series = server.scrape().items()
    return {dict(labels)["model"]: value for (name, labels), value in series if name == "pharos_model_last_load_successful"}


def test_failed_loads_are_a_metric(start, tmp_path):
    """`pharos_model_last_load_successful`: also for reloads after which the earlier files serve, and for models without a version."""
    folder = tmp_path / "models"
    write(folder, "model", "/dev/null")
    write(folder, "broken", tmp_path / "missing")
    write(folder, "unreadable", "/dev/null")
    (folder / "unreadable/config.pbtxt").write_text(CONFIG.replace("max_batch_size", "max_batch_sise"))
    server = start([], *POLL, repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")

    def loads() -> dict:
        return last_loads(server)

    eventually("two models have failed", lambda: loads() == {"model": 1, "broken": 0, "unreadable": 0})
    (folder / "model/config.pbtxt").write_text(CONFIG.replace("TYPE_FP32", "TYPE_FP23"))
    eventually("a reload has failed", lambda: loads()["model"] == 0)
    assert server.infer("model", VALUES)[0] == 200
    (folder / "model/config.pbtxt").write_text(CONFIG)
    (folder / "unreadable/config.pbtxt").write_text(CONFIG)
    shutil.rmtree(folder / "broken")
    # The index keeps a model that has had versions.
    eventually("the others are loaded", lambda: loads() == {"model": 1, "unreadable": 1, "broken": 1})


def test_an_unload_ends_a_failed_load(start, tmp_path):
    """With explicit loads: an unloaded model has no failed load any more, and an unknown model has no series."""
    folder = tmp_path / "models"
    write(folder, "model", "/dev/null")
    server = start([], "--model-control-mode=explicit", f"--python={PYTHON}", repository=folder)

    def ask(verb: str, name="model") -> tuple:
        status, _ = server.ask("POST", f"/v2/repository/models/{name}/{verb}", "{}")
        return status, last_loads(server).get(name)

    status, last_load = ask("load", "missing")
    assert status >= 400
    assert last_load is None, "a model that does not exist has a metric"
    assert ask("load") == (200, 1)
    write_code = (folder / "model/1/model.py").write_text
    write_code("raise RuntimeError('broken')\n")
    assert ask("load") == (400, 0)
    assert server.infer("model", VALUES)[0] == 200
    assert ask("unload") == (200, 1)
    assert ask("load") == (400, 0)
    assert ask("unload") == (200, 1)
    write_code(CODE.replace("PATH", "/dev/null"))
    assert ask("load") == (200, 1)


@pytest.mark.parametrize("mode", ["explicit", "on-demand"])
def test_a_model_of_the_command_line_that_cannot_be_read_has_failed(start, tmp_path, mode):
    """No response says so. A model that does not exist has no series."""
    folder = tmp_path / "models"
    write(folder, "unreadable", "/dev/null")
    (folder / "unreadable/config.pbtxt").write_text(CONFIG.replace("max_batch_size", "max_batch_sise"))
    options = [f"--model-control-mode={mode}", "--load-model=unreadable", "--load-model=missing", "--exit-on-error=false"]
    server = start([], *options, f"--python={PYTHON}", repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually("the load has failed", lambda: last_loads(server) == {"unreadable": 0})
    (entry,) = server.index()["unreadable"]
    assert "max_batch_sise" in entry["reason"], entry
    (folder / "unreadable/config.pbtxt").write_text(CONFIG)
    assert server.ask("POST", "/v2/repository/models/unreadable/load", "{}")[0] == 200
    assert last_loads(server) == {"unreadable": 1}


def test_an_ensemble_without_its_member_has_failed(start, tmp_path):
    """The removal of a member is no unload of the ensemble, which serves again with the member."""
    folder = tmp_path / "models"
    folder.mkdir()
    world = World(None, folder, False)
    world.put("member", model(), [1])
    world.put("both", ensemble("both", "member"), [1])
    server = start([], *POLL, repository=folder)

    def loads() -> float:
        return last_loads(server)["both"]

    assert loads() == 1
    (folder / "member").rename(tmp_path / "member")
    eventually("the ensemble has failed", lambda: loads() == 0)
    (tmp_path / "member").rename(folder / "member")
    eventually("the ensemble is loaded", lambda: loads() == 1 and entries(server, "both") == [("1", "READY")])
