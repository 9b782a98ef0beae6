"""Compares answers to the rows of `table.py` with those of a real TorchServe, and lists the intended differences with their
reasons."""

import fnmatch
import http.client
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One intended difference: the rows (patterns of names), the reason, and the behaviour of this server: each answer contains its
    text of `texts`, and the metric logs have the lines `logged`."""

    rows: tuple
    why: str
    texts: tuple = ()
    logged: tuple = ()

    def check(self, ours: dict) -> str:
        """Returns how a row's outcome differs from this entry; empty if it does not."""
        found = [json.dumps(answer, ensure_ascii=False) for answer in ours["answers"]]
        if len(found) != len(self.texts):
            return f"{len(found)} answers, promised {len(self.texts)}: {found}"
        for text, wanted in zip(found, self.texts, strict=True):
            if wanted not in text:
                return f"{text[:600]!r}, promised {wanted!r}"
        lines = [line for log in ours.get("logged", {}).values() for line in log]
        missing = [line for line in self.logged if line not in lines]
        return f"no line {missing}: {lines}" if missing else ""


DIFFERENCES = [
    Difference(
        ("predict: invalid multipart body",),
        "TorchServe calls the handler with an empty request.",
        ("The body is no multipart form: incomplete multipart stream",),
    ),
    Difference(
        ("paths: OPTIONS on a prediction",),
        "The OpenAPI documents have different texts and unmodified paths.",
        ('\\"openapi\\": \\"3.0.1\\"',),
    ),
    Difference(("api description",), "The same.", ('\\"title\\": \\"TorchServe APIs\\"',) * 4),
    Difference(
        ("headers",),
        "The HTTP library has header names in lower case; handlers get them in title case, and may use any case.",
        ('\\"X-Lower\\": \\"1\\"',),
    ),
    Difference(("headers: request id",), "The same.", ('\\"X-Request-Id\\": \\"mine\\"',)),
    Difference(
        ("models: describe, customized",),
        "The handler's description is in alphabetical order with its nulls; gRPC metadata are its headers.",
        ('\\"describe\\": \\"True\\"', "Prediction failed"),
    ),
    Difference(
        ("grpc: models",),
        "The same.",
        ('\\"nextPageToken\\": \\"3\\"', '\\"6\\"', "acting.mar", "customizedMetadata", "Model not found: absent")
        + ("Model version: 9.0 does not exist for model: acting",),
    ),
    Difference(
        ("metrics: percent",),
        "Samples with other dimensions than the first one are recorded; TorchServe drops them.",
        ('"status": 200',),
        ("P1.Percent:12.5|#ModelName:metered,Level:Model|UUID", "P1.Percent:50.0|#Kind:a,ModelName:metered,Level:Model|UUID"),
    ),
    Difference(
        ("metrics: time",),
        "A value in another unit than the metric's is converted; TorchServe records 5 s as 5 ms.",
        ('"status": 200',),
        (
            "T1.Milliseconds:5.5|#ModelName:metered,Level:Model|UUID",
            "T1.Milliseconds:5000.0|#ModelName:metered,Level:Model|UUID",
            "T2.Seconds:1.0|#ModelName:metered,Level:Model|UUID",
        ),
    ),
    Difference(
        ("metrics: numbers that were lost",),
        "Samples are records in shared memory here, and printed text that a regular expression reads in TorchServe.",
        ('"status": 200',),
        tuple(
            f"Lost{number}.Count:{value}|#ModelName:metered,Level:Model|UUID"
            for number, value in ((1, "NaN"), (2, "Infinity"), (3, "1.0E16"))
        ),
    ),
    Difference(
        ("metrics: dimensions that were lost",),
        "The same; separators in dimensions are escaped.",
        ('"status": 200',),
        ("Lost4.Count:1.0|#Host:http%3A//a%3A80,ModelName:metered,Level:Model|UUID",),
    ),
    Difference(
        ("metrics: a comma in a dimension",),
        "The same.",
        ('"status": 200',),
        ("Lost6.Count:1.0|#Host:a%2Cb,ModelName:metered,Level:Model|UUID",),
    ),
    Difference(
        ("metrics: unit that was lost",),
        "The same.",
        ('"status": 200',),
        ("Lost5.tokens/s:1.0|#ModelName:metered,Level:Model|UUID",),
    ),
    Difference(
        ("metrics: wrong types",),
        "An invalid metric does not fail a prediction; the error is logged.",
        ("`metric_type` must be a MetricTypes enum",),
    ),
    Difference(
        ("metrics: store of old",),
        "Metrics of the older interface are detected too; TorchServe drops them, because their lines have no type.",
        ('\\"NoneType\\"',),
        tuple(
            f"{name}|#ModelName:metered,Level:Model|UUID"
            for name in ("O1.Count:1.0", "O2.Milliseconds:2.0", "O3.Megabytes:3.0", "O4.Percent:4.0", "O6.Count:6.0")
        ),
    ),
    Difference(
        ("metrics: ts names",),
        "A model's metric must not have the name of a server metric.",
        ('"status": 200',),
        ("PredictionTime.ms:*|#ModelName:metered,Level:Model|UUID",),
    ),
    Difference(
        ("metrics: dimensions None",),
        "As in TorchServe's documents; its code raises TypeError.",
        ('\\"NoneType\\",\\n  \\"NoneType\\"',),
    ),
    Difference(
        ("grpc: predict",),
        "Latencies of gRPC requests are counted too.",
        ('"status": "OK"',),
        (
            "ts_inference_latency_microseconds.Microseconds:*|#model_name:echo,model_version:default",
            "ts_queue_latency_microseconds.Microseconds:*|#model_name:echo,model_version:default",
            "ts_inference_requests_total.Count:1.0|#model_name:echo,model_version:default",
        ),
    ),
    Difference(
        ("grpc: stream of one part",),
        "For a handler that does not stream, TorchServe sends the answer and then the error that its worker died.",
        ('"status": "OK", "answers": [{"prediction"',),
    ),
    Difference(
        ("grpc: life of a model",),
        "The default version cannot be unregistered while others exist: PERMISSION_DENIED with a text; TorchServe "
        "returns UNKNOWN without a text.",
        (
            "Version: 1.0 registered with 1 initial workers",
            "Version: 2.0 registered with 1 initial workers",
            "Default version successfully updated",
            "handle of 2.0",
            "Workers scaled to 2 for model: later",
            "Cannot remove default version for model later",
            "unregistered",
            "unregistered",
            "Model not found: later",
        ),
    ),
    Difference(
        ("register wrongly: startup_timeout",),
        "The reason follows TorchServe's text; the model is always removed.",
        ("Failed to start workers for model later version: 1.0: startup_timeout is 0 s", "Model not found: later"),
    ),
    Difference(
        ("register wrongly: scaled below 0",),
        "The error has the number instead of an index in a Java list; the model is unchanged.",
        ("registered with 0 initial workers", "max_worker cannot be less than min_worker.", "Model not found: absent")
        + ('"status": 500', "Workers scaled to 1 for model: later", "unregistered"),
    ),
    Difference(
        ("register: unknown host",),
        "The reason follows TorchServe's text.",
        ("Failed to download archive from: http://127.0.0.1:1/a.mar: ",),
    ),
    Difference(
        ("sequence: three with a maximum of two",),
        "The same.",
        ("or exceeds maxSequenceJobQueueSize. Its queue is full: ",),
    ),
    Difference(
        ("register: a handler that cannot be loaded",),
        "The same.",
        (
            "Failed to start workers for model broken version: 1.0: ",
            "Model not found: broken",
            "Model not found: broken",
        ),
    ),
    Difference(
        ("register: two classes",),
        "The same.",
        ("Failed to start workers for model two_classes version: 1.0: ", "Model not found: two_classes"),
    ),
    Difference(
        ("register: wrong",),
        "Invalid JSON is 400 with the position; TorchServe returns 500 with a Java exception.",
        (
            "Parameter url is required.",
            "Model not found at: absent.mar",
            "Relative path is not allowed in url: ../echo.mar",
            "Model version 1.0 is already registered for model echo",
            "Invalid RuntimeType value: perl",
            "The body cannot be used: EOF while parsing an object at line 1 column 1",
        ),
    ),
    Difference(
        ("refuse: exception", "refuse: client's"),
        "Status phrases are the standard ones, or empty without a standard.",
        ('"type\\": \\"InternalServerException\\"',),
    ),
    Difference(
        ("queue: full",),
        "The reason follows TorchServe's text.",
        ('"slept"', '"slept"', '"slept"')
        + ("maxSequenceJobQueueSize. Its queue is full: Exceeds maximum queue size",) * 2,
    ),
    Difference(
        ("scrape: at the start", "scrape: models' own"),
        "Counters of the server exist from the start with the value 0.",
        ('"status": 200',),
    ),
    Difference(
        ("scrape: mode log",),
        "A scrape without metrics has a comment with the reason.",
        ("# metrics mode is tslog",),
    ),
    Difference(("tokens: none given",), "The same.", ('"status": 400',) * 3 + ("# metrics mode is tslog",)),
    Difference(
        ("tokens: asked for",),
        "The error for an invalid `type` has the allowed values; the text of a refused key is the same everywhere.",
        ('"body": "\\n"', "'other'; allowed are management and inference", "''; allowed")
        + ("InvalidKeyException",) * 3
        + ('\\"bytearray\\"',),
    ),
    Difference(
        ("limits: request",),
        "The error has the limit; TorchServe's has no body.",
        ("max_request_size allows 1000", '"status": 200'),
    ),
    Difference(
        ("limits: response",),
        "The error has the size and the limit, and no worker is killed.",
        ("the answer has 2000 bytes; max_response_size allows 1000", '"status": 200'),
    ),
    Difference(
        ("limits: models of the properties",),
        "`responseTimeout` of `models` is used; TorchServe ignores it.",
        ('\\"responseTimeout\\": 60', '\\"responseTimeout\\": 30'),
    ),
    Difference(
        ("oip",),
        "The v2 protocol is the standard one: the names and the form of its bodies are Triton's.",
        ('\\"name\\":\\"triton\\"', '{\\"live\\":true}', '{\\"ready\\":true}', '\\"inputs\\": []'),
    ),
    Difference(
        ("oip: versions",),
        "The v2 protocol is the standard one, with versions; TorchServe has none.",
        ("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'", '"status": 200'),
    ),
    Difference(
        ("snapshot",),
        "Models of a snapshot are loaded at the start, and their descriptions report this.",
        ('"echo.mar', '\\"loadedAtStartup\\": true', "later2.mar", "handle of 2.0", "handle of 1.0"),
    ),
]


def reason_for(name: str):
    """Returns the intended difference that names this row, if any."""
    matches = (entry for entry in DIFFERENCES if any(fnmatch.fnmatchcase(name, row) for row in entry.rows))
    return next(matches, None)


def plain(outcome: dict) -> dict:
    """Returns an outcome without random parts of TorchServe's: the order of families in a scrape, and of the entries of a map
    in a message."""
    found = json.loads(json.dumps(outcome))
    for answer in found["answers"]:
        if answer.get("headers", {}).get("content-type", "").startswith("text/plain"):
            answer["body"] = sorted(answer["body"].splitlines())
        answer["answers"] = [in_order(message) for message in answer.get("answers", [])]
    return found


def in_order(message: dict) -> dict:
    """Returns a message whose JSON object has its keys in alphabetical order."""
    text = message.get("prediction", "")
    try:
        entries = json.loads(text)
    except ValueError:
        return message
    return message | {"prediction": json.dumps(entries, sort_keys=True, indent=2)} if isinstance(entries, dict) else message


def difference(name: str, ours: dict, theirs: dict) -> str:
    """Returns how a row's outcome differs from TorchServe's; empty if it does not, or if the difference is intended."""
    allowed = reason_for(name)
    if allowed is not None:
        return allowed.check(ours)
    left, right = plain(ours), plain(theirs)
    if len(left["answers"]) != len(right["answers"]):
        return f"{len(left['answers'])} answers, TorchServe {len(right['answers'])}"
    without_empty_phrases(left, right)
    for number, (mine, other) in enumerate(zip(left["answers"], right["answers"], strict=True)):
        parts = [key for key in sorted(set(mine) | set(other)) if mine.get(key) != other.get(key)]
        if parts:
            return f"answer {number}: " + "; ".join(
                f"{key} {mine.get(key)!r}, TorchServe {other.get(key)!r}" for key in parts
            )
    for key in ("logged", "scraped"):
        if left.get(key) != right.get(key):
            return f"{key}: {only(left[key], right[key])}"
    return ""


def without_empty_phrases(left: dict, right: dict):
    """Removes phrases of statuses: TorchServe leaves them empty unless the handler sets one; this server sends standard ones."""
    for mine, other in zip(left["answers"], right["answers"], strict=True):
        if other.get("reason") == "" and mine.get("reason") == http.client.responses.get(mine["status"]):
            mine["reason"] = ""


def only(mine, other) -> str:
    """Returns the entries that only one of two lists, or of two dictionaries of lists, has."""
    if isinstance(mine, dict):
        return "; ".join(f"{name}: {only(mine[name], other[name])}" for name in mine if mine[name] != other[name])
    rest = list(other)
    more = [line for line in mine if line not in rest or rest.remove(line)]
    return f"only here {more}, only TorchServe {rest}"
