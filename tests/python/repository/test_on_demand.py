"""Models that are loaded with their first request (`--model-control-mode=on-demand`, the parameter `load`), and unloaded when they
have had no requests (`--model-idle-unload-secs`)."""

import json
import queue
import random
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness.generate import with_backend
from harness.inference import one
from harness.models import IO, copy_models, write
from harness.sequence_models import config as sequence_config, controls
from harness.processes import thread_seconds
from harness.server import MODELS, total
from harness.waiting import DEADLINE_S, eventually, holds_for, pause_as_client, run_for
from python_backend.worker import PYTHON, has_worker
from repository.repository_tables import ensemble, model

MODE = "--model-control-mode=on-demand"
VALUES = one("FP32", [1, 2], [3, 4])
IDLE = "--model-idle-unload-secs=1"
SLOW = """backend: "test" max_batch_size: 4 {io} {more}
parameters {{ key: "function" value {{ string_value: "delay" }} }}
parameters {{ key: "delay_ms" value {{ string_value: "{ms}" }} }}
model_warmup [ {{ name: "slow" batch_size: 1 inputs {{ key: "INPUT0"
  value {{ data_type: TYPE_FP32 dims: [ 2 ] zero_data: true }} }} }} ]
"""
"""A model whose load takes as long as one of its executions."""


def put(folder, name: str, config: str, versions=(1,)):
    """Writes a model; its configuration has no backend."""
    for version in versions:
        (folder / name / str(version)).mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(with_backend(config))


def entry(server, name: str) -> tuple:
    """Returns the state and the reason of a model's only version in the index."""
    (found,) = server.index()[name]
    return found.get("state"), found.get("reason", "")


RESTING = ("UNAVAILABLE", "loaded on demand")


def loads(server, name: str, result="success") -> float:
    return total(server.scrape(), "pharos_on_demand_loads_total", model=name, result=result)


def unloads(server, name: str) -> float:
    return total(server.scrape(), "pharos_on_demand_unloads_total", model=name, reason="idle")


def assert_answers(server, name: str):
    status, answer = server.infer(name, VALUES)
    assert (status, answer.get("outputs", [{}])[0].get("data")) == (200, [3, 4]), answer


@pytest.fixture
def repository(tmp_path):
    """A repository with a model, a slow one, and an ensemble of two others."""
    folder = tmp_path / "models"
    for name in ("identity", "first", "second"):
        put(folder, name, model())
    put(folder, "both", ensemble("both", "first", "second"))
    write(folder, "slow", SLOW.format(io=IO, ms=1000, more=""))
    return folder


def test_models_rest_until_their_first_request(start, repository):
    """Until then they have no process, and the server answers what it knows from their files; it knows the same after the load."""
    server = start([], MODE, repository=repository)
    assert not server.workers()
    assert {name: entry(server, name) for name in server.index()} == dict.fromkeys(server.index(), RESTING)
    paths = [f"/v2/models/identity{version}{what}" for version in ("", "/versions/1") for what in ("", "/config")]
    resting = [server.get(path) for path in paths]
    assert [status for status, _ in resting] == [200] * 4, resting
    assert server.get("/v2/models/identity/ready")[0] == 400
    assert server.get("/v2/health/ready")[0] == 200
    assert not server.workers(), "queries must not load the model"
    assert_answers(server, "identity")
    assert entry(server, "identity") == ("READY", "")
    assert server.get("/v2/models/identity/ready")[0] == 200
    loaded = [server.get(path) for path in paths]
    # A loaded model adds the engine that runs it.
    without_engine = [re.sub(r'"engine":\{[^}]*\},?', "", text) for _, text in loaded]
    assert [json.loads(text) for text in without_engine] == [json.loads(text) for _, text in resting]
    assert len(server.workers()) == 1
    assert loads(server, "identity") == 1
    assert total(server.scrape(), "pharos_on_demand_wait_seconds_count", model="identity") == 1


def over_grpc(server, name: str):
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
    tensor.set_data_from_numpy(numpy.array([[3, 4]], numpy.float32))
    assert client.get_model_metadata(name).inputs[0].name == "INPUT0"
    assert client.get_model_config(name).config.name == name
    assert client.infer(name, [tensor]).as_numpy("OUTPUT0").tolist() == [[3, 4]]


def over_a_grpc_stream(server, name: str):
    client, answers = tritonclient.grpc.InferenceServerClient(server.grpc), []
    client.start_stream(lambda result, error: answers.append((result, error)))
    for number in range(20):
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(numpy.array([[number]], numpy.float32))
        client.async_stream_infer(name, [tensor], request_id=str(number))
    eventually("all answers are there", lambda: len(answers) == 20)
    client.stop_stream()
    assert [error for _, error in answers] == [None] * 20
    assert [result.get_response().id for result, _ in answers] == [str(number) for number in range(20)], "in order"


def over_generate(server, name: str):
    status, text = server.ask("POST", f"/v2/models/{name}/generate", json.dumps({"INPUT0": [3, 4]}))
    assert status == 200 and json.loads(text)["OUTPUT0"] == [3, 4], text


def over_v1(server, name: str):
    status, text = server.ask("POST", f"/v1/models/{name}:predict", json.dumps({"instances": [[3, 4]]}))
    assert status == 200 and json.loads(text)["predictions"] == [[3, 4]], text


@pytest.mark.parametrize("ask", [assert_answers, over_grpc, over_a_grpc_stream, over_generate, over_v1])
def test_every_kind_of_request_loads(start, repository, ask):
    """An ensemble loads its members."""
    server = start([], MODE, repository=repository)
    for name, workers in (("identity", 1), ("both", 3)):
        ask(server, name)
        assert len(server.workers()) == workers
        assert loads(server, name) == 1
    assert loads(server, "first") == 0, "the ensemble has loaded it"


@pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
def test_a_model_that_calls_another_loads_it(start, repository):
    """The call of a Python model waits for the load; it gets the reason if the other cannot be loaded."""
    code = """import triton_python_backend_utils as utils

class TritonPythonModel:
    def execute(self, requests):
        def call(request):
            tensor = utils.get_input_tensor_by_name(request, "INPUT0")
            called = utils.InferenceRequest(model_name=self.target, requested_output_names=["OUTPUT0"], inputs=[tensor])
            answer = called.exec()
            if answer.has_error():
                return utils.InferenceResponse(error=answer.error())
            return utils.InferenceResponse([utils.get_output_tensor_by_name(answer, "OUTPUT0")])
        return [call(request) for request in requests]

    def initialize(self, arguments):
        import json
        self.target = json.loads(arguments["model_config"])["parameters"]["target"]["string_value"]
"""
    write(repository, "broken", SLOW.format(io=IO, ms=1, more="").replace('"delay"', '"no_such_function"'))
    for name, target in (("caller", "both"), ("failing", "broken")):
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(code)
        target = f'parameters {{ key: "target" value {{ string_value: "{target}" }} }}'
        config = f'backend: "python" max_batch_size: 4 {IO} {target}'
        (repository / name / "config.pbtxt").write_text(config)
    server = start([], MODE, f"--python={PYTHON}", repository=repository)
    assert_answers(server, "caller")
    assert entry(server, "both") == ("READY", "")
    status, answer = server.infer("failing", VALUES)
    assert status == 503 and "'broken'" in answer["error"] and "no_such_function" in answer["error"], answer


def test_requests_share_one_load(start, repository):
    """Each waits for it, and a client that leaves does not end it."""
    server = start([], MODE, repository=repository)
    leaving = server.connect()
    leaving.request("POST", "/v2/models/slow/infer", json.dumps(VALUES))
    eventually("the model loads", lambda: entry(server, "slow")[0] == "LOADING")
    leaving.close()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: assert_answers(server, "slow"), range(16)))
    assert loads(server, "slow") == 1
    assert total(server.scrape(), "pharos_on_demand_wait_seconds_count", model="slow") == 17, "the client that left has waited too"
    assert total(server.scrape(), "pharos_on_demand_waiting_requests") == 0


def test_a_load_does_not_delay_the_end_of_others(start, repository):
    """A request that waits for its model holds no other model."""
    write(repository, "slower", SLOW.format(io=IO, ms=5000, more=""))
    server = start([], MODE, repository=repository)
    assert_answers(server, "identity")
    (worker,) = server.workers()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.infer, "slower", VALUES)
        eventually("the other model loads", lambda: entry(server, "slower")[0] == "LOADING")
        assert server.ask("POST", "/v2/repository/models/identity/unload", b"")[0] == 200
        eventually("the unloaded model has ended", lambda: worker not in server.workers())
        assert entry(server, "slower")[0] == "LOADING"
        assert waiting.result()[0] == 200


def test_loads_leave_the_event_loops(start, repository):
    """Loads by request and on demand run on other threads: an event loop that loads a model answers no requests meanwhile."""
    server = start([], MODE, repository=repository)
    before = thread_seconds(server.process.pid)
    for _ in range(60):
        assert server.ask("POST", "/v2/repository/models/identity/load", b"")[0] == 200
        assert server.ask("POST", "/v2/repository/models/identity/unload", b"")[0] == 200
        assert_answers(server, "identity")
        assert server.ask("POST", "/v2/repository/models/identity/unload", b"")[0] == 200
    spent = {name: seconds - before.get(name, 0) for name, seconds in thread_seconds(server.process.pid).items()}
    loops = sum(seconds for name, seconds in spent.items() if name.startswith("loop-"))
    assert loops < 0.5 * sum(spent.values()), spent


def test_the_number_of_waiting_requests_is_limited(start, repository):
    """Further requests fail at once, and those for loaded models are not concerned."""
    server = start([], MODE, "--on-demand-max-waiting=2", repository=repository)
    assert_answers(server, "identity")
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(server.infer, "slow", VALUES) for _ in range(2)]
        eventually("two requests wait", lambda: total(server.scrape(), "pharos_on_demand_waiting_requests") == 2)
        status, answer = server.infer("slow", VALUES)
        assert (status, answer["error"]) == (
            503,
            "model 'slow' is not loaded, and 2 requests wait for models to load, which is the maximum (--on-demand-max-waiting)",
        )
        assert_answers(server, "identity")
        assert [request.result()[0] for request in first] == [200, 200]


def test_a_request_waits_no_longer_than_its_timeout(start, repository):
    """The load continues without it."""
    server = start([], MODE, repository=repository)
    status, answer = server.infer("slow", VALUES | {"parameters": {"timeout": 50_000}})
    text = "Request timeout expired: model 'slow' was not loaded within the request's 50000 us"
    assert (status, answer["error"]) == (503, text)
    assert_answers(server, "slow")
    assert loads(server, "slow") == 1


def test_a_stream_that_ends_during_a_load_counts_its_request(start, repository):
    """At the client's deadline, as a call does."""
    server = start([], MODE, repository=repository)
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
    tensor.set_data_from_numpy(numpy.zeros((1, 2), numpy.float32))
    answers = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error), stream_timeout=0.5)
        client.async_stream_infer("slow", [tensor])
        assert "Deadline Exceeded" in str(answers.get(timeout=DEADLINE_S))
    ended = lambda: {  # noqa: E731
        reason: total(server.scrape(), "pharos_request_failures_total", route="stream_infer", reason=reason)
        for reason in ("TIMEOUT", "CANCELLED")
    }
    eventually("the request counts", lambda: ended() == {"TIMEOUT": 1, "CANCELLED": 0})


def test_a_failed_load_is_remembered(start, repository):
    """During a pause, requests get the reason and load nothing. The server remains ready, and a corrected model is served."""
    config = repository / "identity/config.pbtxt"
    good = config.read_text()
    server = start([], MODE, repository=repository)
    config.write_text(good.replace("identity", "no_such_function"))
    status, answer = server.infer("identity", VALUES)
    assert status == 503 and answer["error"].startswith("model 'identity' could not be loaded on demand: "), answer
    assert not answer["error"].endswith(";"), answer
    status, again = server.infer("identity", VALUES)
    assert (status, again["error"]) == (503, answer["error"] + "; the next request that loads it is accepted in 1 s")
    assert loads(server, "identity", "failure") == 1
    assert server.get("/v2/health/ready")[0] == 200
    state, reason = entry(server, "identity")
    assert state == "UNAVAILABLE" and "no_such_function" in reason
    eventually("the pause doubles", lambda: "accepted in 2 s" in server.infer("identity", VALUES)[1]["error"])
    config.write_text(good)
    eventually("the corrected model answers", lambda: server.infer("identity", VALUES)[0] == 200)


def test_other_versions_load_nothing(start, repository):
    """Only requests that the model could answer load it."""
    put(repository, "versions", model() + "version_policy { specific { versions: [ 2, 3 ] } }", (1, 2, 3))
    server = start([], MODE, repository=repository)
    for name, version, status in (("versions", "1", 404), ("versions", "x", 400), ("unknown", "1", 400)):
        path = f"/v2/models/{name}/versions/{version}/infer"
        assert server.ask("POST", path, json.dumps(VALUES))[0] == status, (name, version)
    assert not server.workers()
    assert json.loads(server.get("/v2/models/versions")[1])["versions"] == ["2", "3"]
    assert server.ask("POST", "/v2/models/versions/versions/2/infer", json.dumps(VALUES))[0] == 200
    assert len(server.workers()) == 2, "both versions are loaded"


@pytest.mark.parametrize("ask", [assert_answers, over_grpc, over_a_grpc_stream, over_generate, over_v1])
def test_requests_that_find_their_model_loaded_are_hits(start, repository, ask):
    """Every request is a hit or has waited, over all loads of the model."""
    server = start([], MODE, IDLE, repository=repository)
    requests = 20 if ask is over_a_grpc_stream else 1
    for number in (1, 2):
        ask(server, "identity")
        ask(server, "identity")
        scraped = server.scrape()
        hits = total(scraped, "pharos_on_demand_hits_total", model="identity")
        waits = total(scraped, "pharos_on_demand_wait_seconds_count", model="identity")
        assert hits + waits == 2 * requests * number and hits >= requests * number and waits >= number, (hits, waits)
        eventually("it is unloaded", lambda number=number: unloads(server, "identity") == number)
    assert total(server.scrape(), "pharos_on_demand_hits_total") == hits, "the count continues without the model"


def test_models_without_requests_are_unloaded(start, repository):
    """An ensemble is unloaded with the members that only it needs. Models that were loaded by name or at the start stay."""
    # Longer than a busy machine takes to load both.
    server = start([], MODE, "--model-idle-unload-secs=4", "--load-model=first", repository=repository)
    assert server.ask("POST", "/v2/repository/models/slow/load", b"")[0] == 200
    for name in ("identity", "both"):
        assert_answers(server, name)
    assert len(server.workers()) == 4
    eventually("both are unloaded", lambda: unloads(server, "identity") == unloads(server, "both") == 1)
    eventually("their workers have ended", lambda: len(server.workers()) == 2)
    for name, expected in (("identity", RESTING), ("both", RESTING), ("second", RESTING), ("first", ("READY", ""))):
        eventually(f"'{name}' is {expected}", lambda name=name, expected=expected: entry(server, name) == expected)
    assert entry(server, "slow") == ("READY", "")
    assert_answers(server, "both")
    assert loads(server, "both") == 2
    # A client unloads what it has loaded; the next request loads the model again.
    assert server.ask("POST", "/v2/repository/models/slow/unload", b"")[0] == 200
    assert_answers(server, "slow")
    assert loads(server, "slow") == 1


def test_a_model_in_use_is_not_unloaded(start, tmp_path):
    """Neither while it executes a request, nor while a sequence runs, nor while an ensemble is loaded that needs it."""
    folder = tmp_path / "models"
    write(folder, "slow", SLOW.format(io=IO, ms=5000, more="").split("model_warmup")[0])
    put(folder, "member", model())
    put(folder, "outer", ensemble("outer", "member", "member"))
    text = sequence_config(f"max_sequence_idle_microseconds: 600000000 {controls()}")
    put(folder, "sums", text.replace('backend: "test"', ""))
    # Longer than a busy machine takes from one request to the next.
    server = start([], MODE, "--model-idle-unload-secs=3", repository=folder)
    assert_answers(server, "slow")
    value = {"inputs": [{"name": "VALUE", "datatype": "INT32", "shape": [1, 1], "data": [5]}]}

    def step(**flags):
        return server.infer("sums", value | {"parameters": {"sequence_id": 7} | flags})[1]["outputs"][0]["data"]

    assert step(sequence_start=True) == [5]
    assert_answers(server, "member")
    for _ in range(18):
        assert_answers(server, "outer")
        pause_as_client(0.25)
    assert unloads(server, "member") == unloads(server, "sums") == 0
    assert step(sequence_end=True) == [10]
    for name in ("slow", "sums", "outer", "member"):
        eventually(f"'{name}' is unloaded", lambda name=name: unloads(server, name) == 1)


def test_the_parameter_chooses_single_models(start, repository):
    """In a mode that loads all models, and when a changed model is polled. An ensemble that is loaded loads its members."""
    on_demand = 'parameters { key: "load" value { string_value: "on_demand" } }\n'
    for name in ("identity", "first"):
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text() + on_demand)
    server = start([], IDLE, "--model-control-mode=poll", "--repository-poll-secs=1", repository=repository)
    assert entry(server, "identity") == RESTING
    assert [entry(server, name)[0] for name in ("first", "second", "both", "slow")] == ["READY"] * 4
    put(repository, "added", model() + on_demand)
    eventually("the added model is known", lambda: server.index().get("added", [{}])[0].get("reason") == RESTING[1])
    for name in ("identity", "added"):
        assert_answers(server, name)
        eventually("it is unloaded", lambda name=name: entry(server, name) == RESTING)
    holds_for("the members stay", 1.5, lambda: entry(server, "first") == ("READY", ""))
    shutil.rmtree(repository / "added")
    eventually("the removed model is unknown", lambda: "added" not in server.index())
    assert server.infer("added", VALUES)[0] in (400, 404)


def test_a_model_that_loses_the_parameter_stays_loaded(start, tmp_path):
    """The configuration is changed while the model is loaded."""
    folder, on_demand = tmp_path / "models", 'parameters { key: "load" value { string_value: "on_demand" } }\n'
    put(folder, "model", model() + on_demand)
    put(folder, "other", model() + on_demand)
    server = start([], "--model-idle-unload-secs=3", "--model-control-mode=poll", "--repository-poll-secs=1", repository=folder)
    assert_answers(server, "model")
    (folder / "model/config.pbtxt").write_text(f'backend: "builtin"\n{model(batch=2)}')

    def is_changed():
        assert_answers(server, "model")
        return json.loads(server.get("/v2/models/model/config")[1])["max_batch_size"] == 2

    eventually("the changed configuration is loaded", is_changed)
    assert_answers(server, "other")
    eventually("another model is unloaded", lambda: entry(server, "other") == RESTING)
    holds_for("the model stays", 1.5, lambda: entry(server, "model") == ("READY", ""))
    assert unloads(server, "model") == 0


GATED = """import os, time
import triton_python_backend_utils as utils


class TritonPythonModel:
    def initialize(self, args):
        while not os.path.exists("GATE"):
            time.sleep(0.01)

    def execute(self, requests):
        tensors = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""


@pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
@pytest.mark.parametrize("asked", ["gated", "outer"])
def test_files_that_change_during_a_load_on_demand_are_loaded(start, tmp_path, asked):
    """The load has the earlier files. A request has loaded the model itself, or an ensemble of it."""
    folder, on_demand = tmp_path / "models", 'parameters { key: "load" value { string_value: "on_demand" } }\n'
    put(folder, "outer", ensemble("outer", "gated") + on_demand)
    (folder / "gated/1").mkdir(parents=True)
    (folder / "gated/1/model.py").write_text(GATED.replace("GATE", str(tmp_path / "gate")))
    (folder / "gated/config.pbtxt").write_text('backend: "python"\n' + model(function="") + on_demand + "version_policy { all { } }")
    options = ["--model-control-mode=poll", "--repository-poll-secs=1", f"--python={PYTHON}"]
    server = start([], *options, repository=folder)
    states = lambda: [(one["version"], one["state"]) for one in server.index()["gated"]]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.infer, asked, VALUES)
        eventually("the load runs", lambda: states() == [("1", "LOADING")])
        shutil.copytree(folder / "gated/1", folder / "gated/2")
        eventually("the change is seen", lambda: "new or changed in the repository" in server.log.read_text())
        assert not first.done(), "the load has ended before the change was seen"
        # Not before the server has read the changed files.
        holds_for("the load waits", 0.5, lambda: ("1", "LOADING") in states())
        (tmp_path / "gate").touch()
        assert first.result()[0] == 200
    eventually("the new version is loaded", lambda: states() == [("1", "READY"), ("2", "READY")])
    assert_answers(server, asked)


def test_an_ensemble_that_a_client_loads_is_not_unloaded_meanwhile(start, tmp_path):
    """It has no requests while a member that has changed is loaded, and its other member is not loaded for a client."""
    folder = tmp_path / "models"
    warm_up = "model_warmup [ { name: 'w' batch_size: 1 inputs { key: 'INPUT0' value { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } } ]"
    put(folder, "changed", model("delay", delay_ms="1") + warm_up)
    put(folder, "other", model())
    put(folder, "both", ensemble("both", "changed", "other"))
    server = start([], MODE, IDLE, repository=folder)
    assert_answers(server, "both")
    (folder / "changed/config.pbtxt").write_text(with_backend(model("delay", delay_ms="3000") + warm_up))
    status, answer = server.ask("POST", "/v2/repository/models/both/load", b"{}")
    assert status == 200, answer
    assert unloads(server, "both") == 0
    assert [entry(server, name) for name in ("both", "changed", "other")] == [("READY", "")] * 3
    assert_answers(server, "both")


def test_models_of_the_same_name(start, tmp_path):
    """With namespaces, each is loaded by its full name."""
    for repository, batch in (("a", 3), ("b", 5)):
        put(tmp_path / repository, "same", model(batch=batch))
    put(tmp_path / "a", "only", model())
    server = start([], MODE, "--model-namespacing", f"--model-repository={tmp_path}/a", repository=tmp_path / "b")
    status, answer = server.infer("same", VALUES)
    assert status == 400 and "2 identifiers" in answer["error"]
    assert_answers(server, "only")
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
    tensor.set_data_from_numpy(numpy.array([[3, 4]], numpy.float32))
    name = f"{tmp_path}/b/same"
    assert client.infer(name, [tensor]).as_numpy("OUTPUT0").tolist() == [[3, 4]]
    assert client.get_model_config(name).config.max_batch_size == 5
    with pytest.raises(InferenceServerException, match="2 identifiers"):
        client.infer("same", [tensor])


def test_the_start_checks_every_model(start, repository):
    """A model that cannot be loaded ends the start, as in the other modes, unless the server may continue without it."""
    write(repository, "broken", "this is not a configuration")
    server = start([], MODE, repository=repository, wait=False)
    assert server.process.wait(60) == 1
    assert "broken" in server.log_tail()
    server = start([], MODE, "--exit-on-error=false", repository=repository, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually("the index has the reason", lambda: "config.pbtxt:1:" in entry(server, "broken")[1])
    assert_answers(server, "identity")


def test_no_request_fails_while_models_come_and_go(start, tmp_path):
    """Clients choose among twelve models, some of them rarely, which are unloaded meanwhile. Every request is answered, and each
    load that a request needed has one unload or a model that is loaded."""
    names = [f"m{number}" for number in range(12)]
    for name in names:
        put(tmp_path / "models", name, model())
    server = start([], MODE, IDLE, "--model-load-thread-count=2", repository=tmp_path / "models")
    until, failures, asked = time.monotonic() + 12, [], dict.fromkeys(names, 0)
    lock = threading.Lock()

    def client(seed: int):
        chance = random.Random(seed)
        while time.monotonic() < until and not failures:
            name = names[min(int(chance.expovariate(0.6)), len(names) - 1)]
            status, answer = server.infer(name, VALUES)
            with lock:
                asked[name] += 1
                if status != 200 or answer["outputs"][0]["data"] != [3, 4]:
                    failures.append((name, status, answer))
            pause_as_client(chance.uniform(0, 0.2))

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
    for one_client in clients:
        one_client.start()
    for one_client in clients:
        one_client.join()
    assert not failures, failures[:3]
    assert sum(asked.values()) > 100
    run_for("models that have no requests are unloaded", 3)
    eventually("all models rest", lambda: all(entry(server, name) == RESTING for name in names))
    eventually("all workers have ended", lambda: not server.workers())
    for name in names:
        assert loads(server, name) == unloads(server, name)
    assert sum(loads(server, name) for name in names) > 12, "no model was loaded twice"


def test_resting_models_have_few_series(start, tmp_path):
    """A scrape does not grow with models that are not loaded, except by their state and the result of their latest load."""
    repository = tmp_path / "models"
    copy_models(repository, ["identity_fp32"], MODELS)
    for number in range(200):
        put(repository, f"resting_{number}", model())
    server = start([], MODE, repository=repository)
    series = [key for key in server.scrape() if any("resting_7" in label for _, label in key[1])]
    assert {name for name, _ in series} <= {"pharos_model_state", "pharos_model_last_load_successful"}
    assert not server.workers()
