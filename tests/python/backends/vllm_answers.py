"""Requests to OpenAI's API whose answers a real vLLM 0.32 has given (`golden_vllm.json`), and what is the same in two answers.

The model of the recordings has random weights: texts and counts of tokens are noise. Compared are statuses, the names of members, the
types of values, and which of them are null. Recordings of paths that this server does not have are not compared.
"""

import json
from pathlib import Path

GOLDEN = json.loads((Path(__file__).parent / "golden_vllm.json").read_text())
"""Name of a case -> `status` and `body`."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def chat(content="hello", **more) -> tuple:
    """Returns a request for a chat."""
    return CHAT, {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0} | more


def completion(prompt="hello", **more) -> tuple:
    """Returns a request for a completion."""
    return COMPLETION, {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0} | more


def schema(value) -> dict:
    """Returns a response format."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


REQUESTS = {
    "badschema": chat(response_format=schema({"type": "wat"})),
    "bestof": completion(best_of=3),
    "choice": chat(structured_outputs={"choice": ["yes", "no"]}, max_tokens=9),
    "ctx1": completion("hello " * 20, max_tokens=500),
    "ctx2": chat("loop " * 20, max_tokens=None, ignore_eos=True),
    "ctx3": completion(max_tokens=5000),
    "echo0": completion(echo=True, logprobs=1, max_tokens=0),
    "emptymsgs": chat(messages=[]),
    "emptyprompt": completion(""),
    "guided_removed": chat(guided_choice=["yes", "no"], max_tokens=2),
    "imgs": chat([{"type": "text", "text": "what"}, IMAGE]),
    "json_schema": chat(response_format=schema(SCHEMA), max_tokens=300, temperature=1, seed=1),
    "maxtok0": chat(max_tokens=0),
    "n2": completion(n=2),
    "n2ok": completion("dice", n=2, temperature=1, max_tokens=2),
    "nomodel": completion(model=None),
    "priority": chat(priority=5),
    "role": chat(messages=[{"role": "critic", "content": "hello"}]),
    "so_no_stream": chat(stream_options={"include_usage": True}),
    "stop": completion("three", stop=[" f"], max_tokens=9),
    "stopempty": completion(stop=[""]),
    "stopmany": completion(stop=["a", "b", "c", "d", "e"]),
    "suffix": completion(suffix="x"),
    "tools_auto_noparser": chat(tools=TOOLS),
    "tools_empty": chat(tools=[]),
    "tools_named": chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}, max_tokens=300, temperature=1, seed=1),
    "toplp_big": chat(logprobs=True, top_logprobs=25),
    "toplp_nolp": chat(top_logprobs=2),
    "unkfield": chat(nonsense=1),
}
"""Name of a case -> path and body, reconstructed from the answers."""
ABSENT = {"detok", "tok", "emb_b64", "emb_dims", "emb_empty", "emb_float", "emb_fmt", "emb_tok", "rerank", "resp", "score"}
"""Recordings of paths that this server does not have yet."""


def form(value, path="") -> dict:
    """Returns the place of each value of an answer with its type. Elements of lists share a place; equal types of numbers are one."""
    places = {}
    match value:
        case dict():
            for name, one in value.items():
                places |= form(one, f"{path}.{name}" if path else name)
        case list():
            for one in value:
                places |= form(one, f"{path}[]")
            places[path] = "list"
        case None:
            places[path] = "null"
        case bool():
            places[path] = "boolean"
        case int() | float():
            places[path] = "number"
        case str():
            places[path] = "string"
    return places


def without_tokens(answer):
    """Returns an answer whose objects by token, which depend on the weights, have one member with the name `TOKEN`."""
    match answer:
        case dict():
            members = {name: without_tokens(value) for name, value in answer.items()}
            for name in ("top_logprobs", "prompt_logprobs"):
                if isinstance(members.get(name), list):
                    members[name] = [one and {"TOKEN": next(iter(one.values()))} if isinstance(one, dict) else one for one in members[name]]
            return members
        case list():
            return [without_tokens(one) for one in answer]
    return answer


def differences(theirs: dict, ours: dict) -> dict:
    """Returns the places at which two answers differ: place -> their type and ours, `absent` for a missing one."""
    one, other = form(without_tokens(theirs)), form(without_tokens(ours))
    pairs = {place: (one.get(place, "absent"), other.get(place, "absent")) for place in one | other}
    return {place: pair for place, pair in pairs.items() if pair[0] != pair[1]}
