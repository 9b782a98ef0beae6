"""OpenAI's API with its own client, over a model with the tensors of Triton's vllm_backend (`examples/language_model`)."""

import asyncio
import json
import os
import shutil
import signal
import time

import aiohttp
import openai
import pytest

from harness.server import ROOT, Server, kill_all, total
from harness.waiting import DEADLINE_S, eventually, eventually_async

MODELS = ROOT / "examples/language_model/models"
PROMPT = [{"role": "system", "content": "one two"}, {"role": "user", "content": "three"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A server with the model `words`, and the example `simple`, which generates no text."""
    folder = tmp_path_factory.mktemp("words")
    shutil.copytree(MODELS, folder / "models")
    shutil.copytree(ROOT / "examples/models/simple", folder / "models/simple")
    server = Server(folder, [folder / "models"], ["--model-control-mode=explicit", "--load-model=*"])
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


def client_of(server, base="/v1", key="none") -> openai.OpenAI:
    """Returns a client that does not repeat requests."""
    return openai.OpenAI(base_url=f"http://{server.http}{base}", api_key=key, max_retries=0)


def chat(client, messages=PROMPT, **more):
    """Sends a chat."""
    return client.chat.completions.create(model="words", messages=messages, **more)


def of_words(text: str) -> list:
    """Returns the messages of a chat."""
    return [{"role": "user", "content": text}]


@pytest.mark.smoke
@pytest.mark.parametrize("base", ["/v1", "/openai/v1"])
def test_a_chat(words, base):
    """The text of the messages, the usage and the reason of the end."""
    with client_of(words, base) as client:
        answer = chat(client)
        assert answer.choices[0].message.content == "one two three"
        assert answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 3, 6)
        assert answer.model == "words" and answer.id.startswith("chatcmpl-")
        assert answer.id == f"chatcmpl-{answer._request_id}", "the header and the body have one id"
        short = chat(client, max_tokens=2)
        assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("one two", "length")


@pytest.mark.smoke
def test_a_stream_has_one_chunk_for_each_token(words):
    """The chunks arrive as the tokens are made, with the usage at the end."""
    with client_of(words) as client:
        extra = {"vllm_xargs": {"delay_ms": 60}}
        began = time.monotonic()
        stream = chat(client, stream=True, stream_options={"include_usage": True}, extra_body=extra)
        arrived = [(time.monotonic() - began, chunk) for chunk in stream]
    chunks = [chunk for _, chunk in arrived]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert texts == ["", "one ", "two ", "three"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, None, None, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3
    assert len({chunk.id for chunk in chunks}) == 1
    assert arrived[-1][0] - arrived[1][0] > 0.1, "the tokens did not arrive one by one"


def test_the_first_token_is_a_chunk_even_if_its_text_is_held_back(words):
    """Clients take the first chunk for the first token. Its text may begin a stop string."""
    with client_of(words) as client:
        stream = client.completions.create(model="words", prompt="a b c", stop="a b x", max_tokens=9, stream=True)
        texts = [chunk.choices[0].text for chunk in stream]
    assert texts[0] == "" and "".join(texts) == "a b c"


def test_many_streams_run_at_once(words):
    """The engine holds all of them: one after the other, 50 streams of 10 tokens would take longer than the deadline."""

    async def one(client, number):
        stream = await client.chat.completions.create(
            model="words", messages=of_words(f"{number} " * 10), stream=True, extra_body={"vllm_xargs": {"delay_ms": 150}}
        )
        return "".join([chunk.choices[0].delta.content async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"http://{words.http}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.wait_for(asyncio.gather(*(one(client, number) for number in range(50))), DEADLINE_S)

    texts = asyncio.run(all_of_them())
    assert texts == [" ".join([str(number)] * 10) for number in range(50)]


def test_choices_stop_strings_and_logprobs(words):
    """Several choices, a stop string, and log probabilities in OpenAI's form."""
    with client_of(words) as client:
        answer = chat(client, n=2, logprobs=True, top_logprobs=1)
        assert [choice.message.content for choice in answer.choices] == ["one two three"] * 2
        assert answer.usage.completion_tokens == 6
        tokens = answer.choices[1].logprobs.content
        assert [token.token for token in tokens] == ["one ", "two ", "three"]
        assert tokens[0].top_logprobs[0].logprob == -0.5
        stopped = chat(client, stop=["o th"])
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one tw", "stop")
        # A stop string over several chunks is found too; the model has no stop strings.
        stream = chat(client, of_words("a b c d e"), stop="c d", stream=True)
        assert "".join(chunk.choices[0].delta.content for chunk in stream) == "a b "


def test_completions(words):
    """Several prompts, `echo`, and the default limit of 16 tokens."""
    with client_of(words) as client:
        answer = client.completions.create(model="words", prompt=["a b", "c"], echo=True, n=2)
        assert [choice.text for choice in answer.choices] == ["a ba b"] * 2 + ["cc"] * 2
        assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 6
        long = client.completions.create(model="words", prompt="x " * 20)
        assert (long.usage.completion_tokens, long.choices[0].finish_reason) == (16, "length")
        stream = client.completions.create(model="words", prompt=["a b", "c d"], stream=True)
        texts = {0: "", 1: ""}
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == {0: "a b", 1: "c d"}


def test_tool_calls(words):
    """Calls that a parser finds, whole and streamed, and the call that a client forces, which this model refuses."""
    call = '<tool_call>{"name":"weather","arguments":{"city":"Ulm"}}</tool_call>'
    with client_of(words) as client:
        choice = chat(client, of_words(f"sure {call}"), tools=TOOLS).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content.strip() == "sure"
        [made] = choice.message.tool_calls
        assert made.function.name == "weather" and json.loads(made.function.arguments) == {"city": "Ulm"}
        name, arguments = "", ""
        for chunk in chat(client, of_words(call), tools=TOOLS, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        assert (name, json.loads(arguments)) == ("weather", {"city": "Ulm"})
        with pytest.raises(openai.APIStatusError, match="cannot constrain its output"):
            chat(client, tools=TOOLS, tool_choice="required")


def test_errors_have_the_form_of_openai(words):
    """The client raises the right error for each, with the text and the field."""
    with client_of(words) as client:
        with pytest.raises(openai.NotFoundError) as raised:
            client.chat.completions.create(model="nothing", messages=PROMPT)
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="does not generate text"):
            client.chat.completions.create(model="simple", messages=PROMPT)
        with pytest.raises(openai.BadRequestError) as raised:
            chat(client, temperature=3)
        assert raised.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="not accepted from clients"):
            chat(client, extra_body={"chat_template": "{{ 7 }}"})
        with pytest.raises(openai.InternalServerError, match="failed at token 0"):
            chat(client, stream=True, extra_body={"vllm_xargs": {"fail_at": 0}})
        stream = chat(client, stream=True, extra_body={"vllm_xargs": {"fail_at": 1}})
        with pytest.raises(openai.APIError, match="failed at token 1"):
            list(stream)
        assert chat(client, extra_body={"nonsense": 1}).choices, "unknown fields are ignored"


def test_a_client_that_leaves_ends_its_request(words):
    """The model finds its request cancelled; it is counted as that."""
    with client_of(words) as client:
        stream = chat(client, of_words("w " * 1000), stream=True, extra_body={"vllm_xargs": {"delay_ms": 20}}, max_tokens=1000)
        next(iter(stream))
        stream.close()
    cancelled = lambda: total(words.scrape(), "nv_inference_request_failure", model="words", reason="CANCELED")
    eventually("the request is cancelled", cancelled)


def test_keys_are_tokens(start, tmp_path):
    """The key of the client is a bearer token for inference; refusals have OpenAI's form."""
    (tmp_path / "tokens").write_text("secret-1\n")
    server = start([], f"--inference-token-file={tmp_path / 'tokens'}", repository=MODELS)
    with client_of(server, key="wrong") as client, pytest.raises(openai.AuthenticationError) as raised:
        chat(client)
    assert raised.value.code == "invalid_api_key"
    with client_of(server, key="secret-1") as client:
        assert chat(client).choices[0].message.content == "one two three"


def test_requests_are_counted_by_route(start):
    """Each request once, by its route and status."""
    server = start([], repository=MODELS)
    with client_of(server) as client:
        chat(client)
        list(chat(client, stream=True))
        client.completions.create(model="words", prompt="a")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nothing", prompt="a")
    metrics = server.scrape()
    assert total(metrics, "pharos_requests_total", route="chat_completion", code="200") == 2
    assert total(metrics, "pharos_requests_total", route="completion", code="200") == 1
    assert total(metrics, "pharos_requests_total", route="completion", code="404") == 1


def test_every_token_is_counted_once(start):
    """The sum of the usage of all answers, over every protocol, and what was generated for a client that left, is what the
    metrics show."""
    server = start([], repository=MODELS)
    prompt = generated = 0
    with client_of(server) as client:
        answers = [chat(client), chat(client, n=3), client.completions.create(model="words", prompt=["a b", "c d e"])]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answers += [list(chat(client, **options))[-1], list(chat(client, max_tokens=1, **options))[-1]]
        for answer in answers:
            prompt += answer.usage.prompt_tokens
            generated += answer.usage.completion_tokens
        # One more request for all three tokens, of which the model counts those that it has generated.
        request = {"text_input": "x y z", "stream": True, "sampling_parameters": "{}"}
        status, text = server.ask("POST", "/v2/models/words/generate_stream", json.dumps(request))
        assert status == 200 and text.count("data: ") == 3
        prompt, generated = prompt + 3, generated + 3
        metrics = server.scrape()
        assert total(metrics, "pharos_llm_prompt_tokens_total", model="words") == prompt
        assert total(metrics, "pharos_llm_generation_tokens_total", model="words") == generated
        # Two streams of three tokens, and one with a single token.
        assert total(metrics, "pharos_llm_time_to_first_token_seconds_count", model="words") == 3
        assert total(metrics, "pharos_llm_inter_token_latency_seconds_count", model="words") == 4
        of_requests = lambda name: total(metrics, f"pharos_llm_{name}", model="words")
        assert of_requests("time_per_output_token_seconds_count") == 2
        finished = total(metrics, "nv_inference_request_success", model="words")
        for name in ("queue_duration_seconds", "request_duration_seconds", "request_prompt_tokens", "request_generation_tokens"):
            assert of_requests(f"{name}_count") == finished, name
        assert of_requests("request_prompt_tokens_sum") == prompt
        assert of_requests("request_generation_tokens_sum") == generated
        assert 0 < of_requests("queue_duration_seconds_sum") < of_requests("request_duration_seconds_sum")
        stream = chat(client, of_words("w " * 100), stream=True, extra_body={"vllm_xargs": {"delay_ms": 50}}, max_tokens=100)
        chunks = iter(stream)
        read = sum(1 for _ in zip(range(4), chunks)) - 1
        stream.close()
    cancelled = lambda: total(server.scrape(), "nv_inference_request_failure", model="words", reason="CANCELED")
    eventually("the request is cancelled", cancelled)
    metrics = server.scrape()
    assert of_requests("request_duration_seconds_count") == finished, "a cancelled request is not finished"
    more = total(metrics, "pharos_llm_generation_tokens_total", model="words") - generated
    assert read <= more < 100, "the tokens of the cancelled request are not counted"


def test_a_new_chat_template_counts_from_the_next_load(start, tmp_path):
    """The template is read once for each load."""
    shutil.copytree(MODELS, tmp_path / "models")
    template = tmp_path / "models/words/chat_template.jinja"
    server = start([], "--model-control-mode=explicit", "--load-model=words", repository=tmp_path / "models")
    with client_of(server) as client:
        assert chat(client).choices[0].message.content == "one two three"
        template.write_text("{{ messages | length }} messages")
        status, text = server.ask("POST", "/v2/repository/models/words/unload", b"")
        assert status == 200, text
        status, text = server.ask("POST", "/v2/repository/models/words/load", b"")
        assert status == 200, text
        assert chat(client).choices[0].message.content == "2 messages"
        template.write_text("{{ raise_exception('no chats today') }}")
        for action in ("unload", "load"):
            status, text = server.ask("POST", f"/v2/repository/models/words/{action}", b"")
            assert status == 200, text
        with pytest.raises(openai.BadRequestError, match="no chats today"):
            chat(client)


def test_a_worker_that_is_killed_ends_all_its_streams(start):
    """A hundred streams in one worker: each ends with an error as an event and the mark of the end, and the counts of requests, choices
    and tokens are those of the clients."""
    streams, words = 100, 3000
    server = start([], repository=MODELS)
    body = {"model": "words", "prompt": "w " * words, "max_tokens": words, "stream": True, "vllm_xargs": {"delay_ms": 5}}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

    async def one(session, begun):
        async with session.post(f"http://{server.http}/v1/completions", json=body) as response:
            assert response.status == 200
            begun.append(response)
            return (await response.text()).split("\n\n")

    async def all_of_them():
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:
            begun = []
            tasks = [asyncio.create_task(one(session, begun)) for _ in range(streams)]

            async def all_have_begun():
                return len(begun) == streams

            await eventually_async("all streams have begun", all_have_begun)
            for worker in server.workers():
                os.kill(worker, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    tokens = 0
    for *chunks, error, done, empty in asyncio.run(all_of_them()):
        assert (done, empty) == ("data: [DONE]", "")
        assert "died in the middle of the responses" in json.loads(error.removeprefix("data: "))["error"]["message"]
        tokens += json.loads(chunks[-1].removeprefix("data: "))["usage"]["completion_tokens"]
    metrics = server.scrape()
    assert total(metrics, "pharos_llm_generation_tokens_total", model="words") == tokens
    assert total(metrics, "pharos_llm_finished_total", model="words", reason="error") == streams
    assert total(metrics, "pharos_llm_finished_total", model="words") == streams
    assert total(metrics, "nv_inference_request_failure", model="words") == streams
    assert total(metrics, "nv_inference_request_success", model="words") == 0
    assert total(metrics, "pharos_requests_total", route="completion") == streams

    def answers():
        with client_of(server) as client:
            try:
                return chat(client).choices[0].message.content == "one two three"
            except openai.APIError:
                return False

    eventually("a new worker answers", answers)
