"""The times in answers: `Server-Timing` over HTTP and `server-timing` over gRPC equal the statistics to the nanosecond."""

import concurrent.futures
import http.client
import json
import re
import socket
from decimal import Decimal

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from harness.inference import one
from harness.models import write
from harness.ports import free_ports
from harness.server import MODELS, Server
from harness.stream_models import COMPARED, build
from harness.waiting import DEADLINE_S

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUESTED = {"request-timing": "true"}
PREDICT, HEALTH = "/vertex/predict", "/vertex/health"
ENVIRONMENT = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "plain", "AIP_PREDICT_ROUTE": PREDICT, "AIP_HEALTH_ROUTE": HEALTH}
IDENTITY = re.sub(r'name: "identity_fp32"\n', "", (MODELS / "identity_fp32/config.pbtxt").read_text())
CHAIN = """platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling {
  step { model_name: "plain" model_version: -1 input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "x" } }
  step { model_name: "plain" model_version: -1 input_map { key: "INPUT0" value: "x" } output_map { key: "OUTPUT0" value: "OUTPUT0" } }
}
"""
TOGETHER = "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 20000000 }\n"
ENTRIES = {"queue": "queue", "compute_input": "compute_input", "infer": "compute_infer", "output": "compute_output", "total": "success"}
"""Entries of the header -> those of the statistics."""


def repository(folder):
    """Writes the models: plain, cached and batched identities, an ensemble, and a decoupled model."""
    for name, extra in {"plain": "", "cached": "response_cache { enable: true }\n", "batched": TOGETHER}.items():
        write(folder, name, IDENTITY + extra)
    write(folder, "chain", CHAIN)
    return build(folder, {"repeat": COMPARED["repeat"], "repeat_with": COMPARED["repeat_with"]})


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A server with all models and the endpoints of the cloud platforms."""
    folder = tmp_path_factory.mktemp("timed")
    sagemaker, vertex_ai = free_ports(2)
    options = ["--allow-sagemaker=true", f"--sagemaker-port={sagemaker}", "--cache-config=local,size=1048576"]
    options += ["--allow-vertex-ai=true", f"--vertex-ai-port={vertex_ai}", "--vertex-ai-default-model=plain"]
    server = Server(folder, [repository(folder / "models")], options)
    server.environment = ENVIRONMENT
    server.sagemaker, server.vertex_ai = f"127.0.0.1:{sagemaker}", f"127.0.0.1:{vertex_ai}"
    with server:
        yield server


def post(address: str, path: str, body, headers=None) -> tuple:
    """Sends a POST request; returns the status, the headers (with names in lower case) and the body."""
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    try:
        connection.request("POST", path, json.dumps(body), headers or {})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def by_infer(server, model: str, values: list, headers: dict) -> dict:
    """Returns the headers of an answer of v2 over HTTP."""
    status, found, body = post(server.http, f"/v2/models/{model}/infer", one("FP32", [1, len(values)], values), headers)
    assert status == 200, body
    return found


def by_predict(server, model: str, values: list, headers: dict) -> dict:
    """Returns the headers of an answer of v1."""
    status, found, body = post(server.http, f"/v1/models/{model}:predict", {"instances": [values]}, headers)
    assert status == 200, body
    return found


def by_generate(server, model: str, values: list, headers: dict) -> dict:
    """Returns the headers of an answer of the generate extension."""
    status, found, body = post(server.http, f"/v2/models/{model}/generate", {"INPUT0": values}, headers)
    assert status == 200, body
    return found


def by_sagemaker(server, model: str, values: list, headers: dict) -> dict:
    """Returns the headers of an answer of SageMaker's endpoint, which serves the model `plain`."""
    status, found, body = post(server.sagemaker, "/invocations", one("FP32", [1, len(values)], values), headers)
    assert status == 200, body
    return found


def by_vertex_ai(server, model: str, values: list, headers: dict) -> dict:
    """Returns the headers of an answer of Vertex AI's endpoint, which serves the model `plain`."""
    status, found, body = post(server.vertex_ai, PREDICT, one("FP32", [1, len(values)], values), headers)
    assert status == 200, body
    return found


def message(model: str, values: list):
    """Returns a request for gRPC."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, len(values)])
    request.raw_input_contents.append(np.array(values, np.float32).tobytes())
    return request


def by_grpc(server, model: str, values: list, headers: dict) -> dict:
    """Returns the initial metadata of an answer over gRPC."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        _, call = stub.ModelInfer.with_call(message(model, values), metadata=tuple(headers.items()), timeout=DEADLINE_S)
        return dict(call.initial_metadata())


def times(value: str) -> tuple:
    """Returns the durations in nanoseconds, and the descriptions, of a header by entry."""
    durations, descriptions = {}, {}
    for entry in value.split(", "):
        name, _, rest = entry.partition(";")
        key, _, text = rest.partition("=")
        if key == "dur":
            assert re.fullmatch(r"\d+(\.\d{0,5}[1-9])?", text), value
            durations[name] = int(Decimal(text) * 1_000_000)
        else:
            assert key == "desc", value
            descriptions[name] = text
    assert list(durations) == list(ENTRIES), value
    return durations, descriptions


def added(server, model: str, before: dict) -> dict:
    """Returns what was added to the statistics since `before`, in nanoseconds, by entry of the header."""
    after = server.statistics(model)["inference_stats"]
    return {entry: after[key]["ns"] - before[key]["ns"] for entry, key in ENTRIES.items()}


WAYS = [
    (by_infer, "plain"), (by_infer, "chain"), (by_predict, "plain"), (by_generate, "plain"), (by_sagemaker, "plain"),
    (by_vertex_ai, "plain"), (by_grpc, "plain"), (by_grpc, "chain"),
]  # fmt: skip


@pytest.mark.parametrize("ask, model", WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_sums_equal_the_statistics(timed, ask, model):
    """The sums over concurrent requests are what these requests added to the statistics, to the nanosecond."""
    before = timed.statistics(model)["inference_stats"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: ask(timed, model, [float(n)], REQUESTED), range(20)))
    found = [times(answer["server-timing"]) for answer in answers]
    sums = {entry: sum(durations[entry] for durations, _ in found) for entry in ENTRIES}
    assert sums == added(timed, model, before)
    assert all(durations["total"] >= sum(durations.values()) - durations["total"] for durations, _ in found) or model == "chain"
    assert all(set(descriptions) == {"batch"} for _, descriptions in found)


def test_the_batch_is_that_of_the_execution(timed):
    """Requests that were executed together report the sum of their batch sizes, as the statistics count it."""
    bodies = [one("FP32", [rows, 1], [1.0] * rows) for rows in (1, 2, 2, 3)]
    ask = lambda body: post(timed.http, "/v2/models/batched/infer", body, REQUESTED)[1]  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, bodies))
    assert [times(answer["server-timing"])[1] for answer in answers] == [{"batch": '"8"'}] * 4
    assert [entry["batch_size"] for entry in timed.statistics("batched")["batch_stats"]] == [8]


@pytest.mark.parametrize("ask, value", [(by_infer, 5.0), (by_grpc, 6.0)])
def test_cache_lookups_are_reported(timed, ask, value):
    """A miss has the batch size and includes the cost of the cache; a hit has no execution."""
    before = timed.statistics("cached")["inference_stats"]
    missed, hit = (times(ask(timed, "cached", [value], REQUESTED)["server-timing"]) for _ in range(2))
    assert (missed[1], hit[1]) == ({"cache": "miss", "batch": '"1"'}, {"cache": "hit"})
    assert [hit[0][entry] for entry in ("compute_input", "infer", "output")] == [0, 0, 0]
    assert {entry: missed[0][entry] + hit[0][entry] for entry in ENTRIES} == added(timed, "cached", before)
    cost = timed.statistics("cached")["inference_stats"]["cache_miss"]["ns"] - before["cache_miss"]["ns"]
    assert missed[0]["total"] > cost > 0


@pytest.mark.parametrize("ask", [by_infer, by_predict, by_generate, by_sagemaker, by_grpc])
def test_the_traceparent_is_returned(timed, ask):
    """A valid `traceparent` is returned, with and without times; an invalid one is not."""
    assert ask(timed, "plain", [1.0], {"traceparent": PARENT})["traceparent"] == PARENT
    both = ask(timed, "plain", [1.0], {"traceparent": PARENT} | REQUESTED)
    assert both["traceparent"] == PARENT and "server-timing" in both
    for headers in ({}, {"traceparent": "00-1-2-01"}, {"request-timing": "false"}):
        assert not {"traceparent", "server-timing"} & set(ask(timed, "plain", [1.0], headers)), headers


def test_errors_have_a_traceparent_and_no_times(timed):
    """Over both protocols."""
    status, headers, _ = post(timed.http, "/v2/models/absent/infer", one("FP32", [1, 1], [1]), REQUESTED | {"traceparent": PARENT})
    assert status == 400 and headers["traceparent"] == PARENT and "server-timing" not in headers
    with pytest.raises(grpc.RpcError) as caught:
        by_grpc(timed, "absent", [1.0], REQUESTED | {"traceparent": PARENT})
    metadata = dict(caught.value.trailing_metadata()) | dict(caught.value.initial_metadata())
    assert metadata["traceparent"] == PARENT and "server-timing" not in metadata


def streamed(server, path: str, body: str, headers: dict) -> str:
    """Sends a request over a plain socket, because `http.client` drops trailers; returns the whole answer."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=DEADLINE_S) as connection:
        connection.sendall("\r\n".join([*lines, "", body]).encode())
        received = b""
        while part := connection.recv(65536):
            received += part
    return received.decode()


@pytest.mark.parametrize("model", ["repeat", "repeat_with"])
def test_a_stream_reports_its_times_in_a_trailer(timed, model):
    """`generate_stream` sends the times behind the last event to clients that accept trailers; they equal the statistics."""
    before = timed.statistics(model)["inference_stats"]
    path = f"/v2/models/{model}/generate_stream"
    answer = streamed(timed, path, '{"IN":[1,2,3]}', REQUESTED | {"TE": "trailers"})
    head, _, body = answer.partition("\r\n\r\n")
    assert "trailer: server-timing" in head.lower() and "server-timing:" not in head.lower()
    events, _, trailer = body.partition("\r\n0\r\n")
    assert events.count("data: ") == 3
    name, _, value = trailer.strip().partition(": ")
    assert name.lower() == "server-timing"
    durations, descriptions = times(value)
    assert durations == added(timed, model, before) and descriptions == {}
    for headers in (REQUESTED, {"TE": "trailers"}):
        assert "server-timing" not in streamed(timed, path, '{"IN":[1]}', headers).lower()


def test_generate_reports_the_end_of_a_decoupled_request(timed):
    """The times are those of the whole request, also if its end follows the only response."""
    before = timed.statistics("repeat")["inference_stats"]
    _, headers, _ = post(timed.http, "/v2/models/repeat/generate", {"IN": [1]}, REQUESTED)
    assert times(headers["server-timing"]) == (added(timed, "repeat", before), {})


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--response-timing=off"], (0, 0)),
        (["--response-timing=on-request"], (0, 6)),
        (["--response-timing=always"], (6, 6)),
        (["--response-timing=always", "--response-timing-rate=3"], (2, 6)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_flags_select_the_answers(start, options, expected):
    """How many of six answers have times: without and with the header of the request. Off also drops `traceparent`."""
    server = start(["identity_fp32"], *options)
    answers = [
        [by_infer(server, "identity_fp32", [1.0], headers | {"traceparent": PARENT}) for _ in range(6)]
        for headers in ({}, REQUESTED)
    ]
    assert tuple(sum("server-timing" in answer for answer in each) for each in answers) == expected
    off = options == ["--response-timing=off"]
    assert all(("traceparent" in answer) != off for each in answers for answer in each)
