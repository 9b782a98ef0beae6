"""Models with `sequenceBatching` and `continuousBatching`: a request of a sequence enters the batch while the answer before it is
streamed, so that a handler can cancel that answer. Clients get the answers of a real TorchServe, if installed.

Requires a Python with the package `pharos-worker`: `PHAROS_PYTHON`, or that of the tests."""

import contextlib
import http.client
import socket
import threading
import time

import grpc
import pytest

from harness.statistics import dispatched, received, until_dispatched, until_received
from harness.waiting import DEADLINE_S, eventually, join_all, pause_as_client, settled
from torchserve import models, peer as torchserve_peer
from torchserve.home import HOST, INFERENCE, Home, body, fields, has_worker, message

LIMITS = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 8\nmaxNumSequence: 64\nmaxSequenceJobQueueSize: 8\nsequenceMaxIdleMSec: 60000\n"
"""No sequence ends by itself on a slow machine, and there is room for those of all tests."""
TALKS = f"{LIMITS}sequenceBatching: true\ncontinuousBatching: true\n"
NAME = "ts_request_sequence_id"
LONG = 200


class Ours:
    """`pharos torchserve`."""

    name = "pharos"

    def __init__(self, folder, yaml=TALKS):
        self.home = Home(folder, ["metrics_mode=prometheus"])
        self.home.archive("talks", "talks", yaml)

    def __enter__(self):
        self.home.__enter__()
        self.home.register("talks-1.0.mar")
        self.inference, self.grpc = self.home.inference, self.home.grpc
        return self

    def __exit__(self, *why):
        self.home.__exit__(*why)

    def received(self):
        """Returns how many requests it has received."""
        return received(self.home, "talks")

    def until_received(self, count):
        """Waits until it has received so many requests."""
        until_received(self.home, "talks", count)


class Real:
    """A real TorchServe."""

    name = "torchserve"

    def __init__(self, folder):
        store = folder / "store"
        models.write(folder / "made", "talks", models.contents("talks", TALKS))
        store.mkdir()
        (folder / "made" / "talks.mar").rename(store / "talks.mar")
        options = ("--models", "talks=talks.mar", "--ncs", "--disable-token-auth", "--enable-model-api")
        self.server = torchserve_peer.torchserve(folder / "run", store, "", options)

    def __enter__(self):
        self.server.__enter__()
        self.inference, self.grpc = self.server.ports["inference"], self.server.ports["grpc_inference"]
        return self

    def __exit__(self, *why):
        self.server.__exit__(*why)

    def received(self):
        """Returns 0, because TorchServe counts requests when they end."""
        return 0

    def until_received(self, _):
        """Gives it time to receive a request."""
        pause_as_client(0.2)


@pytest.fixture(scope="module", params=[Ours, Real], ids=lambda kind: kind.name)
def server(request, tmp_path_factory):
    """Each of the servers; the real one if installed."""
    if request.param is Ours and not has_worker:
        pytest.skip("there is no Python with the package pharos-worker: make python-worker")
    if request.param is Real and torchserve_peer.missing():
        pytest.skip(torchserve_peer.missing())
    with request.param(tmp_path_factory.mktemp(request.param.name)) as running:
        eventually("the model is ready", lambda: Talk(running, "first", "ask").status == 200)
        yield running


class Talk:
    """A request whose answer is read part by part in a thread."""

    def __init__(self, server, sequence, text, wait=True):
        self.connection = http.client.HTTPConnection(HOST, server.inference, timeout=DEADLINE_S)
        headers = {NAME: sequence, "x-mine": "mine"}
        self.connection.request("POST", "/predictions/talks", text.encode(), headers)
        self.parts, self.status, self.headers, self.error, self.ended = [], None, {}, None, None
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        if wait and not text.startswith("stream"):
            self.join()

    def read(self):
        try:
            answer = self.connection.getresponse()
            self.status = answer.status
            self.headers = {name.lower(): value for name, value in answer.getheaders()}
            while part := answer.read1():
                self.parts.extend(text for text in part.decode().split(";") if text)
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        self.ended = time.monotonic()
        self.connection.close()

    def begun(self, parts=3):
        """Waits until this many parts have arrived."""
        eventually(f"{parts} parts have arrived", lambda: len(self.parts) >= parts)
        return self

    def join(self):
        join_all([self.reader])
        assert not self.reader.is_alive()
        return self

    def disconnect(self):
        """Closes the connection."""
        with contextlib.suppress(OSError):
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.join()


def test_a_second_request_cancels_the_stream_of_its_sequence(server):
    stream = Talk(server, "cancel", f"stream {LONG}").begun()
    assert stream.headers[NAME] == "cancel" and stream.headers.get("transfer-encoding") == "chunked"
    cancel = Talk(server, "cancel", "-1")
    assert (cancel.status, cancel.parts) == (200, ["cancels 1"])
    stream.join()
    assert stream.error is None and stream.status == 200
    assert stream.parts[-1] == "cancelled" and len(stream.parts) < LONG / 2
    assert [part.split()[0] for part in stream.parts[:-1]] == [str(at) for at in range(1, len(stream.parts))]
    # The worker and the sequence continue.
    assert Talk(server, "cancel", "ask").parts == ["ask beside 0"]


def test_a_repeated_request_keeps_its_headers_and_its_place(server):
    stream = Talk(server, "order", f"stream {LONG}").begun()
    assert Talk(server, "order", "ask").parts == ["ask beside 1"]
    Talk(server, "order", "-1")
    stream.join()
    assert all(part.split()[1] == "mine" for part in stream.parts[:-1])
    assert [part.split()[2] for part in stream.parts[:-1]].count("sx") == 1, "executed once with the other request, and before it"


def test_cancelling_a_sequence_that_does_not_stream_changes_nothing(server):
    assert Talk(server, "silent", "-1").parts == ["cancels 0"], "the request begins a sequence"
    assert Talk(server, "silent", "ask").parts == ["ask beside 0"]
    assert Talk(server, "silent", "-1").parts == ["cancels 0"]
    assert Talk(server, "silent", "stream 2").join().parts == ["1 mine s", "2 mine s"]


def test_several_requests_keep_their_order(server):
    stream = Talk(server, "several", f"stream {LONG}").begun()
    second = Talk(server, "several", f"stream {LONG}").begun()
    requests = server.received()
    asks = Talk(server, "several", "ask", wait=False)
    server.until_received(requests + 1)
    cancels = [Talk(server, "several", "-1", wait=False), Talk(server, "several", "-1", wait=False)]
    ended = [request.join() for request in [stream, second, asks, *cancels]]
    assert asks.parts[0].startswith("ask beside ") and asks.parts != ["ask beside 0"]
    assert sorted(cancel.parts[0] for cancel in cancels) == ["cancels 0", "cancels 2"], "one cancels both streams"
    assert [request.parts[-1] for request in (stream, second)] == ["cancelled"] * 2
    assert all(request.status == 200 and request.error is None for request in ended)


def test_other_sequences_are_answered_meanwhile(server):
    stream = Talk(server, "busy", f"stream {LONG}").begun()
    assert Talk(server, "first", "ask").parts == ["ask beside 1"]
    assert Talk(server, "first", "-1").parts == ["cancels 0"], "only streams of its sequence are cancelled"
    stream.begun(len(stream.parts) + 2)
    Talk(server, "busy", "-1")
    assert stream.join().parts[-1] == "cancelled"


def test_both_requests_on_one_grpc_stream(server):
    if isinstance(server, Real):
        pytest.skip("TorchServe 0.12.0 ends this call after the first part")
    asked = threading.Event()

    def requests():
        yield message((1, "talks"), body(f"stream {LONG}"), (4, "grpc"))
        asked.wait(DEADLINE_S)
        yield message((1, "talks"), body("-1"), (4, "grpc"))

    answers = []
    with grpc.insecure_channel(f"{HOST}:{server.grpc}") as channel:
        for part in channel.stream_stream(INFERENCE + "StreamPredictions2")(requests(), timeout=DEADLINE_S):
            answers.append(fields(part))
            if len(answers) == 3:
                asked.set()
    bodies = [part[1][0] for part in answers]
    assert all(part.get(2) == [b"grpc"] for part in answers), answers
    assert bodies.count(b"cancels 1") == 1 and bodies.count(b"cancelled;") == 1 and len(bodies) < LONG / 2, bodies


@pytest.fixture
def ours(tmp_path):
    """A separate server: two workers, at most two sequences, one waiting request for each."""
    if not has_worker:
        pytest.skip("there is no Python with the package pharos-worker: make python-worker")
    limits = "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 1\nmaxNumSequence: 1\nmaxSequenceJobQueueSize: 1\n"
    yaml = f"{limits}sequenceMaxIdleMSec: 5000\nsequenceBatching: true\ncontinuousBatching: true\n"
    with Ours(tmp_path, yaml) as server:
        yield server


def test_limits_hold_while_a_request_is_streamed(ours):
    """Sequences of each worker, waiting requests of a sequence, and twice `batchSize` requests in a batch."""
    streams = [Talk(ours, name, f"stream {LONG}").begun() for name in ("a", "b")]
    assert Talk(ours, "c", "ask").status == 503, "both workers have a sequence"
    second = Talk(ours, "a", f"stream {LONG}").begun()
    assert Talk(ours, "b", "ask").parts == ["ask beside 1"], "the request runs on the worker of its sequence"
    third = Talk(ours, "a", f"stream {LONG}").begun()
    assert {part.split()[2] for part in third.parts + second.parts[-3:]} <= {"s", "ss"}, "a batch has at most two"
    requests = ours.received()
    slow = Talk(ours, "a", "sleep 4", wait=False)
    # The worker of "a" has one thread: while it sleeps, its streams pause.
    settled("the streams of the sleeping worker", lambda: sum(len(s.parts) for s in (streams[0], second, third)), 0.3)
    waits = Talk(ours, "a", "-1", wait=False)
    ours.until_received(requests + 2)
    assert Talk(ours, "a", "ask").status == 503, "one request waits already"
    assert slow.join().status == 200 and waits.join().parts == ["cancels 3"]
    assert all(stream.join().parts[-1] == "cancelled" for stream in (streams[0], second, third))
    assert not streams[1].ended, "the stream of the other worker continues"
    assert Talk(ours, "b", "-1").parts == ["cancels 1"]
    eventually("the idle timeout ends the sequences", lambda: Talk(ours, "c", "ask").status == 200)


def test_a_disconnected_client_does_not_affect_its_sequence(ours):
    batches = dispatched(ours.home, "talks")
    first = Talk(ours, "a", "sleep 1", wait=False)
    until_dispatched(ours.home, "talks", batches + 1)
    second = Talk(ours, "a", "ask", wait=False)
    first.disconnect()
    assert second.join().parts == ["ask beside 0"]
    stream = Talk(ours, "a", f"stream {LONG}").begun()
    stream.disconnect()
    eventually("its request has ended", lambda: Talk(ours, "a", "ask").parts == ["ask beside 0"])


def test_a_lost_worker_ends_only_its_stream(ours):
    other = Talk(ours, "b", "ask")
    stream = Talk(ours, "a", f"stream {LONG}").begun()
    other = Talk(ours, "b", f"stream {LONG}").begun()
    dies = Talk(ours, "a", "die")
    stream.join()
    assert dies.status == 500 and stream.parts[-1] != "cancelled" and len(stream.parts) < LONG / 2
    assert stream.error is not None, "the answer is cut off, not ended"
    assert Talk(ours, "b", "-1").parts == ["cancels 1"] and other.join().parts[-1] == "cancelled"
    eventually("the sequence begins on a worker", lambda: Talk(ours, "a", "ask").status == 200)


def test_the_handler_ends_sequences_by_a_header(ours):
    """Their places are free when the batch of the request ends, which is after its answer; `maxNumSequence` counts only running
    sequences."""
    free = lambda sequence, text: eventually("a place is free", lambda: Talk(ours, sequence, text).status == 200)  # noqa: E731
    assert Talk(ours, "a", "ask").status == Talk(ours, "b", "ask").status == 200
    for number in range(6):
        assert Talk(ours, f"c{number}", "ask").status == 503
        assert Talk(ours, "a", "end").headers["ts_request_sequence_end"] == "other; a"
        free(f"c{number}", "end")
        free("a", "ask")
    stream = Talk(ours, "b", f"stream {LONG}").begun()
    assert Talk(ours, "b", "end").status == 200
    assert Talk(ours, "d", "ask").status == 503, "the sequence still streams"
    stream.disconnect()
    eventually("the stream has ended", lambda: Talk(ours, "d", "ask").status == 200)


def test_both_requests_are_counted(ours):
    count = lambda: ours.home.ask("GET", "/metrics", port=ours.home.metrics)[2].decode().splitlines()
    find = lambda name: sum(float(line.split()[-1]) for line in count() if line.startswith(f"{name}{{"))
    before = find("ts_inference_requests_total")
    stream = Talk(ours, "a", f"stream {LONG}").begun()
    assert Talk(ours, "a", "-1").parts == ["cancels 1"]
    stream.join()
    eventually("both requests are counted", lambda: find("ts_inference_requests_total") == before + 2)
