"""Numbers of language models for operators: objectives on tokens, load reports, `pharos top` and the status page."""

import json
import re
import shutil
import subprocess
import time

import pytest

from harness import browser, orca, prometheus
from harness.browser import Browser
from harness.prometheus import promtool
from harness.server import EXAMPLES, ROOT, binary, total
from harness.waiting import DEADLINE_S, eventually, every
from metrics.objective_rules import alert, case, counts, rules, series

MODELS = ROOT / "examples/language_model/models"
needs_browser = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
needs_prometheus = pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())

SLOS = """
slos:
  - name: chat
    time_to_first_token: {threshold: 60s, share: 90%}
    inter_token_latency: {threshold: 60s, share: 99%}
  - name: never
    time_to_first_token: {threshold: 1us, share: 90%}
    inter_token_latency: {threshold: 1us, share: 99%}
"""
# An engine of two instances, as the backends of engines record their gauges.
GAUGES = """
from pharos_worker import metrics


def initialize(self, args):
    number = args["model_instance_name"].rpartition("_")[2]
    labels = [args["model_name"], args["model_version"], number]
    values = {"running_requests": 3, "waiting_requests": 2, "kv_cache_tokens": 512, "adapter_slots": 2}
    values["kv_cache_usage_ratio"] = 0.25 if number == "0" else 0.75
    for name, value in values.items():
        metrics.get_metric(f"pharos_llm_{name}", "gauge").add_or_update(value, labels)
    adapters = {("french", "running"): 2, ("czech", "waiting"): 1} if number == "0" else {("german", "running"): 1, ("czech", "running"): 0}
    for adapter, value in adapters.items():
        metrics.get_metric("pharos_llm_adapter_requests", "gauge").add_or_update(value, [*labels, *adapter])


TritonPythonModel.initialize = initialize
"""

# A model whose vectors are the numbers of words.
VECTORS_CONFIG = """backend: "python"
max_batch_size: 8
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU }
"""
VECTORS = """import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "text").as_numpy()) for request in requests]

    def answer(self, texts):
        words = np.array([[len(text.split())] for text in texts.ravel()])
        outputs = {"embedding": words.astype(np.float32), "num_input_tokens": words.astype(np.uint32)}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])
"""


@pytest.fixture
def repository(tmp_path):
    """Models: `words`, whose two instances record an engine's gauges, and `simple`, which generates no text."""
    shutil.copytree(MODELS, tmp_path / "models")
    shutil.copytree(EXAMPLES / "simple", tmp_path / "models/simple")
    words = tmp_path / "models/words"
    (words / "1/model.py").write_text((MODELS / "words/1/model.py").read_text() + GAUGES)
    config = (words / "config.pbtxt").read_text()
    (words / "config.pbtxt").write_text(config.replace("kind: KIND_CPU", "kind: KIND_CPU count: 2"))
    return tmp_path / "models"


@pytest.fixture
def server(start, tmp_path, repository):
    """A server with the models and with objectives."""
    (tmp_path / "metrics.yaml").write_text((ROOT / "metrics.yaml").read_text() + SLOS)
    return start([], f"--metrics-config={tmp_path / 'metrics.yaml'}", "--metrics-mode=prometheus", repository=repository)


def complete(server, prompt="one two three four", stream=True, headers=None, **more) -> tuple:
    """Returns the status, the body and the headers."""
    connection = server.connect()
    body = {"model": "words", "prompt": prompt, "stream": stream, **more}
    connection.request("POST", "/v1/completions", json.dumps(body), headers or {})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, response.headers


def test_objectives_on_tokens(server):
    """Streams count with their first token, their other tokens one by one; whole outputs have no times, and a stream that fails before
    its first token is bad."""
    for _ in range(3):
        assert complete(server)[0] == 200
    assert complete(server, stream=False)[0] == 200
    metrics = server.scrape()
    found = {key: (value, counts(metrics, "pharos_slo_requests_total")[key]) for key, value in counts(metrics, "pharos_slo_good_requests_total").items()}
    assert found == {
        ("words", "chat", "time_to_first_token"): (3, 3),
        ("words", "chat", "inter_token_latency"): (9, 9),
        ("words", "never", "time_to_first_token"): (0, 3),
        ("words", "never", "inter_token_latency"): (0, 9),
    }
    assert total(metrics, "pharos_llm_time_to_first_token_seconds_count", model="words") == 3, "the same streams as in the histogram"
    assert total(metrics, "pharos_llm_inter_token_latency_seconds_count", model="words") == 9
    assert counts(metrics, "pharos_slo_error_budget_remaining_ratio")["words", "never", "time_to_first_token"] == pytest.approx(-9)
    assert counts(metrics, "pharos_slo_latency_threshold_seconds")["words", "chat", "inter_token_latency"] == 60
    # Before the first token, the stream fails; after it, its time has counted already; a whole output has no first token.
    assert complete(server, vllm_xargs={"fail_at": 0})[0] == 500
    complete(server, vllm_xargs={"fail_at": 2})
    assert complete(server, stream=False, vllm_xargs={"fail_at": 0})[0] == 500
    metrics = server.scrape()
    good, all_requests = (counts(metrics, f"pharos_slo_{name}_total") for name in ("good_requests", "requests"))
    assert (good["words", "chat", "time_to_first_token"], all_requests["words", "chat", "time_to_first_token"]) == (4, 5)
    assert all_requests["words", "chat", "inter_token_latency"] == 10


def test_tokens_of_a_batch_of_texts(start, tmp_path):
    """A model that makes vectors of several texts at once counts the tokens of each, in the usage and in the metrics."""
    model = tmp_path / "models/vectors"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(VECTORS_CONFIG)
    (model / "1/model.py").write_text(VECTORS)
    server = start([], repository=tmp_path / "models")
    status, text = server.ask("POST", "/v1/embeddings", json.dumps({"model": "vectors", "input": ["one two", "three", "four five six"]}))
    answer = json.loads(text)
    assert status == 200 and [entry["embedding"] for entry in answer["data"]] == [[2.0], [1.0], [3.0]]
    assert answer["usage"]["prompt_tokens"] == 6
    assert total(server.scrape(), "pharos_llm_prompt_tokens_total", model="vectors") == 6


@needs_prometheus
def test_the_rules_of_tokens(tmp_path):
    """promtool accepts the rules, and the alert of the first tokens fires."""
    (tmp_path / "metrics.yaml").write_text("slos: [{name: fast, time_to_first_token: {threshold: 1s, share: 99%}}]\n")
    result = rules(tmp_path / "metrics.yaml")
    assert (result.returncode, result.stderr) == (0, "")
    (tmp_path / "whole.yaml").write_text(result.stdout)
    checked = promtool("check", "rules", "--lint-fatal", tmp_path / "whole.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    kept = [line for line in result.stdout.splitlines() if not line.lstrip().startswith(("annotations:", "summary:", "description:"))]
    (tmp_path / "rules.yaml").write_text("\n".join(kept) + "\n")
    inputs = series("a", "fast", "time_to_first_token", "0+80x120", "0+100x120")
    fires = alert("70m", "critical", "warning").replace("sli: latency", "sli: time_to_first_token")
    text = f"rule_files: [{tmp_path / 'rules.yaml'}]\nevaluation_interval: 5m\ntests:\n{case(inputs, fires)}"
    (tmp_path / "tests.yaml").write_text(text)
    tested = promtool("test", "rules", tmp_path / "tests.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_load_reports_have_the_numbers_of_engines(server):
    """In answers of OpenAI's API, whole and streamed; a model without an engine has none of them."""

    def named(**more) -> dict:
        status, _, headers = complete(server, headers={orca.REQUEST: "json"}, **more)
        assert status == 200
        return orca.from_header(headers[orca.RESPONSE])["named_metrics"]

    eventually("both engines are sampled", lambda: named().get("num_requests_waiting") == 4)
    report = named(stream=False)
    assert report["kv_cache_usage_perc"] == report["kv_cache_utilization"] == 0.5
    assert report["max_token_capacity"] == 1024
    assert report["num_requests_waiting"] == 4, "two wait in each engine, and none in the queue"
    queued = {dict(labels)["model"]: value for (name, labels), value in server.scrape().items() if name == "pharos_llm_queued_requests"}
    assert queued == {"words": 4}
    assert named()["kv_cache_usage_perc"] == 0.5
    status, _, headers = complete(server, stream=False)
    assert status == 200 and orca.RESPONSE not in headers
    connection = server.connect()
    connection.request("POST", "/v2/models/simple/infer", "{}", {orca.REQUEST: "json"})
    response = connection.getresponse()
    assert "kv_cache" not in response.headers[orca.RESPONSE] and "num_requests" not in response.headers[orca.RESPONSE]
    connection.close()


def test_top_has_a_table_of_language_models(server):
    """Rates, times, and the gauges of the engines."""
    complete(server)
    top = subprocess.Popen([binary(), "top", "--once", "--interval=2", server.metrics], stdout=subprocess.PIPE, text=True)
    while top.poll() is None:
        complete(server, vllm_xargs={"delay_ms": 10})
    text = top.communicate(timeout=DEADLINE_S)[0]
    row = next(line for line in text.splitlines() if line.startswith("words/1") and "%" in line)
    time = r"[\d.]+ (us|ms|s)"
    assert re.match(rf"words/1 +[\d.]+/s +[\d.]+/s +{time} +{time} +{time} +6 +[4-9] +50 %$", row), text
    assert "simple/1" not in text.partition("language model")[2].partition("streams of")[0], text


def test_endpoint_pickers_see_the_adapters_of_engines(start, repository):
    """A scrape has one series for the model, of both instances, which names the adapters with requests. Its value is the time, by which
    pickers find the latest one."""
    server = start([], "--metrics-config=also_as=vllm", repository=repository)

    def series() -> list:
        return [(dict(labels), value) for (name, labels), value in server.scrape().items() if name == "vllm:lora_requests_info"]

    names = {"running_lora_adapters": "french,german", "waiting_lora_adapters": "czech"}
    expected = {"model_name": "words", "version": "1", "engine": "0", "max_lora": "4", **names}
    eventually("both engines are sampled", lambda: [labels for labels, _ in series()] == [expected])
    assert series()[0][1] == pytest.approx(time.time(), abs=60)


@needs_browser
def test_the_page_has_a_table_of_language_models(server, tmp_path):
    """It is hidden for other models."""
    with Browser(tmp_path / "profile") as page:
        check_page(server, page)


def check_page(server, page):
    page.open(f"http://{server.metrics}/dashboard")
    time = r"[\d.]+ (µs|ms|s)"
    pattern = rf"words, version 1\s+[\d.]+/s\s+[\d.]+/s\s+{time}\s+{time}\s+{time}\s+6\s+[4-9]\s+50 %"
    for _ in every(0.2, DEADLINE_S):
        complete(server)
        text = page.ask("document.getElementById('language-models').innerText")
        if re.search(pattern, text):
            break
    else:
        raise AssertionError(text)
    page.open(f"http://{server.metrics}/dashboard#model=simple&version=1")
    eventually("the table is hidden", lambda: page.ask("document.getElementById('language').hidden"))
    assert page.complaints == []
