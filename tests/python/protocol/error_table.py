"""Invalid requests with their expected answers: a status and a text that the answer contains.

The rows follow sections of the protocol: routes, models and versions, inputs and outputs, HTTP bodies, compression,
gRPC. A real Triton's answers are in `golden_triton.json`.
"""

# One row, one line: a table is read by comparing its rows.
# fmt: off

import gzip
import json

from tritonclient.grpc import service_pb2 as pb

from harness.inference import ONES, RAW_ONES, RAW_ROW, ROW, one, simple, simple_binary
from harness.wire import GrpcCase, HttpCase, byte_strings, grpc_infer, grpc_tensor, infer, output, tensor

UNKNOWN_MODEL = "Request for unknown model: 'no_such_model' is not found"
UNKNOWN_VERSION = "Request for unknown model: 'simple' version 99 is not found"
NOT_READY = "Model version not ready"
BAD_VERSION = "failed to get model version from specified version string"


def routes():
    """Paths and methods that do not exist."""
    for name, method, path, status, text in [
        ("root", "GET", "/", 404, "Not Found"),
        ("unknown path", "GET", "/v2/nothing", 404, "Not Found"),
        ("unknown path of v1", "POST", "/v1/models/simple:predict", 404, "Not Found"),
        ("unknown path of a model", "GET", "/v2/models/simple/nothing", 404, "Not Found"),
        ("trailing slash", "GET", "/v2/models/simple/", 404, "Not Found"),
        ("metadata by POST", "POST", "/v2", 405, "Method Not Allowed"),
        ("health by POST", "POST", "/v2/health/live", 405, "Method Not Allowed"),
        ("model metadata by POST", "POST", "/v2/models/simple", 405, "Method Not Allowed"),
        ("config by POST", "POST", "/v2/models/simple/config", 405, "Method Not Allowed"),
        ("statistics by POST", "POST", "/v2/models/simple/stats", 405, "Method Not Allowed"),
        ("infer by GET", "GET", "/v2/models/simple/infer", 405, "Method Not Allowed"),
        ("infer by PUT", "PUT", "/v2/models/simple/infer", 405, "Method Not Allowed"),
        ("index by GET", "GET", "/v2/repository/index", 405, "Method Not Allowed"),
    ]:
        yield HttpCase(f"route: {name}", method, path, status=status, fragment=text)


def models():
    """Models and versions that do not exist, on every route that takes them."""
    for name, suffix, status, text in [
        ("metadata", "", 400, UNKNOWN_MODEL),
        ("config", "/config", 400, UNKNOWN_MODEL),
        ("statistics", "/stats", 400, "requested model 'no_such_model' is not available"),
        ("ready", "/ready", 400, NOT_READY),
    ]:
        yield HttpCase(f"unknown model: {name}", "GET", f"/v2/models/no_such_model{suffix}", status=status,
                       fragment=text)
    for name, suffix, status, text in [
        ("metadata", "", 404, UNKNOWN_VERSION),
        ("config", "/config", 404, UNKNOWN_VERSION),
        ("statistics", "/stats", 400, "requested model version is not available for model 'simple'"),
        ("ready", "/ready", 400, NOT_READY),
    ]:
        path = "/v2/models/simple/versions/{}" + suffix
        yield HttpCase(f"unknown version: {name}", "GET", path.format(99), status=status, fragment=text)
        text = NOT_READY if name == "ready" else BAD_VERSION
        yield HttpCase(f"bad version: {name}", "GET", path.format("x"), status=400, fragment=text)
    yield infer("unknown model: infer", "no_such_model", simple(), status=400, fragment=UNKNOWN_MODEL)
    yield infer("unknown version: infer", "simple", simple(), version=99, status=404, fragment=UNKNOWN_VERSION)
    yield infer("bad version: infer", "simple", simple(), version="x", status=400, fragment=BAD_VERSION)
    yield infer("negative version: infer", "simple", simple(), version="-1", status=404)
    yield infer("huge version: infer", "simple", simple(), version="99999999999999999999", status=400)
    yield infer("version left out by policy", "versions_specific", one("FP32", [1, 1], [1]), version=2, status=404,
                fragment="Request for unknown model: 'versions_specific' version 2 is not found")
    yield infer("escape in model name", "..%2f..", simple(), status=400)
    yield infer("unknown model and bad JSON", "no_such_model", b"{", status=400, fragment=UNKNOWN_MODEL)


def changed(index: int, **more) -> dict:
    """Returns a valid request for `simple` with changed keys of one input."""
    request = simple()
    request["inputs"][index].update(more)
    return request


def tensors():
    """Names, datatypes, shapes and sizes of inputs and outputs."""
    first, second = simple()["inputs"]
    missing = ("expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but missing required "
               "input(s) ['INPUT1']. Please provide all required input(s).")
    optional = {"inputs": [tensor("INPUT1", "FP32", [1, 1], [1])]}
    rows = [
        ("input missing", {"inputs": [first]}, missing),
        ("no input", {"inputs": []}, "expected 2 inputs but got 0 inputs for model 'simple'"),
        ("unknown input", {"inputs": [first, tensor("INPUT7", "INT32", [1, 16], ROW)]}, "INPUT7"),
        ("one input too many", {"inputs": [first, second, tensor("INPUT7", "INT32", [1, 16], ROW)]}, "INPUT7"),
        ("input twice", {"inputs": [first, first]}, "input 'INPUT0' already exists in request"),
        ("unknown output", simple(outputs=[output("OUTPUT7")]),
         "unexpected inference output 'OUTPUT7' for model 'simple'"),
        ("output twice", simple(outputs=[output("OUTPUT0")] * 2), "output 'OUTPUT0' already exists in request"),
        ("wrong datatype", changed(0, datatype="FP32"),
         "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'"),
        ("unknown datatype", changed(0, datatype="INT31"), "invalid datatype for input INPUT0"),
        ("datatype in lower case", changed(0, datatype="int32"), "invalid datatype for input INPUT0"),
        ("wrong shape", changed(0, shape=[1, 8], data=ROW[:8]),
         "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,8]."),
        ("shape without batch", {"inputs": [tensor(n, "INT32", [16], ROW) for n in ("INPUT0", "INPUT1")]},
         "inference request batch-size must be <= 8 for 'simple'"),
        ("shape of rank 3", changed(0, shape=[1, 4, 4]), "got [1,4,4]"),
        ("empty shape", changed(0, shape=[], data=[1]), "INPUT0"),
        ("batch 0", {"inputs": [tensor(n, "INT32", [0, 16], []) for n in ("INPUT0", "INPUT1")]},
         "input byte size mismatch for input 'INPUT"),
        ("batch too large", {"inputs": [tensor(n, "INT32", [9, 16], ROW * 9) for n in ("INPUT0", "INPUT1")]},
         "inference request batch-size must be <= 8 for 'simple'"),
        ("batches differ", changed(1, shape=[2, 16], data=ROW * 2),
         "batch size does not match other inputs for 'simple'"),
        ("dimension too large", changed(0, shape=[1, 2**62]), ""),
        ("element count overflows", changed(0, shape=[2**40, 2**40]), ""),
    ]
    for name, request, text in rows:
        yield infer(f"tensor: {name}", "simple", request, status=400, fragment=text)
    for name, shape in [("negative dimension", [1, -1]), ("negative batch", [-1, 16]),
                         ("dimension beyond 64 bits", [1, 2**64])]:
        yield infer(f"tensor: {name}", "simple", changed(0, shape=shape), status=500,
                    fragment="Unable to parse 'shape'")
    yield infer("tensor: optional given, required missing", "optional", optional, status=400,
                fragment="but missing required input(s) ['INPUT0']")
    yield infer("tensor: rank of model without batch", "two_dims", one("INT32", [4], ROW[:4]), status=400,
                fragment="unexpected shape for input 'INPUT0' for model 'two_dims'. Expected [-1,-1], got [4].")
    yield infer("tensor: unknown output, with id", "simple", simple(id="my id", outputs=[output("OUTPUT7")]),
                status=400,
                fragment='"unexpected inference output \'OUTPUT7\' for model \'simple\'')
    yield infer("tensor: wrong datatype, with id", "simple", changed(0, datatype="FP32") | {"id": "my id"}, status=400,
                fragment="[request id: my id] inference input 'INPUT0' data-type is 'FP32'")


def json_bodies():
    """Invalid JSON, and JSON of the wrong form."""
    rows = [
        ("empty body", b"", 400, ""),
        ("no JSON", b"{", 500, "failed to parse the request JSON buffer"),
        ("text after the JSON", json.dumps(simple()).encode() + b"x", 500, "failed to parse the request JSON buffer"),
        ("not UTF-8", b'{"inputs":"\xff"}', 500, ""),
        ("an array", b"[]", 500, "Unable to parse 'inputs'"),
        ("null", b"null", 500, "Unable to parse 'inputs'"),
        ("no inputs", {}, 500, "Unable to parse 'inputs'"),
        ("inputs an object", {"inputs": {}}, 500, "Unable to parse 'inputs'"),
        ("input a number", {"inputs": [1]}, 400, ""),
        ("input without name", {"inputs": [{"shape": [1, 16], "datatype": "INT32", "data": ROW}]}, 500,
         "Unable to parse 'name'"),
        ("input without shape", {"inputs": [{"name": "INPUT0", "datatype": "INT32", "data": ROW}]}, 500,
         "Unable to parse 'shape'"),
        ("input without datatype", {"inputs": [{"name": "INPUT0", "shape": [1, 16], "data": ROW}]}, 500,
         "Unable to parse 'datatype'"),
        ("name a number", changed(0, name=1), 500, "Unable to parse 'name'"),
        ("shape a number", changed(0, shape=16), 500, "Unable to parse 'shape'"),
        ("shape of strings", changed(0, shape=["1", "16"]), 500, "Unable to parse 'shape'"),
        ("shape of fractions", changed(0, shape=[1, 1.5]), 500, "Unable to parse 'shape'"),
        ("id a number", simple(id=1), 500, "Unable to parse 'id'"),
        ("outputs an object", simple(outputs={}), 500, "Unable to parse 'outputs'"),
        ("output without name", simple(outputs=[{}]), 500, "Unable to parse 'name'"),
        ("parameters an array", simple(parameters=[]), 500, ""),
        ("parameter an object", simple(parameters={"a": {}}), 400,
         "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ("parameter null", simple(parameters={"a": None}), 400, "parameter 'a' has invalid type"),
        ("reserved parameter", simple(parameters={"triton_a": 1}), 400,
         "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."),
        ("choice: binary_data_output a number", simple(parameters={"binary_data_output": 1}), 400,
         "non-boolean as boolean: it is 1, allowed: true or false"),
        ("choice: binary_data a number", simple(outputs=[output("OUTPUT0", binary_data=1)]), 400,
         "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean: it is 1, allowed: true or false"),
        ("binary_data_size a text", changed(0, parameters={"binary_data_size": "64"}), 400, ""),
        ("choice: priority a text", simple(parameters={"priority": "x"}), 400,
         "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as unsigned-integer: it is \\\"x\\\""),
        ("choice: timeout a text", simple(parameters={"timeout": "x"}), 400, "Unable to parse 'timeout'"),
        ("choice: timeout negative", simple(parameters={"timeout": -5}), 400, ": it is -5, allowed: 0 to 18446744073709551615"),
        ("choice: sequence_start a number", simple(parameters={"sequence_id": 1, "sequence_start": 1}), 400,
         "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean: it is 1, allowed: true or false"),
        *((f"choice: sequence_id {value}", simple(parameters={"sequence_id": value}), 400,
           f": it is {json.dumps(value)}, allowed: 0 to 18446744073709551615, or a string")
          for value in (1.5, -1, True, None, [1], 2**64)),
        ("choice: sequence_id too long", simple(parameters={"sequence_id": "x" * 129}), 400,
         "string correlation ID cannot be longer than 128 characters, this one has 129 bytes"),
        *((f"choice: classification {value}", simple(outputs=[output("OUTPUT0", classification=value)]), 400,
           "non-unsigned-integer as unsigned-integer: it is " + json.dumps(json.dumps(value))[1:-1])
          for value in (-1, "2", 1.5)),
        ("data missing", {"inputs": [tensor("INPUT0", "INT32", [1, 16]), simple()["inputs"][1]]}, 400,
         "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
         "'shared_memory_region' in 'parameters'. But no field is set"),
        ("too many elements", changed(0, data=ROW + [1]), 500,
         "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ("too few elements", changed(0, data=ROW[:8]), 500, "does not match true shape"),
        ("data a number", changed(0, data=1), 500, "Unable to parse 'data'"),
        ("data a text", changed(0, data="abc"), 500, "Unable to parse 'data'"),
        ("text for integer", changed(0, data=["x"] * 16), 500, "signed-integer"),
        ("fraction for integer", changed(0, data=[1.5] * 16), 500, "signed-integer"),
        ("null for integer", changed(0, data=[None] * 16), 500, "signed-integer"),
        ("integer out of range", changed(0, data=[2**31] * 16), 400, "out of range"),
        ("nested objects", changed(0, data=[{"a": 1}] * 16), 500, "Unable to parse 'data'"),
    ]
    for name, request, status, text in rows:
        yield infer(f"json: {name}", "simple", request, status=status, fragment=text)
    deep = b'{"inputs":' + b"[" * 200 + b"]" * 200 + b"}"
    yield infer("json: nesting too deep", "simple", deep, status=400)
    for datatype, value, text in [
        ("BOOL", 2, "attempt to access JSON non-boolean as boolean"),
        ("BYTES", 1, "attempt to access JSON non-string as string"),
        ("UINT8", -1, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("UINT64", -1, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("FP32", "x", "attempt to access JSON non-number as double"),
                ("INT64", 2**63, "attempt to access JSON non-signed-integer as signed-integer"),
    ]:
        model = f"identity_{datatype.lower()}_nobatch"
        yield infer(f"json: {value} for {datatype}", model, one(datatype, [1], [value]), status=500, fragment=text)
    for datatype, value in [("INT8", 128), ("UINT8", 256)]:
        model = f"identity_{datatype.lower()}_nobatch"
        request = one(datatype, [1], [value])
        yield infer(f"json: {value} for {datatype}", model, request, status=400, fragment="out of range")
    yield infer("json: FP16 in", "identity_fp16_nobatch", one("FP16", [1], [1.0]), status=400,
                fragment="receiving FP16 data via JSON is not supported. Please use the binary data format for input")
    yield infer("json: FP16 out", "identity_fp16_nobatch", one("FP16", [1], binary_data_size=2), b"\0\0", status=400,
                fragment="sending FP16 data via JSON is not supported.")


def binary_bodies():
    """The binary tensor data extension with sizes that do not fit."""
    blobs = RAW_ROW + RAW_ONES
    head = json.dumps(simple_binary()).encode()

    def length(value) -> dict:
        return {"Inference-Header-Content-Length": str(value)}

    rows = [
        ("leftover", "simple", simple_binary(), blobs + b"1234", "unexpected additional input data for model 'simple'"),
        ("short", "simple", simple_binary(), blobs[:-4], "unexpected size for input 'INPUT1', expecting"),
        ("size too small for the shape", "simple", changed(0, parameters={"binary_data_size": 60}), RAW_ROW[:60], ""),
        ("data and binary", "simple", changed(0, parameters={"binary_data_size": 64}), RAW_ROW, "'data'"),
        ("huge size", "simple", {"inputs": [tensor("INPUT0", "INT32", [1, 16], binary_data_size=2**63 - 1)]},
         RAW_ROW, ""),
    ]
    for name, model, request, body, text in rows:
        yield infer(f"binary: {name}", model, request, body, status=400, fragment=text)
    negative = {"inputs": [tensor("INPUT0", "INT32", [1, 16], binary_data_size=-1)]}
    yield infer("binary: negative size", "simple", negative, RAW_ROW, status=500,
                fragment="Unable to parse 'binary_data_size'")
    mismatch = {"inputs": [tensor("INPUT0", "INT32", [1, 16], binary_data_size=60), simple()["inputs"][1]]}
    yield infer("binary: byte size mismatch", "simple", mismatch, RAW_ROW[:60], status=400,
                fragment="input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 60")
    for name, count, raw, text in [
        ("length cut", 1, b"\1\0", "incomplete string length indicator for inference input 'INPUT0' for model "
         "'identity_bytes_nobatch', expecting 4 bytes but only 2 bytes available"),
        ("string cut", 1, byte_strings(b"abc")[:-1], "incomplete string data for inference input 'INPUT0', "
         "expecting string of length 3 but only 2 bytes available"),
        ("too many strings", 2, byte_strings(b"a", b"b", b"c"),
         "unexpected number of string elements 3 for inference input 'INPUT0' for model 'identity_bytes_nobatch', "
         "expecting 2"),
        ("too few strings", 2, byte_strings(b"a"),
         "expected 2 string elements for inference input 'INPUT0' for model 'identity_bytes_nobatch', got 1"),
        ("huge string length", 1, b"\xff\xff\xff\xff", "incomplete string data for inference input 'INPUT0'"),
    ]:
        request = one("BYTES", [count], binary_data_size=len(raw))
        yield infer(f"binary: {name}", "identity_bytes_nobatch", request, raw, status=400, fragment=text)
    for name, value, text in [
        ("no number", "x", "Unable to parse Inference-Header-Content-Length, got: x"),
        ("negative", -1, "inference header size should be in range (0, "),
        ("too large", len(head) + 129, "inference header size should be in range (0, "),
        ("beyond 64 bits", 2**64, "18446744073709551616"),
        ("inside the blobs", len(head) + 5, ""),
    ]:
        yield infer(f"header length: {name}", "simple", head, blobs, headers=length(value), status=400, fragment=text)
    yield infer("header length: inside the JSON", "simple", head, blobs, headers=length(len(head) - 5), status=500,
                fragment="failed to parse the request JSON buffer")
    yield infer("raw: two inputs", "simple", RAW_ROW, headers=length(0), status=400,
                fragment="Raw request must only have 1 input (found 1) to be deduced but got 2 inputs "
                         "in 'simple' model")
    yield infer("raw: two free dimensions", "two_dims", RAW_ROW, headers=length(0), status=400)
    yield infer("raw: size that does not divide", "fixed_and_free", RAW_ROW[:12], headers=length(0), status=400)
    yield infer("raw: odd size", "identity_fp32_nobatch", b"12345", headers=length(0), status=400)
    yield infer("raw: strings of a free dimension", "identity_bytes_nobatch", b"text", headers=length(0), status=400,
                fragment="For BYTE datatype raw input 'INPUT0', the model must have input shape [1]")


def compression():
    """Unknown encodings, and encodings that do not match the body."""
    text = json.dumps(simple()).encode()
    for encoding in ("br", "zstd", "x"):
        yield infer(f"compression: {encoding}", "simple", text, headers={"Content-Encoding": encoding}, status=501)
    for encoding in ("gzip", "deflate"):
        yield infer(f"compression: no {encoding}", "simple", text, headers={"Content-Encoding": encoding}, status=400)
    cut = gzip.compress(text)[:-12]
    yield infer("compression: gzip cut", "simple", cut, headers={"Content-Encoding": "gzip"}, status=400)


def execution():
    """Valid requests that fail in the model."""
    yield infer("model: fails", "fail", one("FP32", [1], [1]), status=500, fragment="requested failure")
    words = {"inputs": [tensor(n, "BYTES", [1, 16], ["no number"] * 16) for n in ("INPUT0", "INPUT1")]}
    yield infer("model: no number", "simple_string", words, status=500, fragment="no number")


def grpc_models():
    """gRPC: models and versions that do not exist."""
    for rpc, message in [("ModelMetadata", pb.ModelMetadataRequest), ("ModelConfig", pb.ModelConfigRequest)]:
        yield GrpcCase(f"grpc unknown model: {rpc}", rpc, message(name="no_such_model"), "INVALID_ARGUMENT",
                       UNKNOWN_MODEL)
        yield GrpcCase(f"grpc unknown version: {rpc}", rpc, message(name="simple", version="99"), "NOT_FOUND",
                       UNKNOWN_VERSION)
        yield GrpcCase(f"grpc bad version: {rpc}", rpc, message(name="simple", version="x"), "INVALID_ARGUMENT",
                       BAD_VERSION)
    statistics = pb.ModelStatisticsRequest
    yield GrpcCase("grpc unknown model: ModelStatistics", "ModelStatistics", statistics(name="no_such_model"),
                   "INVALID_ARGUMENT", "requested model 'no_such_model' is not available")
    yield GrpcCase("grpc unknown version: ModelStatistics", "ModelStatistics", statistics(name="simple", version="99"),
                   "INVALID_ARGUMENT", "requested model version is not available for model 'simple'")
    yield GrpcCase("grpc unknown model: ModelReady", "ModelReady", pb.ModelReadyRequest(name="no_such_model"))
    yield GrpcCase("grpc unknown version: ModelReady", "ModelReady", pb.ModelReadyRequest(name="simple", version="99"))
    yield grpc_infer("grpc unknown model: infer", "no_such_model", [], status="INVALID_ARGUMENT",
                     fragment=UNKNOWN_MODEL)
    yield grpc_infer("grpc unknown version: infer", "simple", [], version="99", status="NOT_FOUND",
                     fragment=UNKNOWN_VERSION)
    yield grpc_infer("grpc bad version: infer", "simple", [], version="x", status="INVALID_ARGUMENT",
                     fragment=BAD_VERSION)
    yield grpc_infer("grpc empty model name", "", [], status="INVALID_ARGUMENT")


def grpc_tensors():
    """gRPC: contents of the wrong size or type."""
    def entry(index: int, datatype="INT32", shape=(1, 16), **contents):
        return grpc_tensor(f"INPUT{index}", datatype, shape, **contents)

    good = entry(1, int_contents=ONES)
    typed = entry(0, int_contents=ROW)
    bare = [entry(0), entry(1)]
    rows = [
        ("raw and contents", [typed, entry(1)], [RAW_ROW, RAW_ONES], {},
         "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'simple'"),
        ("no data", bare, [], {}, "unable to find data for input tensor 'INPUT0' for model 'simple' in request."),
        ("one blob missing", bare, [RAW_ROW], {}, "INPUT1"),
        ("blob too short", bare, [RAW_ROW[:-4], RAW_ONES], {},
         "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 60"),
        ("wrong typed field", [entry(0, fp32_contents=[1.0] * 16), good], [], {},
         "unexpected explicit tensor data for input tensor 'INPUT0' for model 'simple' of type 'FP32', "
         "expected datatype 'INT32'"),
        ("two typed fields", [entry(0, int_contents=ROW, fp32_contents=[1.0]), good], [], {}, "INPUT0"),
        ("too few elements", [entry(0, int_contents=ROW[:8]), good], [], {}, "INPUT0"),
        ("too many elements", [entry(0, int_contents=ROW + [1]), good], [], {}, "INPUT0"),
        ("input missing", [typed], [], {}, "expected 2 inputs but got 1 inputs for model 'simple'"),
        ("unknown input", [typed, good, grpc_tensor("INPUT7", "INT32", [1], int_contents=[1])], [], {}, "INPUT7"),
        ("input twice", [typed, typed], [], {}, "input 'INPUT0' already exists in request"),
        ("unknown output", [typed, good], [], {"outputs": ["OUTPUT7"]},
         "unexpected inference output 'OUTPUT7' for model 'simple'"),
        ("output twice", [typed, good], [], {"outputs": ["OUTPUT0", "OUTPUT0"]}, "already exists in request"),
        ("wrong datatype", [entry(0, "FP32", fp32_contents=[1.0] * 16), good], [], {},
         "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'"),
        ("unknown datatype", [entry(0, "INT31", int_contents=ROW), good], [], {}, "INPUT0"),
        ("wrong shape", [entry(0, shape=(1, 8), int_contents=ROW[:8]), good], [], {},
         "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,8]."),
        ("negative dimension", [entry(0, shape=(1, -1), int_contents=ROW), good], [], {}, ""),
        ("element count overflows", [entry(0, shape=(2**40, 2**40), int_contents=ROW), good], [], {}, ""),
        ("reserved parameter", [typed, good], [], {"parameters": {"triton_a": 1}}, ""),
        ("sequence_id of a wrong type", [typed, good], [], {"parameters": {"sequence_id": True}},
         "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."),
        ("sequence_start of a wrong type", [typed, good], [], {"parameters": {"sequence_start": 1}}, "sequence_start"),
        ("sequence_id too long", [typed, good], [], {"parameters": {"sequence_id": "x" * 129}},
         "string correlation ID cannot be longer than 128 characters, this one has 129 bytes"),
        ("timeout of a wrong type", [typed, good], [], {"parameters": {"timeout": "x"}}, "timeout"),
        ("priority of a wrong type", [typed, good], [], {"parameters": {"priority": "x"}}, "priority"),
        ("classification 0", [typed, good], [], {"outputs": [("OUTPUT0", {"classification": 0})]}, "classification"),
        ("unknown output, with id", [typed, good], [], {"id": "my id", "outputs": ["OUTPUT7"]},
         "unexpected inference output"),
        ("wrong datatype, with id", [entry(0, "FP32", fp32_contents=[1.0] * 16), good], [], {"id": "my id"},
         "[request id: my id] inference input 'INPUT0' data-type is 'FP32'"),
    ]
    for name, inputs, raw, more, text in rows:
        yield grpc_infer(f"grpc: {name}", "simple", inputs, raw, status="INVALID_ARGUMENT", fragment=text, **more)
    yield grpc_infer("grpc one blob too many", "simple", bare, [RAW_ROW, RAW_ONES, RAW_ONES], status="INVALID_ARGUMENT",
                     fragment="unexpected additional input data for model 'simple'")
    yield grpc_infer("grpc: FP16 typed", "identity_fp16_nobatch", [entry(0, "FP16", (1,), fp32_contents=[1.0])],
                     status="INVALID_ARGUMENT")
    yield grpc_infer("grpc: integer out of range", "identity_int8_nobatch",
                     [entry(0, "INT8", (1,), int_contents=[300])],
                     status="INVALID_ARGUMENT")
    yield grpc_infer("grpc: string cut", "identity_bytes_nobatch", [entry(0, "BYTES", (1,))], [b"\5\0\0\0ab"],
                     status="INVALID_ARGUMENT", fragment="incomplete string data for inference input 'INPUT0'")
    yield grpc_infer("grpc: model fails", "fail", [entry(0, "FP32", (1,), fp32_contents=[1.0])], status="INTERNAL",
                     fragment="requested failure")


HTTP_ERRORS = [*routes(), *models(), *tensors(), *json_bodies(), *binary_bodies(), *compression(), *execution()]
GRPC_ERRORS = [*grpc_models(), *grpc_tensors()]
