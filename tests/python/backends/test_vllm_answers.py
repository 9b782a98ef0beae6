"""The answers of a real vLLM, recorded, beside those of this server with the engine of GGUF files: statuses, members and their types."""

import json

import pytest

from backends.vllm_answers import ABSENT, CHAT, COMPLETION, GOLDEN, REQUESTS, chat, completion, differences
from backends.vllm_differences import ANSWERS, ERRORS, STATUSES
from harness.gguf import write_model
from harness.server import Server, binary, kill_all

LIBRARY = binary().parent / "backends/llamacpp/libpharos_llamacpp.so"
pytestmark = pytest.mark.skipif(
    not LIBRARY.is_file(), reason=f"{LIBRARY} is not built: `make llamacpp` builds it, with a C++ compiler"
)
SETTINGS = """
backend: "llamacpp"
parameters { key: "threads" value: { string_value: "1" } }
parameters { key: "context_length" value: { string_value: "512" } }
"""
ERROR = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A server with the model `tiny`."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "models/tiny/1").mkdir(parents=True)
    write_model(folder / "models/tiny/1/model.gguf")
    (folder / "models/tiny/config.pbtxt").write_text(SETTINGS)
    server = Server(folder, [folder / "models"])
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


def ask(server, path: str, body: dict) -> tuple:
    """Sends a request; returns the status and the parsed answer."""
    status, text = server.ask("POST", path, json.dumps(body), headers={"Content-Type": "application/json"})
    return status, json.loads(text)


def events(server, path: str, body: dict) -> list:
    """Sends a request for a stream; returns its events, parsed except for the last one."""
    status, text = server.ask("POST", path, json.dumps(body | {"stream": True}))
    assert status == 200, text
    *first, last, empty = text.split("\n\n")
    assert last == "data: [DONE]" and not empty
    assert all(event.startswith("data: {") and "\n" not in event for event in first)
    return [json.loads(event.removeprefix("data: ")) for event in first]


@pytest.mark.parametrize("case", REQUESTS)
def test_answers_have_the_form_of_vllm(tiny, case):
    """Each place that differs is in the table of differences, and each entry of the table is a difference."""
    golden = GOLDEN[case]
    status, body = ask(tiny, *REQUESTS[case])
    if case in STATUSES:
        ours, field, _ = STATUSES[case]
        assert (status, golden["status"] == ours) == (ours, False), "the entry of the table is no difference"
        if status != 200:
            assert set(body["error"]) == ERROR and field == body["error"]["param"]
            return
        golden = GOLDEN[{CHAT: "unkfield", COMPLETION: "stop"}[REQUESTS[case][0]]]
    assert status == golden["status"], body
    known = ANSWERS if status == 200 else ERRORS
    found = differences(golden["body"], body)
    if case == "tools_named":
        calls = {place for place in found if place.startswith("choices[].message.tool_calls")}
        assert len(calls) == 5 and found.pop("choices[].message.content") == ("string", "null")
        found = {place: pair for place, pair in found.items() if place not in calls}
    if case == "stopmany":
        assert found.pop("choices[].stop_reason", ("string", "null")) == ("string", "null")
    if case == "ctx3":
        assert found.pop("choices[].stop_reason") == ("string", "null")
    assert {place: pair for place, pair in found.items() if known.get(place, [None])[0] != pair} == {}
    if status == 200:
        assert set(found) == set(known), "an entry of the table is no difference"


def test_every_recording_is_compared():
    """The table of requests has all recordings."""
    assert set(REQUESTS) == set(GOLDEN) and not ABSENT & set(GOLDEN) and set(STATUSES) <= set(REQUESTS)


def test_reasons_of_the_end_are_those_of_vllm(tiny):
    """The recordings whose reason does not follow from random weights."""
    for case in ("choice", "ctx2", "json_schema", "n2ok", "stop"):
        status, body = ask(tiny, *REQUESTS[case])
        theirs = GOLDEN[case]["body"]["choices"]
        ends = lambda choices: [(one["index"], one["finish_reason"], one["stop_reason"]) for one in choices]  # noqa: E731
        assert (status, ends(body["choices"])) == (200, ends(theirs)), case
    used = ask(tiny, *REQUESTS["ctx2"])[1]["usage"]
    assert used["total_tokens"] == 512 == GOLDEN["ctx2"]["body"]["usage"]["total_tokens"], "the context is used up"


def test_chats_stream_in_the_order_of_vllm(tiny):
    """The role of each choice, then text, the reason of the end, the usage, and the mark of the end."""
    _, body = chat(n=2, temperature=1, seed=1, max_tokens=4, stream_options={"include_usage": True})
    chunks = events(tiny, CHAT, body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *texts, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    for index in range(2):
        own = [choice for chunk in texts for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[0]["finish_reason"] is None
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] in ("stop", "length")
    continuous = events(tiny, CHAT, chat(max_tokens=4, stream_options={"include_usage": True, "continuous_usage_stats": True})[1])
    counts = [chunk["usage"]["completion_tokens"] for chunk in continuous]
    assert counts == sorted(counts) and counts[-1] == 3


def test_completions_stream_in_the_order_of_vllm(tiny):
    """Text, the reason of the end, the usage."""
    chunks = events(tiny, COMPLETION, completion("one", max_tokens=3, logprobs=1, stream_options={"include_usage": True})[1])
    *texts, last = chunks
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == " two three four"
    assert [chunk["choices"][0]["finish_reason"] for chunk in texts] == [None] * (len(texts) - 1) + ["length"]
    assert all(set(chunk["choices"][0]["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"} for chunk in texts)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3


def test_other_answers_of_vllm(tiny):
    """Statuses that vLLM has without a body that was recorded: unknown models, wrong methods, bodies that are no JSON."""
    status, body = ask(tiny, *chat(model="none"))
    assert (status, body["error"]["param"], body["error"]["code"]) == (404, "model", "model_not_found")
    for method, path, text, expected in [
        ("POST", CHAT, "{", 400),
        ("POST", CHAT, "[]", 400),
        ("POST", CHAT, '{"model": "tiny"}', 400),
        ("GET", CHAT, None, 405),
    ]:
        status, text = tiny.ask(method, path, text)
        assert status == expected and set(json.loads(text)["error"]) == ERROR, (path, text)


def test_models_have_the_members_of_vllm(tiny):
    """The members that pickers and clients read."""
    body = json.loads(tiny.get("/v1/models")[1])
    assert body["object"] == "list"
    (model,) = body["data"]
    assert {"id", "object", "created", "owned_by"} <= set(model) and model["id"] == "tiny"


@pytest.mark.parametrize("body", [chat("cold " * 600), completion("cold " * 600)])
def test_a_prompt_that_is_too_long_has_a_code(tiny, body):
    """Routers and agents shorten the prompt then."""
    status, answer = ask(tiny, *body)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"


def test_an_error_of_a_schema_names_the_field_of_the_client(tiny):
    """The client has written response_format."""
    _, answer = ask(tiny, *REQUESTS["badschema"])
    assert answer["error"]["param"] == "response_format"
