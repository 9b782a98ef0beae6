"""TorchServe's endpoints: predictions, management, metrics, tokens and gRPC, as TorchServe 0.12.0 answers them (codes, types,
texts and keys were recorded from a live one).

Requires a Python with the package `pharos-worker`: `PHAROS_PYTHON`, or that of the tests."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from harness import browser, metric_families, orca
from harness.metric_families import CONTENT_TYPE
from harness.processes import held
from harness.server import samples, total
from harness.statistics import until_dispatched
from harness.waiting import DEADLINE_S, eventually
from torchserve.home import HOST, INFERENCE, MANAGEMENT, Home, body, call, fields, has_worker, message

pytestmark = pytest.mark.skipif(not has_worker, reason="there is no Python with the package pharos-worker: make python-worker")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
JSON = {"Content-Type": "application/json"}
NO_WORKER = (
    " has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence inference, "
    "please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    server = Home(folder, ["cors_allowed_origin=*", "load_models=m-1.0.mar,streams-1.0.mar", "job_queue_size=3", "metrics_mode=prometheus"])
    server.archive("m")
    server.archive("m", version="2.0")
    server.archive("streams", yaml="streaming: true\n")
    server.archive("late", yaml="responseTimeout: 1\n")
    server.archive("batched", yaml="batchSize: 3\nmaxBatchDelay: 600000\n")
    server.archive("fails")
    with server:
        for model in ("m", "streams"):
            eventually(f"{model} is ready", lambda: server.predict(model, b"pid")[0] == 200)
        yield server


def error(answer):
    found = json.loads(answer)
    return found["code"], found["type"], found["message"]


@pytest.mark.smoke
def test_answers_have_torchserves_headers(home):
    status, headers, body = home.ask("GET", "/ping")
    assert (status, json.loads(body), body[-1:]) == (200, {"status": "Healthy"}, b"\n")
    assert UUID.fullmatch(headers["x-request-id"])
    assert headers["cache-control"] == "no-cache; no-store, must-revalidate, private"
    assert (headers["pragma"], headers["expires"]) == ("no-cache", "Thu, 01 Jan 1970 00:00:00 UTC")
    assert (headers["access-control-allow-origin"], headers["connection"]) == ("*", "keep-alive")
    assert home.ask("GET", "/ping", headers={"Connection": "close"})[1]["connection"] == "close"
    status, headers, body = home.ask("GET", "/nowhere")
    assert (status, headers["connection"], headers["content-type"]) == (404, "close", "application/json")
    assert body.startswith(b'{\n  "code": 404,\n  "type": "ResourceNotFoundException",\n  "message": ')


def test_predictions_have_load_reports(home):
    """A prediction that asks for a load report (ORCA) gets it; see `protocol/test_load_reports.py`."""

    def report(path, headers):
        value = home.ask("POST", path, b"pid", headers)[1].get(orca.RESPONSE)
        return value and orca.from_header(value)

    asks = {orca.REQUEST: "Text"}
    for path in ("/predictions/m", "/predictions/m/1.0", "/explanations/m"):
        eventually(f"{path} reports its model", lambda: "utilization" in report(path, asks)["named_metrics"])
        assert report(path, {}) is None
    assert "utilization" not in report("/predictions/no_such_model", asks)["named_metrics"]
    assert report("/ping", asks) is None


MULTIPART = (
    '--B\r\nContent-Disposition: form-data; name="data"; filename="f.txt"\r\nContent-Type: text/plain\r\n\r\nhello\r\n'
    '--B\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n--B--\r\n'
)


@pytest.mark.parametrize(
    ("path", "body", "content_type", "data", "explain"),
    [
        ("/predictions/m", b"\xff", "", {"body": ["bytearray", "bytearray(b'\\xff')"]}, "False"),
        ("/predictions/m/1.0", b"[1]", "application/json", {"body": ["list", [1]]}, "False"),
        ("/predictions/m", b'{"a":', "application/json; charset=utf-8", {"body": ["bytearray", "bytearray(b'{\"a\":')"]}, "False"),
        ("/predictions/m", b"text", "text/plain", {"body": ["str", "text"]}, "False"),
        ("/predictions/m", b"a=1&b=x%20y", "application/x-www-form-urlencoded", {"a": ["bytearray", "bytearray(b'1')"], "b": ["bytearray", "bytearray(b'x y')"]}, "False"),
        ("/predictions/m", MULTIPART, "multipart/form-data; boundary=B", {"data": ["str", "hello"], "x": ["bytearray", "bytearray(b'1')"]}, "False"),
        ("/invocations?model_name=m&z=1", b"t", "text/plain", {"model_name": ["bytearray", "bytearray(b'm')"], "z": ["bytearray", "bytearray(b'1')"], "body": ["str", "t"]}, None),
        ("/models/m/invoke", b"t", "text/plain", {"body": ["str", "t"]}, None),
        ("/m/predict", b"t", "text/plain", {"body": ["str", "t"]}, None),
        ("/m/1.0/predict", b"t", "text/plain", {"body": ["str", "t"]}, None),
        ("/v1/models/m:predict", b"[1]", "application/json", {"body": ["list", [1]]}, "False"),
        ("/v2/models/m/infer", b'{"x": 1}', "application/json", {"body": ["dict", {"x": 1}]}, "False"),
    ],
)
def test_bodies_and_forms_reach_the_handler(home, path, body, content_type, data, explain):
    headers = {"Content-Type": content_type} if content_type else {}
    status, answered, answer = home.ask("POST", path, body, {**headers, "X-Own-Header": "Zed"})
    assert status == 200, answer
    shown = json.loads(answer)
    assert shown["data"] == data
    assert (shown["id"], shown["headers"]["X-Own-Header"]) == (answered["x-request-id"], "Zed")
    assert shown["headers"].get("explain") == explain
    assert shown["headers"].get("url_path") == ("" if path.startswith("/predictions") else None)
    assert "content-type" not in answered


def test_any_method_and_any_path_after_the_version(home):
    status, _, answer = home.ask("PUT", "/predictions/m/1.0/extra/path?q=1", b"t", {"Content-Type": "text/plain"})
    assert (status, json.loads(answer)["headers"]["url_path"]) == (200, "extra/path")
    assert home.ask("POST", "/explanations/m", b"x")[2] == b"explained"
    status, _, answer = home.ask("OPTIONS", "/predictions/m")
    assert (status, json.loads(answer)["openapi"]) == (200, "3.0.1")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", (405, "MethodNotAllowedException", "Requested method is not allowed, please refer to API document.")),
        ("GET", "/predictions", (404, "ResourceNotFoundException", "Requested resource is not found, please refer to API document.")),
        ("GET", "/predictions/x", (404, "ModelNotFoundException", "Model not found: x")),
        ("GET", "/predictions/m/9.9", (404, "ModelVersionNotFoundException", "Model version: 9.9 does not exist for model: m")),
        ("GET", "/models/m/invokes", (404, "ResourceNotFoundException", "Requested resource is not found, please refer to API document.")),
        ("GET", "/v1/models/x:predict", (404, "ModelNotFoundException", "Model not found: x")),
        ("GET", "/v2/models/x/infer", (404, "ModelNotFoundException", "Model not found: x")),
        ("GET", "/invocations", (400, "BadRequestException", "Parameter model_name is required.")),
        ("GET", "/wfpredict/x", (404, "WorkflowNotFoundException", "Workflow not found: x")),
    ],
)
def test_unknown_paths_and_models(home, method, path, expected):
    assert error(home.ask(method, path)[2]) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"raise", (503, "InternalServerException", "Prediction failed")),
        (b"exception 418", (418, "InternalServerException", "my own text")),
        (b"exit", (500, "InternalServerException", "Worker died.")),
        (b"kill", (507, "InternalServerException", "Worker died.")),
    ],
)
def test_failures_of_handlers_have_torchserves_codes(home, body, expected):
    eventually("m is ready", lambda: home.predict("m", b"pid")[0] == 200)
    status, answer = home.predict("m", body)
    assert (status, error(answer)) == (expected[0], expected)
    eventually("m is ready again", lambda: home.predict("m", b"pid")[0] == 200)


def test_a_handler_that_hangs_affects_only_its_worker(home):
    home.register("late-1.0.mar")
    began = time.monotonic()
    status, answer = home.predict("late", b"sleep 600")
    assert error(answer) == (500, "InternalServerException", "Worker died.")
    assert time.monotonic() - began > 0.9
    eventually("the worker is restarted", lambda: home.predict("late", b"pid")[0] == 200)
    assert home.manage("DELETE", "/models/late")[0] == 200


def test_status_headers_and_bytes_of_an_answer(home):
    status, headers, _ = home.ask("POST", "/predictions/m", b"status 299")
    assert (status, headers[":reason"], headers["x-my"], headers["content-type"]) == (299, "My Words", "mine", "text/x-mine")
    assert home.predict("m", b"bytes") == (200, b"\x00\xff")
    status, answer = home.predict("m", b"x" * 6_600_000)
    assert (status, error(answer)[1]) == (413, "BadRequestException")
    status, answer = home.predict("m", b"garbage", {"Content-Type": "multipart/form-data; boundary=B"})
    assert (status, error(answer)[1]) == (400, "BadRequestException")


def test_parts_of_an_answer_are_sent_as_chunks(home):
    status, headers, body = home.ask("POST", "/predictions/streams", b"parts 3")
    assert (status, headers.get("transfer-encoding"), body) == (200, "chunked", b"part 0;part 1;part 2;end")
    status, headers, body = home.ask("POST", "/predictions/streams", b"bytes")
    assert (status, body) == (200, b"\x00\xff")


@pytest.mark.smoke
def test_models_are_described(home):
    status, found = home.manage("GET", "/models/m")
    assert status == 200
    keys = """modelName modelVersion modelUrl runtime minWorkers maxWorkers batchSize maxBatchDelay responseTimeout startupTimeout
        maxRetryTimeoutInSec clientTimeoutInMills parallelType parallelLevel deviceType continuousBatching useJobTicket useVenv
        stateful sequenceMaxIdleMSec sequenceTimeoutMSec maxNumSequence maxSequenceJobQueueSize loadedAtStartup workers
        jobQueueStatus"""
    assert list(found[0]) == keys.split()
    worker = found[0]["workers"][0]
    assert list(worker) == ["id", "startTime", "status", "memoryUsage", "pid", "gpu", "gpuUsage"]
    assert (worker["id"], worker["status"], worker["gpu"], worker["gpuUsage"]) == ("9000", "READY", False, "N/A")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", worker["startTime"])
    assert worker["memoryUsage"] > 1_000_000
    assert found[0]["jobQueueStatus"] == {"remainingCapacity": 3, "pendingRequests": 0}
    assert (found[0]["modelUrl"], found[0]["loadedAtStartup"]) == ("m-1.0.mar", True)
    assert home.predict("m", b"pid") == (200, str(worker["pid"]).encode())
    status, found = home.manage("GET", "/models/m?customized=true")
    assert (status, found[0]["customizedMetadata"]) == (200, {"says": "I am shown"})
    assert home.manage("GET", "/v1/models/m") == (200, {"name": "m", "ready": True})
    assert home.manage("GET", "/models/m/9") == (404, {"code": 404, "type": "ModelVersionNotFoundException", "message": "Model version: 9 does not exist for model: m"})


def test_the_list_of_models_has_pages(home):
    everything = [{"modelName": name, "modelUrl": f"{name}-1.0.mar"} for name in ("m", "streams")]
    assert home.manage("GET", "/models") == (200, {"models": everything})
    assert home.manage("GET", "/models?limit=1") == (200, {"nextPageToken": "1", "models": everything[:1]})
    assert home.manage("GET", "/models?limit=1&next_page_token=1")[1]["models"] == everything[1:]
    assert home.manage("GET", "/models?limit=-3&next_page_token=x")[1]["models"] == everything


def test_a_model_is_registered_scaled_and_unregistered(home):
    url = home.archive("q")
    zero = 'Model "q" Version: 1.0 registered with 0 initial workers. Use scale workers API to add workers for the model.'
    assert home.register(url, "&initial_workers=0") == zero
    refused = {"code": 503, "type": "ServiceUnavailableException", "message": f'Model "q"{NO_WORKER}'}
    assert json.loads(home.predict("q")[1]) == refused
    assert json.loads(home.predict("q", path="/1.0")[1])["message"] == f'Model "q" Version 1.0"{NO_WORKER}'
    describe = 'Model "q" has no worker to serve describe request. Please use scale workers API to add workers.'
    assert home.manage("GET", "/models/q?customized=true")[1]["message"] == describe
    assert home.manage("GET", "/v1/models/q")[1]["ready"] is False
    assert home.manage("PUT", "/models/q?min_worker=2&max_worker=1") == (400, {"code": 400, "type": "BadRequestException", "message": "max_worker cannot be less than min_worker."})
    assert home.manage("PUT", "/models/q?min_worker=-1")[1]["message"] == "min_worker is -1; allowed are whole numbers from 0"
    assert home.manage("PUT", "/models/q?min_worker=2&synchronous=true") == (200, {"status": "Workers scaled to 2 for model: q"})
    workers = home.manage("GET", "/models/q")[1][0]["workers"]
    assert [worker["status"] for worker in workers] == ["READY", "READY"]
    assert home.predict("q", b"pid")[1] in [str(worker["pid"]).encode() for worker in workers]
    assert home.manage("PUT", "/models/q/1.0?min_worker=1&synchronous=true")[1] == {"status": "Workers scaled to 1 for model: q, version: 1.0"}
    assert len(home.manage("GET", "/models/q")[1][0]["workers"]) == 1
    assert home.manage("PUT", "/models/q?min_worker=0&synchronous=true")[0] == 200
    assert home.predict("q")[0] == 503
    assert home.manage("PUT", "/models/q?min_worker=1") == (202, {"status": "Processing worker updates..."})
    eventually("q is ready", lambda: home.predict("q", b"pid")[0] == 200)
    conflict = {"code": 409, "type": "ConflictStatusException", "message": "Model version 1.0 is already registered for model q"}
    assert home.manage("POST", f"/models?url={url}") == (409, conflict)
    assert home.manage("DELETE", "/models/q") == (200, {"status": 'Model "q" unregistered'})
    assert home.manage("DELETE", "/models/q") == (404, {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: q"})
    assert home.predict("q")[0] == 404


def test_versions_and_the_default_one(home):
    home.archive("v")
    home.archive("v", version="2.0")
    assert home.register("v-1.0.mar") == 'Model "v" Version: 1.0 registered with 1 initial workers'
    home.register("v-2.0.mar")
    pids = [home.predict("v", b"pid", path=path)[1] for path in ("", "/1.0", "/2.0")]
    assert pids[0] == pids[1] != pids[2]
    assert [found["modelVersion"] for found in home.manage("GET", "/models/v/all")[1]] == ["1.0", "2.0"]
    updated = 'Default version successfully updated for model "v" to "2.0"'
    assert home.manage("PUT", "/models/v/2.0/set-default") == (200, {"status": updated})
    assert home.predict("v", b"pid")[1] == pids[2]
    missing = {"code": 404, "type": "ModelVersionNotFoundException", "message": "Model version 9 does not exist for model v"}
    assert home.manage("PUT", "/models/v/9/set-default") == (404, missing)
    kept = {"code": 403, "type": "InvalidModelVersionException", "message": "Cannot remove default version for model v"}
    assert home.manage("DELETE", "/models/v") == (403, kept)
    assert home.manage("DELETE", "/models/v/1.0") == (200, {"status": 'Model "v" unregistered'})
    assert home.predict("v", b"pid")[1] == pids[2]
    home.register("v-1.0.mar")
    assert home.predict("v", b"pid", path="/1.0")[0] == 200
    for path in ("/1.0", ""):
        assert home.manage("DELETE", f"/models/v{path}")[0] == 200


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", (400, "BadRequestException", "Parameter url is required.")),
        ("?url=nope.mar", (404, "ModelNotFoundException", None)),
        ("?url=../x.mar", (404, "ModelNotFoundException", "Relative path is not allowed in url: ../x.mar")),
        ("?url=m-1.0.mar&model_name=r&runtime=java", (400, "BadRequestException", "Invalid RuntimeType value: java")),
        ("?url=fails-1.0.mar", (500, "InternalServerException", None)),
    ],
)
def test_refused_registrations(home, query, expected):
    status, found = home.manage("POST", f"/models{query}")
    assert (status, found["code"], found["type"]) == (expected[0], *expected[:2])
    assert expected[2] is None or found["message"] == expected[2]
    assert [model["modelName"] for model in home.manage("GET", "/models")[1]["models"]] == ["m", "streams"]
    if "fails" in query:
        assert found["message"].startswith("Failed to start workers for model fails version: 1.0")


def test_a_registration_may_be_json(home):
    home.archive("j")
    said = {"url": "j-1.0.mar", "model_name": "json", "initial_workers": 0, "batch_size": 4, "max_batch_delay": 7, "response_timeout": 9, "startup_timeout": 11}
    assert home.manage("POST", "/models", json.dumps(said), JSON)[0] == 200
    found = home.manage("GET", "/models/json")[1][0]
    assert [found[key] for key in ("batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout", "minWorkers")] == [4, 7, 9, 11, 0]
    assert home.manage("DELETE", "/models/json")[0] == 200
    texts = {"url": "j-1.0.mar", "model_name": "7", "initial_workers": "0", "batch_size": "4", "max_batch_delay": 7.0, "synchronous": "true"}
    assert home.manage("POST", "/models", json.dumps(texts), JSON)[0] == 200
    found = home.manage("GET", "/models/7")[1][0]
    assert [found[key] for key in ("batchSize", "maxBatchDelay", "minWorkers")] == [4, 7, 0]
    assert home.manage("DELETE", "/models/7")[0] == 200
    for bad, said in (("{bad", "key must be"), ('["j-1.0.mar"]', "expected a map"), ('{"batch_size": 1.5}', "1.5 is not a whole number"), ('{"synchronous": 1}', "1 is neither true nor false")):
        status, answer = home.manage("POST", "/models", bad, JSON)
        assert status == 400 and said in answer["message"], answer


def test_a_full_queue_refuses_with_torchserves_text(home):
    home.archive("full")
    home.register("full-1.0.mar")
    with ThreadPoolExecutor(12) as pool:
        with held(home, "full"):
            answers = [pool.submit(home.predict, "full", b"pid")]
            until_dispatched(home, "full", 1)
            answers += [pool.submit(home.predict, "full", b"pid") for _ in range(11)]
            answered = as_completed(answers)
            refused = [next(answered).result() for _ in range(8)]
    assert sorted(answer.result()[0] for answer in answers) == [200] * 4 + [503] * 8
    code, kind, message = error(refused[0][1])
    assert (code, kind) == (503, "ServiceUnavailableException")
    assert message.startswith(f'Model "full"{NO_WORKER}') and "queue" in message[len(NO_WORKER) :]
    assert home.manage("DELETE", "/models/full")[0] == 200


def test_tensors_become_the_document_of_the_envelope(home):
    """REST with binary tensors, gRPC with raw contents, through the KServe package and through TorchServe's."""
    values = np.array([[1.5, -2.0]], np.float32)
    clients = [(tritonclient.http, tritonclient.http.InferenceServerClient(f"{HOST}:{home.inference}"))]
    clients.append((tritonclient.grpc, tritonclient.grpc.InferenceServerClient(f"{HOST}:{home.grpc}")))
    for module, client in clients:
        inputs = [module.InferInput("IN0", [1, 2], "FP32"), module.InferInput("IN1", [2], "BYTES")]
        inputs[0].set_data_from_numpy(values)
        inputs[1].set_data_from_numpy(np.array([b"a", "ü".encode()], np.object_))
        outputs = [module.InferRequestedOutput(name) for name in ("OUT0", "OUT1")]
        found = client.infer("m", inputs, request_id="7", outputs=outputs)
        assert np.array_equal(found.as_numpy("OUT0"), values)
        assert list(found.as_numpy("OUT1")) == [b"a", "ü".encode()]
        assert client.is_model_ready("m") and not client.is_model_ready("nope")
        assert client.is_server_live()
        client.close()
    channel = grpc.insecure_channel(f"{HOST}:{home.grpc}")
    live = channel.unary_unary("/org.pytorch.serve.grpc.openinference.GRPCInferenceService/ServerLive")
    assert fields(live(b"")) == {1: [1]}


def test_metrics_are_torchserves_text(home):
    home.predict("m", b"pid")
    home.predict("m", b"pid", path="/1.0")
    status, headers, body = home.ask("GET", "/metrics", port=home.metrics)
    text = body.decode()
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "# HELP Requests5XX Torchserve prometheus counter metric with unit: Count\n# TYPE Requests5XX counter\n" in text
    for name in ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"):
        for version in ("default", "1.0"):
            assert re.search(rf'^{name}\{{model_name="m",model_version="{version}",hostname="[^"]+",\}} \d+\.\d+(E\d+)?$', text, re.M), name
    assert re.search(r'^WorkerLoadTime\{WorkerName="W-9000-m_1\.0",Level="Host",Hostname="[^"]+",\} \d+\.0$', text, re.M)
    assert re.search(r'^Requests2XX\{Level="Host",Hostname="[^"]+",\} \d+\.0$', text, re.M)
    assert 'model_version="1",' not in re.sub(r"^(nv_|pharos_).*", "", text, flags=re.M)
    only = home.ask("GET", "/metrics?name[]=Requests2XX", port=home.metrics)[2].decode()
    assert only.count("# HELP") == 1 and "\nRequests2XX{" in only
    assert home.ask("GET", "/metrics?name[]=none", port=home.metrics)[2] == b""
    assert home.ask("POST", "/metrics/x", port=home.metrics)[0] == 200
    assert home.ask("GET", "/", port=home.metrics)[0] == 405


def test_metrics_are_protobuf_for_scrapers_that_prefer_it(home):
    """TorchServe's server has no such format."""
    home.predict("m", b"pid")
    _, headers, body = home.ask("GET", "/metrics", headers={"Accept": f"{CONTENT_TYPE};q=0.5,text/plain;q=0.2"}, port=home.metrics)
    assert headers["content-type"] == CONTENT_TYPE
    families = metric_families.decode(body)
    text = samples(home.ask("GET", "/metrics?name[]=ts_inference_requests_total", port=home.metrics)[2].decode())
    total = sum(metric.counter.value for metric in families["ts_inference_requests_total"].metric)
    assert total == sum(text.values()) > 0
    accept = {"Accept": "application/openmetrics-text"}
    assert home.ask("GET", "/metrics", headers=accept, port=home.metrics)[1]["content-type"].startswith("text/plain")


def test_the_live_page_is_on_the_metrics_port(home):
    """Its documents, and nothing else beside them; other ports do not have it."""
    status, headers, body = home.ask("GET", "/dashboard", port=home.metrics)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert home.ask("GET", "/dashboard/events.js", port=home.metrics)[0] == 200
    assert home.ask("GET", "/dashboard/none.js", port=home.metrics)[0] == 404
    assert home.ask("POST", "/dashboard", port=home.metrics)[0] == 405
    assert home.ask("GET", "/dashboard")[0] == 404


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
def test_the_live_page_draws_torchserves_text(home, tmp_path):
    """The page reads the scrape in TorchServe's form, and shows the models by their names here."""
    with browser.Browser(tmp_path / "profile") as page:
        page.open(f"http://{HOST}:{home.metrics}/dashboard")
        text = "document.getElementById('models')?.innerText ?? ''"

        def shown():
            home.predict("m", b"pid")
            return re.search(r"\bm\s+1\s+1 of 1 ready\s+[\d.]+/s\s", page.ask(text))

        eventually("the model has a row with its rate", shown)
        assert page.ask("document.querySelectorAll('#latency path.line').length") == 3
        assert page.complaints == []


def test_requests_are_counted_by_class_and_by_url(home):
    def value(name, labels=""):
        text = home.ask("GET", f"/metrics?name[]={name}", port=home.metrics)[2].decode()
        found = re.search(rf"^{name}\{{{labels}[^}}]*\}} (\S+)$", text, re.M)
        return float(found.group(1)) if found else 0.0

    before = value("Requests4XX"), value("Requests5XX"), value("ts_inference_requests_total", 'model_name="m",model_version="default"')
    home.predict("nope")
    home.predict("m", b"raise")
    home.ask("GET", "/models/nope", port=home.management)
    after = value("Requests4XX"), value("Requests5XX"), value("ts_inference_requests_total", 'model_name="m",model_version="default"')
    assert [new - old for new, old in zip(after, before)] == [2, 1, 1]


def test_the_access_log_has_each_request(home):
    home.ask("GET", "/ping?x=1")
    line = r'^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - /127\.0\.0\.1:\d+ "GET /ping\?x=1 HTTP/1\.1" 200 \d+$'
    eventually("a line about the request", lambda: re.search(line, home.access(), re.M))


@pytest.mark.smoke
def test_predictions_by_grpc(home):
    assert json.loads(call(home.grpc, INFERENCE + "Ping")[1][0]) == {"status": "Healthy"}
    found = call(home.grpc, INFERENCE + "Predictions", (1, "m"), body("bytes"))
    assert found[1] == [b"\x00\xff"]
    shown = json.loads(call(home.grpc, INFERENCE + "Predictions", (1, "m"), (2, "1.0"), body("x"))[1][0])
    assert shown["data"] == {"body": ["bytearray", "bytearray(b'x')"]}
    parts = call(home.grpc, INFERENCE + "StreamPredictions", (1, "streams"), body("parts 2"), stream=True)
    assert [part[1][0] for part in parts] == [b"part 0;", b"part 1;", b"end"]


def test_predictions_report_their_times(home):
    """`request-timing` gets the times over HTTP and gRPC; their sums are what the requests added to TorchServe's counters."""
    counters = ("ts_inference_latency_microseconds", "ts_queue_latency_microseconds")
    latencies = lambda: [total(home.scrape(), name, model_name="m") for name in counters]  # noqa: E731
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    requested = {"request-timing": "true", "traceparent": parent}
    before, values = latencies(), []
    for _ in range(3):
        status, headers, _ = home.ask("POST", "/predictions/m", b"x", requested)
        assert (status, headers["traceparent"]) == (200, parent)
        values.append(headers["server-timing"])
    with grpc.insecure_channel(f"{HOST}:{home.grpc}") as channel:
        send = channel.unary_unary(INFERENCE + "Predictions").with_call
        _, answered = send(message((1, "m"), body("x")), metadata=tuple(requested.items()), timeout=DEADLINE_S)
    metadata = dict(answered.initial_metadata())
    assert metadata["traceparent"] == parent
    values.append(metadata["server-timing"])
    after = latencies()
    assert all(value.endswith('batch;desc="1"') for value in values)
    for name, old, new in zip(("total", "queue"), before, after):
        sent = sum(float(re.search(rf"\b{name};dur=([\d.]+)", value)[1]) * 1000 for value in values)
        assert sent == pytest.approx(new - old, abs=0.01), name
    # A streamed answer begins before its times are known.
    assert "server-timing" not in home.ask("POST", "/predictions/streams", b"parts 2", requested)[1]
    assert not {"server-timing", "traceparent"} & set(home.ask("POST", "/predictions/m", b"x")[1])


@pytest.mark.parametrize(
    ("parts", "code", "details"),
    [
        ([(1, "x")], grpc.StatusCode.INTERNAL, "Model not found: x\norg.pytorch.serve.archive.model.ModelNotFoundException"),
        ([], grpc.StatusCode.INTERNAL, "Parameter model_name is required.\nBadRequestException.()"),
        ([(1, "m"), body("raise")], grpc.StatusCode.UNAVAILABLE, "Prediction failed\norg.pytorch.serve.http.InternalServerException"),
        ([(1, "m"), body("exception 418")], grpc.StatusCode.FAILED_PRECONDITION, "my own text\norg.pytorch.serve.http.InternalServerException"),
    ],
)
def test_failures_by_grpc(home, parts, code, details):
    with pytest.raises(grpc.RpcError) as failed:
        call(home.grpc, INFERENCE + "Predictions", *parts)
    assert (failed.value.code(), failed.value.details()) == (code, details)


def test_management_by_grpc(home):
    home.archive("g")
    ask = lambda method, *parts: call(home.grpc_management, MANAGEMENT + method, *parts)[1][0].decode()
    assert ask("RegisterModel", (9, "g-1.0.mar"), (3, 1), (8, 1)) == 'Model "g" Version: 1.0 registered with 1 initial workers'
    assert json.loads(ask("DescribeModel", (1, "g")))[0]["workers"][0]["status"] == "READY"
    assert json.loads(ask("DescribeModel", (1, "g"), (3, 1)))[0]["customizedMetadata"] == {"says": "I am shown"}
    assert "g" in [model["modelName"] for model in json.loads(ask("ListModels"))["models"]]
    assert ask("ScaleWorker", (1, "g"), (4, 2), (6, 1)) == "Workers scaled to 2 for model: g"
    assert ask("SetDefault", (1, "g"), (2, "1.0")) == 'Default version successfully updated for model "g" to "1.0"'
    assert ask("UnregisterModel", (1, "g")) == 'Model "g" unregistered'
    with pytest.raises(grpc.RpcError) as failed:
        ask("UnregisterModel", (1, "g"))
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND
    assert failed.value.details() == "Model not found: g\norg.pytorch.serve.archive.model.ModelNotFoundException"


def test_tokens_permit_their_requests(tmp_path):
    server = Home(tmp_path, arguments=())
    failed = {"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed. Token either incorrect, expired, or not provided correctly"}
    with server:
        path = tmp_path / "key_file.json"
        assert path.stat().st_mode & 0o777 == 0o600
        keys = json.loads(path.read_text())
        assert list(keys) == ["management", "inference", "API"]
        assert all(len(key["key"]) == 8 for key in keys.values())
        bearer = lambda name: {"Authorization": f"Bearer {keys[name]['key']}"}
        for headers, status in [({}, 400), (bearer("management"), 400), (bearer("inference"), 200)]:
            assert server.ask("GET", "/ping", headers=headers)[0] == status
        assert server.manage("GET", "/models") == (400, failed)
        assert server.manage("GET", "/models", headers=bearer("management")) == (200, {"models": []})
        off = {"code": 405, "type": "MethodNotAllowedException", "message": "Requested method is not allowed, please refer to API document."}
        assert server.manage("POST", "/models?url=x", headers=bearer("management")) == (405, off)
        assert server.ask("GET", "/metrics", port=server.metrics)[0] == 200
        renewed = server.ask("GET", "/token?type=inference", headers=bearer("API"), port=server.management)
        assert (renewed[0], renewed[2]) == (200, b"\n")
        assert server.ask("GET", "/ping", headers=bearer("inference"))[0] == 400
        keys = json.loads(path.read_text())
        assert server.ask("GET", "/ping", headers=bearer("inference"))[0] == 200
        with pytest.raises(grpc.RpcError) as refused:
            call(server.grpc, INFERENCE + "Ping")
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        metadata = [("authorization", bearer("inference")["Authorization"])]
        assert 1 in call(server.grpc, INFERENCE + "Ping", metadata=metadata)


def test_one_address_may_serve_everything(tmp_path):
    server = Home(tmp_path, ["load_models=m-1.0.mar"])
    text = (tmp_path / "config.properties").read_text()
    for port in (server.management, server.metrics):
        text = text.replace(f"http://{HOST}:{port}", f"http://{HOST}:{server.inference}")
    (tmp_path / "config.properties").write_text(text)
    server.archive("m")
    with server:
        eventually("m is ready", lambda: server.predict("m", b"pid")[0] == 200)
        for path in ("/ping", "/models/m", "/metrics", "/v1/models/m", "/v2/models/m/ready", "/v2/models/m"):
            assert server.ask("GET", path)[0] == 200, path
        assert server.ask("POST", "/models/m/invoke", b"bytes")[2] == b"\x00\xff"
        assert json.loads(server.ask("GET", "/v2/models/m")[2])["versions"] == ["1.0"]


def test_each_form_of_a_version_counts_in_one_series(home):
    """Clients of the v2 protocol can write a number in any form. The second version of a model has a name of this server."""
    for version in ("1.0", "2.0"):
        home.register(home.archive("forms", version=version))
    for version in ("1", "01", "+1", "0" * 300 + "1"):
        assert home.ask("POST", f"/v2/models/forms@2.0/versions/{version}/infer", b'{"inputs": []}', JSON)[0] == 400
    found = {labels: value for (name, labels), value in home.scrape().items() if name == "ts_inference_requests_total"}
    versions = {dict(labels)["model_version"]: value for labels, value in found.items() if dict(labels)["model_name"] == "forms@2.0"}
    assert versions == {"1": 4}
    for version in ("2.0", "1.0"):
        assert home.manage("DELETE", f"/models/forms/{version}")[0] == 200


def test_requests_share_a_batch(home):
    home.register("batched-1.0.mar")
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: home.predict("batched", b"pid"), range(3)))
    assert [status for status, _ in answers] == [200] * 3
    statistics = json.loads(home.ask("GET", "/v2/models/batched/stats")[2])["model_stats"][0]
    assert (statistics["inference_count"], statistics["execution_count"]) == (3, 1)
    assert home.manage("DELETE", "/models/batched")[0] == 200


def test_scrapes_have_the_metrics_of_the_machine(home):
    """With `metrics_mode=prometheus`, in which only TorchServe's port shows them."""
    eventually("the machine is measured", lambda: all(total(home.scrape(), name) > 0 for name in ("MemoryUsed", "DiskUsage")))


def test_the_mode_in_the_definition_of_metrics_applies(tmp_path):
    """Without `metrics_mode` in config.properties."""
    (tmp_path / "metrics.yaml").write_text("mode: both\nts_metrics:\n  gauge:\n    - {name: MemoryUsed, unit: Megabytes, dimensions: [Level, Hostname]}\n")
    with Home(tmp_path, [f"metrics_config={tmp_path / 'metrics.yaml'}"]) as home:
        eventually("the scrape has it", lambda: total(home.scrape(), "MemoryUsed") > 0)
        eventually("the log has it", lambda: "MemoryUsed.Megabytes:" in (home.folder / "logs/ts_metrics.log").read_text())
