"""Models that answer OpenAI's API themselves: OpenAI's client gets the JSON of the model, whole and streamed."""

import json
import shutil

import openai
import pytest

from harness.server import ROOT, Server, kill_all, total
from harness.waiting import eventually

MODELS = ROOT / "tests/python/protocol/language_models"
PROMPT = [{"role": "user", "content": "one two three"}]
CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with `api`, `whole`, and `off`, which is `whole` without OpenAI's API."""
    folder = tmp_path_factory.mktemp("passthrough")
    for name, source in (("api", "api"), ("whole", "whole"), ("off", "whole")):
        shutil.copytree(MODELS / source, folder / "models" / name)
    with (folder / "models/off/config.pbtxt").open("a") as config:
        config.write('parameters { key: "openai" value: { string_value: "off" } }\n')
    running = Server(folder, [folder / "models"])
    running.launch()
    running.wait_until_ready()
    yield running
    kill_all([running])


@pytest.fixture
def client(server):
    """OpenAI's client, which does not repeat requests."""
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, model="api", messages=PROMPT, **more):
    """Sends a chat."""
    return client.chat.completions.create(model=model, messages=messages, **more)


@pytest.mark.smoke
def test_a_chat_reaches_the_model_as_it_is(client):
    """Also fields and parts that the server does not know. The answer is the model's, with its id."""
    messages = [{"role": "critic", "content": [{"type": "hologram"}]}, *PROMPT]
    fields = {"own": {"x": [1, 2]}, "temperature": 9, "return_token_ids": "maybe"}
    answer = chat(client, messages=messages, extra_body=fields)
    assert (answer.id, answer.model, answer.choices[0].message.content) == ("own-1", "api", "one two three")
    seen = answer.choices[0].message.seen
    assert seen == {"model": "api", "messages": messages} | fields
    assert chat(client, "whole").choices[0].message.content == "one two three", "JSON in several lines, of a model that is not decoupled"


@pytest.mark.smoke
def test_streams_have_the_chunks_of_the_model(client, server):
    """In their order, with the usage if the client asks for it, and with the mark of the end."""
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["one", "two", "three"]
    assert (chunks[2].choices[0].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", 3)
    texts = [chunk.choices[0].text for chunk in client.completions.create(model="api", prompt="a b", stream=True)]
    assert texts == ["a", "b"]
    status, text = server.ask("POST", CHATS, json.dumps({"model": "api", "messages": PROMPT, "stream": True}))
    assert status == 200 and text.endswith("\n\ndata: [DONE]\n\n") and text.count("data: ") == 4


def test_the_other_paths(client, server):
    """Each path that the configuration lists; responses are events with a name and have no mark of the end."""
    assert client.embeddings.create(model="api", input="a", encoding_format="float").data[0].embedding == [0.5, 0.25]
    assert client.completions.create(model="api", prompt="a b").choices[0].text == "a b"
    assert client.responses.create(model="api", input="a b").output_text == "a b"
    events = list(client.responses.create(model="api", input="a b", stream=True))
    assert [event.type for event in events] == ["response.output_text.delta"] * 2 + ["response.completed"]
    status, text = server.ask("POST", RESPONSES, json.dumps({"model": "api", "input": "a", "stream": True}))
    assert text.startswith("event: response.output_text.delta\ndata: {") and "[DONE]" not in text
    for path in ("/v1/rerank", "/rerank", "/v1/score"):
        status, text = server.ask("POST", path, json.dumps({"model": "api", "query": "q", "documents": ["d"]}))
        assert status == 200 and json.loads(text)["results"][0]["relevance_score"] == 1
    status, text = server.ask("POST", "/predictions/api/1.0/v1/chat/completions", json.dumps({"model": "x", "messages": PROMPT}))
    assert status == 200 and json.loads(text)["model"] == "x", "the model of the path; the name of the client stays"


@pytest.mark.parametrize(
    ("path", "fields", "status", "part"),
    [
        ("/tokenize", {"prompt": "a"}, 400, "does not answer /v1/tokenize: its paths are chat/completions, completions, "),
        (RESPONSES, {"model": "whole", "input": "a"}, 400, "does not answer /v1/responses: its paths are chat/completions"),
        (CHATS, {"model": "whole", "stream": True}, 400, "stream true is not available: the model 'whole' is not decoupled"),
        (CHATS, {"model": "off"}, 400, "its parameter 'openai' is 'off'"),
        ("/v1/embeddings", {"model": "off", "input": "x"}, 400, "its parameter 'openai' is 'off'"),
        (CHATS, {"model": "nothing"}, 404, "nothing"),
        (CHATS, {"stream": "yes"}, 400, "invalid stream \"yes\": expected true or false"),
        (CHATS, {"garbage": "data: {}"}, 500, "must be a JSON object"),
        (CHATS, {"garbage": "[1]", "stream": True}, 500, "must be a JSON object"),
        (CHATS, {"error": {"message": "no", "code": 422, "own": 1}}, 422, '{"error": {"message": "no", "code": 422, "own": 1}}'),
        (CHATS, {"error": {"message": "too many", "code": 429}, "stream": True}, 429, "too many"),
        (CHATS, {"error": {"message": "wrong", "type": "invalid_request_error"}}, 400, "wrong"),
        (CHATS, {"fail_at": 0, "stream": True}, 503, "failed at token 0"),
    ],
)  # fmt: skip
def test_errors_before_the_first_byte_have_a_status(server, path, fields, status, part):
    """Errors of the server, errors of the model as `TritonError`, and those in its JSON, which clients get as it is."""
    body = {"model": "api", "messages": PROMPT} | fields
    found, text = server.ask("POST", path, json.dumps(body))
    assert (found, part in text or part in json.loads(text)["error"]["message"]) == (status, True), text


def test_a_body_must_be_json(server):
    """As for other models."""
    for body in ('{"model": "api", "messages": [}', '{"model": "api", "x": ' + "[" * 200 + "]" * 200 + "}"):
        status, text = server.ask("POST", CHATS, body)
        assert status == 400 and json.loads(text)["error"]["type"] == "invalid_request_error"


def test_later_errors_are_events(client, server):
    """The client raises them; the request counts as failed."""
    failed = lambda: total(server.scrape(), "pharos_request_failures_total", route="chat_completion")
    before = failed()
    for fields, part in (({"fail_at": 2}, "failed at token 2"), ({"error_at": 2, "error": {"message": "enough", "code": 500}}, "enough")):
        stream = chat(client, stream=True, extra_body=fields)
        with pytest.raises(openai.APIError, match=part):
            list(stream)
    assert failed() == before + 2
    events = list(client.responses.create(model="api", input="a b", stream=True, extra_body={"fail_at": 1}))
    assert (events[-1].type, events[-1].message, events[-1].sequence_number) == ("error", "failed at token 1, as asked", 1)


def test_a_client_that_leaves_ends_its_request(client, server):
    """The model finds its request cancelled."""
    stream = chat(client, messages=[{"role": "user", "content": "w " * 1000}], stream=True, extra_body={"delay_ms": 20})
    next(iter(stream))
    stream.close()
    cancelled = lambda: total(server.scrape(), "nv_inference_request_failure", model="api", reason="CANCELED")
    eventually("the request is cancelled", cancelled)


def test_every_token_is_counted_once(start):
    """The usage in the JSON of all answers is what the metrics show; each chunk with text has a time."""
    running = start([], repository=MODELS)
    with openai.OpenAI(base_url=f"http://{running.http}/v1", api_key="none", max_retries=0) as client:
        chat(client)
        list(chat(client, stream=True, stream_options={"include_usage": True}, extra_body={"delay_ms": 5}))
        client.responses.create(model="api", input="a b")
        list(client.responses.create(model="api", input="a b", stream=True))
        client.embeddings.create(model="api", input="a", encoding_format="float")
    metrics = running.scrape()
    assert total(metrics, "pharos_llm_prompt_tokens_total", model="api") == 4 + 4 + 3 + 3 + 4
    assert total(metrics, "pharos_llm_cached_prompt_tokens_total", model="api") == 4
    assert total(metrics, "pharos_llm_generation_tokens_total", model="api") == 3 + 3 + 2 + 2
    assert total(metrics, "pharos_llm_finished_total", model="api", reason="stop") == 4
    assert total(metrics, "pharos_llm_time_to_first_token_seconds_count", model="api") == 2
    assert total(metrics, "pharos_llm_inter_token_latency_seconds_count", model="api") == 2 + 1
