"""Processes that start, die and stop: workers killed under load, the server killed and drained, models that fail."""

import concurrent.futures
import os
import re
import signal
import threading

import pytest

from harness import onnx_file
from harness.inference import one
from harness.models import IO, write
from harness.onnx_file import node
from harness.processes import held
from harness.server import BROKEN, alive, children, total
from harness.statistics import until_received
from harness.waiting import DEADLINE_S, eventually, join_all

TWO = "delay_20_two_instances"
REQUEST = one("FP32", [1], [1])


class Load:
    """Clients that send requests continuously until stopped, and record every answer."""

    def __init__(self, server, model: str, request: dict, clients: int):
        self.server, self.model, self.request = server, model, request
        self.answers, self.lost = [], []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(clients)]

    def run(self):
        """Runs one client."""
        while not self.stop.is_set():
            try:
                self.answers.append(self.server.infer(self.model, self.request))
            except (OSError, ValueError) as error:
                self.lost.append(error)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self.stop.set()
        join_all(self.threads)

    def done(self, count: int) -> bool:
        """Returns whether this many answers have arrived."""
        return len(self.answers) >= count


def falling(earlier: dict, later: dict) -> list:
    """Returns the counters that are lower later, or missing."""

    def is_counter(name: str) -> bool:
        gauge = name.endswith(("pending_request_count", "_secs", "_bytes", "_utilization", "_usage"))
        return (name.startswith("nv_inference") or name.endswith("_total")) and not gauge

    return [key for key, value in earlier.items() if is_counter(key[0]) and later.get(key, -1) < value]


def test_workers_killed_under_load(start):
    """Each worker is killed with SIGKILL in turn, three times: every request is answered, nearly all successfully (a request in
    flight is retried on the other worker); the instance recovers; counters never fall; statistics are exact."""
    server = start([TWO])
    assert len(server.workers()) == 2, "one process for each instance"
    scrapes = []
    with Load(server, TWO, REQUEST, 8) as load:
        for _ in range(3):
            goal = len(load.answers) + 30
            eventually("the load runs", lambda: load.done(goal))
            scrapes.append(server.scrape())
            victim = min(server.workers())
            os.kill(victim, signal.SIGKILL)
            eventually("the killed worker is gone", lambda: not alive(victim))
            eventually("there are two workers again", lambda: len(server.workers()) == 2)
            scrapes.append(server.scrape())
        eventually("the server is ready", lambda: server.get("/v2/health/ready")[0] == 200)
    scrapes.append(server.scrape())
    assert load.lost == [], "every request must be answered"
    statuses = [status for status, _ in load.answers]
    assert set(statuses) <= {200, 503}
    assert statuses.count(503) <= 6, [answer for status, answer in load.answers if status == 503]
    for earlier, later in zip(scrapes, scrapes[1:]):
        assert falling(earlier, later) == []
    statistics = server.statistics(TWO)
    assert statistics["inference_stats"]["success"]["count"] == statuses.count(200)
    assert total(scrapes[-1], "nv_inference_request_success", model=TWO) == statuses.count(200)
    server.stop()


@pytest.mark.smoke
def test_the_only_worker_killed(start):
    """With one instance requests wait for its restart or fail with 503; then the server recovers."""
    server = start(["identity_fp32_nobatch"])
    victim = min(server.workers())
    with Load(server, "identity_fp32_nobatch", REQUEST, 4) as load:
        eventually("the load runs", lambda: load.done(50))
        os.kill(victim, signal.SIGKILL)
        eventually("another worker runs", lambda: server.workers() - {victim})
        eventually("requests succeed again", lambda: server.infer("identity_fp32_nobatch", REQUEST)[0] == 200)
    assert load.lost == []
    assert {status for status, _ in load.answers} <= {200, 503}
    assert eventually("the server is ready", lambda: server.get("/v2/health/ready")[0] == 200)
    server.stop()


def kill_the_worker(server):
    """Kills the only worker and waits until it is gone."""
    (victim,) = server.workers()
    os.kill(victim, signal.SIGKILL)
    eventually("the worker is gone", lambda: not alive(victim))


def test_requests_wait_for_an_instance_that_is_killed_again_and_again(start):
    """Each loss makes the restart delay longer; a request that arrives during the delay is answered after it."""
    server = start(["identity_fp32_nobatch"])
    for _ in range(5):
        kill_the_worker(server)
        assert server.infer("identity_fp32_nobatch", REQUEST)[0] == 200
    assert total(server.scrape(), "pharos_instance_restarts_total") == 5
    server.stop()


def test_requests_wait_for_a_limited_time(start):
    """If the delay is longer than a request may wait, the request is refused; then the server recovers."""
    server = start(["identity_fp32_nobatch"], "--worker-max-wait-secs=1")
    for losses in range(6):
        back = lambda: total(server.scrape(), "pharos_instance_restarts_total") == losses  # noqa: B023, E731
        eventually("the instance is back", back)
        kill_the_worker(server)
    status, answer = server.infer("identity_fp32_nobatch", REQUEST)
    assert status == 503 and "--worker-max-wait-secs" in answer["error"], answer
    eventually("the server is ready", lambda: server.get("/v2/health/ready")[0] == 200)
    assert server.infer("identity_fp32_nobatch", REQUEST)[0] == 200
    server.stop()


def test_requests_do_not_wait_for_an_instance_that_does_not_start(start, tmp_path):
    """Two starts after a loss fail: requests are refused until the worker can start again."""
    tensor = "data_type: TYPE_FP32 dims: [ -1 ]"
    config = f'backend: "onnxruntime" input [ {{ name: "INPUT0" {tensor} }} ] output [ {{ name: "OUTPUT0" {tensor} }} ]'
    graph = onnx_file.model([node("Identity", ["INPUT0"], ["OUTPUT0"])], [("INPUT0", "FP32", ["N"])], [("OUTPUT0", "FP32", ["N"])])
    folder = write(tmp_path / "models", "m", config, graph)
    server = start([], "--worker-max-backoff-secs=1", repository=folder)
    request = one("FP32", [2], [1, 2])
    assert server.infer("m", request)[0] == 200
    (folder / "m/1/model.onnx").rename(tmp_path / "aside")
    kill_the_worker(server)
    eventually("requests are refused", lambda: "not at ready state" in str(server.infer("m", request)))
    assert server.infer("m", request)[0] == 503
    outage = re.compile(r"0 of 1 instances run; last failure: .*model\.onnx.*; (next start (in \d\.\d s|after the end of the lost process)|starting now)")
    assert outage.fullmatch(server.index()["m"][0]["reason"]), server.index()
    assert server.index()["m"][0]["state"] == "READY", "requests may wait for it"
    status, text = server.get("/v2/models/m/ready")
    assert status == 400 and outage.search(text), text
    (tmp_path / "aside").rename(folder / "m/1/model.onnx")
    eventually("the model serves again", lambda: server.infer("m", request)[0] == 200)
    assert "reason" not in server.index()["m"][0]
    server.stop()


def test_request_that_crashes_the_model(start):
    """A request that crashes every worker is answered with 503 and a reason; the model then serves others."""
    server = start(["crash", "identity_fp32"])
    assert server.infer("crash", one("UINT8", [2], [0, 7]))[0] == 200
    status, answer = server.infer("crash", one("UINT8", [2], [1, 7]))
    assert status == 503, answer
    assert answer["error"]
    assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200, "another model must not be affected"
    again = eventually("the model serves again", lambda: server.infer("crash", one("UINT8", [2], [0, 7]))[0] == 200)
    assert again
    server.stop()


def test_model_that_hangs(start):
    """An execution beyond `--worker-execution-timeout-secs` is aborted with an error, and a new worker starts."""
    server = start(["hang"], "--worker-execution-timeout-secs=1")
    status, answer = server.infer("hang", one("UINT8", [1], [1]))
    assert status == 503, answer
    eventually("the model serves again", lambda: server.infer("hang", one("UINT8", [1], [0]))[0] == 200)
    server.stop()


def test_exit_does_not_wait_forever(start):
    """The server waits for a hanging batch no longer than --exit-timeout-secs: its request gets an error, and the exit code is
    1."""
    server = start(["hang"], "--exit-timeout-secs=1")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.infer, "hang", one("UINT8", [1], [1]))
        eventually("the request is accepted", lambda: total(server.scrape(), "ts_inference_requests_total") >= 1)
        server.process.send_signal(signal.SIGTERM)
        status, answer = future.result()
    assert status == 503, answer
    assert answer["error"].startswith("Server exiting: the request was not finished within the time"), answer
    assert server.process.wait(DEADLINE_S) == 1
    assert "Exit timeout expired" in server.log_tail()


def test_a_panicking_backend_affects_only_its_instance(start):
    """The request gets the panic's text, the log has the worker's output under its name, and the instance is restarted."""
    server = start(["panic"])
    server.may_panic = True
    before = server.workers()
    status, answer = server.infer("panic", one("UINT8", [1], [1]))
    assert (status, answer["error"]) == (500, "the backend panicked: requested panic")
    eventually("the model serves again", lambda: server.infer("panic", one("UINT8", [1], [0]))[0] == 200)
    assert server.workers() != before
    lines = [line for line in server.log_tail().splitlines() if "requested panic" in line]
    assert lines and "panic_0" in lines[0], server.log_tail()


@pytest.mark.smoke
def test_sigterm_drains(start):
    """SIGTERM: accepted requests are answered, new connections are refused or get 503, the exit code is 0, and no worker is
    left."""
    server = start(["delay_200"])
    workers = server.workers()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with held(server, "delay_200"):
            futures = [pool.submit(server.infer, "delay_200", one("FP32", [1, 1], [n])) for n in range(8)]
            until_received(server, "delay_200", 8)
            server.process.send_signal(signal.SIGTERM)
            eventually("the server exits", lambda: "exiting: waiting" in server.log_tail())
        answers = [future.result() for future in futures]
    for n, (status, answer) in enumerate(answers):
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == [n]
    assert server.process.wait(DEADLINE_S) == 0, server.log_tail()
    eventually("the workers are gone", lambda: not any(alive(pid) for pid in workers))
    with pytest.raises(OSError):
        server.get("/v2/health/live")


def test_ctrl_c_in_a_terminal_drains(start):
    """A terminal sends SIGINT to its whole foreground group. The workers are not part of it: accepted requests are answered."""
    server = start(["delay_200"])
    group = os.getpgid(server.process.pid)
    assert group not in [os.getpgid(pid) for pid in server.workers()]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with held(server, "delay_200"):
            future = pool.submit(server.infer, "delay_200", one("FP32", [1, 1], [7]))
            until_received(server, "delay_200", 1)
            server.process.send_signal(signal.SIGINT)
            eventually("the server exits", lambda: "exiting: waiting" in server.log_tail())
        status, answer = future.result()
    assert (status, answer["outputs"][0]["data"]) == (200, [7])
    assert server.process.wait(DEADLINE_S) == 0, server.log_tail()
    assert "lost" not in server.log_tail()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_stops_when_idle(start, sign):
    """An idle server exits at once."""
    server = start([TWO])
    workers = server.workers()
    server.process.send_signal(sign)
    assert server.process.wait(DEADLINE_S) == 0, server.log_tail()
    eventually("the workers are gone", lambda: not any(alive(pid) for pid in workers))


def test_sigkill_leaves_no_worker(start):
    """When the server is killed its workers exit by themselves, busy or not."""
    server = start([TWO, "delay_200"])
    workers = server.workers()
    assert len(workers) == 3
    with Load(server, "delay_200", one("FP32", [1, 1], [1]), 4) as load:
        eventually("the load runs", lambda: load.done(4))
        server.kill()
        load.stop.set()
    eventually("the workers are gone", lambda: not any(alive(pid) for pid in workers))


def test_workers_are_children_of_the_server(start):
    """There is exactly one process per instance, as a child, so that a supervisor of the server sees them all. Python workers are
    children of a fork server, see `test_fork_server.py`."""
    server = start([TWO, "identity_fp32", "versions_all"])
    assert len(server.workers()) == 2 + 1 + 3
    assert all(children(pid) == [] for pid in server.workers())
    server.stop()


BROKEN_MODELS = {
    "unknown_function": ["no_such_function", "identity"],
    "unknown_backend": ["no_such_backend"],
    "unknown_field": ["config.pbtxt:2:", "max_batch_sizes", "max_batch_size"],
    "bad_syntax": ["config.pbtxt:2:"],
    "bad_datatype": ["config.pbtxt:", "TYPE_FP31", "TYPE_FP32"],
    "no_version": ["version"],
    "wrong_name": ["another", "wrong_name"],
    "not_onnx": [],
}
"""Each model that cannot be loaded, and the parts of its reason."""


def test_models_that_do_not_load_do_not_affect_others(start):
    """With `--exit-on-error=false` the valid model serves, the server is live but not ready, and each of the others is listed
    with the reason, which has the problem and the allowed values."""
    server = start([], "--exit-on-error=false", repository=BROKEN, wait=False)
    server.wait_until_ready("/v2/models/good/ready")
    eventually("all models were tried", lambda: "LOADING" not in str(server.index()))
    assert server.infer("good", one("FP32", [1, 1], [1]))[0] == 200
    assert server.get("/v2/health/live")[0] == 200
    assert server.get("/v2/health/ready")[0] == 400
    index = server.index()
    assert index["good"][0]["state"] == "READY"
    for model, words in BROKEN_MODELS.items():
        failed = [entry for entry in index[model] if entry.get("state") == "UNAVAILABLE"]
        assert failed, f"{model}: {index[model]}"
        assert failed[0]["reason"], model
        missing = [word for word in words if word not in failed[0]["reason"]]
        assert missing == [], f"{model}: {failed[0]['reason']}"
        status, answer = server.infer(model, one("FP32", [1, 1], [1]))
        assert status == 404 and "Request for unknown model" in answer["error"], answer
    # A missing version is a warning, as in Triton.
    assert [(entry["version"], entry["state"]) for entry in index["some_versions"]] == [("1", "READY")]
    assert "version 7 is specified in 'version_policy'" in server.log.read_text()
    eventually("the start is logged", lambda: "serving, not ready: not all models are ready" in server.log.read_text())
    assert not IS_READY.search(server.log.read_text())
    server.stop()


NAMELESS = 'backend: "builtin"\nparameters { key: "function" value { string_value: "identity" } }' + IO
"""The configuration of a model whose name is that of its directory."""
IS_READY = re.compile(r" INFO ready$", re.M)
"""The line of the log that reports a server that is ready."""


def test_loose_readiness(start):
    """`--strict-readiness=false`: the server is ready although a model is not."""
    server = start([], "--exit-on-error=false", "--strict-readiness=false", repository=BROKEN, wait=False)
    server.wait_until_ready()
    eventually("the start is logged", lambda: IS_READY.search(server.log.read_text()))
    server.stop()


@pytest.mark.parametrize("namespaces", [False, True], ids=["one namespace", "namespaces"])
@pytest.mark.parametrize("name", ["a\\b", "a\nb", "  "])
def test_a_directory_whose_name_no_model_may_have(start, tmp_path, name, namespaces):
    """Its reason is the name and what is allowed, not that the repository lacks it."""
    for model in ("good", name):
        write(tmp_path / "models", model, NAMELESS)
    options = ["--exit-on-error=false", *(["--model-namespacing=true"] if namespaces else [])]
    server = start([], *options, repository=tmp_path / "models", wait=False)
    server.wait_until_ready("/v2/models/good/ready")
    entries = eventually("the model was tried", lambda: [e for e in server.index().get(name, []) if e.get("reason")])
    reason = entries[0]["reason"]
    assert "odel name" in reason and reason.endswith(f": rename its directory in '{tmp_path / 'models'}'"), reason
    assert "is not in" not in reason


def test_exit_on_error_is_the_default(start):
    """A model that does not load makes the server exit, with an exit code and the reason in the log."""
    server = start([], repository=BROKEN, wait=False)
    assert server.process.wait(DEADLINE_S) != 0
    assert "no_such_backend" in server.log_tail()


@pytest.mark.smoke
@pytest.mark.parametrize("option, words", [
    ("--http-port=x", ["http-port", "x"]),
    ("--no-such-option", ["no-such-option"]),
    ("--exit-on-error=maybe", ["exit-on-error", "maybe"]),
    ("--model-repository=/no/such/folder", ["/no/such/folder"]),
])  # fmt: skip
def test_bad_options(start, option, words):
    """An invalid option makes the start fail with an error that has the option and the value."""
    server = start(["identity_fp32"], option, wait=False)
    assert server.process.wait(DEADLINE_S) != 0
    assert [word for word in words if word not in server.log_tail()] == []


def test_port_in_use(start):
    """A port in use makes the start fail with an error that has the port."""
    first = start(["identity_fp32"])
    second = start(["identity_fp32"], wait=False)
    second.kill()
    second.command = [word.replace(str(second.http_port), str(first.http_port)) for word in second.command]
    second.launch()
    assert second.process.wait(DEADLINE_S) != 0
    assert str(first.http_port) in second.log_tail()
    assert first.get("/v2/health/live")[0] == 200
