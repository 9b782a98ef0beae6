"""NVIDIA's perf_analyzer, unmodified, profiles the model `simple` and an ensemble. Needs the peer; see `peers.py`."""

import json
import re
import subprocess

import pytest

from harness.peers import missing, script
from harness.server import Server
from harness.stream_models import COMPARED, build

WHY_NOT = missing("perf_analyzer", "perf")


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("mode", ["--sync", "--async"])
@pytest.mark.parametrize("model", ["simple", "digits_pipeline"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_profile(server, protocol, mode, model):
    """It succeeds and prints values that only the server can provide. The windows are short and every variance is accepted: the
    test is about the protocol, not about speed."""
    command = [
        str(script("perf_analyzer")), "-m", model, "-i", protocol, "-u", getattr(server, protocol), mode,
        "--concurrency-range", "2", "--measurement-interval", "500", "--max-trials", "3",
        "--stability-percentage", "999",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    numbers = dict(
        re.findall(r"^\s+(Inference count|Execution count|Successful request count): (\d+)", result.stdout, re.M)
    )
    assert int(numbers["Inference count"]) > 0, result.stdout
    assert int(numbers["Execution count"]) > 0, result.stdout
    assert re.search(r"queue \d+ usec \+ compute input \d+ usec \+ compute infer \d+ usec", result.stdout), (
        result.stdout
    )


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_profile_of_a_decoupled_model(tmp_path):
    """Over a gRPC stream it counts responses and waits for each final flag, which comes alone or with the last response."""
    data = {"data": [{"IN": {"content": [4, 5, 6], "shape": [3]}, "DELAY": {"content": [1, 1, 1], "shape": [3]},
                      "WAIT": {"content": [0], "shape": [1]}}]}  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps(data))
    models = {name: COMPARED[name] for name in ("repeat", "repeat_with")}
    with Server(tmp_path, [build(tmp_path / "models", models)]) as server:
        for model in models:
            command = [
                str(script("perf_analyzer")), "-m", model, "-i", "grpc", "-u", server.grpc, "--async", "--streaming",
                "--input-data", str(tmp_path / "data.json"), "--concurrency-range", "2", "--measurement-interval", "500",
                "--max-trials", "3", "--stability-percentage", "999",
            ]  # fmt: skip
            result = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert result.returncode == 0, result.stdout + result.stderr
            rates = dict(re.findall(r"^\s+(Response Throughput|Throughput): ([\d.]+)", result.stdout, re.M))
            ratio = float(rates["Response Throughput"]) / float(rates["Throughput"])
            assert 2.9 < ratio < 3.1, result.stdout
            assert server.statistics(model)["inference_stats"]["success"]["count"] > 20
