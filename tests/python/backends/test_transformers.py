"""Models of transformers: BERT, RoBERTa, XLM-RoBERTa, MPNet and DeBERTa, each for every task. The results are those of transformers and
sentence-transformers.

The models and results are recorded (`golden_transformers.tar.xz`). `make test-transformers` makes them again with the installed
versions, which PHAROS_TRANSFORMERS names.
"""

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from harness.server import Server
from harness.text_models import needs_text
from harness.tract import ONNX_BACKENDS

RECORDED = Path(__file__).with_name("golden_transformers.tar.xz")
FAMILIES = ["bert", "roberta", "xlm_roberta", "mpnet", "deberta"]
pytestmark = needs_text


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The directory of the models."""
    own = os.environ.get("PHAROS_TRANSFORMERS")
    if own:
        return Path(own)
    folder = tmp_path_factory.mktemp("transformers")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module", params=ONNX_BACKENDS)
def transformers(request, made, tmp_path_factory):
    """A server with the models, which this engine computes, and their results."""
    folder = tmp_path_factory.mktemp("served")
    for place in made.iterdir():
        if place.is_dir() and not place.name.startswith("."):
            (folder / "models" / place.name).mkdir(parents=True)
            (folder / "models" / place.name / "1").symlink_to(place)
    server = Server(folder, [folder / "models"])
    if request.param == "tract":
        # A machine without ONNX Runtime.
        server.environment |= {"PATH": "/usr/bin:/bin", "ORT_DYLIB_PATH": ""}
    with server as running:
        assert f"engine=text on {request.param}" in running.log.read_text()
        yield running, json.loads((made / "expected.json").read_text())


def post(server, path: str, body: dict):
    """Sends a request; returns its response."""
    status, answer = server.ask("POST", path, json.dumps(body))
    assert status == 200, answer
    return json.loads(answer)


def close(one, other):
    """Asserts that scores are equal but for their last digits."""
    np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors(transformers, family):
    """The cosine with sentence-transformers' vector, for pooling and normalisation of the files, long texts and prompts."""
    server, expected = transformers
    name = f"{family}_embed"
    wanted = np.array(expected[name]["vectors"])
    texts = expected[name]["texts"]
    # OpenAI's API has no empty texts, which the others accept.
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}]
    inputs.append({"name": "truncate_prompt_tokens", "datatype": "INT32", "shape": [len(texts), 1], "data": [-1] * len(texts)})
    answer = post(server, f"/v2/models/{name}/infer", {"inputs": inputs, "outputs": [{"name": "embedding"}]})
    got = np.array(answer["outputs"][0]["data"]).reshape(wanted.shape)
    cosines = (got * wanted).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosines.min() > 0.99999, dict(zip(texts, cosines))
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), np.linalg.norm(wanted, axis=1), rtol=1e-4)
    answer = post(server, "/v1/embeddings", {"model": name, "input": texts[:2], "prompt_name": "query", "truncate_prompt_tokens": -1})
    close([one["embedding"] for one in answer["data"]], expected[name]["queries"])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores(transformers, family):
    """The scores of sentence-transformers' CrossEncoder."""
    server, expected = transformers
    pairs, scores = expected[f"{family}_score"].values()
    body = {"model": f"{family}_score", "text_1": [one for one, _ in pairs], "text_2": [other for _, other in pairs], "truncate_prompt_tokens": -1}
    answer = post(server, "/v1/score", body)
    close([one["score"] for one in answer["data"]], scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes(transformers, family):
    """The labels and scores of the pipeline `text-classification`."""
    server, expected = transformers
    texts, wanted = expected[f"{family}_classify"].values()
    answer = post(server, "/predict", {"model": f"{family}_classify", "inputs": [[text] for text in texts], "truncate": True})
    for got, classes in zip(answer, wanted, strict=True):
        assert [one["label"] for one in got] == sorted(classes, key=classes.get, reverse=True)
        close([one["score"] for one in got], sorted(classes.values(), reverse=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_spans(transformers, family):
    """The spans of the pipeline `token-classification`."""
    server, expected = transformers
    texts, wanted = expected[f"{family}_tokens"].values()
    answer = post(server, "/predict", {"model": f"{family}_tokens", "inputs": [[text] for text in texts]})
    for text, got, spans in zip(texts, answer, wanted, strict=True):
        keys = ("entity_group", "word", "start", "end")
        assert [[span[key] for key in keys] for span in got] == [[span[key] for key in keys] for span in spans], text
        close([span["score"] for span in got], [span["score"] for span in spans])


@pytest.mark.parametrize("family", FAMILIES)
def test_predictions(transformers, family):
    """The predictions of the pipeline `fill-mask`, for a text with one mask and one with two."""
    server, expected = transformers
    texts, wanted = expected[f"{family}_mask"].values()
    for text, predictions in zip(texts, wanted, strict=True):
        got = post(server, "/predict", {"model": f"{family}_mask", "inputs": text})
        flat = [predictions] if isinstance(predictions[0], dict) else predictions
        for own, other in zip([got] if isinstance(got[0], dict) else got, flat, strict=True):
            assert [one["token"] for one in own] == [one["token"] for one in other]
            close([one["score"] for one in own], [one["score"] for one in other])
            assert [one["token_str"] for one in own] == [one["token_str"] for one in other]
            if flat[0] is predictions:
                assert [one["sequence"] for one in own] == [one["sequence"] for one in other]
