"""The guides of language models: their commands and clients, with the example that they serve and with a small model in a file."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from documents.document_blocks import commands, of_test
from harness.gguf import write_model
from harness.server import ROOT, Server, binary, total

MODELS = "examples/language_model/models"
needs_llamacpp = pytest.mark.skipif(
    not (binary().parent / "backends/llamacpp/libpharos_llamacpp.so").is_file(), reason="the backend llamacpp is not built: make llamacpp"
)


def printed(command: str, **options) -> str:
    """Returns what a command of a guide prints."""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, **options).stdout


def test_the_guide_of_language_models(start):
    """The command and the programs get the text of their prompt."""
    serve_and_ask, program, of_responses = (block.text for block in of_test("test_the_guide_of_language_models"))
    serve, ask = serve_and_ask.strip().splitlines()
    assert serve == f"pharos --model-repository {MODELS}"
    server = start([], repository=ROOT / MODELS)
    ask, program, of_responses = (text.replace("localhost:8000", server.http) for text in (ask, program, of_responses))
    assert json.loads(printed(ask))["choices"][0]["message"]["content"] == "hello world"
    text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert text == "hello world"
    text = subprocess.run([sys.executable, "-c", of_responses], capture_output=True, text=True, check=True).stdout
    assert text == "hello world\nhello world"


def test_the_clients_of_language_models(start):
    """The stream has the text, and so has LangChain, if it is installed."""
    (stream,), (install, langchain) = (commands(block) for block in of_test("test_the_clients_of_language_models"))
    server = start([], repository=ROOT / MODELS)
    events = re.findall("^data: (.*)$", printed(stream.replace("localhost:8000", server.http)), re.M)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(chunks) == "hello world"
    assert install == "pip install langchain-openai"
    if importlib.util.find_spec("langchain_openai"):
        command = langchain.replace("localhost:8000", server.http).replace("python3", sys.executable, 1)
        answer, pieces, conversation = printed(command, cwd=ROOT).splitlines()
        assert (answer, conversation) == ("hello world 2", "hello world hello world three four")
        assert pieces.replace("|", "") == "one two2"


@needs_llamacpp
def test_a_gguf_file_of_the_guide(tmp_path):
    """The settings have the effect of the flags of llama-server that they replace."""
    (block,) = of_test("test_a_gguf_file_of_the_guide")
    flags = block.text.splitlines()[0]
    assert flags == "# llama-server -m model.gguf -c 2048 -np 2 -t 2 --alias little"
    script, _, serve = block.text.strip().rpartition("\n")
    assert serve == "pharos --model-repository models"
    write_model(tmp_path / "model.gguf")
    printed(f"set -e\n{script}", cwd=tmp_path)
    with Server(tmp_path, [tmp_path / "models"]) as server:
        assert "2 sequences of 1024 tokens, 2 threads" in server.log.read_text()
        body = json.dumps({"model": "little", "messages": [{"role": "user", "content": "hi"}]})
        assert server.ask("POST", "/v1/chat/completions", body)[0] == 200


@needs_llamacpp
def test_the_names_of_vllm_have_the_same_values(tmp_path):
    """The setting gives each metric of the table its names of vLLM, with vLLM's labels and the same samples."""
    ((command,),) = (commands(block) for block in of_test("test_the_names_of_vllm_have_the_same_values"))
    serve, setting = command.rsplit(" --metrics-config ", 1)
    assert serve == f"pharos --model-repository {MODELS}"
    page = (ROOT / "docs/src/guides/language-models.md").read_text()
    table = {own: re.findall(r"`(vllm:\w+)`", names) for own, names in re.findall(r"^\| `(pharos_llm_\w+)` \| (`vllm:.*) \|$", page, re.M)}
    (tmp_path / "models/tiny/1").mkdir(parents=True)
    write_model(tmp_path / "models/tiny/1/model.gguf")
    with Server(tmp_path, [tmp_path / "models"], [f"--metrics-config={setting}"]) as server:
        body = json.dumps({"model": "tiny", "prompt": "one", "max_tokens": 3, "stream": True})
        assert server.ask("POST", "/v1/completions", body)[0] == 200
        scrape = server.scrape()
    found = {name for name, _ in scrape if name.startswith("vllm:")}
    for own, others in table.items():
        forms = [form for form in ("", "_count", "_sum", "_bucket") if any(name == own + form for name, _ in scrape)]
        assert forms, own
        for other in others:
            found -= {other + form for form in forms}
            assert all(total(scrape, own + form) == total(scrape, other + form, model_name="tiny", engine="0") for form in forms), other
    assert not found, "names that the table does not have"
    labels = {label for name, labels in scrape if name.startswith("vllm:") for label, _ in labels}
    adapters = {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    assert labels == {"model_name", "version", "instance", "engine", "finished_reason", "le"} | adapters
    assert total(scrape, "vllm:generation_tokens_total") == 3
    assert total(scrape, "vllm:time_to_first_token_seconds_count") == total(scrape, "vllm:e2e_request_latency_seconds_count") == 1
    assert total(scrape, "vllm:request_success_total", finished_reason="length") == 1
