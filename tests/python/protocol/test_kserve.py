"""KServe's clients: health bodies, the v1 protocol of KServe and TensorFlow Serving, and KServe's SDK itself.

The SDK needs a separate environment: `make kserve-sdk` installs it in target/kserve; `PHAROS_KSERVE_PYTHON` overrides it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from harness.server import ROOT, total

SDK = Path(os.environ.get("PHAROS_KSERVE_PYTHON") or ROOT / "target/kserve/bin/python")
CLIENT = Path(__file__).resolve().parent / "kserve_client.py"
ROW = list(range(16))
ZEROS = [0] * 16


def predict(server, model: str, body, version="") -> tuple:
    """Sends one `:predict` request; returns the status and the parsed answer."""
    path = f"/v1/models/{model}" + (f"/versions/{version}" if version else "")
    status, text = server.ask("POST", f"{path}:predict", body if isinstance(body, str) else json.dumps(body))
    return status, json.loads(text)


def test_health_has_the_bodies_of_kserve(server):
    """The SDK reads `live` and `ready`."""
    assert server.get("/v2/health/live") == (200, '{"live":true}')
    assert server.get("/v2/health/ready") == (200, '{"ready":true}')
    assert server.get("/") == (200, '{"status":"alive"}')


def test_models_are_listed_and_ready(server):
    """The list has the ready models; an unknown model is 404."""
    status, text = server.get("/v1/models")
    assert status == 200
    names = json.loads(text)["models"]
    assert {"simple", "identity_fp32"} <= set(names) == set(server.index())
    for path in ("/v1/models/simple", "/v1/models/simple/versions/1"):
        status, text = server.get(path)
        assert status == 200 and json.loads(text).items() >= {"name": "simple", "ready": True}.items()
    for path in ("/v1/models/unknown", "/v1/models/simple/versions/9"):
        status, text = server.get(path)
        assert (status, list(json.loads(text))) == (404, ["error"])


def test_a_model_that_is_not_ready_is_503(start):
    """The statuses are those of KServe's model server; its SDK treats 503 as not ready."""
    server = start(["identity_fp32"], "--model-control-mode=explicit")
    status, text = server.get("/v1/models/identity_fp32")
    assert (status, list(json.loads(text))) == (404, ["error"]), "not loaded: unknown"
    assert server.ask("POST", "/v2/repository/models/identity_fp32/load", b"")[0] == 200
    assert server.get("/v1/models/identity_fp32")[0] == 200
    assert server.ask("POST", "/v2/repository/models/identity_fp32/unload", b"")[0] == 200
    assert server.get("/v1/models/identity_fp32")[0] == 503


@pytest.mark.parametrize("version", ["", "1"])
def test_rows_and_columns(server, version):
    """Both formats of TensorFlow Serving are accepted, with one input and with several."""
    instances = [{"INPUT0": ROW, "INPUT1": ZEROS}, {"INPUT1": ROW, "INPUT0": ROW}]
    double = [2 * value for value in ROW]
    rows = [{"OUTPUT0": ROW, "OUTPUT1": ROW}, {"OUTPUT0": double, "OUTPUT1": ZEROS}]
    assert predict(server, "simple", {"instances": instances}, version) == (200, {"predictions": rows})
    columns = {"INPUT0": [ROW], "INPUT1": [ZEROS]}
    answer = {"outputs": {"OUTPUT0": [ROW], "OUTPUT1": [ROW]}}
    assert predict(server, "simple", {"inputs": columns, "signature_name": "x"}, version) == (200, answer)
    values = [[1.5, -2], [0, 1e3]]
    for member, answer in [("instances", "predictions"), ("inputs", "outputs")]:
        assert predict(server, "identity_fp32", {member: values}, version) == (200, {answer: values})


def test_bytes_are_strings_or_base64(server):
    """Bytes that are not UTF-8 are received and sent as `{"b64": ...}`."""
    values = [["text, ]"], [{"b64": "/wA="}]]
    assert predict(server, "identity_bytes", {"instances": values}) == (200, {"predictions": values})


def test_numbers_that_are_not_json(server):
    """Python's NaN and infinities are accepted and returned."""
    status, text = server.ask("POST", "/v1/models/identity_fp32:predict", '{"instances": [[NaN, Infinity, -Infinity]]}')
    assert (status, text) == (200, '{"predictions":[[NaN,Infinity,-Infinity]]}')


@pytest.mark.parametrize(
    "model, body, status, fragment",
    [
        ("unknown", {"instances": [[1]]}, 404, "unknown"),
        ("identity_fp32", "[", 400, "not a JSON object"),
        ("identity_fp32", {}, 400, "either 'instances' or 'inputs'"),
        ("identity_fp32", {"instances": [[1], [1, 2]]}, 400, "different lengths"),
        ("identity_fp32", {"instances": 1}, 400, "'instances' must be a non-empty array"),
        ("simple", {"instances": [[1]]}, 400, "'INPUT0', 'INPUT1'"),
        ("simple", {"instances": [{"INPUT0": ROW}]}, 400, "expected 2 inputs but got 1"),
        ("simple", {"inputs": {"INPUT2": [ROW]}}, 400, "no input 'INPUT2'"),
        ("simple", {"inputs": {"INPUT0": [ROW], "INPUT1": [[1]]}}, 400, "INPUT1"),
        ("simple", {"inputs": {"INPUT0": [[1.5]], "INPUT1": [ROW]}}, 400, "non-signed-integer"),
        ("identity_fp32", {"instances": ["a"]}, 400, "non-number"),
        ("identity_fp32", '{"instances": [[1e999]]}', 400, "Number too big"),
        ("fail", {"instances": [1]}, 500, ""),
    ],
)
def test_errors(server, model, body, status, fragment):
    """Errors have KServe's form and status."""
    got, answer = predict(server, model, body)
    assert (got, list(answer)) == (status, ["error"])
    assert fragment in answer["error"]


@pytest.mark.parametrize("path", ["/v1", "/v1/models/", "/v1/models/simple:explain", "/v1/models/simple:predict/x", "/v1/none"])
def test_other_paths_are_not_found(server, path):
    """No other paths are served below /v1."""
    assert server.ask("POST", path, "{}")[0] == 404


def test_predict_is_counted_as_inference(server):
    """A `:predict` is counted under the route `infer`, both successes and refusals."""
    before = server.scrape()
    assert predict(server, "identity_fp32", {"instances": [[1]]})[0] == 200
    assert predict(server, "identity_fp32", {})[0] == 400
    after = server.scrape()
    for name, labels in [
        ("pharos_requests_total", {"route": "infer", "code": "200"}),
        ("pharos_request_failures_total", {"route": "infer", "reason": "MALFORMED"}),
        ("nv_inference_request_success", {"model": "identity_fp32"}),
    ]:
        assert total(after, name, **labels) == total(before, name, **labels) + 1


def test_restrictions_apply(start, tmp_path):
    """Tokens and restricted APIs apply to v1 as to v2."""
    tokens = tmp_path / "tokens"
    tokens.write_text("infer-1\n")
    server = start(["identity_fp32"], f"--inference-token-file={tokens}")
    paths = ["/v1/models/identity_fp32:predict", "/v1/models/identity_fp32%3Apredict", "/v1/models/identity_fp32/versions/1:predict"]
    for path in paths:
        body = json.dumps({"instances": [[1]]})
        assert server.ask("POST", path, body)[0] == 401
        allowed = {"Authorization": "Bearer infer-1"}
        assert server.ask("POST", path, body, headers=allowed)[0] == 200
    assert server.get("/v1/models")[0] == 401
    assert server.get("/v1/models/identity_fp32")[0] == 200


@pytest.mark.peers
@pytest.mark.skipif(not SDK.exists(), reason=f"{SDK} does not exist: make kserve-sdk installs KServe's SDK")
def test_the_sdk_understands_the_server(server):
    """All methods of the SDK's clients work, over HTTP with both protocols and over gRPC."""
    command = [str(SDK), str(CLIENT), server.http, server.grpc]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    outputs = {"OUTPUT0": [[2 * value for value in ROW]], "OUTPUT1": [ZEROS]}
    rows = {name: values[0] for name, values in outputs.items()}
    assert found["v1"] == {
        "live": True,
        "ready": True,
        "rows": {"predictions": [rows, rows]},
        "columns": {"outputs": outputs},
        "unknown": 404,
        "unknown_ready": 404,
    }
    assert found["v2"] == {"live": True, "ready": True, "model": [True, False], "json": outputs, "binary": outputs}
    assert found["grpc"] == {"live": True, "ready": True, "model": True, "raw": outputs}
