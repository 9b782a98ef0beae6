"""The guides of text models: the example `examples/text` with its scripts and its models under load, and the commands for the backend `text`."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from documents.document_blocks import commands, curl_at, of_test
from harness.server import ROOT, Server, binary, total
from harness.text_models import TextModel, needs_text

TEXT = ROOT / "examples/text"
GUIDE = "guides/text-ensemble.md"
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


# The backend `text`.


def folder_of_models(repository: Path) -> Path:
    """Makes the models that the examples of the guide name."""
    TextModel(repository / "minilm/1").sentence_transformer()
    TextModel(repository / "reranker/1", "BertForSequenceClassification", ["LABEL_0"], "text")
    TextModel(repository / "subjects/1", "BertForSequenceClassification", ["billing", "delivery", "technical"], "text")
    TextModel(repository / "names/1", "BertForTokenClassification", ["O", "B-LOC", "I-LOC"], "tokens")
    TextModel(repository / "masks/1", "BertForMaskedLM", head="tokens")
    return repository


@needs_text
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_guide_of_text_models(start, tmp_path):
    """The commands are answered, each in the form of its path, and the clients get their vectors."""
    shell, of_openai, of_langchain = of_test("test_the_guide_of_text_models")
    server = start([], repository=folder_of_models(tmp_path / "models"))
    answers = []
    for command in re.split(r"\n(?=curl )", shell.text.strip()):
        done = subprocess.run(curl_at(command, server), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        answers.append(json.loads(done.stdout))
    vectors, ranks, scores, classes, spans, predictions, similar, tokens, rows, label = answers
    assert len(vectors["data"]) == 2 and len(ranks["results"]) == 2 and len(scores["data"]) == 2
    assert classes["data"][0]["label"] in ("billing", "delivery", "technical")
    assert all(span["entity_group"] == "LOC" for span in spans) and len(predictions) == 3 and len(similar) == 2
    assert tokens["count"] == len(tokens["token_strs"])
    np.testing.assert_allclose(rows["predictions"][0]["embedding"], vectors["data"][0]["embedding"], atol=1e-6)
    assert label["outputs"][0]["data"][0] in ("billing", "delivery", "technical")
    count, used = printed(of_openai.text, server).split()
    assert (int(count), int(used)) == (2, vectors["usage"]["prompt_tokens"])
    if importlib.util.find_spec("langchain_openai"):
        assert printed(of_langchain.text, server) == "2\n"


def printed(program: str, server) -> str:
    """Returns what a program of the guide prints."""
    done = subprocess.run(
        [sys.executable, "-c", program.replace("localhost:8000", server.http)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_text
def test_a_configuration_of_a_text_model(start, tmp_path):
    """The pooling is that of the configuration, and long texts are cut off without a field of the request."""
    (block,) = of_test("test_a_configuration_of_a_text_model")
    model = TextModel(tmp_path / "models/minilm/1").sentence_transformer()
    (tmp_path / "models/minilm/config.pbtxt").write_text(block.text)
    server = start([], repository=tmp_path / "models")
    status, answer = server.ask("POST", "/v1/embeddings", json.dumps({"input": ["an app", "an app " * 100]}))
    assert status == 200, answer
    vector = json.loads(answer)["data"][0]["embedding"]
    first = model.hidden("an app")[0]
    np.testing.assert_allclose(vector, first / np.linalg.norm(first), atol=1e-5)
    assert total(server.scrape(), "pharos_text_truncated_inputs_total", model="minilm") == 1
