"""The backend `text` behind every interface: OpenAI's and vLLM's, text-embeddings-inference's, KServe's and gRPC. The graphs are small
ones whose results numpy computes (`harness/text_models.py`)."""

import base64
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness.processes import held, worker_model
from harness.server import Server, binary, total
from harness.statistics import until_received
from harness.text_models import PROGRAM, SENTENCES, TextModel, byte_pairs, graph, needs_text, sigmoid, softmax, unigram, word_piece
from harness.waiting import DEADLINE_S, eventually, join_all
from harness.wire import tensor

pytestmark = needs_text
KINDS = {"word_piece": word_piece, "byte_pairs": byte_pairs, "unigram": unigram}
LIMIT = 64
"""The most tokens of a text."""
MOST_BYTES = 1 << 20
"""The most bytes of a text."""
PROMPTS = {"query": "the query: ", "document": "an answer: "}
LABELS = ["billing", "delivery", "technical"]
ENTITIES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
LENIENT = ["--exit-on-error=false", "--strict-readiness=false"]
WORDS = "the parcel has not arrived and an app shows error after each update capital of germany paris zzz telephone".split()


def parameters(**values) -> str:
    """Returns a configuration with these parameters."""
    return "".join(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in values.items())


def embedder(folder, kind="word_piece", **config) -> TextModel:
    """Returns a model that embeds."""
    return TextModel(folder, tokenizer=KINDS[kind](), **config).sentence_transformer()


def named_entities(folder) -> TextModel:
    """Returns a model that finds spans."""
    model = TextModel(folder, "BertForTokenClassification", ENTITIES, "tokens")
    model.write("tokenizer_config.json", {"model_max_length": LIMIT, "unk_token": "[UNK]"})
    return model


TASKS = {
    "embed": embedder,
    "score": lambda folder: TextModel(folder, "BertForSequenceClassification", ["LABEL_0"], "text"),
    "classify": lambda folder: TextModel(folder, "BertForSequenceClassification", LABELS, "text"),
    "token_classify": named_entities,
    "fill_mask": lambda folder: TextModel(folder, "BertForMaskedLM", head="tokens"),
}
"""A model of each task, in a folder."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    """The models of the server, by their names."""
    folder = tmp_path_factory.mktemp("models")

    def at(name: str, **settings):
        (folder / name / "1").mkdir(parents=True)
        if settings:
            (folder / name / "config.pbtxt").write_text(parameters(**settings))
        return folder / name / "1"

    found = {name: make(at(name)) for name, make in TASKS.items()}
    found["word_piece"] = found["embed"]
    found["embed"].write("config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    found["byte_pairs"] = embedder(at("byte_pairs", accept_token_ids="true"), "byte_pairs")
    found["unigram"] = embedder(at("unigram", auto_truncate="true"), "unigram")
    found["matryoshka"] = embedder(at("matryoshka"), matryoshka_dimensions=[4, 8])
    found["raw"] = TextModel(at("raw")).sentence_transformer(normalize=False)
    found["multi"] = TextModel(
        at("multi"), "BertForSequenceClassification", LABELS, "text", problem_type="multi_label_classification"
    )
    named = {"labels": json.dumps(["x", "y", "z"]).replace('"', '\\"')}
    found["named"] = TextModel(at("named", **named), "BertForSequenceClassification", LABELS, "text")
    found["counted"] = embedder(at("counted"))
    found["small_runs"] = embedder(at("small_runs", max_batch_tokens="16"))
    found["bare_spans"] = TextModel(at("bare_spans"), "BertForTokenClassification", ["PER", "LOC"], "tokens")
    # The graph has no vector for the last token of the vocabulary.
    found["short_table"] = model = embedder(at("short_table"))
    model.tokenizer.add_tokens(["absent"])
    model.tokenizer.save(str(model.folder / "tokenizer.json"))
    ways = {f"pooling_mode_{way}": True for way in ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")}
    found["ways"] = TextModel(at("ways")).sentence_transformer(normalize=False, **ways)
    found["last"] = TextModel(at("last", pooling="last", normalize="true"))
    return found


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A server with all models."""
    repository = models["embed"].folder.parent.parent
    with Server(tmp_path_factory.mktemp("served"), [repository]) as running:
        yield running


@pytest.fixture
def client(server):
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="x", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def post(server, path: str, **body):
    """Sends JSON; returns the status and the JSON of the answer."""
    status, text = server.ask("POST", path, json.dumps(body))
    return status, json.loads(text)


def ask(server, path: str, **body):
    """Sends JSON; returns the JSON of the answer, which must be a success."""
    status, answer = post(server, path, **body)
    assert status == 200, answer
    return answer


def infer(server, model: str, texts: list, **inputs):
    """Returns the outputs of an inference by their names; `inputs` are further ones, each with its datatype and one value for all."""
    rows = [len(texts), 1]
    tensors = [tensor("text", "BYTES", rows, texts)]
    tensors += [tensor(name, datatype, rows, [value] * len(texts)) for name, (datatype, value) in inputs.items()]
    status, answer = server.infer(model, {"inputs": tensors})
    assert status == 200, answer
    return {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]}


def vectors(answer: dict) -> list:
    """Returns the vectors of an answer in OpenAI's form, which are in the order of the request."""
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


def close(got, wanted, tolerance=1e-5):
    """Asserts that numbers are equal but for their last digits."""
    np.testing.assert_allclose(np.array(got, float), np.array(wanted, float), atol=tolerance)


def text_of(words: int, seed: int = 0) -> str:
    """Returns a text with this many words."""
    return " ".join(random.Random(seed * 1000 + words).choices(WORDS, k=words))


def count(model: TextModel, *texts, pair=None) -> int:
    """Returns the number of tokens of texts."""
    return sum(len(model.tokenizer.encode(text, pair).ids) for text in texts)


# Embeddings.


@pytest.mark.smoke
def test_vectors_in_the_order_of_the_texts(server, models, client):
    """Each text of a request has the vector that it has alone. The client asks for base64 by itself."""
    model = models["embed"]
    texts = [text_of(number % 20, number) or "x" for number in (1, 19, 3, 0, 12, 7)]
    answer = client.embeddings.create(model="embed", input=texts)
    for text, one in zip(texts, answer.data, strict=True):
        close(one.embedding, model.embedding(text))
        close(vectors(ask(server, "/v1/embeddings", model="embed", input=text))[0], model.embedding(text))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == count(model, *texts)


def test_base64_is_floats_in_little_endian_order(server, models):
    """Clients in other languages decode it themselves."""
    answer = ask(server, "/v1/embeddings", model="embed", input="a parcel", encoding_format="base64")
    got = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    close(got, models["embed"].embedding("a parcel"))


@pytest.mark.parametrize(("name", "number"), [("embed", 300), ("embed", 2048), ("small_runs", 300)])
def test_many_texts_in_a_request(server, models, name, number):
    texts = [text_of(1 + at % 23, at % 7) for at in range(number)]
    answer = ask(server, "/v1/embeddings", model=name, input=texts)
    close(vectors(answer), [models[name].embedding(text) for text in texts])
    assert answer["usage"]["prompt_tokens"] == count(models[name], *texts)


def test_rows_of_an_inference(server, models):
    """A batch has at most 64 rows; more are an error with the limit."""
    texts = [text_of(at % 30 + 1) for at in range(64)]
    found = infer(server, "embed", texts)
    close(found["embedding"], [models["embed"].embedding(text) for text in texts])
    assert [row[0] for row in found["num_input_tokens"]] == [count(models["embed"], text) for text in texts]
    status, answer = server.infer("embed", {"inputs": [tensor("text", "BYTES", [65, 1], ["a"] * 65)]})
    assert status == 400 and "64" in answer["error"], answer


def test_the_length_of_vectors(server, models):
    """The field of a request decides, or else the files of the model."""
    for name in ("embed", "raw"):
        for normalize in (None, True, False):
            more = {} if normalize is None else {"normalize": normalize}
            got = vectors(ask(server, "/v1/embeddings", model=name, input="a parcel", **more))[0]
            close(got, models[name].embedding("a parcel", normalize=name == "embed" if normalize is None else normalize))
            if more:
                close(infer(server, name, ["a parcel"], normalize=("BOOL", normalize))["embedding"][0], got)


def test_pooling_of_the_files_and_the_configuration(server, models):
    """Several ways are joined in the order of sentence-transformers."""
    hidden = models["ways"].hidden("the parcel has arrived")
    rank = np.arange(1, len(hidden) + 1)[:, None]
    wanted = [hidden[0], hidden.max(0), hidden.sum(0) / len(hidden) ** 0.5, (hidden * rank).sum(0) / rank.sum(), hidden[-1]]
    # A padded batch has the same vectors.
    answer = ask(server, "/v1/embeddings", model="ways", input=["the parcel has arrived", text_of(12)])
    close(vectors(answer)[0], np.concatenate(wanted), 1e-4)
    last = models["last"].hidden("a parcel")[-1]
    close(vectors(ask(server, "/v1/embeddings", model="last", input="a parcel"))[0], last / np.linalg.norm(last))


def test_shorter_vectors_of_models_that_were_trained_for_them(server, models, client):
    whole = models["matryoshka"].embedding("a parcel")
    got = client.embeddings.create(model="matryoshka", input="a parcel", dimensions=4).data[0].embedding
    close(got, whole[:4] / np.linalg.norm(whole[:4]))
    close(ask(server, "/embed", model="matryoshka", inputs="a parcel", dimensions=8)[0], whole[:8] / np.linalg.norm(whole[:8]))
    with pytest.raises(openai.BadRequestError, match=r"dimensions 5 is not available.*allowed are \[4, 8\]") as error:
        client.embeddings.create(model="matryoshka", input="a", dimensions=5)
    assert error.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError, match="was not trained for shorter vectors"):
        client.embeddings.create(model="embed", input="a", dimensions=4)


def test_prompts_of_the_model(server, models):
    """The text of a prompt precedes each text; an unknown name is an error with all names."""
    wanted = models["embed"].embedding(PROMPTS["query"] + "a parcel")
    for path, body in [("/v1/embeddings", {"input": ["a parcel"]}), ("/embed", {"inputs": ["a parcel"]})]:
        answer = ask(server, path, model="embed", prompt_name="query", **body)
        close(answer[0] if path == "/embed" else vectors(answer)[0], wanted)
    close(infer(server, "embed", ["a parcel"], prompt_name=("BYTES", "query"))["embedding"][0], wanted)
    status, answer = post(server, "/v1/embeddings", model="embed", input="a", prompt_name="other")
    assert status == 400 and "prompt_name is 'other'; the prompts of the model are [document, query]" in answer["error"]["message"]


def test_an_empty_text(server, models):
    """It has the special tokens of the model; without them it has none, which is an error. OpenAI's API has no empty texts."""
    close(infer(server, "embed", ["", "a"])["embedding"][0], models["embed"].embedding(""))
    rows = [tensor("text", "BYTES", [1, 1], [""]), tensor("add_special_tokens", "BOOL", [1, 1], [False])]
    status, answer = server.infer("embed", {"inputs": rows})
    assert status == 400 and "no tokens" in answer["error"], answer
    for body in ({"input": ""}, {"input": ["a", ""]}, {"input": []}):
        status, answer = post(server, "/v1/embeddings", model="embed", **body)
        assert (status, answer["error"]["param"]) == (400, "input")


def test_texts_without_special_tokens(server, models):
    model = models["embed"]
    encoding = model.tokenizer.encode("a parcel", add_special_tokens=False)
    wanted = model.weights.hidden(encoding.ids, encoding.type_ids).mean(0)
    answer = ask(server, "/v1/embeddings", model="embed", input="a parcel", add_special_tokens=False)
    close(vectors(answer)[0], wanted / np.linalg.norm(wanted))


def test_tokens_in_place_of_texts(server, models, client):
    """They are refused with advice, unless the configuration accepts them."""
    for tokens in ([5, 6], [[5, 6], [7]]):
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False.*'accept_token_ids'"):
            client.embeddings.create(model="embed", input=tokens)
    model = models["byte_pairs"]
    lists = [model.tokenizer.encode(text).ids for text in ("a parcel", "the capital of Germany")]
    answer = client.embeddings.create(model="byte_pairs", input=lists)
    for tokens, one in zip(lists, answer.data, strict=True):
        wanted = model.weights.hidden(tokens, [0] * len(tokens)).mean(0)
        close(one.embedding, wanted / np.linalg.norm(wanted))
    assert answer.usage.prompt_tokens == sum(map(len, lists))
    cut = ask(server, "/v1/embeddings", model="byte_pairs", input=[5] * 100, truncate_prompt_tokens=3)
    assert cut["usage"]["prompt_tokens"] == 3
    size = model.tokenizer.get_vocab_size()
    with pytest.raises(openai.BadRequestError, match=f"token id {size} is not allowed: the vocabulary of the model has {size} tokens"):
        client.embeddings.create(model="byte_pairs", input=[5, size])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens, and a text has 65") as error:
        client.embeddings.create(model="byte_pairs", input=[5] * 65)
    assert error.value.code == "context_length_exceeded"


def test_texts_and_tokens_of_concurrent_requests(server, models):
    """Requests with different inputs wait for the same worker, and each has its own answer."""
    model = models["byte_pairs"]

    def embed(number: int):
        text = text_of(1 + number % 9, number)
        tokens = model.tokenizer.encode(text).ids
        forms = [
            {"input": text}, {"input": tokens}, {"input": [text, "a"], "truncate_prompt_tokens": 64}, {"input": text, "normalize": False},
        ]  # fmt: skip
        answer = ask(server, "/v1/embeddings", model="byte_pairs", **forms[number % 4])
        close(vectors(answer)[0], model.embedding(text, normalize=number % 4 != 3))

    with ThreadPoolExecutor(16) as pool, held(server, "byte_pairs"):
        before = received_requests(server, "byte_pairs")
        asked = [pool.submit(embed, number) for number in range(16)]
        until_received(server, "byte_pairs", before + 16)
    for one in asked:
        one.result()


def received_requests(server, model: str) -> float:
    """Returns how many requests of the model the scheduler has received."""
    return total(server.scrape(), "ts_inference_requests_total", model_name=model)


# Long texts.


def truncated(model: TextModel, text: str, most: int, pair=None):
    """Returns the encoding of a text, of which a part is cut off."""
    model.tokenizer.enable_truncation(most)
    try:
        return model.tokenizer.encode(text, pair)
    finally:
        model.tokenizer.no_truncation()


def cut_embedding(model: TextModel, text: str, most: int = LIMIT) -> np.ndarray:
    """Returns the vector of a text, of which a part is cut off."""
    encoding = truncated(model, text, most)
    vector = model.weights.hidden(encoding.ids, encoding.type_ids).mean(0)
    return vector / np.linalg.norm(vector)


def test_long_texts_are_refused(server, models, client):
    """The error has both numbers, and the code by which clients of OpenAI find it."""
    text = text_of(80)
    tokens = count(models["embed"], text)
    message = f"maximum context length is 64 tokens, and a text has {tokens} tokens"
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.embeddings.create(model="embed", input=["a", text])
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    status, answer = server.infer("embed", {"inputs": [tensor("text", "BYTES", [1, 1], [text])]})
    assert status == 400 and message in answer["error"]
    for path, body in [("/v1/rerank", {"query": text, "documents": ["a"]}), ("/v1/score", {"text_1": "a", "text_2": text})]:
        status, answer = post(server, path, model="score", **body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_cut_off(server, models, kind):
    """-1 is the context of the model. The special tokens stay."""
    model, text = models[kind], text_of(80)
    name = "embed" if kind == "word_piece" else kind
    for wanted, most in [(-1, LIMIT), (LIMIT, LIMIT), (10, 10), (3, 3), (2, 2)]:
        answer = ask(server, "/v1/embeddings", model=name, input=[text, "a"], truncate_prompt_tokens=wanted)
        close(vectors(answer)[0], cut_embedding(model, text, most))
        assert answer["usage"]["prompt_tokens"] == most + min(most, count(model, "a"))


def test_a_limit_below_the_special_tokens(server):
    """Never more tokens than the client allows."""
    status, answer = post(server, "/v1/embeddings", model="embed", input="a parcel", truncate_prompt_tokens=1)
    assert status == 400 or answer["usage"]["prompt_tokens"] <= 1, answer


def test_long_pairs_are_cut_off(server, models):
    """The longer text is cut off first, as in the tokenizer's library."""
    model = models["score"]
    for first, second in [(5, 90), (90, 5), (70, 90)]:
        query, document = text_of(first), text_of(second)
        encoding = truncated(model, query, LIMIT, document)
        wanted = sigmoid(model.weights.hidden(encoding.ids, encoding.type_ids)[0] @ model.weights.classes)
        answer = ask(server, "/v1/score", model="score", text_1=query, text_2=document, truncate_prompt_tokens=-1)
        close(answer["data"][0]["score"], wanted[0])
        assert answer["usage"]["prompt_tokens"] == LIMIT


def test_long_texts_are_cut_off_by_default(server, models):
    """`auto_truncate` applies to requests without `truncate_prompt_tokens`."""
    text = text_of(80)
    close(vectors(ask(server, "/v1/embeddings", model="unigram", input=text))[0], cut_embedding(models["unigram"], text))
    answer = ask(server, "/v1/embeddings", model="unigram", input=text, truncate_prompt_tokens=9)
    assert answer["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize("wanted", [0, -2, -(2**31), 2**31, 2**63, 1.5, "5", True])
def test_wrong_limits_are_refused(server, wanted):
    status, answer = post(server, "/v1/embeddings", model="embed", input="a", truncate_prompt_tokens=wanted)
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
    if wanted in (0, -2, -(2**31)):
        rows = [tensor("text", "BYTES", [1, 1], ["a"]), tensor("truncate_prompt_tokens", "INT32", [1, 1], [wanted])]
        status, answer = server.infer("embed", {"inputs": rows})
        assert status == 400 and f"truncate_prompt_tokens {wanted} is not allowed" in answer["error"]


def test_a_limit_above_the_context(server):
    """Texts that fit are computed; longer ones are refused with the limit of the model."""
    assert post(server, "/v1/embeddings", model="embed", input="a", truncate_prompt_tokens=2**31 - 1)[0] == 200
    status, answer = post(server, "/v1/embeddings", model="embed", input=text_of(80), truncate_prompt_tokens=1000)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


# Scores.

DOCUMENTS = ["the capital of Germany", "an app", "the parcel has not arrived", "an app", "zzz"]


def test_documents_in_the_order_of_their_scores(server, models):
    """Equal documents keep their order."""
    model = models["score"]
    scores = [float(sigmoid(model.logits("where is it", text)[0])) for text in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda at: -scores[at])
    answer = ask(server, "/v1/rerank", model="score", query="where is it", documents=DOCUMENTS)
    assert [one["index"] for one in answer["results"]] == order
    close([one["relevance_score"] for one in answer["results"]], [scores[at] for at in order])
    assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[at] for at in order]
    tokens = sum(count(model, "where is it", pair=text) for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for path in ("/rerank", "/openai/v1/rerank"):
        few = ask(server, path, model="score", query="where is it", documents=DOCUMENTS, top_n=2, return_documents=False)
        assert [(one["index"], "document" in one) for one in few["results"]] == [(at, False) for at in order[:2]]
    assert len(ask(server, "/rerank", model="score", query="q", documents=DOCUMENTS, top_n=0)["results"]) == 5
    assert len(ask(server, "/rerank", model="score", query="q", documents=DOCUMENTS, top_n=2**31 - 1)["results"]) == 5


def test_scores_of_pairs(server, models):
    model = models["score"]
    answer = ask(server, "/v1/score", model="score", text_1=["a", "the app"], text_2=["b", "an error"])
    close([one["score"] for one in answer["data"]], [sigmoid(model.logits(*pair)[0]) for pair in [("a", "b"), ("the app", "an error")]])
    answer = ask(server, "/v1/score", model="score", text_1="the app", text_2=DOCUMENTS)
    close([one["score"] for one in answer["data"]], [sigmoid(model.logits("the app", text)[0]) for text in DOCUMENTS])
    rows = [tensor(name, "BYTES", [1, 1], [text]) for name, text in (("text", "a"), ("text_pair", "b"))]
    rows.append(tensor("raw_scores", "BOOL", [1, 1], [True]))
    status, answer = server.infer("score", {"inputs": rows})
    assert status == 200
    close([one for one in answer["outputs"] if one["name"] == "score"][0]["data"], [model.logits("a", "b")[0]])


def test_a_score_needs_two_texts(server):
    status, answer = server.infer("score", {"inputs": [tensor("text", "BYTES", [1, 1], ["a"])]})
    assert status == 400 and "'text_pair' is missing" in answer["error"]
    status, answer = post(server, "/v1/score", model="score", text_1="a")
    assert (status, answer["error"]["param"]) == (400, "text_2")
    status, answer = post(server, "/v1/score", model="score", text_1=["a", "b"], text_2=["a", "b", "c"])
    assert (status, answer["error"]["param"]) == (400, "text_1")


def test_scores_of_a_model_that_embeds(server, models):
    """They are cosines."""
    own = {text: models["embed"].embedding(text) for text in [*DOCUMENTS, "where is it"]}
    cosines = [float(own["where is it"] @ own[text]) for text in DOCUMENTS]
    answer = ask(server, "/v1/rerank", model="embed", query="where is it", documents=DOCUMENTS)
    close([one["relevance_score"] for one in answer["results"]], sorted(cosines, reverse=True))
    close(ask(server, "/similarity", model="embed", inputs={"source_sentence": "where is it", "sentences": DOCUMENTS}), cosines)


# Classes, spans and masks.


def test_classes(server, models):
    """vLLM's form, for one text and for several."""
    texts = ["the parcel", "an app shows an error", text_of(30)]
    wanted = softmax(np.array([models["classify"].logits(text) for text in texts]))
    answer = ask(server, "/v1/classify", model="classify", input=texts)
    close([one["probs"] for one in answer["data"]], wanted)
    assert [one["label"] for one in answer["data"]] == [LABELS[at] for at in wanted.argmax(1)]
    assert [(one["index"], one["num_classes"]) for one in answer["data"]] == [(at, 3) for at in range(3)]
    assert answer["usage"]["prompt_tokens"] == count(models["classify"], *texts)
    logits = ask(server, "/classify", model="classify", input=texts[0], use_activation=False)["data"][0]["probs"]
    close(logits, models["classify"].logits(texts[0]))
    found = infer(server, "classify", texts)
    close(found["probabilities"], wanted)
    assert [row[0] for row in found["label"]] == [LABELS[at] for at in wanted.argmax(1)]


def test_classes_that_do_not_exclude_each_other(server, models):
    wanted = sigmoid(models["multi"].logits("the parcel"))
    close(ask(server, "/v1/classify", model="multi", input="the parcel")["data"][0]["probs"], wanted)


def test_labels_of_the_configuration(server, models):
    best = int(models["named"].logits("the parcel").argmax())
    assert ask(server, "/v1/classify", model="named", input="the parcel")["data"][0]["label"] == "xyz"[best]


def test_classes_of_pairs(server, models):
    pair = tensor("text_pair", "BYTES", [1, 1], ["b"])
    status, answer = server.infer("classify", {"inputs": [tensor("text", "BYTES", [1, 1], ["a"]), pair]})
    assert status == 200, answer
    close(answer["outputs"][0]["data"], softmax(models["classify"].logits("a", "b")))


def spans(model: TextModel, text: str, labels=ENTITIES) -> list:
    """Returns the spans of a text as the strategy `simple` of transformers finds them."""
    encoding = model.tokenizer.encode(text)
    scores = softmax(model.token_logits(text))
    groups = []
    for at, token in enumerate(encoding.tokens):
        if encoding.special_tokens_mask[at]:
            continue
        label = labels[scores[at].argmax()]
        tag = label.removeprefix("B-").removeprefix("I-")
        if not groups or groups[-1][0] != tag or label.startswith("B-"):
            groups.append((tag, []))
        start, end = encoding.offsets[at]
        groups[-1][1].append((float(scores[at].max()), text[start:end] if token == "[UNK]" else token, start, end))
    return [
        {
            "entity_group": tag, "score": float(np.mean([one[0] for one in parts])), "start": parts[0][2], "end": parts[-1][3],
            "word": model.tokenizer.decoder.decode([one[1] for one in parts]),
        }
        for tag, parts in groups if tag != "O"
    ]  # fmt: skip


def check_spans(got: list, wanted: list):
    """Asserts that spans are equal but for the last digits of their scores."""
    without = lambda found: [{key: value for key, value in one.items() if key != "score"} for one in found]  # noqa: E731
    assert without(got) == without(wanted)
    close([one["score"] for one in got], [one["score"] for one in wanted])


def test_spans(server, models):
    """Places are those of characters, also after characters of several bytes, and unknown words are quoted."""
    texts = [*SENTENCES, "😀😀 Berlin \u0301e 漢字 ẞ", "x" * 101 + " Paris", "", "\u200d\u202e \x00 the"]
    model = models["token_classify"]
    answer = ask(server, "/predict", model="token_classify", inputs=[[text] for text in texts if text])
    for text, got in zip(filter(None, texts), answer, strict=True):
        check_spans(got, spans(model, text))
    found = infer(server, "token_classify", texts)["entities"]
    for text, (got,) in zip(texts, found, strict=True):
        check_spans(json.loads(got), spans(model, text))
    assert any(spans(model, text) for text in texts)


def test_unknown_words_without_the_configuration_of_the_tokenizer(server, models):
    """`tokenizer.json` has the token for unknown words too (`model.unk_token`)."""
    model = models["bare_spans"]
    texts = [f"{word} the {word}" for word in ("漢", "😀", "ж", "ж漢")]
    answer = ask(server, "/predict", model="bare_spans", inputs=[[text] for text in texts])
    for text, got in zip(texts, answer, strict=True):
        check_spans(got, spans(model, text, ["PER", "LOC"]))


def predictions(model: TextModel, text: str, number: int = 5) -> list:
    """Returns the predictions for each mask of a text."""
    ids = model.tokenizer.encode(text).ids
    scores = softmax(model.token_logits(text))
    found = []
    for at in (at for at, token in enumerate(ids) if token == model.tokenizer.token_to_id("[MASK]")):
        best = np.argsort(-scores[at], kind="stable")[:number]
        decode = model.tokenizer.decode
        found.append([
            {
                "score": float(scores[at][token]), "token": int(token), "token_str": decode([int(token)], skip_special_tokens=False),
                "sequence": decode([*ids[:at], int(token), *ids[at + 1 :]], skip_special_tokens=True),
            }
            for token in best
        ])  # fmt: skip
    return found


def test_masks(server, models):
    """One mask has a list, several have a list for each."""
    model = models["fill_mask"]
    one, two = "The [MASK] has not arrived.", "[MASK] is the capital of [MASK]"
    check_spans(ask(server, "/predict", model="fill_mask", inputs=one), predictions(model, one)[0])
    first, second = ask(server, "/predict", model="fill_mask", inputs=[[one], [two]], parameters={"top_k": 2})
    check_spans(first, predictions(model, one, 2)[0])
    for got, wanted in zip(second, predictions(model, two, 2), strict=True):
        check_spans(got, wanted)
    (got,) = infer(server, "fill_mask", [one], top_k=("INT32", 1))["predictions"][0]
    check_spans(json.loads(got), predictions(model, one, 1)[0])
    status, answer = post(server, "/predict", model="fill_mask", inputs="no mask")
    assert (status, answer["error_type"]) == (422, "Validation") and "no mask '[MASK]'" in answer["error"]


def test_numbers_of_predictions(server, models):
    """From 1 to 1,024; a small vocabulary has fewer."""
    size = models["fill_mask"].tokenizer.get_vocab_size()
    assert len(ask(server, "/predict", model="fill_mask", inputs="[MASK]", parameters={"top_k": 1024})) == size
    for wrong in (0, -1, 1025, 2**31 - 1, 2**31, 2**70):
        status, answer = post(server, "/predict", model="fill_mask", inputs="[MASK]", parameters={"top_k": wrong})
        assert (status, answer["error_type"]) == (422, "Validation"), answer


@pytest.mark.parametrize(
    ("path", "body", "task"),
    [
        ("/v1/embeddings", {"input": "a"}, "score"),
        ("/v1/classify", {"input": "a"}, "embed"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "classify"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "fill_mask"),
        ("/v1/embeddings", {"input": "a"}, "token_classify"),
    ],
)
def test_paths_of_other_tasks(server, path, body, task):
    """The error names the model and the path for it."""
    status, answer = post(server, path, model=task, **body)
    assert (status, answer["error"]["param"]) == (400, "model") and "see /" in answer["error"]["message"]


# Tokens.

RANGES = [
    (0x20, 0x7E), (0xC0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x587), (0x590, 0x5F4), (0x600, 0x6FF),
    (0x700, 0x74F), (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xE00, 0xE5B), (0xF00, 0xFFF), (0x10A0, 0x10FF), (0x1100, 0x11FF),
    (0x1200, 0x137F), (0x13A0, 0x13FF), (0x1780, 0x17FF), (0x1800, 0x18AF), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x20D0, 0x20FF),
    (0x2190, 0x21FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xFB1D, 0xFDFF), (0xFE00, 0xFE0F),
    (0xFF00, 0xFFEF), (0x10330, 0x1034F), (0x12000, 0x123FF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF),
    (0xE0001, 0xE007F), (0x00, 0x1F), (0x7F, 0x9F), (0x10FF00, 0x10FFFF),
]  # fmt: skip
"""Scripts, combining marks, directions of writing, variation selectors, controls, and characters of four bytes."""
SEQUENCES = [
    "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "👍🏽", "e\u0301\u0327\u0323", "\u202eabc\u202c", "\u2066שלום\u2069",
    "\ufeff", "\r\n", "\t ", "   ", "ﬁ", "Å", "①", "\u00ad",
    "[CLS]", "[MASK] ", "<mask>", "<s>", "</s>", "##a", "\u2581a", "Ġ", "\x00", "\ufffd", "ẞß", "İi", "ǅ", "́", "क्षि", "ｶﾞ",
]  # fmt: skip


def odd_texts(number: int, seed: int = 7) -> list:
    """Returns texts of characters and sequences that tokenizers treat differently."""
    source = random.Random(seed)
    found = list(SEQUENCES)
    while len(found) < number:
        parts = []
        for _ in range(source.randrange(1, 6)):
            first, last = source.choice(RANGES)
            word = "".join(chr(source.randint(first, last)) for _ in range(source.randrange(1, 8)))
            parts.append(source.choice([word, word, word, source.choice(SEQUENCES), source.choice(WORDS).title()]))
        found.append(source.choice(["", " ", " ", "\u3000"]).join(parts))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_library(server, models, kind):
    """Ids and texts of tokens in both forms, with special tokens and without them, and the way back."""
    tokenizer = models[kind].tokenizer
    name = "embed" if kind == "word_piece" else kind
    texts = odd_texts(400)
    for special in (True, False):
        lists = ask(server, "/tokenize", model=name, inputs=texts, add_special_tokens=special)
        for text, tokens in zip(texts, lists, strict=True):
            encoding = tokenizer.encode(text, add_special_tokens=special)
            assert [one["id"] for one in tokens] == encoding.ids, repr(text)
            assert [one["text"] for one in tokens] == [tokenizer.id_to_token(one) for one in encoding.ids], repr(text)
            # Special tokens in a text are another test.
            if not any(token in text for token in ("[CLS]", "[SEP]", "<s>", "</s>")):
                added = {0, len(tokens) - 1} if special else set()
                assert {at for at, one in enumerate(tokens) if one["special"]} == added, repr(text)
    encodings = [tokenizer.encode(text) for text in texts]
    for skip in (True, False):
        decoded = ask(server, "/decode", model=name, ids=[encoding.ids for encoding in encodings], skip_special_tokens=skip)
        assert decoded == [tokenizer.decode(encoding.ids, skip_special_tokens=skip) for encoding in encodings]
    for text, encoding in zip(texts[:60], encodings):
        answer = ask(server, "/tokenize", model=name, prompt=text, return_token_strs=True)
        assert (answer["tokens"], answer["token_strs"]) == (encoding.ids, [tokenizer.id_to_token(one) for one in encoding.ids]), repr(text)
        assert (answer["count"], answer["max_model_len"]) == (len(encoding.ids), LIMIT)
        bare = ask(server, "/v1/tokenize", model=name, content=text, add_special=False)
        assert bare["tokens"] == tokenizer.encode(text, add_special_tokens=False).ids
        back = ask(server, "/detokenize", model=name, tokens=encoding.ids)
        assert back["prompt"] == tokenizer.decode(encoding.ids, skip_special_tokens=False)


@pytest.mark.parametrize(("text", "added"), [("[CLS]", {0, 2}), ("[CLS] a", {0, 3}), ("a [SEP]", {0, 3})])
def test_special_tokens_in_a_text(server, text, added):
    """The tokens that the model adds are special."""
    (tokens,) = ask(server, "/tokenize", model="embed", inputs=[text])
    assert {at for at, one in enumerate(tokens) if one["special"]} == added


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_odd_texts(server, models, kind):
    """Texts of all scripts, computed together, and cut off where they are long."""
    texts = odd_texts(300, seed=8)
    answer = ask(server, "/embed", model="embed" if kind == "word_piece" else kind, inputs=texts, truncate=True)
    close(answer, [cut_embedding(models[kind], text) for text in texts], 1e-4)


def test_no_limit_applies_to_tokens_of_a_text(server, models):
    """`/tokenize` is for texts of any length: clients count with it."""
    text = text_of(500)
    assert ask(server, "/tokenize", model="embed", prompt=text)["count"] == count(models["embed"], text) > LIMIT


def test_wrong_tokens(server, models):
    size = models["embed"].tokenizer.get_vocab_size()
    status, answer = post(server, "/detokenize", model="embed", tokens=[size])
    assert status == 400 and f"token id {size} is not allowed" in answer["error"]["message"]
    for wrong in ([-1], [2**32], ["a"], [[1]], 5, [1.5], [None]):
        assert post(server, "/detokenize", model="embed", tokens=wrong)[0] == 400
        if wrong != [[1]]:
            status, answer = post(server, "/decode", model="embed", ids=wrong)
            assert (status, answer["error_type"]) == (422, "Validation")
    assert ask(server, "/detokenize", model="embed", tokens=[])["prompt"] == ""


# The API of text-embeddings-inference.


def test_embed(server, models):
    """Vectors have the length 1 unless a request has `normalize` false, also without the module Normalize."""
    model = models["embed"]
    close(ask(server, "/embed", model="embed", inputs="a parcel"), [model.embedding("a parcel")])
    texts = ["a parcel", text_of(20)]
    close(ask(server, "/embed", model="embed", inputs=texts), [model.embedding(text) for text in texts])
    close(ask(server, "/embed", model="embed", inputs=texts, normalize=False), [model.embedding(text, False) for text in texts], 1e-4)
    close(ask(server, "/embed", model="raw", inputs=texts), [models["raw"].embedding(text) for text in texts])
    cut = ask(server, "/embed", model="embed", inputs=text_of(80), truncate=True, truncation_direction="Right")
    close(cut, [cut_embedding(model, text_of(80))])


def test_rerank(server, models):
    model = models["score"]
    logits = [float(model.logits("where", text)[0]) for text in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda at: -logits[at])
    answer = ask(server, "/rerank", query="where", texts=DOCUMENTS)
    assert [(one["index"], "text" in one) for one in answer] == [(at, False) for at in order]
    close([one["score"] for one in answer], [sigmoid(logits[at]) for at in order])
    answer = ask(server, "/rerank", query="where", texts=DOCUMENTS, raw_scores=True, return_text=True)
    assert [one["text"] for one in answer] == [DOCUMENTS[at] for at in order]
    close([one["score"] for one in answer], [logits[at] for at in order])


def best_first(probabilities) -> list:
    """Returns labels and scores in the order of their scores."""
    return sorted(zip(LABELS, map(float, probabilities)), key=lambda one: -one[1])


def check_classes(got: list, probabilities):
    """Asserts that an answer has these probabilities, the greatest first."""
    wanted = best_first(probabilities)
    assert [one["label"] for one in got] == [label for label, _ in wanted]
    close([one["score"] for one in got], [score for _, score in wanted])


def test_predict(server, models):
    model = models["classify"]
    check_classes(ask(server, "/predict", model="classify", inputs="the parcel"), softmax(model.logits("the parcel")))
    check_classes(ask(server, "/predict", model="classify", inputs="the parcel", raw_scores=True), model.logits("the parcel"))
    check_classes(ask(server, "/predict", model="classify", inputs=["the", "app"]), softmax(model.logits("the", "app")))
    batch = ask(server, "/predict", model="classify", inputs=[["the", "app"], ["a", "b"]])
    for got, pair in zip(batch, [("the", "app"), ("a", "b")], strict=True):
        check_classes(got, softmax(model.logits(*pair)))
    batch = ask(server, "/predict", model="classify", inputs=[["the parcel"], ["an app"]])
    for got, text in zip(batch, ["the parcel", "an app"], strict=True):
        check_classes(got, softmax(model.logits(text)))


def test_texts_and_pairs_in_a_batch(server, models):
    """A text in a batch with pairs has the classes that it has alone."""
    model = models["classify"]
    batch = ask(server, "/predict", model="classify", inputs=[["the parcel"], ["a", "b"]])
    check_classes(batch[1], softmax(model.logits("a", "b")))
    check_classes(batch[0], softmax(model.logits("the parcel")))


def test_pairs_of_models_for_single_texts(server):
    status, answer = post(server, "/predict", model="fill_mask", inputs=["[MASK]", "b"])
    assert (status, answer["error_type"]) == (422, "Validation"), answer


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/embed", {"inputs": text_of(80)}, 413),
        ("/embed", {"inputs": ""}, 422),
        ("/embed", {"inputs": []}, 422),
        ("/embed", {}, 422),
        ("/embed", {"inputs": "a", "prompt_name": "other"}, 422),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, 422),
        ("/embed", {"inputs": "a", "normalize": "yes"}, 422),
        ("/embed", {"inputs": ["a"] * 2049}, 422),
        ("/embed", {"inputs": [1, 2]}, 422),
        ("/embed_sparse", {"inputs": "a"}, 501),
        ("/embed_all", {"inputs": "a"}, 501),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 422),
        ("/similarity", {"inputs": {"sentences": ["a"]}}, 422),
        ("/tokenize", {"inputs": 5}, 422),
        ("/decode", {"ids": "a"}, 422),
    ],
)
def test_errors_of_text_embeddings_inference(server, path, body, status):
    """The metrics count the status that the client gets."""
    counted = total(server.scrape(), "pharos_requests_total", code=str(status))
    got, answer = post(server, path, model="embed", **body)
    assert total(server.scrape(), "pharos_requests_total", code=str(status)) == counted + 1
    assert (got, answer["error_type"]) == (status, "Validation"), answer
    assert answer["error"] and set(answer) == {"error", "error_type"}


def test_unknown_models_of_text_embeddings_inference(server):
    status, answer = post(server, "/embed", model="absent", inputs="a")
    assert status == 404 and "absent" in answer["error"]
    status, answer = post(server, "/embed", inputs="a")
    assert status == 422 and "model is required" in answer["error"] and "matryoshka" in answer["error"]


@pytest.mark.parametrize("task", TASKS)
def test_the_root_with_a_model(server, models, task):
    """`POST /` runs the task of the model that the request names."""
    body = {"query": "a", "texts": ["b"]} if task == "score" else {"inputs": "the [MASK]"}
    ask(server, "/", model=task, **body)


# A server of one model, from its files alone.


def serve(tmp_path, place, *options) -> Server:
    """Returns a server of a path, started as `pharos serve PLACE`."""
    server = Server(tmp_path, [], options)
    server.command[1:1] = ["serve", str(place)]
    return server


@pytest.fixture(scope="module", params=TASKS)
def single(request, tmp_path_factory):
    """A server of a bare folder, the model, and its task."""
    folder = tmp_path_factory.mktemp("single")
    model = TASKS[request.param](folder / "my-model")
    with serve(folder, model.folder) as running:
        yield running, model, request.param


def test_the_root_and_the_information_of_a_model(single):
    """`GET /info`, `POST /` and `GET /v1/models` of a server of one model, whose name is that of its folder."""
    server, model, task = single
    information = json.loads(server.get("/info")[1])
    kinds = {"embed": "embedding", "score": "reranker"}
    assert list(information["model_type"]) == [kinds.get(task, "classifier")]
    assert (information["model_id"], information["max_input_length"]) == ("my-model", LIMIT)
    if task == "classify":
        assert information["model_type"]["classifier"]["id2label"] == {str(at): label for at, label in enumerate(LABELS)}
    match task:
        case "embed":
            close(ask(server, "/", inputs=["a", "b c"]), [model.embedding("a"), model.embedding("b c")])
            close(ask(server, "/embed", inputs="a"), [model.embedding("a")])
            answer = ask(server, "/", inputs={"source_sentence": "a", "sentences": ["a", "b"]})
            close(answer, [1, model.embedding("a") @ model.embedding("b")])
        case "score":
            answer = ask(server, "/", query="a", texts=["b"])
            close(answer[0]["score"], sigmoid(model.logits("a", "b")[0]))
        case "classify":
            check_classes(ask(server, "/", inputs="the parcel"), softmax(model.logits("the parcel")))
        case "token_classify":
            check_spans(ask(server, "/", inputs=SENTENCES[1]), spans(model, SENTENCES[1]))
        case "fill_mask":
            check_spans(ask(server, "/", inputs="the [MASK]"), predictions(model, "the [MASK]")[0])
    assert [one["id"] for one in ask(server, "/tokenize", inputs=["a b"])[0]] == model.tokenizer.encode("a b").ids
    ids = model.tokenizer.encode("the app").ids
    assert ask(server, "/decode", ids=ids) == [model.tokenizer.decode(ids)]


def test_the_client_of_hugging_face(single):
    """`huggingface_hub.InferenceClient` with the address of the server."""
    hub = pytest.importorskip("huggingface_hub")
    server, model, task = single
    client = hub.InferenceClient(model=f"http://{server.http}", token="x", timeout=DEADLINE_S)
    match task:
        case "embed":
            close(client.feature_extraction("a parcel"), [model.embedding("a parcel")])
            close(client.feature_extraction("a parcel", normalize=False), [model.embedding("a parcel", False)])
            close(client.feature_extraction(text_of(80), truncate=True), [cut_embedding(model, text_of(80))])
            own = model.embedding("a parcel")
            close(client.sentence_similarity("a parcel", DOCUMENTS), [own @ model.embedding(text) for text in DOCUMENTS])
        case "score":
            pytest.skip("the client has no method for pairs")
        case "classify":
            # The client keeps the first element of a list, as with text-embeddings-inference.
            found = client.text_classification("the parcel")
            label, score = best_first(softmax(model.logits("the parcel")))[0]
            assert found.label == label
            close(found.score, score)
        case "token_classify":
            found = client.token_classification(SENTENCES[1])
            wanted = spans(model, SENTENCES[1])
            assert [(one.entity_group, one.word, one.start, one.end) for one in found] == [
                (one["entity_group"], one["word"], one["start"], one["end"]) for one in wanted
            ]
        case "fill_mask":
            found = client.fill_mask("the [MASK] has arrived", top_k=3)
            wanted = predictions(model, "the [MASK] has arrived", 3)[0]
            assert [(one.token, one.token_str, one.sequence) for one in found] == [
                (one["token"], one["token_str"], one["sequence"]) for one in wanted
            ]


def test_the_number_of_classes_that_a_client_wants(server, models):
    """`top_k` of transformers' pipeline `text-classification`, which the client of Hugging Face sends."""
    answer = ask(server, "/predict", model="classify", inputs="the parcel", parameters={"top_k": 2})
    assert [one["label"] for one in answer] == [label for label, _ in best_first(softmax(models["classify"].logits("the parcel")))[:2]]


# Other clients.


def test_langchain(server, models):
    """LangChain sends texts if it does not check their lengths."""
    langchain = pytest.importorskip("langchain_openai")
    own = langchain.OpenAIEmbeddings(model="embed", base_url=f"http://{server.http}/v1", api_key="x", check_embedding_ctx_length=False)
    close(own.embed_documents(DOCUMENTS), [models["embed"].embedding(text) for text in DOCUMENTS])
    close(own.embed_query("a parcel"), models["embed"].embedding("a parcel"))


def test_kserve_instances(server, models):
    """Texts, lists with a text, and objects; `inputs` of TensorFlow Serving."""
    texts = ["a parcel", "the capital of Germany"]
    wanted = [models["embed"].embedding(text) for text in texts]
    for instances in (texts, [[text] for text in texts], [{"text": text} for text in texts], [{"text": [text]} for text in texts]):
        answer = ask(server, "/v1/models/embed:predict", instances=instances)
        close([one["embedding"] for one in answer["predictions"]], wanted)
    answer = ask(server, "/v1/models/score:predict", instances=[{"text": "a", "text_pair": "b"}, {"text": "c", "text_pair": "d"}])
    scores = np.array([one["score"] for one in answer["predictions"]]).ravel()
    close(scores, [sigmoid(models["score"].logits(*pair)[0]) for pair in ("ab", "cd")])
    answer = ask(server, "/v1/models/embed:predict", inputs={"text": [[text] for text in texts]})
    close(answer["outputs"]["embedding"], wanted)
    assert post(server, "/v1/models/score:predict", instances=["a"])[0] == 400
    assert post(server, "/v1/models/embed:predict", instances=[5])[0] == 400


def test_grpc(server, models):
    texts = ["a parcel", text_of(40), "漢字 😀"]
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        text = tritonclient.grpc.InferInput("text", [3, 1], "BYTES")
        text.set_data_from_numpy(np.array([[one.encode()] for one in texts], object))
        outputs = [tritonclient.grpc.InferRequestedOutput(name) for name in ("embedding", "num_input_tokens")]
        answer = client.infer("embed", [text], outputs=outputs)
        close(answer.as_numpy("embedding"), [models["embed"].embedding(one) for one in texts])
        assert answer.as_numpy("num_input_tokens").ravel().tolist() == [count(models["embed"], one) for one in texts]
        label = client.infer("classify", [text], outputs=[tritonclient.grpc.InferRequestedOutput("label")]).as_numpy("label")
        assert label.ravel().tolist() == [LABELS[models["classify"].logits(one).argmax()].encode() for one in texts]
        text.set_data_from_numpy(np.array([[b"a"], [text_of(80).encode()], [b"\xff"]], object))
        with pytest.raises(InferenceServerException, match="maximum context length|not UTF-8") as error:
            client.infer("embed", [text])
        assert error.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_the_models_that_openais_client_lists(server, client):
    assert {"embed", "score", "classify"} <= {model.id for model in client.models.list()}


# Numbers.


def series(server, name: str) -> float:
    """Returns the sum of a metric of the model `counted`."""
    return total(server.scrape(), name, model="counted") + total(server.scrape(), name, model_name="counted")


def test_metrics_and_statistics(server, models):
    """Tokens, padding, cut texts, runs, prompts and times are those of the requests that were sent."""
    model = models["counted"]
    names = (
        "pharos_text_tokens_total", "pharos_text_padding_tokens_total", "pharos_text_truncated_inputs_total",
        "pharos_text_batch_tokens_sum", "pharos_text_batch_tokens_count", "pharos_text_tokenization_seconds_count",
        "pharos_llm_prompt_tokens_total", "nv_inference_count",
    )  # fmt: skip
    read = lambda: {name: series(server, name) for name in names}  # noqa: E731
    before, statistics = read(), server.statistics("counted")["inference_stats"]
    used = ask(server, "/v1/embeddings", model="counted", input=text_of(5))["usage"]["prompt_tokens"]
    assert used == count(model, text_of(5))
    # Lengths that are computed together, with padding, and one that is cut off.
    texts = [*(text_of(number) for number in (3, 4, 5, 6, 7, 8)), text_of(90)]
    answer = ask(server, "/v1/embeddings", model="counted", input=texts, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == count(model, *texts[:-1]) + LIMIT
    used += answer["usage"]["prompt_tokens"]
    assert post(server, "/v1/embeddings", model="counted", input=text_of(90))[0] == 400
    for name in ("pharos_llm_prompt_tokens_total", "pharos_text_tokens_total"):
        eventually(f"all tokens are in {name}", lambda: series(server, name) >= before[name] + used)
    gained = {name: value - before[name] for name, value in read().items()}
    assert gained["pharos_text_tokens_total"] == gained["pharos_llm_prompt_tokens_total"] == used
    padding = gained["pharos_text_padding_tokens_total"]
    assert 0 < padding < used and gained["pharos_text_batch_tokens_sum"] == used + padding
    assert gained["pharos_text_truncated_inputs_total"] == 1
    assert 2 <= gained["pharos_text_batch_tokens_count"] <= 1 + len(texts)
    assert gained["pharos_text_tokenization_seconds_count"] == 2
    assert gained["nv_inference_count"] == 1 + len(texts)
    now = server.statistics("counted")["inference_stats"]
    assert now["success"]["count"] - statistics["success"]["count"] == 2
    assert now["fail"]["count"] - statistics["fail"]["count"] == 1
    for part in ("compute_input", "compute_infer", "queue"):
        assert now[part]["ns"] > statistics[part]["ns"], part


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/counted/infer", {"inputs": [tensor("text", "BYTES", [2, 1], ["a b", "c"])]}),
        ("/embed", {"model": "counted", "inputs": ["a b", "c"]}),
        ("/v1/models/counted:predict", {"instances": ["a b", "c"]}),
        ("/v1/rerank", {"model": "counted", "query": "a b", "documents": ["c"]}),
    ],
)
def test_tokens_of_every_interface_are_counted(server, models, path, body):
    before = series(server, "pharos_llm_prompt_tokens_total")
    ask(server, path, **body)
    wanted = before + count(models["counted"], "a b", "c")
    eventually("the prompts are counted", lambda: series(server, "pharos_llm_prompt_tokens_total") == wanted)


# Many requests.


def test_many_clients(server, models):
    """64 clients with texts of very different lengths and different tasks: each answer is right."""
    source, calls = random.Random(1), [[] for _ in range(64)]
    for number in range(64 * 6):
        texts = [text_of(source.choice([1, 2, 5, 20, 45, 90]), number + at) for at in range(source.choice([1, 1, 3, 17]))]
        name = source.choice(["embed", "embed", "byte_pairs", "unigram", "small_runs", "classify"])
        encodings = [truncated(models[name], text, LIMIT) for text in texts]
        hidden = [models[name].weights.hidden(encoding.ids, encoding.type_ids) for encoding in encodings]
        if name == "classify":
            wanted = [softmax(one[0] @ models[name].weights.classes) for one in hidden]
        else:
            wanted = [one.mean(0) / np.linalg.norm(one.mean(0)) for one in hidden]
        calls[number % 64].append(({"model": name, "input": texts, "truncate_prompt_tokens": -1}, wanted))

    def work(own: list):
        connection = server.connect()
        for body, wanted in own:
            is_classify = body["model"] == "classify"
            connection.request("POST", "/v1/classify" if is_classify else "/v1/embeddings", json.dumps(body))
            answer = json.loads(connection.getresponse().read())
            close([one["probs" if is_classify else "embedding"] for one in answer["data"]], wanted, 1e-4)
        connection.close()

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(work, calls))


def test_clients_that_leave(server, models):
    """Requests whose clients have left are ended, and those of others are answered."""
    texts = [text_of(40, number % 5) for number in range(2048)]
    body = json.dumps({"model": "embed", "input": texts}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with held(server, "embed"):
        before = received_requests(server, "embed")
        connections = []
        for _ in range(4):
            connection = socket.create_connection(("127.0.0.1", server.http_port), timeout=DEADLINE_S)
            connection.sendall(head + body)
            connections.append(connection)
        until_received(server, "embed", before + 4 * 32)
        # Half of them leave while their texts wait for the worker, and the others while the worker computes.
        for connection in connections[:2]:
            connection.close()
    for connection in connections[2:]:
        connection.close()
    for number in range(20):
        text = text_of(1 + number)
        close(vectors(ask(server, "/v1/embeddings", model="embed", input=text))[0], models["embed"].embedding(text))
    eventually("no request is left", lambda: total(server.scrape(), "nv_inference_pending_request_count", model="embed") == 0)


def killed(server, model: str) -> int:
    """Waits until a worker computes texts of the model, and kills it; returns its process."""
    computed = lambda: total(server.scrape(), "pharos_text_batch_tokens_count", model=model)  # noqa: E731
    before = computed()
    eventually("texts are computed", lambda: computed() > before + 5)
    (worker,) = [pid for pid in server.workers() if worker_model(pid) == model]
    os.kill(worker, signal.SIGKILL)
    return worker


@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_worker(server, models, times):
    """Requests whose texts a worker computes when it is killed are computed by another one, once. If it is killed too, they fail with a
    status of the server. A new worker serves the next ones."""
    model = models["matryoshka"]
    texts = [text_of(40, number % 7) for number in range(2048)]
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(post, server, "/v1/embeddings", model="matryoshka", input=texts) for _ in range(16)]
        for _ in range(times):
            killed(server, "matryoshka")
        answers = [one.result() for one in asked]
    wanted = [model.embedding(text) for text in texts[:7]]
    for status, answer in answers:
        assert status == 200 or times > 1 and status in (500, 502, 503), answer
        if status == 200:
            close(vectors(answer)[:7], wanted)
    served = lambda: post(server, "/v1/embeddings", model="matryoshka", input="a parcel")[0] == 200  # noqa: E731
    eventually("the model is served again", served)
    close(vectors(ask(server, "/v1/embeddings", model="matryoshka", input="a"))[0], model.embedding("a"))


def test_requests_that_a_killed_worker_has_not_read(server, models):
    """They are answered, or fail with a status of the server."""
    (worker,) = [pid for pid in server.workers() if worker_model(pid) == "matryoshka"]
    with ThreadPoolExecutor(8) as pool:
        with held(server, "matryoshka"):
            before = received_requests(server, "matryoshka")
            asked = [pool.submit(post, server, "/v1/embeddings", model="matryoshka", input=[text_of(9)] * 9) for _ in range(8)]
            until_received(server, "matryoshka", before + 8)
            os.kill(worker, signal.SIGKILL)
        for status, answer in (one.result() for one in asked):
            assert status in (200, 500, 502, 503), answer
            if status == 200:
                close(vectors(answer), [models["matryoshka"].embedding(text_of(9))] * 9)


def test_a_token_without_a_vector(server, models):
    """The request with a token of the vocabulary that the graph does not have fails, and no request that is computed together with it."""
    text = "the parcel has arrived"
    with ThreadPoolExecutor(9) as pool:
        with held(server, "short_table"):
            before = received_requests(server, "short_table")
            right = [pool.submit(post, server, "/v1/embeddings", model="short_table", input=text) for _ in range(8)]
            wrong = pool.submit(post, server, "/v1/embeddings", model="short_table", input="the absent has arrived")
            until_received(server, "short_table", before + 9)
        assert wrong.result()[0] >= 400
        assert [one.result()[0] for one in right] == [200] * 8


def test_text_models_in_a_batch_with_an_invalid_request(server, models):
    """Of requests that one batch has, only the one with bytes that are not UTF-8, a long text or an unknown prompt fails."""
    body = json.dumps({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 7}}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(body))}
    wrong = [
        lambda: server.ask("POST", "/v2/models/embed/infer", body + b"\x03\0\0\0a\xff\xfe", headers=headers),
        lambda: server.ask("POST", "/v2/models/embed/infer", json.dumps({"inputs": [tensor("text", "BYTES", [1, 1], [text_of(80)])]})),
    ]
    with ThreadPoolExecutor(12) as pool:
        with held(server, "embed"):
            before = received_requests(server, "embed")
            right = [pool.submit(infer, server, "embed", [text_of(number)]) for number in range(1, 6)]
            failed = [pool.submit(one) for one in wrong]
            right += [pool.submit(infer, server, "embed", [text_of(number)]) for number in range(6, 10)]
            until_received(server, "embed", before + 11)
        for number, one in enumerate(right, 1):
            close(one.result()["embedding"][0], models["embed"].embedding(text_of(number)))
    (status, text), (other, long) = (one.result() for one in failed)
    assert status == 400 and "'text' is not UTF-8 at byte 1" in text, text
    assert other == 400 and "maximum context length" in long, long


# Hostile requests.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["a", "漢", " ", "[MASK]<mask>"], ids=["letters", "han", "spaces", "special"])
def test_a_long_text_without_spaces(server, models, kind, unit):
    """A mebibyte is tokenised within seconds, and other models are served meanwhile."""
    name = "embed" if kind == "word_piece" else kind
    text = unit * (MOST_BYTES // len(unit.encode()))
    done, answers = threading.Event(), []

    def embed():
        try:
            answers.append(post(server, "/v1/embeddings", model=name, input=text, truncate_prompt_tokens=-1))
        finally:
            done.set()

    begun = time.monotonic()
    thread = threading.Thread(target=embed, daemon=True)
    thread.start()
    others = 0
    while not done.is_set() or others == 0:
        close(vectors(ask(server, "/v1/embeddings", model="counted", input="a"))[0], models["counted"].embedding("a"))
        others += 1
    join_all([thread])
    status, answer = answers[0]
    assert status == 200 and answer["usage"]["prompt_tokens"] <= LIMIT, answer
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_beyond_the_limit(server, kind):
    """Exactly a mebibyte has tokens; a byte more is an error with both numbers. Both texts of a pair count."""
    name = "embed" if kind == "word_piece" else kind
    assert post(server, "/tokenize", model=name, prompt="a " * (MOST_BYTES // 2))[0] == 200
    for path, body in [("/v1/embeddings", {"input": "a" * (MOST_BYTES + 1)}), ("/tokenize", {"prompt": "a" * (MOST_BYTES + 1)})]:
        status, answer = post(server, path, model=name, **body)
        assert status == 400 and f"a text has {MOST_BYTES + 1} bytes; at most {MOST_BYTES} are allowed" in answer["error"]["message"]
    status, answer = post(server, "/v1/score", model="score", text_1="a" * MOST_BYTES, text_2="b")
    assert status == 400 and "at most" in answer["error"]["message"]


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\x00" * 50, "\x7f\x1b[2J", "\ufdd0\uffff", "\U0010ffff"])
def test_control_characters(server, models, text):
    close(vectors(ask(server, "/v1/embeddings", model="embed", input=text))[0], models["embed"].embedding(text))


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model":"embed","input":"\ud800"}', rb'{"model":"embed","input":["a","\udc00x"]}', b'{"model":"embed","input":"\xff"}',
        b'{"model":"embed","input":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"model":"embed","input":[[["a"]]]}',
        b'{"model":"embed","input":{"a":' * 50_000, b'{"model":"embed","input":["a",1]}', b'{"model":"embed","input":[null]}',
        b'{"model":"embed","input":"a"', b"", b"[]",
    ],
    ids=["surrogate", "second surrogate", "bytes", "deep", "nested", "objects", "mixed", "null", "cut off", "empty", "list"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/"])
def test_malformed_requests(server, path, body):
    status, text = server.ask("POST", path, body if path == "/v1/embeddings" else body.replace(b'"input"', b'"inputs"'))
    assert status == (400 if path == "/v1/embeddings" else 422), text
    assert json.loads(text)["error"]


@pytest.mark.parametrize("number", [2049, 65_535])
@pytest.mark.parametrize(
    ("path", "field", "more", "status"),
    [
        ("/v1/embeddings", "input", {}, 400), ("/v1/classify", "input", {}, 400), ("/v1/rerank", "documents", {"query": "q"}, 400),
        ("/v1/score", "text_2", {"text_1": "a"}, 400), ("/embed", "inputs", {}, 422), ("/rerank", "texts", {"query": "q"}, 422),
        ("/predict", "inputs", {}, 422), ("/tokenize", "inputs", {}, 422), ("/decode", "ids", {}, 422),
    ],
)  # fmt: skip
def test_too_many_texts(server, path, field, more, status, number):
    """They are refused before any of them is computed."""
    item = {"/predict": ["a"], "/decode": [1]}.get(path, "a")
    got, answer = post(server, path, model="embed", **{field: [item] * number}, **more)
    assert got == status and "2048" in json.dumps(answer), answer


def test_many_masks_and_predictions(server):
    """The work of a request is limited: each prediction of each mask has the whole text."""
    inputs = [["[MASK]" * 62]] * 16
    status, answer = post(server, "/predict", model="fill_mask", inputs=inputs, parameters={"top_k": 1024})
    found = sum(len(predicted) for text in answer for predicted in text) if status == 200 else 0
    assert status in (413, 422) or found <= 1 << 16, (status, found)


# Files of models.


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A server with models that cannot be loaded."""
    folder = tmp_path_factory.mktemp("broken") / "models"

    def at(name: str, **settings):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text('backend: "text"\n' + parameters(**settings))
        return folder / name / "1"

    def move(model: TextModel, *names: str):
        for name in names:
            (model.folder / name).parent.mkdir(exist_ok=True)
            (model.folder / name).write_bytes((model.folder / "model.onnx").read_bytes())
        (model.folder / "model.onnx").unlink()

    (embedder(at("no_graph")).folder / "model.onnx").unlink()
    TextModel(at("architecture"), "BertForQuestionAnswering")
    TextModel(at("task", task="chat"))
    embedder(at("config")).folder.joinpath("config.json").write_text("{")
    embedder(at("no_config")).folder.joinpath("config.json").unlink()
    embedder(at("no_tokenizer")).folder.joinpath("tokenizer.json").unlink()
    embedder(at("tokenizer")).folder.joinpath("tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    embedder(at("garbage")).folder.joinpath("model.onnx").write_bytes(b"\x08\x08garbage")
    TextModel(at("more_labels"), "BertForSequenceClassification", LABELS, "text").write(
        "config.json", {"architectures": ["BertForSequenceClassification"], "id2label": {str(at): str(at) for at in range(4)}}
    )
    TextModel(at("label_keys"), "BertForSequenceClassification", LABELS, "text").write(
        "config.json", {"architectures": ["BertForSequenceClassification"], "id2label": {"a": "b"}}
    )
    TextModel(at("label_parameter", labels="x, y, z"), "BertForSequenceClassification", LABELS, "text")
    model = embedder(at("input"))
    (model.folder / "model.onnx").write_bytes(graph(model.weights, more_inputs=["pixel_values"]))
    TextModel(at("no_pooling"))
    TextModel(at("pooling", pooling="median"))
    TextModel(at("no_mask"), "BertForMaskedLM", head="tokens").write("tokenizer_config.json", {})
    move(embedder(at("ambiguous")), "onnx/model_fp16.onnx", "onnx/model_int8.onnx")
    move(embedder(at("two", dtype="int8")), "onnx/model_qint8_avx2.onnx", "onnx/model_qint8_arm64.onnx")
    move(embedder(at("two_folders")), "onnx/model.onnx", "other/model.onnx")
    embedder(at("dtype", dtype="fp64"))
    embedder(at("absent_dtype", dtype="fp16"))
    embedder(at("flag", accept_token_ids="yes"))
    embedder(at("batch_tokens", max_batch_tokens="0"))
    embedder(at("context", context_length="many"))
    model = embedder(at("dense"))
    model.write("modules.json", [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    embedder(at("no_pooling_file")).folder.joinpath("1_Pooling/config.json").unlink()
    embedder(at("prompt_is_not_pooled")).write("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False})
    embedder(at("default_prompt")).write("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"})
    server = Server(folder.parent, [folder], LENIENT)
    with server:
        yield server


@pytest.mark.parametrize(
    ("name", "parts"),
    {
        "no_graph": ["no graph", "optimum-cli export onnx"],
        "architecture": ["BertForQuestionAnswering", "embed, score, classify, token_classify, fill_mask"],
        "task": ["'chat'", "embed, score, classify, token_classify, fill_mask"],
        "config": ["'config.json' is not JSON"],
        "no_config": ["'config.json'"],
        "no_tokenizer": ["'tokenizer.json'"],
        "tokenizer": ["tokenizer.json", "is not a tokenizer that can be used"],
        "garbage": ["model.onnx"],
        "more_labels": ["3 numbers", "4 classes"],
        "label_keys": ["'id2label'", "numbers from 0"],
        "label_parameter": ["'labels' must be a JSON list of strings"],
        "input": ["has the input 'pixel_values'"],
        "no_pooling": ["set the parameter 'pooling'"],
        "pooling": ["'median'", "cls, max, mean"],
        "no_mask": ["no 'mask_token'"],
        "ambiguous": ["none of the graphs [onnx/model_fp16.onnx, onnx/model_int8.onnx]", "'dtype'"],
        "two": ["more than one of the graphs", "'default_model_filename'"],
        "two_folders": ["more than one of the graphs"],
        "dtype": ["'fp64'", "fp32, fp16, int8, uint8, q4 and bnb4"],
        "absent_dtype": ["none of the graphs [model.onnx] is of the type 'fp16'"],
        "flag": ["'accept_token_ids' is 'yes'"],
        "batch_tokens": ["'max_batch_tokens' is '0'"],
        "context": ["'context_length' is 'many'"],
        "dense": ["needs a graph with all of them and the output 'sentence_embedding'"],
        "no_pooling_file": ["'modules.json' needs the file '1_Pooling/config.json'"],
        "prompt_is_not_pooled": ["'include_prompt': false"],
        "default_prompt": ["default prompt 'query'"],
    }.items(),
)  # fmt: skip
def test_files_that_are_no_model(broken, name, parts):
    """The error of the load names what is missing."""

    def reason():
        entry = broken.index()[name][0]
        assert entry.get("state") != "READY"
        return entry.get("reason")

    found = eventually(f"{name} has failed", reason)
    assert all(part in found for part in parts), found


def test_graphs_of_other_layouts(tmp_path):
    """A graph in `onnx/`, one that `dtype` chooses, and one that the configuration names; other graphs are no text."""
    places = {"only": "onnx/model.onnx", "quantized": "onnx/model_quantized.onnx", "named": "mine.onnx"}
    settings = {"quantized": parameters(dtype="int8"), "named": 'default_model_filename: "mine.onnx"\n'}
    made = {}
    for name, place in places.items():
        made[name] = model = embedder(tmp_path / "models" / name / "1")
        (model.folder / place).parent.mkdir(exist_ok=True)
        (model.folder / "model.onnx").rename(model.folder / place)
        if name != "only":
            (tmp_path / "models" / name / "config.pbtxt").write_text(settings[name])
            (model.folder / "onnx").mkdir(exist_ok=True)
            (model.folder / "onnx/model.onnx").write_bytes(b"not this one")
    with Server(tmp_path, [tmp_path / "models"]) as server:
        for name, model in made.items():
            close(vectors(ask(server, "/v1/embeddings", model=name, input="a parcel"))[0], model.embedding("a parcel"))
            config = json.loads(server.get(f"/v2/models/{name}/config")[1])
            assert (config["backend"], config["default_model_filename"]) == ("text", places[name])


def test_a_folder_with_a_graph_in_a_folder(tmp_path):
    """`pharos serve` of a folder as Hugging Face has it, with folders of other modules and engines."""
    model = embedder(tmp_path / "my model")
    (model.folder / "onnx").mkdir()
    (model.folder / "model.onnx").rename(model.folder / "onnx/model.onnx")
    (model.folder / "onnx/model_O2.onnx").write_bytes(b"not this one")
    for name in ("openvino/openvino_model.xml", "model.safetensors", "pytorch_model.bin", "README.md", ".gitattributes", "2_Normalize/x"):
        (model.folder / name).parent.mkdir(exist_ok=True)
        (model.folder / name).write_bytes(b"x")
    with serve(tmp_path, model.folder) as server:
        assert list(server.index()) == ["my model"]
        close(ask(server, "/embed", inputs="a parcel"), [model.embedding("a parcel")])


@pytest.mark.parametrize("has_weights_file", [False, True], ids=["one file", "weights beside it"])
def test_the_cache_of_hugging_face(tmp_path, has_weights_file):
    """The files of a snapshot are symbolic links to blobs; large graphs have their weights in another one."""
    plain = embedder(tmp_path / "plain")
    (plain.folder / "onnx").mkdir()
    (plain.folder / "model.onnx").rename(plain.folder / "onnx/model.onnx")
    if has_weights_file:
        (plain.folder / "onnx/model.onnx").write_bytes(graph(plain.weights, weights_file="model.onnx_data"))
        (plain.folder / "onnx/model.onnx_data").write_bytes(plain.weights.tokens.tobytes())
    cache = tmp_path / "hub/models--org--name"
    (cache / "blobs").mkdir(parents=True)
    for number, path in enumerate(path for path in sorted(plain.folder.rglob("*")) if path.is_file()):
        link = cache / "snapshots/abc123" / path.relative_to(plain.folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(cache / f"blobs/{number:040x}")
        link.symlink_to(os.path.relpath(cache / f"blobs/{number:040x}", link.parent))
    with serve(tmp_path, cache / "snapshots/abc123") as server:
        assert list(server.index()) == ["abc123"]
        close(ask(server, "/embed", inputs="a parcel"), [plain.embedding("a parcel")])


def test_without_onnx_runtime(tmp_path):
    """The error names what to install, if tract is not built either."""
    embedder(tmp_path / "models/embed/1")
    for program in (binary(), binary().with_name("pharos-worker"), PROGRAM):
        place = tmp_path / program.relative_to(binary().parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(program, place)
    server = Server(tmp_path, [tmp_path / "models"], LENIENT)
    server.command[0] = str(tmp_path / "pharos")
    # A PATH whose `python3` has no ONNX Runtime.
    server.environment = {"PATH": "/usr/bin:/bin", "ORT_DYLIB_PATH": ""}
    with server:
        reason = eventually("the load has failed", lambda: server.index()["embed"][0].get("reason"))
        assert "`pip install onnxruntime`" in reason
