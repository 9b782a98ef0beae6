"""Load reports (ORCA): the response header, the gRPC trailer and the stream of reports."""

import base64
import http.client
import json
import queue
import re
import subprocess

import grpc
import pytest

from harness import orca
from harness.inference import simple
from harness.waiting import DEADLINE_S, eventually
from harness.wire import grpc_infer, grpc_tensor, tensor

GENERATE = json.dumps({"INPUT0": 1.0})
V1 = json.dumps({"instances": [[1.0]]})


def post(server, path: str, body, report_format=None, method="POST") -> tuple:
    """Returns the status and the load report in the response; None without one."""
    connection = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
    try:
        connection.request(method, path, body, {orca.REQUEST: report_format} if report_format else {})
        response = connection.getresponse()
        response.read()
        return response.status, response.getheader(orca.RESPONSE)
    finally:
        connection.close()


def infer(server, report_format=None, model="simple") -> tuple:
    return post(server, f"/v2/models/{model}/infer", json.dumps(simple()), report_format)


@pytest.fixture(scope="module", autouse=True)
def sampled(server):
    """Waits until the models are in the reports, which takes up to a second after they were loaded."""
    eventually("the models are sampled", lambda: "utilization" in orca.from_header(infer(server, "json")[1])["named_metrics"])


@pytest.mark.smoke
@pytest.mark.parametrize(("report_format", "prefix"), [("json", "JSON {"), ("TEXT", "TEXT "), ("Binary", "BIN ")])
def test_each_form_has_the_same_fields(server, report_format, prefix):
    status, value = infer(server, report_format)
    assert status == 200 and value.startswith(prefix), value
    report = orca.from_header(value)
    # protobuf omits fields with the value 0.
    known = {"cpu_utilization", "mem_utilization", "application_utilization", "rps_fractional", "eps", "named_metrics"}
    assert set(report) <= known and report.get("mem_utilization", 0) <= 1
    assert set(report["named_metrics"]) == set(orca.NAMED)
    assert report["named_metrics"]["execution_slots"] >= 1


def test_a_response_has_a_report_only_if_asked(server):
    assert infer(server) == (200, None)
    for unknown in ("yaml", "json;q=1", "json,text", "\u00e9"):
        assert infer(server, unknown) == (200, None), unknown


@pytest.mark.parametrize(
    ("method", "path", "body", "named"),
    [
        ("POST", "/v2/models/simple/versions/1/infer", json.dumps(simple()), True),
        ("POST", "/v2/models/identity_fp32/generate", GENERATE, True),
        ("POST", "/v2/models/identity_fp32/generate_stream", GENERATE, True),
        ("POST", "/v1/models/identity_fp32:predict", V1, True),
        ("POST", "/v2/models/simple/infer", "no JSON", True),
        ("POST", "/v2/models/no_such_model/infer", json.dumps(simple()), False),
    ],
)
def test_every_inference_route_reports(server, method, path, body, named):
    """A request for an unknown model gets the report of the server, whose named metrics are the sums of all models."""
    _, value = post(server, path, body, "json", method)
    assert ("queue_duration_seconds" in orca.from_header(value)["named_metrics"]) == named
    assert "execution_slots" in orca.from_header(value)["named_metrics"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v2/models/simple"), ("GET", "/v2/health/live"), ("GET", "/none")])
def test_other_routes_do_not_report(server, method, path):
    assert post(server, path, None, "json", method)[1] is None


@pytest.mark.parametrize("report_format", ["json", "text", "binary"])
def test_the_first_report_has_levels_only(start, report_format):
    """Rates are not known before a second sample: the report does not say that they are 0."""
    server = start(["identity_fp32"])
    request = json.dumps({"inputs": [tensor("INPUT0", "FP32", [1, 1], [1.0])]})
    ask = lambda: orca.from_header(post(server, "/v2/models/identity_fp32/infer", request, report_format)[1])  # noqa: E731
    first = ask()
    assert not {"rps_fractional", "eps", "application_utilization"} & set(first)
    assert set(first["named_metrics"]) == set(orca.NAMED) - {"utilization", "queue_duration_seconds"}
    second = eventually("the rates are known", lambda: "rps_fractional" in (found := ask()) and found)
    assert second["rps_fractional"] > 0 and set(second["named_metrics"]) == set(orca.NAMED)


def test_rates_follow_the_traffic(start):
    server = start(["delay_200"])
    request = json.dumps({"inputs": [tensor("INPUT0", "FP32", [1, 1], [1.0])]})

    def report():
        status, value = post(server, "/v2/models/delay_200/infer", request, "json")
        assert status == 200
        return orca.from_header(value)

    # One request after the other: at most 5 a second, and the instance is nearly always busy.
    busy = eventually("the load is reported", lambda: (found := report()).get("application_utilization", 0) > 0.5 and found)
    assert 0.5 < busy["rps_fractional"] < 6 and busy["eps"] == 0, busy
    assert busy["named_metrics"]["execution_slots"] == 4
    assert busy["named_metrics"]["utilization"] == busy["application_utilization"]
    path = "/v2/models/no_such_model/infer"
    idle = lambda: orca.from_header(post(server, path, request, "json")[1])["application_utilization"] < 0.05
    eventually("the utilization falls after the traffic", idle)


def test_errors_of_the_server_are_reported_and_those_of_clients_are_not(start):
    server = start(["fail", "identity_fp32"])

    def errors(path, body):
        return orca.from_header(post(server, path, body, "json")[1]).get("eps", 0)

    for _ in range(50):
        errors("/v2/models/identity_fp32/infer", "no JSON")
    request = json.dumps({"inputs": [tensor("INPUT0", "FP32", [1], [1.0])]})
    rate = lambda: orca.from_header(post(server, "/v2/models/none/infer", "{}", "json")[1]).get("rps_fractional", 0)
    eventually("the rate includes the requests", lambda: rate() > 0)
    assert errors("/v2/models/identity_fp32/infer", "no JSON") == 0
    eventually("the rate of errors rises", lambda: errors("/v2/models/fail/infer", request) > 0)


def trailers_of(address: str, method: str, message: bytes, report_format: str) -> dict:
    """Sends a call with curl; returns the headers and trailers of its load report. gRPC's own clients keep this trailer for
    their load balancers and do not show it to programs."""
    command = ["curl", "--silent", "--verbose", "--http2-prior-knowledge", "--max-time", str(DEADLINE_S), "--data-binary", "@-"]
    for header in ("content-type: application/grpc", "te: trailers", f"{orca.REQUEST}: {report_format}"):
        command += ["--header", header]
    command.append(f"http://{address}/inference.GRPCInferenceService/{method}")
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    result = subprocess.run(command, input=framed, capture_output=True, check=True)
    found = re.findall(r"^< (endpoint-[\w-]+): (\S+)\r?$", result.stderr.decode(), re.MULTILINE)
    assert "< grpc-status: " in result.stderr.decode()
    return {key: base64.b64decode(value) for key, value in found}


@pytest.mark.smoke
def test_a_grpc_call_has_the_trailer(server):
    inputs = [grpc_tensor("INPUT0", "FP32", [1], fp32_contents=[1.0])]

    def report(model, report_format):
        message = grpc_infer("", model, inputs).message.SerializeToString()
        return trailers_of(server.grpc, "ModelInfer", message, report_format)

    for report_format in ("json", "TEXT", "binary"):
        found = orca.from_message(report("identity_fp32_nobatch", report_format)[orca.TRAILER])
        assert set(found["named_metrics"]) == set(orca.NAMED)
    unknown = orca.from_message(report("no_such_model", "json")[orca.TRAILER])
    assert "execution_slots" in unknown["named_metrics"] and "utilization" not in unknown["named_metrics"]
    assert report("identity_fp32_nobatch", "yaml") == {}
    assert trailers_of(server.grpc, "ServerLive", b"", "json") == {}


def test_a_grpc_stream_has_the_trailer_at_its_end(server):
    inputs = [grpc_tensor("INPUT0", "FP32", [1], fp32_contents=[1.0])]
    message = grpc_infer("", "identity_fp32_nobatch", inputs).message.SerializeToString()
    trailers = trailers_of(server.grpc, "ModelStreamInfer", message, "binary")
    assert set(orca.from_message(trailers[orca.TRAILER])["named_metrics"]) == set(orca.NAMED)


class Reports:
    """A stream of load reports with an interval of less than 128 seconds. Use it with `with`."""

    def __init__(self, address: str, seconds: int):
        self.channel = grpc.insecure_channel(address)
        identity = lambda data: data
        method = self.channel.unary_stream(orca.STREAM, identity, identity)
        # OrcaLoadReportRequest.report_interval with google.protobuf.Duration.seconds
        self.call = method(bytes([0x0A, 2, 0x08, seconds]))

    def __enter__(self):
        return self.call

    def __exit__(self, kind, error, trace):
        self.call.cancel()
        self.channel.close()


def test_a_stream_reports_the_server_at_intervals(start):
    server = start(["identity_fp32"])
    with Reports(server.grpc, 1) as reports:
        named = [orca.from_message(next(reports))["named_metrics"] for _ in range(3)]
        assert not any("utilization" in one for one in named)
        # The first report can be older than the model.
        assert named[-1]["execution_slots"] >= 1
        assert server.scrape()["pharos_open_streams", (("protocol", "grpc"),)] == 1
    streams = lambda: server.scrape()["pharos_open_streams", (("protocol", "grpc"),)] == 0
    eventually("the stream is closed", streams)


def test_streams_of_reports_are_limited(start):
    server = start(["identity_fp32"])
    most = 64
    open_streams = [Reports(server.grpc, 60) for _ in range(most)]
    try:
        for stream in open_streams:
            next(stream.call)
        with Reports(server.grpc, 60) as refused, pytest.raises(grpc.RpcError) as error:
            next(refused)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert f"at most {most}" in error.value.details()
    finally:
        for stream in open_streams:
            stream.__exit__(None, None, None)


def test_a_stream_of_reports_does_not_delay_the_exit(start):
    server = start(["identity_fp32"])
    with Reports(server.grpc, 120) as reports:
        next(reports)
        ends = queue.Queue()
        reports.add_callback(lambda: ends.put(True))
        server.stop()
        assert ends.get(timeout=DEADLINE_S)
