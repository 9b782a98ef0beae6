"""The example configurations of Triton's architecture description, unchanged, with models that output the controls that they
receive. Only `platform` is replaced by ONNX Runtime, because the original needs a GPU."""

import concurrent.futures
import threading

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness.models import write
from harness.onnx_file import constant, model, node
from harness.server import Server
from harness.waiting import holds_for, join_all


def control(name: str, kind: str, what="fp32_false_true: [ 0, 1 ]") -> str:
    """Returns one entry of `control_input`."""
    return f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{kind} {what} }} ] }}'


START, END, READY = (control(kind, kind) for kind in ("START", "END", "READY"))
CORRID = control("CORRID", "CORRID", "data_type: TYPE_UINT64")
CONTROLS = f"sequence_batching {{ control_input [ {START}, {END}, {READY}, {CORRID} ] }}"

STATE = """sequence_batching { CONTROLS state [ { input_name: "INPUT_STATE" output_name: "OUTPUT_STATE"
data_type: TYPE_INT32 dims: [ -1 ] INITIAL } ] }"""
INITIAL = 'initial_state: {{ data_type: TYPE_INT32 dims: [ 1 ] {} name: "initial state" }}'
STATES = {
    "uninitialised": ("", [START]),
    "zero": (INITIAL.format("zero_data: true"), []),
    "file": (INITIAL.format('data_file: "initial_state_data"'), []),
}
STATE_TENSORS = """platform: "onnxruntime_onnx" max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "OUTPUT_STATE" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""

TENSORS = """max_batch_size: 2
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ 100, 100 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 10 ] } ]
"""
DIRECT = f"""name: "direct_stateful_model" platform: "onnxruntime_onnx" {TENSORS}
sequence_batching {{ max_sequence_idle_microseconds: 5000000 direct {{ }} control_input [ {START}, {READY} ] }}
instance_group [ {{ count: 2 }} ]"""
OLDEST = f"""name: "oldest_stateful_model" platform: "onnxruntime_onnx" {TENSORS}
sequence_batching {{ max_sequence_idle_microseconds: 5000000 oldest {{ max_candidate_sequences: 4 }}
control_input [ {START}, {END}, {CORRID} ] }}"""

ENSEMBLE = """name: "ensemble_model" platform: "ensemble" max_batch_size: 1
input [ { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "CLASSIFICATION" data_type: TYPE_FP32 dims: [ 1000 ] },
         { name: "SEGMENTATION" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
ensemble_scheduling { step [
  { model_name: "image_preprocess_model" model_version: -1
    input_map { key: "RAW_IMAGE" value: "IMAGE" } output_map { key: "PREPROCESSED_OUTPUT" value: "preprocessed_image" } },
  { model_name: "classification_model" model_version: -1
    input_map { key: "FORMATTED_IMAGE" value: "preprocessed_image" }
    output_map { key: "CLASSIFICATION_OUTPUT" value: "CLASSIFICATION" } },
  { model_name: "segmentation_model" model_version: -1
    input_map { key: "FORMATTED_IMAGE" value: "preprocessed_image" }
    output_map { key: "SEGMENTATION_OUTPUT" value: "SEGMENTATION" } } ] }"""


def model_with_controls(*controls) -> bytes:
    """Returns a model whose output begins with the sum of its input, followed by its controls."""
    cast = [node("Cast", [name], [f"{name}_fp32"], to=1) for name in controls]
    columns = ["sum", *(f"{name}_fp32" for name in controls), "rest"]
    nodes = [node("ReduceSum", ["INPUT", "axes"], ["three_dims"], keepdims=1), node("Squeeze", ["three_dims", "last"], ["sum"])]
    # Fill the missing columns with the sum times zero.
    nodes += [node("Mul", ["sum", "noughts"], ["rest"]), *cast, node("Concat", columns, ["OUTPUT"], axis=1)]
    return model(
        nodes,
        [("INPUT", "FP32", ["n", 100, 100]), *((name, DATATYPES[name], ["n", 1]) for name in controls)],
        [("OUTPUT", "FP32", ["n", 10])],
        [
            constant("axes", "INT64", np.array([1, 2])),
            constant("last", "INT64", np.array([2])),
            constant("noughts", "FP32", np.zeros((1, 9 - len(controls)), np.float32)),
        ],
    )


DATATYPES = {"START": "FP32", "END": "FP32", "READY": "FP32", "CORRID": "UINT64"}


def accumulator(has_start: bool) -> bytes:
    """Returns a model that sums all inputs of a sequence; with START the sum is reset, whatever the state is."""
    nodes = [node("Add", ["INPUT", "INPUT_STATE"], ["added"])]
    if has_start:
        nodes += [node("Cast", ["START"], ["starts"], to=9), node("Where", ["starts", "INPUT", "added"], ["OUTPUT"])]
    else:
        nodes += [node("Identity", ["added"], ["OUTPUT"])]
    inputs = [("INPUT", "INT32", ["n", "m"]), ("INPUT_STATE", "INT32", ["n", "k"])]
    inputs += [("START", "FP32", ["n", 1])] if has_start else []
    outputs = [("OUTPUT", "INT32", ["n", "m"]), ("OUTPUT_STATE", "INT32", ["n", "m"])]
    return model([*nodes, node("Identity", ["OUTPUT"], ["OUTPUT_STATE"])], inputs, outputs)


def member(name: str, read: tuple, wrote: tuple, nodes: list) -> tuple:
    """Returns the configuration and the file of a model of the ensemble. `read` and `wrote` are `(name, datatype, dims)`."""
    text = f'name: "{name}" platform: "onnxruntime_onnx" max_batch_size: 4 dynamic_batching {{ }}\n'
    for kind, (tensor, datatype, dims) in [("input", read), ("output", wrote)]:
        text += f'{kind} [ {{ name: "{tensor}" data_type: TYPE_{datatype.replace("BYTES", "STRING")} dims: {dims} }} ]\n'
    tensors = [[(tensor, datatype, ["n", *dims])] for tensor, datatype, dims in (read, wrote)]
    shape = constant("shape", "INT64", np.array([1, *wrote[2]]))
    return text, model(nodes, *tensors, [shape, constant("more", "INT64", np.array([2, 3]))])


IMAGE, PREPROCESSED = ("RAW_IMAGE", "BYTES", [1]), ("PREPROCESSED_OUTPUT", "FP32", [3, 2, 2])
FORMATTED = ("FORMATTED_IMAGE", "FP32", [3, 2, 2])
PREPROCESS = member(
    "image_preprocess_model",
    IMAGE,
    PREPROCESSED,
    [
        node("Cast", ["RAW_IMAGE"], ["number"], to=1),
        node("Unsqueeze", ["number", "more"], ["pixels"]),
        node("Expand", ["pixels", "shape"], ["PREPROCESSED_OUTPUT"]),
    ],
)
MEAN = node("ReduceMean", ["FORMATTED_IMAGE"], ["mean"], axes=[1, 2, 3], keepdims=1)
CLASSIFY = member(
    "classification_model",
    FORMATTED,
    ("CLASSIFICATION_OUTPUT", "FP32", [1000]),
    [MEAN, node("Squeeze", ["mean", "more"], ["column"]), node("Expand", ["column", "shape"], ["CLASSIFICATION_OUTPUT"])],
)
SEGMENT = member(
    "segmentation_model",
    FORMATTED,
    ("SEGMENTATION_OUTPUT", "FP32", [3, 224, 224]),
    [MEAN, node("Neg", ["mean"], ["negative"]), node("Expand", ["negative", "shape"], ["SEGMENTATION_OUTPUT"])],
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with all these models."""
    folder = tmp_path_factory.mktemp("architecture")
    models = folder / "models"
    text = 'input [ { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
    text += 'output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "BATCH" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
    text += 'backend: "test" max_batch_size: 2 parameters { key: "function" value { string_value: "sequence_sum" } }\n'
    write(models, "controls", text + CONTROLS)
    for name, (initial, controls) in STATES.items():
        given = f"control_input [ {', '.join(controls)} ]" if controls else ""
        batching = STATE.replace("CONTROLS", given).replace("INITIAL }", f"{initial} }}")
        write(models, f"state_{name}", STATE_TENSORS + batching, accumulator(bool(controls)))
    first = models / "state_file" / "initial_state"
    first.mkdir()
    (first / "initial_state_data").write_bytes(np.array([1000], np.int32).tobytes())
    write(models, "direct_stateful_model", DIRECT, model_with_controls("START", "READY"))
    write(models, "oldest_stateful_model", OLDEST, model_with_controls("START", "END", "CORRID"))
    write(models, "ensemble_model", ENSEMBLE)
    for name, part in [("image_preprocess", PREPROCESS), ("classification", CLASSIFY), ("segmentation", SEGMENT)]:
        write(models, f"{name}_model", *part)
    with Server(folder, [models]) as running:
        yield running


@pytest.fixture
def client(server):
    """A gRPC client of tritonclient that several threads can share."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as one:
        yield one


def ask(client, name: str, tensor: str, array: np.ndarray, flags="", **options):
    """Sends one request with one input; `flags` has `(` for START and `)` for END."""
    datatypes = {"i": "INT32", "f": "FP32", "O": "BYTES"}
    given = tritonclient.grpc.InferInput(tensor, array.shape, datatypes[array.dtype.kind])
    given.set_data_from_numpy(array)
    if "sequence_id" in options:
        options |= {"sequence_start": "(" in flags, "sequence_end": ")" in flags}
    return client.infer(name, [given], **options)


def test_all_control_signals(client):
    """START, END, READY as FP32, and the correlation id, over a sequence of three requests."""
    seen = []
    for flags in ["(", "", ")"]:
        result = ask(client, "controls", "VALUE", np.array([[1]], np.int32), flags, sequence_id=5)
        seen.append((result.as_numpy("SUM").item(), result.as_numpy("BATCH").item()))
    assert seen == [(1, b"1,0,1,5"), (2, b"0,0,1,5"), (3, b"0,1,1,5")]


@pytest.mark.parametrize(("name", "first"), [("uninitialised", 0), ("zero", 0), ("file", 1000)])
def test_states_have_their_initial_values(client, name, first):
    """Without an initial value the model evaluates START; otherwise the state starts with zeros or the file. The state can be
    requested as an output."""
    total = np.full((1, 3), first, np.int32)
    for number, flags in enumerate(["(", "", "", ")"]):
        x = np.array([[1, 10, 100]], np.int32) * (number + 1)
        total = total + x
        result = ask(client, f"state_{name}", "INPUT", x, flags, sequence_id=7)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT"), total)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT_STATE"), total)


def picture(value: float) -> np.ndarray:
    """Returns 100 x 100 numbers with this sum."""
    return np.full((1, 100, 100), value / 10_000, np.float32)


def step(client, name: str, sequence: int, flags="") -> list:
    """Returns the first four elements of the output: the sum, then the controls."""
    result = ask(client, name, "INPUT", picture(sequence), flags, sequence_id=sequence)
    return [round(float(value), 2) for value in result.as_numpy("OUTPUT")[0, :4]]


def test_direct_has_two_slots_in_each_of_two_instances(client, server):
    """Four sequences run; the requests of a fifth wait in the backlog until one of the four ends."""
    name = "direct_stateful_model"
    for sequence in (1, 2, 3, 4):
        assert step(client, name, sequence, "(") == [sequence, 1, 1, 0]
        assert step(client, name, sequence) == [sequence, 0, 1, 0]
    waits_for_a_slot(client, name, [5, 1, 1, 0], [5, 0, 1, 0])


def test_oldest_has_four_candidates(client, server):
    """Batches of two requests from at most four sequences; the fifth sequence waits."""
    name = "oldest_stateful_model"
    for sequence in (1, 2, 3, 4):
        assert step(client, name, sequence, "(") == [sequence, 1, 0, sequence]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            answers = pool.map(lambda sequence: step(client, name, sequence), (1, 2, 3, 4))
            assert list(answers) == [[sequence, 0, 0, sequence] for sequence in (1, 2, 3, 4)]
    sizes = [entry.batch_size for entry in client.get_inference_statistics(name).model_stats[0].batch_stats]
    assert max(sizes) <= 2
    waits_for_a_slot(client, name, [5, 1, 0, 5], [5, 0, 1, 5])


def waits_for_a_slot(client, name: str, started: list, ended: list):
    """A fifth sequence stays in the backlog until the second of four has ended; then all end."""
    seen = []
    fifth = threading.Thread(target=lambda: seen.append(step(client, name, 5, "(")))
    fifth.start()
    holds_for("the fifth sequence waits", 0.3, lambda: seen == [])
    step(client, name, 2, ")")
    join_all([fifth])
    assert seen == [started]
    assert step(client, name, 5, ")") == ended
    for sequence in (1, 3, 4):
        step(client, name, sequence, ")")
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        step(client, name, 2)


def test_the_ensemble_of_three_models(client):
    """One client request runs three models, each of which can also be used separately."""
    image = np.array([[b"0.25"]], np.object_)
    result = ask(client, "ensemble_model", "IMAGE", image)
    classes, segments = result.as_numpy("CLASSIFICATION"), result.as_numpy("SEGMENTATION")
    np.testing.assert_allclose(classes, np.full((1, 1000), 0.25, np.float32))
    np.testing.assert_allclose(segments, np.full((1, 3, 224, 224), -0.25, np.float32))
    counts = {}
    for name in ["ensemble_model", "image_preprocess_model", "classification_model", "segmentation_model"]:
        counts[name] = client.get_inference_statistics(name).model_stats[0].inference_stats.success.count
    assert set(counts.values()) == {1}
    alone = ask(client, "image_preprocess_model", "RAW_IMAGE", image).as_numpy("PREPROCESSED_OUTPUT")
    np.testing.assert_allclose(alone, np.full((1, 3, 2, 2), 0.25, np.float32))


def test_an_ensemble_has_no_instances(tmp_path):
    """The load is refused with the reason."""
    models = tmp_path / "models"
    write(models, "ensemble_model", ENSEMBLE + "\ninstance_group [ { count: 2 } ]")
    for name, part in [("image_preprocess", PREPROCESS), ("classification", CLASSIFY), ("segmentation", SEGMENT)]:
        write(models, f"{name}_model", *part)
    with Server(tmp_path, [models], ["--exit-on-error=false", "--strict-readiness=false"]) as server:
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            index = {found.name: found for found in client.get_model_repository_index().models}
            assert index["ensemble_model"].state == "UNAVAILABLE"
            assert "instance" in index["ensemble_model"].reason
