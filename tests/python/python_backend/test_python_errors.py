"""Errors of Python models: each fails only the requests that it concerns, and the instance continues."""

import numpy as np
import pytest
import tritonclient.grpc as grpc

from harness.server import Server
from harness.waiting import DEADLINE_S, eventually
from python_backend.worker import PYTHON, has_worker, model

BATCHED = "max_batch_size: 8\ndynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 2000000 }\n"
STRICT = 'parameters { key: "strict_output_types" value: { string_value: "true" } }\n'
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
COMPLETES = '''
import numpy as np


class Silent(Exception):
    def __str__(self):
        raise ValueError


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {code}
        return config

    def execute(self, requests):
        return []
'''
STATE = """max_batch_size: 4
sequence_batching { state [ { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ] } ] }
"""

pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server whose models are loaded by requests."""
    folder = tmp_path_factory.mktemp("errors")
    models = folder / "models"
    model(models, "exits", "own_async_exit", "max_batch_size: 4\n")
    model(models, "exits_stream", "own_async_exit", "max_batch_size: 4\n" + DECOUPLED)
    model(models, "answers", "own_answers", BATCHED)
    model(models, "strict", "own_answers", BATCHED + STRICT)
    model(models, "slow_end", "own_slow_end")
    model(models, "states", "own_answers", STATE)
    numbers = 'config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [np.int64(3)]})'
    for name, code in (("numbers", numbers), ("silent", "raise Silent")):
        (models / name / "1").mkdir(parents=True)
        (models / name / "1/model.py").write_text(COMPLETES.format(code=code))
    with Server(folder, [models], [f"--python={PYTHON}", "--model-control-mode=explicit"]) as server:
        yield server


def load(server, name) -> tuple:
    """Loads a model unless it is loaded; returns the status and the text."""
    if server.get(f"/v2/models/{name}/ready")[0] == 200:
        return 200, ""
    return server.ask("POST", f"/v2/repository/models/{name}/load", b"")


def answers(server, name, requests) -> tuple:
    """Sends requests over one stream, so that they enter the queue in this order; each is its id and its parameters. Returns the
    ids of the responses and the texts of the errors."""
    assert load(server, name) == (200, "")
    got = []
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: got.append((result, error)), stream_timeout=DEADLINE_S)
        for request_id, parameters in requests:
            given = grpc.InferInput("IN", [1, 1], "FP32")
            given.set_data_from_numpy(np.ones((1, 1), np.float32))
            client.async_stream_infer(name, [given], request_id=request_id, parameters=parameters)
        eventually(f"{len(requests)} responses", lambda: len(got) >= len(requests))
        client.stop_stream()
    return sorted(result.get_response().id for result, error in got if not error), [str(error) for _, error in got if error]


@pytest.mark.parametrize("do, text", [
    ("exit", "SystemExit: 3"), ("task", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt"), ("cancelled", "CancelledError"),
    ("callback", ""), ("stop", ""),
])
@pytest.mark.parametrize("name", ["exits", "exits_stream"])
def test_an_exit_in_the_event_loop_is_an_error_of_its_request(served, name, do, text):
    """`SystemExit` and others in `async def execute`, in its tasks and callbacks; the loop runs on, even if it is stopped."""
    ids, errors = answers(served, name, [("first", {"do": do})])
    assert (ids, len(errors)) == (([], 1) if text else (["first"], 0)) and text in "".join(errors)
    assert answers(served, name, [("next", {})]) == (["next"], [])


@pytest.mark.parametrize("name, how, text", [
    ("answers", "twice", "the response has the output 'OUT' twice"),
    ("strict", "float64", "output 'OUT' is FP64, but its configured datatype is FP32"),
    ("answers", "long", "fit into one message"),
])
def test_a_wrong_response_fails_only_its_request(served, name, how, text):
    """The requests behind it in the batch get their responses, and the process stays."""
    assert load(served, name) == (200, "")
    workers, before = served.workers(), served.statistics(name)["execution_count"]
    ids, (error,) = answers(served, name, [(how, {}), ("a", {}), ("b", {}), ("c", {})])
    assert ids == ["a", "b", "c"] and text in error
    assert served.statistics(name)["execution_count"] == before + 1 and served.workers() == workers


def test_a_tensor_without_elements_is_contiguous(served):
    """Libraries give such tensors different strides."""
    assert answers(served, "answers", [("empty", {})] * 4) == (["empty"] * 4, [])


def test_a_response_does_not_change_after_it_is_sent(served):
    """The model overwrites the input that it has sent as output."""
    assert load(served, "answers") == (200, "")
    given = grpc.InferInput("IN", [4, 1], "FP32")
    given.set_data_from_numpy(np.arange(4, dtype=np.float32).reshape(4, 1))
    with grpc.InferenceServerClient(served.grpc) as client:
        result = client.infer("answers", [given], request_id="overwritten", client_timeout=DEADLINE_S)
    assert result.as_numpy("OUT").ravel().tolist() == [0, 1, 2, 3]


def test_a_model_with_states_is_refused(served):
    """Models in Python answer requests individually, but states are stored with the batch."""
    status, text = load(served, "states")
    assert status == 400 and "the backend 'python' has no implicit state (sequence_batching.state, output 'T')" in text


@pytest.mark.parametrize("name, text", [
    ("numbers", "TypeError: Object of type int64 is not JSON serializable"), ("silent", "Silent: <no message>"),
])
def test_a_configuration_that_cannot_be_completed_has_the_reason(served, name, text):
    status, answer = load(served, name)
    assert status == 400 and text in answer, answer


def test_a_process_that_does_not_end_is_named_and_killed(served):
    """The log names the instance and the limit; the kill is not reported as one by the system."""
    before = served.workers()
    assert load(served, "slow_end") == (200, "")
    (worker,) = served.workers() - before
    assert served.ask("POST", "/v2/repository/models/slow_end/unload", b"")[0] == 200
    eventually("the process is killed", lambda: worker not in served.workers())
    lines = [line for line in served.log.read_text().splitlines() if "worker killed" in line]
    assert len(lines) == 1 and "did not end within 5s" in lines[0] and "slow_end_0" in lines[0], lines
