"""Requests in wire format, without a client library, which would refuse to send an invalid request.

A case of the tables (`request_table.py`, `error_table.py`) is an [`HttpCase`] or a [`GrpcCase`]. The functions that send a
case return an [`Answer`], which can be written to JSON and compared with another server's answer.
"""

import http.client
import json
import struct
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from harness.waiting import DEADLINE_S


@dataclass(frozen=True)
class HttpCase:
    """One HTTP request and its expected answer: a status, and a text that the body contains."""

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: dict = field(default_factory=dict)
    status: int = 200
    fragment: str = ""


@dataclass(frozen=True)
class GrpcCase:
    """One unary gRPC call and its expected answer: the name of a status code, and a text that the message contains."""

    name: str
    rpc: str
    message: object
    status: str = "OK"
    fragment: str = ""


@dataclass(frozen=True)
class Answer:
    """A server's answer. `text` is the JSON part of an HTTP body, a gRPC error's message or the response as JSON;
    `blob` is the rest of an HTTP body after the JSON part."""

    status: object
    text: str
    blob: bytes = b""
    headers: dict = field(default_factory=dict)

    def to_json(self) -> dict:
        """Returns the answer for the golden file, with only the headers that belong to the protocol."""
        kept = {key: self.headers[key] for key in PROTOCOL_HEADERS if key in self.headers}
        return {"status": self.status, "text": self.text, "blob": self.blob.hex(), "headers": kept}

    @staticmethod
    def from_json(value: dict) -> "Answer":
        """Reads the format of `to_json`."""
        return Answer(value["status"], value["text"], bytes.fromhex(value["blob"]), value["headers"])


PROTOCOL_HEADERS = ["content-type", "content-encoding", "inference-header-content-length", "accept-encoding", "allow"]


def send_http(address: str, case: HttpCase) -> Answer:
    """Sends one HTTP request to `host:port`; decompresses the body according to its Content-Encoding."""
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    try:
        connection.putrequest(case.method, case.path, skip_accept_encoding=True)
        for key, value in case.headers.items():
            connection.putheader(key, value)
        if case.method == "POST" and "Content-Length" not in case.headers:
            connection.putheader("Content-Length", str(len(case.body)))
        connection.endheaders(case.body or None)
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    headers = {key.lower(): value for key, value in response.getheaders()}
    body = decompress(raw, headers.get("content-encoding", ""))
    length = int(headers.get("inference-header-content-length", len(body)))
    return Answer(response.status, body[:length].decode(errors="replace"), body[length:], headers)


def decompress(raw: bytes, encoding: str) -> bytes:
    """Decodes a Content-Encoding; `deflate` is a zlib stream (RFC 1950)."""
    import gzip
    import zlib

    undo = {"gzip": gzip.decompress, "deflate": zlib.decompress, "": bytes, "identity": bytes}
    return undo[encoding](raw)


def send_grpc(address: str, case: GrpcCase) -> Answer:
    """Sends one unary call to `host:port`; returns a response as sorted JSON with its raw bytes in base64."""
    from google.protobuf.json_format import MessageToDict

    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=unlimited) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            response = getattr(stub, case.rpc)(case.message, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return Answer(error.code().name, error.details() or "")
    return Answer("OK", json.dumps(MessageToDict(response, preserving_proto_field_name=True), sort_keys=True))


def tensor(name: str, datatype: str, shape: list, data=None, **parameters) -> dict:
    """Returns one entry of a JSON request's `inputs`."""
    entry = {"name": name, "shape": shape, "datatype": datatype}
    if parameters:
        entry["parameters"] = parameters
    if data is not None:
        entry["data"] = data
    return entry


def output(name: str, **parameters) -> dict:
    """Returns one entry of a JSON request's `outputs`."""
    return {"name": name, "parameters": parameters} if parameters else {"name": name}


def infer(name: str, model: str, request, blobs: bytes = b"", **more) -> HttpCase:
    """Returns an inference request. `request` is an object or encoded JSON; with `blobs` a header has the length of the JSON.
    `more`: `version`, `query`, and the fields of an [`HttpCase`]."""
    text = request if isinstance(request, bytes) else json.dumps(request).encode()
    version = more.pop("version", None)
    headers = dict(more.pop("headers", {}))
    if blobs:
        headers.setdefault("Inference-Header-Content-Length", str(len(text)))
    path = f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer" + more.pop("query", "")
    return HttpCase(name, "POST", path, text + blobs, headers, **more)


def byte_strings(*elements: bytes) -> bytes:
    """Returns BYTES elements in binary form: for each a 4-byte little-endian length and its bytes."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def grpc_tensor(name: str, datatype: str, shape: list, parameters: dict = None, **contents):
    """Returns one input of a gRPC request; `contents` names a typed field and its values, such as `int_contents=[1]`."""
    entry = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    for key, value in contents.items():
        getattr(entry.contents, key).extend(value)
    for key, value in (parameters or {}).items():
        set_parameter(entry.parameters[key], value)
    return entry


def set_parameter(target, value):
    """Sets the field of an InferParameter that fits the Python type of `value`."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    setattr(target, kinds[type(value)], value)


def grpc_infer(name: str, model: str, inputs: list, raw: list = (), **more) -> GrpcCase:
    """Returns an inference call. `more`: `version`, `id`, `outputs` (names, or pairs of a name and its parameters),
    `parameters`, and the fields of a [`GrpcCase`]."""
    message = pb.ModelInferRequest(model_name=model, model_version=more.pop("version", ""), id=more.pop("id", ""))
    message.inputs.extend(inputs)
    message.raw_input_contents.extend(raw)
    for wanted in more.pop("outputs", []):
        label, parameters = (wanted, {}) if isinstance(wanted, str) else wanted
        entry = message.outputs.add(name=label)
        for key, value in parameters.items():
            set_parameter(entry.parameters[key], value)
    for key, value in more.pop("parameters", {}).items():
        set_parameter(message.parameters[key], value)
    return GrpcCase(name, "ModelInfer", message, **more)
