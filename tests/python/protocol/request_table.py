"""Valid requests: everything that clients may send and that must be answered with a result.

A real Triton's answers are in `golden_triton.json`; `compare_triton.py` records and compares them.
"""

# One row, one line: a table is read by comparing its rows.
# fmt: off

import gzip
import json
import struct
import zlib

from tritonclient.grpc import service_pb2 as pb

from harness.inference import JSON_VALUES, ONES, RAW_ONES, RAW_ROW, RAW_VALUES, ROW, one, simple, simple_binary
from harness.wire import GrpcCase, HttpCase, byte_strings, grpc_infer, grpc_tensor, infer, output, tensor


def inquiries():
    """Health, metadata and configuration."""
    yield HttpCase("live", "GET", "/v2/health/live")
    yield HttpCase("ready", "GET", "/v2/health/ready")
    yield HttpCase("server metadata", "GET", "/v2")
    yield HttpCase("query string is ignored", "GET", "/v2/health/live?test_1=1&test_2=2")
    for model in ("simple", "simple_string", "simple_identity", "identity_fp32_nobatch", "optional", "two_dims"):
        yield HttpCase(f"model metadata {model}", "GET", f"/v2/models/{model}")
    yield HttpCase("model metadata of a version", "GET", "/v2/models/simple/versions/1")
    yield HttpCase("model metadata several versions", "GET", "/v2/models/versions_specific")
    yield HttpCase("model metadata version of several", "GET", "/v2/models/versions_specific/versions/1")
    yield HttpCase("model ready", "GET", "/v2/models/simple/ready")
    yield HttpCase("model version ready", "GET", "/v2/models/simple/versions/1/ready")
    for model in ("simple", "simple_identity", "optional", "versions_specific"):
        yield HttpCase(f"model config {model}", "GET", f"/v2/models/{model}/config")
    yield HttpCase("model config of a version", "GET", "/v2/models/simple/versions/1/config")


def json_requests():
    """Inference with JSON in and out."""
    nested = simple()
    nested["inputs"][0]["data"] = [ROW]
    deep = one("INT32", [2, 2, 3], [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]])
    two_rows = {"inputs": [tensor("INPUT0", "INT32", [2, 16], [ROW, ROW]),
                                  tensor("INPUT1", "INT32", [2, 16], ROW + ROW)]}
    yield infer("json flat", "simple", simple())
    yield infer("json nested", "simple", nested)
    yield infer("json batch 2", "simple", two_rows)
    yield infer("json nested and batch", "two_dims", one("INT32", [2, 3], [[1, 2, 3], [4, 5, 6]]))
    yield infer("json nested of wrong nesting", "two_dims", one("INT32", [2, 3], [[1, 2], [3, 4], [5, 6]]))
    yield infer("json deep for flat model", "fixed_and_free", one("INT32", [2, 3], deep["inputs"][0]["data"][0]))
    yield infer("json with id", "simple", simple(id="my request"))
    yield infer("json with empty id", "simple", simple(id=""))
    yield infer("json one output", "simple", simple(outputs=[output("OUTPUT1")]))
    yield infer("json outputs in another order", "simple", simple(outputs=[output("OUTPUT1"), output("OUTPUT0")]))
    yield infer("json no outputs", "simple", simple(outputs=[]))
    yield infer("json parameters", "simple", simple(parameters={"a": "text", "b": 1, "c": True, "d": 1.5}))
    yield infer("json inputs in another order", "simple", {"inputs": simple()["inputs"][::-1]})
    yield infer("json unknown keys", "simple", simple(unknown={"a": [1]}))
    yield infer("version in path", "simple", simple(), version=1)
    yield infer("query string", "simple", simple(), query="?a=1")
    yield infer("old version", "versions_specific", one("FP32", [1, 1], [1]), version=1)
    yield infer("latest of several versions", "versions_specific", one("FP32", [1, 1], [1]))
    yield infer("strings as numbers", "simple_string", {"inputs": [
        tensor("INPUT0", "BYTES", [1, 16], [str(n) for n in ROW]), tensor("INPUT1", "BYTES", [1, 16], ["1"] * 16)]})
    yield infer("optional input absent", "optional", one("FP32", [1, 2], [1, 2]))
    yield infer("optional input given", "optional", {"inputs": [
        tensor("INPUT0", "FP32", [1, 2], [1, 2]), tensor("INPUT1", "FP32", [1, 1], [3])]})
    yield infer("no element", "identity_fp32_nobatch", one("FP32", [0], []))
    yield infer("no element of strings", "identity_bytes_nobatch", one("BYTES", [0], []))
    yield infer("integers for floats", "identity_fp64_nobatch", one("FP64", [2], [1, -2]))
    yield infer("json content type", "simple", simple(), headers={"Content-Type": "application/json"})
    yield infer("odd content type", "simple", simple(), headers={"Content-Type": "text/plain"})
    for datatype, values in JSON_VALUES.items():
        model = f"identity_{datatype.lower()}_nobatch"
        yield infer(f"json {datatype}", model, one(datatype, [len(values)], values))


def binary_requests():
    """The binary tensor data extension, in both directions and mixed."""
    blobs = RAW_ROW + RAW_ONES
    out = {"binary": output("OUTPUT0", binary_data=True), "json": output("OUTPUT1", binary_data=False)}
    yield infer("binary in, json out", "simple", simple_binary(), blobs)
    yield infer("binary in, binary out", "simple", simple_binary(parameters={"binary_data_output": True}), blobs)
    yield infer("json in, binary out", "simple", simple(parameters={"binary_data_output": True}))
    yield infer("per output", "simple", simple(outputs=[out["binary"], out["json"]]))
    yield infer("per output, other order", "simple", simple(outputs=[out["json"], out["binary"]]))
    yield infer("output beats request", "simple", simple(
        parameters={"binary_data_output": True}, outputs=[output("OUTPUT0"), out["json"]]))
    yield infer("binary_data_output false", "simple", simple(parameters={"binary_data_output": False}))
    mixed = {"inputs": [tensor("INPUT0", "INT32", [1, 16], binary_data_size=64), simple()["inputs"][1]]}
    yield infer("one input binary", "simple", mixed, RAW_ROW)
    yield infer("header length of the whole body", "simple", simple(),
                headers={"Inference-Header-Content-Length": str(len(json.dumps(simple())))})
    for datatype, raw in RAW_VALUES.items():
        request = one(datatype, [3], binary_data_size=len(raw)) | {"parameters": {"binary_data_output": True}}
        yield infer(f"binary {datatype}", f"identity_{datatype.lower()}_nobatch", request, raw)
    empty = one("FP32", [0], binary_data_size=0) | {"parameters": {"binary_data_output": True}}
    yield infer("binary without element", "identity_fp32_nobatch", empty)
    special = struct.pack("<3f", float("nan"), float("inf"), float("-inf"))
    yield infer("not a number, binary", "identity_fp32_nobatch", one("FP32", [3], binary_data_size=12) | {
        "parameters": {"binary_data_output": True}}, special)
    yield infer("not a number, as json", "identity_fp32_nobatch", one("FP32", [3], binary_data_size=12), special)
    yield infer("json beyond FP32", "identity_fp32_nobatch", one("FP32", [2], [1e39, -1e39]))
    yield infer("bytes that are no text, as json", "identity_bytes_nobatch", one("BYTES", [1], binary_data_size=6),
                byte_strings(b"\xff\xfe"))


def raw_requests():
    """Header length 0: the body is the only input."""
    zero = {"Inference-Header-Content-Length": "0"}
    for model, body in [("identity_fp32_nobatch", RAW_VALUES["FP32"]), ("identity_fp32", RAW_VALUES["FP32"]),
                        ("fixed_and_free", RAW_ROW), ("one_string", b"text")]:
        yield infer(f"raw {model}", model, body, headers=zero)
    yield infer("raw empty body", "identity_fp32_nobatch", b"", headers=zero)


def compressed_requests():
    """Compression of requests and responses, with small bodies."""
    text = json.dumps(simple()).encode()
    yield infer("gzip request", "simple", gzip.compress(text), headers={"Content-Encoding": "gzip"})
    yield infer("deflate request", "simple", zlib.compress(text), headers={"Content-Encoding": "deflate"})
    yield infer("identity request", "simple", text, headers={"Content-Encoding": "identity"})
    for accept in ["gzip", "deflate", "gzip, deflate", "deflate;q=1.0, gzip;q=0.5", "gzip;q=0", "br", "identity", "*"]:
        yield infer(f"accept {accept}", "simple", simple(), headers={"Accept-Encoding": accept})
    header = json.dumps(simple_binary(parameters={"binary_data_output": True})).encode()
    length = {"Inference-Header-Content-Length": str(len(header))}
    body = header + RAW_ROW + RAW_ONES
    yield infer("gzip binary both ways", "simple", gzip.compress(body),
                headers={"Content-Encoding": "gzip", "Accept-Encoding": "gzip"} | length)


def grpc_requests():
    """Calls that succeed."""
    for rpc, message in [
        ("ServerLive", pb.ServerLiveRequest()), ("ServerReady", pb.ServerReadyRequest()),
        ("ServerMetadata", pb.ServerMetadataRequest()), ("ModelReady", pb.ModelReadyRequest(name="simple")),
        ("ModelMetadata", pb.ModelMetadataRequest(name="simple")),
         ("ModelConfig", pb.ModelConfigRequest(name="simple")),
    ]:
        yield GrpcCase(f"grpc {rpc}", rpc, message)
    inputs = [grpc_tensor("INPUT0", "INT32", [1, 16]), grpc_tensor("INPUT1", "INT32", [1, 16])]
    typed = [grpc_tensor("INPUT0", "INT32", [1, 16], int_contents=ROW),
             grpc_tensor("INPUT1", "INT32", [1, 16], int_contents=ONES)]
    yield grpc_infer("grpc raw", "simple", inputs, [RAW_ROW, RAW_ONES])
    yield grpc_infer("grpc typed", "simple", typed)
    yield grpc_infer("grpc id, version, output", "simple", typed, id="my request", version="1", outputs=["OUTPUT1"])
    yield grpc_infer("grpc outputs in another order", "simple", typed, outputs=["OUTPUT1", "OUTPUT0"])
    yield grpc_infer("grpc parameters", "simple", typed, parameters={"a": "text", "b": 1, "c": True})
    yield grpc_infer("grpc old version", "versions_specific",
                     [grpc_tensor("INPUT0", "FP32", [1, 1], fp32_contents=[1])],
                     version="1")
    fields = {"BOOL": "bool", "UINT8": "uint", "UINT16": "uint", "UINT32": "uint", "UINT64": "uint64", "INT8": "int",
              "INT16": "int", "INT32": "int", "INT64": "int64", "FP32": "fp32", "FP64": "fp64"}
    for datatype, raw in RAW_VALUES.items():
        model = f"identity_{datatype.lower()}_nobatch"
        yield grpc_infer(f"grpc raw {datatype}", model, [grpc_tensor("INPUT0", datatype, [3])], [raw])
        if datatype in fields:
            values = JSON_VALUES[datatype]
            contents = {f"{fields[datatype]}_contents": values}
            yield grpc_infer(f"grpc typed {datatype}", model,
                             [grpc_tensor("INPUT0", datatype, [len(values)], **contents)])
    yield grpc_infer("grpc typed BYTES", "identity_bytes_nobatch",
                     [grpc_tensor("INPUT0", "BYTES", [3], bytes_contents=[b"", b"a", bytes(range(256))])])
    yield grpc_infer("grpc no element", "identity_fp32_nobatch", [grpc_tensor("INPUT0", "FP32", [0])], [b""])
    yield grpc_infer("grpc optional input absent", "optional",
                     [grpc_tensor("INPUT0", "FP32", [1, 2], fp32_contents=[1, 2])])


HTTP_REQUESTS = [*inquiries(), *json_requests(), *binary_requests(), *raw_requests(), *compressed_requests()]
GRPC_REQUESTS = [*grpc_requests()]
