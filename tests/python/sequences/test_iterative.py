"""Iterative sequences: the backend has a request executed repeatedly, batched with requests that arrived later (continuous
batching), with one answer at the end or one per execution."""

import json
import os
import queue
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from harness.connections import connect, post
from harness.models import write
from harness.processes import held
from harness.server import Server, total
from harness.statistics import dispatched, received, until_dispatched, until_received
from harness.waiting import DEADLINE_S, eventually, join_all, settled
from sequences.iterative_models import DELAY_MS, MODELS, count_of

COUNT = 150_000
LONG = 200
"""Executions of a request that others join."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with all models."""
    folder = tmp_path_factory.mktemp("iterative")
    for name, text in MODELS.items():
        write(folder / "models", name, text)
    with Server(folder, [folder / "models"]) as running:
        yield running


def statistics(server, model: str) -> dict:
    """Returns the model's statistics."""
    return json.loads(server.get(f"/v2/models/{model}/stats")[1])["model_stats"][0]


def distribution(server, model: str, part: str) -> tuple:
    """Returns sum and count of a histogram of durations."""
    name, scrape = f"pharos_{part}_duration_seconds", server.scrape()
    return tuple(total(scrape, f"{name}_{what}", model=model) for what in ("sum", "count"))


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_a_request_is_executed_until_its_backend_ends_it(server, model):
    """One answer and one success; each execution is counted, and its time is part of the sums."""
    before = statistics(server, model)
    parts = ("queue", "compute_input", "compute_infer", "compute_output", "request")
    sums = lambda: {part: distribution(server, model, part) for part in parts}  # noqa: E731
    distributions = sums()
    with tritonclient.http.InferenceServerClient(server.http) as client:
        result = client.infer(model, count_of(tritonclient.http, 7))
    assert result.as_numpy("DONE").tolist() == [[7]]
    after = statistics(server, model)
    grown = {key: after[key] - before[key] for key in ("execution_count", "inference_count")}
    assert grown == {"execution_count": 7, "inference_count": 1}
    old, new = before["inference_stats"], after["inference_stats"]
    assert new["success"]["count"] - old["success"]["count"] == 1
    computed = new["compute_infer"]["ns"] - old["compute_infer"]["ns"]
    whole = new["success"]["ns"] - old["success"]["ns"]
    assert 7 * DELAY_MS * 1_000_000 <= computed <= whole
    waited = new["queue"]["ns"] - old["queue"]["ns"]
    assert waited <= whole - computed
    # The histograms have each execution, as the sums have; the durations of requests have the request.
    for part, (seconds, count) in sums().items():
        key = "success" if part == "request" else part
        grown = new[key]["ns"] - old[key]["ns"]
        assert count - distributions[part][1] == (1 if part == "request" else 7), part
        assert abs(seconds - distributions[part][0] - grown / 1e9) < 1e-6, part


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_later_requests_join_running_ones(server, model):
    """A short request shares batches with a long one instead of waiting for its end."""
    # A client in another thread: `async_infer` sends nothing before this thread waits in the same client.
    def infer(count: int):
        with tritonclient.http.InferenceServerClient(server.http, network_timeout=DEADLINE_S) as client:
            return client.infer(model, count_of(tritonclient.http, count))

    with ThreadPoolExecutor(2) as pool:
        before, requests = dispatched(server, model), received(server, model)
        long = pool.submit(infer, LONG)
        until_dispatched(server, model, before + 2)
        # The long request makes no progress until the short one has arrived.
        with held(server, model):
            short = pool.submit(infer, 3)
            until_received(server, model, requests + 2)
        assert short.result().as_numpy("DONE").item() == 3
        assert short.result().as_numpy("TOGETHER").item() == 2
        assert not long.done()
        assert long.result().as_numpy("DONE").item() == LONG


def test_each_execution_answers_on_a_stream(server):
    """Many concurrent requests to a decoupled model: each gets its own numbers, in order, and one final response."""
    answers = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        counts = [1, 5, 40, 2, 9, 17, 3, 30, 4, 6]
        for number, count in enumerate(counts):
            client.async_stream_infer(
                "stream", count_of(tritonclient.grpc, count), request_id=str(number), enable_empty_final_response=True
            )
        got, ends = {}, set()
        while len(ends) < len(counts):
            result, error = answers.get(timeout=DEADLINE_S)
            assert error is None
            response = result.get_response()
            if response.outputs:
                got.setdefault(int(response.id), []).append(result.as_numpy("DONE").item())
            if response.parameters["triton_final_response"].bool_param:
                ends.add(int(response.id))
        client.stop_stream()
    assert got == {number: list(range(1, count + 1)) for number, count in enumerate(counts)}
    stats = statistics(server, "stream")
    assert stats["inference_stats"]["success"]["count"] == len(counts)
    assert stats["response_stats"]["0"]["success"]["count"] == len(counts)
    assert stats["response_stats"]["39"]["success"]["count"] == 1


@pytest.mark.slow
def test_a_stalled_reader_stops_only_its_own_request(server):
    """Backpressure in the worker holds thousands of responses back instead of buffering them; all arrive when they are read."""
    body = json.dumps({"COUNT": COUNT}).encode()
    executions = lambda: statistics(server, "fast")["execution_count"]
    with connect(server.http_port) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(post("/v2/models/fast/generate_stream", body))
        eventually("it executes", lambda: executions() > 0)
        # Responses are small, so that it takes many of them to fill the buffers of the connection.
        settled("the number of executions", executions, 0.1, deadline_s=300)
        assert executions() < COUNT
        with tritonclient.grpc.InferenceServerClient(server.grpc) as other:
            answers = queue.SimpleQueue()
            other.start_stream(callback=lambda result, error: answers.put((result, error)))
            other.async_stream_infer("fast", count_of(tritonclient.grpc, 3))
            assert [answers.get(timeout=DEADLINE_S)[0].as_numpy("DONE").item() for _ in range(3)] == [1, 2, 3]
            other.stop_stream()
        text, last, longest = bytearray(), f'"DONE":{COUNT},'.encode(), 1 << 16
        # Only the end is searched: all of it, after each piece, would take a minute.
        while last not in text[-longest - len(last) :]:
            piece = slow.recv(longest)
            assert piece, text[-200:]
            text += piece
    numbers = [int(number) for number in re.findall(rb'"DONE":(\d+)', text)]
    assert numbers == list(range(1, COUNT + 1))


def test_a_disconnect_ends_the_iteration(server):
    """The request counts as cancelled, and its slot is free."""
    cancelled = lambda: total(server.scrape(), "nv_inference_request_failure", model="stream", reason="CANCELED")
    before = cancelled()
    body = json.dumps({"COUNT": 100_000}).encode()
    with connect(server.http_port) as client:
        client.sendall(post("/v2/models/stream/generate_stream", body))
        assert b'"DONE":1' in client.recv(4096) + client.recv(4096)
    eventually("the request is cancelled", lambda: cancelled() - before == 1)
    active = lambda: total(server.scrape(), "pharos_sequences", model="stream", state="active")
    eventually("its slot is free", lambda: active() == 0)


def test_a_lost_request_can_be_sent_again(server):
    """The request is a separate sequence: the client gets no error about a sequence or an id."""
    outcomes = queue.SimpleQueue()

    def ask():
        with tritonclient.http.InferenceServerClient(server.http, network_timeout=DEADLINE_S) as client:
            try:
                outcomes.put(client.infer("direct", count_of(tritonclient.http, 300)))
            except InferenceServerException as error:
                outcomes.put((error.status(), error.message()))

    thread = threading.Thread(target=ask)
    before = statistics(server, "direct")["execution_count"]
    thread.start()
    eventually("it is executed", lambda: statistics(server, "direct")["execution_count"] > before + 3)
    for pid in server.workers():
        if b"\0direct_0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    join_all([thread])
    text = "the instance of model 'direct' that executed this request was lost; the request can be sent again"
    assert outcomes.get(timeout=1) == ("503", text)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        assert client.infer("direct", count_of(tritonclient.http, 3)).as_numpy("DONE").item() == 3


def test_only_iterative_sequences_can_be_rescheduled(server):
    """The text is Triton's."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        one = client.infer("plain", count_of(tritonclient.grpc, 1), sequence_id=1, sequence_start=True)
        assert one.as_numpy("DONE").item() == 1
        with pytest.raises(InferenceServerException, match="TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model"):
            client.infer("plain", count_of(tritonclient.grpc, 5), sequence_id=1, sequence_end=True)


def test_many_at_once(server):
    """Fifty clients, more than there are slots: each gets all its answers."""
    results, lock = {}, threading.Lock()

    def ask(number: int):
        with tritonclient.http.InferenceServerClient(server.http, network_timeout=DEADLINE_S) as client:
            done = client.infer("oldest", count_of(tritonclient.http, number % 7 + 1)).as_numpy("DONE").item()
        with lock:
            results[number] = done

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join_all([thread])
    assert results == {number: number % 7 + 1 for number in range(50)}
