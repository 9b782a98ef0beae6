"""The example `examples/text`: its scripts, its models under load, and the pages that quote it."""

import json
import re
import subprocess
import sys
import threading

import pytest

from documents.document_blocks import commands, of_test
from harness.server import ROOT, Server, binary, total

TEXT = ROOT / "examples/text"
GUIDE = "guides/text-models.md"
SUBJECTS = {
    "my parcel has not arrived": "delivery", "the app shows an error": "technical", "I was charged twice": "billing",
    "WHERE IS THE COURIER? " * 40: "delivery",
}  # fmt: skip
"""Texts and their subjects, which the example's model finds. The last one is longer than `max_length`."""


def run(*command) -> str:
    """Runs a script of the example; returns what it prints."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The repository that `make_models.py` writes."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("pharos_worker", reason="the package pharos-worker is not installed: make python-worker")
    folder = tmp_path_factory.mktemp("text") / "models"
    run(TEXT / "make_models.py", "--into", folder)
    return folder


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A server of the example."""
    with Server(tmp_path_factory.mktemp("served"), [models], [f"--python={sys.executable}"]) as running:
        yield running


def ask(server, model: str, texts: list, output: dict) -> list:
    """Returns the values of one output for these texts."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
    status, answer = server.infer(model, {"inputs": [tensor], "outputs": [output]})
    assert status == 200, f"{answer}\n{server.log_tail()}"
    return answer["outputs"][0]["data"]


def labels(server, texts: list) -> list:
    """Returns the ensemble's label of each text."""
    found = ask(server, "text_classifier", texts, {"name": "probabilities", "parameters": {"classification": 1}})
    return [text.split(":")[2] for text in found]


@pytest.mark.parametrize("model", ["text_classifier", "text_calls"])
def test_the_scripts_sort_texts(models, model):
    """`ask.py` starts a server and prints the subject of each text, by the ensemble and by calls."""
    printed = run(TEXT / "ask.py", "--server", binary(), "--models", models, "--model", model, *SUBJECTS)
    assert [line for line in printed.splitlines() if ": " in line] == [f"{subject}: {text}" for text, subject in SUBJECTS.items()]


def test_texts_without_known_words(server):
    """An empty text, unknown words, and bytes that are not UTF-8 are answered."""
    assert len(labels(server, ["", "zzz", "中文"])) == 3
    assert len(labels(server, [""])) == 1
    body = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1,1],"parameters":{"binary_data_size":6}}]}'
    headers = {"Inference-Header-Content-Length": str(len(body))}
    status, answer = server.ask("POST", "/v2/models/text_classifier/infer", body + b"\x02\0\0\0\xff\xfe", headers=headers)
    assert status == 200, answer


def test_text_models_batch(server):
    """Texts of concurrent clients are executed together, in the tokenizer and in the encoder, and each client gets its answer."""
    wrong, before = [], server.scrape()

    def client(text, subject):
        wrong.extend(found for _ in range(30) for found in labels(server, [text]) if found != subject)

    threads = [threading.Thread(target=client, args=item) for item in SUBJECTS.items() for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    after = server.scrape()
    for model in ("text_tokenizer", "text_encoder"):
        texts, batches = (
            total(after, name, model=model) - total(before, name, model=model)
            for name in ("nv_inference_count", "nv_inference_exec_count")
        )
        assert texts == 30 * len(threads) and batches < texts, f"{model}: {batches} batches for {texts} texts"


def test_text_example_commands(server):
    """The commands of the guide run, in their order, with the server of this test, and print what the guide shows."""
    make_and_ask, shown, curl = of_test("test_text_example_commands", GUIDE)
    install, make, serve, ask_command = commands(make_and_ask)
    assert install == f"pip install {' '.join((TEXT / 'requirements.txt').read_text().split())}"
    assert make.split() == ["python3", "examples/text/make_models.py"]
    assert serve == "pharos --model-repository examples/text/models"
    texts = re.findall(r'"([^"]*)"', ask_command)
    assert run(TEXT / "ask.py", "--url", f"http://{server.http}", *texts) == shown.text
    command = curl.text.replace("localhost:8000", server.http).replace("curl ", "curl -s ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["outputs"][0]["data"][0].endswith(":0:billing"), done.stdout + done.stderr


def test_text_guide_quotes_the_example():
    """The code and the configuration of the guide are those of the example."""
    files = [path.read_text() for path in (TEXT / "models").rglob("*") if path.suffix in (".py", ".pbtxt")]
    for block in of_test("test_text_guide_quotes_the_example", GUIDE):
        assert any(block.text in text for text in files), f"{block.place} differs from the example"
