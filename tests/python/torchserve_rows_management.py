"""Rows of `torchserve_table.py`: management, gRPC, and servers with settings of their own."""

from torchserve_requests import JSON, TEXT, Grpc, Rest, managed, one

MANAGEMENT = [
    one("models: list", managed("/models"), managed("/models?limit=2"), managed("/models?limit=2&next_page_token=2")),
    one(
        "models: list, wrong",
        managed("/models?limit=0"),
        managed("/models?limit=x"),
        managed("/models?next_page_token=99"),
    ),
    one("models: describe", managed("/models/acting"), managed("/models/acting/1.0"), managed("/models/acting/all")),
    one("models: describe more", managed("/models/facts"), managed("/models/batched"), managed("/models/counting")),
    one(
        "models: describe, customized",
        managed("/models/facts?customized=true"),
        managed("/models/acting?customized=true"),
    ),
    one(
        "models: describe, wrong",
        managed("/models/absent"),
        managed("/models/acting/9.0"),
        managed("/models/absent/all"),
    ),
    one(
        "models: methods",
        managed("/models/echo", "POST", b""),
        managed("/models", "PUT", b""),
        managed("/unknown"),
        managed("/"),
    ),
    one(
        "register: without workers",
        managed("/models?url=later.mar&initial_workers=0", "POST", b""),
        managed("/models/later"),
        Rest("/predictions/later", b"x"),
        managed("/models/later", "DELETE"),
        managed("/models/later"),
    ),
    one(
        "register: as many workers as by default",
        managed("/models?url=later.mar", "POST", b""),
        Rest("/predictions/later", b"x"),
        managed("/models/later", "DELETE"),
    ),
    one(
        "register: with workers",
        managed("/models?url=later.mar&initial_workers=1&synchronous=true", "POST", b""),
        Rest("/predictions/later", b"x"),
        managed("/models?url=later.mar&initial_workers=1", "POST", b""),
        managed("/models/later", "DELETE"),
        Rest("/predictions/later", b"x"),
    ),
    one(
        "register: everything",
        managed(
            "/models?url=later.mar&model_name=renamed&batch_size=3&max_batch_delay=25&initial_workers=1"
            "&synchronous=true&response_timeout=7&startup_timeout=70&handler=functions:answer&runtime=python3",
            "POST",
            b"",
        ),
        managed("/models/renamed"),
        Rest("/predictions/renamed", b"x"),
        managed("/models/renamed", "DELETE"),
    ),
    one(
        "register: as JSON",
        managed(
            "/models",
            "POST",
            '{"url": "later.mar", "model_name": "json", "initial_workers": 1, "synchronous": true, "batch_size": 2}',
            headers=JSON,
        ),
        Rest("/predictions/json", b"x"),
        managed("/models/json", "DELETE"),
    ),
    one(
        "register: not waiting",
        managed("/models?url=later.mar&initial_workers=1&synchronous=false", "POST", b""),
        Rest("/predictions/later", b"x", until=200),
        managed("/models/later", "DELETE"),
    ),
    one(
        "register: versions",
        managed("/models?url=later.mar&initial_workers=1&synchronous=true", "POST", b""),
        managed("/models?url=later2.mar&initial_workers=1&synchronous=true", "POST", b""),
        Rest("/predictions/later", b"x"),
        Rest("/predictions/later/2.0", b"x"),
        managed("/models/later/all"),
        managed("/models"),
        managed("/models/later", "DELETE"),
        managed("/models/later/2.0/set-default", "PUT", b""),
        Rest("/predictions/later", b"x"),
        managed("/models/later/1.0", "DELETE"),
        managed("/models/later/9.0/set-default", "PUT", b""),
        managed("/models/absent/1.0/set-default", "PUT", b""),
        managed("/models/later/2.0", "DELETE"),
        managed("/models/later"),
    ),
    one(
        "register: tar.gz",
        managed("/models?url=zipped.tar.gz&initial_workers=1&synchronous=true", "POST", b""),
        Rest("/predictions/zipped", b"x"),
        managed("/models/zipped", "DELETE"),
    ),
    one(
        "register: wrong",
        managed("/models", "POST", b""),
        managed("/models?url=absent.mar", "POST", b""),
        managed("/models?url=../echo.mar", "POST", b""),
        managed("/models?url=echo.mar&batch_size=x", "POST", b""),
        managed("/models?url=later.mar&runtime=perl", "POST", b""),
        managed("/models", "POST", "{", headers=JSON),
    ),
    one("register: unknown host", managed("/models?url=http://127.0.0.1:1/a.mar", "POST", b"")),
    one("register: no file of this name", managed("/models?url=file:///nowhere/a.mar", "POST", b"")),
    one(
        "register: a handler that cannot be loaded",
        managed("/models?url=broken.mar&initial_workers=1&synchronous=true", "POST", b""),
        managed("/models/broken"),
        managed("/models/broken", "DELETE"),
    ),
    one(
        "register: two classes",
        managed("/models?url=two_classes.mar&initial_workers=1&synchronous=true", "POST", b""),
        managed("/models/two_classes", "DELETE"),
    ),
    one(
        "scale",
        managed("/models/echo?min_worker=2&max_worker=2&synchronous=true", "PUT", b""),
        managed("/models/echo"),
        managed("/models/echo?min_worker=1&max_worker=1&synchronous=true", "PUT", b""),
        Rest("/predictions/echo", b"x"),
    ),
    one(
        "scale: to nothing",
        managed("/models/echo?min_worker=0&max_worker=0&synchronous=true", "PUT", b""),
        Rest("/predictions/echo", b"x"),
        Rest("/ping"),
        managed("/models/echo?min_worker=1&synchronous=true", "PUT", b""),
        Rest("/predictions/echo", b"x"),
    ),
    one(
        "scale: not waiting",
        managed("/models/echo?min_worker=1", "PUT", b""),
        managed("/models/echo/1.0?min_worker=1&synchronous=true", "PUT", b""),
    ),
    one(
        "scale: wrong",
        managed("/models/echo?min_worker=3&max_worker=2", "PUT", b""),
        managed("/models/absent?min_worker=1", "PUT", b""),
        managed("/models/echo/9.0?min_worker=1", "PUT", b""),
        managed("/models/echo?min_worker=x", "PUT", b""),
    ),
    one("unregister: wrong", managed("/models/absent", "DELETE"), managed("/models/echo/9.0", "DELETE")),
    one("v1 readiness", managed("/v1/models/echo"), managed("/v1/models/absent"), Rest("/v1/models/echo")),
    one(
        "api description",
        managed("/", "OPTIONS"),
        managed("/api-description"),
        Rest("/", method="OPTIONS"),
        Rest("/api-description"),
    ),
    one("token without tokens", managed("/token?type=inference")),
]

SMALL = [
    one(
        "model api off",
        managed("/models?url=echo.mar", "POST", b""),
        managed("/models/echo", "DELETE"),
        managed("/models"),
        managed("/models/echo?min_worker=1&synchronous=true", "PUT", b""),
        setup="strict",
    ),
    one(
        "tokens: none given",
        Rest("/predictions/echo", b"x"),
        Rest("/ping"),
        managed("/models"),
        Rest("/metrics", at="metrics"),
        setup="tokens",
    ),
    one(
        "tokens: given",
        Rest("/predictions/echo", b"x", {"Authorization": "Bearer INFERENCE"}),
        Rest("/ping", headers={"Authorization": "Bearer INFERENCE"}),
        managed("/models", headers={"Authorization": "Bearer MANAGEMENT"}),
        setup="tokens",
    ),
    one(
        "tokens: wrong ones",
        Rest("/predictions/echo", b"x", {"Authorization": "Bearer MANAGEMENT"}),
        Rest("/predictions/echo", b"x", {"Authorization": "Bearer wrong"}),
        Rest("/predictions/echo", b"x", {"Authorization": "INFERENCE"}),
        managed("/models", headers={"Authorization": "Bearer INFERENCE"}),
        managed("/models", headers={"Authorization": "Bearer API"}),
        setup="tokens",
    ),
    one(
        "tokens: asked for",
        managed("/token?type=inference", headers={"Authorization": "Bearer API"}),
        managed("/token?type=other", headers={"Authorization": "Bearer API"}),
        managed("/token", headers={"Authorization": "Bearer API"}),
        managed("/token?type=inference", headers={"Authorization": "Bearer MANAGEMENT"}),
        managed("/token?type=management"),
        Rest("/predictions/echo", b"x", {"Authorization": "Bearer OLD_INFERENCE"}),
        Rest("/predictions/echo", b"x", {"Authorization": "Bearer INFERENCE"}),
        setup="tokens",
    ),
    one(
        "tokens: gRPC",
        Grpc("Ping"),
        Grpc("Predictions", {"model_name": "echo", "input": {"data": b"x"}}),
        Grpc(
            "Predictions",
            {"model_name": "echo", "input": {"data": b"x"}},
            metadata=(("authorization", "Bearer INFERENCE"),),
        ),
        Grpc("ListModels"),
        Grpc("ListModels", {"limit": 5}, metadata=(("authorization", "Bearer MANAGEMENT"),)),
        setup="tokens",
    ),
    one(
        "limits: request",
        Rest("/predictions/acting", b"x" * 1001),
        Rest("/predictions/acting", '{"answer": 1}', JSON),
        setup="limits",
    ),
    one(
        "limits: response",
        Rest("/predictions/acting", '{"count": 2000}', JSON),
        Rest("/predictions/acting", '{"answer": 1}', JSON, until=200),
        setup="limits",
    ),
    one("limits: models of the properties", managed("/models/slow"), managed("/models/acting"), setup="limits"),
    one("limits: queue", *(Rest("/predictions/acting", '{"answer": 1}', JSON) for _ in range(2)), setup="limits"),
    *(
        one(
            f"envelope: {envelope}",
            *(
                Rest("/predictions/enveloped", body, headers)
                for body, headers in (
                    ('{"instances": [[1, 2], "a"]}', JSON),
                    ('{"instances": [{"data": 5}]}', JSON),
                    ("[1, 2]", JSON),
                    ('"text"', JSON),
                    (b"raw", {}),
                )
            ),
            setup=envelope,
        )
        for envelope in ("body", "json", "kserve")
    ),
    one(
        "envelope: kservev2",
        *(
            Rest("/predictions/enveloped", body, JSON)
            for body in (
                '{"id": "a", "inputs": [{"name": "i", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}',
                '{"inputs": []}',
                "[1]",
            )
        ),
        Rest(
            "/v2/models/enveloped/infer",
            '{"id": "b", "inputs": [{"name": "i", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}',
            JSON,
        ),
        setup="kservev2",
    ),
    one(
        "torch: weights",
        Rest("/predictions/tiny", "[1, 2]", JSON),
        Rest("/predictions/tiny", "[0.25]", TEXT),
        setup="torch",
    ),
    one("torch: script", Rest("/predictions/tiny_script", "[1, 2]", JSON), setup="torch"),
    one("torch: no numbers", Rest("/predictions/tiny", '"x"', JSON), setup="torch"),
    one(
        "oip",
        *(Rest(path) for path in ("/v2", "/v2/health/live", "/v2/health/ready")),
        Rest("/v2/models/echo/infer", '{"inputs": []}', JSON),
        setup="oip",
    ),
    one(
        "oip: versions",
        Rest("/v2/models/echo/versions/1.0/infer", "{}", JSON),
        Rest("/v2/models/echo/versions/1.0/ready"),
        setup="oip",
    ),
    one("not decoded", Rest("/predictions/echo", "[1]", JSON), Rest("/predictions/echo", "a", TEXT), setup="undecoded"),
    one(
        "snapshot",
        managed("/models"),
        managed("/models/echo"),
        managed("/models/later/all"),
        Rest("/predictions/later", b"x"),
        Rest("/predictions/later/1.0", b"x"),
        setup="snapshot",
    ),
]

GRPC = [
    one("grpc: ping", Grpc("Ping")),
    one("grpc: predict", Grpc("Predictions", {"model_name": "echo", "input": {"data": b"\x00x"}}), logs=True),
    one(
        "grpc: predict a version",
        Grpc("Predictions", {"model_name": "echo", "model_version": "1.0", "input": {"a": b"1", "body": b"2"}}),
    ),
    one(
        "grpc: predict, wrong",
        Grpc("Predictions", {"model_name": "absent", "input": {"data": b"x"}}),
        Grpc("Predictions", {"model_name": "echo", "model_version": "9.0", "input": {"data": b"x"}}),
        Grpc("Predictions"),
        Grpc("Predictions", {"model_name": "echo"}),
    ),
    one(
        "grpc: status of a handler",
        Grpc("Predictions", {"model_name": "acting", "input": {"data": b'{"status": [418, "teapot"]}'}}),
    ),
    one(
        "grpc: refusals",
        *(
            Grpc("Predictions", {"model_name": "refusing", "input": {"body": kind}})
            for kind in (b"exception", b"client's", b"any", b"memory")
        ),
    ),
    one(
        "grpc: a lost worker",
        Grpc("Predictions", {"model_name": "hostile", "input": {"body": b"exit"}}),
        Rest("/predictions/hostile", b"well", until=200),
    ),
    one("grpc: stream", Grpc("StreamPredictions", {"model_name": "streaming", "input": {"data": b"2"}})),
    one("grpc: stream of one", Grpc("StreamPredictions", {"model_name": "echo", "input": {"data": b"x"}})),
    one(
        "grpc: stream, wrong",
        Grpc("StreamPredictions", {"model_name": "absent", "input": {"data": b"2"}}),
        Grpc("StreamPredictions", {"model_name": "streaming", "input": {"data": b"-1"}}),
    ),
    one(
        "grpc: models",
        Grpc("ListModels", {"limit": 3}),
        Grpc("ListModels", {"limit": 3, "next_page_token": 3}),
        Grpc("DescribeModel", {"model_name": "acting"}),
        Grpc("DescribeModel", {"model_name": "facts", "customized": True}),
        Grpc("DescribeModel", {"model_name": "absent"}),
        Grpc("DescribeModel", {"model_name": "acting", "model_version": "9.0"}),
    ),
    one(
        "grpc: life of a model",
        Grpc("RegisterModel", {"url": "later.mar", "initial_workers": 1, "synchronous": True}),
        Grpc("RegisterModel", {"url": "later2.mar", "initial_workers": 1, "synchronous": True}),
        Grpc("SetDefault", {"model_name": "later", "model_version": "2.0"}),
        Grpc("Predictions", {"model_name": "later", "input": {"data": b"x"}}),
        Grpc("ScaleWorker", {"model_name": "later", "min_worker": 2, "max_worker": 2, "synchronous": True}),
        Grpc("UnregisterModel", {"model_name": "later"}),
        Grpc("UnregisterModel", {"model_name": "later", "model_version": "1.0"}),
        Grpc("UnregisterModel", {"model_name": "later"}),
        Grpc("UnregisterModel", {"model_name": "later"}),
    ),
    one(
        "grpc: registered wrong",
        Grpc("RegisterModel"),
        Grpc("RegisterModel", {"url": "absent.mar"}),
        Grpc("ScaleWorker", {"model_name": "echo", "min_worker": 3, "max_worker": 1}),
        Grpc("SetDefault", {"model_name": "echo", "model_version": "9.0"}),
    ),
]
