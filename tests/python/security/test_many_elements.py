"""The memory of a request depends on its bytes, not on the number of its elements: an empty element has two bytes and would become
hundreds. Such requests are refused before they are read to the end, also if they are compressed."""

import gzip
import json

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from harness.inference import one
from harness.models import copy_models
from harness.server import Server
from harness.waiting import eventually
from security.vulnerability_checks import peak_kb
from torchserve.home import Home, has_worker

MODEL = "identity_fp32"
INFER = f"/v2/models/{MODEL}/infer"
MOST_KB = 64 << 10
COUNT = 1_000_000
CALL = "/inference.GRPCInferenceService/"
ELEMENTS = b",".join([b"{}"] * COUNT)
MEMBERS = b",".join([b'"":0'] * COUNT)
NAMED = ",".join(f'"INPUT0":{number}' for number in range(1000))
ROWS = ",".join(['{"INPUT0":1}'] * 100_000)

HTTP = {
    "inputs": (INFER, b'{"inputs":[%b]}' % ELEMENTS, 400, "an array has more than 16384 elements"),
    "outputs": (INFER, b'{"inputs":[],"outputs":[%b]}' % ELEMENTS, 400, "an array has more than 16384 elements"),
    "no objects": (INFER, b'{"inputs":[%b]}' % b",".join([b"0"] * COUNT), 500, "failed to parse the request JSON buffer"),
    "parameters": (INFER, b'{"parameters":{%b},"inputs":[]}' % MEMBERS, 400, "an object has more than 16384 members"),
    "generate": (f"/v2/models/{MODEL}/generate", b"{%b}" % MEMBERS, 400, "an object has more than 16384 members"),
    "generate's parameters": (f"/v2/models/{MODEL}/generate", b'{"parameters":{%b}}' % MEMBERS, 400, "more than 16384 members"),
    "rows": (f"/v1/models/{MODEL}:predict", b'{"instances":[%b]}' % ELEMENTS, 400, "expected 1 inputs but got 0"),
    "names times rows": (
        f"/v1/models/{MODEL}:predict",
        f'{{"instances":[{{{NAMED}}},{ROWS}]}}'.encode(),
        400,
        "instance 0 has the member 'INPUT0' more than once",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elements")
    with Server(folder, [copy_models(folder / "models", [MODEL])]) as running:
        yield running


def assert_serves(server):
    assert server.infer(MODEL, one("FP32", [1, 1], [3]))[0] == 200


@pytest.mark.parametrize("compressed", (False, True), ids=("plain", "gzip"))
@pytest.mark.parametrize("case", HTTP)
def test_json(server, case, compressed):
    path, body, status, text = HTTP[case]
    headers = {"Content-Encoding": "gzip"} if compressed and path == INFER else {}
    before = peak_kb(server)
    got, answer = server.ask("POST", path, gzip.compress(body, 1) if headers else body, headers=headers)
    assert got == status and text in json.loads(answer)["error"], answer
    assert peak_kb(server) - before < MOST_KB
    assert_serves(server)


def send(address: str, method: str, message: bytes) -> grpc.RpcError:
    """Returns the error for a message."""
    with pytest.raises(grpc.RpcError) as refused:
        if method == "ModelStreamInfer":
            stream(address, message)
        else:
            with grpc.insecure_channel(address) as channel:
                channel.unary_unary(CALL + method)(message)
    return refused.value


def stream(address: str, message: bytes) -> list:
    """Returns the answers of a stream to one message."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(CALL + "ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString)
        return list(call(iter([message])))


def nested(number: int, message: bytes) -> bytes:
    """Returns the field of a message that is a message, or bytes."""
    length, varint = len(message), b""
    while length > 0x7F:
        length, varint = length >> 7, varint + bytes([length & 0x7F | 0x80])
    return bytes([number << 3 | 2]) + varint + bytes([length]) + message


@pytest.mark.parametrize("method", ("ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"))
@pytest.mark.parametrize("field", ("inputs", "outputs", "raw_input_contents", "parameters"))
def test_grpc(server, method, field):
    number = pb.ModelInferRequest.DESCRIPTOR.fields_by_name[field].number
    if method == "RepositoryModelLoad":
        number = pb.RepositoryModelLoadRequest.DESCRIPTOR.fields_by_name["parameters"].number
    before = peak_kb(server)
    refused = send(server.grpc, method, bytes([number << 3 | 2, 0]) * COUNT)
    assert (refused.code(), "more than 16384 fields" in refused.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), refused
    assert peak_kb(server) - before < MOST_KB
    assert_serves(server)


@pytest.mark.parametrize("method", ("ModelInfer", "ModelStreamInfer"))
@pytest.mark.parametrize("field", ("inputs", "outputs"))
def test_parameters_of_grpc_tensors(server, method, field):
    """They are not fields of the message itself, but count together."""
    field = pb.ModelInferRequest.DESCRIPTOR.fields_by_name[field]
    parameters = field.message_type.fields_by_name["parameters"].number
    key = lambda number: chr(0x80 + number // 10_000).encode() + b"%04d" % (number % 10_000)  # noqa: E731
    tensor = b"".join(bytes([parameters << 3 | 2, 8, 0x0A, 6]) + key(number) for number in range(COUNT))
    before = peak_kb(server)
    refused = send(server.grpc, method, pb.ModelInferRequest(model_name=MODEL).SerializeToString() + nested(field.number, tensor))
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT and "more than 262144 fields" in refused.details(), refused
    assert peak_kb(server) - before < MOST_KB
    assert_serves(server)


@pytest.mark.parametrize("method", ("ModelInfer", "ModelStreamInfer"))
def test_strings_in_grpc_contents(server, method):
    """Empty strings have two bytes in the request and four in the tensor. They are refused here because the input has numbers."""
    contents = bytes([pb.InferTensorContents.DESCRIPTOR.fields_by_name["bytes_contents"].number << 3 | 2, 0]) * (4 * COUNT)
    field = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["inputs"]
    tensor = field.message_type._concrete_class(name="INPUT0", datatype="BYTES", shape=[1, 4 * COUNT]).SerializeToString()
    tensor += nested(field.message_type.fields_by_name["contents"].number, contents)
    before = peak_kb(server)
    message = pb.ModelInferRequest(model_name=MODEL).SerializeToString() + nested(field.number, tensor)
    if method == "ModelInfer":
        refused = send(server.grpc, method, message)
        assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT and "'BYTES'" in refused.details(), refused
    else:
        (answer,) = stream(server.grpc, message)
        assert "'BYTES'" in answer.error_message, answer
    assert peak_kb(server) - before < MOST_KB
    assert_serves(server)


@pytest.mark.skipif(not has_worker, reason="needs the package pharos-worker")
def test_torchserve(tmp_path):
    """A form, and the parts of a gRPC request."""
    home = Home(tmp_path, ["load_models=m-1.0.mar"])
    home.archive("m")
    with home:
        eventually("the model answers", lambda: home.predict("m", b"pid")[0] == 200)
        before = peak_kb(home)
        status, _, answer = home.ask(
            "POST", "/predictions/m", b"&".join([b"a"] * COUNT), {"Content-Type": "application/x-www-form-urlencoded"}
        )
        assert status == 400 and b"more than 10000 parts" in answer, answer
        message = b"\x0a\x01m" + b"".join(b"\x1a\x07\x0a\x05%05d" % number for number in range(12_000))
        with grpc.insecure_channel(f"127.0.0.1:{home.grpc}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")(message)
        assert "more than 10000 parts" in refused.value.details(), refused.value
        assert peak_kb(home) - before < MOST_KB
