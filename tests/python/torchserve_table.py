"""Requests to TorchServe's endpoints, whose answers by a real TorchServe are in `golden_torchserve.json`."""

from dataclasses import dataclass, field

JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=limit"}


@dataclass(frozen=True)
class Rest:
    """One HTTP request. `at` is the listener; with `until` it is repeated until it is answered with this status."""

    path: str
    body: bytes | str | None = None
    headers: dict = field(default_factory=dict)
    method: str = ""
    at: str = "inference"
    delay_s: float = 0
    until: int = 0
    parts: bool = False


@dataclass(frozen=True)
class Grpc:
    """One call. `many` are the requests of a stream of them; `token` goes as metadata."""

    call: str
    request: dict = field(default_factory=dict)
    many: tuple = ()
    metadata: tuple = ()


@dataclass(frozen=True)
class Wait:
    """Nothing is asked for a while."""

    seconds: float


@dataclass(frozen=True)
class Row:
    """Requests, one after the other or all at once, to a server of a setup. With `logs` the lines of the row are compared;
    with `scrape` these families of /metrics."""

    name: str
    requests: tuple
    setup: str = "main"
    at_once: bool = False
    logs: bool = False
    scrape: tuple = ()


@dataclass(frozen=True)
class Setup:
    """How a server is started."""

    stores: tuple
    properties: str = ""
    options: tuple = ("--ncs", "--disable-token-auth", "--enable-model-api")
    torch: bool = False


LOADED = (
    "load_models=" + ",".join(f"{name}.mar" for name in (
        "echo", "entry", "acting", "facts", "metered", "batched", "streaming", "refusing", "hostile", "slow", "based",
        "counting",
    ))
    + "\nmodel_metrics_auto_detect=true\n"
)

SETUPS = {
    "main": Setup(("start", "later"), LOADED),
    "prometheus": Setup(
        ("start",),
        "load_models=metered.mar,echo.mar\nmetrics_mode=prometheus\nmodel_metrics_auto_detect=true\n",
    ),
    "legacy": Setup(("start",), "load_models=metered.mar\nmetrics_mode=legacy\nmodel_metrics_auto_detect=true\n"),
    "strict": Setup(("start",), "load_models=metered.mar,echo.mar\n", ("--ncs", "--disable-token-auth")),
    "tokens": Setup(("start",), "load_models=echo.mar\n", ("--ncs", "--enable-model-api")),
    "limits": Setup(
        ("start", "later"),
        "load_models=acting.mar,slow.mar\nmax_request_size=1000\nmax_response_size=1000\njob_queue_size=1\n"
        "default_response_timeout=3\n"
        'models={"slow": {"1.0": {"defaultVersion": true, "marName": "slow.mar", "minWorkers": 2, "maxWorkers": 3,'
        ' "batchSize": 2, "maxBatchDelay": 50, "responseTimeout": 60}}}\n',
    ),
    "body": Setup(("envelope",), "load_models=all\nservice_envelope=body\n"),
    "json": Setup(("envelope",), "load_models=all\nservice_envelope=json\n"),
    "kserve": Setup(("envelope",), "load_models=all\nservice_envelope=kserve\n"),
    "kservev2": Setup(("envelope",), "load_models=all\nservice_envelope=kservev2\n"),
    "torch": Setup(("torch",), "load_models=all\n", torch=True),
    "oip": Setup(("start",), "load_models=echo.mar\nts_open_inference_protocol=true\n"),
    "undecoded": Setup(("start",), "load_models=echo.mar\ndecode_input_request=false\n"),
    "snapshot": Setup(
        ("start", "later"),
        'model_snapshot={"name": "startup.cfg", "modelCount": 2, "models": {'
        '"echo": {"1.0": {"defaultVersion": true, "marName": "echo.mar", "minWorkers": 1, "maxWorkers": 2,'
        ' "batchSize": 3, "maxBatchDelay": 20, "responseTimeout": 60}},'
        '"later": {"1.0": {"defaultVersion": false, "marName": "later.mar", "minWorkers": 1, "maxWorkers": 1,'
        ' "batchSize": 1, "maxBatchDelay": 100, "responseTimeout": 120},'
        ' "2.0": {"defaultVersion": true, "marName": "later2.mar", "minWorkers": 1, "maxWorkers": 1,'
        ' "batchSize": 1, "maxBatchDelay": 100, "responseTimeout": 120}}}}\n',
    ),
}


def multipart(*parts) -> bytes:
    """The body of a form: name, type and content of each part."""
    made = []
    for name, kind, content in parts:
        head = f'--limit\r\nContent-Disposition: form-data; name="{name}"; filename="{name}.bin"\r\n'
        made.append(head.encode() + (f"Content-Type: {kind}\r\n" if kind else "").encode() + b"\r\n" + content)
    return b"\r\n".join(made) + b"\r\n--limit--\r\n"


def managed(path: str, method: str = "GET", body=None, **more) -> Rest:
    """A request to the management listener."""
    return Rest(path, body, method=method, at="management", **more)


def one(name: str, *requests, **more) -> Row:
    """A row."""
    return Row(name, requests, **more)


def calls(*made) -> Rest:
    """Calls of metrics, see `metered/handler.py`."""
    import json

    return Rest("/predictions/metered", json.dumps(made), JSON)


INFERENCE = [
    one("ping", Rest("/ping"), logs=True),
    one("ping: other methods", Rest("/ping", b"", method="POST"), Rest("/ping", method="HEAD"), Rest("/ping/more")),
    one("predict: bytes", Rest("/predictions/echo", b"\x00\x01\xff"), logs=True),
    one("predict: no body", Rest("/predictions/echo", b""), Rest("/predictions/echo", method="GET")),
    one("predict: text", Rest("/predictions/echo", "grün".encode(), TEXT)),
    one("predict: text with a charset", Rest("/predictions/echo", "a", {"Content-Type": "text/plain; charset=utf-8"})),
    one("predict: text that is none", Rest("/predictions/echo", b"\xff\xfe", TEXT)),
    one("predict: JSON", Rest("/predictions/echo", '{"a": [1, 2.5, null, true]}', JSON)),
    one("predict: JSON with a charset", Rest("/predictions/echo", "[1]", {"Content-Type": "application/json; charset=utf-8"})),
    one("predict: JSON that is none", Rest("/predictions/echo", "{", JSON)),
    one("predict: octets", Rest("/predictions/echo", b"1", {"Content-Type": "application/octet-stream"})),
    one("predict: form", Rest("/predictions/echo", "a=1&b=two+words&b=again&c=%C3%BC", FORM)),
    one("predict: multipart", Rest("/predictions/echo", multipart(
        ("data", "", b"\x00raw"), ("text", "text/plain", b"words"), ("json", "application/json", b"[1]")), MULTIPART)),
    one("predict: multipart that is broken", Rest("/predictions/echo", b"--limit\r\nnonsense", MULTIPART)),
    one("predict: query", Rest("/predictions/echo?data=1&more=x", b"body")),
    one("predict: query without a body", Rest("/predictions/echo?data=1&data=2", method="GET")),
    one("predict: methods", *(Rest("/predictions/echo", b"x", method=m) for m in ("PUT", "PATCH", "DELETE"))),
    one("predict: version", Rest("/predictions/echo/1.0", b"x"), Rest("/predictions/facts/1.11", b""), logs=True),
    one("predict: no such version", Rest("/predictions/echo/9.0", b"x"), logs=True),
    one("predict: no such model", Rest("/predictions/absent", b"x"), Rest("/predictions/absent/1.0", b"x"), logs=True),
    one("predict: no model", Rest("/predictions", b"x"), Rest("/predictions/", b"x")),
    one("predict: more path", Rest("/predictions/facts/1.11/more/path?x=1", b"x", {"X-Test": "a"})),
    one("predict: legacy path", Rest("/echo/predict", b"x"), Rest("/echo/1.0/predict", b"x")),
    one("predict: v1", Rest("/v1/models/echo:predict", '{"instances": [[1]]}', JSON), Rest("/v1/models/absent:predict", "{}", JSON)),
    one("predict: v2", Rest("/v2/models/echo/infer", '{"inputs": []}', JSON)),
    one("predict: invocations", Rest("/invocations?model_name=echo", b"x"), Rest("/models/echo/invoke", b"x")),
    one("predict: invocations without a name", Rest("/invocations", b"x")),
    one("predict: entry point", Rest("/predictions/entry", b"x")),
    one("paths: unknown", Rest("/"), Rest("/unknown"), Rest("/models"), Rest("/metrics"), logs=True),
    one("paths: of OPTIONS", Rest("/predictions/echo", method="OPTIONS")),
    one("headers", Rest("/predictions/facts", b"x", {"X-Test": "Value", "x-lower": "1", "X-Empty": ""})),
    one("headers: request id", Rest("/predictions/facts", b"x", {"x-request-id": "mine"})),
    one("context", Rest("/predictions/facts", b"first")),
    one("answer: content type", Rest("/predictions/acting", '{"content_type": "text/csv", "answer": "a,b"}', JSON)),
    one("answer: headers", Rest("/predictions/acting", '{"headers": {"X-One": "1", "x-two": "zwei"}}', JSON)),
    one("answer: status", Rest("/predictions/acting", '{"status": [418, "I am a teapot"]}', JSON), logs=True),
    one("answer: status 201", Rest("/predictions/acting", '{"status": [201, "Made"], "answer": "new"}', JSON), logs=True),
    one("answer: status 302", Rest("/predictions/acting", '{"status": [302, "Found"], "headers": {"Location": "/x"}}', JSON), logs=True),
    one("answer: status of all", Rest("/predictions/acting", '{"all": [503, "not now"]}', JSON), logs=True),
    one("answer: bytes", Rest("/predictions/acting", '{"bytes": "0001ff"}', JSON)),
    one("answer: object", Rest("/predictions/acting", '{"answer": {"a": [1, {"b": null}], "ü": 0.1}}', JSON)),
    one("answer: list, number, true", *(Rest("/predictions/acting", f'{{"answer": {a}}}', JSON) for a in ("[]", "1.50", "true", "null"))),
    one("answer: nothing JSON can say", Rest("/predictions/acting", '{"strange": true}', JSON)),
    one("answer: megabytes", Rest("/predictions/acting", '{"count": 2000000}', JSON)),
    one("stream", Rest("/predictions/streaming", b"3", parts=True), logs=True),
    one("stream: one part", Rest("/predictions/streaming", b"0", parts=True)),
    one("stream: fails", Rest("/predictions/streaming", b"-1")),
    one("explain", Rest("/explanations/based", "[1, 2]", JSON), Rest("/explanations/based/1.0", "[1]", JSON)),
    one("explain: not with this handler", Rest("/explanations/echo", b"x"), Rest("/explanations/absent", b"x")),
    one("explain: v1", Rest("/v1/models/based:explain", "[1]", JSON)),
    one("base handler", Rest("/predictions/based", "[1, 2.5]", JSON), logs=True),
    one("base handler: fails", Rest("/predictions/based", "5", JSON)),
    one("batch: of three", *(Rest("/predictions/batched", b"x") for _ in range(3)), at_once=True, logs=True),
    one("batch: of four", *(Rest("/predictions/batched", b"x") for _ in range(4)), at_once=True, logs=True),
    one("batch: statuses", Rest("/predictions/batched", b"418"), Rest("/predictions/batched", b"x", delay_s=0.2), at_once=True),
]

SEQUENCES = [
    one("sequence: steps", *(Rest("/predictions/counting", b"x", {"ts_request_sequence_id": "one"}) for _ in range(3))),
    one("sequence: two", Wait(6), *(Rest("/predictions/counting", b"x", {"ts_request_sequence_id": name}) for name in ("a", "b", "a", "b"))),
    one("sequence: three at most two", Rest("/predictions/counting", b"x", {"ts_request_sequence_id": "c"})),
    one("sequence: no id", Wait(6), Rest("/predictions/counting", b"x")),
]

FAILURES = [
    *(one(f"refuse: {kind}", Rest("/predictions/refusing", kind), logs=True)
      for kind in ("exception", "client's", "default", "memory", "cuda", "any", "quotes")),
    *(one(f"hostile: returns {kind}", Rest("/predictions/hostile", kind))
      for kind in ("none", "text", "dict", "short", "long", "tuple", "object", "nan", "nothing", "number")),
    one("hostile: raises", Rest("/predictions/hostile", b"raise"), Rest("/predictions/hostile", b"well"), logs=True),
    *(one(f"hostile: {kind}", Rest("/predictions/hostile", kind), Rest("/ping"), Rest("/predictions/hostile", b"well", until=200))
      for kind in ("system exit", "exit", "kill", "hang")),
    *(one(f"hostile: {kind}", Rest("/predictions/hostile", kind), Rest("/predictions/hostile", b"well", until=200))
      for kind in ("flood", "bytes", "stderr")),
    one("queue: full", *(Rest("/predictions/slow", b"700", delay_s=n * 0.06) for n in range(5)), at_once=True, logs=True),
]

DIMENSIONS = [{"dim": ["Kind", "a"]}]
METRICS = [
    one("metrics: counter", calls(["add_counter", ["C1", 1]], ["add_counter", ["C1", 2.5]], ["add_counter", ["C1", 0]]), logs=True),
    one("metrics: counter with dimensions", calls(["add_counter", ["C2", 1], {"dimensions": DIMENSIONS}]), logs=True),
    one("metrics: counter with an index", calls(["add_counter", ["C3", 1, 0]], ["add_counter", ["C3", 1, 7]]), logs=True),
    one("metrics: counter falls", calls(["add_counter", ["C4", -1]])),
    one("metrics: time", calls(["add_time", ["T1", 5.5]], ["add_time", ["T1", 5, None, "s"]], ["add_time", ["T2", 1, 0, "s"]]), logs=True),
    one("metrics: time in a unit that is none", calls(["add_time", ["T3", 1, None, "h"]])),
    one("metrics: time as histogram", calls(["add_time", ["T4", 1], {"metric_type": "$HISTOGRAM"}]), logs=True),
    one("metrics: size", *(calls(["add_size", [f"S{unit}", 3.25, None, unit]]) for unit in ("MB", "kB", "GB", "B")), logs=True),
    one("metrics: size in a unit that is none", calls(["add_size", ["S5", 1, None, "TB"]])),
    one("metrics: percent", calls(["add_percent", ["P1", 12.5]], ["add_percent", ["P1", 50, 0, DIMENSIONS]]), logs=True),
    one("metrics: error", calls(["add_error", ["E1", 1]], ["add_error", ["E2", 1, DIMENSIONS]]), logs=True),
    one("metrics: any", calls(
        ["add_metric", ["M1", 1, "tokens"]], ["add_metric", ["M2", 2, "count", None, DIMENSIONS, "$GAUGE"]],
        ["add_metric", ["M3", 3, ""]]), logs=True),
    one("metrics: numbers", *(calls(["add_metric", [f"N{place}", value, "count", None, [], "$GAUGE"]])
        for place, value in enumerate((10000000, 12345678.9, 0.00001234, 0.001, 1e-3, 123456, -2, 0.1, 1e15, 4294967296))), logs=True),
    one("metrics: numbers that were lost", calls(
        ["add_metric", ["Lost1", "$NAN", "count", None, [], "$GAUGE"]],
        ["add_metric", ["Lost2", "$INF", "count", None, [], "$GAUGE"]],
        ["add_metric", ["Lost3", 1e16, "count", None, [], "$GAUGE"]]), logs=True),
    one("metrics: dimensions that were lost", calls(
        ["add_metric", ["Lost4", 1, "count", None, [{"dim": ["Host", "http://a:80"]}], "$GAUGE"]]), logs=True),
    one("metrics: a comma in a dimension", calls(
        ["add_metric", ["Lost6", 1, "count", None, [{"dim": ["Host", "a,b"]}], "$GAUGE"]]), logs=True),
    one("metrics: unit that was lost", calls(["add_metric", ["Lost5", 1, "tokens/s", None, [], "$GAUGE"]]), logs=True),
    one("metrics: in the cache", calls(
        ["add_metric_to_cache", ["K1", "count", ["ModelName", "Kind"]]],
        ["get_and_update", ["K1", "$COUNTER", 2, ["metered", "x"]]],
        ["get_metric", ["K1", "$GAUGE"]], ["get_metric", ["nothing"]], ["get_metric", ["K1"]]), logs=True),
    one("metrics: in the cache, with ids", calls(["kept", [5, ["metered", "x"]]], ["kept_with_ids", [6, ["metered", "y"]]]), logs=True),
    one("metrics: wrong number of values", calls(["kept", [5, ["metered"]]], ["kept", [5]])),
    one("metrics: wrong types", calls(
        ["add_metric_to_cache", [5, "count"]], ["add_metric_to_cache", ["W", 5]],
        ["add_metric_to_cache", ["W", "count", "ModelName"]], ["add_metric_to_cache", ["W", "count", [], "gauge"]],
        ["add_counter", ["W", "one"]])),
    one("metrics: update of old", calls(
        ["add_metric_to_cache", ["U1", "count", ["ModelName"], "$GAUGE"]],
        ["update", ["U1", "$GAUGE", 4], {"dimensions": DIMENSIONS}]), logs=True),
    one("metrics: store of old", calls(["store", [
        ["add_counter", "O1", 1], ["add_time", "O2", 2], ["add_size", "O3", 3], ["add_percent", "O4", 4], ["add_error", "O5", "bad"],
        ["add_metric", "O6", 6, "count"]]]), logs=True),
    one("metrics: of the start", calls(), logs=True),
    one("metrics: printed", calls(
        ["print", ["[METRICS]Printed.Count:3|#Kind:a|#type:COUNTER|#hostname:h,1700000000"]],
        ["log", ["[METRICS]Logged.Count:4|#Kind:a|#type:GAUGE|#hostname:h,1700000000,some-id"]],
        ["print", ["[METRICS]nonsense"]]), logs=True),
    one("metrics: ts names", calls(["add_counter", ["Requests2XX", 1]]), logs=True),
]
NO_DIMENSIONS = [one("metrics: dimensions None", calls(["add_counter", ["D1", 1], {"dimensions": None}], ["add_time", ["D2", 1], {"dimensions": None}]))]

SHOWN = ("PC", "PG", "PH", "KeptGauge", "StartTime", "ts_inference_requests_total", "Requests2XX", "Requests4XX")
PROMETHEUS = [
    one("scrape: of the start", Rest("/ping"), setup="prometheus", scrape=SHOWN),
    one("scrape: models' own", calls(
        ["add_counter", ["PC", 1], {"dimensions": DIMENSIONS}], ["add_counter", ["PC", 2.5], {"dimensions": DIMENSIONS}],
        ["add_metric", ["PG", 7, "count", None, [], "$GAUGE"]], ["add_metric", ["PG", 8, "count", None, [], "$GAUGE"]],
        ["add_metric", ["PH", 0.3, "count", None, [], "$HISTOGRAM"]]), setup="prometheus", scrape=SHOWN),
    one("scrape: versions", Rest("/predictions/echo", b"x"), Rest("/predictions/echo/1.0", b"x"), Rest("/predictions/absent", b"x"),
        setup="prometheus", scrape=SHOWN),
    one("scrape: names", *(Rest(f"/metrics?{query}", at="metrics") for query in
        ("name[]=Requests2XX", "name%5B%5D=PC&name%5B%5D=PG", "name[]=PH", "name[]=PH_sum", "name[]=absent")), setup="prometheus"),
    one("scrape: paths", Rest("/", at="metrics"), Rest("/unknown", at="metrics"), Rest("/metrics/more?name[]=absent", at="metrics"),
        Rest("/metrics?name[]=absent", b"", at="metrics"), setup="prometheus"),
    one("scrape: legacy", Rest("/predictions/metered", "[]", JSON), calls(["add_counter", ["LC", 1]]), setup="legacy",
        scrape=("",), logs=True),
    one("scrape: mode log", Rest("/metrics", at="metrics")),
    one("not detected", calls(["add_counter", ["Undeclared", 1]], ["add_time", ["HandlerTime", 3.5]]), setup="strict", logs=True),
]

MANAGEMENT = [
    one("models: list", managed("/models"), managed("/models?limit=2"), managed("/models?limit=2&next_page_token=2")),
    one("models: list, wrong", managed("/models?limit=0"), managed("/models?limit=x"), managed("/models?next_page_token=99")),
    one("models: describe", managed("/models/acting"), managed("/models/acting/1.0"), managed("/models/acting/all")),
    one("models: describe more", managed("/models/facts"), managed("/models/batched"), managed("/models/counting")),
    one("models: describe, customized", managed("/models/facts?customized=true"), managed("/models/acting?customized=true")),
    one("models: describe, wrong", managed("/models/absent"), managed("/models/acting/9.0"), managed("/models/absent/all")),
    one("models: methods", managed("/models/echo", "POST", b""), managed("/models", "PUT", b""), managed("/unknown"), managed("/")),
    one("register: without workers", managed("/models?url=later.mar&initial_workers=0", "POST", b""), managed("/models/later"),
        Rest("/predictions/later", b"x"), managed("/models/later", "DELETE"), managed("/models/later")),
    one("register: as many workers as by default", managed("/models?url=later.mar", "POST", b""),
        Rest("/predictions/later", b"x"), managed("/models/later", "DELETE")),
    one("register: with workers", managed("/models?url=later.mar&initial_workers=1&synchronous=true", "POST", b""),
        Rest("/predictions/later", b"x"), managed("/models?url=later.mar&initial_workers=1", "POST", b""),
        managed("/models/later", "DELETE"), Rest("/predictions/later", b"x")),
    one("register: everything", managed("/models?url=later.mar&model_name=renamed&batch_size=3&max_batch_delay=25&initial_workers=1"
        "&synchronous=true&response_timeout=7&startup_timeout=70&handler=functions:answer&runtime=python3", "POST", b""),
        managed("/models/renamed"), Rest("/predictions/renamed", b"x"), managed("/models/renamed", "DELETE")),
    one("register: as JSON", managed("/models", "POST", '{"url": "later.mar", "model_name": "json", "initial_workers": 1,'
        ' "synchronous": true, "batch_size": 2}', headers=JSON), Rest("/predictions/json", b"x"), managed("/models/json", "DELETE")),
    one("register: not waiting", managed("/models?url=later.mar&initial_workers=1&synchronous=false", "POST", b""),
        Rest("/predictions/later", b"x", until=200), managed("/models/later", "DELETE")),
    one("register: versions", managed("/models?url=later.mar&initial_workers=1&synchronous=true", "POST", b""),
        managed("/models?url=later2.mar&initial_workers=1&synchronous=true", "POST", b""),
        Rest("/predictions/later", b"x"), Rest("/predictions/later/2.0", b"x"), managed("/models/later/all"), managed("/models"),
        managed("/models/later", "DELETE"), managed("/models/later/2.0/set-default", "PUT", b""), Rest("/predictions/later", b"x"),
        managed("/models/later/1.0", "DELETE"), managed("/models/later/9.0/set-default", "PUT", b""),
        managed("/models/absent/1.0/set-default", "PUT", b""), managed("/models/later/2.0", "DELETE"), managed("/models/later")),
    one("register: tar.gz", managed("/models?url=zipped.tar.gz&initial_workers=1&synchronous=true", "POST", b""),
        Rest("/predictions/zipped", b"x"), managed("/models/zipped", "DELETE")),
    one("register: wrong", managed("/models", "POST", b""), managed("/models?url=absent.mar", "POST", b""),
        managed("/models?url=../echo.mar", "POST", b""), managed("/models?url=echo.mar&batch_size=x", "POST", b""),
        managed("/models?url=later.mar&runtime=perl", "POST", b""), managed("/models", "POST", "{", headers=JSON)),
    one("register: unknown host", managed("/models?url=http://127.0.0.1:1/a.mar", "POST", b"")),
    one("register: no file of this name", managed("/models?url=file:///nowhere/a.mar", "POST", b"")),
    one("register: a handler that cannot be loaded", managed("/models?url=broken.mar&initial_workers=1&synchronous=true", "POST", b""),
        managed("/models/broken"), managed("/models/broken", "DELETE")),
    one("register: two classes", managed("/models?url=two_classes.mar&initial_workers=1&synchronous=true", "POST", b""),
        managed("/models/two_classes", "DELETE")),
    one("scale", managed("/models/echo?min_worker=2&max_worker=2&synchronous=true", "PUT", b""), managed("/models/echo"),
        managed("/models/echo?min_worker=1&max_worker=1&synchronous=true", "PUT", b""), Rest("/predictions/echo", b"x")),
    one("scale: to nothing", managed("/models/echo?min_worker=0&max_worker=0&synchronous=true", "PUT", b""),
        Rest("/predictions/echo", b"x"), Rest("/ping"),
        managed("/models/echo?min_worker=1&synchronous=true", "PUT", b""), Rest("/predictions/echo", b"x")),
    one("scale: not waiting", managed("/models/echo?min_worker=1", "PUT", b""), managed("/models/echo/1.0?min_worker=1&synchronous=true", "PUT", b"")),
    one("scale: wrong", managed("/models/echo?min_worker=3&max_worker=2", "PUT", b""), managed("/models/absent?min_worker=1", "PUT", b""),
        managed("/models/echo/9.0?min_worker=1", "PUT", b""), managed("/models/echo?min_worker=x", "PUT", b"")),
    one("unregister: wrong", managed("/models/absent", "DELETE"), managed("/models/echo/9.0", "DELETE")),
    one("v1 readiness", managed("/v1/models/echo"), managed("/v1/models/absent"), Rest("/v1/models/echo")),
    one("api description", managed("/", "OPTIONS"), managed("/api-description"), Rest("/", method="OPTIONS"), Rest("/api-description")),
    one("token without tokens", managed("/token?type=inference")),
]

SMALL = [
    one("model api off", managed("/models?url=echo.mar", "POST", b""), managed("/models/echo", "DELETE"), managed("/models"),
        managed("/models/echo?min_worker=1&synchronous=true", "PUT", b""), setup="strict"),
    one("tokens: none given", Rest("/predictions/echo", b"x"), Rest("/ping"), managed("/models"), Rest("/metrics", at="metrics"),
        setup="tokens"),
    one("tokens: given", Rest("/predictions/echo", b"x", {"Authorization": "Bearer INFERENCE"}),
        Rest("/ping", headers={"Authorization": "Bearer INFERENCE"}),
        managed("/models", headers={"Authorization": "Bearer MANAGEMENT"}), setup="tokens"),
    one("tokens: wrong ones", Rest("/predictions/echo", b"x", {"Authorization": "Bearer MANAGEMENT"}),
        Rest("/predictions/echo", b"x", {"Authorization": "Bearer wrong"}), Rest("/predictions/echo", b"x", {"Authorization": "INFERENCE"}),
        managed("/models", headers={"Authorization": "Bearer INFERENCE"}),
        managed("/models", headers={"Authorization": "Bearer API"}), setup="tokens"),
    one("tokens: asked for", managed("/token?type=inference", headers={"Authorization": "Bearer API"}),
        managed("/token?type=other", headers={"Authorization": "Bearer API"}), managed("/token", headers={"Authorization": "Bearer API"}),
        managed("/token?type=inference", headers={"Authorization": "Bearer MANAGEMENT"}), managed("/token?type=management"),
        Rest("/predictions/echo", b"x", {"Authorization": "Bearer OLD_INFERENCE"}),
        Rest("/predictions/echo", b"x", {"Authorization": "Bearer INFERENCE"}), setup="tokens"),
    one("tokens: gRPC", Grpc("Ping"), Grpc("Predictions", {"model_name": "echo", "input": {"data": b"x"}}),
        Grpc("Predictions", {"model_name": "echo", "input": {"data": b"x"}}, metadata=(("authorization", "Bearer INFERENCE"),)),
        Grpc("ListModels"), Grpc("ListModels", {"limit": 5}, metadata=(("authorization", "Bearer MANAGEMENT"),)), setup="tokens"),
    one("limits: request", Rest("/predictions/acting", b"x" * 1001), Rest("/predictions/acting", '{"answer": 1}', JSON), setup="limits"),
    one("limits: response", Rest("/predictions/acting", '{"count": 2000}', JSON), Rest("/predictions/acting", '{"answer": 1}', JSON, until=200),
        setup="limits"),
    one("limits: models of the properties", managed("/models/slow"), managed("/models/acting"), setup="limits"),
    one("limits: queue", *(Rest("/predictions/acting", '{"answer": 1}', JSON) for _ in range(2)), setup="limits"),
    *(one(f"envelope: {envelope}", *(Rest("/predictions/enveloped", body, headers) for body, headers in (
        ('{"instances": [[1, 2], "a"]}', JSON), ('{"instances": [{"data": 5}]}', JSON), ("[1, 2]", JSON), ('"text"', JSON), (b"raw", {}))),
        setup=envelope) for envelope in ("body", "json", "kserve")),
    one("envelope: kservev2", *(Rest("/predictions/enveloped", body, JSON) for body in (
        '{"id": "a", "inputs": [{"name": "i", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}', '{"inputs": []}', "[1]")),
        Rest("/v2/models/enveloped/infer", '{"id": "b", "inputs": [{"name": "i", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}', JSON),
        setup="kservev2"),
    one("torch: weights", Rest("/predictions/tiny", "[1, 2]", JSON), Rest("/predictions/tiny", "[0.25]", TEXT), setup="torch"),
    one("torch: script", Rest("/predictions/tiny_script", "[1, 2]", JSON), setup="torch"),
    one("torch: no numbers", Rest("/predictions/tiny", '"x"', JSON), setup="torch"),
    one("oip", *(Rest(path) for path in ("/v2", "/v2/health/live", "/v2/health/ready")), Rest("/v2/models/echo/infer", '{"inputs": []}', JSON),
        setup="oip"),
    one("oip: versions", Rest("/v2/models/echo/versions/1.0/infer", "{}", JSON), Rest("/v2/models/echo/versions/1.0/ready"), setup="oip"),
    one("not decoded", Rest("/predictions/echo", "[1]", JSON), Rest("/predictions/echo", "a", TEXT), setup="undecoded"),
    one("snapshot", managed("/models"), managed("/models/echo"), managed("/models/later/all"), Rest("/predictions/later", b"x"),
        Rest("/predictions/later/1.0", b"x"), setup="snapshot"),
]

GRPC = [
    one("grpc: ping", Grpc("Ping")),
    one("grpc: predict", Grpc("Predictions", {"model_name": "echo", "input": {"data": b"\x00x"}}), logs=True),
    one("grpc: predict a version", Grpc("Predictions", {"model_name": "echo", "model_version": "1.0", "input": {"a": b"1", "body": b"2"}})),
    one("grpc: predict, wrong", Grpc("Predictions", {"model_name": "absent", "input": {"data": b"x"}}),
        Grpc("Predictions", {"model_name": "echo", "model_version": "9.0", "input": {"data": b"x"}}), Grpc("Predictions"),
        Grpc("Predictions", {"model_name": "echo"})),
    one("grpc: status of a handler", Grpc("Predictions", {"model_name": "acting", "input": {"data": b'{"status": [418, "teapot"]}'}})),
    one("grpc: refusals", *(Grpc("Predictions", {"model_name": "refusing", "input": {"body": kind}}) for kind in
        (b"exception", b"client's", b"any", b"memory"))),
    one("grpc: a lost worker", Grpc("Predictions", {"model_name": "hostile", "input": {"body": b"exit"}}),
        Rest("/predictions/hostile", b"well", until=200)),
    one("grpc: stream", Grpc("StreamPredictions", {"model_name": "streaming", "input": {"data": b"2"}})),
    one("grpc: stream of one", Grpc("StreamPredictions", {"model_name": "echo", "input": {"data": b"x"}})),
    one("grpc: stream, wrong", Grpc("StreamPredictions", {"model_name": "absent", "input": {"data": b"2"}}),
        Grpc("StreamPredictions", {"model_name": "streaming", "input": {"data": b"-1"}})),
    one("grpc: models", Grpc("ListModels", {"limit": 3}), Grpc("ListModels", {"limit": 3, "next_page_token": 3}),
        Grpc("DescribeModel", {"model_name": "acting"}), Grpc("DescribeModel", {"model_name": "facts", "customized": True}),
        Grpc("DescribeModel", {"model_name": "absent"}), Grpc("DescribeModel", {"model_name": "acting", "model_version": "9.0"})),
    one("grpc: life of a model", Grpc("RegisterModel", {"url": "later.mar", "initial_workers": 1, "synchronous": True}),
        Grpc("RegisterModel", {"url": "later2.mar", "initial_workers": 1, "synchronous": True}),
        Grpc("SetDefault", {"model_name": "later", "model_version": "2.0"}),
        Grpc("Predictions", {"model_name": "later", "input": {"data": b"x"}}),
        Grpc("ScaleWorker", {"model_name": "later", "min_worker": 2, "max_worker": 2, "synchronous": True}),
        Grpc("UnregisterModel", {"model_name": "later"}), Grpc("UnregisterModel", {"model_name": "later", "model_version": "1.0"}),
        Grpc("UnregisterModel", {"model_name": "later"}), Grpc("UnregisterModel", {"model_name": "later"})),
    one("grpc: registered wrong", Grpc("RegisterModel"), Grpc("RegisterModel", {"url": "absent.mar"}),
        Grpc("ScaleWorker", {"model_name": "echo", "min_worker": 3, "max_worker": 1}),
        Grpc("SetDefault", {"model_name": "echo", "model_version": "9.0"})),
]

ROWS = [*INFERENCE, *SEQUENCES, *METRICS, *GRPC, *MANAGEMENT, *FAILURES, *PROMETHEUS, *SMALL, *NO_DIMENSIONS]
