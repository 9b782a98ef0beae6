"""Ragged batches: requests of different lengths in one batch, the inputs that the server computes for it, and outputs that the
server splits."""

import concurrent.futures

import numpy as np
import pytest
import tritonclient.http

from harness.models import write
from harness.onnx_file import constant, model, node
from harness.server import Server
from harness.statistics import received, sizes
from harness.tract import HAS_TRACT, ONNX_BACKENDS
from harness.waiting import eventually

THREE = "dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 20000000 }"
"""A batch is executed when three requests have arrived."""

X = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]'
Y = 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]'
SCATTER = 'batch_output [ { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" } ]'


def made(kind: str, target: str, datatype="INT32") -> str:
    """Returns the configuration of an input that the server computes from X."""
    return (
        f'batch_input [ {{ kind: BATCH_{kind} target_name: "{target}" data_type: TYPE_{datatype} source_input: "X" }} ]\n'
    )


def number(name: str, datatype: str) -> str:
    """Returns the configuration of an output with one number per item."""
    return f'output [ {{ name: "{name}" data_type: TYPE_{datatype} dims: [ 1 ] reshape {{ shape: [ ] }} }} ]\n'


MADE_HERE = f"""backend: "builtin" max_batch_size: 4 {THREE}
parameters {{ key: "function" value {{ string_value: "identity" }} }}
{X} {Y} {SCATTER}
{made("ELEMENT_COUNT", "COUNT")}{made("ACCUMULATED_ELEMENT_COUNT", "SUM", "FP32")}{made("ITEM_SHAPE", "SHAPE")}
{number("COUNTS", "INT32")}{number("SUMS", "FP32")}
output [ {{ name: "SHAPES" data_type: TYPE_INT32 dims: [ 1 ] }} ]
"""


def column(source: str, target: str) -> bytes:
    """Returns a node that makes a list a column with one row per request."""
    return node("Unsqueeze", [source, "one"], [target])


NODES = [
    node("Add", ["X", "X"], ["Y"]),
    # The sum of each request's elements: differences of the running sum at the bounds.
    node("CumSum", ["X", "zero_axis"], ["running"]),
    node("Concat", ["nothing", "running"], ["padded"], axis=0),
    node("Gather", ["padded", "ENDS"], ["upper"], axis=0),
    node("Slice", ["BOUNDS", "start", "last", "axis"], ["starts"]),
    node("Gather", ["padded", "starts"], ["lower"], axis=0),
    node("Sub", ["upper", "lower"], ["sums"]),
    column("sums", "SUM"),
    # The length of the longest request, for each request.
    node("Mul", ["upper", "zero"], ["zeros"]),
    node("Shape", ["LONGEST"], ["length"]),
    node("Cast", ["length"], ["long"], to=1),
    node("Add", ["zeros", "long"], ["lengths"]),
    column("lengths", "MOST"),
    column("ITEMS", "ITEM"),
]
CONSTANTS = [
    constant("zero_axis", "INT64", np.array(0)),
    constant("nothing", "FP32", np.array([0], np.float32)),
    constant("zero", "FP32", np.array([0], np.float32)),
    *(
        constant(name, "INT64", np.array([value]))
        for name, value in [("one", 1), ("start", 0), ("last", -1), ("axis", 0)]
    ),
]
ONNX = model(
    NODES,
    [
        ("X", "FP32", ["n"]),
        ("BOUNDS", "INT32", ["b"]),
        ("ENDS", "INT32", ["e"]),
        ("LONGEST", "FP32", ["m"]),
        ("ITEMS", "INT32", ["i"]),
    ],
    [("Y", "FP32", ["n"]), ("SUM", "FP32", ["r", 1]), ("MOST", "FP32", ["r", 1]), ("ITEM", "INT32", ["i", 1])],
    CONSTANTS,
)
COLUMN = 'output [ {{ name: "{}" data_type: TYPE_{} dims: [ 1 ] }} ]\n'


def onnx_config(backend: str) -> str:
    """Returns the configuration of the ONNX model for a backend."""
    return f"""backend: "{backend}" max_batch_size: 4 {THREE}
{X} {Y} {SCATTER}
{made("ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "BOUNDS")}{made("MAX_ELEMENT_COUNT_AS_SHAPE", "LONGEST", "FP32")}
{made("ACCUMULATED_ELEMENT_COUNT", "ENDS")}{made("ITEM_SHAPE_FLATTEN", "ITEMS")}
{COLUMN.format("SUM", "FP32")}{COLUMN.format("MOST", "FP32")}{COLUMN.format("ITEM", "INT32")}
"""


TEXTS = f"max_batch_size: 4 {THREE} {X} {Y} {SCATTER}".replace("TYPE_FP32", "TYPE_STRING")
TEXTS_ONNX = model([node("Identity", ["X"], ["Y"])], [("X", "BYTES", ["n"])], [("Y", "BYTES", ["n"])])
NUMBERS = f"""backend: "builtin" {TEXTS} {(X + Y + SCATTER).replace("X", "X2").replace('"Y"', '"Y2"').replace("FP32", "STRING")}
parameters {{ key: "function" value {{ string_value: "add_sub" }} }}
"""


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """Starts a server with the models."""
    folder = tmp_path_factory.mktemp("ragged")
    write(folder / "models", "made_here", MADE_HERE)
    for backend in ["onnxruntime", "tract"] if HAS_TRACT else ["onnxruntime"]:
        write(folder / "models", backend, onnx_config(backend), ONNX)
        write(folder / "models", f"texts_{backend}", f'backend: "{backend}" {TEXTS}', TEXTS_ONNX)
    write(folder / "models", "numbers", NUMBERS)
    with Server(folder, [folder / "models"]) as running:
        yield running


INPUTS = [np.array(values, np.float32) for values in [[1, 2, 3], [10], [20, 30]]]


def answers(server, name: str) -> list:
    """Sends the inputs concurrently as requests of one item; returns their outputs."""

    def ask(values: np.ndarray) -> dict:
        with tritonclient.http.InferenceServerClient(server.http) as client:
            tensor = tritonclient.http.InferInput("X", [1, len(values)], "FP32")
            tensor.set_data_from_numpy(values.reshape(1, -1))
            result = client.infer(name, [tensor])
            return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}

    with concurrent.futures.ThreadPoolExecutor(len(INPUTS)) as pool:
        return list(pool.map(ask, INPUTS))


@pytest.mark.smoke
def test_computed_inputs_describe_the_requests_of_a_batch(ragged):
    """One batch of three requests: the model receives lengths, running lengths and shapes, and each request gets its outputs."""
    got = answers(ragged, "made_here")
    assert sizes(ragged, "made_here") == {3: 1}
    for values, answer in zip(INPUTS, got):
        np.testing.assert_array_equal(answer["Y"], values.reshape(1, -1))
        assert answer["COUNTS"].tolist() == [[len(values)]]
        assert answer["SHAPES"].tolist() == [[len(values)]]
    # The requests may arrive in any order.
    sums = sorted((answer["SUMS"].item(), answer["COUNTS"].item()) for answer in got)
    assert [total for total, _ in sums] == np.cumsum([count for _, count in sums]).tolist()


@pytest.mark.parametrize("backend", ONNX_BACKENDS)
def test_a_model_computes_over_a_ragged_batch(ragged, backend):
    """A model sums each request's elements by the bounds, and doubles all elements at once."""
    got = answers(ragged, backend)
    assert sizes(ragged, backend) == {3: 1}
    for values, answer in zip(INPUTS, got):
        np.testing.assert_array_equal(answer["Y"], 2 * values.reshape(1, -1))
        assert answer["SUM"].tolist() == [[values.sum()]]
        assert answer["MOST"].tolist() == [[3]]
        assert answer["ITEM"].tolist() == [[len(values)]]


def answers_in_order(server, name: str, requests: list) -> list:
    """Sends requests, which map inputs to texts, one after the other for one batch; returns the statuses and answers."""
    before = received(server, name)

    def ask(inputs: dict) -> tuple:
        shaped = [{"name": key, "datatype": "BYTES", "shape": [1, len(texts)], "data": texts} for key, texts in inputs.items()]
        return server.infer(name, {"inputs": shaped})

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        futures = []
        for inputs in requests:
            futures.append(pool.submit(ask, inputs))
            eventually("the request has arrived", lambda: received(server, name) == before + len(futures))  # noqa: B023
        return [future.result() for future in futures]


def data(answer: tuple) -> list:
    """Returns the elements of each output of an answer."""
    assert answer[0] == 200, answer
    return [output["data"] for output in answer[1]["outputs"]]


@pytest.mark.parametrize("backend", ONNX_BACKENDS)
def test_texts_of_different_lengths(ragged, backend):
    """Requests with different numbers of texts, which have different numbers of bytes. Only the one with a wrong text fails."""
    name = f"texts_{backend}"
    texts = [["a"], ["Grüße", "", "b"], ["one", "x" * 1000, "", "two"]]
    got = answers_in_order(ragged, name, [{"X": each} for each in texts])
    assert [data(answer) for answer in got] == [[each] for each in texts]
    assert sizes(ragged, name) == {3: 1}
    first, (status, wrong), last = answers_in_order(ragged, name, [{"X": each} for each in (["a"] * 4, ["b", "\0"], ["c"])])
    assert status == 400 and "not UTF-8 text without NUL bytes" in wrong["error"], wrong
    assert (data(first), data(last)) == ([["a"] * 4], [["c"]])


def test_numbers_as_texts_of_different_lengths(ragged):
    """The backend adds and subtracts them. Only the request with a text that is no number fails."""
    got = answers_in_order(ragged, "numbers", [{"X": ["5"] * count, "X2": ["3"] * count} for count in (1, 3, 4)])
    assert [data(answer) for answer in got] == [[["8"] * count, ["2"] * count] for count in (1, 3, 4)]
    assert sizes(ragged, "numbers") == {3: 1}
    inputs = [{"X": texts, "X2": ["3"] * len(texts)} for texts in (["5"] * 4, ["5", "x"], ["5"])]
    first, (status, wrong), last = answers_in_order(ragged, "numbers", inputs)
    assert status == 400 and "x" in wrong["error"], wrong
    assert (data(first), data(last)) == ([["8"] * 4, ["2"] * 4], [["8"], ["2"]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MADE_HERE.replace("allow_ragged_batch: true", "allow_ragged_batch: true optional: true"), "must not be optional"),
        (
            MADE_HERE.replace('source_input: "X"', 'source_input: "Z"', 1),
            "unknown source input name 'Z'",
        ),
        (MADE_HERE.replace('target_name: "Y"', 'target_name: "Q"'), "unknown target output name 'Q'"),
        (MADE_HERE.replace("TYPE_INT32 source", "TYPE_INT64 source", 1), "must be TYPE_INT32 or TYPE_FP32"),
        (MADE_HERE.replace('target_name: "COUNT"', 'target_name: "X"'), "batch input 'X' is listed twice"),
        (
            MADE_HERE.replace('source_input: "X"', 'source_input: [ "X", "X" ]', 1),
            "expects 1 source input, got 2",
        ),
        (onnx_config("onnxruntime").replace('"BOUNDS" data_type: TYPE_INT32', '"BOUNDS" data_type: TYPE_FP32'), "BOUNDS"),
        (onnx_config("onnxruntime").replace('"BOUNDS"', '"BORDERS"'), "unexpected inference input 'BORDERS'"),
    ],
)
def test_wrong_descriptions_are_refused(start, tmp_path, config, expected):
    """The load fails with the name of the wrong `batch_input` or `batch_output`."""
    folder = write(tmp_path / "models", "wrong", config, ONNX if "onnxruntime" in config else b"")
    server = start([], "--exit-on-error=false", repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually(f"the reason contains {expected!r}", lambda: expected in str(server.index()))
