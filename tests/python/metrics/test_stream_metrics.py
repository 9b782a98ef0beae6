"""The metrics of streams count every response with data and every ended request exactly, over both protocols."""

import json
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from harness.server import Server, total
from harness.stream_models import COMPARED, OWN, build
from harness.waiting import DEADLINE_S, eventually
from protocol.stream_tables import EMPTY, request

FIRST, BETWEEN = "pharos_stream_first_response_seconds", "pharos_stream_response_interval_seconds"
LENGTH = "pharos_stream_responses_per_request"
SAMPLES = {
    "first": f"{FIRST}_count",
    "between": f"{BETWEEN}_count",
    "ended": f"{LENGTH}_count",
    "of_ended": f"{LENGTH}_sum",
    "responses": "pharos_stream_responses_total",
    "bytes": "pharos_stream_response_bytes_total",
}
PAUSE_MS = 60
RESPONSE = 8
"""The bytes of the tensors of a response of `repeat`: OUT and IDX, four bytes each."""


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """A server with the models of streams."""
    folder = tmp_path_factory.mktemp("streams")
    with Server(folder, [build(folder / "models", COMPARED | OWN)]) as running:
        yield running


def counts(server, model: str) -> dict:
    """Returns the numbers of a model's streams."""
    metrics = server.scrape()
    return {key: total(metrics, name, model=model) for key, name in SAMPLES.items()}


def over_http(server, model: str, values: list, delay_ms=0):
    body = {"IN": values} | ({"DELAY": [delay_ms] * len(values)} if delay_ms else {})
    server.ask("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))


def over_grpc(server, model: str, values: list, delay_ms=0):
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        message = request(model, "a", values, delay_ms=delay_ms, **EMPTY)
        assert list(stub.ModelStreamInfer(iter([message]), timeout=DEADLINE_S))


@pytest.mark.parametrize("send", [over_http, over_grpc])
@pytest.mark.parametrize(
    "model, count, responses, intervals, size",
    [
        pytest.param("repeat", 4, 4, 3, RESPONSE, id="the end is a separate response"),
        pytest.param("repeat_with", 4, 4, 3, RESPONSE, id="the last response is the end"),
        pytest.param("repeat_three", 2, 2, 1, 3 * 4 + 4, id="larger tensors"),
        pytest.param("repeat_fails", 4, 2, 1, RESPONSE, id="an error ends the request"),
        pytest.param("repeat_fails_first", 2, 0, 0, 0, id="the only response is an error"),
        pytest.param("repeat_errs", 3, 2, 1, RESPONSE, id="an error between responses"),
        pytest.param("silent", 2, 0, 0, 0, id="no response"),
        pytest.param("e_first", 3, 3, 2, 4, id="a decoupled ensemble"),
    ],
)
def test_responses_are_counted_exactly(streams, send, model, count, responses, intervals, size):
    """Three requests, each with the same responses."""
    before = counts(streams, model)
    for _ in range(3):
        send(streams, model, list(range(count)))
    grew = {key: value - before[key] for key, value in counts(streams, model).items()}
    assert grew == {
        "first": 3 if responses else 0,
        "between": 3 * intervals,
        "ended": 3,
        "of_ended": 3 * responses,
        "responses": 3 * responses,
        "bytes": 3 * responses * size,
    }


def test_times_are_those_of_the_responses(streams):
    """The time to the first response and the times between responses add up to at most the client's time, and to at least the
    model's pauses; the buckets of the intervals begin at 1 ms."""
    before, began = streams.scrape(), time.monotonic()
    over_http(streams, "repeat", [1] * 5, PAUSE_MS)
    elapsed, after = time.monotonic() - began, streams.scrape()
    grew = lambda name, **labels: total(after, name, model="repeat", **labels) - total(before, name, model="repeat", **labels)  # noqa: E731
    first, between = grew(f"{FIRST}_sum"), grew(f"{BETWEEN}_sum")
    assert first >= PAUSE_MS / 1000 and 4.9 * PAUSE_MS / 1000 <= first + between <= elapsed
    bounds = [labels for name, labels in after if name == f"{BETWEEN}_bucket" and ("model", "repeat") in labels]
    assert min(float(dict(labels)["le"]) for labels in bounds) == 0.001
    # A busy server may read several responses at once, so that the single intervals are not known.
    assert grew(f"{BETWEEN}_bucket", le="+Inf") == 4


def test_a_cancelled_stream_has_ended(streams):
    """A client that leaves in mid-stream ends its request, which counts with the responses until then."""
    before = counts(streams, "repeat")
    with grpc.insecure_channel(streams.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request("repeat", "a", [1] * 1000, delay_ms=PAUSE_MS)]), timeout=DEADLINE_S)
        for _ in range(2):
            next(call)
        call.cancel()
    ended = lambda: counts(streams, "repeat")["ended"] - before["ended"] == 1  # noqa: E731
    eventually("the request has ended", ended)
    grew = {key: value - before[key] for key, value in counts(streams, "repeat").items()}
    assert grew["first"] == 1 and 2 <= grew["responses"] == grew["of_ended"] < 1000
    assert grew["between"] == grew["responses"] - 1 and grew["bytes"] == RESPONSE * grew["responses"]


def test_only_decoupled_models_have_streams(streams):
    """Ordinary models have no such series, also behind `generate_stream`; decoupled models have them from the start."""
    streams.ask("POST", "/v2/models/any/generate_stream", '{"I0":[1]}')
    metrics = streams.scrape()
    with_streams = {dict(labels)["model"] for name, labels in metrics if name == "pharos_stream_responses_total"}
    assert "any" not in with_streams and {"repeat", "e_first", "numbered"} <= with_streams
    assert total(metrics, f"{LENGTH}_count", model="numbered") == 0
