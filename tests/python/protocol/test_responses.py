"""OpenAI's Responses API with its own client, over models with the tensors of Triton's vllm_backend (`examples/language_model`)."""

import asyncio
import json
import shutil
import time

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from harness.server import ROOT, Server, kill_all, total
from harness.waiting import eventually

MODELS = ROOT / "examples/language_model/models"
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
CALL = '<tool_call>{"name":"weather","arguments":{"city":"Ulm"}}</tool_call>'
REFUSAL = 'raise pb_utils.TritonModelException("this model cannot constrain its output")'


class Trip(pydantic.BaseModel):
    city: str
    days: int


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A server with the model `words`, with `thinks`, whose text may begin with reasoning, and with `obeys`, which writes
    `vllm_xargs.text` or its constraint if it has one."""
    folder = tmp_path_factory.mktemp("responses")
    for name in ("words", "thinks", "obeys"):
        shutil.copytree(MODELS / "words", folder / "models" / name)
    with open(folder / "models/thinks/config.pbtxt", "a") as config:
        config.write('parameters { key: "reasoning_parser" value: { string_value: "qwen3" } }\n')
    program = folder / "models/obeys/1/model.py"
    source = program.read_text()
    assert REFUSAL in source
    program.write_text(source.replace(REFUSAL, 'words = [parameters.get("extra_args", {}).get("text", parameters["structured_outputs"])]'))
    server = Server(folder, [folder / "models"], [])
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


@pytest.fixture
def client(models):
    with client_of(models) as client:
        yield client


def client_of(server, base="/v1") -> openai.OpenAI:
    """Returns a client that does not repeat requests."""
    return openai.OpenAI(base_url=f"http://{server.http}{base}", api_key="none", max_retries=0)


def ask(client, prompt="one two three", model="words", **more):
    """Sends a request."""
    return client.responses.create(model=model, input=prompt, **more)


def without_ids(response) -> dict:
    """Returns a response without its times and ids."""
    body = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        body.pop(name, None)
    for item in body["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return body


def validate(kind, body: dict):
    """Checks that a body has all members of the type, and their types; the client itself accepts anything."""
    pydantic.TypeAdapter(kind).validate_python(body)


def streamed(client, **request) -> list:
    """Returns the events of a stream, and checks their numbers and that the last one is the whole response."""
    events = list(ask(client, stream=True, **request))
    for event in events:
        validate(ResponseStreamEvent, event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert without_ids(events[-1].response) == without_ids(ask(client, **request))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    return events


def types(events) -> list:
    """Returns the types of events after the first two, without their prefix; repeated ones once."""
    names = [event.type.removeprefix("response.") for event in events[2:]]
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


MESSAGE = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
REASONING = [name.replace("output_text", "reasoning_text") for name in MESSAGE]


@pytest.mark.smoke
@pytest.mark.parametrize("base", ["/v1", "/openai/v1"])
def test_a_response(models, base):
    """The text, the usage, and what the response repeats of the request."""
    with client_of(models, base) as client:
        answer = ask(
            client, temperature=0.5, metadata={"a": "b"}, user="u", prompt_cache_key="k", safety_identifier="s", instructions="be brief"
        )
    validate(Response, answer.to_dict())
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "be brief one two three")
    assert answer.id == f"resp_{answer._request_id}", "the header and the body have one id"
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed") and item.id.startswith("msg_")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 5, 10)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert (answer.temperature, answer.metadata, answer.user) == (0.5, {"a": "b"}, "u")
    assert (answer.prompt_cache_key, answer.safety_identifier, answer.instructions) == ("k", "s", "be brief")
    assert answer.store is False, "nothing is stored, also by default"
    assert 0 <= answer.completed_at - answer.created_at < 60 and abs(answer.created_at - time.time()) < 60


@pytest.mark.smoke
def test_the_events_of_a_text(client):
    """Their order and their numbers; the last one has what the whole response has."""
    events = streamed(client)
    assert types(events) == [*MESSAGE, "completed"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["one ", "two ", "three"]
    with client.responses.stream(model="words", input="one two") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert snapshots == ["one ", "one two"]
        assert stream.get_final_response().output_text == "one two"


def test_the_stream_has_named_events_and_no_end_marker(models):
    """Each event has its type as its name; the stream ends after the last one."""
    body = json.dumps({"model": "words", "input": "a b", "stream": True})
    status, text = models.ask("POST", "/v1/responses", body)
    assert status == 200 and "[DONE]" not in text
    *events, rest = text.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_long_output_is_incomplete(client):
    """The limit of tokens ends the response and its last item."""
    whole = ask(client, max_output_tokens=2)
    assert (whole.status, whole.incomplete_details.reason, whole.completed_at) == ("incomplete", "max_output_tokens", None)
    assert (whole.output_text, whole.output[0].status, whole.max_output_tokens) == ("one two", "incomplete", 2)
    events = streamed(client, max_output_tokens=2)
    assert types(events) == [*MESSAGE, "incomplete"]
    assert ask(client, extra_body={"stop": "two"}).output_text == "one "


def test_log_probabilities(client):
    """With `top_logprobs` or `include`, those of the text, also in the events."""
    [part] = ask(client, top_logprobs=1).output[0].content
    assert [token.token for token in part.logprobs] == ["one ", "two ", "three"]
    assert part.logprobs[0].top_logprobs[0].logprob == -0.5 and part.logprobs[0].bytes == list(b"one ")
    [part] = ask(client, include=["message.output_text.logprobs"]).output[0].content
    assert part.logprobs[0].top_logprobs == []
    events = streamed(client, include=["message.output_text.logprobs"])
    deltas = [event.logprobs[0].token for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["one ", "two ", "three"]
    assert ask(client).output[0].content[0].logprobs == []


def test_calls_that_the_model_decides_on(client):
    """Text before a call, the call, and the events of both."""
    text, call = ask(client, f"sure {CALL}", tools=TOOLS).output
    assert text.content[0].text.strip() == "sure"
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments) == {"city": "Ulm"}
    assert call.id.startswith("fc_") and call.call_id.startswith("call_")
    events = streamed(client, prompt=f"sure {CALL}", tools=TOOLS)
    assert types(events) == [*MESSAGE, *CALLED, "completed"]
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Ulm"}
    events = streamed(client, prompt=f"{CALL} {CALL}", tools=TOOLS)
    assert types(events) == [*CALLED, *CALLED, "completed"]
    [call] = ask(client, f"{CALL} {CALL}", tools=TOOLS, parallel_tool_calls=False).output
    assert call.type == "function_call"
    [message] = ask(client, CALL, tools=TOOLS, tool_choice="none").output
    assert message.content[0].text == CALL


def test_calls_that_the_client_forces(client):
    """The output has the form of a call, which the engine enforces."""
    xargs = lambda text: {"vllm_xargs": {"text": text}}
    required = json.dumps([{"name": "weather", "parameters": {"city": "Ulm"}}])
    request = {"model": "obeys", "tools": TOOLS, "tool_choice": "required", "extra_body": xargs(required)}
    [call] = ask(client, **request).output
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})
    assert types(streamed(client, **request)) == [*CALLED, "completed"]
    choice = {"type": "function", "name": "weather"}
    request |= {"tool_choice": choice, "extra_body": xargs('{"city":"Bonn"}')}
    answer = ask(client, **request)
    assert answer.output[0].arguments == '{"city":"Bonn"}' and answer.tool_choice.name == "weather"
    with pytest.raises(openai.APIStatusError, match="cannot constrain its output"):
        ask(client, tools=TOOLS, tool_choice="required")


def test_structured_output(client):
    """The client's schema reaches the engine, and its answer becomes an object of the client."""
    xargs = {"vllm_xargs": {"text": '{"city":"Ulm","days":3}'}}
    answer = client.responses.parse(model="obeys", input="x", text_format=Trip, extra_body=xargs)
    assert answer.output_parsed == Trip(city="Ulm", days=3)
    assert answer.text.format.name == "Trip" and answer.text.format.schema_["required"] == ["city", "days"]
    with client.responses.stream(model="obeys", input="x", text_format=Trip, extra_body=xargs) as stream:
        assert stream.get_final_response().output_parsed == Trip(city="Ulm", days=3)
    constraint = json.loads(client.responses.create(model="obeys", input="x", text={"format": answer.text.format.to_dict()}).output_text)
    assert constraint == {"json": answer.text.format.schema_}
    constraint = json.loads(ask(client, model="obeys", text={"format": {"type": "json_object"}}).output_text)
    assert constraint == {"json_object": True}
    with pytest.raises(openai.APIStatusError, match="cannot constrain its output"):
        client.responses.parse(model="words", input="x", text_format=Trip)


def test_a_conversation_with_a_call(client):
    """The output of a response and the output of its call are the input of the next one, as the client sends them."""
    conversation = [{"role": "user", "content": [{"type": "input_text", "text": f"sure {CALL}"}]}]
    first = ask(client, conversation, tools=TOOLS)
    conversation += first.output
    conversation.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny today"})
    second = ask(client, conversation, tools=TOOLS, tool_choice="none", max_output_tokens=16)
    # The template writes the content of each message: the user's, the assistant's and the tool's.
    assert second.output_text.split() == ["sure", *CALL.split(), "sure", "sunny", "today"]
    conversation += second.output
    conversation.append({"role": "developer", "content": "stop"})
    assert ask(client, conversation, tools=TOOLS, tool_choice="none").output_text.endswith("stop")


def test_reasoning(client):
    """The reasoning is an item before the text, and can be sent back."""
    text = "<think> hm well </think> so be it"
    reasoning, message = ask(client, text, model="thinks").output
    assert reasoning.type == "reasoning" and reasoning.id.startswith("rs_") and reasoning.summary == []
    assert (reasoning.content[0].type, reasoning.content[0].text.strip()) == ("reasoning_text", "hm well")
    assert message.content[0].text.strip() == "so be it"
    events = streamed(client, prompt=text, model="thinks")
    assert types(events) == [*REASONING, *MESSAGE, "completed"]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas).strip() == "hm well"
    answer = ask(client, text, model="thinks", reasoning={"effort": "high", "summary": "auto"}, include=["reasoning.encrypted_content"])
    assert answer.reasoning.effort == "high"
    again = ask(client, [{"role": "user", "content": "a"}, *answer.output, {"role": "user", "content": "b"}])
    assert again.output_text.split() == ["a", "so", "be", "it", "b"]
    [only] = ask(client, text, model="thinks", max_output_tokens=2).output
    assert (only.type, only.status) == ("reasoning", "incomplete")
    [message] = ask(client, text, model="thinks", extra_body={"include_reasoning": False}).output
    assert message.type == "message"


REFUSED = {
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "prompt": {"id": "pmpt_1"},
    "background": True,
    "truncation": "auto",
    "moderation": {"model": "m"},
    "context_management": [{"type": "compaction"}],
    "n": 2,
    "messages": [],
    "max_tokens": 5,
    "response_format": {"type": "json_object"},
    "reasoning_effort": "low",
    "chat_template": "{{ 7 }}",
    "return_token_ids": True,
    "include": ["file_search_call.results"],
    "max_output_tokens": 0,
    "temperature": 3,
    "top_logprobs": 21,
    "metadata": {"a": 1},
    "service_tier": "none",
    "store": "yes",
    "tool_choice": "required",
}
"""Values that are refused with the name of their field."""


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_honoured_is_refused(client, field):
    """The error names the field."""
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, extra_body={field: REFUSED[field]})
    assert (raised.value.param or "").split(".")[0] == field and field in raised.value.message


@pytest.mark.parametrize("tool", ["web_search", "file_search", "code_interpreter", "mcp", "custom"])
def test_tools_that_the_server_would_run_are_refused(client, tool):
    """The error names the type of the tool."""
    with pytest.raises(openai.BadRequestError, match=f'invalid tools\\[1\\].type "{tool}": expected function') as raised:
        ask(client, tools=[*TOOLS, {"type": tool}])
    assert raised.value.param == "tools[1].type"


@pytest.mark.parametrize("item", [
    {"type": "item_reference", "id": "msg_1"},
    {"id": "msg_1"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {"type": "function_call_output", "call_id": "call_1", "output": "x"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
    {"role": "tool", "content": "x"},
])  # fmt: skip
def test_items_that_cannot_be_read_are_refused(client, item):
    """The error names the item."""
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, [{"role": "user", "content": "a"}, item])
    assert raised.value.param.startswith("input[1]")


def test_errors(client):
    """An error before the first token has its status, one after it is the event `response.failed`."""
    with pytest.raises(openai.NotFoundError) as raised:
        ask(client, model="nothing")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    fail_at = lambda number: {"vllm_xargs": {"fail_at": number}}
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="failed at token 0"):
            ask(client, stream=stream, extra_body=fail_at(0))
    events = list(ask(client, stream=True, extra_body=fail_at(1)))
    for event in events:
        validate(ResponseStreamEvent, event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert types(events) == [*MESSAGE, "failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error") and "failed at token 1" in failed.error.message
    assert failed.output[0].content[0].text == "one " and failed.output[0].status == "incomplete"
    assert ask(client, extra_body={"nonsense": 1}).status == "completed", "unknown fields are ignored"


def test_no_response_is_stored(client):
    """The client learns it from the error of every method that reads or changes a stored response."""
    answer = ask(client, store=True)
    for method in (client.responses.retrieve, client.responses.delete, client.responses.cancel, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=f"the response '{answer.id}' is not stored"):
            method(answer.id)


def test_many_streams_run_at_once(models):
    """Each has its own events."""

    async def one(client, number):
        async with client.responses.stream(model="words", input=f"{number} " * 5, extra_body={"vllm_xargs": {"delay_ms": 20}}) as stream:
            return (await stream.get_final_response()).output_text

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"http://{models.http}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(20)))

    assert asyncio.run(all_of_them()) == [" ".join([str(number)] * 5) for number in range(20)]


def test_a_client_that_leaves_ends_its_request(models, client):
    """The model finds its request cancelled; it is counted as that."""
    before = total(models.scrape(), "nv_inference_request_failure", model="words", reason="CANCELED")
    stream = ask(client, "w " * 1000, stream=True, extra_body={"vllm_xargs": {"delay_ms": 20}}, max_output_tokens=1000)
    next(iter(stream))
    stream.close()
    eventually(
        "the request is cancelled",
        lambda: total(models.scrape(), "nv_inference_request_failure", model="words", reason="CANCELED") > before,
    )


def test_requests_are_counted_by_route(start):
    """Each request once, by its route and status, and its tokens."""
    server = start([], repository=MODELS)
    with client_of(server) as client:
        ask(client)
        list(ask(client, stream=True))
        list(ask(client, stream=True, extra_body={"vllm_xargs": {"fail_at": 1}}))
        with pytest.raises(openai.NotFoundError):
            ask(client, model="nothing")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_1")
    metrics = server.scrape()
    assert total(metrics, "pharos_requests_total", route="response", code="200") == 3
    assert total(metrics, "pharos_requests_total", route="response", code="404") == 1
    assert total(metrics, "pharos_requests_total", route="stored_response", code="404") == 1
    assert total(metrics, "pharos_request_failures_total", route="response", reason="BACKEND") == 1
    assert total(metrics, "pharos_llm_generation_tokens_total", model="words") == 7
