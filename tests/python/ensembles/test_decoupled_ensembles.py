"""Ensembles with decoupled members: slow readers, cancellation, lost workers, statistics, `max_inflight_requests` and order.
`test_streams.py` and `test_ensemble_tables.py` compare them with a real Triton."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import queue
import threading

import grpc
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException

from ensembles.decoupled import ENSEMBLES, MEMBERS, asked, one, read, stub, values
from harness.connections import connect, next_bytes, post
from harness.processes import held, memory
from harness.sequence_models import config as sequence_config, controls
from harness.server import Server, total
from harness.statistics import until_received
from harness.stream_models import REPEAT, build, ensemble, model, passed, repeated, step
from harness.streams import Collected, repeat_inputs
from harness.waiting import DEADLINE_S, eventually, holds_for, join_all, pause_as_client, settled

FAILURES, STEP = "nv_inference_request_failure", "pharos_ensemble_step_duration_seconds"
IN_FLIGHT = "pharos_ensemble_inflight_requests"
@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with all these models."""
    folder = tmp_path_factory.mktemp("decoupled")
    repository = build(folder / "models", MEMBERS | ENSEMBLES)
    (repository / "sums/1").mkdir(parents=True)
    sums = sequence_config(f"max_sequence_idle_microseconds: 60000000 {controls()}", batch=0)
    (repository / "sums/config.pbtxt").write_text(sums)
    options = ["--exit-on-error=false", "--cache-config=local,size=1048576", "--worker-execution-timeout-secs=5"]
    running = Server(folder, [repository], options)
    running.launch()
    try:
        running.wait_until_ready("/v2/health/live")
        eventually("the server serves", lambda: running.get("/v2/models/chain/ready")[0] == 200)
        yield running
    finally:
        running.stop()


def inference(server, name: str) -> dict:
    """Returns the statistics of a model's requests."""
    return server.statistics(name)["inference_stats"]


def grown(before: dict, after: dict, what="count") -> dict:
    """Returns the increases of the statistics."""
    return {key: after[key][what] - before[key][what] for key in after}


@pytest.mark.parametrize("name", ["chain", "order"])
def test_responses_keep_the_producers_order(server, name):
    """Even if the following steps finish out of order, here in four slow instances."""
    elements = list(range(300))
    assert values(server, asked(name, elements)) == [("a", n) for n in elements]


def test_several_decoupled_members_multiply(server):
    """Each response of the first member is a request to the second, which answers three times; those responses stay together."""
    assert values(server, asked("multiplied", [5, 6, 7])) == [("a", n) for n in (5, 6, 7) for _ in range(3)]
    assert values(server, asked("multiplied", range(200))) == [("a", n) for n in range(200) for _ in range(3)]


def test_one_hundred_requests_on_one_stream(server):
    """With tritonclient: each response arrives once and in its request's order, and each request ends once."""
    got = Collected()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(got)
        for n in range(100):
            inputs = repeat_inputs(range(n % 20))[:2]
            client.async_stream_infer("chain", inputs, request_id=str(n), enable_empty_final_response=True)
        eventually("100 ends", lambda: len(got.finals) == 100)
        client.stop_stream()
    assert not got.errors and sorted(got.finals, key=int) == [str(n) for n in range(100)]
    assert got.values == {str(n): list(range(n % 20)) for n in range(100) if n % 20}


def test_tritonclient_aio(server):
    """The asyncio client: values, then an error in the stream, then the next request."""

    async def ask():
        async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:

            async def requests():
                for name in ("fails_early", "chain"):
                    yield {"model_name": name, "inputs": repeat_inputs([5, 6, 7], 20)[:2], "request_id": name}

            return [answer async for answer in client.stream_infer(requests())]

    answers = asyncio.run(ask())
    errors = [str(error) for _, error in answers if error]
    assert len(errors) == 1 and "in ensemble 'fails_early', requested failure at response 2" in errors[0]
    got = [int(result.as_numpy("OUT")[0]) for result, error in answers if not error and result.as_numpy("OUT") is not None]
    assert sorted(got) == [5, 5, 6, 6, 7]


def test_responses_are_sent_as_they_are_made(server):
    """The first response arrives long before the last is computed, also as server-sent events."""
    answered = inference(server, "chain")["success"]["count"]
    with connect(server.http_port) as connection:
        body = json.dumps({"IN": [1, 2, 3], "DELAY": [0, 2000, 0]}).encode()
        connection.sendall(post("/v2/models/chain/generate_stream", body))
        text = b""
        while b'"OUT":1,' not in text:
            text += next_bytes(connection)
        assert inference(server, "chain")["success"]["count"] == answered and b'"OUT":2,' not in text
        while b'"OUT":3,' not in text:
            text += next_bytes(connection)


def test_interfaces_with_one_answer(server):
    """Unary calls are refused with Triton's text; `generate` returns the response if there is exactly one; the configuration
    declares the ensemble decoupled."""
    body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]}
    status, answer = server.infer("chain", body)
    assert (status, answer["error"]) == (501, "HTTP end point doesn't support models with decoupled transaction policy")
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="ModelInfer RPC doesn't support models with decoupled") as error:
            client.infer("chain", repeat_inputs([1])[:1])
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"
        assert client.get_model_config("chain").config.model_transaction_policy.decoupled is True
    assert server.ask("POST", "/v2/models/chain/generate", '{"IN":4}')[0] == 200
    assert server.ask("POST", "/v2/models/chain/generate", '{"IN":[4,5]}')[0] == 400


def test_a_cache_is_refused(server):
    """As for every decoupled model."""
    [entry] = server.index()["cached"]
    text = "Response Cache does not currently support model cached with 'decoupled' transaction policy in its member "
    assert entry["state"] == "UNAVAILABLE" and entry["reason"].startswith(text)


def test_statistics(server):
    """A request counts once; its compute times are the sums over all requests of its steps; responses are counted individually;
    the requests of each step have their wall-clock time."""
    names = ("multiplied", "thrice", "rows_of_any", "repeat")
    before = {name: inference(server, name) for name in names}
    scraped = server.scrape()
    assert len(values(server, asked("multiplied", [1, 2]), asked("multiplied", [3], "b"))) == 9
    after = {name: inference(server, name) for name in names}
    counts = {name: grown(before[name], after[name])["success"] for name in names}
    assert counts == {"multiplied": 2, "thrice": 2, "rows_of_any": 3, "repeat": 3}
    took = {name: grown(before[name], after[name], "ns") for name in names}
    for key in ("compute_input", "compute_infer", "compute_output"):
        # Start and end of each interval are rounded separately.
        assert abs(took["multiplied"][key] - sum(took[name][key] for name in names[1:])) < 1000, key
    assert took["multiplied"]["success"] > 0
    stats = server.statistics("multiplied")
    assert stats["execution_count"] == stats["inference_count"] == stats["inference_stats"]["success"]["count"]
    of = stats["response_stats"]
    assert all(of[str(n)]["success"]["count"] >= 2 for n in range(3)) and of["5"]["success"]["count"] >= 1
    metrics = server.scrape()
    more = lambda name, **labels: total(metrics, name, **labels) - total(scraped, name, **labels)  # noqa: E731
    for number, (member, count) in enumerate([("thrice", 2), ("rows_of_any", 3), ("repeat", 3)]):
        assert more(f"{STEP}_count", model="multiplied", step=str(number), member=member) == count
    assert more("nv_inference_first_response_histogram_ms_count", model="multiplied") == 2
    assert more("nv_inference_request_success", model="multiplied") == 2
    assert total(metrics, "nv_inference_pending_request_count", model="multiplied") == 0


def test_a_failure_counts_once(server):
    """As OTHER for the ensemble; the failed member counts its own failure."""
    before = server.scrape()
    assert values(server, asked("fails_behind", [1, 2]), asked("fails_behind", [3], "b"))[-1][1].startswith(
        "in ensemble 'fails_behind', requested failure"
    )
    counted = lambda: total(server.scrape(), FAILURES, model="fails_behind", reason="OTHER") - total(  # noqa: E731
        before, FAILURES, model="fails_behind", reason="OTHER"
    )
    assert counted() == 2
    assert inference(server, "fails_behind")["success"]["count"] == 0


def canceled(server, name: str) -> float:
    """Returns the number of a model's cancelled requests."""
    return total(server.scrape(), FAILURES, model=name, reason="CANCELED")


@pytest.mark.parametrize("way", ["grpc cancel", "grpc disconnect", "http disconnect"])
def test_a_client_disconnect_ends_all_steps(server, way):
    """Within the stream: ends the producer, which would run for ten minutes, and the dependent request."""
    names = ("waits", "repeat", "slower")
    before = {name: canceled(server, name) for name in names}
    elements = list(range(1000))
    answered = inference(server, "slower")["success"]["count"]
    if way == "http disconnect":
        with connect(server.http_port) as connection:
            body = json.dumps({"IN": elements, "DELAY": [20] + [600] * 999}).encode()
            connection.sendall(post("/v2/models/waits/generate_stream", body))
            eventually("the first response", lambda: inference(server, "slower")["success"]["count"] > answered)
    else:
        with grpc.insecure_channel(server.grpc) as channel:
            call = stub(channel).ModelStreamInfer(iter([asked("waits", elements, delay_ms=600)]))
            assert read(next(call)) == ("a", 0)
            if way == "grpc cancel":
                call.cancel()
    eventually("all requests are cancelled", lambda: all(canceled(server, name) > before[name] for name in names))
    assert canceled(server, "waits") == before["waits"] + 1
    assert server.ask("POST", "/v2/models/chain/generate", '{"IN":1}')[0] == 200


def test_a_failure_ends_the_producer(server):
    """A failed step ends the request at once, and cancels the member that produced the failed step's input."""
    before = canceled(server, "repeat")
    [answer] = values(server, asked("fails_behind", range(1000), delay_ms=600))
    assert answer == ("a", "in ensemble 'fails_behind', requested failure")
    eventually("the producer is cancelled", lambda: canceled(server, "repeat") == before + 1)


def test_a_lost_worker_is_an_error_in_the_stream(server):
    """The stream has the responses made before, then the error, and continues with the next request."""
    answers = values(server, asked("breaks", [4, 5, 6, 7]))
    text = "in ensemble 'breaks', the worker of model 'crashing' version 1 died in the middle of the responses"
    assert answers[:2] == [("a", 4), ("a", 5)] and len(answers) == 3 and answers[2][1].startswith(text)
    eventually("the ensemble is ready again", lambda: server.get("/v2/models/breaks/ready")[0] == 200)
    assert values(server, asked("breaks", [4, 5])) == [("a", 4), ("a", 5)]


def sent(server, name: str) -> int:
    """Returns the number of responses that a model has sent."""
    return sum(entry["success"]["count"] for entry in server.statistics(name)["response_stats"].values())


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_reader_that_does_not_read_stops_the_members(server, way):
    """1 GiB of responses through two members to a client that does not read: a few dozen are buffered, the producer waits without
    being killed, and the next client is served after the reader has disconnected."""
    workers, before = server.workers(), memory(server)
    first, given_up = sent(server, "wide"), canceled(server, "wide")
    if way == "http":
        connection = connect(server.http_port)
        connection.sendall(post("/v2/models/big/generate_stream", json.dumps({"IN": [1] * 1024}).encode()))
        leave = connection.close
    else:
        channel = grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)])
        call = stub(channel).ModelStreamInfer(iter([asked("big", [1] * 1024)]))
        leave = lambda: (call.cancel(), channel.close())  # noqa: E731
    eventually("responses are held", lambda: sent(server, "wide") - first >= 32)
    held = settled("the held responses", lambda: sent(server, "wide"), 0.5)
    # Longer than the time that an execution may take.
    holds_for("no more responses are sent", 6, lambda: sent(server, "wide") == held)
    assert held - first < 200
    assert memory(server) - before < 400 << 20
    assert server.workers() == workers
    leave()
    eventually("the producer is cancelled", lambda: canceled(server, "wide") == given_up + 1)
    assert server.ask("POST", "/v2/models/big/generate", '{"IN":1}')[0] == 200


def test_a_reader_that_does_not_read_delays_no_equal_request(tmp_path):
    """`single_flight`: a step of a client that does not read waits for an equal request, which is cancelled. Further equal requests
    are executed."""
    members = {
        "repeat": MEMBERS["repeat"],
        "cached": one("identity", "response_cache { enable: true }\n"),
        "huge": model("repeat", REPEAT, copies=1 << 23),
        "stalls": ensemble(repeated(delayed=False), passed("a", "b", "cached"), repeated("huge", "b", "OUT", False)),
    }
    tensor = {"name": "I0", "datatype": "INT32", "shape": [1]}
    # Like the request of a step, which names its outputs.
    body = lambda n: json.dumps({"inputs": [{**tensor, "data": [n]}], "outputs": [{"name": "O0"}]})  # noqa: E731
    options = ["--cache-config=local,size=1048576", "--cache-config=local,single_flight=true"]
    with (
        Server(tmp_path, [build(tmp_path / "models", members)], options) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
        contextlib.ExitStack() as connections,
    ):
        ask = lambda n: server.ask("POST", "/v2/models/cached/infer", body(n))  # noqa: E731
        assert ask(1)[0] == 200
        with held(server, "cached"):
            blocking = [pool.submit(ask, n) for n in range(100, 104)]
            until_received(server, "cached", 1 + len(blocking))
            leader = http.client.HTTPConnection(*server.http.split(":"))
            leader.request("POST", "/v2/models/cached/infer", body(7))
            until_received(server, "cached", 2 + len(blocking))
            with held(server, "huge"):
                reader = connections.enter_context(connect(server.http_port))
                reader.sendall(post("/v2/models/stalls/generate_stream", json.dumps({"IN": [1, 7]}).encode()))
                eventually("the producer is done", lambda: sent(server, "repeat") == 2)
            eventually("a response is ready", lambda: sent(server, "huge") >= 1)
            leader.close()
            eventually("the leader is cancelled", lambda: canceled(server, "cached") == 1)
        assert all(done.result()[0] == 200 for done in blocking)
        assert ask(7)[0] == 200


def test_a_reader_that_does_not_read_leads_no_equal_request(tmp_path):
    """`single_flight`: a step of a client that does not read is an ensemble, whose response an equal request waits for."""
    members = {
        "repeat": MEMBERS["repeat"],
        "rows_of_any": MEMBERS["rows_of_any"],
        "huge": model("repeat", REPEAT, copies=1 << 23),
        "cached": ensemble(passed("IN", "OUT"), extra="response_cache { enable: true }\n"),
        "stalls": ensemble(
            repeated(delayed=False), step("cached", {"IN": "a"}, {"OUT": "b"}), repeated("huge", "b", "OUT", False)
        ),
    }
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1]}
    body = lambda n: json.dumps({"inputs": [{**tensor, "data": [n]}], "outputs": [{"name": "OUT"}]})  # noqa: E731
    options = ["--cache-config=local,size=1048576", "--cache-config=local,single_flight=true"]
    with Server(tmp_path, [build(tmp_path / "models", members)], options) as server:
        ask = lambda n: server.ask("POST", "/v2/models/cached/infer", body(n))  # noqa: E731
        assert ask(1)[0] == 200
        with connect(server.http_port) as reader:
            with held(server, "rows_of_any"):
                with held(server, "huge"):
                    reader.sendall(post("/v2/models/stalls/generate_stream", json.dumps({"IN": [1, 7]}).encode()))
                    until_received(server, "rows_of_any", 2)
                eventually("a response is ready", lambda: sent(server, "huge") >= 1)
            assert ask(7)[0] == 200


def test_a_slow_reader_gets_everything(server):
    """128 MiB through two members to a reader with pauses: complete and in order."""
    with grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)]) as channel:
        got = []
        for message in stub(channel).ModelStreamInfer(iter([asked("big", range(128))]), timeout=DEADLINE_S):
            got.append(read(message)[1])
            pause_as_client(0.1 if len(got) % 32 == 0 else 0)
    assert got == list(range(128))


class Watch:
    """Samples a number repeatedly in the background."""

    def __init__(self, look):
        self.look, self.seen, self.over = look, [], threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.over.is_set():
            self.seen.append(self.look())

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        join_all([self.thread])


def pending(server, name: str) -> float:
    """Returns the number of requests that wait for a model."""
    return total(server.scrape(), "nv_inference_pending_request_count", model=name)


def test_without_a_limit_responses_wait_for_the_slow_step(server):
    """The problem that the limit solves: 150 responses of a fast producer queue up at once, as in Triton."""
    with Watch(lambda: pending(server, "slow_alone")) as watch:
        assert [value for _, value in values(server, asked("free", range(150)))] == list(range(150))
    assert max(watch.seen) > 60


def test_max_inflight_requests(server):
    """At most three requests of a step run at once, over all clients; the producer waits."""
    with Watch(lambda: {labels: n for (name, labels), n in server.scrape().items() if name == IN_FLIGHT}) as watch:
        answers = values(server, *(asked("limited", range(40), str(n)) for n in range(5)))
    for n in range(5):
        assert [value for name, value in answers if name == str(n)] == list(range(40))
    steps = {step: [] for step in ("0", "1", "2")}
    for seen in watch.seen:
        for labels, count in seen.items():
            if dict(labels)["model"] == "limited":
                steps[dict(labels)["step"]].append(count)
    assert all(max(counts) <= 3 for counts in steps.values())
    assert max(steps["1"]) == 3 and max(steps["0"]) == 3, "the limit is used"
    assert not any(dict(labels)["model"] == "chain" for labels in watch.seen[-1]), "without a limit there is no such series"


def test_the_limit_holds_the_producer(server):
    """Responses that the slow step cannot accept are not made: beyond the limit the member buffers only a few."""
    first = sent(server, "repeat")
    with grpc.insecure_channel(server.grpc) as channel:
        call = stub(channel).ModelStreamInfer(iter([asked("limited", range(1000))]))
        assert read(next(call)) == ("a", 0)
        # Three in the step, one on its way to it, and those that the member may send ahead.
        assert sent(server, "repeat") - first < 60
        call.cancel()


@pytest.mark.parametrize("name", ["limited_twice", "limited_once"])
def test_limits_do_not_deadlock(server, name):
    """One place in each step of a chain of decoupled members, with eight clients."""
    done = queue.Queue()

    def ask(number: int):
        if name == "limited_once":
            body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [number]}]}
            done.put(server.infer(name, body)[1]["outputs"][0]["data"] == [number])
        else:
            done.put(values(server, asked(name, range(20))) == [("a", n) for n in range(20) for _ in range(3)])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    assert all(done.get(timeout=DEADLINE_S) for _ in threads)


def test_a_member_may_set_the_sequence_of_its_responses(server):
    """The responses of a decoupled member become the steps of a sequence in the next model; its
    answers have the sequence parameters."""
    with grpc.insecure_channel(server.grpc) as channel:
        for _ in range(2):
            call = stub(channel).ModelStreamInfer(iter([asked("steps_of_a_sequence", [1, 2, 3])]), timeout=DEADLINE_S)
            answers = [message for message in call if message.infer_response.outputs]
            assert [read(message)[1] for message in answers] == [1, 3, 6]
            sent_parameters = [message.infer_response.parameters for message in answers]
            assert [parameters["sequence_id"].int64_param for parameters in sent_parameters] == [77] * 3
            assert [parameters["sequence_start"].bool_param for parameters in sent_parameters] == [True, False, False]
            assert [parameters["sequence_end"].bool_param for parameters in sent_parameters] == [False, False, True]


def test_exit_finishes_a_stream(tmp_path):
    """SIGTERM within a stream: the client gets all responses, and the server exits."""
    models = {name: (MEMBERS | ENSEMBLES)[name] for name in ("repeat", "rows_of_any", "chain")}
    with Server(tmp_path, [build(tmp_path / "models", models)]) as server:
        with grpc.insecure_channel(server.grpc) as channel:
            call = stub(channel).ModelStreamInfer(iter([asked("chain", range(10), delay_ms=100)]), timeout=DEADLINE_S)
            assert read(next(call)) == ("a", 0)
            ended = queue.Queue()
            threading.Thread(target=lambda: ended.put(server.stop())).start()
            assert [read(message)[1] for message in call if message.infer_response.outputs] == list(range(1, 10))
        assert ended.get(timeout=DEADLINE_S) == 0
