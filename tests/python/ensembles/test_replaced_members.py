"""Requests to an ensemble while a member was replaced and the ensemble is not loaded again yet: the ensembles of a poll are loaded
after all of its models. And the response cache while the files of models change."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from ensembles.decoupled import asked, values
from harness import onnx_file
from harness.generate import tensor
from harness.models import write
from harness.processes import restart
from harness.server import Server
from harness.stream_models import build, ensemble, model, pair, passed, step
from harness.streams import repeat_inputs
from harness.waiting import eventually

ONE = pair(0, "INT32", [-1])
SINGLE, DECOUPLED = model("identity", ONE, decoupled=False), model("identity", ONE)
CHAIN = ensemble(passed("IN", "a", "member"), passed())
TWO = ONE + pair(1, "INT32", [-1])
WARM_UP = 'model_warmup { name: "w" inputs { key: "I0" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } }\n'
HANGING = model("delay", ONE, decoupled=False, extra=WARM_UP, delay_ms=600000)
"""A model whose load does not end."""


def scaling(factor: float) -> bytes:
    """Returns the file of a model that multiplies its input."""
    weight = onnx_file.constant("W", "FP32", np.array([factor], np.float32))
    ends = [("X", "FP32", [1])], [("Y", "FP32", [1])]
    return onnx_file.model([onnx_file.node("Mul", ["X", "W"], ["Y"])], *ends, [weight])


def read(server, path: str) -> dict:
    """Returns the JSON of a GET request."""
    return json.loads(server.get(path)[1])


@contextlib.contextmanager
def replaced(server, repository, name: str, config: str):
    """Replaces a model by one with another configuration. Until the block ends, the model serves, and the poll that has found it
    still loads another model. Afterwards the ensembles have been loaded again."""
    loaded = server.log.read_text().count("ensemble ready")
    ensembles = sum('platform: "ensemble"' in path.read_text() for path in repository.glob("*/config.pbtxt"))
    before = read(server, f"/v2/models/{name}/config")
    hanging = f"hanging_{loaded}"
    prepared = build(repository.parent / hanging, {hanging: HANGING, name: config})
    # Both changes must be in one poll.
    (prepared / hanging).rename(repository / hanging)
    (prepared / name / "config.pbtxt").rename(repository / name / "config.pbtxt")
    eventually(f"{name} is replaced", lambda: read(server, f"/v2/models/{name}/config") != before)
    yield
    assert server.log.read_text().count("ensemble ready") == loaded, "no ensemble was loaded again"
    shutil.rmtree(repository / hanging)
    again = lambda: server.log.read_text().count("ensemble ready") >= loaded + ensembles  # noqa: E731
    eventually("the ensembles are loaded again", again)


@pytest.fixture
def start(tmp_path):
    """Starts a server that polls a repository with these models, and returns both."""
    with contextlib.ExitStack() as stack:

        def begin(models: dict):
            repository = build(tmp_path / "models", models)
            options = ["--model-control-mode=poll", "--repository-poll-secs=1", "--cache-config=local,size=1048576"]
            return stack.enter_context(Server(tmp_path, [repository], options)), repository

        yield begin


def test_a_member_that_becomes_decoupled(start):
    """Requests are refused until the ensembles are loaded again: one response of the member would be all that they take."""
    server, repository = start({"member": SINGLE, "rows_of_any": SINGLE, "chain": CHAIN})
    body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [2], "data": [7, 8]}]}
    assert server.infer("chain", body)[1]["outputs"][0]["data"] == [7, 8]
    with replaced(server, repository, "member", DECOUPLED):
        status, answer = server.infer("chain", body)
        assert status == 503 and "model 'member' was replaced and is now decoupled" in answer["error"], answer
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            with pytest.raises(InferenceServerException, match="is now decoupled"):
                client.infer("chain", repeat_inputs([7])[:1])
        assert "is now decoupled" in values(server, asked("chain", [7]))[0][1]
    assert values(server, asked("chain", [7])) == [("a", 7)]


def test_a_member_that_is_no_longer_decoupled(start):
    """Its one response continues like one of several."""
    server, repository = start({"member": DECOUPLED, "rows_of_any": SINGLE, "chain": CHAIN})
    assert values(server, asked("chain", [7])) == [("a", 7)]
    with replaced(server, repository, "member", SINGLE):
        assert values(server, asked("chain", [7])) == [("a", 7)]
    assert values(server, asked("chain", [7])) == [("a", 7)]


def test_the_response_cache_does_not_keep_responses_of_a_replaced_member(start):
    """They would be found after the member was replaced by the previous one."""
    ends = "".join(tensor("input", name, "INT32", [-1]) for name in ("X", "Y")) + tensor("output", "OUT", "INT32", [-1])
    cached = "response_cache { enable: true }\n"
    inner = step("member", {"I0": "X", "I1": "Y"}, {"O0": "OUT"})
    outer = step("inner", {"X": "X", "Y": "Y"}, {"OUT": "OUT"})
    text = 'platform: "ensemble"\nmax_batch_size: 0\n{}{}ensemble_scheduling {{ {} }}\n'
    models = {"inner": text.format(ends, cached, inner), "outer": text.format(ends, cached, outer)}
    server, repository = start({"member": model("identity", TWO, decoupled=False), **models})

    def result(name: str, x: int, y: int) -> int:
        inputs = [{"name": n, "datatype": "INT32", "shape": [1], "data": [v]} for n, v in (("X", x), ("Y", y))]
        status, answer = server.infer(name, {"inputs": inputs})
        assert status == 200, answer
        return answer["outputs"][0]["data"][0]

    assert (result("inner", 5, 3), result("outer", 6, 3)) == (5, 6)
    sums = model("add_sub", TWO, decoupled=False)
    with replaced(server, repository, "member", sums):
        assert (result("inner", 50, 3), result("outer", 60, 3)) == (53, 63)
    assert (result("inner", 50, 3), result("outer", 60, 3)) == (53, 63)
    with replaced(server, repository, "member", model("identity", TWO, decoupled=False)):
        pass
    assert (result("inner", 50, 3), result("outer", 60, 3)) == (50, 60)


def test_the_response_cache_waits_until_members_have_loaded_their_files(tmp_path):
    """Files of two members are replaced, and then loaded one after the other. Responses of the old first member with the new second
    one must not be found when both are new."""
    ends = tensor("input", "X", "FP32", [1]) + tensor("output", "Y", "FP32", [1])
    repository, scaled = tmp_path / "models", f'backend: "onnxruntime"\nmax_batch_size: 0\n{ends}'
    for name in ("one", "two"):
        write(repository, name, scaled, scaling(1))
    steps = step("one", {"X": "X"}, {"Y": "a"}) + step("two", {"X": "a"}, {"Y": "Y"})
    cached = "response_cache { enable: true }\n"
    write(repository, "both", f'platform: "ensemble"\nmax_batch_size: 0\n{ends}{cached}ensemble_scheduling {{ {steps} }}')
    options = ["--model-control-mode=explicit", "--load-model=both", "--cache-config=local,size=1048576"]
    with Server(tmp_path, [repository], options) as server:

        def result() -> float:
            inputs = [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]
            status, answer = server.infer("both", {"inputs": inputs})
            assert status == 200, answer
            return answer["outputs"][0]["data"][0]

        def hits() -> int:
            return server.statistics("both")["inference_stats"]["cache_hit"]["count"]

        assert (result(), result(), hits()) == (1, 1, 1)
        for name, factor in (("one", 10), ("two", 100)):
            (repository / name / "1/model.onnx").write_bytes(scaling(factor))
        assert server.ask("POST", "/v2/repository/models/two/load")[0] == 200
        assert result() == 100
        assert server.ask("POST", "/v2/repository/models/one/load")[0] == 200
        assert (result(), result(), hits()) == (1000, 1000, 1)
        assert "files of its member 'one/1' have changed since their load" in server.log.read_text()


def test_a_restarted_worker_with_other_files_stores_nothing(tmp_path):
    """Its responses must not be found after the old files were loaded again."""
    ends = tensor("input", "X", "FP32", [1]) + tensor("output", "Y", "FP32", [1])
    repository, cached = tmp_path / "models", "response_cache { enable: true }\n"
    write(repository, "one", f'backend: "onnxruntime"\nmax_batch_size: 0\n{ends}{cached}', scaling(1))
    outer = step("one", {"X": "X"}, {"Y": "Y"})
    write(repository, "outer", f'platform: "ensemble"\nmax_batch_size: 0\n{ends}{cached}ensemble_scheduling {{ {outer} }}')
    options = ["--model-control-mode=explicit", "--load-model=outer", "--cache-config=local,size=1048576"]
    with Server(tmp_path, [repository], options) as server:

        def results(value: float) -> list:
            inputs = [{"name": "X", "datatype": "FP32", "shape": [1], "data": [value]}]
            answers = [server.infer(name, {"inputs": inputs}) for name in ("one", "outer")]
            assert [status for status, _ in answers] == [200, 200], answers
            return [answer["outputs"][0]["data"][0] for _, answer in answers]

        def load(factor: float):
            (repository / "one/1/model.onnx").write_bytes(scaling(factor))
            assert server.ask("POST", "/v2/repository/models/one/load")[0] == 200

        def hits() -> int:
            return server.statistics("one")["inference_stats"]["cache_hit"]["count"]

        assert (results(1), hits()) == ([1, 1], 0)
        restart(server, "one")
        assert (results(1), hits()) == ([1, 1], 1), "the files are the same"
        (repository / "one/1/model.onnx").write_bytes(scaling(10))
        restart(server, "one")
        assert results(2) == [20, 20]
        assert results(1) == [10, 10], "what was stored before is not found either"
        load(1)
        assert results(2) == [2, 2]
        load(10)
        assert results(2) == [20, 20]
        assert "a worker has started with files that have changed" in server.log.read_text()
