"""The backend `llamacpp`: the real engine with a small model whose next token follows from the last one (`harness/gguf.py`)."""

import asyncio
import json
import os
import random
import shutil
import signal
import threading
import time

import openai
import pytest

from harness.gguf import CONTEXT_LENGTH, COUNT, SIDES, write_model
from harness.llamacpp import CONTEXT, MAX_SEQUENCES, SETTINGS, client_of, needs_llamacpp
from harness.server import ROOT, Server, kill_all, total
from harness.waiting import DEADLINE_S, eventually, pause_as_client

pytestmark = needs_llamacpp


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A server with the model `tiny`, and `base`, which has no chat template and no configuration."""
    folder = tmp_path_factory.mktemp("llamacpp")
    for name, template in (("tiny", {}), ("base", {"chat_template": None})):
        (folder / "models" / name / "1").mkdir(parents=True)
        write_model(folder / "models" / name / "1/model.gguf", **template)
    (folder / "models/tiny/config.pbtxt").write_text(SETTINGS)
    server = Server(folder, [folder / "models"])
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


@pytest.fixture
def client(tiny):
    """A client of the server."""
    with client_of(tiny) as client:
        yield client


def complete(client, prompt, **more):
    """Sends a completion at temperature 0, unless it has another one."""
    return client.completions.create(model="tiny", prompt=prompt, **({"temperature": 0} | more))


def say(client, text="hi", **more):
    """Sends a chat."""
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], **more)


def gauge(server, name: str, model="tiny") -> float:
    """Returns the value of a gauge of a model."""
    return total(server.scrape(), name, model=model)


@pytest.mark.smoke
def test_a_file_answers_chats(tmp_path):
    """`pharos serve model.gguf`: nothing else is configured."""
    write_model(tmp_path / "little.gguf")
    server = Server(tmp_path, [tmp_path / "little.gguf"])
    with server, client_of(server) as client:
        answer = client.chat.completions.create(model="little", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content.strip() == "hello world"
        assert answer.choices[0].finish_reason == "stop"
        config = json.loads(server.get("/v2/models/little/config")[1])
        assert config["backend"] == "llamacpp" and config["model_transaction_policy"] == {"decoupled": True}
        assert config["parameters"]["bos_token"] == {"string_value": "<s>"}


@pytest.mark.smoke
def test_text_and_usage(client):
    """The text of the model, its tokens and the reasons of the end."""
    answer = complete(client, "one two", max_tokens=50)
    assert answer.choices[0].text.split() == COUNT[2:]
    assert answer.choices[0].finish_reason == "stop"
    # The beginning of the text counts, and its end.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    short = complete(client, "one", max_tokens=2)
    assert (short.choices[0].text.split(), short.choices[0].finish_reason) == (COUNT[1:3], "length")
    chunks = list(say(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices).split() == ["hello", "world"]
    assert chunks[-1].usage.completion_tokens == 3


def test_stop_strings_and_tokens(client):
    """A stop string ends the text where it begins, and the generation in the same step."""
    stopped = complete(client, "one", stop=["ur f"], max_tokens=50)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" two three fo", "stop")
    assert stopped.choices[0].stop_reason == "ur f"
    assert stopped.usage.completion_tokens == 4, "the engine has stopped"
    kept = complete(client, "one", stop=["three"], max_tokens=50, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == " two three"
    longer = complete(client, "eight", max_tokens=4, extra_body={"ignore_eos": True})
    assert (longer.usage.completion_tokens, longer.choices[0].finish_reason) == (4, "length")
    assert complete(client, "eight", max_tokens=9, extra_body={"min_tokens": 3}).usage.completion_tokens >= 3


def test_sampling_follows_the_probabilities(client):
    """The six sides of a die are equally likely; a seed repeats them, and `top_k`, bias and temperature act."""
    roll = lambda **more: complete(client, "dice", temperature=1, max_tokens=1, **more).choices[0].text.strip()  # noqa: E731
    assert {roll(seed=seed) for seed in range(60)} == set(SIDES)
    text = [complete(client, "dice", temperature=1, max_tokens=20, seed=seed).choices[0].text for seed in (7, 7, 8)]
    assert text[0] == text[1] != text[2]
    answer = complete(client, "dice", max_tokens=2, logprobs=5)
    probabilities = answer.choices[0].logprobs
    assert probabilities.token_logprobs[0] == pytest.approx(-1.79, abs=0.01), "one of six"
    assert len([side for side in probabilities.top_logprobs[0] if side.strip(" \u2581") in SIDES]) >= 5
    assert probabilities.token_logprobs[1] == pytest.approx(0, abs=0.01), "always the word dice"


def test_choices_share_the_engine(client):
    """Several choices of a prompt; more than the sequences of the engine are refused."""
    answer = complete(client, "dice", n=MAX_SEQUENCES, temperature=1, seed=1, max_tokens=8)
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 8 * MAX_SEQUENCES
    with pytest.raises(openai.BadRequestError, match=f"n {MAX_SEQUENCES + 1} is not allowed.*max_sequences"):
        complete(client, "dice", n=MAX_SEQUENCES + 1, temperature=1, max_tokens=8)


def test_a_prefix_is_used_again(client, tiny):
    """The second prompt that begins with the same tokens computes only the others."""
    prompt = "cold " * 40
    before = total(tiny.scrape(), "pharos_llm_cached_prompt_tokens_total", model="tiny")
    first = complete(client, prompt, max_tokens=1)
    again = complete(client, prompt + "one", max_tokens=1)
    assert again.choices[0].text.strip() == "two"
    cached = total(tiny.scrape(), "pharos_llm_cached_prompt_tokens_total", model="tiny") - before
    assert cached >= first.usage.prompt_tokens - 2


def test_requests_beside_each_other_do_not_mix(tiny):
    """Forty requests at a time, with other prompts: each has its own text, and nothing waits for ever."""

    async def one(client, number):
        begin = number % 8
        stream = await client.completions.create(model="tiny", prompt=COUNT[begin], temperature=0, max_tokens=20, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text.split() == COUNT[begin + 1 :], number

    async def every_one():
        async with openai.AsyncOpenAI(base_url=f"http://{tiny.http}/v1", api_key="none", max_retries=0) as client:
            await asyncio.wait_for(asyncio.gather(*(one(client, number) for number in range(40))), DEADLINE_S)

    asyncio.run(every_one())


SCHEMAS = [
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"enum": ["red", "green"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
]


def random_schema(chance: random.Random, depth: int = 0) -> dict:
    """Returns a schema whose values are short."""
    kinds = ["integer", "boolean", "enum", "string", "null"] + (["object", "array"] if depth < 2 else [])
    match chance.choice(kinds):
        case "integer":
            return {"type": "integer", "minimum": chance.randint(-99, 0), "maximum": chance.randint(1, 99)}
        case "enum":
            return {"enum": chance.sample(["a", "bc", 1, 2.5, True, None], 3)}
        case "string":
            return {"type": "string", "maxLength": chance.randint(1, 6)}
        case "array":
            return {"type": "array", "items": random_schema(chance, depth + 1), "maxItems": 2}
        case "object":
            names = chance.sample(["a", "b", "c", "d"], chance.randint(1, 3))
            properties = {name: random_schema(chance, depth + 1) for name in names}
            return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        case kind:
            return {"type": kind}


def check_value(schema: dict, value):
    """Fails unless a value follows a schema of `SCHEMAS` or `random_schema`."""
    if "enum" in schema:
        assert any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in schema["enum"])
        return
    match schema["type"]:
        case "integer":
            assert isinstance(value, int) and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            assert isinstance(value, bool)
        case "null":
            assert value is None
        case "string":
            assert isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            assert isinstance(value, list) and len(value) <= schema["maxItems"]
            for one in value:
                check_value(schema["items"], one)
        case "object":
            assert set(value) == set(schema["required"])
            for name, one in value.items():
                check_value(schema["properties"][name], one)


def test_json_follows_its_schema_whatever_the_model_writes(client):
    """All tokens are equally likely for the model, and yet each text is JSON of its schema."""
    chance = random.Random(5)
    schemas = SCHEMAS + [random_schema(chance) for _ in range(50)]
    for number, schema in enumerate(schemas):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        # After the word loop alone, one token is likely: the structure overrules it.
        answer = say(client, "loop", response_format=form, temperature=1, seed=number, max_tokens=300)
        assert answer.choices[0].finish_reason == "stop", (schema, answer)
        check_value(schema, json.loads(answer.choices[0].message.content))


def test_other_structures(client):
    """A regular expression, one of several texts, a grammar, and any JSON object."""
    structured = lambda value: say(  # noqa: E731
        client, max_tokens=200, temperature=1, seed=3, extra_body={"structured_outputs": value}
    ).choices[0].message.content
    assert structured({"choice": ["yes", "no"]}) in ("yes", "no")
    digits = structured({"regex": "[0-9]{3}-[a-f]{2}"})
    assert len(digits) == 6 and digits[3] == "-" and digits[:3].isdigit()
    assert structured({"grammar": 'start: "a" b\nb: "x" | "y" b'}).endswith("x")
    for wrong, part in [({"regex": "("}, "structured_outputs is invalid"), ({"grammar": "start: nothing"}, "structured_outputs is invalid")]:
        with pytest.raises(openai.BadRequestError, match=part):
            structured(wrong)


def test_a_forced_call_of_a_function(client):
    """The arguments of a call follow the schema of the function."""
    parameters = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters | {"additionalProperties": False}}}]
    answer = say(client, tools=tools, tool_choice={"type": "function", "function": {"name": "f"}}, temperature=1, seed=2, max_tokens=200)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "f" and 0 <= json.loads(call.function.arguments)["n"] <= 9


def test_a_client_that_leaves_frees_its_sequence(tmp_path):
    """A long text ends when its reader closes the connection."""
    settings = SETTINGS.replace(f'"{CONTEXT}"', f'"{CONTEXT_LENGTH}"')
    with serve_one(tmp_path, settings) as server, client_of(server) as client:
        streams = [complete(client, "loop", max_tokens=CONTEXT_LENGTH - 100, stream=True) for _ in range(MAX_SEQUENCES)]
        for stream in streams:
            next(iter(stream))
            stream.close()
        ended = lambda reason: total(server.scrape(), "pharos_llm_finished_total", reason=reason)  # noqa: E731
        eventually("they count as aborted", lambda: ended("abort") == MAX_SEQUENCES)
        eventually("all sequences are free", lambda: gauge(server, "pharos_llm_running_requests") == 0)
        assert complete(client, "one", max_tokens=1).choices[0].text.strip() == "two"
        generated = total(server.scrape(), "pharos_llm_generation_tokens_total")
        assert generated < CONTEXT_LENGTH, "the engine has stopped"


def test_other_requests_do_not_wait_for_a_slow_reader(client, tiny):
    """A client that reads nothing gets all of its text later; meanwhile the others are served."""
    slow = complete(client, "loop", max_tokens=400, stream=True)
    began = time.monotonic()
    for _ in range(20):
        assert complete(client, "one", max_tokens=50).choices[0].text.split() == COUNT[1:]
    assert time.monotonic() - began < DEADLINE_S
    pause_as_client(0.5)
    assert sum(len(chunk.choices[0].text.split()) for chunk in slow) == 400


def test_requests_beyond_the_sequences_wait_in_the_server(tiny):
    """The engine holds one request more than it runs; the queue, its metrics and its limits are the server's."""
    waiting = lambda: total(tiny.scrape(), "nv_inference_pending_request_count", model="tiny")  # noqa: E731
    stop = threading.Event()

    def run():
        with client_of(tiny) as client:
            while not stop.is_set():
                complete(client, "loop", max_tokens=450)

    threads = [threading.Thread(target=run) for _ in range(3 * MAX_SEQUENCES)]
    for thread in threads:
        thread.start()
    try:
        eventually("requests wait in the server's queue", lambda: waiting() >= MAX_SEQUENCES)
        assert gauge(tiny, "pharos_llm_waiting_requests") <= 1
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"prompt": "cold " * CONTEXT}, f"maximum context length is {CONTEXT} tokens"),
        ({"prompt": "x", "extra_body": {"bad_words": ["a"]}}, "does not support bad_words"),
        ({"prompt": "x", "logit_bias": {"99999999999": 1}}, "logit_bias"),
    ],
)
def test_wrong_requests_are_refused(client, fields, part):
    """The error names the field, its value and what is allowed."""
    with pytest.raises(openai.BadRequestError, match=part):
        complete(client, max_tokens=1, **fields)


def test_a_base_model_has_no_chats(tiny):
    """A model without a template answers completions only."""
    with client_of(tiny) as client:
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            client.chat.completions.create(model="base", messages=[{"role": "user", "content": "x"}])
        assert client.completions.create(model="base", prompt="one", temperature=0, max_tokens=1).choices[0].text.strip() == "two"


def test_generate_serves_the_same_model(tiny):
    """Triton's extension, with parameters as vllm_backend takes them; the prompt comes before the text unless it is excluded."""
    generate = lambda body: json.loads(tiny.ask("POST", "/v2/models/tiny/generate", json.dumps(body))[1])  # noqa: E731
    answer = generate({"text_input": "one", "parameters": {"temperature": 0, "max_tokens": 2}})
    assert answer["text_output"] == "one two three"
    assert (answer["finish_reason"], answer["num_output_tokens"]) == ("length", 2)
    text = json.dumps({"temperature": "0", "max_tokens": "3"})
    answer = generate({"text_input": "one", "sampling_parameters": text, "exclude_input_in_output": True})
    assert answer["text_output"] == " two three four"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("broken", "GGUF"),
        ("empty", "does not exist"),
        ("max_sequences", "parameter 'max_sequences' is 'many'; allowed are 1 to 256"),
        ("context_length", f"at most {CONTEXT_LENGTH} tokens"),
        ("max_open_requests", "allowed are integers above 0"),
    ],
)
def test_a_model_that_cannot_be_served_says_why(tmp_path, change, part):
    """The model is not ready, and its reason names the file or the parameter."""
    version = tmp_path / "models/m/1"
    version.mkdir(parents=True)
    write_model(version / "model.gguf")
    settings = 'backend: "llamacpp"\n'
    match change:
        case "broken":
            (version / "model.gguf").write_bytes(b"GGUX" + bytes(100))
        case "empty":
            shutil.move(version / "model.gguf", version / "other.bin")
        case name:
            value = {"max_sequences": "many", "context_length": "100000", "max_open_requests": "0"}[name]
            settings += f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}'
    (tmp_path / "models/m/config.pbtxt").write_text(settings)
    server = Server(tmp_path, [tmp_path / "models"], ["--exit-on-error=false"])
    server.launch()
    server.wait_until_ready("/v2/health/live")
    entry = lambda: server.index().get("m", [{}])[0]  # noqa: E731
    eventually("the load has failed", lambda: entry().get("state") == "UNAVAILABLE")
    assert part in entry()["reason"]
    kill_all([server])


def serve_one(folder, settings=SETTINGS, options=()):
    """Returns a server with a model `tiny` for one test."""
    version = folder / "models/tiny/1"
    version.mkdir(parents=True)
    write_model(version / "model.gguf")
    (folder / "models/tiny/config.pbtxt").write_text(settings)
    return Server(folder, [folder / "models"], options)


def test_an_engine_that_is_killed_ends_all_its_streams(tmp_path):
    """A hundred streams: each ends with an error or with its text, and every token of the answers is counted once."""

    async def one(client, number):
        tokens, text, failed = 0, "", False
        try:
            stream = await client.completions.create(
                model="tiny", prompt="loop", max_tokens=400, temperature=0, stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )  # fmt: skip
            async for chunk in stream:
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                text += chunk.choices[0].text if chunk.choices else ""
        except openai.APIError:
            failed = True
        return tokens, failed

    async def all_of_them(server):
        async with openai.AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:
            streams = [asyncio.create_task(one(client, number)) for number in range(100)]
            await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
            for worker in server.workers():
                os.kill(worker, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*streams), DEADLINE_S)

    with serve_one(tmp_path) as server:
        results = asyncio.run(all_of_them(server))
        assert len(results) == 100 and all(tokens == 400 or failed for tokens, failed in results)
        counted = total(server.scrape(), "pharos_llm_generation_tokens_total", model="tiny")
        assert counted == sum(tokens for tokens, _ in results)
        finished = {
            reason: total(server.scrape(), "pharos_llm_finished_total", model="tiny", reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert finished["length"] == sum(not failed for _, failed in results) and sum(finished.values()) == 100

        def answers():
            with client_of(server) as client:
                try:
                    return complete(client, "one", max_tokens=1).choices[0].text.strip() == "two"
                except openai.APIError:
                    return False

        eventually("a new engine answers", answers)


BOMBS = [
    {"regex": "(((a{1,999}){1,999}){1,999}){1,999}"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"json": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"enum": [f"text {number}" for number in range(9000)]}},
    {"json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}},
    {"choice": [f"choice {number}" for number in range(9000)]},
    {"grammar": "start: " + " ".join(f"r{number}" for number in range(3000)) + "".join(f"\nr{number}: \"a\"*" for number in range(3000))},
]


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_a_costly_structure_is_refused_or_bounded(client, tiny, bomb):
    """Schemas and expressions of clients: the answer comes in time, and other requests are served meanwhile."""
    began = time.monotonic()
    try:
        say(client, max_tokens=5, temperature=1, extra_body={"structured_outputs": bomb}, timeout=30)
    except openai.BadRequestError as error:
        assert "structured" in str(error) or "JSON" in str(error) or "array" in str(error), error
    assert complete(client, "one", max_tokens=1).choices[0].text.strip() == "two"
    assert time.monotonic() - began < 20
    assert len(tiny.workers()) == 2, "no process was replaced"


def test_tokens_count_for_their_tenants(tmp_path):
    """The tokens of each tenant; those of all tenants are those of the model."""
    definition = (ROOT / "metrics.yaml").read_text() + "\ntenants: {header: x-tenant, limit: 5}\n"
    (tmp_path / "metrics.yaml").write_text(definition)
    with serve_one(tmp_path, options=[f"--metrics-config={tmp_path / 'metrics.yaml'}"]) as server:
        for tenant, tokens in (("a", 3), ("b", 5), ("b", 2)):
            with client_of(server, default_headers={"x-tenant": tenant}) as client:
                complete(client, "loop", max_tokens=tokens)
        metrics = server.scrape()
        of = lambda tenant: total(metrics, "pharos_tenant_generation_tokens_total", tenant=tenant)  # noqa: E731
        assert (of("a"), of("b")) == (3, 7)
        assert total(metrics, "pharos_llm_generation_tokens_total") == 10
        assert total(metrics, "pharos_tenant_prompt_tokens_total") == total(metrics, "pharos_llm_prompt_tokens_total") == 6
