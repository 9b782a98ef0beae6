"""Outputs of ONNX models are equal in ONNX Runtime, tract and numpy, both when ONNX Runtime writes them directly to the output
arena and when they are copied."""

import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from backends.onnx_models import DOUBLE, MIB, MODELS, PAIR, WEIGHTS, fp32, write
from harness.datatypes import random_values
from harness.generate import DATATYPES
from harness.onnx_file import constant, node
from harness.server import Server
from harness.tract import HAS_TRACT, ONNX_BACKENDS
from harness.waiting import eventually

WEIGHTS += [constant(name, "INT64", np.array([value])) for name, value in [("zero", 0), ("one", 1)]]
LONG = 3_000_000_000


ONNXRUNTIME_ONLY = {
    "too_large": (
        0,
        [node("Expand", ["X", "shape"], ["Y"])],
        [fp32("X", 1)],
        [fp32("Y", LONG)],
        [constant("shape", "INT64", np.array([LONG]))],
    ),
    "wrong_rows": (8, [node("Concat", ["X", "X"], ["Y"], axis=0)], [fp32("X", "N", 4)], [fp32("Y", "M", 4)]),
    "passed_through": (8, DOUBLE, [fp32("X", "N", 4)], [fp32("Y", "N", 4), fp32("X", "N", 4)]),
    **{
        f"identity_{datatype.lower()}": (
            8,
            [node("Identity", ["X"], ["Y"])],
            [("X", datatype, ["N", 5])],
            [("Y", datatype, ["N", 5])],
        )
        for datatype in DATATYPES
    },
}
"""Models that tract evaluates at load, refuses, or has no datatype for."""


@pytest.fixture(scope="module")
def onnx_server(tmp_path_factory):
    """A server with all models above, as `NAME_onnxruntime`, and as `NAME_tract` if tract is built."""
    folder = tmp_path_factory.mktemp("onnx")
    for backend, models in [("onnxruntime", MODELS | ONNXRUNTIME_ONLY), ("tract", MODELS if HAS_TRACT else {})]:
        for name, parts in models.items():
            write(folder / "models", f"{name}_{backend}", backend, parts)
    with Server(folder, [folder / "models"]) as running:
        yield running


def ask(server, model: str, x: np.ndarray, *names, datatype="FP32") -> dict:
    """Sends one request; returns the outputs with these names, or all."""
    with tritonclient.http.InferenceServerClient(server.http, network_timeout=120, connection_timeout=120) as client:
        tensor = tritonclient.http.InferInput("X", list(x.shape), datatype)
        tensor.set_data_from_numpy(x)
        wanted = [tritonclient.http.InferRequestedOutput(name) for name in names] or None
        result = client.infer(model, [tensor], outputs=wanted)
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}


def numbers(*shape) -> np.ndarray:
    """Returns FP32 values; each call returns different values."""
    numbers.generator = getattr(numbers, "generator", None) or np.random.default_rng(11)
    return numbers.generator.integers(-3, 7, shape).astype(np.float32)


def same(got: dict, expected: dict):
    """Asserts that names, datatypes, shapes and values are equal."""
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(got[name], array)


CASES = {
    "static": ([(2, 3)], lambda x: {"Y": x * 2}),
    "batched": ([(1, 4), (8, 4), (3, 4)], lambda x: {"Y": x * 2}),
    "free": ([(1, 1), (5, 3), (2, 7)], lambda x: {"Y": x * 2}),
    "free_row": ([(1, 1), (5, 3)], lambda x: {"Y": x * 2}),
    "greater": ([(1, 4), (5, 4)], lambda x: {"Y": x > 2}),
    "several": ([(1, 4), (5, 4)], lambda x: {"A": x + 2, "Y": x * 2, "B": np.full_like(x, 2)}),
    "nonzero": ([(6,), (6,)], lambda x: {"Y": np.array(np.nonzero(x), np.int64)}),
    "constant": ([(4,)], lambda x: {"Y": x * 2, "pair": PAIR, "Z": PAIR + np.float32(2)}),
    "empty": ([(3, 4)], lambda x: {"Y": x[:, :0], "Z": x * 2}),
    "wrong_first": ([(1, 4), (3, 4), (1, 4), (8, 4)], lambda x: {"Y": x * 2}),
    "wrong_last": ([(2, 4), (2, 3), (3, 4), (1, 6)], lambda x: {"Y": x * 2, "A": x[:, :1]}),
}


@pytest.mark.parametrize("backend", ONNX_BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_what_numpy_computes(onnx_server, name, backend):
    """Every kind of shape is tested several times, since memory is reused; also files that declare a wrong shape."""
    shapes, expected = CASES[name]
    for shape in shapes * 2:
        x = numbers(*shape)
        same(ask(onnx_server, f"{name}_{backend}", x), expected(x))


@pytest.mark.parametrize("backend", ONNX_BACKENDS)
@pytest.mark.parametrize("wanted", [["Y"], ["B"], ["B", "A"]])
def test_only_requested_outputs_are_returned(onnx_server, backend, wanted):
    """The request names one or two of three outputs; one output is computed from another."""
    x = numbers(3, 4)
    expected = {name: array for name, array in CASES["several"][1](x).items() if name in wanted}
    same(ask(onnx_server, f"several_{backend}", x, *wanted), expected)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype(onnx_server, datatype):
    """Bytes pass through ONNX Runtime unchanged; it accepts only texts without NUL bytes."""
    for rows in (1, 3):
        x = random_values(datatype, (rows, 5))
        if datatype == "BYTES":
            x = np.array([f"text {n} ü".encode() for n in range(rows * 5)], np.object_).reshape(rows, 5)
        same(ask(onnx_server, f"identity_{datatype.lower()}_onnxruntime", x, datatype=datatype), {"Y": x})


def test_an_input_that_is_an_output(onnx_server):
    """The output is right although the runtime returns the input's memory instead of the given output buffer."""
    for _ in range(2):
        x = numbers(3, 4)
        same(ask(onnx_server, "passed_through_onnxruntime", x), {"Y": x * 2, "X": x})


def test_an_output_that_does_not_fit(onnx_server):
    """The output is refused before the runtime allocates memory for it."""
    with pytest.raises(InferenceServerException, match=f"{LONG * 4} bytes of output do not fit in the .* output arena"):
        ask(onnx_server, "too_large_onnxruntime", numbers(1))


def test_an_output_with_other_rows_than_the_batch(onnx_server):
    """A request that is alone in its batch always gets the model's output; the log has one warning with the difference."""
    for rows in (1, 3):
        x = numbers(rows, 4)
        same(ask(onnx_server, "wrong_rows_onnxruntime", x), {"Y": np.concatenate([x, x])})
    warnings = [line for line in onnx_server.log.read_text().splitlines() if "clients receive it as the model gave" in line]
    assert len(warnings) == 1 and "shape [2, 4] for a batch of 1" in warnings[0], warnings


def private_memory(pid: int) -> int:
    """Returns the private memory of a process in bytes, without shared memory."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10


def test_a_large_output_takes_no_memory_of_the_runtime(tmp_path):
    """A 64 MiB tensor goes in and out; the worker's private memory grows far less, since the runtime makes no copy."""
    write(tmp_path / "models", "large", "onnxruntime", MODELS["large"])
    with Server(tmp_path, [tmp_path / "models"]) as server:
        (worker,) = eventually("one worker runs", lambda: len(server.workers()) == 1 and server.workers())
        before = private_memory(worker)
        x = np.ones((1, 16 * MIB), np.float32)
        assert (ask(server, "large", x)["Y"] == 2).all()
        assert private_memory(worker) - before < 32 * MIB
