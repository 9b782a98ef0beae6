"""The order of tensors of Python models, which is that of a real Triton: outputs have the order of the model's response, and
`request.inputs()` has the client's order. The configuration has the inputs A, B and Z and the outputs A, B, M and Z."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpc

from harness.server import Server
from harness.waiting import eventually
from python_backend.worker import CODE, PYTHON, has_worker, model

BATCHED = "max_batch_size: 8\ndynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 2000000 }\n"
MODELS = {
    "order": "",
    "order_batched": BATCHED,
    "order_cached": "response_cache { enable: true }\n",
    "order_stream": "model_transaction_policy { decoupled: true }\n",
}

pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with the models."""
    folder = tmp_path_factory.mktemp("order")
    models = folder / "models"
    for name, extra in MODELS.items():
        (models / name / "1").mkdir(parents=True)
        shutil.copy(CODE / "own_order.py", models / name / "1/model.py")
        tensors = [("input", tensor) for tensor in "ABZ"] + [("output", tensor) for tensor in "ABMZ"]
        listed = "".join(
            f'{side} {{ name: "{tensor}" data_type: TYPE_FP32 dims: [ -1 ] {"optional: true" if side == "input" else ""} }}\n'
            for side, tensor in tensors
        )
        (models / name / "config.pbtxt").write_text(f'backend: "python"\n{listed}{extra}')
    model(models, "order_caller", "own_order_caller")
    with Server(folder, [models], [f"--python={PYTHON}", "--cache-config=local,size=1048576"]) as server:
        yield server


def over_http(server, name, given="ABZ", wanted="", order="ZAMB", **parameters):
    """Sends a request over HTTP; returns the names of the outputs and the parameters of the response."""
    batched = name == "order_batched"
    shape = [1, 1] if batched else [1]
    body = {
        "inputs": [{"name": tensor, "datatype": "FP32", "shape": shape, "data": [1.0]} for tensor in given],
        "parameters": {"order": order} | parameters,
    }
    if wanted:
        body["outputs"] = [{"name": tensor} for tensor in wanted]
    status, text = server.ask("POST", f"/v2/models/{name}/infer", json.dumps(body).encode())[:2]
    assert status == 200, text
    answer = json.loads(text)
    for tensor in answer["outputs"]:
        if len(tensor["name"]) == 1:
            assert tensor["data"] == [float(ord(tensor["name"]))]
    return "".join(tensor["name"] for tensor in answer["outputs"]), answer.get("parameters", {})


def grpc_request(given="ABZ", wanted=""):
    """Returns the inputs and the requested outputs of a gRPC request."""
    inputs = [grpc.InferInput(tensor, [1], "FP32") for tensor in given]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.ones(1, np.float32))
    return inputs, [grpc.InferRequestedOutput(tensor) for tensor in wanted] or None


def described(result):
    """Returns the names of the outputs and the order of the inputs of a gRPC response."""
    response = result.get_response()
    for output in response.outputs:
        assert result.as_numpy(output.name).tolist() == [float(ord(output.name))]
    return "".join(output.name for output in response.outputs), response.parameters["inputs"].string_param


ORDERS = [("", "ZAMB", "ZAMB"), ("AZ", "ZAMB", "ZA"), ("AZ", "AZ", "AZ"), ("MBA", "ZAMB", "AMB"), ("", "BA", "BA")]
"""Requested outputs, the order of the model's response, and the expected order."""


@pytest.mark.smoke
@pytest.mark.parametrize("wanted, order, expected", ORDERS)
def test_outputs_have_the_order_of_the_response(served, wanted, order, expected):
    """Over HTTP, over gRPC and for a calling model."""
    assert over_http(served, "order", wanted=wanted, order=order)[0] == expected
    with grpc.InferenceServerClient(served.grpc) as client:
        inputs, outputs = grpc_request(wanted=wanted)
        result = client.infer("order", inputs, outputs=outputs, parameters={"order": order})
    assert described(result)[0] == expected
    found = call(served, wanted=wanted or order, order=order)
    assert found["outputs"] == expected


@pytest.mark.smoke
@pytest.mark.parametrize("given", ["ABZ", "ZAB", "BA", "ZA", "AZ"])
def test_inputs_have_the_order_of_the_client(served, given):
    """Over HTTP, over gRPC and for a calling model."""
    assert over_http(served, "order", given)[1]["inputs"] == given
    with grpc.InferenceServerClient(served.grpc) as client:
        inputs, _ = grpc_request(given)
        assert described(client.infer("order", inputs, parameters={"order": "A"}))[1] == given
    assert call(served, given=given)["inputs"] == given


def call(server, given="ABZ", wanted="ABMZ", order="ZAMB"):
    """Lets a model call `order`; returns what it has found."""
    body = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}],
        "parameters": {"given": given, "wanted": wanted, "order": order},
    }
    status, text = server.ask("POST", "/v2/models/order_caller/infer", json.dumps(body).encode())[:2]
    assert status == 200, text
    return json.loads(text)["parameters"]


def test_requests_of_a_batch_have_separate_orders(served):
    """Each of three requests in one execution has the order of its client and of its response."""
    cases = [("ABZ", "", "ZAMB", "ZAMB"), ("ZBA", "AZ", "ZA", "ZA"), ("BZA", "ABM", "MZBA", "MBA")]
    ask = lambda case: over_http(served, "order_batched", case[0], case[1], case[2])  # noqa: E731
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, cases))
    for (given, _, _, expected), (outputs, parameters) in zip(cases, answers):
        assert (outputs, parameters["inputs"], parameters["together"]) == (expected, given, 3)


def test_a_cached_response_keeps_the_order(served):
    """The second request is answered by the cache."""
    answers = [over_http(served, "order_cached")[0] for _ in range(2)]
    assert answers == ["ZAMB", "ZAMB"]
    assert served.statistics("order_cached")["execution_count"] == 1


def test_responses_of_a_decoupled_model_keep_the_order(served):
    """Over a gRPC stream, with and without requested outputs."""
    got = []
    with grpc.InferenceServerClient(served.grpc) as client:
        client.start_stream(lambda result, error: got.append((result, error)))
        for wanted in ("", "AZ"):
            inputs, outputs = grpc_request("ZAB", wanted)
            client.async_stream_infer("order_stream", inputs, outputs=outputs, parameters={"order": "ZAMB"})
            expected = len(got) + 1
            eventually("a response", lambda expected=expected: len(got) >= expected)
        client.stop_stream()
    assert [error for _, error in got if error] == []
    assert [described(result) for result, _ in got] == [("ZAMB", "ZAB"), ("ZA", "ZAB")]
