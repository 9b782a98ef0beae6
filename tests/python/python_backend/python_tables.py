"""Tables of requests to Python models. The answers of a real Triton are in `golden_python.json` (see `python_peers.py`).

A row of [`ROWS`] is one or several requests; the statistics are compared afterwards. The models are those of
`python_repository.py`; most of them follow the instructions of a request.
"""

import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ask:
    """One inference request. `inputs`: name -> (datatype, shape, values); `via`: `http`, `grpc`, or `stream` (a gRPC stream);
    `give_up_s`: the client's deadline; `delay_s`: the delay after the start of the row, for rows with `at_once`."""

    model: str
    inputs: dict
    outputs: tuple = ()
    parameters: dict = field(default_factory=dict)
    id: str = ""
    version: str = ""
    via: str = "http"
    give_up_s: float = 0
    delay_s: float = 0


@dataclass(frozen=True)
class Http:
    """Any other request: a path, and a body in JSON for a POST."""

    path: str
    body: object = None


@dataclass(frozen=True)
class Row:
    """Requests, sent one after the other or concurrently (`at_once`). `metrics`: custom metrics that are compared as well.
    `unordered`: the assignment of answers to requests depends on timing, so the answers are compared without their order."""

    name: str
    requests: tuple
    at_once: bool = False
    metrics: tuple = ()
    unordered: bool = False


def do(verb, **more) -> dict:
    """Returns the input DO with an instruction for a model of `scripted.py`."""
    return {"DO": ("BYTES", [1], [json.dumps({"do": verb, **more})])}


def steps(*of) -> dict:
    """Returns the input DO with an array of instructions."""
    return {"DO": ("BYTES", [1], [json.dumps(list(of))])}


def plain(verb, model="plain", value=None, via="http", **more) -> Ask:
    """Returns a request to a model of `scripted.py`; `value` is its VALUE."""
    values = {} if value is None else {"VALUE": ("FP32", [len(value)], value)}
    named = {
        key: more.pop(key) for key in ("outputs", "parameters", "id", "version", "give_up_s", "delay_s") if key in more
    }
    return Ask(model, do(verb, **more) | values, via=via, **named)


def rows(verb, size, model="rows", via="http", **more) -> Ask:
    """Returns the same with a batch of `size` rows."""
    named = {key: more.pop(key) for key in ("outputs", "parameters", "id", "give_up_s", "delay_s") if key in more}
    text = json.dumps({"do": verb, **more})
    values = [float(n) for n in range(size * 2)]
    inputs = {"DO": ("BYTES", [size, 1], [text] * size), "VALUE": ("FP32", [size, 2], values)}
    return Ask(model, inputs, via=via, **named)


def valued(model, *values, **more) -> Ask:
    """Returns a request with only VALUE."""
    return Ask(model, {"VALUE": ("FP32", more.pop("shape", [len(values)]), list(values))}, **more)


def sequence(model, value, key, start=False, end=False, **more) -> Ask:
    """Returns a step of a sequence."""
    flags = {"sequence_id": key, "sequence_start": start, "sequence_end": end}
    return Ask(model, {"VALUE": ("FP32", [1, 1], [value])}, parameters=flags, **more)


def streamed(*of, **more) -> Ask:
    """Returns a request to the decoupled model, over a stream."""
    return Ask("streamed", steps(*of), via=more.pop("via", "stream"), **more)


def load(model, body=None) -> Http:
    """Loads a model."""
    return Http(f"v2/repository/models/{model}/load", body or {})


def unload(model) -> Http:
    """Unloads a model."""
    return Http(f"v2/repository/models/{model}/unload", {})


def state(model) -> Http:
    """Requests the configuration of a model."""
    return Http(f"v2/models/{model}/config")


def sender(via="http", **act) -> Ask:
    """Returns a request to the ordinary model that answers through senders."""
    return Ask("sender", {"DO": ("BYTES", [1], [json.dumps(act)])}, via=via)


def measured(*acts) -> Ask:
    """Returns a request to the model that has metrics."""
    return Ask("measuring", steps(*acts))


def family(name, metric, kind, labels, *buckets) -> list:
    """Returns an instruction for that model: create a family, and in it a metric with the name `metric`."""
    return ["family", name, metric, kind, labels, *buckets]


def notes() -> Ask:
    """Requests the notes of the decoupled model."""
    return streamed({"notes": True, "final": True})


EMPTY = {"triton_enable_empty_final_response": True}
SEQUENCE = {"sequence_id": 7, "sequence_start": True, "sequence_end": False}
FINAL = {"final": True}
CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")
"""The codes of `pb_utils.TritonError`."""

# One row, one line: a table is read by comparing its rows.
# fmt: off

PLAIN = [
    Row("plain", (plain("answer", value=[1, 2, 3]),)),
    Row("plain: over gRPC", (plain("answer", value=[1, 2, 3], via="grpc"),)),
    Row("plain: an id", (plain("answer", value=[1], id="mine"), plain("answer", value=[1], id="grün", via="grpc"))),
    Row("plain: no optional input", (plain("answer"),)),
    Row("plain: an empty tensor", (plain("answer", value=[]), plain("answer", value=[], via="grpc"))),
    Row("plain: one output", (plain("answer", value=[1], outputs=("OUT",)), plain("answer", value=[1], outputs=("SEEN",)))),
    Row("plain: outputs in another order", (plain("answer", value=[1], outputs=("SEEN", "OUT")),)),
    Row("plain: an output that is not made", (plain("answer", outputs=("OUT",)), plain("answer", outputs=("OUT", "SEEN")))),
    Row("plain: no outputs", (plain("no outputs"), plain("no outputs", outputs=("OUT",)), plain("no outputs", via="grpc"))),
    Row("plain: versions", (plain("answer", "two_versions", version="1"), plain("answer", "two_versions", version="2"), plain("answer", "two_versions", version="3"))),
    Row("plain: through generate", (Http("v2/models/plain/generate", {"DO": '{"do":"answer"}', "VALUE": [1, 2], "id": "mine", "extra": 5}),)),
    *(Row(f"view: {view}", (plain("view", value=[1, 2, 3, 4], view=view),)) for view in ("every second", "reversed", "transposed", "column", "big endian", "empty", "input")),
    *(Row(f"strings: {kind}", (plain("strings", kind=kind, via="grpc"),)) for kind in ("str", "bytes", "S", "numbers", "two dimensions", "none", "large", "U")),
]

ALL = {
    "BOOL": [True, False], "UINT8": [0, 255], "UINT16": [0, 65535], "UINT32": [0, 4294967295], "UINT64": [0, 18446744073709551615],
    "INT8": [-128, 127], "INT16": [-32768, 32767], "INT32": [-2147483648, 2147483647], "INT64": [-9223372036854775808, 9223372036854775807],
    "FP16": [0.5, -65504.0], "BF16": [1.0, -2.5], "FP32": [0.1, -1e30], "FP64": [0.1, -1e300], "BYTES": ["grün", "", "x\u0000y"],
}

DATATYPES = [
    *(Row(f"datatype: {name}", (Ask("datatypes", {f"I_{name}": (name, [len(values)], values)}, via="grpc"),)) for name, values in ALL.items()),
    *(Row(f"datatype: {name}, empty", (Ask("datatypes", {f"I_{name}": (name, [0], [])}, via="grpc"),)) for name in ("BOOL", "FP16", "FP32", "BYTES")),
    Row("datatype: JSON", (Ask("datatypes", {f"I_{name}": (name, [len(values)], values) for name, values in ALL.items() if name not in ("FP16", "BF16")}),)),
    Row("datatype: some of many outputs", (Ask("datatypes", {f"I_{name}": (name, [2], ALL[name]) for name in ("INT8", "FP64")}, ("O_FP64",)),)),
]

BATCHED = [
    Row("batch: of one", (rows("answer", 1),)),
    Row("batch: of three", (rows("answer", 3),)),
    Row("batch: of nine", (rows("answer", 9),)),
    Row("batch: two requests, one execution", (rows("answer", 2, "batched"), rows("answer", 2, "batched", delay_s=0.3)), at_once=True),
    Row("batch: four requests, one execution", tuple(rows("answer", 1, "batched", delay_s=n / 5, id=str(n)) for n in range(4)), at_once=True),
    Row("batch: one of them fails", (rows("answer", 2, "batched"), rows("error", 2, "batched", delay_s=0.3)), at_once=True),
    Row("batch: one of them raises", (rows("answer", 2, "batched"), rows("raise", 2, "batched", type="ValueError", text="for all", delay_s=0.3)), at_once=True),
    Row("batch: too few responses", (rows("answer", 2, "batched"), rows("return too few", 2, "batched", delay_s=0.3)), at_once=True),
    Row("batch: too many responses", (rows("answer", 2, "batched"), rows("return too many", 2, "batched", delay_s=0.3)), at_once=True),
    Row("batch: None for one of them", (rows("answer", 2, "batched"), rows("nothing", 2, "batched", delay_s=0.3)), at_once=True),
    Row("batch: None for all", (rows("answer", 2, "batched"), rows("return none", 2, "batched", delay_s=0.3)), at_once=True),
    Row("batch: too few rows", (rows("output", 2, values=[1, 2], shape=[1, 2]),)),
    Row("batch: without its dimension", (rows("output", 2, values=[1, 2]),)),
    Row("batch: an empty output", (rows("output", 2, values=[], shape=[0, 2]), rows("output", 2, values=[]), rows("output", 2, values=[], via="grpc"))),
    Row("batch: an output without dimensions", (rows("output", 2, values=[1], shape=[]),)),
    Row("batch: too many rows", (rows("output", 2, values=[1, 2, 3], shape=[3, 1]), rows("output", 2, values=[1, 2, 3], shape=[3, 1], via="grpc"))),
    Row("batch: another datatype", (rows("output", 2, values=[1, 2], shape=[2, 1], dtype="float64"), rows("output", 2, values=[1, 2], shape=[2, 1], dtype="float16", via="grpc"))),
    Row("batch: one of them has too few rows", (rows("answer", 2, "batched"), rows("output", 2, "batched", values=[7], delay_s=0.3)), at_once=True),
    Row("batch: one of them has another datatype", (rows("answer", 2, "batched"), rows("output", 2, "batched", values=[7, 8], shape=[2, 1], dtype="int8", delay_s=0.3)), at_once=True),
]

ERRORS = [
    *(Row(f"error: {code}", (plain("error", code=code, text="was asked for"), plain("error", code=code, text="was asked for", via="grpc"))) for code in CODES),
    Row("error: without a code", (plain("error", text="was asked for"), plain("error", text="was asked for", via="grpc"))),
    Row("error: an empty text", (plain("error", text=""), plain("error", text="", via="grpc"))),
    Row("error: a text in Unicode", (plain("error", text="grün \u2713"), plain("error", text="grün \u2713", via="grpc"))),
    Row("error: several lines", (plain("error", text="one\ntwo\n"),)),
    Row("error: with an id", (plain("error", text="was asked for", id="mine"),)),
    Row("error: beside outputs", (plain("error with outputs", value=[1]),)),
    Row("error: an exception", (plain("raise", type="ValueError", text="raised: grün"), plain("raise", type="ValueError", text="raised", via="grpc"))),
    Row("error: a KeyError", (plain("raise", type="KeyError", text="raised"),)),
    Row("error: a model exception", (plain("raise", type="TritonModelException", text="raised"),)),
    Row("error: an exit", (plain("raise", type="SystemExit", text="raised"), plain("answer"))),
]

WRONG = [
    Row("wrong: None returned", (plain("return none"), plain("answer"))),
    Row("wrong: too few", (plain("return too few"), plain("answer"))),
    Row("wrong: too many", (plain("return too many"), plain("answer"))),
    Row("wrong: a number returned", (plain("return a number"), plain("answer"))),
    Row("wrong: a tuple returned", (plain("return a tuple"),)),
    Row("wrong: a generator returned", (plain("return a generator"),)),
    Row("wrong: None as a response", (plain("nothing"), plain("answer"))),
    Row("wrong: a text as a response", (plain("a text"), plain("answer"))),
    Row("wrong: another datatype", (plain("output", values=[1], dtype="int32"), plain("output", values=[1], dtype="int32", via="grpc"))),
    Row("wrong: texts for numbers", (plain("output", values=["one", "two"], dtype="object"), plain("output", values=["one", "two"], dtype="object", via="grpc"))),
    Row("wrong: an empty array of another datatype", (plain("output", values=[], dtype="float64"), plain("output", values=[], dtype="float64", via="grpc"))),
    Row("wrong: another name", (plain("output", values=[1], name="OTHER"), plain("output", values=[1], name="OTHER", outputs=("OUT",)))),
    Row("wrong: another name, asked for", (plain("output", values=[1], name="OTHER", outputs=("OTHER",)),)),
    Row("wrong: more dimensions", (plain("output", values=[1, 2], shape=[1, 2]),)),
    Row("wrong: no dimensions", (plain("output", values=[1], shape=[]),)),
    Row("wrong: an output twice", (plain("twice", value=[1]),)),
    *(Row(f"wrong: datatype {dtype}", (plain("output", values=[1], dtype=dtype),)) for dtype in ("complex64", "float128", "datetime64[s]")),
]

NAMES = {
    "pb_utils": ["Tensor", "InferenceRequest", "InferenceResponse", "TritonError", "TritonModelException", "ModelConfig", "Logger", "MetricFamily", "Metric", "InferenceTrace", "PreferredMemory",
                 "TRITONSERVER_MEMORY_CPU", "TRITONSERVER_MEMORY_GPU", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
                 "TRITONSERVER_RESPONSE_COMPLETE_FINAL", "TRITONSERVER_REQUEST_RELEASE_ALL", "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
                 "TRITON_STRING_TO_NUMPY", "get_input_tensor_by_name", "get_output_tensor_by_name", "get_input_config_by_name", "get_output_config_by_name",
                 "triton_to_numpy_type", "numpy_to_triton_type", "triton_string_to_numpy", "using_decoupled_model_transaction_policy", "get_model_dir",
                 "serialize_byte_tensor", "deserialize_bytes_tensor", "load_model", "unload_model", "is_model_ready"],
    "pb_utils.Tensor": ["as_numpy", "name", "triton_dtype", "is_cpu", "shape", "to_dlpack", "from_dlpack", "__dlpack__", "__dlpack_device__"],
    "pb_utils.InferenceRequest": ["inputs", "request_id", "correlation_id", "model_name", "model_version", "requested_output_names", "parameters", "flags", "set_flags", "timeout",
                                  "preferred_memory", "trace", "exec", "async_exec", "get_response_sender", "is_cancelled", "set_release_flags"],
    "pb_utils.InferenceResponse": ["output_tensors", "has_error", "error", "parameters"],
    "pb_utils.Logger": ["log", "log_info", "log_warn", "log_error", "log_verbose", "INFO", "WARNING", "ERROR", "VERBOSE"],
    "pb_utils.MetricFamily": ["Metric", "COUNTER", "GAUGE", "HISTOGRAM"],
    "pb_utils.Metric": ["increment", "set", "observe", "value"],
    "pb_utils.ModelConfig": ["as_dict", "add_input", "add_output", "set_max_batch_size", "set_dynamic_batching", "set_model_transaction_policy"],
    "pb_utils.TritonError": [*CODES, "code", "message"],
}
"""The interface that models use: the names of each object."""

FACTS = [
    "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL", "pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START", "pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL", "pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    *(f"int(pb_utils.TritonError.{code})" for code in CODES),
    "int(pb_utils.TritonError('a').code())", "pb_utils.TritonError('a').message()", "int(pb_utils.TritonError('a', pb_utils.TritonError.NOT_FOUND).code())",
    *(f"np.dtype(pb_utils.triton_string_to_numpy('TYPE_{name}')).name" for name in ("BOOL", "UINT8", "INT64", "FP16", "FP32", "FP64", "STRING")),
    "pb_utils.triton_string_to_numpy('TYPE_BF16')", "pb_utils.triton_to_numpy_type(11).__name__", "pb_utils.triton_to_numpy_type(13).__name__", "pb_utils.numpy_to_triton_type(np.float32)",
    "pb_utils.numpy_to_triton_type(np.object_)", "pb_utils.numpy_to_triton_type(np.bool_)", "pb_utils.numpy_to_triton_type(bool)",
    "pb_utils.serialize_byte_tensor(np.array(['a', b'bc'], np.object_)).hex()", "pb_utils.serialize_byte_tensor(np.array([], np.object_))", "pb_utils.serialize_byte_tensor(np.zeros(2))",
    "[b.decode() for b in pb_utils.deserialize_bytes_tensor(b'\\x01\\0\\0\\0a\\x02\\0\\0\\0bc')]", "pb_utils.deserialize_bytes_tensor(b'').size",
    "pb_utils.get_input_config_by_name({'input': [{'name': 'A', 'dims': [1]}]}, 'A')", "pb_utils.get_input_config_by_name({'input': []}, 'A')",
    "pb_utils.get_output_config_by_name({'output': [{'name': 'A', 'dims': [1]}]}, 'A')", "pb_utils.get_output_config_by_name({'output': []}, 'A')",
    "pb_utils.using_decoupled_model_transaction_policy({'model_transaction_policy': {'decoupled': True}})", "pb_utils.using_decoupled_model_transaction_policy({})",
    "pb_utils.get_input_tensor_by_name(request, 'NOT THERE')", "pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([pb_utils.Tensor('A', np.zeros(1))]), 'A').name()",
    "pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([]), 'A')",
    "pb_utils.InferenceResponse([]).has_error()", "pb_utils.InferenceResponse([]).error()", "pb_utils.InferenceResponse([], error=pb_utils.TritonError('e')).has_error()",
    "len(pb_utils.InferenceResponse([pb_utils.Tensor('A', np.zeros(1))], error=pb_utils.TritonError('e')).output_tensors())",
    "pb_utils.InferenceResponse(output_tensors=[]).output_tensors()",
    "list(pb_utils.Tensor('A', np.zeros((2, 3))).shape())", "pb_utils.Tensor('A', np.zeros(2)).is_cpu()",
    "pb_utils.Tensor('A', np.zeros(2)).name()", "str(pb_utils.Tensor('A', np.array([b'x'])).as_numpy().dtype)",
    "str(pb_utils.Tensor('A', np.zeros(2, '<f4')).as_numpy().dtype)", "pb_utils.Tensor('A', np.asfortranarray(np.ones((2, 3)))).as_numpy().flags.c_contiguous",
    "list(pb_utils.Tensor('A', np.zeros(2, np.float32)).__dlpack_device__())", "np.from_dlpack(pb_utils.Tensor('A', np.arange(3.0))).tolist()",
    "pb_utils.Tensor.from_dlpack('B', pb_utils.Tensor('A', np.ones(2)).to_dlpack()).as_numpy().tolist()",
    "pb_utils.Tensor.from_dlpack('B', np.arange(4.0).reshape(2, 2).T).as_numpy().tolist()",
    "sorted(pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[]).requested_output_names())", "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], request_id='r').request_id()",
    "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], correlation_id=5).correlation_id()", "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], correlation_id='five').correlation_id()",
    "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], flags=3).flags()", "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], timeout=9).timeout()",
    "json.loads(pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], parameters={'a': 1, 'b': 'x', 'c': True}).parameters())",
    "type(request.trace()).__name__", "request.inputs()[0].name()", "isinstance(request, pb_utils.InferenceRequest)", "pb_utils.get_model_dir().split('/')[-2:]",
    "issubclass(pb_utils.TritonModelException, Exception)", "pb_utils.TritonModelException('text')", "str(pb_utils.TritonModelException('text'))",
    "pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)",
]
"""Expressions whose values are compared."""

NEWER = {
    "pb_utils.InferenceResponse([]).parameters()": "{}",
    "json.loads(pb_utils.InferenceResponse([], parameters={'a': 1}).parameters())": {"a": 1},
    "int(pb_utils.Tensor('A', np.zeros((2, 3), np.float16)).triton_dtype())": 10,
    "pb_utils.Tensor.from_dlpack('B', np.arange(3.0)).as_numpy().tolist()": [0.0, 1.0, 2.0],
    "pb_utils.Tensor.from_dlpack('B', np.arange(6.0)[::2]).as_numpy().tolist()": "TritonModelException",
    "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[]).is_cancelled()": False,
    "pb_utils.InferenceResponse([], parameters={'a': [1]})": "TritonModelException",
    "pb_utils.InferenceResponse([], parameters={5: 1})": "TritonModelException",
    "pb_utils.InferenceResponse([], parameters={'a': 1.5})": "TritonModelException",
}
"""Expressions that Triton 2.51 does not support or that crash it, with their values here, which are those of newer versions."""

FAULTS = [
    "pb_utils.Tensor('A', [1, 2])", "pb_utils.Tensor(5, np.zeros(1))", "pb_utils.Tensor('A')", "pb_utils.Tensor('A', np.zeros(1, np.complex64))", "pb_utils.InferenceResponse([5])", "pb_utils.InferenceResponse(5)",
    "pb_utils.InferenceResponse([], error='text')", "pb_utils.TritonError()", "pb_utils.TritonError('a', 77)",
    "pb_utils.InferenceRequest(model_name='m', requested_output_names='O', inputs=[])", "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[5])", "pb_utils.InferenceRequest(model_name='', requested_output_names=['O'], inputs=[])",
    "pb_utils.InferenceRequest(model_name='m', requested_output_names=[], inputs=[])", "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], correlation_id=1.5)",
    "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], parameters={'a': [1]})", "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[], flags=-1)",
    "request.get_response_sender(5)",
    "pb_utils.MetricFamily(name='no_kind', description='d')",
    "pb_utils.Tensor.from_dlpack('B', 5)", "pb_utils.Tensor.from_dlpack('', np.zeros(1))", "pb_utils.get_input_tensor_by_name(5, 'A')", "pb_utils.Logger.log('a', 5)", "pb_utils.Logger.log_info(5)",
]
"""Wrong calls whose exceptions are compared."""

CALL = "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=[]"

MISSING = [
    "pb_utils.InferenceRequest()", "pb_utils.InferenceRequest(model_name='m', inputs=[])", "pb_utils.InferenceRequest(requested_output_names=['O'], inputs=[])", "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'])",
    "pb_utils.InferenceRequest(model_name='m', requested_output_names=['O'], inputs=None)", "pb_utils.InferenceRequest(model_name='m', requested_output_names=None, inputs=[])", "pb_utils.InferenceRequest(model_name=None, requested_output_names=['O'], inputs=[])",
    *(f"{CALL}, {name}=None)" for name in ("request_id", "correlation_id", "model_version", "flags", "timeout", "trace", "preferred_memory")), f"{CALL}, parameters=None).parameters()",
    "pb_utils.InferenceResponse()", "pb_utils.InferenceResponse(None)", "pb_utils.InferenceResponse(output_tensors=None, error=pb_utils.TritonError('e'))", "pb_utils.InferenceResponse(error=pb_utils.TritonError('e')).has_error()", "pb_utils.InferenceResponse([], None).has_error()",
    "pb_utils.Logger.log()", "pb_utils.Logger.log('a', None)", "pb_utils.Logger.log('a', 1)", "pb_utils.Logger.log('a', 'INFO')", "pb_utils.Logger.log('a', pb_utils.Logger.WARNING)", "pb_utils.Logger.log_info(None)",
    "pb_utils.Tensor()", "pb_utils.Tensor('', None)", "pb_utils.Tensor('A', None)", "pb_utils.Tensor(None, np.zeros(1))", "pb_utils.Tensor('', 5)", "pb_utils.Tensor('', np.zeros(1))", "pb_utils.TritonError(None)", "pb_utils.TritonError('a', None)",
]
"""Calls with arguments that are missing or None."""

ACCEPTED = [
    "type(pb_utils.InferenceRequest(model_name=b'm', requested_output_names=[b'O'], inputs=[])).__name__", "sorted(pb_utils.InferenceRequest(model_name='m', requested_output_names=(b'O',), inputs=()).requested_output_names())",
    f"{CALL}, request_id=b'r').request_id()", "pb_utils.Tensor(b'A', np.zeros(1)).name()", "pb_utils.TritonError(b'x').message()", "pb_utils.Logger.log(b'a')", "pb_utils.Logger.log_info(message=b'a')",
    "__import__('sys').argv", "__import__('c_python_backend_utils').Tensor is pb_utils.Tensor", "__import__('c_python_backend_utils').InferenceRequest is pb_utils.InferenceRequest", "issubclass(__import__('c_python_backend_utils').TritonModelException, Exception)",
    *(f"hasattr(__import__('c_python_backend_utils'), '{name}')" for name in ("InferenceResponse", "TritonError", "Logger", "Metric", "MetricFamily", "PreferredMemory", "InferenceTrace", "load_model", "unload_model", "is_model_ready", "TRITONSERVER_MEMORY_GPU")),
]
"""Accepted arguments other than texts, and attributes of the process of a model."""

STREAM = """(lambda it: {})(pb_utils.InferenceRequest(model_name='streamed', requested_output_names=['OUT'], inputs=[pb_utils.Tensor('DO',
 np.array([json.dumps([{{'send': [1]}}, {{'send': [2]}}, {{'final': True}}]).encode()], np.object_))]).exec(decoupled=True))""".replace("\n", "")
COUNTER = "[pb_utils.MetricFamily(name='{}', description='{}', kind=pb_utils.MetricFamily.COUNTER)]"
DELETED = "(lambda f: (lambda m: [f.clear(), {}])(f[0].Metric(labels={{'k': 'v'}})))" + f"({COUNTER})"


def attempted(*expressions, **more) -> Ask:
    """Returns a request that evaluates each of these expressions."""
    return plain("attempt", "interface", expressions=list(expressions), **more)


INTERFACE = [
    Row("interface: names", (plain("attempt", "interface", expressions=[f"hasattr({of}, '{name}')" for of, names in NAMES.items() for name in names]),)),
    Row("interface: facts", (plain("attempt", "interface", expressions=FACTS),)),
    Row("interface: wrong calls", (plain("attempt", "interface", expressions=FAULTS),)),
    Row("interface: missing arguments", (attempted(*MISSING),)),
    Row("interface: accepted arguments", (attempted(*ACCEPTED),)),
    Row("interface: newer", (plain("attempt", "interface", expressions=list(NEWER)),)),
]

PARAMETERS = [
    Row("parameters: to the model", (plain("answer", parameters={"a": 1, "b": "x", "c": True, "d": -5}), plain("answer", parameters={"a": 1, "b": "x", "c": True}, via="grpc"))),
    Row("parameters: a fraction to the model", (plain("answer", parameters={"a": 1.5}), plain("answer", parameters={"a": 1.5}, via="grpc"))),
    Row("parameters: from the model", (Ask("plain", do("parameters", parameters={"a": 1, "b": "grün", "c": True})), Ask("plain", do("parameters", parameters={"a": 1, "b": "x", "c": False}), via="grpc"))),
    Row("parameters: none from the model", (Ask("plain", do("parameters", parameters={})),)),
    Row("parameters: with a fraction from the model", (Ask("plain", do("parameters", parameters={"a": 1.5})), plain("answer"))),
    Row("parameters: with a list from the model", (Ask("plain", do("parameters", parameters={"a": [1]})), plain("answer"))),
    Row("parameters: through a stream", (streamed({"see": True, "final": True}, parameters={"a": 1, "b": "x"}), streamed({"send": [1], "parameters": {"p": 5, "q": "x", "r": True}, "final": True}))),
    Row("correlation: a number", (plain("answer", parameters=SEQUENCE), plain("answer", parameters=SEQUENCE, via="grpc"))),
    Row("correlation: a name", (plain("answer", parameters=SEQUENCE | {"sequence_id": "seven", "sequence_end": True}), plain("answer", parameters=SEQUENCE | {"sequence_id": "seven"}, via="grpc"))),
    Row("correlation: an end", (plain("answer", parameters={"sequence_id": 7, "sequence_end": True}),)),
    Row("timeout and priority: plain", (plain("answer", parameters={"timeout": 5000000, "priority": 3}), plain("answer", parameters={"timeout": 5000000, "priority": 3}, via="grpc"))),
    Row("timeout and priority: with levels", (rows("answer", 1, "levels", parameters={"timeout": 2000000, "priority": 1}), rows("answer", 1, "levels"), rows("answer", 1, "levels", parameters={"timeout": 5000000, "priority": 9}))),
    Row("timeout: expired", (rows("sleep", 1, "levels", seconds=2), rows("answer", 1, "levels", parameters={"timeout": 100000}, delay_s=0.5), rows("answer", 1, "levels", delay_s=0.6)), at_once=True),
    Row("priority: overtakes", (rows("sleep", 1, "levels", seconds=2), rows("answer", 1, "levels", parameters={"priority": 3}, delay_s=0.3), rows("answer", 1, "levels", parameters={"priority": 1}, delay_s=0.5)), at_once=True),
]

STREAMED = [
    Row("stream: one", (streamed({"send": [1], **FINAL}),)),
    Row("stream: three, final with the last", (streamed({"send": [1]}, {"send": [2, 2]}, {"send": [3], **FINAL}, id="mine"),)),
    Row("stream: three, final alone", (streamed({"send": [1]}, {"send": [2]}, {"send": [3]}, FINAL),)),
    Row("stream: three, final alone, told", (streamed({"send": [1]}, {"send": [2]}, {"send": [3]}, FINAL, parameters=EMPTY),)),
    Row("stream: none", (streamed(FINAL),)),
    Row("stream: none, told", (streamed(FINAL, parameters=EMPTY),)),
    Row("stream: many", (streamed(*({"send": [n]} for n in range(100)), FINAL),)),
    Row("stream: an empty response", (streamed({"empty": True}, {"send": [1], **FINAL}, parameters=EMPTY),)),
    Row("stream: an empty response, the last", (streamed({"send": [1]}, {"empty": True, **FINAL}, parameters=EMPTY),)),
    Row("stream: one output of two", (streamed({"send": [1]}, FINAL, outputs=("SEEN",), parameters=EMPTY),)),
    Row("stream: from a thread", (streamed({"send": [1]}, {"thread": True}, {"sleep": 0.3}, {"send": [2]}, {"sleep": 0.1}, {"send": [3]}, FINAL),)),
    Row("stream: only from a thread", (streamed({"thread": True}, {"sleep": 0.3}, {"send": [2], **FINAL}),)),
    Row("stream: threads side by side", (streamed({"thread": True}, {"sleep": 3}, {"send": [1], **FINAL}), streamed({"thread": True}, {"send": [2], **FINAL}, delay_s=0.3)), at_once=True),
    *(Row(f"stream: error {code}", (streamed({"send": [1]}, {"error": "in band", "code": code}, {"send": [2]}, FINAL, parameters=EMPTY),)) for code in ("UNKNOWN", "NOT_FOUND", "CANCELLED")),
    Row("stream: error first", (streamed({"error": "in band"}, {"send": [2]}, FINAL),)),
    Row("stream: error last", (streamed({"send": [1]}, {"error": "in band", **FINAL}),)),
    Row("stream: error only", (streamed({"error": "in band", **FINAL}),)),
    Row("stream: raises first", (streamed({"raise": "raised"}), streamed({"send": [1], **FINAL}))),
    Row("stream: raises in the middle", (streamed({"send": [1]}, {"raise": "raised"}), streamed({"send": [1], **FINAL}))),
    Row("stream: raises after the end", (streamed({"send": [1], **FINAL}, {"raise": "raised"}), streamed({"send": [1], **FINAL}))),
    Row("stream: sends after the end", (streamed({"send": [1], **FINAL}, {"send": [2], "note": True}), notes())),
    Row("stream: ends twice", (streamed({"send": [1], **FINAL}, {**FINAL, "note": True}), notes())),
    Row("stream: sends nothing and no flag", (streamed({"nothing": True, "note": True}, {"send": [1], **FINAL}), notes())),
    Row("stream: an unknown flag", (streamed({"send": [1], "flags": 5, "note": True}, {"send": [1], **FINAL}), notes())),
    Row("stream: returns responses", (streamed({"return": [1], "send": [1], **FINAL}), streamed({"send": [1], **FINAL}))),
    Row("stream: over unary calls", (streamed({"send": [1], **FINAL}, via="http"), streamed({"send": [1], **FINAL}, via="grpc"))),
    Row("stream: generate", (Http("v2/models/streamed/generate", {"DO": json.dumps([{"send": [1, 2]}, FINAL])}), Http("v2/models/streamed/generate", {"DO": json.dumps([{"send": [1]}, {"send": [2]}, FINAL])}))),
    Row("stream: ordinary model", (plain("answer", value=[1], via="stream"), plain("error", text="in band", via="stream"), plain("raise", type="ValueError", text="raised", via="stream"))),
    Row("stream: coroutine", (valued("coroutine_streamed", 0.2, 0.2, via="stream"), valued("coroutine_streamed", -1, via="stream"), valued("coroutine_streamed", 0, via="stream"))),
]

SENDER = [
    Row("sender: one, final with it", (sender(sends=[5], final="with"), sender(sends=[5], final="with", via="grpc"))),
    Row("sender: one, final alone", (sender(sends=[5], final="alone"), sender(notes=True))),
    Row("sender: none", (sender(sends=[], final="alone"), sender(notes=True))),
    Row("sender: two", (sender(sends=[5, 6], final="alone"), sender(notes=True))),
    Row("sender: one, and one returned", (sender(sends=[5], final="with", returns=6), sender(notes=True))),
    Row("sender: from a thread", (sender(sends=[5], final="with", thread=True), sender(notes=True))),
    Row("sender: only returned", (sender(returns=6),)),
]

COROUTINE = [
    Row("coroutine: waits side by side", (valued("coroutine", 0.3, 0.3, 0.3),)),
    Row("coroutine: raises", (valued("coroutine", -1), valued("coroutine", 0))),
]

SEQUENCES = [
    Row("sequence: direct", (sequence("direct", 1, 7, True), sequence("direct", 2, 7), sequence("direct", 3, 7, False, True))),
    Row("sequence: two, interleaved", (sequence("direct", 1, 8, True), sequence("direct", 10, 9, True), sequence("direct", 2, 8, False, True), sequence("direct", 20, 9, False, True, via="grpc"))),
    Row("sequence: begun twice", (sequence("direct", 1, 10, True), sequence("direct", 2, 10, True, True))),
    Row("sequence: not begun", (sequence("direct", 1, 11), sequence("direct", 1, 0, True))),
    Row("sequence: oldest, by name", (sequence("oldest", 1, "one", True), sequence("oldest", 2, "one", False, True, via="grpc"))),
    Row("sequence: oldest, by number", (sequence("oldest", 1, 12, True), sequence("oldest", 2, 12, False, True))),
    Row("sequence: a name as control", (sequence("named", 1, "one", True), sequence("named", 2, "one", False, True))),
    Row("sequence: name where a number must be", (sequence("direct", 1, "one", True),)),
]


def call(model, outputs=("OUT",), **more) -> dict:
    """Returns a call from a model to another model."""
    return {"model": model, "outputs": list(outputs), **more}


def called(*calls, model="caller", **more) -> Ask:
    """Returns a request to a model that calls other models."""
    return Ask(model, steps(*calls), **more)


VALUE = {"inputs": {"VALUE": ["float32", [1, 3], [1, 2, 3]]}}
TOLD = {"inputs": {"DO": ["object", [1], ['{"do":"answer"}']], "VALUE": ["float32", [2], [5, 6]]}}
MANY = {"inputs": {"DO": ["object", [1], [json.dumps([{"send": [1]}, {"send": [2]}, FINAL])]]}}
WITH = {"inputs": {"DO": ["object", [1], [json.dumps([{"send": [1]}, {"send": [2], **FINAL}])]]}}
ZERO = {"inputs": {"DO": ["object", [1], [json.dumps([FINAL])]]}}
FAILS = {"inputs": {"DO": ["object", [1], [json.dumps([{"send": [1]}, {"error": "in band", "code": "NOT_FOUND"}, FINAL])]]}}
DETAILS = {"request_id": "mine", "correlation_id": 7, "flags": 1, "timeout": 5000000, "parameters": {"a": 1, "b": "x", "c": True}}

ROW = {"inputs": {"DO": ["object", [1, 1], ['{"do":"answer"}']], "VALUE": ["float32", [1, 2], [1, 2]]}}["inputs"]

CALLS = [
    Row("call: one", (called(call("doubled", **VALUE)),)),
    Row("call: two outputs", (called(call("plain", ["OUT", "SEEN"], **TOLD)),)),
    Row("call: what the called model sees", (called(call("plain", ["SEEN"], **TOLD, **DETAILS)), called(call("plain", ["SEEN"], **TOLD, correlation_id="seven"), id="outer", parameters={"outer": 1}))),
    Row("call: an input passed on", (Ask("caller", {"DO": ("BYTES", [1], [json.dumps([call("completed", passed=[], **VALUE), call("coroutine", passed=["VALUE"])])]), "VALUE": ("FP32", [2], [0, 0])}),)),
    Row("call: a version", (called(call("two_versions", ["SEEN"], **TOLD, model_version=2), call("two_versions", ["SEEN"], **TOLD, model_version=3)),)),
    Row("call: an unknown model", (called(call("nowhere", **VALUE)),)),
    Row("call: a model that is not loaded", (called(call("on_demand", **TOLD)),)),
    Row("call: a model that fails", (called(call("refusing", **VALUE)),)),
    Row("call: a model that gives another datatype", (called(call("plain", inputs={"DO": ["object", [1], ['{"do":"output","values":[1,2],"dtype":"float64"}']]})),)),
    Row("call: a model that raises", (called(call("plain", inputs={"DO": ["object", [1], ['{"do":"raise","type":"ValueError","text":"inside"}']]})),)),
    Row("call: an ensemble", (called(call("chain", **VALUE)),)),
    Row("call: an ensemble that fails", (called(call("chain_of_plain", **VALUE)),)),
    Row("call: a wrong input", (called(call("doubled", inputs={"OTHER": ["float32", [1, 1], [1]]}), call("doubled", inputs={"VALUE": ["int32", [1, 1], [1]]}), call("doubled", inputs={}), call("doubled", inputs={"VALUE": ["float32", [9, 1], [1] * 9]})),)),
    Row("call: an unknown output", (called(call("doubled", ["OTHER"], **VALUE)),)),
    Row("call: no outputs asked for", (called(call("plain", [], **TOLD)),)),
    Row("call: a decoupled model", (called(call("streamed", **MANY, decoupled=True)),)),
    Row("call: a decoupled model, final with the last", (called(call("streamed", **WITH, decoupled=True)),)),
    Row("call: a decoupled model that answers nothing", (called(call("streamed", **ZERO, decoupled=True)),)),
    Row("call: a decoupled model that fails", (called(call("streamed", **FAILS, decoupled=True)),)),
    Row("call: a decoupled model in the ordinary way", (called(call("streamed", **MANY)),)),
    Row("call: an ordinary model in the decoupled way", (called(call("doubled", **VALUE, decoupled=True)),)),
    Row("call: a stream read twice", (attempted(STREAM.format("[len(list(it)), len(list(it)), len(list(it))]"), STREAM.format("[type(next(iter(it))).__name__, len(list(it)), len(list(it))]"), "[r.error().message() for r in pb_utils.InferenceRequest(model_name='nowhere', requested_output_names=['O'], inputs=[]).exec(decoupled=True)]"),)),
    Row("call: a stream passed on", (Ask("decoupled_caller", steps(call("streamed", **MANY), call("streamed", **FAILS)), via="stream"),)),
    Row("call: side by side", (called(call("coroutine", inputs={"VALUE": ["float32", [1], [0.3]]}), call("doubled", **VALUE), call("refusing", **VALUE), call("nowhere", **VALUE), model="async_caller"),)),
    Row("call: side by side, decoupled", (called(call("streamed", **MANY, decoupled=True), call("streamed", **WITH, decoupled=True), model="async_caller"),)),
    Row("call: a timeout", (called(call("levels", inputs=ROW, timeout=5), call("levels", inputs=ROW, timeout=2000000)),)),
    Row("call: a timeout behind another", (rows("sleep", 1, "levels", seconds=2), called(call("levels", inputs=ROW, timeout=200000), delay_s=0.5)), at_once=True),
    Row("call: a caller", (called(call("caller", ["SEEN"], inputs={"DO": ["object", [1], [json.dumps([call("doubled", **VALUE)])]]}), model="async_caller"),)),
    Row("call: a sequence", (called(*(call("oldest", inputs={"VALUE": ["float32", [1, 1], [n]]}, correlation_id=77, flags=flags) for n, flags in ((1, 1), (2, 0), (3, 2)))),)),
]


def control(verb, model, **more) -> dict:
    """Returns a load, an unload or a readiness check."""
    return {"verb": verb, "model": model, **more}


SMALLER = json.dumps({"backend": "python", "max_batch_size": 2, "input": [{"name": "VALUE", "data_type": "TYPE_FP32", "dims": [-1]}], "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}]})

REPLACED = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor * 100)]) for tensor in tensors]
"""

CONTROL = [
    Row("control: ready", (called(control("ready", "plain"), control("ready", "plain", version="1"), control("ready", "plain", version="9"), control("ready", "nowhere"), control("ready", "on_demand"), control("ready", "chain")),)),
    Row("control: load and unload", (called(control("load", "on_demand"), control("ready", "on_demand"), call("on_demand", **TOLD), control("unload", "on_demand")),)),
    Row("control: load an unknown model", (called(control("load", "nowhere")),)),
    Row("control: load what fails", (called(control("load", "fails_initialize")),)),
    Row("control: unload an unknown model", (called(control("unload", "nowhere"), control("unload", "nowhere", dependents=True)),)),
    Row("control: load with files", (called(control("load", "completes_has_nothing", config=SMALLER, files={"file:1/model.py": REPLACED})), valued("completes_has_nothing", 1, shape=[1, 1]), unload("completes_has_nothing"))),
    Row("control: load with a configuration", (called(control("load", "completes_has_nothing", config=SMALLER)), state("completes_has_nothing"), unload("completes_has_nothing"))),
]

METRICS = [
    Row("metrics: at the start", (), metrics=("asked_total", "held", "waited_ms", "bare")),
    Row("metrics: a counter", (measured(["counter a", "increment", 1], ["counter a", "increment", 2.5], ["counter b", "increment", 4], ["counter a", "value"]),), metrics=("asked_total",)),
    Row("metrics: a gauge", (measured(["gauge", "set", 5], ["gauge", "increment", -2], ["gauge", "value"], ["gauge without labels", "set", 0.25]),), metrics=("held", "bare")),
    Row("metrics: a histogram", (measured(["histogram", "observe", 0.25], ["histogram", "observe", 1.0], ["histogram", "observe", 1000]),), metrics=("waited_ms",)),
    Row("metrics: made by a request", (measured(family("later_total", "later", "COUNTER", {"k": "grün \"quoted\" \\ \n end"}), ["later", "increment", 3]),), metrics=("later_total",)),
    Row("metrics: the same family once more", (measured(family("twice_total", "once", "COUNTER", {"k": "v"}), ["once", "increment", 1], family("twice_total", "again", "COUNTER", {"k": "w"}), ["again", "increment", 2]),), metrics=("twice_total",)),
    Row("metrics: the same labels once more", (measured(family("same_total", "one", "COUNTER", {"k": "v"}), ["one", "increment", 1], family("same_total", "other", "COUNTER", {"k": "v"}), ["other", "increment", 1], ["one", "value"]),), metrics=("same_total",)),
    Row("metrics: the family is deleted", (attempted(*(DELETED.format(act, f"{kind}_gone_total", "d") for kind, act in (("incremented", "m.increment(1)"), ("read", "m.value()"), ("set", "m.set(1)"), ("observed", "m.observe(1)"))), texts=True),)),
    Row("metrics: two descriptions", (measured(["described", "described_total", "The first", {"k": "v"}], ["described", "described_total", "The second", {"k": "w"}]),), metrics=("described_total",)),
    Row("metrics: another kind", (measured(family("kinds_total", "counted", "COUNTER", {"k": "v"}), family("kinds_total", "gauged", "GAUGE", {"k": "w"})),), metrics=("kinds_total",)),
    Row("metrics: other label names", (measured(family("labelled", "l1", "GAUGE", {"k": "v"}), family("labelled", "l2", "GAUGE", {"q": "v", "r": "w"}), ["l2", "set", 5]),), metrics=("labelled",)),
    Row("metrics: a histogram's buckets", (measured(family("sized", "none", "HISTOGRAM", {}), family("sized", "empty", "HISTOGRAM", {"a": "b"}, []), family("sized", "wrong", "HISTOGRAM", {"a": "c"}, [2, 1]), family("gauged", "g", "GAUGE", {}, [1])),), metrics=("sized", "gauged")),
    Row("metrics: a wrong name", (measured(family("not a name", "n", "GAUGE", {"k": "v"}), family("named", "m", "GAUGE", {"not a label": "v"})),), metrics=("named",)),
    Row("metrics: a counter is set", (measured(family("set_total", "s", "COUNTER", {"k": "v"}), ["s", "set", 3], ["s", "value"]),), metrics=("set_total",)),
    Row("metrics: a counter observes", (measured(family("observed_total", "o", "COUNTER", {"k": "v"}), ["o", "observe", 3], ["o", "value"]),), metrics=("observed_total",)),
    Row("metrics: a gauge observes", (measured(family("observed", "og", "GAUGE", {"k": "v"}), ["og", "observe", 3], ["og", "value"]),), metrics=("observed",)),
    Row("metrics: a histogram is incremented", (measured(family("incremented", "ih", "HISTOGRAM", {"k": "v"}, [1]), ["ih", "increment", 1]),), metrics=("incremented",)),
    Row("metrics: the value of a histogram is queried", (measured(family("questioned", "qh", "HISTOGRAM", {"k": "v"}, [1]), ["qh", "value"]),), metrics=("questioned",)),
    Row("metrics: dropped", (measured(family("passing", "p1", "GAUGE", {"k": "v"}), family("passing", "p2", "GAUGE", {"k": "w"}), ["p1", "drop"]), Http("wait", 1)), metrics=("passing",)),
    Row("metrics: a counter goes down", (measured(family("down_total", "d", "COUNTER", {"k": "v"}), ["d", "increment", -1], ["d", "value"]),), metrics=("down_total",)),
    Row("metrics: a histogram is set", (measured(family("set_ms", "sh", "HISTOGRAM", {"k": "v"}, [1]), ["sh", "set", 1]),), metrics=("set_ms",)),
]

LOADS = [
    *(Row(f"load: {name}", (load(name), unload(name))) for name in ("fails_initialize", "fails_initialize_model_exception", "fails_initialize_inside", "no_class", "no_execute", "bad_syntax", "bad_import", "no_file")),
    Row("load: fails_finalize", (load("fails_finalize"), plain("answer", "fails_finalize"), unload("fails_finalize"), load("fails_finalize"), unload("fails_finalize"))),
    *(Row(f"complete: {name}", (load(name), state(name), unload(name))) for name in (
        "completes_all", "completes_decoupled", "completes_with_tensors", "completes_with_batcher", "completes_raises", "completes_returns_nothing", "completes_has_nothing", "completes_nothing_at_all",
        "completes_other_datatype", "completes_other_dims", "completes_no_name", "completes_no_datatype", "completes_no_dims", "completes_unknown_key", "completes_unknown_datatype", "completes_one_more",
        "completes_larger_batch", "completes_policy", "completes_wrong_policy", "completes_batching")),
    Row("complete: without a file", (state("completed"), Http("v2/models/completed"), valued("completed", 1, 2, shape=[1, 2]))),
    Row("arguments", (Ask("arguments", do("answer")),)),
]

CANCELLED = [
    Row("cancel: a stream", (streamed({"send": [1]}, {"cancelled": 5}, FINAL, give_up_s=2), notes())),
    Row("cancel: a stream, in a thread", (streamed({"send": [1]}, {"thread": True}, {"cancelled": 5}, {**FINAL, "note": True}, give_up_s=2), Http("wait", 1), notes())),
    Row("cancel: while it waits", (streamed({"sleep": 4}, {"send": [1], **FINAL}, delay_s=0), streamed({"send": [2], **FINAL}, delay_s=0.5, give_up_s=1)), at_once=True),
    Row("cancel: not at all", (streamed({"cancelled": 0.2}, {"send": [1], **FINAL}), notes())),
]

DEATH = [
    Row("death: in execute", (plain("die", "dying"),)),
    Row("death: the next request", (Http("wait", 3), plain("answer", "dying"))),
    Row("death: in initialize", (load("fails_initialize_exit"), unload("fails_initialize_exit"))),
]

# fmt: on

ROWS = [
    *PLAIN, *DATATYPES, *BATCHED, *ERRORS, *WRONG, *INTERFACE, *PARAMETERS, *STREAMED, *SENDER, *COROUTINE, *SEQUENCES,
    *CALLS, *CONTROL, *METRICS, *LOADS, *CANCELLED, *DEATH,
]  # fmt: skip
"""The rows in the order in which they are sent. Rows that may end a model come last."""
