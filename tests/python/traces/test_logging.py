"""The logging extension, the formats of log lines, the log file, and request log lines."""

import http.client
import json
import queue
import re
import signal

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from harness.inference import one
from harness.models import copy_models
from harness.ports import free_ports
from harness.processes import held
from harness.server import EXAMPLES
from harness.statistics import until_received
from harness.waiting import DEADLINE_S, eventually
from protocol import cloud

DEFAULTS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


@pytest.fixture
def quiet(start):
    """A server with one model whose settings a test may change."""
    return start(["identity_fp32"])


def post(server, body) -> tuple:
    """Returns status and answer of a change over HTTP."""
    status, text = server.ask("POST", "/v2/logging", json.dumps(body))
    return status, json.loads(text)


@pytest.mark.smoke
def test_settings_over_http(quiet):
    """Settings that a request omits are kept; the answer has the current settings; a refused request changes nothing."""
    assert post(quiet, {}) == (200, DEFAULTS)
    changed = DEFAULTS | {"log_verbose_level": 1, "log_info": False, "log_format": "ISO8601"}
    assert post(quiet, {"log_verbose_level": 1, "log_info": False, "log_format": "ISO8601"}) == (200, changed)
    for body, status, text in [
        ({"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, 500, "Unable to parse 'log_info': attempt to access JSON non-boolean as boolean"),
        ({"log_error": False, "log_verbose_level": -1}, 500, "Unable to parse 'log_verbose_level'"),
        ({"log_format": "xml"}, 503, "invalid argument for --log_format, got: xml; allowed are default, ISO8601, json"),
        ({"log_color": True}, 400, "unknown log setting 'log_color'; allowed: log_info"),
        ([], 500, "failed to parse the request JSON buffer"),
    ]:
        got = post(quiet, body)
        assert got[0] == status, got
        assert text in got[1]["error"]
    status, text = quiet.get("/v2/logging")
    assert (status, json.loads(text)) == (200, changed)


def test_tritons_clients(quiet):
    """Both clients read and write the settings in their forms."""
    with tritonclient.http.InferenceServerClient(quiet.http) as client:
        assert client.get_log_settings() == DEFAULTS
        assert client.update_log_settings({"log_warning": False})["log_warning"] is False
    with tritonclient.grpc.InferenceServerClient(quiet.grpc) as client:
        assert client.get_log_settings(as_json=True)["settings"]["log_format"] == {"string_param": "default"}
        settings = {"log_warning": True, "log_verbose_level": 2, "log_format": "ISO8601"}
        settings = client.update_log_settings(settings, as_json=True)["settings"]
        assert settings["log_verbose_level"] == {"uint32_param": 2}
        for wrong, text in [
            ({"log_file": "x"}, "log file location can not be updated through network protocol"),
            ({"log_color": True}, "unknown log setting 'log_color'"),
            ({"log_format": "xml"}, "invalid argument for --log_format, got: xml; allowed are default, ISO8601, json"),
        ]:
            with pytest.raises(InferenceServerException, match=re.escape(text)):
                client.update_log_settings(wrong)
    with grpc.insecure_channel(quiet.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, kind in [("log_info", "boolean"), ("log_verbose_level", "unsigned integer"), ("log_format", "string")]:
            request = service_pb2.LogSettingsRequest()
            if kind == "string":
                request.settings[name].bool_param = True
            else:
                request.settings[name].string_param = "x"
            with pytest.raises(grpc.RpcError) as error:
                stub.LogSettings(request)
            assert (error.value.code().name, error.value.details()) == ("INVALID_ARGUMENT", f"expect {kind} for '{name}'")


def lines(path) -> list:
    """Returns the lines of a log."""
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("default", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z  INFO answered protocol=http .*"),
        ("ISO8601", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ access\] answered protocol=http .*"),
        ("json", None),
    ],
)
def test_a_line_for_each_request(start, form, pattern):
    """Lines have the configured format; without the option requests are not logged."""
    server = start(["identity_fp32"], f"--log-format={form}", "--log-access")
    assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    assert server.get("/v2/none")[0] == 404
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live()
    eventually("three lines", lambda: sum("answered" in line for line in lines(server.log)) >= 3)
    answered = [line for line in lines(server.log) if "answered" in line and "health/ready" not in line]
    if form == "json":
        assert all(isinstance(json.loads(line), dict) for line in lines(server.log))
        answered = [json.loads(line) for line in answered]
        assert [(line["protocol"], line["request"], line["status"]) for line in answered] == [
            ("http", "POST /v2/models/identity_fp32/infer", 200),
            ("http", "GET /v2/none", 404),
            ("grpc", "/inference.GRPCInferenceService/ServerLive", 0),
        ]
        assert all(line["level"] == "INFO" and 0 < float(line["ms"]) < 1e4 for line in answered)
    else:
        assert re.fullmatch(pattern, answered[0]), answered
        assert "request=GET /v2/none status=404 ms=" in answered[1]


def test_verbose_logs_have_a_line_for_each_request(start):
    """At level 1 and more, which a client can set while the server runs."""
    server = start(["identity_fp32"])
    count = lambda: sum("request=GET /v2/none status=404" in line for line in lines(server.log))
    assert server.get("/v2/none")[0] == 404
    for level, expected in [(1, 1), (0, 1), (2, 2)]:
        assert post(server, {"log_verbose_level": level})[0] == 200
        assert server.get("/v2/none")[0] == 404
        eventually(f"level {level}", lambda expected=expected: count() >= expected)
        assert count() == expected


def test_streams_are_logged_with_the_status_that_ends_them(start):
    """When they end, because the status follows the responses."""
    server = start(["identity_fp32"], "--log-format=json", "--log-access")

    def request(model: str) -> service_pb2.ModelInferRequest:
        tensor = service_pb2.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 1])
        return service_pb2.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[bytes(4)])

    def logged() -> list:
        found = [json.loads(line) for line in lines(server.log)]
        return [line["status"] for line in found if line.get("request", "").endswith("/ModelStreamInfer")]

    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests = queue.Queue()
        answers = stub.ModelStreamInfer(iter(requests.get, None), metadata=[("triton_grpc_error", "true")])
        requests.put(request("identity_fp32"))
        assert not next(answers).error_message
        assert logged() == [], "the stream has not ended"
        requests.put(request("none"))
        with pytest.raises(grpc.RpcError) as error:
            next(answers)
        eventually("the failed stream is logged", lambda: logged() == [error.value.code().value[0]])
        assert error.value.code() is not grpc.StatusCode.OK
        requests.put(None)
        assert [answer.error_message for answer in stub.ModelStreamInfer(iter([request("identity_fp32")]))] == [""]
        eventually("the other one is logged", lambda: logged()[1:] == [0])


def test_other_streams_are_logged_when_they_end(start):
    """For example that of the reflection service."""
    server = start(["identity_fp32"], "--log-format=json", "--log-access")

    def logged() -> list:
        found = [json.loads(line) for line in lines(server.log)]
        return [line["status"] for line in found if line.get("request", "").endswith("/ServerReflectionInfo")]

    with grpc.insecure_channel(server.grpc) as channel:
        requests = queue.Queue()
        stream = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        answers = stream(iter(requests.get, None))
        # `list_services` with an empty text.
        requests.put(bytes([7 << 3 | 2, 0]))
        assert next(answers)
        assert logged() == [], "the stream has not ended"
        requests.put(None)
        assert list(answers) == []
        eventually("the stream is logged", lambda: logged() == [0])


def test_requests_of_clients_that_disconnect_are_logged(start):
    """With the status that the metrics count, although none was sent."""
    server = start(["identity_fp32"], "--log-access")
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client, held(server, "identity_fp32"):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_S)
        connection.request("POST", "/v2/models/identity_fp32/infer", json.dumps(one("FP32", [1, 1], [1])))
        until_received(server, "identity_fp32", 1)
        connection.close()
        call = client.async_infer("identity_fp32", [tensor], lambda *_, **__: None)
        until_received(server, "identity_fp32", 2)
        call.cancel()
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("identity_fp32", [tensor], client_timeout=0.2)
        for request in (
            "protocol=http request=POST /v2/models/identity_fp32/infer status=499",
            "protocol=grpc request=/inference.GRPCInferenceService/ModelInfer status=1",
        ):
            pattern = rf" INFO cancelled {request} ms=\d+\.\d{{3}}$"
            eventually(request, lambda pattern=pattern: re.search(pattern, server.log.read_text(), re.MULTILINE))
        # The server answers at the deadline, unless the client has left a moment earlier.
        pattern = r" INFO (answered|cancelled) protocol=grpc request=/inference.GRPCInferenceService/ModelInfer status=4 ms="
        eventually("the late request is logged", lambda: re.search(pattern, server.log.read_text()))


def test_requests_on_every_listener_are_logged(start, tmp_path):
    """The line has the path that the client sent, also at endpoints that are rewritten to those of v2, and for refused requests."""
    sagemaker, vertex_ai = free_ports(2)
    options = ["--log-access", *cloud.options(sagemaker, vertex_ai), "--model-control-mode=explicit", "--load-model=simple"]
    server = start([], *options, repository=EXAMPLES, environment=cloud.ENVIRONMENT)
    both = cloud.Both(sagemaker, vertex_ai, False)
    cloud.until_there(both)
    place = str(copy_models(tmp_path / "other", ["simple"], EXAMPLES))
    asked = [
        ("sagemaker", "GET", "/models", None),
        ("sagemaker", "POST", "/models", {"model_name": "id", "url": place}),
        ("sagemaker", "GET", "/models/id", None),
        ("sagemaker", "POST", "/models/id/invoke", {}),
        ("sagemaker", "DELETE", "/models/id", None),
        ("sagemaker", "POST", "/invocations", {}),
        ("sagemaker", "GET", "/elsewhere", None),
        ("vertex_ai", "POST", cloud.PREDICT, {}),
        ("vertex_ai", "GET", "/elsewhere", None),
    ]
    expected = []
    for where, method, path, body in asked:
        status = both.ask(where, method, path, None if body is None else json.dumps(body))[0]
        expected.append((f"{method} {path}", str(status)))
    for path in ("/metrics", "/dashboard", "/elsewhere"):
        expected.append((f"GET {path}", str(server.get(path, server.metrics)[0])))
    status = server.ask("POST", "/v2/models/simple/infer", b"0\r\n\r\n", headers={"Transfer-Encoding": "gzip, chunked"})[0]
    expected.append(("POST /v2/models/simple/infer", str(status)))
    assert status == 501
    text = server.log.read_text()
    logged = re.findall(r" answered protocol=http request=(.*) status=(\d+) ms=", text)
    logged = [line for line in logged if line[0] not in ("GET /v2/health/ready", "GET /ping", f"GET {cloud.HEALTH}")]
    assert logged == expected


def test_a_log_file_is_reopened(start, tmp_path):
    """SIGHUP makes the server write to a new file after the old one was renamed."""
    path = tmp_path / "pharos.log"
    server = start(["identity_fp32"], f"--log-file={path}")
    eventually("the server logs that it is ready", lambda: any("ready" in line for line in lines(path)))
    assert lines(server.log) == []
    path.rename(tmp_path / "old.log")
    server.process.send_signal(signal.SIGHUP)
    eventually("there is a new file", lambda: path.exists() and lines(path))
    assert json.loads(server.get("/v2/logging")[1])["log_file"] == str(path)
    started = start(["identity_fp32"], "--log-file=/none/pharos.log", wait=False)
    assert started.process.wait(DEADLINE_S) != 0
    assert "--log-file '/none/pharos.log'" in started.log.read_text()
