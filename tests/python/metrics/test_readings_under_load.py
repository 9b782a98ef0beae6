"""Each scrape and each answer of the statistics extension shows one moment, also while requests run: numbers that one event changes
together are equal in every reading. README says so."""

import contextlib
import http.client
import json
import threading

from harness.inference import one
from harness.server import ROOT, samples, total
from harness.waiting import DEADLINE_S, join_all

CLIENTS = 4
READINGS = 60
FORMS = {"text": {}, "OpenMetrics": {"Accept": "application/openmetrics-text; version=1.0.0"}}
DEFINITION = """
slos: [{name: answered, availability: 99%}]
tenants: {header: x-tenant}
"""
EQUAL = [
    "pharos_request_duration_seconds_count",
    "pharos_queue_duration_seconds_count",
    "pharos_compute_infer_duration_seconds_count",
    "pharos_tenant_requests_total",
    "pharos_slo_requests_total",
    "pharos_slo_good_requests_total",
    "nv_inference_count",
    "pharos_batch_size_sum",
]
"""Metrics of a model that only has successful requests of one row: each is the number of requests."""


def send(server, ends: threading.Event, sent: list):
    """Sends requests until the event is set, and counts them."""
    body = json.dumps(one("FP32", [1, 1], [1]))
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=DEADLINE_S)) as connection:
        while not ends.is_set():
            connection.request("POST", "/v2/models/identity_fp32/infer", body, {"x-tenant": "t"})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, text
            sent.append(1)


def test_numbers_of_one_reading_agree_under_load(start, tmp_path):
    file = tmp_path / "metrics.yaml"
    file.write_text((ROOT / "metrics.yaml").read_text() + DEFINITION)
    server = start(["identity_fp32"], f"--metrics-config={file}", "--metrics-mode=prometheus")
    ends, sent = threading.Event(), []
    clients = [threading.Thread(target=send, args=(server, ends, sent)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        last = 0
        for _ in range(READINGS):
            for form, headers in FORMS.items():
                status, text = server.get("/metrics", server.metrics, headers)
                assert status == 200, text
                read = samples(text)
                success = total(read, "nv_inference_request_success", model="identity_fp32")
                values = {name: total(read, name, model="identity_fp32") for name in EQUAL}
                assert set(values.values()) == {success}, (form, success, values)
                assert success >= last
                last = success
            [model] = json.loads(server.get("/v2/models/identity_fp32/stats")[1])["model_stats"]
            batches = model["batch_stats"]
            assert sum(batch["compute_infer"]["count"] for batch in batches) == model["execution_count"]
            assert sum(batch["batch_size"] * batch["compute_infer"]["count"] for batch in batches) == model["inference_count"]
            assert model["inference_count"] == model["inference_stats"]["success"]["count"] >= last
    finally:
        ends.set()
        join_all(clients)
    assert last > READINGS, "there was load"
    assert total(server.scrape(), "nv_inference_request_success", model="identity_fp32") == len(sent)
