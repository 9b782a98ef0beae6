"""Service level objectives: exact counts of good and bad requests, reloads, and the rules that `pharos slo rules` prints."""

import http.client
import json
import os
import queue
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness import prometheus
from harness.inference import one
from harness.models import IO
from harness.prometheus import promtool
from harness.server import ROOT, samples, total
from harness.waiting import DEADLINE_S, eventually
from metrics.objective_rules import alert, case, counts, rules, series, value
from python_backend.worker import PYTHON, has_worker

needs_prometheus = pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())

SLOS = """
slos:
  - name: fast
    latency: {threshold: 150ms, share: 90%}
    availability: 99%
  - name: identity
    model: identity_*
    latency: {threshold: 60m, share: 99.9%}
"""
ONE = one("FP32", [1, 1], [1])
EXPECTED = {
    ("delay_200", "fast", "latency"): (0, 2),
    ("delay_200", "fast", "availability"): (2, 2),
    ("fail", "fast", "latency"): (0, 3),
    ("fail", "fast", "availability"): (0, 3),
    ("identity_fp32", "fast", "availability"): (5, 5),
    ("identity_fp32", "identity", "latency"): (5, 5),
}
"""Good and all requests. The latency of `identity_fp32` under `fast` depends on the machine."""


LIMITS = [("fast", "1ms"), ("slow", "60m")]
WAITS = """import pathlib, time
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        pathlib.Path("PATH.begun").touch()
        while not pathlib.Path("PATH").exists():
            time.sleep(0.01)
        tensors = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""
"""A model that does not look whether its request is cancelled."""


def test_every_request_is_counted_exactly(start, tmp_path):
    """Slow answers and failures of the model are bad; requests that the client got wrong do not count."""
    file = tmp_path / "metrics.yaml"
    file.write_text((ROOT / "metrics.yaml").read_text() + SLOS)
    server = start(["identity_fp32", "delay_200", "fail"], f"--metrics-config={file}", "--metrics-mode=prometheus")
    before = server.scrape()
    assert set(counts(before, "pharos_slo_requests_total").values()) == {0}
    assert set(counts(before, "pharos_slo_error_budget_remaining_ratio").values()) == {1}
    for model, request, times, expected in [
        ("identity_fp32", ONE, 5, 200),
        ("delay_200", ONE, 2, 200),
        ("fail", one("FP32", [1], [1]), 3, None),
        ("identity_fp32", one("FP32", [1, 1], [1, 2]), 4, None),
        ("identity_fp32", one("INT8", [1, 1], [1]), 4, 400),
    ]:
        for _ in range(times):
            status, answer = server.infer(model, request)
            assert status == expected or (expected is None and status >= 400), answer
    metrics = server.scrape()
    good, every = (counts(metrics, f"pharos_slo_{name}_total") for name in ("good_requests", "requests"))
    assert {key: (good[key], every[key]) for key in EXPECTED} == EXPECTED
    assert set(every) == {*EXPECTED, ("identity_fp32", "fast", "latency")}
    assert every["identity_fp32", "fast", "latency"] == 5
    # The same requests as in the other metrics.
    assert total(metrics, "nv_inference_request_success", model="identity_fp32") == 5
    budget = counts(metrics, "pharos_slo_error_budget_remaining_ratio")
    assert budget["delay_200", "fast", "latency"] == pytest.approx(1 - 1 / 0.1)
    assert budget["delay_200", "fast", "availability"] == 1
    shares = counts(metrics, "pharos_slo_objective_ratio")
    assert (shares["fail", "fast", "latency"], shares["identity_fp32", "identity", "latency"]) == (0.9, 0.999)
    thresholds = counts(metrics, "pharos_slo_latency_threshold_seconds")
    assert set(thresholds.values()) == {0.15, 3600} and not any(sli == "availability" for *_, sli in thresholds)


def waiting(start, tmp_path):
    """Starts a server whose model `waits` waits until the file `go` exists, with an objective that each request exceeds and one that none does."""
    file = tmp_path / "metrics.yaml"
    slos = [f"  - {{name: {name}, latency: {{threshold: {time}, share: 90%}}, availability: 99%}}\n" for name, time in LIMITS]
    file.write_text((ROOT / "metrics.yaml").read_text() + "slos:\n" + "".join(slos))
    folder = tmp_path / "models/waits"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'backend: "python" max_batch_size: 4 {IO}')
    (folder / "1/model.py").write_text(WAITS.replace("PATH", str(tmp_path / "go")))
    options = [f"--metrics-config={file}", "--metrics-mode=prometheus", f"--python={PYTHON}"]
    return start([], *options, repository=folder.parent)


def counted(server) -> dict:
    """Returns the number of requests that count, by objective and indicator."""
    every = counts(server.scrape(), "pharos_slo_requests_total")
    return {(slo, sli): number for (_, slo, sli), number in every.items()}


@pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
@pytest.mark.parametrize("streams", [False, True])
def test_deadlines_of_grpc_clients_count_against_the_objective(start, tmp_path, streams):
    """A client that leaves at its deadline got no answer in time: bad, while the request executes and while it waits in the queue."""
    server = waiting(start, tmp_path)
    late = lambda: total(server.scrape(), "pharos_request_failures_total", reason="TIMEOUT")  # noqa: E731

    def ask():
        """Sends a request with a deadline, and waits until it has passed. What the client rounds, and the time until the call arrives,
        count by hundredths of the deadline."""
        timeout_s = 9
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 2), np.float32))
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            if streams:
                answers = queue.Queue()
                client.start_stream(lambda result, error: answers.put(error), stream_timeout=timeout_s)
                client.async_stream_infer("waits", [tensor])
                error = answers.get(timeout=DEADLINE_S)
            else:
                with pytest.raises(InferenceServerException) as raised:
                    client.infer("waits", [tensor], client_timeout=timeout_s)
                error = raised.value
        assert "Deadline Exceeded" in str(error)

    with ThreadPoolExecutor() as clients:
        first = clients.submit(ask)
        eventually("a request executes", lambda: (tmp_path / "go.begun").exists())
        # The worker gets one more batch in advance, and the other request waits in the queue.
        others = [clients.submit(ask), clients.submit(ask)]
        for request in [first, *others]:
            request.result()
    eventually("the server knows that the requests are late", lambda: late() == 3)
    eventually("the request in the queue counts", lambda: counted(server)["slow", "availability"] == 1)
    (tmp_path / "go").touch()
    eventually("all count", lambda: set(counted(server).values()) == {3})
    assert set(counts(server.scrape(), "pharos_slo_good_requests_total").values()) == {0}


@pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
def test_requests_of_clients_that_leave(start, tmp_path):
    """The worker completes the request all the same, which is cancelled for the objectives: bad after the threshold, and otherwise
    not counted."""
    server = waiting(start, tmp_path)
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_S)
    connection.request("POST", "/v2/models/waits/infer", json.dumps(one("FP32", [1, 2], [1, 2])))
    eventually("the model executes it", lambda: (tmp_path / "go.begun").exists())
    connection.close()
    cancelled = lambda: total(server.scrape(), "pharos_request_failures_total", reason="CANCELLED")  # noqa: E731
    eventually("the server knows that the client has left", lambda: cancelled() == 1)
    (tmp_path / "go").touch()
    succeeded = lambda: total(server.scrape(), "nv_inference_request_success", model="waits")  # noqa: E731
    eventually("the request is executed", lambda: succeeded() == 1)
    assert counted(server) == {
        ("fast", "latency"): 1, ("fast", "availability"): 0, ("slow", "latency"): 0, ("slow", "availability"): 0,
    }  # fmt: skip
    assert set(counts(server.scrape(), "pharos_slo_good_requests_total").values()) == {0}


def test_a_full_queue_counts_against_the_objective(start, tmp_path):
    """Refused requests are in no other number of the model except the refusals of its queue, but their clients were not served."""
    file = tmp_path / "metrics.yaml"
    file.write_text((ROOT / "metrics.yaml").read_text() + SLOS)
    server = start(["queue_limit"], f"--metrics-config={file}", "--metrics-mode=prometheus")
    with ThreadPoolExecutor(12) as pool:
        statuses = [status for status, _ in pool.map(lambda _: server.infer("queue_limit", ONE), range(36))]
    assert statuses.count(200) > 0 and statuses.count(503) > 0, statuses
    metrics = server.scrape()
    of = {"slo": "fast", "sli": "availability", "model": "queue_limit"}
    assert total(metrics, "pharos_slo_requests_total", **of) == len(statuses)
    assert total(metrics, "pharos_slo_good_requests_total", **of) == statuses.count(200)
    assert total(metrics, "pharos_queue_refusals_total", model="queue_limit") == statuses.count(503)


def test_sighup_changes_objectives(start, tmp_path):
    """Objectives are added and removed; one that only gets another share keeps its counts."""
    file = tmp_path / "metrics.yaml"
    file.write_text(SLOS)
    server = start(["identity_fp32"], f"--metrics-config={file}", "--metrics-mode=prometheus")
    assert server.infer("identity_fp32", ONE)[0] == 200

    def reload(text: str, message: str):
        file.write_text(text)
        server.process.send_signal(signal.SIGHUP)
        eventually(f"the log has {message!r}", lambda: message in server.log.read_text())
        return counts(server.scrape(), "pharos_slo_requests_total")

    changed = SLOS.replace("99.9%", "99.5%").replace("name: fast", "name: quick")
    found = reload(changed, "added slo quick; removed slo fast; changed slo identity")
    assert found == {
        ("identity_fp32", "quick", "latency"): 0,
        ("identity_fp32", "quick", "availability"): 0,
        ("identity_fp32", "identity", "latency"): 1,
    }
    assert reload(changed.replace("99.5%", "101%"), "`101%` is not a valid share") == found
    assert reload("mode: both\n", "slo quick, slo identity") == {}


def test_rules_need_objectives(tmp_path):
    """The message says what is missing."""
    result = rules(ROOT / "metrics.yaml")
    assert (result.returncode, result.stdout) == (1, "")
    assert "it defines no objectives; add them as `slos`" in result.stderr


@needs_prometheus
def test_promtool_accepts_the_rules_and_their_tests_pass(tmp_path):
    """Fast and slow burns, their short windows, two servers of one objective, a server without requests, the budget left."""
    definition, file = tmp_path / "metrics.yaml", tmp_path / "rules.yaml"
    definition.write_text("slos: [{name: fast, latency: {threshold: 200ms, share: 99%}, window: 30d}]\n")
    result = rules(definition)
    assert (result.returncode, result.stderr) == (0, "")
    # The tests compare labels; the texts of the alerts have values.
    kept = [line for line in result.stdout.splitlines() if not line.lstrip().startswith(("annotations:", "summary:", "description:"))]
    file.write_text("\n".join(kept) + "\n")
    whole = tmp_path / "whole.yaml"
    whole.write_text(result.stdout)
    checked = promtool("check", "rules", "--lint-fatal", whole)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    burnt = "model:pharos_slo_errors:ratio_rate"
    left = "model:pharos_slo_error_budget_remaining:ratio"
    tests = [
        # Two servers: 20 of 100 requests a minute are bad, all on one of them: a rate of 20.
        case(
            series("a", "fast", "latency", "0+30x120", "0+50x120") + series("b", "fast", "latency", "0+50x120", "0+50x120"),
            alert("70m", "critical", "warning"),
            value(f"{burnt}5m", "70m", 0.2) + value(f"{burnt}1h", "70m", 0.2) + value(left, "70m", -19),
        ),
        # The burn is over: the short windows end the urgent alert although the long ones are still above the limit.
        case(
            series("a", "fast", "latency", "0+50x60 3100+100x60", "0+100x60 6100+100x60"),
            alert("55m", "critical", "warning") + alert("100m", "warning"),
        ),
        # A rate of 8 is below 14.4, but above 6 over 6 hours.
        case(
            series("a", "fast", "latency", "0+92x400", "0+100x400"),
            alert("380m", "critical", "warning"),
            value(f"{burnt}6h", "380m", 0.08),
        ),
        # A rate of 2 exhausts the budget within its window: after three days, a ticket.
        case(series("a", "fast", "latency", "0+98x4400", "0+100x4400"), alert("4380m", "warning")),
        # A rate of 0.9 keeps the objective.
        case(
            series("a", "fast", "latency", "0+991x4400", "0+1000x4400"),
            alert("4380m"),
            value(left, "4380m", 0.1),
        ),
        # Without requests nothing fires.
        case(series("a", "fast", "latency", "0x120", "0x120"), alert("100m")),
    ]
    text = f"rule_files: [{file}]\nevaluation_interval: 5m\ntests:\n" + "".join(tests)
    (tmp_path / "tests.yaml").write_text(text)
    tested = promtool("test", "rules", tmp_path / "tests.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_no_objectives_no_series(start):
    """The built-in definition has no objectives, so no view has a series or a header of them."""
    server = start(["identity_fp32"])
    assert server.infer("identity_fp32", ONE)[0] == 200
    status, text = server.get("/metrics", server.metrics)
    assert status == 200 and samples(text) and "pharos_slo" not in text


WARM = """backend: "builtin" max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "function" value { string_value: "identity" } }
model_warmup { name: "w" batch_size: 1 count: 3 inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }
"""


def test_requests_for_warming_up_count_for_no_objective(start, tmp_path):
    """They are in the statistics, as in Triton."""
    (tmp_path / "models/warm/1").mkdir(parents=True)
    (tmp_path / "models/warm/config.pbtxt").write_text(WARM)
    file = tmp_path / "metrics.yaml"
    file.write_text((ROOT / "metrics.yaml").read_text() + "\nslos: [{name: up, availability: 99%}]\n")
    server = start([], f"--metrics-config={file}", repository=tmp_path / "models")
    scraped = server.scrape()
    assert total(scraped, "nv_inference_request_success", model="warm") == 3
    assert counts(scraped, "pharos_slo_requests_total")["warm", "up", "availability"] == 0


MORTAL = """import os
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, arguments):
        if os.path.exists("BROKEN"):
            os._exit(1)

    def execute(self, requests):
        tensors = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""
MORTAL_CONFIG = """backend: "python" max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""


@pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
def test_a_refused_request_counts_once(start, tmp_path):
    """The worker is lost, and its process does not start again."""
    directory, broken = tmp_path / "models/mortal", tmp_path / "broken"
    (directory / "1").mkdir(parents=True)
    (directory / "1/model.py").write_text(MORTAL.replace("BROKEN", str(broken)))
    (directory / "config.pbtxt").write_text(MORTAL_CONFIG)
    file = tmp_path / "metrics.yaml"
    file.write_text((ROOT / "metrics.yaml").read_text() + "\nslos: [{name: up, availability: 99%}]\n")
    server = start([], f"--metrics-config={file}", f"--python={PYTHON}", repository=tmp_path / "models")
    request = one("FP32", [1, 1], [1])
    assert server.infer("mortal", request)[0] == 200
    broken.touch()
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    eventually("requests are refused", lambda: server.infer("mortal", request)[0] == 503)

    def counted():
        return counts(server.scrape(), "pharos_slo_requests_total")["mortal", "up", "availability"]

    before = counted()
    assert [server.infer("mortal", request)[0] for _ in range(3)] == [503] * 3
    assert counted() == before + 3
