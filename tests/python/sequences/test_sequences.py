"""Sequences through real clients: each is a sum in its instance, so that a request that was lost, repeated, reordered or sent to
another instance changes the result."""

import asyncio
import json
import os
import queue
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from harness.connections import connect, post
from harness.models import write
from harness.processes import held, mapped
from harness.sequence_models import IDS, MODELS
from harness.server import Server
from harness.statistics import received, until_received
from harness.waiting import DEADLINE_S, eventually


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    """Starts a server with all models."""
    folder = tmp_path_factory.mktemp("sequences")
    for name, text in MODELS.items():
        write(folder / "models", name, text)
    with Server(folder, [folder / "models"]) as server:
        yield server


@pytest.fixture(scope="module")
def http(sequences):
    """A tritonclient over HTTP."""
    with tritonclient.http.InferenceServerClient(sequences.http, concurrency=16, network_timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture(scope="module")
def grpc(sequences):
    """A tritonclient over gRPC."""
    with tritonclient.grpc.InferenceServerClient(sequences.grpc) as client:
        yield client


def inputs(kind, value, batch: int = 4, items: int = 1):
    """Returns the input."""
    array = np.full((1, items) if batch else (items,), value, np.int32)
    tensor = kind.InferInput("VALUE", array.shape, "INT32")
    tensor.set_data_from_numpy(array)
    return [tensor]


def step(client, model: str, sequence, value: int, flags: str = "", **options):
    """Sends one request; `flags` has `(` for START and `)` for END. Returns the sum, and the controls of the whole batch."""
    kind = tritonclient.grpc if isinstance(client, tritonclient.grpc.InferenceServerClient) else tritonclient.http
    tensors = inputs(kind, value, batch=model != "plain", items=options.pop("items", 1))
    flags = {"sequence_start": "(" in flags, "sequence_end": ")" in flags}
    result = client.infer(model, tensors, sequence_id=sequence, **flags, **options)
    return int(result.as_numpy("SUM").item()), result.as_numpy("BATCH").item().decode(), int(result.as_numpy("OPEN").item())


def refused(check) -> tuple:
    """Returns the status and the text of a refusal."""
    with pytest.raises(InferenceServerException) as error:
        check()
    return error.value.status(), error.value.message()


@pytest.mark.parametrize("model", ["direct", "oldest", "plain", "two"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_sequence_is_summed_by_one_instance(request, model, protocol):
    """The controls have the values of the requests."""
    client = request.getfixturevalue(protocol)
    assert step(client, model, 7, 1, "(")[:2] == (1, "1,0,1,7")
    assert step(client, model, 7, 2)[:2] == (3, "0,0,1,7")
    assert step(client, model, 7, 3, ")")[:2] == (6, "0,2,1,7")
    assert step(client, model, 7, 4, "()") == (4, "1,2,1,7", 0)


def test_slots_without_a_request_are_padding(http):
    """The second sequence has the second slot; the first one is not ready in that batch, and is in no statistic."""
    assert step(http, "direct", 1, 10, "(")[1] == "1,0,1,1"
    assert step(http, "direct", 2, 20, "(")[1] == "0,0,0,0 1,0,1,2"
    assert step(http, "direct", 1, 1, ")")[1] == "0,2,1,1"
    before = http.get_inference_statistics("direct")["model_stats"][0]
    assert step(http, "direct", 2, 2, ")") == (22, "0,0,0,0 0,2,1,2", 0)
    after = http.get_inference_statistics("direct")["model_stats"][0]

    def grown(*path):
        values = [before, after]
        for name in path:
            values = [value[name] for value in values]
        return values[1] - values[0]

    assert grown("inference_count") == grown("inference_stats", "success", "count") == 1
    sizes = [{b["batch_size"]: b["compute_infer"]["count"] for b in stats["batch_stats"]} for stats in (before, after)]
    assert sizes[1][2] == sizes[0][2] + 1, "padding counts in the size of the batch"


def test_a_busy_sequence_does_not_stop_one_of_another_shape(sequences, grpc):
    """The first sequence always has a request; the second one, whose items have another shape, is executed in turn."""
    answers, before = queue.SimpleQueue(), received(sequences, "wide_slow")

    def send(sequence: int, items: int, flags: str = ""):
        nonlocal before
        tensors = inputs(tritonclient.grpc, 1, items=items)
        callback = lambda result, error: answers.put((sequence, error))  # noqa: E731
        bounds = {"sequence_start": "(" in flags, "sequence_end": ")" in flags}
        grpc.async_infer("wide_slow", tensors, callback, sequence_id=sequence, **bounds)
        before += 1
        until_received(sequences, "wide_slow", before)

    with held(sequences, "wide_slow"):
        for flags in ("(", "", "", ")"):
            send(1, 1, flags)
        send(2, 2, "()")
    assert [answers.get(timeout=DEADLINE_S) for _ in range(5)] == [(sequence, None) for sequence in (1, 2, 1, 1, 1)]


def test_texts_and_short_numbers_as_ids(http, grpc):
    """An id has the type of the model's control; of a number that is too large, the control has the low bits."""
    for client in (http, grpc):
        assert step(client, "text", "ä-1", 1, "(")[:2] == (1, "1,0,1,ä-1")
        assert step(client, "text", "ä-1", 2, ")")[:2] == (3, "0,2,1,ä-1")
        assert step(client, "short", (1 << 32) + 5, 2, "()")[:2] == (2, "1,2,1,5")
    wrong = "sequence batching control 'CORRID' data-type is '{}', but model '{}' expects '{}'"
    assert wrong.format("BYTES", "direct", "UINT64") in refused(lambda: step(http, "direct", "a", 1, "("))[1]
    assert wrong.format("UINT64", "text", "BYTES") in refused(lambda: step(http, "text", 3, 1, "("))[1]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name, no, yes", [("int32", -3, 7), ("fp32", 4, 9), ("bool", 1, 0)])
def test_flags_in_each_type(request, protocol, name, no, yes):
    """START, END and READY have the configured values, in padding too."""
    client, model = request.getfixturevalue(protocol), f"flags_{name}"
    assert step(client, model, 31, 1, "(")[1] == f"{yes},{no},{yes},31"
    assert step(client, model, 32, 1, "(")[1] == f"{no},{no},{no},0 {yes},{no},{yes},32"
    assert step(client, model, 31, 2)[:2] == (3, f"{no},{no},{yes},31")
    assert step(client, model, 31, 3, ")")[:2] == (6, f"{no},{yes},{yes},31")
    assert step(client, model, 32, 1, ")")[1].endswith(f"{no},{yes},{yes},32")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("datatype", IDS)
def test_ids_in_each_type(request, protocol, datatype):
    """Of a number that is too large for the type, the model receives the low bits."""
    client, (sent, seen) = request.getfixturevalue(protocol), IDS[datatype]
    assert step(client, f"id_{datatype}", sent, 1, "(")[:2] == (1, f"1,0,1,{seen}")
    assert step(client, f"id_{datatype}", sent, 2, ")")[:2] == (3, f"0,2,1,{seen}")


def test_a_negative_number_as_an_id(http, grpc):
    """tritonclient sends numbers from 2^63 on as negative ones over gRPC; in JSON a negative number is no id. As in Triton."""
    assert step(grpc, "direct", -1, 1, "()")[1].endswith("1,2,1,18446744073709551615")
    status, text = refused(lambda: step(http, "direct", -1, 1, "()"))
    assert (status, text.split(": ", 2)[2]) == ("400", "it is -1, allowed: 0 to 18446744073709551615, or a string")


def test_ids_are_texts_of_128_bytes_at_most(http, grpc):
    """As in Triton. The refusal does not repeat the text."""
    longest = "é" * 64
    too_long = "string correlation ID cannot be longer than 128 characters, this one has 129 bytes"
    for client, code in ((http, "400"), (grpc, "StatusCode.INVALID_ARGUMENT")):
        assert step(client, "text", longest, 1, "()")[1].endswith(longest)
        assert refused(lambda: step(client, "text", longest + "x", 1, "()")) == (code, too_long)  # noqa: B023


def test_generate_ignores_sequence_parameters(sequences):
    """In `generate`, `sequence_id` and similar names are ordinary parameters, as in Triton."""
    body = '{"VALUE": 1, "sequence_id": 5, "sequence_start": true, "sequence_end": true}'
    status, text = sequences.ask("POST", "/v2/models/direct/generate", body)
    none = "inference request to model 'direct' must specify a non-zero or non-empty correlation ID"
    assert (status, text) == (400, f'{{"error":"{none}"}}')


def test_invalid_requests_are_refused(http, grpc):
    """The texts are those of Triton."""
    start = "inference request for sequence {} to model 'direct' must specify the START flag on the first request of the"
    assert refused(lambda: step(http, "direct", 99, 1)) == ("400", start.format(99) + " sequence")
    assert refused(lambda: step(grpc, "direct", 98, 1)) == ("StatusCode.INVALID_ARGUMENT", start.format(98) + " sequence")
    none = "inference request to model '{}' must specify a non-zero or non-empty correlation ID"
    for model in ("direct", "text"):
        assert refused(lambda: http.infer(model, inputs(tritonclient.http, 1))) == ("400", none.format(model))  # noqa: B023
    two = tritonclient.http.InferInput("VALUE", (2, 1), "INT32")
    two.set_data_from_numpy(np.ones((2, 1), np.int32))
    assert refused(lambda: http.infer("direct", [two], sequence_id=3, sequence_start=True)) == (
        "400",
        "inference request to model 'direct' must specify batch-size 1 due to requirements of sequence batcher",
    )


def test_clients_cannot_send_controls(http):
    """Controls are not in the metadata, and clients may not send them."""
    assert [tensor["name"] for tensor in http.get_model_metadata("direct")["inputs"]] == ["VALUE"]
    own = tritonclient.http.InferInput("START", (1, 1), "INT32")
    own.set_data_from_numpy(np.ones((1, 1), np.int32))
    status, _ = refused(lambda: http.infer("direct", [*inputs(tritonclient.http, 1), own], sequence_id=4))
    assert status == "400"


def test_an_idle_sequence_frees_its_slot(http, sequences):
    """A waiting sequence gets the slot, the next request of the idle one is refused, and the instance drops its state."""
    assert step(http, "idle", 1, 1, "(")[2] == 1
    began = time.monotonic()
    assert step(http, "idle", 2, 5, "(") == (5, "1,0,1,2", 1)
    assert time.monotonic() - began > 1
    assert "must specify the START flag" in refused(lambda: step(http, "idle", 1, 1))[1]
    assert step(http, "idle", 2, 1, ")") == (6, "0,2,1,2", 0)
    assert gauge(sequences, "pharos_sequences_idle_evicted_total", "idle") == 1
    assert gauge(sequences, "pharos_sequence_start_errors_total", "idle") == 1
    assert gauge(sequences, "pharos_sequence_slots", "idle") == 1


def in_background(check):
    """Runs the check in a thread; returns a function that waits for its result or error."""
    outcome = queue.Queue()

    def run():
        try:
            outcome.put((check(), None))
        except InferenceServerException as error:
            outcome.put((None, (error.status(), error.message())))

    threading.Thread(target=run, daemon=True).start()
    return lambda: outcome.get(timeout=DEADLINE_S)


def test_a_timeout_ends_a_sequence_that_waits_for_a_slot(http):
    """The timeout applies only in the backlog: a sequence with a slot does not time out."""
    assert step(http, "one", 1, 1, "(", timeout=1000)[0] == 1
    text = "timeout of the corresponding sequence has been expired"
    assert refused(lambda: step(http, "one", 2, 1, "(", timeout=50_000)) == ("503", text)
    assert step(http, "one", 1, 1, ")", timeout=1000)[0] == 2


def test_the_queues_have_limits(grpc, sequences):
    """One sequence may wait for the slot, and one request in a sequence."""
    full = ("StatusCode.UNAVAILABLE", "[request id: <id_unknown>] Exceeds maximum queue size")
    with held(sequences, "limited"):
        first = in_background(lambda: step(grpc, "limited", 1, 1, "("))
        eventually("the first request executes", lambda: gauge(sequences, "pharos_sequences", "limited", state="active") == 1)
        second = in_background(lambda: step(grpc, "limited", 1, 2))
        eventually("one request waits", lambda: gauge(sequences, "pharos_pending_requests", "limited", priority="0") == 1)
        assert refused(lambda: step(grpc, "limited", 1, 3)) == full
        third = in_background(lambda: step(grpc, "limited", 2, 5, "()"))
        eventually("one sequence waits", lambda: gauge(sequences, "pharos_sequences", "limited", state="backlogged") == 1)
        assert refused(lambda: step(grpc, "limited", 3, 3, "()")) == full
    assert (first()[0][0], second()[0][0]) == (1, 3)
    assert step(grpc, "limited", 1, 4, ")")[0] == 7
    assert third()[0][0] == 5


@pytest.mark.parametrize("model", ["limited_direct", "limited_oldest"])
def test_the_queue_limit_counts_waiting_requests_of_a_sequence(grpc, sequences, model):
    """While the instance executes another sequence, the first request of this one counts as waiting."""
    pending = lambda: gauge(sequences, "pharos_pending_requests", model, priority="0")  # noqa: E731
    with held(sequences, model):
        busy = in_background(lambda: step(grpc, model, 1, 1, "("))
        eventually("it executes", lambda: gauge(sequences, "pharos_sequences", model, state="active") == 1 and not pending())
        first = in_background(lambda: step(grpc, model, 2, 1, "("))
        eventually("one request waits", lambda: pending() == 1)
        full = ("StatusCode.UNAVAILABLE", "[request id: <id_unknown>] Exceeds maximum queue size")
        assert refused(lambda: step(grpc, model, 2, 1)) == full
    assert (busy()[0][0], first()[0][0]) == (1, 1)
    assert [step(grpc, model, sequence, 1, ")")[0] for sequence in (1, 2)] == [2, 2]


def test_start_of_an_active_id_is_logged_and_counted(http, grpc, sequences):
    """The log has it at most once a second, in a line of limited length. A START after END is not counted."""
    lines = lambda: [line for line in sequences.log.read_text().splitlines() if "the START flag restarted" in line]  # noqa: E731
    counted = lambda model: gauge(sequences, "pharos_sequence_restarts_total", model)  # noqa: E731
    before = counted("oldest")
    assert step(http, "oldest", 70, 1, "()")[0] == step(http, "oldest", 70, 1, "(")[0] == 1
    assert counted("oldest") == before and lines() == []
    assert step(http, "oldest", 70, 5, "(")[0] == 5, "the sequence starts again"
    assert counted("oldest") == before + 1
    [line] = lines()
    assert "WARN" in line and "oldest" in line and "the active sequence 70;" in line
    assert [step(http, "oldest", 70, 5, "(")[0] for _ in range(20)] == [5] * 20
    assert counted("oldest") == before + 21 and len(lines()) < 21
    assert step(http, "oldest", 70, 5, ")")[0] == 10
    hostile = "a\n" + "z" * 126
    assert [step(grpc, "text", hostile, 1, "(")[0] for _ in range(2)] == [1, 1]
    assert step(grpc, "text", hostile, 1, ")")[0] == 2
    logged = [line for line in lines() if "text" in line]
    assert len(logged) == 1 and len(logged[0]) < 1000 and "a\\nzzz" in logged[0]


def gauge(server, name: str, model: str, **labels):
    """Returns the value of a metric."""
    wanted = tuple(sorted({"model": model, "version": "1", **labels}.items()))
    return server.scrape().get((name, wanted))


def test_a_lost_instance_ends_its_sequences(http, sequences):
    """Requests of the lost sequences are refused until a START, on any instance."""
    assert step(http, "two", 1, 1, "(")[0] == 1
    assert step(http, "two", 2, 1, "(")[0] == 1
    killed = [pid for pid in sequences.workers() if Path(f"/proc/{pid}/cmdline").read_bytes().find(b"\0two_0") > 0]
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    eventually("both sequences are lost", lambda: lost(http))
    status, text = refused(lambda: step(http, "two", 2, 1))
    assert status == "503" and "sequence 2 of model 'two' was ended" in text
    assert step(http, "two", 1, 7, "(")[0] == 7
    assert step(http, "two", 1, 1, ")")[0] == 8
    assert step(http, "two", 2, 3, "()")[0] == 3


def lost(http) -> bool:
    try:
        return step(http, "two", 1, 0) is None
    except InferenceServerException as error:
        return "sequence 1 of model 'two' was ended" in error.message()


def test_more_sequences_than_slots_over_one_stream(sequences):
    """Sequences in the backlog need the ENDs that follow in the stream: the server continues to read, and answers all requests in
    order."""
    count, steps = 40, 10
    first = 1_000_000
    answers, done = [], threading.Event()

    def taken(result, error):
        answers.append(error or (int(result.get_response().id), int(result.as_numpy("SUM").item())))
        if len(answers) == count * steps:
            done.set()

    expected = []
    with tritonclient.grpc.InferenceServerClient(sequences.grpc) as client:
        client.start_stream(taken)
        for step in range(1, steps + 1):
            for number in range(count):
                flags = {"sequence_id": first + number, "sequence_start": step == 1, "sequence_end": step == steps}
                request_id = str(len(expected))
                client.async_stream_infer("direct", inputs(tritonclient.grpc, step), request_id=request_id, **flags)
                expected.append((len(expected), step * (step + 1) // 2))
        in_time = done.wait(DEADLINE_S)
        client.stop_stream(cancel_requests=not in_time)
    assert in_time, f"{len(answers)} of {count * steps} are answered"
    assert answers == expected


def test_a_stream_keeps_the_order(grpc):
    """Requests of several sequences in one stream, sent without waiting for the answers."""
    for model in ("direct", "oldest"):
        answers = queue.Queue()
        grpc.start_stream(lambda result, error: answers.put((result, error)))  # noqa: B023
        for value in range(1, 11):
            for sequence in (1, 2, 3):
                flags = {"sequence_start": value == 1, "sequence_end": value == 10}
                name = f"{sequence}-{value}"
                grpc.async_stream_infer(
                    model, inputs(tritonclient.grpc, value * sequence), request_id=name, sequence_id=sequence, **flags
                )
        got = {}
        for _ in range(30):
            result, error = answers.get(timeout=DEADLINE_S)
            assert error is None
            got[result.get_response().id] = int(result.as_numpy("SUM").item())
        grpc.stop_stream()
        assert got == {f"{s}-{v}": s * v * (v + 1) // 2 for s in (1, 2, 3) for v in range(1, 11)}


def test_async_clients(sequences):
    """Asynchronous clients over both protocols: more sequences than slots, interleaved."""

    async def one(client, kind, sequence: int) -> list:
        sums = []
        for value in range(1, 6):
            flags = {"sequence_id": sequence, "sequence_start": value == 1, "sequence_end": value == 5}
            result = await client.infer("two", inputs(kind, value), **flags)
            sums.append(int(result.as_numpy("SUM").item()))
        return sums

    async def all_of(kind, address: str):
        async with kind.InferenceServerClient(address) as client:
            return await asyncio.gather(*(one(client, kind, sequence) for sequence in range(1, 21)))

    for kind, address in ((tritonclient.http.aio, sequences.http), (tritonclient.grpc.aio, sequences.grpc)):
        assert asyncio.run(all_of(kind, address)) == [[1, 3, 6, 10, 15]] * 20


def test_async_streams(sequences):
    """Sequences interleaved in one `stream_infer` of the asynchronous client, each answered in order."""

    async def requests():
        for value in range(1, 6):
            for sequence in (41, 42, 43):
                yield {
                    "model_name": "oldest",
                    "inputs": inputs(tritonclient.grpc.aio, value * sequence),
                    "request_id": f"{sequence}",
                    "sequence_id": sequence,
                    "sequence_start": value == 1,
                    "sequence_end": value == 5,
                }

    async def sums() -> dict:
        got = {}
        async with tritonclient.grpc.aio.InferenceServerClient(sequences.grpc) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                got.setdefault(int(result.get_response().id), []).append(int(result.as_numpy("SUM").item()))
        return got

    expected = {sequence: [sequence * total for total in (1, 3, 6, 10, 15)] for sequence in (41, 42, 43)}
    assert asyncio.run(sums()) == expected


def test_different_shapes_are_in_different_batches(sequences, grpc):
    """A model with a variable dimension sums all elements that it receives. Both requests wait while another one is executed."""
    before = received(sequences, "wide")
    with held(sequences, "wide"):
        answers = []
        for sequence, items in ((3, 1), (1, 3), (2, 5)):
            answers.append(in_background(lambda of=sequence, count=items: step(grpc, "wide", of, 1, "()", items=count)))
            until_received(sequences, "wide", before + len(answers))
    assert [answer()[0][0] for answer in answers] == [1, 3, 5]


def test_an_iterative_request_needs_no_id(http):
    """The server creates a sequence for it, which ends with its answer."""
    value, batch, _ = step(http, "iterative", 0, 3)
    assert value == 3 and batch.startswith("1,0,1,") and not batch.endswith(",0")
    assert step(http, "iterative", 0, 4)[0] == 4
    eventually("the sequence has ended", lambda: step(http, "iterative", 0, 5)[2] == 1)


def test_a_cancelled_request_ends_its_sequence(sequences, grpc):
    """A request is cancelled while it waits: the sequence's other waiting requests are answered as cancelled, too."""
    tensors = inputs(tritonclient.grpc, 1)
    done = queue.Queue()
    answer = lambda result, error: done.put((result, error))  # noqa: E731
    ask = lambda **more: grpc.async_infer("one", tensors, answer, sequence_id=50, **more)  # noqa: E731
    before = received(sequences, "one")
    with held(sequences, "one"):
        ask(sequence_start=True)
        until_received(sequences, "one", before + 1)
        waiting = ask()
        until_received(sequences, "one", before + 2)
        ask()
        until_received(sequences, "one", before + 3)
        waiting.cancel()
        errors = [done.get(timeout=DEADLINE_S)[1] for _ in range(2)]
        assert [error.status() for error in errors] == ["StatusCode.CANCELLED"] * 2
        text = "sequence 50 of model 'one' was ended: one of its waiting requests was cancelled; start it again with the START flag"
        assert [error.message() for error in errors].count(text) == 1
    assert done.get(timeout=DEADLINE_S)[1] is None
    assert step(grpc, "one", 51, 2, "()")[0] == 2, "its slot is free"


def test_a_sequence_whose_only_request_was_cancelled_leaves_the_backlog(sequences, http):
    """With implicit starts: it takes no slot, so that the next sequence waits only for the idle time of the one with the slot."""
    backlogged = lambda: gauge(sequences, "pharos_sequences", "implicit", state="backlogged")  # noqa: E731
    assert step(http, "implicit", 1, 1)[0] == 1
    value = {"name": "VALUE", "datatype": "INT32", "shape": [1, 1], "data": [5]}
    body = json.dumps({"inputs": [value], "parameters": {"sequence_id": 2}}).encode()
    with connect(sequences.http_port) as waiting:
        waiting.sendall(post("/v2/models/implicit/infer", body))
        eventually("it waits", lambda: backlogged() == 1)
    eventually("it waits no more", lambda: backlogged() == 0)
    assert step(http, "implicit", 3, 5)[0] == 5
    eventually("no slot is in use", lambda: gauge(sequences, "pharos_sequence_slots_used", "implicit") == 0)


@pytest.mark.slow
@pytest.mark.alone
def test_ten_thousand_open_sequences(sequences, grpc):
    """Each sequence has a slot; an idle sequence uses less than 2 KiB of the server's memory."""
    count = 10_000

    async def steps(first: int, flags: dict, value: int) -> set:
        async with tritonclient.grpc.aio.InferenceServerClient(sequences.grpc) as client:
            tensors, semaphore = inputs(tritonclient.grpc, value), asyncio.Semaphore(64)

            async def one(number: int) -> int:
                async with semaphore:
                    result = await client.infer("many", tensors, sequence_id=number, **flags)
                    return int(result.as_numpy("SUM").item())

            return set(await asyncio.gather(*(one(number) for number in range(first, first + count))))

    def open_from(first: int) -> int:
        """Opens this number of sequences and leaves them open; returns the bytes that they use."""
        before = mapped(sequences.process.pid, "Rss")
        assert asyncio.run(steps(first, {"sequence_start": True}, 1)) == {1}
        return mapped(sequences.process.pid, "Rss") - before

    # An equal load runs first, to allocate the memory that requests need. One of the two measurements may include memory that the
    # allocator takes for threads or releases from earlier tests: then only the greater one counts.
    assert asyncio.run(steps(1, {"sequence_start": True, "sequence_end": True}, 1)) == {1}
    taken = [open_from(1), open_from(1 + count)]
    print(f"{[size // count for size in taken]} bytes for each open sequence")
    each = sum(taken) / 2 if min(taken) > 0 else max(taken)
    assert 0 < each < 2048 * count
    assert gauge(sequences, "pharos_sequences", "many", state="active") == 2 * count
    assert gauge(sequences, "pharos_sequence_slots_used", "many") == 2 * count
    for first in (1, 1 + count):
        assert asyncio.run(steps(first, {"sequence_end": True}, 2)) == {3}
    assert gauge(sequences, "pharos_sequences", "many", state="active") == 0
