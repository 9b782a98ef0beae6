"""Every datatype passes through the server unchanged in every encoding that supports it, and arithmetic on it is correct."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from harness.datatypes import random_values
from harness.generate import ARITHMETIC, DATATYPES
from harness.inference import JSON_VALUES
from harness.wire import grpc_infer, grpc_tensor, send_grpc

MODULES = {"http": tritonclient.http, "grpc": tritonclient.grpc}


def ask(server, protocol: str, model: str, datatype: str, *values) -> list:
    """Returns the outputs of a model for these inputs, binary over HTTP, raw over gRPC."""
    module = MODULES[protocol]
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        tensors = []
        for n, value in enumerate(values):
            tensors.append(module.InferInput(f"INPUT{n}", list(value.shape), datatype))
            tensors[-1].set_data_from_numpy(value)
        result = client.infer(model, tensors)
        return [result.as_numpy(f"OUTPUT{n}") for n in range(len(values))]


@pytest.mark.smoke
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_identity(server, protocol, datatype):
    """With and without a batch dimension, the output has the values and the shape of the input."""
    for model, shape in [("identity_{}", (3, 50)), ("identity_{}_nobatch", (70,)), ("identity_{}_nobatch", (0,))]:
        value = random_values(datatype, shape)
        back = ask(server, protocol, model.format(datatype.lower()), datatype, value)[0]
        assert back.shape == shape
        np.testing.assert_array_equal(back, value)


@pytest.mark.parametrize("datatype", JSON_VALUES)
def test_json_to_json(server, datatype):
    """The limits of a datatype survive decimal notation; fractions are returned as the same FP32 or FP64 number."""
    values = JSON_VALUES[datatype]
    request = {"inputs": [{"name": "INPUT0", "shape": [len(values)], "datatype": datatype, "data": values}]}
    status, answer = server.infer(f"identity_{datatype.lower()}_nobatch", request)
    assert status == 200, answer
    back = answer["outputs"][0]["data"]
    if datatype == "FP32":
        back, values = [list(np.array(numbers, dtype=np.float32)) for numbers in (back, values)]
    assert back == values


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_refused_in_json(server, datatype):
    """Neither inputs nor outputs may be JSON."""
    model = f"identity_{datatype.lower()}_nobatch"
    request = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": datatype, "data": [1.0]}]}
    status, answer = server.infer(model, request)
    assert status == 400
    assert f"receiving {datatype} data via JSON is not supported" in answer["error"]
    head = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": datatype, "parameters": {"binary_data_size": 2}}]}
    text = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    status, answer = server.ask("POST", f"/v2/models/{model}/infer", text + b"\0\0", headers=headers)
    assert status == 400
    assert f"sending {datatype} data via JSON is not supported" in answer


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("datatype", [name for name in ARITHMETIC if name != "BF16"])
def test_add_sub(server, protocol, datatype):
    """Sum and difference are those of numpy; integers wrap around."""
    first, second = random_values(datatype, (2, 4)), random_values(datatype, (2, 4))[::-1].copy()
    added, subtracted = ask(server, protocol, f"add_sub_{datatype.lower()}", datatype, first, second)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(added, first + second)
        np.testing.assert_array_equal(subtracted, first - second)


def test_add_sub_bf16(server):
    """BF16 is computed in FP32 and rounded to the nearest, ties to even."""
    first, second = random_values("BF16", (2, 4)), random_values("BF16", (2, 4))[::-1].copy()
    added, subtracted = ask(server, "http", "add_sub_bf16", "BF16", first, second)
    wide, other = first.astype(np.float32), second.astype(np.float32)
    np.testing.assert_array_equal(added, (wide + other).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(subtracted, (wide - other).astype(ml_dtypes.bfloat16))


@pytest.mark.smoke
def test_add_sub_wraps(server):
    """The largest number plus one is the smallest."""
    limit = np.full((1, 4), 2**31 - 1, dtype=np.int32)
    added, subtracted = ask(server, "grpc", "add_sub_int32", "INT32", limit, np.full((1, 4), -1, dtype=np.int32))
    np.testing.assert_array_equal(added, limit - 1)
    np.testing.assert_array_equal(subtracted, np.full((1, 4), -(2**31)))


@pytest.mark.slow
def test_huge_strings(server):
    """A million strings: binary over HTTP, raw and typed over gRPC, and in JSON."""
    count = 1_000_000
    elements = [b"%d" % n for n in range(count)]
    value = np.array(elements, dtype=np.object_)
    for protocol in ("http", "grpc"):
        back = ask(server, protocol, "identity_bytes_nobatch", "BYTES", value)[0]
        assert (back == value).all()
    typed = grpc_tensor("INPUT0", "BYTES", [count], bytes_contents=elements)
    answer = send_grpc(server.grpc, grpc_infer("typed", "identity_bytes_nobatch", [typed]))
    assert answer.status == "OK", answer.text[:300]
    texts = [element.decode() for element in elements]
    request = {"inputs": [{"name": "INPUT0", "shape": [count], "datatype": "BYTES", "data": texts}]}
    status, answer = server.infer("identity_bytes_nobatch", request)
    assert status == 200
    assert answer["outputs"][0]["data"] == texts


def test_large_tensor(server):
    """32 MiB of numbers in both directions over both protocols."""
    value = np.arange(8 * 2**20, dtype=np.float32)
    for protocol in ("http", "grpc"):
        back = ask(server, protocol, "identity_fp32_nobatch", "FP32", value)[0]
        np.testing.assert_array_equal(back, value)


def test_special_numbers_in_json(server):
    """NaN and infinities are written as by Triton: as the words that Python's and JavaScript's parsers accept."""
    text = json.dumps({"inputs": [{"name": "INPUT0", "shape": [3], "datatype": "FP32", "parameters": {
        "binary_data_size": 12}}]}).encode()  # fmt: skip
    body = text + struct.pack("<3f", float("nan"), float("inf"), float("-inf"))
    headers = {"Inference-Header-Content-Length": str(len(text))}
    status, answer = server.ask("POST", "/v2/models/identity_fp32_nobatch/infer", body, headers=headers)
    assert status == 200
    nan, infinity, negative = json.loads(answer)["outputs"][0]["data"]
    assert nan != nan and infinity == float("inf") and negative == float("-inf")
