"""Implicit state through real clients: interleaved sequences, initial values, and the release of memory."""

import queue
import random
import re

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from harness.models import write
from harness.onnx_file import constant, model, node
from harness.server import Server
from harness.tract import HAS_TRACT
from harness.waiting import DEADLINE_S, eventually
from sequences.state_models import STATE, TWO, sequences, stateful_model, tensors

GROWS = STATE + " dims: [ -1 ]"
FIRST = [4, -5]
IN_FILE = TWO + ' initial_state { name: "first" data_type: TYPE_INT64 dims: [ 2 ] data_file: "two" }'


TRIPLE = model(
    [node("Mul", ["S", "three"], ["tripled"]), node("Add", ["tripled", "X"], ["T"]), node("Add", ["T", "X"], ["Y"])],
    [("X", "INT64", ["n", 2]), ("S", "INT64", ["n", 2])],
    [("Y", "INT64", ["n", 2]), ("T", "INT64", ["n", 2])],
    [constant("three", "INT64", np.array([3]))],
)
"""T, the new state, is three times the old state plus X; Y is T plus X."""

SUM, TRIPLED = (lambda state, x: (state + x, state + x)), (lambda state, x: (3 * state + x, 3 * state + 2 * x))
MODELS = {
    "sum_oldest": (SUM, stateful_model("accumulate") + sequences(TWO) + tensors("2"), b""),
    "sum_direct": (SUM, stateful_model("accumulate") + sequences(TWO, "direct { }") + tensors("2"), b""),
    "sum_decoupled": (
        SUM,
        stateful_model("accumulate") + "model_transaction_policy { decoupled: true }\n" + sequences(TWO) + tensors("2"),
        b"",
    ),
    "triple_onnxruntime": (TRIPLED, 'backend: "onnxruntime"\n' + sequences(TWO) + tensors("2"), TRIPLE),
}
"""The computation of each model, its configuration and its file."""
if HAS_TRACT:
    MODELS["triple_tract"] = (TRIPLED, 'backend: "tract"\n' + sequences(TWO, "direct { }") + tensors("2"), TRIPLE)


@pytest.fixture(scope="module")
def stateful(tmp_path_factory):
    """Starts a server with the models."""
    folder = tmp_path_factory.mktemp("stateful")
    for name, (_, config, onnx) in MODELS.items():
        write(folder / "models", name, config, onnx)
    write(folder / "models", "grows", stateful_model("append") + sequences(GROWS) + tensors("-1"))
    idle = "max_sequence_idle_microseconds: 2000000 oldest { max_candidate_sequences: 8 }"
    write(folder / "models", "first", stateful_model("accumulate") + sequences(IN_FILE, idle) + tensors("2", ["T"]))
    directory = folder / "models/first/initial_state"
    directory.mkdir()
    (directory / "two").write_bytes(np.array([*FIRST, 6]).tobytes())
    with Server(folder, [folder / "models"]) as running:
        yield running


def tensor(values) -> tritonclient.grpc.InferInput:
    """Returns the input X with one row."""
    values = np.array([values], np.int64)
    x = tritonclient.grpc.InferInput("X", values.shape, "INT64")
    x.set_data_from_numpy(values)
    return x


def stream(server, name: str, steps: list) -> list:
    """Sends `(sequence, values, start, end)` over one stream; returns the Y of the answers in the same order."""
    answers = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number, (sequence, values, start, end) in enumerate(steps):
            options = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
            client.async_stream_infer(name, [tensor(values)], request_id=str(number), **options)
        found = [answers.get(timeout=DEADLINE_S) for _ in steps]
        client.stop_stream()
    assert not [str(error) for _, error in found if error]
    return [y for _, y in sorted((int(result.get_response().id), result.as_numpy("Y")[0]) for result, _ in found)]


def turns(seed: int, dims) -> list:
    """Returns random steps of random sequences, at most six open at once; all end."""
    dice, steps, open_, next_id = random.Random(seed), [], [], 1
    while len(steps) < 300:
        if len(open_) < 6 and (not open_ or dice.random() < 0.3):
            sequence, start = next_id, True
            next_id += 1
            open_.append(sequence)
        else:
            sequence, start = dice.choice(open_), False
        end = dice.random() < 0.15
        steps.append((sequence, [dice.randrange(-50, 50) for _ in range(dims)], start, end))
        if end:
            open_.remove(sequence)
    return steps + [(sequence, [0] * dims, False, True) for sequence in open_]


def state_bytes(server, name: str) -> float:
    """Returns the metric of the states' memory."""
    text = server.get("/metrics", address=server.metrics)[1]
    found = re.findall(rf'^pharos_sequence_state_bytes{{[^}}]*model="{name}"[^}}]*}} (\S+)', text, re.M)
    assert len(found) == 1, f"{name} has {len(found)} instances with states"
    return float(found[0])


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_interleaved_sequences_have_separate_states(stateful, name):
    """Each answer equals that of its sequence run alone, in every backend and with both strategies."""
    compute, states, expected = MODELS[name][0], {}, []
    steps = turns(7, 2)
    for sequence, values, start, _ in steps:
        before = np.zeros(2, np.int64) if start else states[sequence]
        states[sequence], y = compute(before, np.array(values))
        expected.append(y)
    got = stream(stateful, name, steps)
    np.testing.assert_array_equal(np.array(got), np.array(expected))
    eventually("the states are dropped", lambda: state_bytes(stateful, name) == 0)


def test_states_of_different_lengths_share_batches(stateful):
    """Sequences whose states have different lengths are batched together."""
    contents, expected = {}, []
    steps = turns(11, 1)
    for sequence, values, start, _ in steps:
        contents[sequence] = [0] if start else contents[sequence]
        contents[sequence] = contents[sequence] + values
        expected.append(contents[sequence])
    assert [y.tolist() for y in stream(stateful, "grows", steps)] == expected
    eventually("the states are dropped", lambda: state_bytes(stateful, "grows") == 0)


def ask(server, sequence: int, values, outputs=(), start=False, end=False) -> dict:
    """Sends one request to the model `first`; returns its outputs by name."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        x = tritonclient.http.InferInput("X", [1, 2], "INT64")
        x.set_data_from_numpy(np.array([values], np.int64))
        wanted = [tritonclient.http.InferRequestedOutput(name) for name in outputs] or None
        options = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        result = client.infer("first", [x], outputs=wanted, **options)
        names = [output["name"] for output in result.get_response()["outputs"]]
        return {name: result.as_numpy(name)[0].tolist() for name in names}


def test_a_state_starts_with_the_file_and_is_an_optional_output(stateful):
    """The file's first elements are the initial value; the state is an output that clients may request."""
    assert ask(stateful, 5, [1, 1], start=True) == {"Y": [5, -4], "T": [5, -4]}
    assert ask(stateful, 5, [1, 1], ["Y"]) == {"Y": [6, -3]}
    assert ask(stateful, 5, [1, 1], ["T"]) == {"T": [7, -2]}
    assert ask(stateful, 5, [0, 0], ["T"], start=True) == {"T": FIRST}, "the sequence has started again"
    assert ask(stateful, 5, [1, 0], end=True)["Y"] == [5, -5]
    status, text = stateful.get("/v2/models/first")
    assert status == 200 and '"S"' not in text, "the state is not in the list of inputs"


def test_an_idle_sequence_releases_its_memory(stateful):
    """A sequence without an END is dropped after the idle timeout."""
    ask(stateful, 6, [1, 1], start=True)
    eventually("its state is counted", lambda: state_bytes(stateful, "first") > 0)
    eventually("its state is dropped", lambda: state_bytes(stateful, "first") == 0)


def test_a_removed_instance_has_no_states(tmp_path):
    """After a change of the number of instances, the metric has only those that run."""
    config = lambda count: f"{stateful_model('accumulate')}{sequences(TWO)}{tensors('2')}instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n"
    write(tmp_path / "models", "sum", config(2))
    with Server(tmp_path, [tmp_path / "models"], ["--model-control-mode=explicit", "--load-model=sum"]) as server:
        instances = lambda: [dict(pairs)["instance"] for name, pairs in server.scrape() if name == "pharos_sequence_state_bytes"]
        assert len(instances()) == 2
        (tmp_path / "new").write_text(config(1))
        (tmp_path / "new").replace(tmp_path / "models/sum/config.pbtxt")
        assert server.ask("POST", "/v2/repository/models/sum/load", b"")[0] == 200
        eventually("one worker is left", lambda: len(server.workers()) == 1)
        eventually("one instance has states", lambda: len(instances()) == 1)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (f"{TWO} }}, {{ {TWO}", "State input name 'S' specified more than once."),
        (IN_FILE.replace("[ 2 ] data_file", "[ 3 ] data_file"), "doesn't match 'state' dim description. 3 != 2"),
        (
            IN_FILE.replace('name: "first" ', ""),
            "Field 'name' must be set when using initial_state for state input 'S'",
        ),
        (
            IN_FILE,
            "initial_state setting expects 16 bytes, but the data provided from two only has 15 bytes",
        ),
        (IN_FILE.replace('"two"', '"three"'), "failed to open text file for read "),
        (IN_FILE.replace('"two"', '"../1/model.onnx"'), "must stay in the directory 'initial_state'"),
        (TWO.replace('"S"', '"Q"'), "unexpected inference input 'Q' for model 'wrong', allowed inputs are: X, S"),
        (TWO.replace("INT64", "FP32"), "expects datatype TYPE_FP32 for input 'S', model provides TYPE_INT64"),
    ],
)
def test_wrong_states_are_refused(start, tmp_path, states, expected):
    """A wrong `state` fails the load. A real Triton 2.51 has the same texts for the second to fifth case (without one space after
    the file's name), refuses the first only if both states have an `initial_state`, and reads files outside of the directory."""
    config = 'backend: "onnxruntime"\n' + sequences(states) + tensors("2")
    folder = write(tmp_path / "models", "wrong", config, TRIPLE)
    (folder / "wrong/initial_state").mkdir()
    (folder / "wrong/initial_state/two").write_bytes(bytes(15))
    server = start([], "--exit-on-error=false", repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually(f"the reason contains {expected!r}", lambda: expected in str(server.index()))
