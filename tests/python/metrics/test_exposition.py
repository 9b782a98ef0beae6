"""The scrape of a real server under load: formats, compression, filters, distributions and gauges."""

import gzip
import json
import re
import subprocess
import urllib.request

import numpy as np
import pytest
import tritonclient.http as triton

from harness import models
from harness.inference import one
from harness.server import Server, binary, total
from harness.waiting import DEADLINE_S, settled

STAGES = ("request", "queue", "compute_input", "compute_infer", "compute_output")


def scrape(server, query="", **headers):
    url = f"http://127.0.0.1:{server.metrics_port}/metrics{query}"
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with urllib.request.urlopen(urllib.request.Request(url, headers=names), timeout=DEADLINE_S) as response:
        body = response.read()
        if response.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        return body.decode(), response.headers


def value(text, sample):
    found = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(sample + " ")]
    assert len(found) == 1, f"{sample}: {found}"
    return float(found[0])


def infer(server, model="simple", headers=None):
    client = triton.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
    client.infer(model, inputs, headers=headers)
    client.close()


TAGGED = """backend: "builtin"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
parameters { key: "function" value { string_value: "identity" } }
metric_tags { key: "team" value: "t" }
"""

TRITON_LABELS = {
    "nv_inference_request_failure": [
        f'_team="t",model="m",reason="{reason}",version="1"' for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    ],
    **dict.fromkeys(
        [
            "nv_inference_request_success",
            "nv_inference_count",
            "nv_inference_exec_count",
            "nv_inference_request_duration_us",
            "nv_inference_queue_duration_us",
            "nv_inference_compute_input_duration_us",
            "nv_inference_compute_infer_duration_us",
            "nv_inference_compute_output_duration_us",
            "nv_inference_pending_request_count",
            *(f"nv_inference_{stage}_summary_us_{part}" for stage in STAGES for part in ("sum", "count")),
        ],
        ['_team="t",model="m",version="1"'],
    ),
    **dict.fromkeys(
        [f"nv_inference_{stage}_summary_us" for stage in STAGES],
        [f'_team="t",model="m",version="1",quantile="{quantile}"' for quantile in ("0.5", "0.9", "0.95", "0.99", "0.999")],
    ),
}
"""The labels of each sample of the model `m` on a real Triton 2.51, byte for byte."""


def test_labels_have_the_order_of_triton(tmp_path):
    """Alphabetical, also those of the model's tags and of its repository; `quantile` is last."""
    repository = models.write(tmp_path / "models", "m", TAGGED)
    for namespace, options in (("", []), (f'namespace="{repository}",', ["--model-namespacing=true"])):
        with Server(tmp_path, [repository], ["--metrics-config=summary_latencies=true", *options]) as server:
            assert server.infer("m", one("FP32", [1], [1]))[0] == 200
            lines = scrape(server)[0].splitlines()
        found = {}
        for line in lines:
            name, _, rest = line.partition("{")
            if name.startswith("nv_") and rest:
                found.setdefault(name, []).append(rest.rpartition("} ")[0])
        del found["nv_model_load_duration_secs"]
        after_model = lambda labels: labels.replace('model="m",', 'model="m",' + namespace)  # noqa: E731
        assert found == {name: [after_model(labels) for labels in all_labels] for name, all_labels in TRITON_LABELS.items()}


def test_histograms_count_what_the_counters_count(server):
    for _ in range(5):
        infer(server)
    text, _ = scrape(server)
    labels = '{model="simple",version="1"}'
    successes = value(text, f"nv_inference_request_success{labels}")
    assert successes >= 5
    for stage in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        name = f"pharos_{stage}_duration_seconds"
        assert value(text, f"{name}_count{labels}") == successes
        assert value(text, f'{name}_bucket{{model="simple",version="1",le="+Inf"}}') == successes
        microseconds = value(text, f"nv_inference_{stage}_duration_us{labels}")
        assert microseconds - 0.001 <= value(text, f"{name}_sum{labels}") * 1e6 < microseconds + 1.001
    assert value(text, f"pharos_batch_size_count{labels}") == value(text, f"nv_inference_exec_count{labels}")
    assert value(text, f"pharos_batch_size_sum{labels}") == value(text, f"nv_inference_count{labels}")
    sent = re.findall(r'^pharos_batches_total\{model="simple",version="1",reason="(\w+)"\} (\d+)$', text, re.M)
    assert [reason for reason, _ in sent] == ["preferred", "full", "delay", "shape", "idle", "drain"]
    assert sum(int(count) for _, count in sent) == value(text, f"nv_inference_exec_count{labels}")


def test_an_exemplar_names_the_trace(server):
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    infer(server, headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    text, headers = scrape(server, accept="application/openmetrics-text")
    assert headers["content-type"].startswith("application/openmetrics-text")
    pattern = rf'^pharos_request_duration_seconds_bucket\{{.*\}} \d+ # \{{trace_id="{trace}"\}} [\d.]+(?:e-\d\d)? [\d.]+$'
    assert re.search(pattern, text, re.M)
    assert "trace_id" not in scrape(server)[0]


def test_labels_and_numbers_are_written_as_triton_and_go_do(server):
    """Labels are in the order of the definition, those of `nv_*` in alphabetical order; `le` is the last one. Numbers have no `.0`;
    in OpenMetrics the values of `le` are canonical numbers."""
    infer(server)
    listed = subprocess.run([binary(), "metrics", "list", "--format", "json"], capture_output=True, check=True, timeout=DEADLINE_S)
    defined = {metric["name"]: metric["dimensions"] for metric in json.loads(listed.stdout)}
    text, _ = scrape(server)
    found = re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.M)
    assert len(found) > 100
    for name, labels, number in found:
        family = name if name in defined else re.sub(r"_(bucket|sum|count)$", "", name)
        ordered = sorted if name.startswith("nv_") else list
        wanted = ordered(defined.get(family, [])) + (["le"] if name.endswith("_bucket") else [])
        shown = re.findall(r'(\w+)="', labels)
        assert [label for label in shown if label in wanted] == wanted, (name, labels)
        assert "le" not in shown[:-1], (name, labels)
        assert not number.endswith(".0"), (name, number)
    bounds = r'^pharos_request_duration_seconds_bucket\{model="simple",version="1",.*le="(.*?)"\}'
    first, last = ["5e-05", "0.0001", "0.0002", "0.0005"], ["0.5", "1", "2", "5", "10", "+Inf"]
    classic = re.findall(bounds, text, re.M)
    assert classic[:4] == first and classic[-6:] == last
    canonical = re.findall(bounds, scrape(server, accept="application/openmetrics-text")[0], re.M)
    assert canonical[:4] == first and canonical[-6:] == ["0.5", "1.0", "2.0", "5.0", "10.0", "+Inf"]


@pytest.mark.smoke
def test_a_scrape_can_be_compressed_and_filtered(server):
    whole, headers = scrape(server, accept_encoding="gzip")
    assert headers["content-encoding"] == "gzip" and "nv_inference_count{" in whole
    assert "accept-encoding" in headers["vary"]
    family, _ = scrape(server, "?name[]=nv_inference_count&name%5B%5D=nv_cpu_none")
    assert {line.split("{")[0] for line in family.splitlines() if line[0] != "#"} == {"nv_inference_count"}
    sample, _ = scrape(server, "?name[]=pharos_request_duration_seconds_sum")
    assert {line.split("{")[0] for line in sample.splitlines() if line[0] != "#"} == {
        "pharos_request_duration_seconds_sum"
    }
    assert scrape(server, "?name[]=none")[0] == ""


def test_gauges_of_instances_and_queues(server):
    text, _ = scrape(server)
    states = re.findall(r'^pharos_instance_state\{model="simple",version="1",instance="([^"]+)",state="(\w+)"\} (\d)$', text, re.M)
    assert {state for _, state, on in states if on == "1"} == {"ready"}
    assert len(states) == 5 * len({name for name, _, _ in states})
    assert value(text, 'pharos_pending_requests{model="simple",version="1",priority="0"}') == 0
    assert value(text, 'pharos_oldest_pending_seconds{model="simple",version="1"}') == 0
    assert value(text, 'pharos_open_streams{protocol="grpc"}') == 0
    assert re.search(r'^pharos_build_info\{version="[\d.]+"\} 1$', text, re.M)
    assert value(text, 'nv_pinned_memory_pool_total_bytes') == 0
    assert re.search(r'^pharos_arena_used_bytes\{model="simple",version="1",instance="[^"]+",direction="input"\} 0$', text, re.M)


def test_two_scrapes_without_traffic_are_equal(server):
    steady = lambda: [line for line in scrape(server)[0].splitlines() if line.startswith(("nv_inf", "# ", "ts_"))]
    settled("the series of requests", steady, 0.2)


def test_idle_series_can_be_left_out(start):
    """With `--metrics-omit-idle`, counters and histograms appear with their first event; gauges are always there."""
    server = start(["identity_fp32", "delay_20_two_instances"], "--metrics-omit-idle")
    full = start(["identity_fp32", "delay_20_two_instances"])
    before = server.scrape()
    gauges = {"nv_inference_pending_request_count"}
    assert {name for name, _ in before if name.startswith("nv_inference_")} == gauges
    assert total(before, "pharos_instances", state="ready") == total(full.scrape(), "pharos_instances", state="ready") > 0
    assert len(server.get("/metrics", server.metrics)[1]) < len(full.get("/metrics", full.metrics)[1]) / 3
    assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    after = server.scrape()
    assert total(after, "nv_inference_request_success", model="identity_fp32") == 1
    assert total(after, "pharos_request_duration_seconds_count", model="identity_fp32") == 1
    assert {dict(labels)["model"] for name, labels in after if name == "nv_inference_request_success"} == {"identity_fp32"}
    # Statistics are complete.
    assert server.statistics("delay_20_two_instances")["inference_stats"]["success"]["count"] == 0
