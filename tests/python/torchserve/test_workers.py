"""Workers under TorchServe's endpoints: their effect on `/ping`, restarts, requests that wait for them, and the routing of
sequences.

Requires a Python with the package `pharos-worker`: `PHAROS_PYTHON`, or that of the tests."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from harness.processes import held
from harness.server import total
from harness.statistics import dispatched, until_dispatched, until_received
from harness.waiting import DEADLINE_S, eventually, holds_for, run_for
from torchserve.home import HOST, INFERENCE, MANAGEMENT, Home, body, call, fields, has_worker, message

pytestmark = pytest.mark.skipif(not has_worker, reason="there is no Python with the package pharos-worker: make python-worker")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with Home(tmp_path_factory.mktemp("home")) as server:
        yield server


def test_ping_reports_workers_that_are_not_restarted(tmp_path):
    server = Home(tmp_path, ["load_models=fails-1.0.mar"])
    server.archive("fails", yaml="maxRetryTimeoutInSec: 2\n")
    with server:
        assert server.ask("GET", "/ping")[0] == 200, "the worker is still restarted"
        eventually("the worker is not restarted any more", lambda: server.ask("GET", "/ping")[0] == 500)
        assert json.loads(server.ask("GET", "/ping")[2]) == {"status": "Unhealthy"}
        assert server.manage("GET", "/models")[1]["models"][0]["modelName"] == "fails"


def test_a_worker_is_given_up_after_consecutive_losses(tmp_path):
    """`maxRetryTimeoutInSec` counts from the first of consecutive losses and restarts when the worker was ready, however briefly;
    after it the worker stays down until the model is scaled."""
    ill = tmp_path / "ill"
    server = Home(tmp_path, ["load_models=mortal-1.0.mar"])
    server.archive("mortal", "mortal", f"ill: {ill}\nmaxRetryTimeoutInSec: 15\n")
    with server:
        answers = lambda: server.predict("mortal", b"x")[0] == 200
        eventually("mortal is ready", answers)
        server.predict("mortal", b"die")
        run_for("the worker is up for a short time between two losses", 0.3)
        eventually("mortal is ready again", answers)
        ill.touch()
        server.predict("mortal", b"die")
        holds_for("the server is healthy after the last loss", 8, lambda: server.ask("GET", "/ping")[0] == 200)
        eventually("the worker is down", lambda: server.ask("GET", "/ping")[0] == 500)
        eventually("the log has the end of restarts", lambda: "is not restarted any more" in (tmp_path / "out").read_text())
        losses = [line for line in (tmp_path / "out").read_text().splitlines() if "instance lost: " in line]
        assert ["it will be restarted" in line for line in losses] == [True] * (len(losses) - 1) + [False], losses[-1]
        status, answer = server.manage("PUT", "/models/mortal?min_worker=1&synchronous=true")
        assert status == 500 and "it is ill" in answer["message"], answer
        ill.unlink()
        assert server.manage("PUT", "/models/mortal?min_worker=1&synchronous=true")[0] == 200
        assert answers() and server.ask("GET", "/ping")[0] == 200


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("synchronous", ["true", "false"])
def test_ping_reports_workers_that_could_not_be_added(tmp_path, before, synchronous):
    """They are tried until `maxRetryTimeoutInSec`; the server is healthy until then. A later request tries again."""
    ill = tmp_path / "ill"
    with Home(tmp_path, ["default_response_timeout=30"]) as server:
        server.archive("mortal", "mortal", f"ill: {ill}\nmaxRetryTimeoutInSec: 2\n")
        server.register("mortal-1.0.mar", f"&initial_workers={before}")
        ill.touch()
        status, answer = server.manage("PUT", f"/models/mortal?min_worker=2&synchronous={synchronous}")
        assert status == (500 if synchronous == "true" else 202), answer
        eventually("the server is unhealthy", lambda: server.ask("GET", "/ping")[0] == 500)
        given_up = "giving up loading model mortal version 1.0"
        eventually("the log has the end of the attempts", lambda: given_up in (tmp_path / "out").read_text())
        ill.unlink()
        assert server.manage("PUT", "/models/mortal?min_worker=2&synchronous=true")[0] == 200
        assert server.ask("GET", "/ping")[0] == 200


def test_requests_have_a_total_timeout(home):
    """`clientTimeoutInMills` limits the whole time of a request, in the queue and in the worker."""
    home.archive("late", "mortal", f"ill: {home.folder / 'none'}\nclientTimeoutInMills: 4000\n")
    home.register("late-1.0.mar")
    assert home.predict("late", b"sleep 0.1") == (200, b"1")
    began = time.monotonic()
    status, answer = home.predict("late", b"sleep 6")
    assert time.monotonic() - began >= 4
    assert (status, json.loads(answer)["type"]) == (408, "RequestTimeoutException")
    assert json.loads(answer)["message"].endswith("clientTimeoutInMills allows: there was no answer within 4000 ms")
    eventually("the worker is free again", lambda: home.predict("late", b"x")[0] == 200)
    with pytest.raises(grpc.RpcError) as failed:
        call(home.grpc, INFERENCE + "Predictions", (1, "late"), body("sleep 6"))
    assert "there was no answer within 4000 ms" in failed.value.details()


def test_lines_of_workers_have_torchserves_names(home):
    """The thread name has the worker's name, as in the metrics, and the stream."""
    home.archive("prints", "mortal", f"ill: {home.folder / 'none'}\n")
    home.register("prints-1.0.mar")
    assert home.predict("prints", b"print")[0] == 200
    log = home.folder / "logs" / "model_log.log"
    for level, stream, text in (("INFO ", "stdout", "one"), ("WARN ", "stderr", "other")):
        line = re.compile(rf"(?m)^\S+ \[{level}\] W-9000-prints_1.0-{stream} MODEL_LOG - from the {text}$")
        eventually(line.pattern, lambda: line.search(log.read_text()))


def test_lines_in_json_have_the_names_of_loggers(tmp_path):
    """With JSON for both kinds of lines, each line of ts_log.log is an object with the logger that the text has."""
    server = Home(tmp_path)
    server.command += ["--log-format=json", "--tslog-format=json"]
    server.archive("prints", "mortal", f"ill: {tmp_path / 'none'}\n")
    log = tmp_path / "logs/ts_log.log"
    with server:
        server.register("prints-1.0.mar")
        assert server.predict("prints", b"print")[0] == 200

        def entries():
            found = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
            loggers = {entry.get("logger") or entry["Logger"] for entry in found}
            return found if {"TS_METRICS", "MODEL_METRICS", "ACCESS_LOG", "MODEL_LOG"} <= loggers else None

        eventually("a line of each logger", entries)
    found = [json.loads(line) for line in log.read_text().splitlines()]
    printed = {entry["thread"]: entry["message"] for entry in found if entry.get("message", "").startswith("from the ")}
    assert printed == {"W-9000-prints_1.0-stdout": "from the one", "W-9000-prints_1.0-stderr": "from the other"}


def test_keys_without_effect_are_reported(tmp_path):
    """Keys of model-config.yaml; merged keys are used."""
    server = Home(tmp_path)
    yaml = "all: &all {batchSize: 7}\n<<: *all\nparallelType: tp\nuseVenv: true\nsequenceTimeoutMSec: 5\nminworkers: 3\n"
    server.archive("odd", "mortal", yaml + f"ill: {tmp_path / 'none'}\n")
    with server:
        server.register("odd-1.0.mar")
        assert server.manage("GET", "/models/odd")[1][0]["batchSize"] == 7
        out = (tmp_path / "out").read_text()
        assert "model-config.yaml: unknown key minworkers; did you mean minWorkers?" in out
        for key in ('parallelType is "tp"', "useVenv is true", "sequenceTimeoutMSec is 5"):
            assert f"model-config.yaml: {key}, which has no effect: " in out, key


@pytest.fixture
def counted(tmp_path):
    """A server whose metrics can be scraped."""
    with Home(tmp_path, ["metrics_mode=prometheus"]) as running:
        yield running


def test_a_model_may_take_requests_only_while_a_worker_is_idle(counted):
    home = counted
    home.archive("ticket", yaml="useJobTicket: true\n")
    home.register("ticket-1.0.mar")
    with ThreadPoolExecutor(1) as pool:
        with held(home, "ticket"):
            first = pool.submit(home.predict, "ticket", b"pid")
            until_dispatched(home, "ticket", 1)
            assert [home.predict("ticket", b"pid")[0] for _ in range(2)] == [503, 503]
        assert first.result()[0] == 200
    assert home.predict("ticket", b"pid")[0] == 200


def test_requests_of_a_sequence_go_to_one_worker(home):
    home.archive("sequence", yaml="sequenceBatching: true\nmaxNumSequence: 4\nminWorkers: 2\nsequenceMaxIdleMSec: 60000\n")
    home.register("sequence-1.0.mar", "&initial_workers=2")
    name = "ts_request_sequence_id"
    ask = lambda headers: home.ask("POST", "/predictions/sequence", b"pid", headers)[::2]
    answers = {ask({name: "a", "ts_request_sequence_start": "true"})} | {ask({name: "a"}) for _ in range(5)}
    assert len(answers) == 1 and next(iter(answers))[0] == 200, answers
    assert home.ask("POST", "/predictions/sequence", b"pid")[0] == 200, "another sequence"
    requests = [message((1, "sequence"), body("pid"), (4, "b")) for _ in range(3)]
    channel = grpc.insecure_channel(f"{HOST}:{home.grpc}")
    found = [fields(part) for part in channel.stream_stream(INFERENCE + "StreamPredictions2")(iter(requests), timeout=DEADLINE_S)]
    assert len({part[1][0] for part in found}) == 1
    assert [part[2] for part in found] == [[b"b"]] * 3
    assert home.manage("DELETE", "/models/sequence")[0] == 200


def test_sequences_of_one_stream_are_executed_together(home):
    """Requests of one sequence are executed one after the other, those of several in one batch; errors are answers."""
    yaml = "sequenceBatching: true\nmaxNumSequence: 4\nbatchSize: 4\nmaxBatchDelay: 200\nsequenceMaxIdleMSec: 60000\n"
    home.archive("together", "mortal", yaml + f"ill: {home.folder / 'none'}\n")
    home.register("together-1.0.mar")
    request = lambda sequence, model="together": message((1, model), body("x"), *([(4, sequence)] if sequence else []))
    requests = [request("a"), request("b"), request("a"), request(""), request("c", "nothing"), request("b")]
    channel = grpc.insecure_channel(f"{HOST}:{home.grpc}")
    parts = channel.stream_stream(INFERENCE + "StreamPredictions2")(iter(requests), timeout=DEADLINE_S)
    found = [fields(part) for part in parts]
    answers = [(part[2][0], part[1][0]) for part in found if 1 in part]
    assert sorted(answers) == [(b"a", b"2"), (b"a", b"2"), (b"b", b"2"), (b"b", b"2")], found
    errors = {part.get(2, [b""])[0]: fields(part[3][0]) for part in found if 3 in part}
    assert errors[b""] == {1: [13], 2: [b"Parameter sequenceId is required.\nBadRequestException.()"]}
    assert errors[b"c"] == {1: [13], 2: [b"Model not found: nothing"]}


def test_the_sequence_of_a_disconnected_client_continues(counted):
    """Its waiting request is not executed; later requests are."""
    home = counted
    yaml = "sequenceBatching: true\nmaxSequenceJobQueueSize: 9\nsequenceMaxIdleMSec: 60000\n"
    home.archive("goes-on", "mortal", yaml + f"ill: {home.folder / 'none'}\n")
    home.register("goes-on-1.0.mar")
    answers, name = [], "ts_request_sequence_id"
    ask = lambda: answers.append(home.predict("goes-on", b"x", {name: "a"}))
    cancelled = lambda: total(home.scrape(), "pharos_request_failures_total", route="predict", reason="CANCELLED")
    clients, before = [threading.Thread(target=ask)], cancelled()
    with held(home, "goes-on"):
        clients[0].start()
        until_received(home, "goes-on", 1)
        leaves = socket.create_connection((HOST, home.inference))
        leaves.sendall(f"POST /predictions/goes-on HTTP/1.1\r\nHost: a\r\n{name}: a\r\nContent-Length: 1\r\n\r\nx".encode())
        until_received(home, "goes-on", 2)
        for count in (3, 4):
            clients.append(threading.Thread(target=ask))
            clients[-1].start()
            until_received(home, "goes-on", count)
        leaves.close()
        eventually("the server knows that the client has left", lambda: cancelled() == before + 1)
    [client.join() for client in clients]
    assert answers == [(200, b"1")] * 3, answers
    assert dispatched(home, "goes-on") == 3, "one for each remaining client"


def test_everything_is_in_the_servers_log(home):
    """Log categories are cumulative, as in TorchServe: requests, output of workers, and metrics, in the console's layout."""
    home.archive("logs", "mortal", f"ill: {home.folder / 'none'}\n")
    home.register("logs-1.0.mar")
    assert home.predict("logs", b"print")[0] == 200
    for pattern in (
        r'ACCESS_LOG - /127\.0\.0\.1:\d+ "POST /predictions/logs HTTP/1\.1" 200 \d+',
        r"W-9000-logs_1\.0-stdout MODEL_LOG - from the one",
        r"TS_METRICS - Requests2XX\.Count:1\.0\|#Level:Host\|#hostname:[^,]+,timestamp:\d+",
        r"MODEL_METRICS - PredictionTime\.ms:[0-9.E-]+\|#ModelName:logs,Level:Model\|#hostname:\S+",
    ):
        line = re.compile(rf"(?m)^\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{{3}} \[INFO \] (\S+ )?{pattern}$")
        for log in (home.folder / "logs" / "ts_log.log", home.folder / "out"):
            eventually(f"{line.pattern} in {log.name}", lambda: line.search(log.read_text()))


def services(port):
    """Returns the names of the services that reflection lists."""
    channel = grpc.insecure_channel(f"{HOST}:{port}")
    ask = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    answer = fields(next(ask(iter([message((7, ""))]), timeout=DEADLINE_S)))
    return {fields(service)[1][0].decode() for service in fields(answer[6][0])[1]}


def test_reflection_shows_what_a_port_serves(home):
    own = {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
    service = lambda method: method.strip("/")
    v2 = {"inference.GRPCInferenceService", "grpc.health.v1.Health", "xds.service.orca.v3.OpenRcaService"}
    assert services(home.grpc) == own | v2 | {service(INFERENCE)}
    assert services(home.grpc_management) == own | {service(MANAGEMENT)}
