"""Requests that the old version of a model answers after a reload count in the series that are shown, once in each of them."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.inference import one
from harness.models import write
from harness.processes import held
from harness.server import ROOT, Server, total
from harness.statistics import until_received
from harness.waiting import eventually

VALUES = one("FP32", [1, 2], [3, 4])
MODEL = """backend: "builtin" max_batch_size: {batch}
parameters {{ key: "function" value {{ string_value: "identity" }} }}
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }} ]
"""
COUNTED = [
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "pharos_request_duration_seconds_count",
    "pharos_queue_duration_seconds_count",
    "pharos_compute_infer_duration_seconds_count",
    "pharos_batch_size_count",
    "pharos_tenant_requests_total",
    "pharos_slo_requests_total",
    "pharos_slo_good_requests_total",
]


@pytest.fixture
def server(tmp_path):
    """A server with one model, tenants and an objective."""
    more = "tenants: {header: x-tenant}\nslos: [{name: up, availability: 99%}]\n"
    (tmp_path / "metrics.yaml").write_text((ROOT / "metrics.yaml").read_text() + more)
    write(tmp_path / "models", "m", MODEL.format(batch=4))
    options = ["--model-control-mode=explicit", "--load-model=m", f"--metrics-config={tmp_path / 'metrics.yaml'}"]
    with Server(tmp_path, [tmp_path / "models"], options) as running:
        yield running


def reload(server, folder, batch: int):
    """Replaces the model by one with another batch size, while the old one has requests."""
    (folder / "new").write_text(MODEL.format(batch=batch))
    (folder / "new").replace(folder / "models/m/config.pbtxt")
    assert server.ask("POST", "/v2/repository/models/m/load", b"")[0] == 200


def counted(server) -> dict:
    """Returns the value of each counter."""
    scrape = server.scrape()
    return {name: total(scrape, name) for name in COUNTED}


@pytest.mark.parametrize("reloads", [1, 3])
def test_late_answers_of_the_old_version_are_counted(server, tmp_path, reloads):
    """Metrics, statistics, tenants and objectives have the request, also after several reloads."""
    ask = lambda: server.ask("POST", "/v2/models/m/infer", json.dumps(VALUES), headers={"x-tenant": "acme"})  # noqa: E731
    with ThreadPoolExecutor(1) as pool:
        with held(server, "m"):
            request = pool.submit(ask)
            until_received(server, "m", 1)
            for number in range(reloads):
                reload(server, tmp_path, 5 + number)
            assert counted(server) == dict.fromkeys(COUNTED, 0)
            assert total(server.scrape(), "nv_inference_pending_request_count") == 0
            assert not request.done()
        assert request.result()[0] == 200
    assert counted(server) == dict.fromkeys(COUNTED, 1)
    eventually("the old workers have ended", lambda: len(server.workers()) == 1)
    assert ask()[0] == 200
    assert counted(server) == dict.fromkeys(COUNTED, 2), "what the old version has counted remains after its end"
    (statistics,) = json.loads(server.get("/v2/models/m/stats")[1])["model_stats"]
    assert (statistics["inference_count"], statistics["execution_count"]) == (2, 2)
    assert statistics["inference_stats"]["success"]["count"] == 2
    assert [batch["compute_infer"]["count"] for batch in statistics["batch_stats"]] == [2]
    scrape = server.scrape()
    assert total(scrape, "pharos_requests_total", route="infer", code="200") == 2
