"""Tables of the shared-memory extension. Each row has a client's calls in order, on objects that `shared_memory.py` creates.
A real Triton's answers are in `golden_shared_memory.json`.

Not covered: tensors in a region that begins after the start of its object. This version of Triton adds the offset twice, and
answers with bytes of other memory.

A row begins without regions. `REGISTER` registers the object `A` under the name `r`. Its bytes are those of `contents()`:
INPUT0 and INPUT1 of `simple`, then strings for `identity_bytes`, then zeros.
"""

# One row, one line: a table is read by comparing its rows.
# fmt: off

import base64
import json
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from harness.wire import GrpcCase, HttpCase, byte_strings, grpc_infer, grpc_tensor, infer, output, tensor

PREFIX = "pharos_table"
SIZE = 8192
OBJECT = f"/{PREFIX}_a"
NUMBERS = np.arange(16, dtype=np.int32)
ONES = np.ones(16, dtype=np.int32)
STRINGS = byte_strings(b"one", b"", b"three")
"""At 1024: three elements in 20 bytes."""


def contents() -> bytes:
    """Returns the bytes of the object before each row."""
    start = NUMBERS.tobytes() + ONES.tobytes()
    return (start.ljust(1024, b"\0") + STRINGS).ljust(SIZE, b"\0")


@dataclass(frozen=True)
class Row:
    """Calls in order. The bytes of the object from 2048 on are a part of the outcome."""

    name: str
    calls: list


def register(body, name="r", kind="system") -> HttpCase:
    """Returns a registration over HTTP; `body` is an object or encoded JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpCase("", "POST", f"/v2/{kind}sharedmemory/region/{name}/register", body)


def place(key=OBJECT, offset=0, byte_size=SIZE) -> dict:
    """Returns the body of a registration of a system region."""
    return {"key": key, "offset": offset, "byte_size": byte_size}


def status(name="", kind="system") -> HttpCase:
    """Requests the status of one region or of all."""
    return HttpCase("", "GET", f"/v2/{kind}sharedmemory{f'/region/{name}' if name else ''}/status")


def unregister(name="", kind="system") -> HttpCase:
    """Unregisters one region or all."""
    return HttpCase("", "POST", f"/v2/{kind}sharedmemory{f'/region/{name}' if name else ''}/unregister")


def rpc(verb: str, kind="System", **fields) -> GrpcCase:
    """Returns a call of the extension over gRPC."""
    name = f"{kind}SharedMemory{verb}"
    return GrpcCase("", name, getattr(pb, f"{name}Request")(**fields))


REGISTER = register(place())


def at(offset=0, size=64, region="r", **more) -> dict:
    """Returns the parameters of a tensor in a region; `None` omits a parameter."""
    names = {"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": size}
    return {key: value for key, value in names.items() if value is not None} | more


def simple(first=None, second=None, outputs=(), rows=1, **more) -> HttpCase:
    """Returns a request to `simple` over HTTP, with the parameters of both inputs."""
    inputs = [
        tensor("INPUT0", "INT32", [rows, 16], **(at(0) if first is None else first)),
        tensor("INPUT1", "INT32", [rows, 16], **(at(64) if second is None else second)),
    ]
    request = {"inputs": inputs} | ({"outputs": list(outputs)} if outputs else {}) | more
    return infer("", "simple", request)


def g_simple(first=None, second=None, outputs=(), raw=(), rows=1, **more) -> GrpcCase:
    """Returns the same request over gRPC."""
    inputs = [
        grpc_tensor("INPUT0", "INT32", [rows, 16], at(0) if first is None else first),
        grpc_tensor("INPUT1", "INT32", [rows, 16], at(64) if second is None else second),
    ]
    return grpc_infer("", "simple", inputs, raw, outputs=outputs, **more)


def strings(parameters: dict, elements=3, outputs=(), **more) -> HttpCase:
    """Returns a request to `identity_bytes` over HTTP."""
    request = {"inputs": [tensor("INPUT0", "BYTES", [1, elements], **parameters)]} | more
    return infer("", "identity_bytes", request | ({"outputs": list(outputs)} if outputs else {}))


def g_strings(parameters: dict, elements=3, outputs=(), **more) -> GrpcCase:
    """Returns the same request over gRPC."""
    return grpc_infer("", "identity_bytes", [grpc_tensor("INPUT0", "BYTES", [1, elements], parameters)], outputs=outputs, **more)


def life():
    """Registration, status, unregistration."""
    yield "http", [status(), REGISTER, status(), status("r"), unregister("r"), status(), status("r")]
    yield "grpc", [rpc("Status"), rpc("Register", name="r", key=OBJECT, byte_size=SIZE), rpc("Status"), rpc("Status", name="r"), rpc("Unregister", name="r"), rpc("Status"), rpc("Status", name="r")]
    yield "twice", [REGISTER, REGISTER, rpc("Register", name="r", key=OBJECT, byte_size=SIZE), status()]
    yield "same object under two names", [REGISTER, register(place(offset=4096, byte_size=100), "s"), rpc("Status"), unregister(), status()]
    yield "again under the same name", [REGISTER, unregister("r"), register(place(byte_size=64)), status()]
    yield "unregister unknown", [unregister("nothing"), rpc("Unregister", name="nothing"), unregister(), rpc("Unregister")]
    yield "cuda without a gpu", [unregister(kind="cuda"), unregister("nothing", kind="cuda"), rpc("Unregister", kind="Cuda"), rpc("Unregister", kind="Cuda", name="nothing"), status(kind="cuda"), status("nothing", kind="cuda"), rpc("Status", kind="Cuda"), rpc("Status", kind="Cuda", name="nothing")]
    yield "kind of region", [REGISTER, status("r", kind="cuda"), rpc("Status", kind="Cuda", name="r"), unregister("r", kind="cuda"), rpc("Unregister", kind="Cuda", name="r"), status(), unregister(kind="cuda"), status()]
    yield "name with escapes", [register(place(), "a%20b%2Fc"), status("a%20b%2Fc"), rpc("Status"), unregister("a%20b%2Fc"), status()]
    yield "long name", [register(place(), "n" * 1000), status("n" * 1000), unregister("n" * 1000)]
    yield "empty name by grpc", [rpc("Register", key=OBJECT, byte_size=SIZE), rpc("Status")]
    yield "wrong method", [HttpCase("", "GET", "/v2/systemsharedmemory/region/r/register"), HttpCase("", "POST", "/v2/systemsharedmemory/status"), HttpCase("", "GET", "/v2/systemsharedmemory/unregister")]
    yield "status with a body", [REGISTER, HttpCase("", "POST", "/v2/systemsharedmemory/region/r/unregister", b"{}"), status()]


def bodies():
    """JSON bodies of registrations."""
    for name, body in [
        ("empty", b""), ("no JSON", b"{"), ("array", b"[]"), ("nothing", {}),
        ("no key", {"offset": 0, "byte_size": 64}), ("no offset", {"key": OBJECT, "byte_size": 64}), ("no size", {"key": OBJECT, "offset": 0}),
        ("key a number", place(key=1)), ("key null", place(key=None)), ("offset a string", place(offset="0")), ("offset negative", place(offset=-1)), ("offset a fraction", place(offset=0.5)),
        ("size a string", place(byte_size="64")), ("size negative", place(byte_size=-1)), ("size null", place(byte_size=None)), ("more members", place() | {"else": 1}),
    ]:
        yield f"body: {name}", [register(body), status()]
    good = base64.b64encode(bytes(64)).decode()
    for name, body in [
        ("nothing", {}), ("no handle", {"device_id": 0, "byte_size": 64}), ("no base64", {"raw_handle": {}, "device_id": 0, "byte_size": 64}),
        ("handle a string", {"raw_handle": good, "device_id": 0, "byte_size": 64}), ("not base64", {"raw_handle": {"b64": "!"}, "device_id": 0, "byte_size": 64}),
        ("short", {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64}), ("no device", {"raw_handle": {"b64": good}, "byte_size": 64}),
        ("no size", {"raw_handle": {"b64": good}, "device_id": 0}), ("good", {"raw_handle": {"b64": good}, "device_id": 0, "byte_size": 64}),
    ]:
        yield f"cuda body: {name}", [register(body, kind="cuda"), status(kind="cuda")]
    yield "cuda by grpc", [rpc("Register", kind="Cuda", name="r", raw_handle=bytes(64), byte_size=64), rpc("Register", kind="Cuda", name="r", raw_handle=b"short", byte_size=64), rpc("Register", kind="Cuda", name="", raw_handle=bytes(64), byte_size=64)]


def keys():
    """Names of objects."""
    for name, key in [
        ("without slash", OBJECT[1:]), ("two slashes", "/" + OBJECT), ("empty", ""), ("slash", "/"), ("dot", "/."), ("dots", ".."), ("dots with slash", "/.."), ("dots before", "/../shm" + OBJECT),
        ("folder", f"/{PREFIX}_folder"), ("in a folder", f"/{PREFIX}_folder/inner"), ("link to an object", f"/{PREFIX}_link"), ("link out", f"/{PREFIX}_out"), ("broken link", f"/{PREFIX}_broken"),
        ("fifo", f"/{PREFIX}_fifo"), ("socket", f"/{PREFIX}_socket"), ("nothing there", f"/{PREFIX}_nothing"), ("long", "/" + "k" * 300), ("trailing slash", OBJECT + "/"), ("NUL", OBJECT + "\0x"),
        ("absolute path", "/dev/shm" + OBJECT), ("memfd", "/proc/self/fd/3"), ("reserved", "/triton_python_backend_shm_region_x"), ("reserved without slash", "triton_python_backend_shm_region_x"), ("not ASCII", f"/{PREFIX}_é"), ("read only", f"/{PREFIX}_empty"),
    ]:
        yield f"key: {name}", [register(place(key=key, byte_size=64)), rpc("Register", name="g", key=key, byte_size=64), status()]


def sizes():
    """Ranges of objects."""
    top = 2**64 - 1
    for name, offset, size in [
        ("all", 0, SIZE), ("one more", 0, SIZE + 1), ("last byte", SIZE - 1, 1), ("behind the end", SIZE, 1), ("far behind", 10**15, 64), ("over the end", 4096, SIZE), ("zero", 0, 0), ("zero at the end", SIZE, 0),
        ("not aligned", 100, 64), ("aligned", 4096, 64), ("huge size", 0, 2**63), ("huge offset", 2**63, 64), ("sum overflows", top, 2), ("largest", 0, top), ("beyond 64 bits", 0, top + 1),
    ]:
        calls = [register(place(offset=offset, byte_size=size)), status()]
        yield f"size: {name}", calls + ([rpc("Register", name="g", key=OBJECT, offset=offset, byte_size=size)] if size <= top else [])


def inputs():
    """Places of inputs."""
    data = {"data": NUMBERS.tolist()}
    both = [("http", simple, strings), ("grpc", g_simple, g_strings)]
    for protocol, call, text in both:
        for name, parameters in [
            ("plain", at(0)), ("no offset", at(None)), ("elsewhere", at(64)), ("unknown", at(region="nothing")), ("no size", at(size=None)), ("no region", at(region=None)), ("only an offset", at(region=None, size=None)),
            ("size zero", at(size=0)), ("too small", at(size=60)), ("too large", at(size=68)), ("at the end", at(SIZE - 64)), ("over the end", at(SIZE - 60)), ("behind the end", at(SIZE)), ("far behind", at(10**9)), ("sum overflows", at(2**63 - 1, 2**63 - 1)), ("offset overflows", at(2**63 - 1)),
            ("empty name", at(region="")), ("size overflows", at(32, 2**63 - 1)),
        ]:
            yield f"input, {protocol}: {name}", [REGISTER, call(parameters)]
        for name, parameters in [("region a number", at(region=7)), ("size a string", at(size="64")), ("offset a string", at("0")), ("size negative", at(size=-64)), ("offset negative", at(-64)), ("size a fraction", at(size=64.5)), ("size true", at(size=True))]:
            yield f"input, {protocol}: {name}", [REGISTER, call(parameters)]
        yield f"input, {protocol}: not registered", [call()]
        yield f"input, {protocol}: unknown region and unknown model", [infer("", "no_such_model", {"inputs": [tensor("I", "INT32", [1], **at())]}) if protocol == "http" else grpc_infer("", "no_such_model", [grpc_tensor("I", "INT32", [1], at())])]
        yield f"input, {protocol}: batch of two", [REGISTER, call(at(0, 128), at(4096, 128), rows=2)]
        yield f"input, {protocol}: after unregistering", [REGISTER, unregister("r"), call()]
        for name, parameters, elements in [
            ("good", at(1024, 20), 3), ("two of three", at(1024, 20), 2), ("four of three", at(1024, 20), 4), ("cut in a string", at(1024, 19), 3), ("cut in a length", at(1024, 13), 3), ("empty", at(1024, 0), 3), ("one", at(1024, 7), 1), ("of lengths", at(0, 64), 3),
        ]:
            yield f"strings, {protocol}: {name}", [REGISTER, text(parameters, elements)]
    yield "input, http: size and offset overflow", [REGISTER, simple(at(32, 2**64 - 32))]
    yield "output, http: size and offset overflow", [REGISTER, simple(outputs=[output("OUTPUT0", **at(32, 2**64 - 32))])]
    yield "input, http: data too", [REGISTER, infer("", "simple", {"inputs": [tensor("INPUT0", "INT32", [1, 16], NUMBERS.tolist(), **at()), tensor("INPUT1", "INT32", [1, 16], **at(64))]})]
    yield "input, http: binary data too", [REGISTER, simple(at(binary_data_size=64))]
    yield "input, http: mixed with data", [REGISTER, infer("", "simple", {"inputs": [tensor("INPUT0", "INT32", [1, 16], **data), tensor("INPUT1", "INT32", [1, 16], **at(64))]})]
    yield "input, http: mixed with binary data", [REGISTER, infer("", "simple", {"inputs": [tensor("INPUT0", "INT32", [1, 16], binary_data_size=64), tensor("INPUT1", "INT32", [1, 16], **at(64))]}, NUMBERS.tobytes())]
    yield "input, http: wrong shape", [REGISTER, infer("", "simple", {"inputs": [tensor("INPUT0", "INT32", [1, 8], **at(0, 32)), tensor("INPUT1", "INT32", [1, 16], **at(64))]})]
    yield "input, http: wrong datatype", [REGISTER, infer("", "simple", {"inputs": [tensor("INPUT0", "FP32", [1, 16], **at()), tensor("INPUT1", "INT32", [1, 16], **at(64))]})]
    yield "input, http: with an id", [REGISTER, simple(at(region="nothing"), id="seven"), simple(at(size=60), id="seven")]
    contents = grpc_tensor("INPUT0", "INT32", [1, 16], at(), int_contents=NUMBERS.tolist())
    second = grpc_tensor("INPUT1", "INT32", [1, 16], at(64))
    yield "input, grpc: contents too", [REGISTER, grpc_infer("", "simple", [contents, second])]
    yield "input, grpc: raw contents too", [REGISTER, g_simple(raw=[NUMBERS.tobytes()])]
    yield "input, grpc: mixed with raw contents", [REGISTER, grpc_infer("", "simple", [grpc_tensor("INPUT0", "INT32", [1, 16]), second], [NUMBERS.tobytes()]), grpc_infer("", "simple", [grpc_tensor("INPUT0", "INT32", [1, 16], at()), grpc_tensor("INPUT1", "INT32", [1, 16])], [NUMBERS.tobytes()])]
    yield "input, grpc: with an id", [REGISTER, g_simple(at(region="nothing"), id="seven"), g_simple(at(size=60), id="seven")]


def outputs():
    """Places of outputs."""
    def http_outputs(**wanted):
        return [output(name, **parameters) for name, parameters in wanted.items()]

    def grpc_outputs(**wanted):
        return list(wanted.items())

    for protocol, call, text, wish in [("http", simple, strings, http_outputs), ("grpc", g_simple, g_strings, grpc_outputs)]:
        for name, parameters in [
            ("plain", at(2048)), ("larger than needed", at(2048, 100)), ("too small", at(2048, 32)), ("size zero", at(2048, 0)), ("unknown", at(region="nothing")), ("no size", at(2048, None)), ("no region", at(2048, 64, None)), ("no offset", at(None)),
            ("over the end", at(SIZE - 60)), ("behind the end", at(SIZE)), ("sum overflows", at(2**63 - 1, 2**63 - 1)), ("classified", at(2048, classification=2)), ("binary", at(2048, binary_data=True)), ("not binary", at(2048, binary_data=False)),
            ("size negative", at(2048, -64)), ("size a string", at(2048, "64")), ("region a number", at(2048, region=7)),
        ]:
            yield f"output, {protocol}: {name}", [REGISTER, call(outputs=wish(OUTPUT0=parameters))]
        yield f"output, {protocol}: both", [REGISTER, call(outputs=wish(OUTPUT0=at(2048), OUTPUT1=at(2112)))]
        yield f"output, {protocol}: one of two", [REGISTER, call(outputs=wish(OUTPUT0={}, OUTPUT1=at(2048)))]
        yield f"output, {protocol}: overlapping", [REGISTER, call(outputs=wish(OUTPUT0=at(2048), OUTPUT1=at(2080))), ]
        yield f"output, {protocol}: over its input", [REGISTER, call(outputs=wish(OUTPUT0=at(0))), call(outputs=wish(OUTPUT0=at(2048)))]
        yield f"output, {protocol}: batch of two", [REGISTER, call(at(0, 128), at(0, 128), wish(OUTPUT0=at(2048, 128)), rows=2)]
        yield f"output, {protocol}: unknown name", [REGISTER, call(outputs=wish(NOTHING=at(2048)))]
        yield f"output, {protocol}: not aligned", [REGISTER, call(at(1), at(64), wish(OUTPUT0=at(2049)))]
        yield f"output, {protocol}: with an id", [REGISTER, call(outputs=wish(OUTPUT0=at(2048, 32)), id="seven")]
        yield f"strings out, {protocol}: plain", [REGISTER, text(at(1024, 20), 3, wish(OUTPUT0=at(2048, 64)))]
        yield f"strings out, {protocol}: exactly", [REGISTER, text(at(1024, 20), 3, wish(OUTPUT0=at(2048, 20)))]
        yield f"strings out, {protocol}: too small", [REGISTER, text(at(1024, 20), 3, wish(OUTPUT0=at(2048, 19)))]


ROWS = [Row(name, calls) for part in (life, bodies, keys, sizes, inputs, outputs) for name, calls in part()]

NO_GPU = "failed to register CUDA shared memory region: 'r', GPUs not supported"
EXTRA = "unexpected additional input data for model 'simple'"
ARGS = "failed to register shared memory region 'r': invalid args"
G_ARGS = ARGS.replace("'r'", "'g'")
OVERFLOW = (
    "Integer overflow detected: byte_size (18446744073709551584) + offset (32) exceeds maximum value (18446744073709551615) "
    "for region 'r'"
)
UNKNOWN = "Request for unknown model: 'no_such_model' is not found"
RESERVED = "cannot register shared memory region '{}' - invalid shm key '{}triton_python_backend_shm_region_x'"
"""The text of newer versions of Triton; the recorded 2.51 opens such an object."""

DIFFERENCES = {
    # Triton has closed the object by this call; here one object may be registered under any number of names.
    "same object under two names": {1: (200, ""), 2: ("OK", '"s"')},
    "key: without slash": {1: ("OK", "{}"), 2: (200, '"g"')},
    "key: two slashes": {1: ("OK", "{}"), 2: (200, '"g"')},
    "key: not ASCII": {1: ("OK", "{}"), 2: (200, '"g"')},
    "size: all": {2: ("OK", "{}")},
    "size: aligned": {2: ("OK", "{}")},
    # Clients escape names in paths; Triton does not unescape them, so that a request must use the escaped name.
    "name with escapes": {1: (200, '"a b/c"'), 2: ("OK", '"a b/c"')},
    # The texts of JSON parsers differ.
    "body: empty": {0: (500, "failed to parse the request JSON buffer: EOF")},
    "body: no JSON": {0: (500, "failed to parse the request JSON buffer: EOF")},
    # Later versions of Triton have a more precise text than "invalid args".
    "cuda body: good": {0: (400, NO_GPU)},
    "cuda by grpc": {
        0: ("INVALID_ARGUMENT", NO_GPU),
        1: ("INVALID_ARGUMENT", "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"),
        2: ("INVALID_ARGUMENT", "GPUs not supported"),
    },
    "key: reserved": {0: (400, RESERVED.format("r", "/")), 1: ("INVALID_ARGUMENT", RESERVED.format("g", "/"))},
    "key: reserved without slash": {0: (400, RESERVED.format("r", "")), 1: ("INVALID_ARGUMENT", RESERVED.format("g", ""))},
    # Triton cuts the key at the NUL byte and opens the object that the first part names.
    "key: NUL": {0: (500, "Unable to open shared memory region"), 1: ("INTERNAL", "Unable to open shared memory region"), 2: (200, "[]")},
    # A region may begin at any byte, and an empty region is invalid; Triton returns the kernel's error for unaligned offsets.
    "size: last byte": {0: (200, ""), 1: (200, '"offset":8191,"byte_size":1'), 2: ("OK", "{}")},
    "size: not aligned": {0: (200, ""), 1: (200, '"offset":100,"byte_size":64'), 2: ("OK", "{}")},
    "size: zero": {0: (400, ARGS), 2: ("INVALID_ARGUMENT", G_ARGS)},
    "size: zero at the end": {0: (400, ARGS), 2: ("INVALID_ARGUMENT", G_ARGS)},
    "size: sum overflows": {0: (400, ARGS), 2: ("INVALID_ARGUMENT", G_ARGS)},
    # Later versions of Triton name the overflow.
    "input, http: size and offset overflow": {1: (400, OVERFLOW)},
    "output, http: size and offset overflow": {1: (400, OVERFLOW)},
    # An unknown model is 400 here, as for all requests; this version of Triton answers 404.
    "input, http: unknown region and unknown model": {0: (400, UNKNOWN)},
    "input, grpc: unknown region and unknown model": {0: ("INVALID_ARGUMENT", UNKNOWN)},
    # Triton ignores the additional raw contents.
    "input, grpc: raw contents too": {1: ("INVALID_ARGUMENT", EXTRA)},
    # Triton reads a negative size as a very large one; later versions refuse the overflow.
    "output, grpc: size negative": {1: ("INVALID_ARGUMENT", "Integer overflow detected: byte_size"), "written": (None, "")},
}
"""Deliberate differences by row and call number: the status, and a text that the answer contains. `written`: this server must
not write memory that Triton writes."""
