"""The types of the rows of `table.py`, and the setups of the servers that receive the requests."""

import json
from dataclasses import dataclass, field

JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=limit"}


@dataclass(frozen=True)
class Rest:
    """One HTTP request. `at` is the listener; with `until` the request is repeated until the answer has this status."""

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
    """One gRPC call. `many` are the requests of a streaming call; `token` is sent as metadata."""

    call: str
    request: dict = field(default_factory=dict)
    many: tuple = ()
    metadata: tuple = ()


@dataclass(frozen=True)
class Wait:
    """A pause without requests."""

    seconds: float


@dataclass(frozen=True)
class Row:
    """Requests, sequential or concurrent, to a server of a setup. With `logs` the lines of the row are compared; with `scrape`
    these families of /metrics."""

    name: str
    requests: tuple
    setup: str = "main"
    at_once: bool = False
    logs: bool = False
    scrape: tuple = ()


@dataclass(frozen=True)
class Setup:
    """The options with which a server is started."""

    stores: tuple
    properties: str = ""
    options: tuple = ("--ncs", "--disable-token-auth", "--enable-model-api")
    torch: bool = False


LOADED = (
    "load_models="
    + ",".join(
        f"{name}.mar"
        for name in (
            "echo",
            "entry",
            "acting",
            "facts",
            "metered",
            "batched",
            "streaming",
            "refusing",
            "hostile",
            "slow",
            "based",
            "counting",
        )
    )
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
    """Returns the body of a form: name, type and content of each part."""
    made = []
    for name, kind, content in parts:
        head = f'--limit\r\nContent-Disposition: form-data; name="{name}"; filename="{name}.bin"\r\n'
        made.append(head.encode() + (f"Content-Type: {kind}\r\n" if kind else "").encode() + b"\r\n" + content)
    return b"\r\n".join(made) + b"\r\n--limit--\r\n"


def managed(path: str, method: str = "GET", body=None, **more) -> Rest:
    """Returns a request to the management listener."""
    return Rest(path, body, method=method, at="management", **more)


def one(name: str, *requests, **more) -> Row:
    """Returns a row."""
    return Row(name, requests, **more)


def calls(*made) -> Rest:
    """Returns a request with calls of metrics, see `metered/handler.py`."""
    return Rest("/predictions/metered", json.dumps(made), JSON)
