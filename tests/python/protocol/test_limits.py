"""Requests that the protocol allows but that exceed a worker's limits, and requests that must not expose bytes of others."""

import json

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from harness.inference import one
from protocol.request_table import tensor


@pytest.mark.smoke
@pytest.mark.parametrize("extra", [
    {"id": "x" * (2 << 20)},
    {"parameters": {"p": "x" * (2 << 20)}},
    {"parameters": {f"p{n}": "x" * 100 for n in range(16_000)}},
])  # fmt: skip
def test_long_ids_and_parameters_are_refused_before_the_worker(server, extra):
    """They would be sent to the worker beside the tensors; the client gets an error at the limit."""
    before = server.workers()
    status, answer = server.infer("identity_fp32_nobatch", one("FP32", [1], [1]) | extra)
    assert status == 400
    assert "id and parameters have" in answer["error"], answer["error"][-200:]
    assert server.workers() == before


@pytest.mark.smoke
def test_a_long_element_in_an_error_is_truncated(server):
    """The error quotes the client's element; a huge one must not break the worker's connection."""
    before = server.workers()
    texts = ["x" * (8 << 20)] + ["1"] * 15
    inputs = [tensor("INPUT0", "BYTES", [1, 16], texts), tensor("INPUT1", "BYTES", [1, 16], ["1"] * 16)]
    status, answer = server.infer("simple_string", {"inputs": inputs})
    assert status == 400
    assert len(answer["error"]) < 5000
    assert server.workers() == before


@pytest.mark.smoke
def test_inputs_of_two_shapes_expose_no_other_bytes(server):
    """add_sub of 16 and 1 elements is an error, not 1 sum and 15 stale values."""
    inputs = [tensor("INPUT0", "INT32", [16], [1] * 16), tensor("INPUT1", "INT32", [1], [1])]
    status, answer = server.infer("add_sub_any", {"inputs": inputs})
    assert status == 400
    assert "one shape" in answer["error"]


@pytest.mark.smoke
def test_decoupled_models_need_a_stream(server):
    """The texts are Triton's, over HTTP and over gRPC."""
    status, answer = server.infer("decoupled", one("FP32", [1], [1]))
    assert (status, json.dumps(answer)) == (
        501,
        json.dumps({"error": "HTTP end point doesn't support models with decoupled transaction policy"}),
    )
    image = grpcclient.InferInput("INPUT0", [1], "FP32")
    image.set_data_from_numpy(np.ones(1, dtype=np.float32))
    with grpcclient.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException) as error:
        client.infer("decoupled", [image])
    assert error.value.status() == "StatusCode.UNIMPLEMENTED"
    assert "ModelInfer RPC doesn't support models with decoupled transaction policy" in error.value.message()
