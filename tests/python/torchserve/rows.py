"""Rows of `table.py`: predictions, explanations, batches, sequences, and failures."""

from torchserve.row_types import FORM, JSON, MULTIPART, TEXT, Rest, Wait, multipart, one

INFERENCE = [
    one("ping", Rest("/ping"), logs=True),
    one("ping: other methods", Rest("/ping", b"", method="POST"), Rest("/ping", method="HEAD"), Rest("/ping/more")),
    one("predict: bytes", Rest("/predictions/echo", b"\x00\x01\xff"), logs=True),
    one("predict: no body", Rest("/predictions/echo", b""), Rest("/predictions/echo", method="GET")),
    one("predict: text", Rest("/predictions/echo", "grün".encode(), TEXT)),
    one("predict: text with a charset", Rest("/predictions/echo", "a", {"Content-Type": "text/plain; charset=utf-8"})),
    one("predict: text that is not UTF-8", Rest("/predictions/echo", b"\xff\xfe", TEXT)),
    one("predict: JSON", Rest("/predictions/echo", '{"a": [1, 2.5, null, true]}', JSON)),
    one(
        "predict: JSON with a charset",
        Rest("/predictions/echo", "[1]", {"Content-Type": "application/json; charset=utf-8"}),
    ),
    one("predict: invalid JSON", Rest("/predictions/echo", "{", JSON)),
    one("predict: octets", Rest("/predictions/echo", b"1", {"Content-Type": "application/octet-stream"})),
    one("predict: form", Rest("/predictions/echo", "a=1&b=two+words&b=again&c=%C3%BC", FORM)),
    one(
        "predict: multipart",
        Rest(
            "/predictions/echo",
            multipart(("data", "", b"\x00raw"), ("text", "text/plain", b"words"), ("json", "application/json", b"[1]")),
            MULTIPART,
        ),
    ),
    one("predict: invalid multipart body", Rest("/predictions/echo", b"--limit\r\nnonsense", MULTIPART)),
    one("predict: query", Rest("/predictions/echo?data=1&more=x", b"body")),
    one("predict: query without a body", Rest("/predictions/echo?data=1&data=2", method="GET")),
    one("predict: methods", *(Rest("/predictions/echo", b"x", method=m) for m in ("PUT", "PATCH", "DELETE"))),
    one("predict: version", Rest("/predictions/echo/1.0", b"x"), Rest("/predictions/facts/1.11", b""), logs=True),
    one("predict: no such version", Rest("/predictions/echo/9.0", b"x"), logs=True),
    one("predict: no such model", Rest("/predictions/absent", b"x"), Rest("/predictions/absent/1.0", b"x"), logs=True),
    one("predict: no model", Rest("/predictions", b"x"), Rest("/predictions/", b"x")),
    one("predict: more path", Rest("/predictions/facts/1.11/more/path?x=1", b"x", {"X-Test": "a"})),
    one("predict: legacy path", Rest("/echo/predict", b"x"), Rest("/echo/1.0/predict", b"x")),
    one(
        "predict: v1",
        Rest("/v1/models/echo:predict", '{"instances": [[1]]}', JSON),
        Rest("/v1/models/absent:predict", "{}", JSON),
    ),
    one("predict: v2", Rest("/v2/models/echo/infer", '{"inputs": []}', JSON)),
    one("predict: invocations", Rest("/invocations?model_name=echo", b"x"), Rest("/models/echo/invoke", b"x")),
    one("predict: invocations without a name", Rest("/invocations", b"x")),
    one("predict: entry point", Rest("/predictions/entry", b"x")),
    one("paths: unknown", Rest("/"), Rest("/unknown"), Rest("/models"), Rest("/metrics"), logs=True),
    one("paths: OPTIONS on a prediction", Rest("/predictions/echo", method="OPTIONS")),
    one("headers", Rest("/predictions/facts", b"x", {"X-Test": "Value", "x-lower": "1", "X-Empty": ""})),
    one("headers: request id", Rest("/predictions/facts", b"x", {"x-request-id": "mine"})),
    one("context", Rest("/predictions/facts", b"first")),
    one("answer: content type", Rest("/predictions/acting", '{"content_type": "text/csv", "answer": "a,b"}', JSON)),
    one("answer: headers", Rest("/predictions/acting", '{"headers": {"X-One": "1", "x-two": "zwei"}}', JSON)),
    one("answer: status", Rest("/predictions/acting", '{"status": [418, "I am a teapot"]}', JSON), logs=True),
    one(
        "answer: status 201", Rest("/predictions/acting", '{"status": [201, "Made"], "answer": "new"}', JSON), logs=True
    ),
    one(
        "answer: status 302",
        Rest("/predictions/acting", '{"status": [302, "Found"], "headers": {"Location": "/x"}}', JSON),
        logs=True,
    ),
    one("answer: status of all requests", Rest("/predictions/acting", '{"all": [503, "not now"]}', JSON), logs=True),
    one("answer: bytes", Rest("/predictions/acting", '{"bytes": "0001ff"}', JSON)),
    one("answer: object", Rest("/predictions/acting", '{"answer": {"a": [1, {"b": null}], "ü": 0.1}}', JSON)),
    one(
        "answer: list, number, true",
        *(Rest("/predictions/acting", f'{{"answer": {a}}}', JSON) for a in ("[]", "1.50", "true", "null")),
    ),
    one("answer: object that JSON cannot represent", Rest("/predictions/acting", '{"strange": true}', JSON)),
    one("answer: megabytes", Rest("/predictions/acting", '{"count": 2000000}', JSON)),
    one("stream", Rest("/predictions/streaming", b"3", parts=True), logs=True),
    one("stream: one part", Rest("/predictions/streaming", b"0", parts=True)),
    one("stream: fails", Rest("/predictions/streaming", b"-1")),
    one("explain", Rest("/explanations/based", "[1, 2]", JSON), Rest("/explanations/based/1.0", "[1]", JSON)),
    one("explain: handler without explanations", Rest("/explanations/echo", b"x"), Rest("/explanations/absent", b"x")),
    one("explain: v1", Rest("/v1/models/based:explain", "[1]", JSON)),
    one("base handler", Rest("/predictions/based", "[1, 2.5]", JSON), logs=True),
    one("base handler: fails", Rest("/predictions/based", "5", JSON)),
    one("batch: of three", *(Rest("/predictions/batched", b"x") for _ in range(3)), at_once=True, logs=True),
    one("batch: of four", *(Rest("/predictions/batched", b"x") for _ in range(4)), at_once=True, logs=True),
    one(
        "batch: statuses",
        Rest("/predictions/batched", b"418"),
        Rest("/predictions/batched", b"x", delay_s=0.2),
        at_once=True,
    ),
]

SEQUENCES = [
    one("sequence: steps", *(Rest("/predictions/counting", b"x", {"ts_request_sequence_id": "one"}) for _ in range(3))),
    one(
        "sequence: two",
        Wait(6),
        *(Rest("/predictions/counting", b"x", {"ts_request_sequence_id": name}) for name in ("a", "b", "a", "b")),
    ),
    one("sequence: three with a maximum of two", Rest("/predictions/counting", b"x", {"ts_request_sequence_id": "c"})),
    one("sequence: no id", Wait(6), Rest("/predictions/counting", b"x")),
]

FAILURES = [
    *(
        one(f"refuse: {kind}", Rest("/predictions/refusing", kind), logs=True)
        for kind in ("exception", "client's", "default", "memory", "cuda", "any", "quotes")
    ),
    *(
        one(f"hostile: returns {kind}", Rest("/predictions/hostile", kind))
        for kind in ("none", "text", "dict", "short", "long", "tuple", "object", "nan", "nothing", "number")
    ),
    one("hostile: raises", Rest("/predictions/hostile", b"raise"), Rest("/predictions/hostile", b"well"), logs=True),
    *(
        one(
            f"hostile: {kind}",
            Rest("/predictions/hostile", kind),
            Rest("/ping"),
            Rest("/predictions/hostile", b"well", until=200),
        )
        for kind in ("system exit", "exit", "kill", "hang")
    ),
    *(
        one(f"hostile: {kind}", Rest("/predictions/hostile", kind), Rest("/predictions/hostile", b"well", until=200))
        for kind in ("flood", "bytes", "stderr")
    ),
    one(
        "queue: full", *(Rest("/predictions/slow", b"700", delay_s=n * 0.06) for n in range(5)), at_once=True, logs=True
    ),
]
