"""Two repositories with a model of the same name (`--model-namespacing`): every view separates the two, and rules, dashboards, the
page and `pharos top` combine the metrics of Triton and of this server for each."""

import json
import re
import subprocess
import threading

import numpy
import pytest
import tritonclient.grpc

from harness import browser, prometheus
from harness.browser import Browser
from harness.models import copy_models
from harness.prometheus import Prometheus
from harness.server import ROOT, Server, binary
from harness.waiting import DEADLINE_S, eventually

NAME = "identity_fp32"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with both models that receives requests until the module ends: (server, full names)."""
    folder = tmp_path_factory.mktemp("namespaces")
    folders = [copy_models(folder / name, [NAME]) for name in "ab"]
    full = [f"{path}/{NAME}" for path in folders]
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(numpy.ones((1, 1), numpy.float32))
    over = threading.Event()

    def load():
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            while not over.wait(0.02):
                # The second has twice the requests.
                for name in (full[0], full[1], full[1]):
                    client.infer(name, [tensor])

    with Server(folder, folders, ["--model-namespacing"]) as server:
        thread = threading.Thread(target=load)
        thread.start()
        yield server, full
        over.set()
        thread.join()


def test_metrics_of_triton_have_a_label_and_those_of_this_server_the_full_name(served):
    """Metrics of one kind have one form, also the histograms, which have the `metric_tags` like Triton's."""
    server, full = served
    forms = {"nv": set(), "ts": set(), "pharos": set()}
    for name, labels in server.scrape():
        labels = dict(labels)
        model = labels.get("model") or labels.get("model_name")
        if model:
            forms[name.split("_")[0]].add((model, labels.get("namespace", "")))
    bare = {(NAME, one.removesuffix(f"/{NAME}")) for one in full}
    assert forms == {"nv": bare, "ts": bare, "pharos": {(one, "") for one in full}}


@pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())
def test_rules_and_dashboards_find_each_model(served, tmp_path):
    """With the relabeling of `prometheus.yaml`, all metrics have the full name, so joins find both models and mix none."""
    server, full = served
    with Prometheus(tmp_path, server.metrics) as running:
        eventually("Prometheus has scraped the server", running.ready)
        models = lambda expression: {sample["metric"].get("model") for sample in running.query(expression)}  # noqa: E731
        joined = [
            "model:nv_inference_pending_requests:per_instance",
            "model:pharos_queue_duration_seconds:mean1m",
            # The expression of the alert about latencies, which combines both kinds.
            "model:pharos_request_duration_seconds:p99_5m > 0 and model:nv_inference_request_success:rate5m > 0",
            "model:nv_inference_error_ratio:rate5m >= 0",
            "sum by (model, version) (nv_inference_request_success) / sum by (model, version) (pharos_instances)",
        ]
        for expression in joined:
            eventually(f"both models have {expression}", lambda expression=expression: models(expression) == set(full))
        rates = running.query("model:nv_inference_request_success:rate5m")
        rates = {sample["metric"]["model"]: float(sample["value"][1]) for sample in rates}
        assert set(rates) == set(full) and rates[full[1]] > 1.5 * rates[full[0]] > 0, rates
        both = {sample["metric"].get("model") or sample["metric"].get("model_name")
                for sample in running.query('count by (model, model_name) ({__name__=~"(nv|ts|pharos)_.+"})')}  # fmt: skip
        assert both == {*full, None}
        assert running.query('{__name__=~"(nv|ts|pharos)_.+", namespace!=""}') == []


def test_the_pod_monitor_relabels_in_the_same_way():
    """In Kubernetes, Prometheus renames the label of the model, because the target has a label `namespace`."""
    rules = lambda text: re.findall(r"(?m)^ +- (\{source_?[lL]abels: \[__name__.*\})$", text)  # noqa: E731
    shipped = rules(prometheus.RELABELING)
    monitor = (ROOT / "deploy/kubernetes/components/monitoring/pod_monitor.yaml").read_text()
    translated = [re.sub(r"\bnamespace\b", "exported_namespace", rule) for rule in shipped]
    translated = [rule.replace("source_labels", "sourceLabels").replace("target_label", "targetLabel") for rule in translated]
    assert len(shipped) == 3 and rules(monitor) == translated


def test_top_shows_each_model(served):
    """One row for each model, with numbers of both kinds of metrics."""
    server, full = served
    command = [binary(), "top", "--once", "--interval=0.5", server.metrics]
    text = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    # Long names lose their beginning, which an ellipsis replaces.
    rows = [line for line in text.splitlines() if any(line and name.endswith(line.split()[0].removeprefix("…")) for name in full)]
    figures = r" 1 +1/1 +[1-9]\S*/s +0/s +[\d.]+ (us|ms|s) +[\d.]+ (us|ms|s) +[\d.]+ (us|ms|s) "
    assert len(rows) == 2 and all(re.search(figures, row) for row in rows), text


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
def test_the_page_shows_each_model(served, tmp_path):
    """The page has both models by their full names, and the numbers of both kinds of metrics for each."""
    server, full = served
    with Browser(tmp_path / "profile") as page:
        page.open(f"http://{server.metrics}/dashboard#model={full[1]}&version=1")
        text = lambda identifier: page.ask(f"document.getElementById({json.dumps(identifier)})?.innerText ?? ''")  # noqa: E731
        eventually("the page shows the model", lambda: text("scope-title") == f"{full[1]}, version 1")
        rows = "[...document.querySelectorAll('#models tbody tr')].map((row) => row.innerText)"
        found = eventually("both models are listed", lambda: len(found := page.ask(rows)) == 2 and found)
        assert all(name in row for name, row in zip(full, found, strict=True)), found
        assert page.complaints == []
