"""Implicit state through real clients: sequences that take turns, values at the start, memory that is given back."""

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
from harness.waiting import eventually
from sequences.state_models import STATE, TWO, builtin, sequences, tensors

GROWS = STATE + " dims: [ -1 ]"
FIRST = [4, -5]
IN_FILE = TWO + ' initial_state { name: "first" data_type: TYPE_INT64 dims: [ 2 ] data_file: "two" }'


TRIPLE = model(
    [node("Mul", ["S", "three"], ["tripled"]), node("Add", ["tripled", "X"], ["T"]), node("Add", ["T", "X"], ["Y"])],
    [("X", "INT64", ["n", 2]), ("S", "INT64", ["n", 2])],
    [("Y", "INT64", ["n", 2]), ("T", "INT64", ["n", 2])],
    [constant("three", "INT64", np.array([3]))],
)
"""The state is three times the state before and X; Y is that and X once more."""

SUM, TRIPLED = (lambda state, x: (state + x, state + x)), (lambda state, x: (3 * state + x, 3 * state + 2 * x))
MODELS = {
    "sum_oldest": (SUM, builtin("accumulate") + sequences(TWO) + tensors("2"), b""),
    "sum_direct": (SUM, builtin("accumulate") + sequences(TWO, "direct { }") + tensors("2"), b""),
    "sum_decoupled": (
        SUM,
        builtin("accumulate") + "model_transaction_policy { decoupled: true }\n" + sequences(TWO) + tensors("2"),
        b"",
    ),
    "triple_onnxruntime": (TRIPLED, 'backend: "onnxruntime"\n' + sequences(TWO) + tensors("2"), TRIPLE),
    "triple_tract": (TRIPLED, 'backend: "tract"\n' + sequences(TWO, "direct { }") + tensors("2"), TRIPLE),
}
"""What each computes, its configuration and file."""


@pytest.fixture(scope="module")
def stateful(tmp_path_factory):
    """A server of the models."""
    folder = tmp_path_factory.mktemp("stateful")
    for name, (_, config, onnx) in MODELS.items():
        write(folder / "models", name, config, onnx)
    write(folder / "models", "grows", builtin("append") + sequences(GROWS) + tensors("-1"))
    idle = "max_sequence_idle_microseconds: 500000 oldest { max_candidate_sequences: 8 }"
    write(folder / "models", "first", builtin("accumulate") + sequences(IN_FILE, idle) + tensors("2", ["T"]))
    directory = folder / "models/first/initial_state"
    directory.mkdir()
    (directory / "two").write_bytes(np.array([*FIRST, 6]).tobytes())
    with Server(folder, [folder / "models"]) as running:
        yield running


def tensor(values) -> tritonclient.grpc.InferInput:
    """X of one row."""
    values = np.array([values], np.int64)
    x = tritonclient.grpc.InferInput("X", values.shape, "INT64")
    x.set_data_from_numpy(values)
    return x


def stream(server, name: str, steps: list) -> list:
    """Sends `(sequence, values, start, end)` over one stream; the answers' Y in the same order."""
    answers = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number, (sequence, values, start, end) in enumerate(steps):
            options = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
            client.async_stream_infer(name, [tensor(values)], request_id=str(number), **options)
        found = [answers.get(timeout=30) for _ in steps]
        client.stop_stream()
    assert not [str(error) for _, error in found if error]
    return [y for _, y in sorted((int(result.get_response().id), result.as_numpy("Y")[0]) for result, _ in found)]


def turns(seed: int, dims) -> list:
    """Random steps of random sequences, six at most at once; all end."""
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
    """The metric of the states' memory."""
    text = server.get("/metrics", address=server.metrics)[1]
    found = re.findall(rf'^pharos_sequence_state_bytes{{[^}}]*model="{name}"[^}}]*}} (\S+)', text, re.M)
    assert len(found) == 1, f"{name} has {len(found)} instances with states"
    return float(found[0])


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_sequences_that_take_turns_do_not_mix(stateful, name):
    """Each answer is what its sequence alone would have given, in every backend and with both strategies."""
    compute, states, expected = MODELS[name][0], {}, []
    steps = turns(7, 2)
    for sequence, values, start, _ in steps:
        before = np.zeros(2, np.int64) if start else states[sequence]
        states[sequence], y = compute(before, np.array(values))
        expected.append(y)
    got = stream(stateful, name, steps)
    np.testing.assert_array_equal(np.array(got), np.array(expected))
    eventually("the states are dropped", 10, lambda: state_bytes(stateful, name) == 0)


def test_states_that_grow_apart(stateful):
    """Sequences of different lengths share batches all the same."""
    said, expected = {}, []
    steps = turns(11, 1)
    for sequence, values, start, _ in steps:
        said[sequence] = [0] if start else said[sequence]
        said[sequence] = said[sequence] + values
        expected.append(said[sequence])
    assert [y.tolist() for y in stream(stateful, "grows", steps)] == expected
    eventually("the states are dropped", 10, lambda: state_bytes(stateful, "grows") == 0)


def ask(server, sequence: int, values, outputs=(), start=False, end=False) -> dict:
    """One step of the model `first`: its outputs by name."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        x = tritonclient.http.InferInput("X", [1, 2], "INT64")
        x.set_data_from_numpy(np.array([values], np.int64))
        wanted = [tritonclient.http.InferRequestedOutput(name) for name in outputs] or None
        options = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        result = client.infer("first", [x], outputs=wanted, **options)
        names = [output["name"] for output in result.get_response()["outputs"]]
        return {name: result.as_numpy(name)[0].tolist() for name in names}


def test_a_sequence_begins_with_the_file_and_shows_its_state_on_request(stateful):
    """The file's first elements are the first value; the state is an output that one may ask for, or not."""
    assert ask(stateful, 5, [1, 1], start=True) == {"Y": [5, -4], "T": [5, -4]}
    assert ask(stateful, 5, [1, 1], ["Y"]) == {"Y": [6, -3]}
    assert ask(stateful, 5, [1, 1], ["T"]) == {"T": [7, -2]}
    assert ask(stateful, 5, [0, 0], ["T"], start=True) == {"T": FIRST}, "it has started again"
    assert ask(stateful, 5, [1, 0], end=True)["Y"] == [5, -5]
    status, text = stateful.get("/v2/models/first")
    assert status == 200 and '"S"' not in text, "clients do not see the state as an input"


def test_a_silent_sequence_gives_its_memory_back(stateful):
    """A sequence without an end is dropped when it has been silent for too long."""
    ask(stateful, 6, [1, 1], start=True)
    eventually("its state is counted", 10, lambda: state_bytes(stateful, "first") > 0)
    eventually("its state is dropped", 20, lambda: state_bytes(stateful, "first") == 0)


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
    """A wrong `state` is told when the model is loaded. A real Triton 2.51 answers the second to fifth with the same
    words (but for a space that it forgets after the file's name); the first only if both states have an
    `initial_state`; and it reads files outside of the directory."""
    config = 'backend: "tract"\n' + sequences(states) + tensors("2")
    folder = write(tmp_path / "models", "wrong", config, TRIPLE)
    (folder / "wrong/initial_state").mkdir()
    (folder / "wrong/initial_state/two").write_bytes(bytes(15))
    server = start([], "--exit-on-error=false", repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually(f"the reason says {expected!r}", 10, lambda: expected in str(server.index()))
