"""A trained model, all-MiniLM-L6-v2: its vectors are those of sentence-transformers (recorded by `tests/text/record_minilm.py`), and
those of its graph, which the tokenizer's library and ONNX Runtime compute here."""

import base64
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from tokenizers import Tokenizer

from backends.minilm import home, missing
from harness.server import Server
from harness.text_models import needs_text
from harness.tract import ONNX_BACKENDS

pytestmark = [needs_text, pytest.mark.peers, pytest.mark.skipif(missing() != "", reason=missing())]
FOLDER = home() / "all-MiniLM-L6-v2"
GOLDEN = Path(__file__).with_name("golden_minilm.json")
LIMIT = 256
"""The most tokens of a text: `max_seq_length` of `sentence_bert_config.json`."""
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
"""The example in the documentation of sentence-transformers, and its result."""
ANSWERS = {
    "How do I get my money back?": "Refunds are paid to the card that was charged.",
    "Which city is the seat of the German government?": "Berlin is the capital of Germany.",
    "My computer does not turn on": "Check whether the power cord of the machine is plugged in.",
    "What should a cat eat?": "Kittens need food with much protein.",
    "How far away are the stars?": "Light from the nearest sun beyond ours travels for four years.",
    "Recipe for bread": "Mix flour, water, yeast and salt, and bake the dough.",
    "the painter of the Mona Lisa": "Leonardo da Vinci is known for his portraits.",
    "symptoms of influenza": "Fever, cough and a sore throat are signs of the flu.",
}
"""Questions, and the answer to each, with few common words."""


@pytest.fixture(scope="module", params=ONNX_BACKENDS)
def served(request, tmp_path_factory):
    """`pharos serve` of the directory, which this engine computes."""
    server = Server(tmp_path_factory.mktemp("minilm"), [])
    server.command[1:1] = ["serve", str(FOLDER)]
    if request.param == "tract":
        # A machine without ONNX Runtime.
        server.environment |= {"PATH": "/usr/bin:/bin", "ORT_DYLIB_PATH": ""}
    with server as running:
        assert f"engine=text on {request.param}" in running.log.read_text()
        yield running


@pytest.fixture(scope="module")
def recorded() -> tuple:
    """Texts, and the vectors that sentence-transformers makes of them."""
    golden = json.loads(GOLDEN.read_text())
    return golden["texts"], np.array([np.frombuffer(base64.b64decode(one), "<f4") for one in golden["vectors"]])


def ask(server, path: str, **body):
    """Sends JSON; returns the JSON of the answer, which must be a success."""
    status, answer = server.ask("POST", path, json.dumps(body))
    assert status == 200, answer
    return json.loads(answer)


def computed(file: str, texts: list) -> np.ndarray:
    """Returns the vectors of texts, each computed by itself with a graph of the directory: the mean of the tokens' vectors, of length 1."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LIMIT)
    session = onnxruntime.InferenceSession(str(FOLDER / file), providers=["CPUExecutionProvider"])
    found = []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids])
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        mean = session.run(["last_hidden_state"], inputs)[0][0].mean(axis=0)
        found.append(mean / np.linalg.norm(mean))
    return np.array(found)


def embeddings(server, texts: list) -> np.ndarray:
    """Returns the vectors of a request; long texts are cut off. OpenAI's API has no empty texts, which the protocol of tensors accepts."""
    rows = [len(texts), 1]
    inputs = [{"name": "text", "datatype": "BYTES", "shape": rows, "data": texts}]
    inputs.append({"name": "truncate_prompt_tokens", "datatype": "INT32", "shape": rows, "data": [-1] * len(texts)})
    (model,) = server.index()
    answer = ask(server, f"/v2/models/{model}/infer", inputs=inputs, outputs=[{"name": "embedding"}])
    return np.array(answer["outputs"][0]["data"], np.float32).reshape(len(texts), -1)


def check_cosines(texts: list, got: np.ndarray, wanted: np.ndarray, least: float = 0.99999):
    """Asserts that vectors have the length 1 and the direction of others."""
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, rtol=1e-5)
    cosines = (got * wanted).sum(axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosines.min() >= least, dict(zip(texts, cosines.tolist(), strict=True))


def test_vectors_of_sentence_transformers(served, recorded):
    """Short and long texts in a request, which are padded or computed in several runs."""
    texts, wanted = recorded
    check_cosines(texts, embeddings(served, texts), wanted)


def test_vectors_of_the_graph(served, recorded):
    texts, _ = recorded
    texts = [*texts, *SENTENCES, *ANSWERS, *ANSWERS.values()]
    check_cosines(texts, embeddings(served, texts), computed("onnx/model.onnx", texts))


def test_published_similarities(served):
    """To the four digits that are published."""
    for sentence, wanted in zip(SENTENCES, SIMILARITIES, strict=True):
        got = ask(served, "/similarity", inputs={"source_sentence": sentence, "sentences": SENTENCES})
        np.testing.assert_allclose(got, wanted, atol=0.6e-4)


def test_answers_are_nearest_to_their_questions(served):
    """The meaning of texts decides, in the order of `/v1/rerank` and by itself: no other answer is as near to a question."""
    answers = list(ANSWERS.values())
    for number, question in enumerate(ANSWERS):
        results = ask(served, "/v1/rerank", query=question, documents=answers)["results"]
        assert results[0]["index"] == number, (question, results)
    vectors = embeddings(served, [*ANSWERS, *answers])
    cosines = vectors[: len(answers)] @ vectors[len(answers) :].T
    assert (cosines.argmax(axis=1) == np.arange(len(answers))).all(), cosines
    assert cosines.diagonal().mean() > cosines[~np.eye(len(answers), dtype=bool)].mean() + 0.3, cosines


def test_weights_of_eight_bits(tmp_path, recorded):
    """A graph that others exported, chosen by `dtype`. Its scales depend on all texts of a run: each request has one text."""
    (tmp_path / "models/minilm").mkdir(parents=True)
    (tmp_path / "models/minilm/1").symlink_to(FOLDER)
    (tmp_path / "models/minilm/config.pbtxt").write_text('parameters { key: "dtype" value: { string_value: "int8" } }')
    texts, whole = recorded
    with Server(tmp_path, [tmp_path / "models"]) as server:
        got = np.concatenate([embeddings(server, [text]) for text in texts])
    check_cosines(texts, got, computed("onnx/model_int8.onnx", texts))
    check_cosines(texts, got, whole, 0.98)
