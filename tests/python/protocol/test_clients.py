"""The standard clients: `tritonclient` over HTTP and gRPC, blocking and asyncio."""

import asyncio
import concurrent.futures
import functools
import re

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from harness.waiting import DEADLINE_S, eventually

MODULES = {"http": tritonclient.http, "grpc": tritonclient.grpc}
ASYNC_MODULES = {"http": tritonclient.http.aio, "grpc": tritonclient.grpc.aio}
ROW = np.arange(16, dtype=np.int32).reshape(1, 16)
ONES = np.ones((1, 16), dtype=np.int32)


@pytest.fixture(params=["http", "grpc"])
def protocol(request):
    """Runs the test with each protocol."""
    return request.param


@pytest.fixture
def client(server, protocol):
    """A blocking client of the protocol."""
    with MODULES[protocol].InferenceServerClient(getattr(server, protocol)) as made:
        yield made


def pair(protocol: str, first=ROW, second=ONES, binary=True) -> list:
    """Returns the two inputs of `simple`; `binary` selects their HTTP encoding."""
    tensors = []
    for name, value in (("INPUT0", first), ("INPUT1", second)):
        tensor = MODULES[protocol].InferInput(name, list(value.shape), "INT32")
        tensor.set_data_from_numpy(value, **({"binary_data": binary} if protocol == "http" else {}))
        tensors.append(tensor)
    return tensors


def wanted(protocol: str, name: str, binary=True):
    """Returns a requested output; `binary` selects its HTTP encoding."""
    return MODULES[protocol].InferRequestedOutput(name, **({"binary_data": binary} if protocol == "http" else {}))


def as_dict(answer) -> dict:
    """Returns a metadata answer of either client as a dictionary."""
    from google.protobuf.json_format import MessageToDict

    return answer if isinstance(answer, dict) else MessageToDict(answer, preserving_proto_field_name=True)


def test_health(client):
    """Liveness, readiness, and readiness by model and version."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert client.is_model_ready("simple", "1")
    assert not client.is_model_ready("simple", "99")
    assert not client.is_model_ready("no_such_model")


@pytest.mark.parametrize("model", ["simple", "no_such_model"])
@pytest.mark.parametrize("version", ["x", "-1", "99999999999999999999"])
def test_readiness_of_a_malformed_version(server, model, version):
    """Over gRPC a malformed version is refused, as by Triton; over HTTP the model is not ready in it."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="failed to get model version") as refused:
            client.is_model_ready(model, version)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    status, text = server.get(f"/v2/models/{model}/versions/{version}/ready")
    assert (status, text) == (400, '{"error":"Model version not ready"}')
    status, _ = server.get(f"/v1/models/{model}/versions/{version}")
    assert status == (404 if model == "no_such_model" else 503)


def test_server_metadata(client):
    """The metadata has the name, and the extensions that clients check."""
    metadata = as_dict(client.get_server_metadata())
    assert metadata["name"] == "triton"
    assert {"statistics", "binary_tensor_data", "model_configuration", "parameters"} <= set(metadata["extensions"])


@pytest.mark.smoke
def test_model_metadata(client):
    """Names, datatypes and shapes, including the batch dimension."""
    metadata = as_dict(client.get_model_metadata("simple"))
    assert metadata["versions"] == ["1"]
    seen = [(t["name"], t["datatype"], [int(d) for d in t["shape"]]) for t in metadata["inputs"] + metadata["outputs"]]
    names = ["INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"]
    assert seen == [(name, "INT32", [-1, 16]) for name in names]


def test_model_config(client, protocol):
    """The configuration has limits and scheduler."""
    config = as_dict(client.get_model_config("simple"))
    config = config["config"] if protocol == "grpc" else config
    assert config["name"] == "simple"
    assert config["max_batch_size"] == 8
    assert "dynamic_batching" in config
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    assert [int(d) for d in config["input"][0]["dims"]] == [16]


@pytest.mark.smoke
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer_in_every_encoding(client, protocol, binary_in, binary_out):
    """Sum and difference are correct with every encoding of the tensors."""
    outputs = [wanted(protocol, "OUTPUT0", binary_out), wanted(protocol, "OUTPUT1", not binary_out)]
    result = client.infer("simple", pair(protocol, binary=binary_in), outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + ONES)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), ROW - ONES)


def test_infer_without_requested_outputs(client, protocol):
    """The answer has all outputs."""
    result = client.infer("simple", pair(protocol))
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + ONES)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), ROW - ONES)


def test_infer_only_one_output(client, protocol):
    """The answer has only the requested output."""
    result = client.infer("simple", pair(protocol), outputs=[wanted(protocol, "OUTPUT1")])
    assert result.as_numpy("OUTPUT0") is None
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), ROW - ONES)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_infer_batches(client, protocol, batch):
    """Each row of a batch is computed independently."""
    rows = np.arange(batch * 16, dtype=np.int32).reshape(batch, 16)
    result = client.infer("simple", pair(protocol, rows, rows[::-1].copy()))
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), rows + rows[::-1])


def test_request_id_comes_back(client, protocol):
    """The id of the request is the id of the response."""
    response = as_dict(client.infer("simple", pair(protocol), request_id="request 7").get_response())
    assert response["id"] == "request 7"
    assert response["model_name"] == "simple"
    assert response["model_version"] == "1"


def test_parameters_are_accepted(client, protocol):
    """Custom parameters have no effect."""
    result = client.infer("simple", pair(protocol), parameters={"text": "a", "number": 3, "flag": True})
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + ONES)


def test_timeout_and_priority_are_accepted(client, protocol):
    """The schedule-policy parameters have no effect on a model without a policy."""
    result = client.infer("simple", pair(protocol), priority=1, timeout=10_000_000)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + ONES)


@pytest.mark.parametrize("request_algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_algorithm", [None, "gzip", "deflate"])
def test_http_compression(server, request_algorithm, response_algorithm):
    """Compressed requests and responses carry the same tensors."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        result = client.infer(
            "simple",
            pair("http"),
            request_compression_algorithm=request_algorithm,
            response_compression_algorithm=response_algorithm,
        )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + ONES)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_grpc_compression(server, algorithm):
    """Compressed gRPC messages are accepted. Triton accepts both algorithms."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        result = client.infer("simple", pair("grpc"), compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + ONES)


@pytest.mark.smoke
def test_errors_reach_the_client(client, protocol):
    """The client's exception has the text and the status of the error."""
    short = np.zeros((1, 8), dtype=np.int32)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("simple", pair(protocol, short, short))
    text = r"unexpected shape for input 'INPUT[01]' for model 'simple'. Expected \[-1,16\], got \[1,8\]"
    assert re.search(text, caught.value.message())
    assert caught.value.status() == {"http": "400", "grpc": "StatusCode.INVALID_ARGUMENT"}[protocol]


def test_strings(client, protocol):
    """Decimal strings are added; the error names a string that is not a number."""
    module = MODULES[protocol]
    numbers = np.array([str(n).encode() for n in range(16)], dtype=np.object_).reshape(1, 16)

    def ask(values):
        tensors = [module.InferInput(name, [1, 16], "BYTES") for name in ("INPUT0", "INPUT1")]
        for tensor in tensors:
            tensor.set_data_from_numpy(values)
        return client.infer("simple_string", tensors)

    result = ask(numbers)
    assert [int(text) for text in result.as_numpy("OUTPUT0").flatten()] == [2 * n for n in range(16)]
    assert [int(text) for text in result.as_numpy("OUTPUT1").flatten()] == [0] * 16
    with pytest.raises(InferenceServerException, match="not a number"):
        ask(np.full((1, 16), b"not a number", dtype=np.object_))


def settle(future, result, error):
    """Passes the outcome of a gRPC client callback to a future."""
    if error:
        future.set_exception(error)
    else:
        future.set_result(result)


def test_async_infer(client, protocol):
    """The clients' thread pools and callbacks."""
    if protocol == "http":
        pending = [client.async_infer("simple", pair("http", ROW + n)) for n in range(8)]
        results = [request.get_result() for request in pending]
    else:
        futures = [concurrent.futures.Future() for _ in range(8)]
        for n, future in enumerate(futures):
            finish = functools.partial(settle, future)
            client.async_infer("simple", pair("grpc", ROW + n), callback=finish)
        results = [future.result(DEADLINE_S) for future in futures]
    for n, result in enumerate(results):
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + n + ONES)


@pytest.mark.smoke
def test_aio_clients(server, protocol):
    """The asyncio clients: health, metadata, statistics, and many concurrent requests over one connection."""

    async def talk():
        module = ASYNC_MODULES[protocol]
        async with module.InferenceServerClient(getattr(server, protocol)) as client:
            assert await client.is_server_live()
            assert await client.is_model_ready("simple")
            assert as_dict(await client.get_model_metadata("simple"))["name"] == "simple"
            assert as_dict(await client.get_inference_statistics("simple"))["model_stats"][0]["name"] == "simple"
            results = await asyncio.gather(*(client.infer("simple", pair(protocol, ROW + n)) for n in range(32)))
            with pytest.raises(InferenceServerException, match="no_such_model"):
                await client.infer("no_such_model", pair(protocol))
            return results

    for n, result in enumerate(asyncio.run(talk())):
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + n + ONES)


@pytest.mark.smoke
def test_grpc_stream(server):
    """The bidirectional stream answers in order, with one response per request; an error is an answer within the stream."""
    answers = []
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        for n in range(5):
            client.async_stream_infer("simple", pair("grpc", ROW + n), request_id=str(n))
        client.async_stream_infer("no_such_model", pair("grpc"))
        client.async_stream_infer("simple", pair("grpc"), request_id="after the error")
        eventually("seven answers on the stream", lambda: len(answers) == 7)
        client.stop_stream()
    assert [answer.get_response().id for answer in answers[:5]] == [str(n) for n in range(5)]
    np.testing.assert_array_equal(answers[4].as_numpy("OUTPUT0"), ROW + 4 + ONES)
    assert "no_such_model" in str(answers[5])
    assert answers[6].get_response().id == "after the error"


@pytest.mark.parametrize("model, versions", [
    ("versions_default", ["3"]), ("versions_all", ["1", "2", "3"]), ("versions_latest_2", ["2", "3"]),
    ("versions_specific", ["1", "3"]),
])  # fmt: skip
def test_version_policies(client, protocol, model, versions):
    """The versions of the policy are ready; each answers with its number; the latest answers if none is requested."""
    assert as_dict(client.get_model_metadata(model))["versions"] == versions
    value = np.ones((1, 3), dtype=np.float32)
    tensor = MODULES[protocol].InferInput("INPUT0", [1, 3], "FP32")
    tensor.set_data_from_numpy(value)
    for version in versions:
        response = as_dict(client.infer(model, [tensor], model_version=version).get_response())
        assert response["model_version"] == version
    assert as_dict(client.infer(model, [tensor]).get_response())["model_version"] == versions[-1]
    for absent in {"1", "2", "3"} - set(versions):
        assert not client.is_model_ready(model, absent)
        with pytest.raises(InferenceServerException, match=f"version {absent} is not found"):
            client.infer(model, [tensor], model_version=absent)
