"""Clients of OpenAI's API that other projects write, unmodified: OpenAI's own with its helpers, LangChain, and LiteLLM if it is installed."""

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import threading

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from harness.gguf import write_model
from harness.processes import held
from harness.server import ROOT, Server, binary, kill_all, total
from harness.waiting import DEADLINE_S, eventually, join_all

MODELS = ROOT / "examples/language_model/models"
ENGINE = binary().parent / "backends/llamacpp/libpharos_llamacpp.so"
QUEUE = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }\n"
CALLERS = 4
"""Requests that repeat themselves: more than the queue of `short` and its engine hold."""
CALL = '<tool_call>{"name":"weather","arguments":{"city":"Ulm"}}</tool_call>'
needs_engine = pytest.mark.skipif(not ENGINE.is_file(), reason=f"{ENGINE} is not built: `make llamacpp` builds it, with a C++ compiler")
needs_litellm = pytest.mark.skipif(
    importlib.util.find_spec("litellm") is None, reason="LiteLLM (200 MB) is not installed: pip install litellm==1.110.2"
)


class Weather(pydantic.BaseModel):
    """Returns the weather of a city."""

    city: str


class City(pydantic.BaseModel):
    """A city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=8)
    size: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A server with the model `words`; `short`, which is the same with a short queue; and `tiny`, if its engine is built."""
    folder = tmp_path_factory.mktemp("clients")
    shutil.copytree(MODELS, folder / "models")
    shutil.copytree(MODELS / "words", folder / "models/short")
    with open(folder / "models/short/config.pbtxt", "a") as config:
        config.write(QUEUE)
    if ENGINE.is_file():
        (folder / "models/tiny/1").mkdir(parents=True)
        write_model(folder / "models/tiny/1/model.gguf")
        settings = {"max_sequences": 2, "threads": 1, "context_length": 512}
        text = "".join(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in settings.items())
        (folder / "models/tiny/config.pbtxt").write_text(f'backend: "llamacpp"\n{text}')
    server = Server(folder, [folder / "models"])
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


def client_of(server, **more) -> openai.OpenAI:
    """Returns OpenAI's client, which does not repeat requests unless `more` says so."""
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", **({"max_retries": 0} | more))


def asynchronous(server) -> openai.AsyncOpenAI:
    """Returns OpenAI's client for coroutines."""
    return openai.AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)


def langchain(server, model="words", **more) -> ChatOpenAI:
    """Returns LangChain's client."""
    return ChatOpenAI(model=model, base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, **more)


def cancelled(server) -> float:
    """Returns the number of cancelled requests."""
    return total(server.scrape(), "nv_inference_request_failure", model="words", reason="CANCELED")


@contextlib.contextmanager
def refusing(server, ask):
    """Runs the block while the model `short` refuses requests, because its queue is full and its worker is stopped. `ask` repeats a
    request until it is answered; several threads call it, and have their answers after the block."""
    refused = lambda: total(server.scrape(), "pharos_requests_total", route="chat_completion", code="503")  # noqa: E731
    threads = [threading.Thread(target=ask, daemon=True) for _ in range(CALLERS)]
    with held(server, "short"):
        before = refused()
        for thread in threads:
            thread.start()
        eventually("a request is refused", lambda: refused() > before)
        yield
    join_all(threads)


def of_user(text: str) -> list:
    """Returns the messages of a chat."""
    return [{"role": "user", "content": text}]


def in_time(coroutine):
    """Runs a coroutine; fails after the deadline."""
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


# OpenAI's client.


def test_openai_reads_heads(words):
    """The raw response has the id of the request, also for errors and streams."""
    with client_of(words) as client:
        raw = client.chat.completions.with_raw_response.create(model="words", messages=of_user("a"), extra_headers={"X-Request-Id": "my-id"})
        assert raw.headers["x-request-id"] == "my-id" and raw.parse().id == "chatcmpl-my-id"
        assert raw.http_response.status_code == 200 and raw.headers["content-type"] == "application/json"
        with client.chat.completions.with_streaming_response.create(model="words", messages=of_user("a b"), stream=True) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["x-request-id"]
            assert response.headers["cache-control"] == "no-cache"
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])
        with pytest.raises(openai.NotFoundError) as raised:
            client.chat.completions.create(model="none", messages=of_user("a"), extra_headers={"X-Request-Id": "lost"})
        assert raised.value.request_id == "lost"


def test_openai_has_an_error_class_for_each_status(words, start, tmp_path):
    """400, 404, 401, 405, 500 and the wrong path."""
    with client_of(words) as client:
        cases = [
            (openai.BadRequestError, {"messages": []}),
            (openai.BadRequestError, {"top_logprobs": 3}),
            (openai.BadRequestError, {"max_tokens": 0}),
            (openai.NotFoundError, {"model": "none"}),
            (openai.InternalServerError, {"extra_body": {"vllm_xargs": {"fail_at": 0}}}),
        ]
        for kind, fields in cases:
            with pytest.raises(kind) as raised:
                client.chat.completions.create(**({"model": "words", "messages": of_user("a")} | fields))
            error = raised.value
            assert type(error) is kind and error.body["message"] and error.type and error.request_id
        with pytest.raises(openai.NotFoundError):
            client.post("/nothing", cast_to=object, body={})
        with pytest.raises(openai.APIStatusError) as raised:
            client.get("/chat/completions", cast_to=object)
        assert raised.value.status_code == 405
    (tmp_path / "tokens").write_text("secret-1\n")
    guarded = start([], f"--inference-token-file={tmp_path / 'tokens'}", repository=MODELS)
    with client_of(guarded) as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="words", messages=of_user("a"))


def test_openai_gives_up_after_its_timeout(words):
    """The client's timeout cancels the request in the server too."""
    before = cancelled(words)
    slow = {"vllm_xargs": {"delay_ms": 20}}
    with client_of(words, timeout=0.5) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="words", messages=of_user("w " * 9000), max_tokens=9000, extra_body=slow)
    eventually("the request is cancelled", lambda: cancelled(words) == before + 1)


def test_openai_cancels_a_stream_of_a_task(words):
    """A cancelled task closes its stream; the request ends as cancelled."""
    before = cancelled(words)

    async def run():
        async with asynchronous(words) as client:
            began = asyncio.Event()

            async def read():
                stream = await client.chat.completions.create(
                    model="words", messages=of_user("w " * 5000), stream=True, max_tokens=5000, extra_body={"vllm_xargs": {"delay_ms": 20}}
                )
                async for _ in stream:
                    began.set()

            task = asyncio.create_task(read())
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    in_time(run())
    eventually("the request is cancelled", lambda: cancelled(words) == before + 1)


def test_openai_repeats_refused_requests(words):
    """A full queue answers 503 with `Retry-After`, and the client repeats its request until there is room."""
    answers = []

    def ask():
        with client_of(words, max_retries=20) as client:
            answers.append(client.chat.completions.create(model="short", messages=of_user("a")).choices[0].message.content)

    with refusing(words, ask), client_of(words) as client, pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(model="short", messages=of_user("a"))
    assert raised.value.status_code == 503 and int(raised.value.response.headers["retry-after"]) >= 1
    assert answers == ["a"] * CALLERS


def test_openai_streams_with_its_helper(words):
    """`chat.completions.stream` makes events, and a whole completion, of the chunks."""
    with client_of(words) as client:
        with client.chat.completions.stream(model="words", messages=of_user("a b c"), stream_options={"include_usage": True}) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert final.choices[0].message.content == "a b c" and final.usage.completion_tokens == 3
        assert {"chunk", "content.delta", "content.done"} == set(kinds)


def test_openai_sees_the_end_of_a_streamed_call(words):
    """OpenAI sends `finish_reason` in a chunk with an empty delta. Its helper needs that to report a whole call."""
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    with client_of(words) as client, client.chat.completions.stream(
        model="words", messages=of_user(CALL), tools=tools, max_tokens=99
    ) as stream:
        kinds = [event.type for event in stream]
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == Weather(city="Ulm")
    assert "tool_calls.function.arguments.done" in kinds


@needs_engine
def test_openai_parses_structured_output(words):
    """`chat.completions.parse`: the schema of a class, which the engine enforces; cut text is another error."""
    with client_of(words) as client:
        parsed = client.chat.completions.parse(
            model="tiny", messages=of_user("x"), response_format=City, temperature=1, seed=4, max_tokens=400
        )  # fmt: skip
        assert isinstance(parsed.choices[0].message.parsed, City)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model="tiny", messages=of_user("x"), response_format=City, max_tokens=2)
        with client.chat.completions.stream(
            model="tiny", messages=of_user("x"), response_format=City, temperature=1, seed=4, max_tokens=400
        ) as stream:
            stream.until_done()
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


# LangChain.


def test_langchain_invokes_and_streams(words):
    """Text, usage and the reason of the end, whole, streamed and in coroutines."""
    chat = langchain(words, stream_usage=True)
    answer = chat.invoke([HumanMessage("a b c")])
    assert answer.content == "a b c"
    assert answer.usage_metadata["output_tokens"] == 3 and answer.usage_metadata["total_tokens"] == 6
    assert answer.response_metadata["finish_reason"] == "stop" and answer.response_metadata["model_name"] == "words"
    chunks = list(chat.stream("a b c"))
    assert [chunk.content for chunk in chunks if chunk.content] == ["a ", "b ", "c"]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == "a b c" and whole.usage_metadata["output_tokens"] == 3

    async def run():
        first = await chat.ainvoke("x y")
        texts = [chunk.content async for chunk in chat.astream("x y")]
        many = await chat.abatch(["a", "b", "c"])
        return first.content, "".join(texts), [one.content for one in many]

    assert in_time(run()) == ("x y", "x y", ["a", "b", "c"])
    short = langchain(words, max_tokens=1).invoke("a b")
    assert short.content.strip() == "a" and short.response_metadata["finish_reason"] == "length"


def test_langchain_calls_tools(words):
    """`bind_tools`: calls whole and streamed, and the answer to a call in the next turn."""

    def weather(city: str) -> str:
        """Returns the weather of a city."""
        return city

    chat = langchain(words, max_tokens=99).bind_tools([weather])
    answer = chat.invoke(CALL)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Ulm"}) and call["id"]
    chunks = list(chat.stream(CALL))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("weather", {"city": "Ulm"})]
    turn = [HumanMessage("hi"), AIMessage("", tool_calls=answer.tool_calls), ToolMessage("sunny", tool_call_id=call["id"])]
    assert "sunny" in chat.invoke(turn).content


@needs_engine
def test_langchain_has_structured_output(words):
    """`with_structured_output` in its three ways; the engine enforces the schema."""
    chat = langchain(words, "tiny", temperature=1, seed=4, max_tokens=400)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("x"), City), method
    found = chat.with_structured_output(City.model_json_schema(), method="json_schema", strict=True).invoke("x")
    assert set(found) == {"name", "size"}


def test_langchain_has_the_errors_of_openai(words):
    """An error before and within a stream."""
    with pytest.raises(openai.NotFoundError):
        langchain(words, "none").invoke("a")
    failing = langchain(words, extra_body={"vllm_xargs": {"fail_at": 1}})
    with pytest.raises(openai.APIError, match="failed at token 1"):
        list(failing.stream("a b c"))


# LiteLLM.


@pytest.fixture(scope="module")
def litellm():
    """LiteLLM, which fetches nothing when it is imported."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    module = pytest.importorskip("litellm")
    module.telemetry = False
    return module


@needs_litellm
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(words, litellm, provider):
    """Completions, streams, tools and errors of both providers that speak this API."""
    base = {"model": f"{provider}/words", "api_base": f"http://{words.http}/v1", "api_key": "none", "num_retries": 0, "max_retries": 0}
    answer = litellm.completion(messages=of_user("a b c"), **base)
    assert answer.choices[0].message.content == "a b c" and answer.usage.completion_tokens == 3
    chunks = list(litellm.completion(messages=of_user("a b c"), stream=True, stream_options={"include_usage": True}, **base))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "a b c"
    assert chunks[-1].usage.completion_tokens == 3
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    (call,) = litellm.completion(messages=of_user(CALL), tools=tools, max_tokens=99, **base).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    for kind, fields in [
        (litellm.NotFoundError, {"model": f"{provider}/none"}),
        (litellm.BadRequestError, {"temperature": 3}),
        (litellm.InternalServerError, {"extra_body": {"vllm_xargs": {"fail_at": 0}}}),
    ]:
        with pytest.raises(kind):
            litellm.completion(**({"messages": of_user("a"), **base} | fields))

    async def run():
        answer = await litellm.acompletion(messages=of_user("x y"), **base)
        stream = await litellm.acompletion(messages=of_user("x y"), stream=True, **base)
        return answer.choices[0].message.content, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert in_time(run()) == ("x y", "x y")


@needs_litellm
@needs_engine
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_knows_a_prompt_that_is_too_long(words, litellm, provider):
    """Routers send such a request to a model with a longer context."""
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model=f"{provider}/tiny", api_base=f"http://{words.http}/v1", api_key="none", messages=of_user("cold " * 600), num_retries=0
        )  # fmt: skip


@needs_litellm
def test_litellm_repeats_refused_requests(words, litellm):
    """A full queue: LiteLLM raises its error for it, and with retries it repeats the request."""
    base = {"model": "openai/short", "api_base": f"http://{words.http}/v1", "api_key": "none", "messages": of_user("a")}
    answers = []
    ask = lambda: answers.append(litellm.completion(max_retries=20, **base).choices[0].message.content)  # noqa: E731
    with refusing(words, ask), pytest.raises((litellm.ServiceUnavailableError, litellm.InternalServerError)):
        litellm.completion(max_retries=0, num_retries=0, **base)
    assert answers == ["a"] * CALLERS
