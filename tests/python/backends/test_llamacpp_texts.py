"""The backend `llamacpp` beside chats: embeddings, scores, tokens, prompts as tokens, their probabilities, and adapters. The real engine
with small models whose results are known (`harness/gguf.py`)."""

import base64
import json
import math
import struct
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from harness.gguf import COUNT, embedding_width, vocabulary, write_adapter, write_model, write_scorer
from harness.llamacpp import SETTINGS, client_of, needs_llamacpp
from harness.server import Server, kill_all, total

pytestmark = needs_llamacpp
IDS = {text: number for number, (text, _) in enumerate(vocabulary())}
BOS = 1


def ids(text: str) -> list:
    """Returns the tokens of words, without the one that begins a text."""
    return [IDS[f"\u2581{word}"] for word in text.split()]


def parameter(name: str, value) -> str:
    """Returns a parameter of a configuration."""
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with models for embeddings (`mean`, without a configuration, and `last`), scores and text."""
    folder = tmp_path_factory.mktemp("texts")
    models = folder / "models"
    directory = lambda name: models / name / "1"  # noqa: E731
    for name in ("mean", "last", "score", "tiny"):
        directory(name).mkdir(parents=True)
    write_model(directory("mean") / "model.gguf", pooling=1)
    write_model(directory("last") / "model.gguf")
    own = [("task", "embed"), ("pooling", "last"), ("context_length", 64), ("matryoshka_dimensions", "[64, 128]")]
    own = "".join(parameter(*one) for one in own)
    (models / "last/config.pbtxt").write_text('backend: "llamacpp"\n' + own)
    write_scorer(directory("score") / "model.gguf")
    write_model(directory("tiny") / "model.gguf")
    (models / "tiny/config.pbtxt").write_text(SETTINGS)
    write_adapter(directory("tiny") / "nine.gguf", "one", "nine")
    write_adapter(directory("tiny") / "loop.gguf", "one", "loop")
    (directory("tiny") / "multi_lora.json").write_text(json.dumps({"to-nine": "nine.gguf", "to-loop": "loop.gguf"}))
    server = Server(folder, [models])
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


@pytest.fixture
def client(server):
    """A client of the server."""
    with client_of(server) as client:
        yield client


def vector(tokens: list) -> list:
    """Returns the mean of the embeddings of tokens, with the length 1."""
    counts = [0.0] * embedding_width()
    for token in tokens:
        counts[token] += 1
    length = math.sqrt(sum(count * count for count in counts))
    return [count / length for count in counts]


def send(server, path: str, **body):
    """Sends JSON and returns the JSON of the answer, which must be a success."""
    status, text = server.ask("POST", path, json.dumps(body))
    assert status == 200, text
    return json.loads(text)


@pytest.mark.smoke
def test_embeddings_of_several_texts(server, client):
    """Each text has its embedding, in the order of the request. The client asks for base64 by itself."""
    texts = ["one two", "two one one", "nine"]
    answer = client.embeddings.create(model="mean", input=texts)
    assert [one.index for one in answer.data] == [0, 1, 2]
    for text, one in zip(texts, answer.data):
        assert one.embedding == pytest.approx(vector([BOS, *ids(text)]), abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 3 + 4 + 2
    floats = client.embeddings.create(model="mean", input="one two", encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)


def test_an_embedding_in_base64_is_floats_in_little_endian_order(server):
    """Clients in other languages decode it themselves."""
    answer = send(server, "/v1/embeddings", model="mean", input="one", encoding_format="base64")
    data = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack(f"<{embedding_width()}f", data) == pytest.approx(vector([BOS, *ids("one")]), abs=1e-6)


def test_texts_as_tokens(client):
    """Tokens are taken as they are, without those that begin a text."""
    lists = [ids("one two"), ids("three")]
    answer = client.embeddings.create(model="mean", input=lists)
    for tokens, one in zip(lists, answer.data):
        assert one.embedding == pytest.approx(vector(tokens), abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="token id 4000000000 is not allowed"):
        client.embeddings.create(model="mean", input=[4_000_000_000])


def test_many_texts_are_computed_together(server):
    """Two thousand texts of one request, and eight clients at the same time."""
    texts = [" ".join(COUNT[: 1 + number % 9]) for number in range(2000)]
    answer = send(server, "/v1/embeddings", model="mean", input=texts)
    expected = [vector([BOS, *ids(text)]) for text in texts[:9]]
    for number, one in enumerate(answer["data"]):
        assert one["index"] == number
        assert one["embedding"] == pytest.approx(expected[number % 9], abs=1e-6)

    def ask(number):
        return send(server, "/v1/embeddings", model="last", input=[COUNT[number], "one"])

    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(ask, range(8))):
            assert found["data"][0]["embedding"] == pytest.approx(vector(ids(COUNT[number])), abs=1e-6)


def test_shorter_vectors_of_models_that_were_trained_for_them(client):
    """`dimensions` is allowed where the configuration says so. The shorter vector has the length 1."""
    answer = client.embeddings.create(model="last", input="one", dimensions=64, encoding_format="float")
    assert len(answer.data[0].embedding) == 64
    with pytest.raises(openai.BadRequestError, match=r"dimensions 65 is not available.*allowed are \[64, 128\]"):
        client.embeddings.create(model="last", input="one", dimensions=65)
    with pytest.raises(openai.BadRequestError, match="was not trained for shorter vectors"):
        client.embeddings.create(model="mean", input="one", dimensions=64)


def test_long_texts_are_refused_or_cut(client):
    """A text beyond the context is an error with both numbers, unless the client lets it be cut."""
    long = " ".join(["one"] * 100)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens, and the text has 101"):
        client.embeddings.create(model="last", input=long)
    answer = client.embeddings.create(model="last", input=long, extra_body={"truncate_prompt_tokens": -1})
    assert answer.usage.prompt_tokens == 64
    answer = client.embeddings.create(model="mean", input="one two three", extra_body={"truncate_prompt_tokens": 2})
    assert answer.data[0].embedding == pytest.approx(vector([BOS, *ids("one")]), abs=1e-6)


def test_documents_in_the_order_of_their_scores(server):
    """The model scores each document with the query. Equal documents keep their order."""
    documents = ["two", {"text": "nine"}, "five", "two"]
    answer = send(server, "/v1/rerank", model="score", query="q", documents=documents)
    assert [one["index"] for one in answer["results"]] == [1, 2, 0, 3]
    assert [one["document"]["text"] for one in answer["results"]] == ["nine", "five", "two", "two"]
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores[:2] == pytest.approx([1 / (1 + math.exp(5 - 9)), 0.5], abs=1e-4)
    best = send(server, "/rerank", model="score", query="q", documents=documents, top_n=1, return_documents=False)
    assert best["results"] == [{"index": 1, "relevance_score": scores[0]}]


def test_scores_of_pairs(server):
    """One text with several, or pairs; models for embeddings give the cosine."""
    answer = send(server, "/v1/score", model="score", text_1="q", text_2=["nine", "five"])
    assert [one["score"] for one in answer["data"]] == pytest.approx([1 / (1 + math.exp(-4)), 0.5], abs=1e-4)
    answer = send(server, "/score", model="last", queries=["one", "two"], documents=["one", "three"])
    assert [one["score"] for one in answer["data"]] == pytest.approx([1, 0], abs=1e-6)


def test_a_task_that_the_model_does_not_have(server, client):
    """The error says what the model is for."""
    for model, part in [("tiny", "makes no embeddings, scores or classes"), ("score", "makes scores of pairs of texts")]:
        with pytest.raises(openai.BadRequestError, match=part):
            client.embeddings.create(model=model, input="one")
    with pytest.raises(openai.BadRequestError, match="does not generate text"):
        client.completions.create(model="mean", prompt="one")


def test_embeddings_over_the_other_protocol(server):
    """The same model answers KServe's v2 inference."""
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["one"]}]
    outputs = {one["name"]: one["data"] for one in send(server, "/v2/models/mean/infer", inputs=inputs)["outputs"]}
    assert outputs["embedding"] == pytest.approx(vector([BOS, *ids("one")]), abs=1e-6)
    assert outputs["num_input_tokens"] == [2]


def test_prompts_of_all_models_count(server, client):
    """Tokens of texts count as tokens of prompts. A model that generates nothing has no series of generated tokens."""
    before = total(server.scrape(), "pharos_llm_prompt_tokens_total", model="mean")
    client.embeddings.create(model="mean", input=["one two", "three"])
    after = server.scrape()
    assert total(after, "pharos_llm_prompt_tokens_total", model="mean") - before == 5
    models = {dict(labels)["model"] for name, labels in after if name == "pharos_llm_generation_tokens_total"}
    assert models == {"tiny"}


def test_tokens_of_texts_and_chats(server):
    """`/tokenize` and `/detokenize`, in vLLM's and in llama.cpp's form."""
    answer = send(server, "/tokenize", model="tiny", prompt="one two", return_token_strs=True)
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [BOS, *ids("one two")], "token_strs": ["<s>", " one", " two"]}
    assert send(server, "/tokenize", model="tiny", prompt="one", add_special_tokens=False)["tokens"] == ids("one")
    assert send(server, "/v1/tokenize", model="tiny", content="one", add_special=False, with_pieces=True)["token_strs"] == [" one"]
    chat = send(server, "/tokenize", model="tiny", messages=[{"role": "user", "content": " one"}])
    assert chat["tokens"][0] == IDS["<|user|>"] and chat["tokens"][-1] == IDS["<|assistant|>"]
    assert send(server, "/detokenize", model="tiny", tokens=ids("one two"))["prompt"] == " one two"
    assert send(server, "/tokenize", model="mean", prompt="one")["tokens"] == [BOS, *ids("one")]


def test_prompts_as_tokens(client):
    """A completion takes tokens, and several lists of them."""
    complete = lambda prompt, **more: client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=1, **more)  # noqa: E731
    answer = complete([ids("one two"), ids("seven")])
    assert [choice.text for choice in answer.choices] == [" three", " eight"]
    assert answer.usage.prompt_tokens == 3
    assert complete(ids("one two"), echo=True).choices[0].text == " one two three"
    assert complete("one", extra_body={"add_special_tokens": False}).usage.prompt_tokens == 1
    detailed = complete("one", extra_body={"return_token_ids": True}).choices[0]
    assert detailed.prompt_token_ids == [BOS, *ids("one")] and detailed.token_ids == ids("two")


@pytest.mark.parametrize("prompt", ["one two seven", [BOS, *ids("one two seven")]])
def test_the_probabilities_of_a_prompt(client, prompt):
    """With `echo`, `logprobs` and no output, a request scores its prompt, as evaluation tools do."""
    answer = client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=0, temperature=0)
    choice = answer.choices[0]
    found = choice.logprobs
    assert found.tokens == ["<s>", " one", " two", " seven"]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    # After "one" comes "two" and after "two" comes "three", much more likely than all others.
    assert found.token_logprobs[2] > -0.01 and found.token_logprobs[3] < -5
    assert " three" in found.top_logprobs[3] and " seven" in found.top_logprobs[3]
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 0
    longer = client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=0, max_tokens=1, temperature=0)
    assert longer.choices[0].logprobs.tokens == ["<s>", " one", " two", " seven", " eight"]


def test_the_probabilities_of_a_long_prompt(client):
    """They are computed in parts, and a cached beginning is computed again."""
    prompt = " ".join(["one two"] * 150)
    for _ in range(2):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0})
        found = answer.choices[0].prompt_logprobs
        assert found[0] is None and len(found) == 301
        assert all(len(one) == 1 for one in found[1:])
        assert [int(next(iter(one))) for one in found[1:]] == ids(prompt)


def test_echo_needs_a_whole_response_for_probabilities(client):
    """The combination is refused by name."""
    with pytest.raises(openai.BadRequestError, match="echo with logprobs"):
        client.completions.create(model="tiny", prompt="one", echo=True, logprobs=1, stream=True)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="one", max_tokens=0)


def generate(server, prompt: str, adapter: str | None):
    """Returns the text of a model with an adapter, by the extension of Triton."""
    sampling = {"max_tokens": 1, "temperature": 0} | ({"lora_name": adapter} if adapter else {})
    body = {"text_input": prompt, "sampling_parameters": json.dumps(sampling), "exclude_input_in_output": True}
    return server.ask("POST", "/v2/models/tiny/generate", json.dumps(body))


def test_adapters_of_requests_do_not_mix(server):
    """Requests with different adapters run at the same time. A prefix that another adapter has computed is not used."""
    expected = {None: " two", "to-nine": " nine", "to-loop": " loop"}

    def ask(number):
        adapter = list(expected)[number % 3]
        status, text = generate(server, "seven eight nine one", adapter)
        assert status == 200, text
        return adapter, json.loads(text)["text_output"]

    with ThreadPoolExecutor(6) as pool:
        for adapter, text in pool.map(ask, range(60)):
            assert text == expected[adapter]
    status, text = generate(server, "one", "unknown")
    assert status == 400 and "unknown adapter 'unknown': available are to-loop, to-nine" in text


def test_an_adapter_has_a_name_like_a_model(server, client):
    """Clients choose an adapter as the model. The list has it after its model."""
    for name, expected in [("tiny", " two"), ("to-nine", " nine"), ("to-loop", " loop")]:
        answer = client.completions.create(model=name, prompt="one", max_tokens=1, temperature=0)
        assert (answer.model, answer.choices[0].text) == (name, expected)
    listed = {one.id: one for one in client.models.list()}
    assert {name: listed[name].parent for name in ("tiny", "to-nine", "to-loop")} == {"tiny": None, "to-nine": "tiny", "to-loop": "tiny"}
    assert listed["to-nine"].max_model_len == listed["tiny"].max_model_len == 512
    assert client.models.retrieve("to-nine").parent == "tiny"
    # Its requests count for its model.
    assert total(server.scrape(), "nv_inference_request_success", model="to-nine") == 0
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="to-ten", prompt="one")


def test_the_model_can_be_part_of_the_path(server):
    """The base URL of TorchServe's handler of vLLM. The body need not name the model, and its version is the one that is served."""
    for path in ("/predictions/tiny/v1", "/predictions/tiny/1.0/v1", "/predictions/tiny/1/v1"):
        answer = send(server, f"{path}/completions", prompt="one", max_tokens=1, temperature=0)
        assert (answer["model"], answer["choices"][0]["text"]) == ("tiny", " two")
        listed = json.loads(server.get(f"{path}/models")[1])["data"]
        assert "tiny" in {model["id"] for model in listed}
    assert send(server, "/predictions/mean/v1/embeddings", input="one")["model"] == "mean"
    status, text = server.ask("POST", "/predictions/tiny/2.0/v1/completions", json.dumps({"prompt": "one"}))
    assert status == 404 and "'tiny' version 2" in text


def test_the_only_model_needs_no_name(server, start, tmp_path):
    """With several models, the name is required."""
    (tmp_path / "models/tiny/1").mkdir(parents=True)
    write_model(tmp_path / "models/tiny/1/model.gguf")
    single = start([], repository=tmp_path / "models")
    assert send(single, "/v1/completions", prompt="one", max_tokens=1, temperature=0)["model"] == "tiny"
    status, text = server.ask("POST", "/v1/completions", json.dumps({"prompt": "one"}))
    assert status == 400 and "the server has several" in text
