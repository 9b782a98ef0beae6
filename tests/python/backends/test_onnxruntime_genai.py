"""The backend `onnxruntime_genai`: the real engine with small models whose next token follows from the last one (`harness/genai.py`)."""

import asyncio
import importlib.util
import json
import os
import signal
import time

import openai
import pytest

from harness.genai import CONTEXT_LENGTH, COUNT, LETTERS, SIDES, write_model
from harness.server import Server, kill_all, total
from harness.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai has no wheel for this interpreter or machine"
)
SEQUENCES = 4
FORMS = ("padded", "static", "paged")
"""The models of the server: sequences with a generator each, sequences in static batches, and sequences in dynamic batches."""
SMALL = 64
"""The blocks of the KV cache of the model `small`, of 16 tokens each."""
LONG = CONTEXT_LENGTH - 100
"""The tokens of a text that takes seconds."""


def settings(**parameters) -> str:
    """Returns a configuration with parameters."""
    entries = [f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n' for name, value in parameters.items()]
    return 'backend: "onnxruntime_genai"\n' + "".join(entries)


def add(folder, name: str, paged=False, config: str = settings(), **more):
    """Adds a model to the folder of a repository."""
    write_model(folder / "models" / name / "1", paged, **more)
    (folder / "models" / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A server with a model of each form, and `base`, which has no chat template and whose files are in another directory."""
    folder = tmp_path_factory.mktemp("genai")
    add(folder, "padded")
    add(folder, "static", config=settings(static_batches="true"))
    add(folder, "paged", paged=True)
    add(folder, "small", paged=True, blocks=SMALL)
    write_model(folder / "files", chat_template=None)
    (folder / "models/base/1").mkdir(parents=True)
    (folder / "models/base/config.pbtxt").write_text(settings(model_directory=folder / "files"))
    server = Server(folder, [folder / "models"])
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


def client_of(server, **more) -> openai.OpenAI:
    """Returns OpenAI's client, which does not repeat requests."""
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S, **more)


@pytest.fixture
def client(tiny):
    """A client of the server."""
    with client_of(tiny) as client:
        yield client


def complete(client, prompt, model="padded", **more):
    """Sends a completion at temperature 0, unless it has another one."""
    return client.completions.create(model=model, prompt=prompt, **({"temperature": 0} | more))


def say(client, text="hi", model="padded", **more):
    """Sends a chat."""
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **more)


def gauge(server, name: str, model: str) -> float:
    """Returns the value of a metric of a model."""
    return total(server.scrape(), f"pharos_llm_{name}", model=model)


@pytest.mark.smoke
@pytest.mark.parametrize("model", FORMS)
def test_text_and_usage(client, model):
    """The text of the model, its tokens and the reasons of the end. The tokens that begin and end a text count."""
    answer = complete(client, "one two", model, max_tokens=50)
    assert answer.choices[0].text.split() == COUNT[2:]
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    short = complete(client, "<s>one", model, max_tokens=2)
    assert (short.choices[0].text.split(), short.choices[0].finish_reason) == (COUNT[1:3], "length")
    assert (short.usage.prompt_tokens, short.usage.completion_tokens) == (2, 2), "the token that begins a text is there once"
    chat = say(client, model=model)
    assert (chat.choices[0].message.content.split(), chat.choices[0].finish_reason) == (["hello", "world"], "stop")
    chunks = list(say(client, model=model, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == chat.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) == 2
    assert chunks[-1].usage == chat.usage and chat.usage.completion_tokens == 3


@pytest.mark.parametrize("model", ["padded", "static"])
def test_the_cache_has_the_whole_prompt(client, model):
    """The most frequent word of a prompt, also of one that is computed in parts."""
    text = "three " * 200 + "five " * 200
    assert complete(client, text + "recall", model, max_tokens=1).choices[0].text == " three", "the first one of two equals"
    assert complete(client, text + "five recall", model, max_tokens=1).choices[0].text == " five"


@pytest.mark.parametrize("model", FORMS)
def test_characters_of_several_tokens(client, model):
    """A character is sent when all of its bytes are there, and not at all if the limit cuts it."""
    answer = complete(client, "euro", model, max_tokens=9)
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("€", 4)
    parts = [chunk.choices[0].text for chunk in complete(client, "euro", model, max_tokens=9, stream=True)]
    assert "".join(parts) == "€"
    assert complete(client, "euro", model, max_tokens=2).choices[0].text == ""


@pytest.mark.parametrize("model", FORMS)
def test_requests_beside_each_other_do_not_mix(tiny, model):
    """Forty requests at a time, with other prompts and limits: each has its own text, and nothing waits for ever."""

    async def one(client, number):
        begin = number % 8
        most = 1 + number % 9
        stream = await client.completions.create(
            model=model, prompt="two " * (number % 5) + COUNT[begin], temperature=0, max_tokens=most, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text.split() == COUNT[begin + 1 :][:most], number

    async def every_one():
        async with openai.AsyncOpenAI(base_url=f"http://{tiny.http}/v1", api_key="none", max_retries=0) as client:
            await asyncio.wait_for(asyncio.gather(*(one(client, number) for number in range(40))), DEADLINE_S)

    asyncio.run(every_one())


@pytest.mark.parametrize("model", FORMS)
def test_ends_of_the_text(client, model):
    """Stop strings, stop tokens, and texts that end later than the model would end them."""
    stopped = complete(client, "one", model, stop=["ur f"], max_tokens=50)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" two three fo", "stop")
    assert stopped.choices[0].stop_reason == "ur f"
    assert stopped.usage.completion_tokens == 4, "the engine has stopped"
    kept = complete(client, "one", model, stop=["three"], max_tokens=50, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == " two three"
    held = complete(client, "eight", model, stop=["ninety"], max_tokens=50)
    assert (held.choices[0].text, held.choices[0].stop_reason) == (" nine", None), "what may begin a stop string is sent at the end"
    (token,) = complete(client, "three", model, max_tokens=1, extra_body={"return_token_ids": True}).choices[0].token_ids
    ended = complete(client, "one", model, max_tokens=50, extra_body={"stop_token_ids": [token]})
    assert (ended.choices[0].text, ended.choices[0].stop_reason) == (" two three", token)
    assert ended.usage.completion_tokens == 3
    longer = complete(client, "eight", model, max_tokens=4, extra_body={"ignore_eos": True})
    assert (longer.usage.completion_tokens, longer.choices[0].finish_reason) == (4, "length")
    assert complete(client, "eight", model, max_tokens=9, extra_body={"min_tokens": 3}).usage.completion_tokens >= 3


@pytest.mark.parametrize("model", ["padded", "paged"])
def test_sampling_follows_the_probabilities(client, model):
    """The six sides of a die are equally likely; a seed repeats them, and the other parameters act."""
    roll = lambda **more: complete(client, "dice", model, **({"temperature": 1, "max_tokens": 20} | more)).choices[0].text  # noqa: E731
    assert {roll(seed=seed, max_tokens=1).strip() for seed in range(60)} == set(SIDES)
    first, again, other = roll(seed=7), roll(seed=7), roll(seed=8)
    assert first == again != other
    assert len({roll() for _ in range(5)}) > 1, "without a seed, each request has its own random numbers"
    for greedy in ({"temperature": 0}, {"extra_body": {"top_k": 1}}):
        assert roll(**greedy) == roll(**greedy)
    assert len({roll(seed=seed, max_tokens=1, extra_body={"top_k": 2}) for seed in range(30)}) == 2
    assert len({roll(seed=seed, max_tokens=1, top_p=0.3) for seed in range(30)}) == 2
    repeated = lambda **more: complete(client, "loop", model, temperature=1, seed=1, max_tokens=5, **more).choices[0].text  # noqa: E731
    assert (repeated() == " loop" * 5, repeated(extra_body={"repetition_penalty": 25}) == " loop" * 5) == (True, False)


def test_sampling_without_parameters_is_that_of_the_model(tmp_path):
    """`search` of the model decides whether a request that leaves out all of them is random."""
    for name, search in (("greedy", {}), ("random", {"do_sample": True, "top_k": 50, "top_p": 1.0, "temperature": 1.0})):
        add(tmp_path, name, search=search)
    server = Server(tmp_path, [tmp_path / "models"])
    with server, client_of(server) as client:
        texts = lambda model: {client.completions.create(model=model, prompt="dice", max_tokens=20).choices[0].text for _ in range(5)}  # noqa: E731
        assert (len(texts("greedy")), len(texts("random")) > 1) == (1, True)


@pytest.mark.parametrize("model", FORMS)
def test_choices_share_the_engine(client, model):
    """Several choices of a prompt; more than the sequences of the engine are refused."""
    answer = complete(client, "dice", model, n=SEQUENCES, temperature=1, max_tokens=8)
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 8 * SEQUENCES and answer.usage.prompt_tokens == 2
    with pytest.raises(openai.BadRequestError, match=f"n {SEQUENCES + 1} is not allowed.*max_sequences"):
        complete(client, "dice", model, n=SEQUENCES + 1, temperature=1, max_tokens=8)


SCHEMAS = [
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"enum": ["Red", "green"]},
    {
        "type": "object",
        "properties": {"Name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["Name", "age"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("model", ["padded", "paged"])
def test_structured_output_is_enforced(client, model):
    """All tokens are equally likely for the model, or another one is, and yet each text has its structure."""
    for number, schema in enumerate(SCHEMAS):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        answer = say(client, "loop", model, response_format=form, temperature=1, max_tokens=300)
        assert answer.choices[0].finish_reason == "stop", answer
        value = json.loads(answer.choices[0].message.content)
        match number:
            case 0:
                assert 0 <= value <= 999
            case 1:
                assert value in ("Red", "green")
            case 2:
                assert list(value) == ["Name", "age"] and len(value["Name"]) <= 5 and 0 <= value["age"] <= 99
    structured = lambda value: say(  # noqa: E731
        client, model=model, max_tokens=200, temperature=1, extra_body={"structured_outputs": value}
    ).choices[0].message.content
    assert structured({"choice": ["Yes", 'n"o']}) in ("Yes", 'n"o')
    digits = structured({"regex": "[0-9]{3}-[A-F]{2}"})
    assert len(digits) == 6 and digits[3] == "-" and digits[:3].isdigit() and digits.isupper()
    assert structured({"grammar": 'start: "a" b\nb: "x" | "y" b'}).endswith("x")


WRONG_STRUCTURES = [{"regex": "("}, {"grammar": "start: nothing"}, {"json": {"type": "what"}}]


@pytest.mark.parametrize("model", ["padded", "paged"])
@pytest.mark.parametrize("structure", WRONG_STRUCTURES, ids=range(len(WRONG_STRUCTURES)))
def test_wrong_structures_are_refused(client, model, structure):
    """The status is 400, and the others are served."""
    with pytest.raises(openai.BadRequestError, match="refuses the request"):
        complete(client, "one", model, max_tokens=5, extra_body={"structured_outputs": structure})
    assert complete(client, "one", model, max_tokens=1).choices[0].text == " two"


BOMBS = [
    {"regex": "(((a{1,999}){1,999}){1,999}){1,999}"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"json": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"enum": [f"text {number}" for number in range(9000)]}},
    {"choice": [f"choice {number}" for number in range(9000)]},
    {"json": {"allOf": [{"anyOf": [{"type": "string", "pattern": f"a*b{number}"}, {"type": "integer", "minimum": number}]} for number in range(30)]}},
    {"json": {"$defs": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}, "allOf": [{"properties": {"p": {"$ref": "#/$defs/a"}}}] * 40}},
    {"grammar": 'start: %json {"type": "array", "maxItems": 1000000000}'},
    {"grammar": 'start: "a"{1000000000}'},
    {"regex": "a{1000000000}"},
    {"grammar": "start: " + " ".join(f"r{number}" for number in range(3000)) + "".join(f"\nr{number}: \"a\"*" for number in range(3000))},
]


@pytest.mark.parametrize("model", ["padded", "paged"])
@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_a_costly_structure_is_refused_or_bounded(client, tiny, bomb, model):
    """The answer comes in time, and other requests are served with it and after it."""
    began, workers = time.monotonic(), tiny.workers()
    beside = complete(client, "loop", model, max_tokens=400, stream=True)
    try:
        complete(client, "hi", model, max_tokens=5, temperature=1, extra_body={"structured_outputs": bomb})
    except openai.BadRequestError as error:
        assert "structured" in str(error) or "ONNX Runtime GenAI" in str(error) or "JSON" in str(error), error
    assert sum(len(chunk.choices[0].text.split()) for chunk in beside) == 400
    assert complete(client, "one", model, max_tokens=1).choices[0].text == " two"
    assert time.monotonic() - began < 20
    assert tiny.workers() == workers, "no process was replaced"


@pytest.mark.parametrize("model", FORMS)
def test_a_client_that_leaves_frees_its_sequence(client, tiny, model):
    """A long text ends when its reader closes the connection, and nothing of it is left."""
    began = gauge(tiny, "generation_tokens_total", model)
    streams = [complete(client, "loop", model, max_tokens=LONG, stream=True) for _ in range(1 if model == "static" else SEQUENCES)]
    for stream in streams:
        next(iter(stream))
        stream.close()
    eventually("all sequences are free", lambda: gauge(tiny, "running_requests", model) == gauge(tiny, "waiting_requests", model) == 0)
    assert complete(client, "one", model, max_tokens=1).choices[0].text == " two"
    assert gauge(tiny, "generation_tokens_total", model) - began < LONG, "the engine has stopped"


def test_other_requests_do_not_wait_for_a_slow_reader(client, tiny):
    """A client that reads nothing gets all of its text later: the text is generated, and the others are served."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    slow = complete(client, "loop", "paged", max_tokens=LONG, stream=True, stream_options=usage)
    eventually("the text is generated", lambda: gauge(tiny, "running_requests", "paged") == 0)
    began = time.monotonic()
    for _ in range(20):
        assert complete(client, "one", "paged", max_tokens=50).choices[0].text.split() == COUNT[1:]
    assert time.monotonic() - began < DEADLINE_S
    assert sum(len(chunk.choices[0].text.split()) for chunk in slow if chunk.choices) == LONG


def test_a_full_cache_does_not_stop_the_engine(client, tiny):
    """Four texts need twice the blocks of the KV cache. Those that are interrupted continue where they were."""
    letters = LETTERS * 40

    async def one(client, number):
        answer = await client.completions.create(model="small", prompt=letters[: number + 1], temperature=0, max_tokens=500)
        assert answer.choices[0].text == letters[number + 1 :][:500] and answer.usage.completion_tokens == 500, number
        return answer.usage.prompt_tokens

    async def every_one():
        async with openai.AsyncOpenAI(base_url=f"http://{tiny.http}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.wait_for(asyncio.gather(*(one(client, number) for number in range(8))), DEADLINE_S)

    prompts = asyncio.run(every_one())
    assert prompts == list(range(2, 10)), "the token that begins a text, and the letters"
    with pytest.raises(openai.BadRequestError, match=f"context of the model is {SMALL * 16 + 1} tokens"):
        complete(client, "loop " * 1100, "small", max_tokens=1)


def test_a_prefix_is_used_again(client):
    """The engine with dynamic batches says how many tokens of a prompt it had."""
    prompt = "cold " * 100
    first = complete(client, prompt, "paged", max_tokens=1)
    again = complete(client, prompt[:-1] + " one", "paged", max_tokens=1)
    assert again.choices[0].text == " two" and again.usage.prompt_tokens == first.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens >= 64


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"prompt": "loop " * CONTEXT_LENGTH}, f"context of the model is {CONTEXT_LENGTH} tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"extra_body": {"bad_words": ["a"]}}, "bad_words is not supported"),
        ({"extra_body": {"min_p": 0.5}}, "min_p is not supported"),
        ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens is not supported"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "{}"}}}, "structural_tag is not supported"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}}, "whitespace_pattern is not supported"),
        ({"model": "static", "seed": 1}, "seed is not supported by static batches"),
        ({"model": "static", "extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs is not supported by static batches"),
    ],
)
def test_wrong_requests_are_refused(client, fields, part):
    """The error names the field and what is allowed; nothing is accepted without an effect."""
    with pytest.raises(openai.BadRequestError, match=part):
        complete(client, **({"prompt": "one", "max_tokens": 1} | fields))


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"temprature": 1}, "temprature is not a parameter of sampling; those are temperature, "),
        ({"temperature": -1}, "temperature -1 is not allowed: it must be a number from 0 to 2"),
        ({"top_p": 0}, "top_p 0 is not allowed"),
        ({"max_tokens": 1.5}, "max_tokens 1.5 is not allowed: it must be an integer above 0"),
        ({"min_tokens": 20}, "min_tokens 20 is not allowed: it must be at most max_tokens, which is 16"),
        ({"stop": ["a"] * 17}, "stop .* is not allowed"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "must have one of json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is not allowed"),
        ({"structured_outputs": 5}, "must have one of json"),
    ],
)
def test_generate_refuses_wrong_parameters(tiny, parameters, part):
    """Over Triton's extension nothing was checked before."""
    body = {"text_input": "one", "sampling_parameters": json.dumps(parameters)}
    status, text = tiny.ask("POST", "/v2/models/padded/generate", json.dumps(body))
    assert status == 400
    with pytest.raises(AssertionError, match=part):
        raise AssertionError(json.loads(text)["error"])


def test_generate_serves_the_same_model(tiny):
    """Parameters as vllm_backend takes them; the prompt comes before the text unless it is excluded."""
    generate = lambda body: json.loads(tiny.ask("POST", "/v2/models/padded/generate", json.dumps(body))[1])  # noqa: E731
    answer = generate({"text_input": "one", "parameters": {"temperature": 0, "max_tokens": 2}})
    assert answer["text_output"] == "one two three"
    assert (answer["finish_reason"], answer["num_output_tokens"]) == ("length", 2)
    text = json.dumps({"temperature": "0", "max_tokens": "3", "ignore_eos": "True"})
    answer = generate({"text_input": "eight", "sampling_parameters": text, "exclude_input_in_output": True})
    assert answer["text_output"].startswith(" nine") and answer["num_output_tokens"] == 3


def test_a_base_model_has_no_chats(client):
    """A model without a template answers completions only. Its files are in the directory of a parameter."""
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        say(client, model="base")
    assert complete(client, "one", "base", max_tokens=1).choices[0].text == " two"


def test_the_configuration_is_that_of_the_files(tiny):
    """The tensors, the template with its tokens, and the requests that the engine holds."""
    config = json.loads(tiny.get("/v2/models/paged/config")[1])
    assert config["model_transaction_policy"] == {"decoupled": True} and config["max_batch_size"] == 0
    assert config["parameters"]["bos_token"] == {"string_value": "<s>"}
    assert config["parameters"]["max_open_requests"] == {"string_value": "5"}
    assert "logprobs" not in [entry["name"] for entry in config["output"]]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("package", "needs the Python package 'onnxruntime-genai'"),
        ("empty", "genai_config.json' does not exist"),
        ("broken", "genai_config.json' is not JSON"),
        ("weights", "ONNX Runtime GenAI cannot load"),
        ("max_sequences", "parameter 'max_sequences' is 'many'; allowed are whole numbers from 1"),
        ("static_batches", "parameter 'static_batches' is 'true', but .* has dynamic batches"),
    ],
)
def test_a_model_that_cannot_be_served_says_why(tmp_path, change, part):
    """The model is not ready, and its reason names the package, the file or the parameter."""
    version = tmp_path / "models/m/1"
    value = {"max_sequences": "many", "static_batches": "true"}
    add(tmp_path, "m", paged=True, config=settings(**{name: value[name] for name in value if name == change}))
    server = Server(tmp_path, [tmp_path / "models"], ["--exit-on-error=false"])
    match change:
        case "package":
            # A package of this name that cannot be imported, before the real one.
            (tmp_path / "first").mkdir()
            (tmp_path / "first/onnxruntime_genai.py").write_text("raise ImportError('it is absent')\n")
            server.environment = {"PYTHONPATH": str(tmp_path / "first")}
        case "empty":
            (version / "genai_config.json").unlink()
        case "broken":
            (version / "genai_config.json").write_text("{")
        case "weights":
            (version / "model.onnx").write_bytes(b"x" * 100)
    server.launch()
    server.wait_until_ready("/v2/health/live")
    entry = lambda: server.index().get("m", [{}])[0]  # noqa: E731
    eventually("the load has failed", lambda: entry().get("state") == "UNAVAILABLE")
    with pytest.raises(AssertionError, match=part):
        raise AssertionError(entry()["reason"])
    kill_all([server])


def test_an_engine_that_is_killed_ends_all_its_streams(tmp_path):
    """Twelve streams: each ends with an error or with its text, and a new process serves the next ones."""

    async def one(client, number):
        tokens = 0
        try:
            stream = await client.completions.create(model="m", prompt="loop", max_tokens=2000, temperature=0, stream=True)
            async for chunk in stream:
                tokens += len(chunk.choices[0].text.split())
        except openai.APIError:
            return tokens, True
        return tokens, False

    async def all_of_them(server):
        async with openai.AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:
            streams = [asyncio.create_task(one(client, number)) for number in range(12)]
            await asyncio.to_thread(eventually, "tokens come", lambda: gauge(server, "generation_tokens_total", "m") > 100)
            for worker in server.workers():
                os.kill(worker, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*streams), DEADLINE_S)

    add(tmp_path, "m")
    server = Server(tmp_path, [tmp_path / "models"])
    with server:
        results = asyncio.run(all_of_them(server))
        assert all(tokens == 2000 or failed for tokens, failed in results) and any(tokens for tokens, _ in results)

        def answers():
            with client_of(server) as client:
                try:
                    return complete(client, "one", "m", max_tokens=1).choices[0].text == " two"
                except openai.APIError:
                    return False

        eventually("a new engine answers", answers)
