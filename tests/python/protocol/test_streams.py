"""Decoupled models, gRPC streams and the generate extension: compares the answers with a real Triton's, and checks guarantees
that Triton does not give: slow readers, lost instances, cancellation, exact statistics."""

import asyncio
import concurrent.futures
import json
import os
import queue
import signal
import threading

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from harness.connections import connect, post
from harness.peers import missing
from harness.processes import held, instance, memory
from harness.server import Server, total
from harness.statistics import dispatched, until_dispatched
from harness.stream_models import COMPARED, OWN, build
from harness.streams import Collected, repeat_inputs
from harness.waiting import DEADLINE_S, eventually, every, holds_for, pause_as_client, settled
from protocol import stream_tables
from protocol.stream_tables import EMPTY, request

TRITON_MISSING = missing("triton", "triton")
FAILURES = "nv_inference_request_failure"


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """A server with all models."""
    folder = tmp_path_factory.mktemp("streams")
    options = ["--worker-execution-timeout-secs=5"]
    with Server(folder, [build(folder / "models", COMPARED | OWN)], options) as running:
        yield running


CASES = [*stream_tables.GENERATES, *stream_tables.STREAMS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_are_those_of_a_real_triton(streams, case):
    """Each request of the tables gets Triton's recorded answer."""
    golden = json.loads(stream_tables.GOLDEN.read_text())
    ours = stream_tables.ask(case, streams.http, streams.grpc)
    assert stream_tables.difference(case.name, ours, golden[case.name]) == ""


@pytest.mark.peers
@pytest.mark.skipif(bool(TRITON_MISSING), reason=TRITON_MISSING)
def test_server_and_live_triton_answer_alike(streams, tmp_path):
    """Each request of the tables gets the same answer as from a running Triton."""
    theirs = stream_tables.ask_triton(tmp_path)
    ours = {case.name: stream_tables.ask(case, streams.http, streams.grpc) for case in CASES}
    found = {name: stream_tables.difference(name, ours[name], theirs[name]) for name in theirs}
    assert {name: text for name, text in found.items() if text} == {}


def test_tritonclient_streams_many_requests_at_once(streams):
    """With 200 requests in flight on one stream, every response arrives once and in the order of its request, and each request
    ends once."""
    got = Collected()
    with tritonclient.grpc.InferenceServerClient(streams.grpc) as client:
        client.start_stream(got)
        for n in range(200):
            client.async_stream_infer(
                "repeat", repeat_inputs(range(n % 40)), request_id=str(n), enable_empty_final_response=True
            )
        eventually("200 ends", lambda: len(got.finals) == 200)
        client.stop_stream()
    assert not got.errors
    assert sorted(got.finals, key=int) == [str(n) for n in range(200)]
    assert got.values == {str(n): list(range(n % 40)) for n in range(200) if n % 40}


def test_responses_leave_as_they_are_produced(streams):
    """The first response arrives long before the last is computed; an ordinary model on the same stream is not delayed."""
    got = Collected()
    with tritonclient.grpc.InferenceServerClient(streams.grpc) as client:
        client.start_stream(got)
        client.async_stream_infer("repeat", repeat_inputs([1, 2, 3], delay_ms=1000), request_id="a")
        tensor = tritonclient.grpc.InferInput("I0", [1], "INT32")
        tensor.set_data_from_numpy(np.array([9], np.int32))
        client.async_stream_infer("any", [tensor], request_id="ordinary")
        eventually("the ordinary answer", lambda: "ordinary" in got.finals)
        assert "a" not in got.values, "it waited for the decoupled one"
        eventually("three responses", lambda: len(got.values.get("a", [])) == 3)
        client.stop_stream()
    first, _, third = got.when["a"]
    assert third - first > 0.5, "they would arrive together if the server sent them after the last"


@pytest.mark.smoke
def test_tritonclient_aio(streams):
    """The stream of the asyncio client has the order, the final flag, and an error in the middle of the stream."""

    async def ask():
        async with tritonclient.grpc.aio.InferenceServerClient(streams.grpc) as client:

            async def requests():
                yield {"model_name": "repeat_with", "inputs": repeat_inputs([5, 6]), "request_id": "a"}
                yield {"model_name": "no_such_model", "inputs": repeat_inputs([5]), "request_id": "b"}
                yield {"model_name": "repeat", "inputs": repeat_inputs([7]), "request_id": "c"}

            found, errors = {}, []
            async for result, error in client.stream_infer(requests()):
                if error:
                    errors.append(error.message())
                    continue
                response = result.get_response()
                value = result.as_numpy("OUT")
                last = response.parameters["triton_final_response"].bool_param
                found.setdefault(response.id, []).append((None if value is None else int(value[0]), last))
            return found, errors

    found, errors = asyncio.run(ask())
    assert found == {"a": [(5, False), (6, True)], "c": [(7, False)]}
    assert len(errors) == 1 and "no_such_model" in errors[0]


def test_a_batch_of_streams(streams):
    """Two requests in one batch each get responses with their own rows, and count as one execution."""
    before = streams.statistics("together")

    def ask(rows: int):
        with grpc.insecure_channel(streams.grpc) as channel:
            message = request("together", str(rows))
            values = np.arange(3 * rows, dtype=np.int32) + 100 * rows
            message.inputs.add(name="IN", datatype="INT32", shape=[rows, 3])
            message.raw_input_contents.append(values.tobytes())
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message]), timeout=DEADLINE_S)
            return [np.frombuffer(m.infer_response.raw_output_contents[0], np.int32).tolist() for m in call]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, two = pool.map(ask, [1, 2])
    assert one == [[100], [101], [102]]
    assert two == [[200, 203], [201, 204], [202, 205]]
    after = streams.statistics("together")
    assert after["execution_count"] - before["execution_count"] == 1
    assert after["inference_count"] - before["inference_count"] == 3
    assert [entry["batch_size"] for entry in after["batch_stats"]] == [3]


def test_a_decoupled_model_may_answer_once_for_the_whole_batch(streams):
    """A backend without support for streams can serve a decoupled model: each request gets one final response."""
    message = request("once", "a")
    message.inputs.add(name="I0", datatype="INT32", shape=[2])
    message.raw_input_contents.append(np.array([3, 4], np.int32).tobytes())
    with grpc.insecure_channel(streams.grpc) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message]), timeout=DEADLINE_S)
        [answer] = [m.infer_response for m in call]
    assert answer.parameters["triton_final_response"].bool_param is True
    assert np.frombuffer(answer.raw_output_contents[0], np.int32).tolist() == [3, 4]
    assert streams.ask("POST", "/v2/models/once/generate", '{"I0":[3,4]}') == (
        200,
        '{"O0":[3,4],"model_name":"once","model_version":"1"}',
    )


def test_response_parameters(streams):
    """Parameters of responses reach every kind of client, also from ordinary models."""
    status, text = streams.ask("POST", "/v2/models/numbered/generate_stream", '{"IN":[7,8]}')
    events = [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]
    assert status == 200 and [(event["OUT"], event["index"]) for event in events] == [(7, 0), (8, 1)]
    body = {"parameters": {"a": 5, "b": "x"}, "inputs": [{"name": "I0", "datatype": "INT32", "shape": [1], "data": [1]}]}
    assert streams.infer("echo", body)[1]["parameters"] == {"a": 5, "b": "x"}
    text = streams.ask("POST", "/v2/models/echo/generate", '{"I0":1,"a":5,"b":"x"}')[1]
    assert text == '{"O0":1,"a":5,"b":"x","model_name":"echo","model_version":"1"}'
    # A parameter with the name of an output does not replace the output.
    text = streams.ask("POST", "/v2/models/echo/generate", '{"I0":1,"O0":7}')[1]
    assert text == '{"O0":1,"model_name":"echo","model_version":"1"}'
    with grpc.insecure_channel(streams.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request("numbered", "a", [1, 2])]), timeout=DEADLINE_S)
        assert [m.infer_response.parameters["index"].int64_param for m in call] == [0, 1]


def duration(entry: dict, key: str) -> int:
    """Returns the count of an entry."""
    return entry[key]["count"]


def test_statistics_by_response(streams):
    """`response_stats` has an entry for each response index, requests count once, and the first-response histogram, the request
    counters and the gRPC message agree."""
    before = streams.scrape()
    for model, body in [("repeat_fails", "[1,2,3,4]"), ("repeat_fails", "[1]"), ("repeat_errs", "[1,2,3]")]:
        streams.ask("POST", f"/v2/models/{model}/generate_stream", f'{{"IN":{body}}}')
    metrics = streams.scrape()
    fails = streams.statistics("repeat_fails")
    failed = total(metrics, FAILURES, model="repeat_fails")
    assert fails["inference_stats"]["fail"]["count"] == failed
    of = fails["response_stats"]
    counts = {number: {key: duration(entry, key) for key in entry if duration(entry, key)} for number, entry in of.items()}
    assert set(counts) == {"0", "1", "2"}
    assert counts["2"] == {"fail": failed, "compute_infer": failed, "compute_output": failed}
    assert counts["0"]["success"] == failed + fails["inference_stats"]["success"]["count"]
    assert counts["1"]["success"] == failed, "the second response of requests that fail later"
    assert counts["1"]["empty_response"] == fails["inference_stats"]["success"]["count"], "the end of a short request"
    for entry in of.values():
        ends = sum(entry[key]["ns"] for key in ("success", "fail", "empty_response"))
        assert entry["compute_infer"]["ns"] <= ends
    histogram = "nv_inference_first_response_histogram_ms_count"
    for model in ("repeat_fails", "repeat_errs"):
        stats = streams.statistics(model)["inference_stats"]
        requests = stats["success"]["count"] + stats["fail"]["count"]
        assert total(metrics, histogram, model=model) == requests
    assert not any(name.startswith("nv_inference_first_response") and ("model", "any") in labels for name, labels in metrics)
    grew = lambda **labels: total(metrics, "pharos_requests_total", **labels) - total(  # noqa: E731
        before, "pharos_requests_total", **labels
    )
    assert grew(protocol="http", route="generate_stream", code="200") == 3
    with tritonclient.grpc.InferenceServerClient(streams.grpc) as client:
        [message] = client.get_inference_statistics("repeat_fails").model_stats
    assert {key: entry.fail.count for key, entry in message.response_stats.items()}["2"] == failed


def test_perfectly_counted(streams):
    """After a stream of successes, success, inference, execution and compute counts are exact, and nothing is pending."""
    before = streams.statistics("repeat_with")
    with grpc.insecure_channel(streams.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request("repeat_with", str(n), [1, 2, 3]) for n in range(20)]), timeout=DEADLINE_S)
        assert len(list(call)) == 60
    after = streams.statistics("repeat_with")
    for key in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert after["inference_stats"][key]["count"] - before["inference_stats"][key]["count"] == 20, key
    assert after["inference_count"] - before["inference_count"] == 20
    executions = lambda: streams.statistics("repeat_with")["execution_count"] - before["execution_count"]  # noqa: E731
    eventually("20 executions", lambda: executions() == 20)
    assert total(streams.scrape(), "nv_inference_pending_request_count", model="repeat_with") == 0


def open_streams(server) -> dict:
    """Returns the number of open streams by protocol."""
    metrics = server.scrape()
    return {protocol: total(metrics, "pharos_open_streams", protocol=protocol) for protocol in ("http", "grpc")}


LONG = list(range(1000))
DELAYS = [20] + [600] * 999
"""Milliseconds before each response: ten minutes in all."""


def canceled(server, model: str) -> float:
    """Returns the number of failed requests of a model that were cancelled."""
    return total(server.scrape(), FAILURES, model=model, reason="CANCELED")


@pytest.mark.parametrize("way", ["grpc cancel", "grpc deadline", "grpc disconnect", "http disconnect"])
def test_a_client_that_leaves_in_mid_stream(streams, way):
    """The instance is notified immediately and is free for the next request; the request counts as CANCELED."""
    before = canceled(streams, "repeat")
    message = request("repeat", "a", LONG)
    message.inputs.add(name="DELAY", datatype="UINT32", shape=[len(LONG)])
    message.raw_input_contents.append(np.array(DELAYS, np.uint32).tobytes())
    if way == "http disconnect":
        with connect(streams.http_port) as connection:
            body = json.dumps({"IN": LONG, "DELAY": DELAYS}).encode()
            connection.sendall(post("/v2/models/repeat/generate_stream", body))
            assert b"data: " in connection.recv(4096) + connection.recv(4096)
            assert open_streams(streams)["http"] == 1
    else:
        channel = grpc.insecure_channel(streams.grpc)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([message]), timeout=5 if way == "grpc deadline" else None)
        assert next(call).infer_response.parameters["triton_final_response"].bool_param is False
        if way == "grpc deadline":
            with pytest.raises(grpc.RpcError) as error:
                list(call)
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        elif way == "grpc cancel":
            call.cancel()
        channel.close()
    eventually("the request is counted as CANCELED", lambda: canceled(streams, "repeat") == before + 1)
    assert streams.ask("POST", "/v2/models/repeat/generate", '{"IN":1}')[0] == 200, "the instance must be free"
    eventually("no stream is open", lambda: set(open_streams(streams).values()) == {0})


def test_half_close_and_many_requests_of_both_kinds(streams):
    """A client that has half-closed its stream still gets every answer; answers of ordinary models arrive in order."""
    messages = []
    for n in range(60):
        messages.append(request("any", f"o{n}", [n]) if n % 3 else request("repeat_with", f"d{n}", range(n % 7 + 1)))
    with grpc.insecure_channel(streams.grpc) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(messages), timeout=DEADLINE_S)
        ids = [m.infer_response.id for m in call]
    assert [name for name in ids if name[0] == "o"] == [f"o{n}" for n in range(60) if n % 3]
    for n in range(0, 60, 3):
        assert ids.count(f"d{n}") == n % 7 + 1


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_reader_that_does_not_read_costs_bounded_memory(streams, way):
    """The client does not read 2 GiB of responses: the server buffers some dozen of them, the worker waits and is not killed,
    and the next client is served when the first has disconnected."""
    workers, before = streams.workers(), memory(streams)
    model, count = ("wide" if way == "http" else "wide_too"), 2048
    if way == "http":
        connection = connect(streams.http_port)
        connection.sendall(post(f"/v2/models/{model}/generate_stream", json.dumps({"IN": [1] * count}).encode()))
        leave = connection.close
    else:
        channel = grpc.insecure_channel(streams.grpc, options=[("grpc.max_receive_message_length", -1)])
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([request(model, "a", [1] * count)])
        )
        leave = lambda: (call.cancel(), channel.close())  # noqa: E731
    sent = lambda: sum(  # noqa: E731
        duration(entry, "success") for entry in streams.statistics(model)["response_stats"].values()
    )
    eventually("responses are buffered", lambda: sent() >= 32)
    buffered, most = settled("the buffered responses", sent, 0.5), memory(streams)
    # Longer than --worker-execution-timeout-secs.
    holds_for("no more responses are sent", 6, lambda: sent() == buffered)
    assert buffered < 200
    assert memory(streams) - before < 300 << 20 and memory(streams) - most < 8 << 20
    assert streams.workers() == workers
    leave()
    eventually("the request is cancelled", lambda: canceled(streams, model) == 1)
    assert streams.ask("POST", f"/v2/models/{model}/generate", '{"IN":1}')[0] == 200
    eventually("the memory is released", lambda: memory(streams) - before < 100 << 20)


def test_requests_without_reading_answers_cost_bounded_memory(streams):
    """A client sends 3000 small requests over one stream, with 3 GiB of answers, and does not read: the server stops reading
    requests."""
    before, count = memory(streams), 3000
    channel = grpc.insecure_channel(streams.grpc, options=[("grpc.max_receive_message_length", -1)])
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    stop = threading.Event()

    def requests():
        for number in range(count):
            yield request("wide", str(number), [1])
        stop.wait(DEADLINE_S)

    call, most = stub.ModelStreamInfer(requests()), 0
    for _ in every(0.1, 5):
        most = max(most, memory(streams) - before)
    stop.set()
    call.cancel()
    channel.close()
    assert most < 600 << 20, f"{most >> 20} MiB"
    eventually("the memory is released", lambda: memory(streams) - before < 100 << 20)


def test_a_slow_reader_gets_everything(streams):
    """A reader that pauses still gets all 128 MiB of responses, in order."""
    values = list(range(128))
    with grpc.insecure_channel(streams.grpc, options=[("grpc.max_receive_message_length", -1)]) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([request("wide", "a", values, ["OUT"])]), timeout=DEADLINE_S
        )
        got = []
        for message in call:
            [raw] = message.infer_response.raw_output_contents
            array = np.frombuffer(raw, np.int32)
            assert (array == array[0]).all() and len(array) == 1 << 18
            got.append(int(array[0]))
            pause_as_client(0.1 if len(got) % 32 == 0 else 0)
    assert got == values


def test_a_lost_instance_in_mid_stream(streams):
    """A request is not retried after its first response: the stream has an error, and later requests use a new instance."""
    with grpc.insecure_channel(streams.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        sending = queue.Queue()
        call = stub.ModelStreamInfer(iter(sending.get, None), timeout=DEADLINE_S)
        sending.put(request("crashing", "a", [1, 2, 3, 4]))
        answers = [next(call) for _ in range(3)]
        assert [len(answer.infer_response.outputs) for answer in answers] == [2, 2, 0]
        text = "the worker of model 'crashing' version 1 died in the middle of the responses to this request"
        assert answers[2].error_message == text and answers[2].infer_response.id == "a"
        assert answers[2].infer_response.parameters["triton_final_response"].bool_param is True
        sending.put(request("crashing", "b", [1, 2], **EMPTY))
        last = [next(call) for _ in range(3)]
        assert [answer.error_message for answer in last] == ["", "", ""]
        sending.put(None)
        assert list(call) == []
    statistics = streams.statistics("crashing")
    assert statistics["inference_stats"]["fail"]["count"] == 1
    assert statistics["inference_stats"]["success"]["count"] == 1
    status, text = streams.ask("POST", "/v2/models/crashing/generate_stream", '{"IN":[1,2,3]}')
    assert status == 200 and text.count("data: ") == 3 and "died in the middle" in text


def test_a_request_is_retried_if_its_instance_is_lost_before_the_first_response(streams):
    """If a worker is killed before it has sent a response, the client gets the responses of the next worker."""
    name = "one_waits"
    [pid] = [pid for pid in streams.workers() if instance(pid) == f"{name}_0"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        before = dispatched(streams, name)
        asked = pool.submit(streams.ask, "POST", f"/v2/models/{name}/generate", '{"IN":[5],"DELAY":[600]}')
        until_dispatched(streams, name, before + 1)
        os.kill(pid, signal.SIGKILL)
        assert asked.result() == (200, f'{{"IDX":0,"OUT":5,"model_name":"{name}","model_version":"1"}}')


def test_queue_policies_hold_for_streams(streams):
    """A full queue refuses a stream as it refuses an ordinary request."""
    before = dispatched(streams, "one_waits")
    ask = lambda: streams.ask("POST", "/v2/models/one_waits/generate_stream", '{"IN":[1]}')  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(6) as pool, held(streams, "one_waits"):
        answers = [pool.submit(ask)]
        until_dispatched(streams, "one_waits", before + 1)
        answers += [pool.submit(ask) for _ in range(5)]
        answered = concurrent.futures.as_completed(answers)
        refused = [next(answered).result() for _ in range(4)]
    assert {status for status, _ in refused} == {503}
    assert all("Exceeds maximum queue size" in text for _, text in refused)
    assert sorted(answer.result()[0] for answer in answers) == [200, 200, 503, 503, 503, 503]


def test_unary_inference_refuses_decoupled_models(streams):
    """HTTP infer and ModelInfer refuse decoupled models."""
    with tritonclient.grpc.InferenceServerClient(streams.grpc) as client:
        with pytest.raises(InferenceServerException, match="ModelInfer RPC doesn't support models with decoupled"):
            client.infer("repeat", repeat_inputs([1]))
    answer = streams.infer("repeat", {"inputs": []})
    assert answer == (501, {"error": "HTTP end point doesn't support models with decoupled transaction policy"})
