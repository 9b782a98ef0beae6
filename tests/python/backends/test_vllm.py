"""The backend `vllm`: a real vLLM on CPUs with a random model, in the layout of Triton's vllm_backend."""

import asyncio
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from harness.server import ROOT, Server, kill_all, total
from harness.vllm import ARGUMENTS, OWN, PYTHON, VARIABLES, needs_vllm
from harness.waiting import DEADLINE_S, eventually

pytestmark = needs_vllm
CONFIG = """
backend: "vllm"
instance_group [ { count: 1 kind: KIND_MODEL } ]
parameters { key: "adapter_directory" value: { string_value: "../../../adapters" } }
"""


def write_adapter(folder, seed: int):
    """Writes an adapter with random weights."""
    subprocess.run([PYTHON, ROOT / "tests/vllm/adapter.py", folder, str(seed)], check=True, env=os.environ | VARIABLES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A server with the model `tiny`."""
    folder = tmp_path_factory.mktemp("vllm")
    version = folder / "models/tiny/1"
    version.mkdir(parents=True)
    subprocess.run([PYTHON, ROOT / "tests/vllm/tiny.py", version / "hf"], check=True, env=os.environ | VARIABLES)
    (version / "model.json").write_text(json.dumps(ARGUMENTS))
    (folder / "models/tiny/config.pbtxt").write_text(CONFIG)
    write_adapter(version / "listed", 1)
    (version / "multi_lora.json").write_text(json.dumps({"listed": "listed"}))
    for seed in (2, 3, 4):
        write_adapter(folder / f"adapters/{seed}", seed)
    write_adapter(folder / "outside", 5)
    server = Server(folder, [folder / "models"], [f"--python={PYTHON}", "--model-control-mode=explicit", "--load-model=*"])
    server.folder = folder
    server.environment = VARIABLES
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


@pytest.fixture
def client(tiny):
    """OpenAI's client, which does not repeat requests."""
    with openai.OpenAI(base_url=f"http://{tiny.http}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def say(client, text="one two", **more):
    """Sends a chat at temperature 0, unless it has another one."""
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=messages, **({"temperature": 0, "max_tokens": 8} | more))


def test_chats_and_streams_have_the_same_text(client, tiny):
    """The template is that of the tokenizer, whose first token is not added twice; each token is counted once."""
    before = total(tiny.scrape(), "pharos_llm_generation_tokens_total", model="tiny")
    whole = say(client, extra_body={"ignore_eos": True})
    chunks = list(say(client, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert (whole.usage.completion_tokens, chunks[-1].usage.completion_tokens) == (8, 8)
    assert whole.choices[0].finish_reason == "length"
    after = total(tiny.scrape(), "pharos_llm_generation_tokens_total", model="tiny")
    assert after - before == 16
    direct = client.completions.create(model="tiny", prompt="<|user|>one two<|assistant|>", temperature=0, max_tokens=8)
    assert direct.usage.prompt_tokens == whole.usage.prompt_tokens, "the token that begins a text is there once"


def test_choices_and_probabilities(client):
    """Several choices, seeds, and probabilities of each token."""
    answer = say(client, n=3, temperature=1, seed=5, logprobs=True, top_logprobs=2)
    assert len({choice.message.content for choice in answer.choices}) > 1
    positions = answer.choices[0].logprobs.content
    assert positions and all(position.logprob <= 0 and len(position.top_logprobs) == 2 for position in positions)


def test_structured_output_is_enforced(client):
    """Random weights, and yet JSON of the schema."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    answer = say(client, response_format=form, temperature=1, seed=1, max_tokens=200)
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 9
    answer = say(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert answer.choices[0].message.content in ("yes", "no")


def test_many_requests_run_together_and_wait_in_the_server(tiny):
    """More requests than the engine runs: all are answered."""

    async def one(client, number):
        stream = await client.completions.create(
            model="tiny", prompt=f"one {number}", max_tokens=20, stream=True, temperature=0, extra_body={"ignore_eos": True}
        )
        return sum([1 async for chunk in stream if chunk.choices])

    async def every_one():
        async with openai.AsyncOpenAI(base_url=f"http://{tiny.http}/v1", api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.wait_for(asyncio.gather(*(one(client, number) for number in range(24))), 2 * DEADLINE_S)

    assert all(chunks > 0 for chunks in asyncio.run(every_one()))


def test_a_client_that_leaves_ends_its_request(client, tiny):
    """The engine stops to generate for it."""
    stream = say(client, max_tokens=450, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    running = lambda: total(tiny.scrape(), "pharos_llm_running_requests", model="tiny")  # noqa: E731
    say(client)
    eventually("nothing runs", lambda: running() == 0)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"extra_body": {"vllm_xargs": {"unknown": 1}}, "max_tokens": 600, "text": "one " * 600}, "512"),
        ({"extra_body": {"structured_outputs": {"json": {"type": "what"}}}}, "(?i)schema|grammar|type"),
    ],
)
def test_wrong_requests_are_refused(client, fields, part):
    """What vLLM refuses has status 400 and vLLM's reason."""
    text = fields.pop("text", "one")
    with pytest.raises(openai.BadRequestError, match=part):
        say(client, text, **fields)


def test_generate_takes_parameters_as_strings(tiny):
    """The form of vllm_backend's own examples."""
    body = {"text_input": "one two", "parameters": {"stream": False, "temperature": 0, "max_tokens": 4}}
    answer = json.loads(tiny.ask("POST", "/v2/models/tiny/generate", json.dumps(body))[1])
    assert answer["text_output"].startswith("one two"), "the prompt comes first, unless it is excluded"
    text = json.dumps({"temperature": "0", "max_tokens": "4"})
    body = {"text_input": "one two", "sampling_parameters": text, "exclude_input_in_output": True}
    answer = json.loads(tiny.ask("POST", "/v2/models/tiny/generate", json.dumps(body))[1])
    assert answer["num_output_tokens"] <= 4 and not answer["text_output"].startswith("one two")
    body["sampling_parameters"] = json.dumps({"temprature": 1})
    status, text = tiny.ask("POST", "/v2/models/tiny/generate", json.dumps(body))
    assert status == 400 and "temprature" in text


def test_an_engine_that_dies_is_replaced(client, tiny):
    """Its requests fail with a reason, and a new process serves the next ones."""
    engines = lambda: [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_engine(pid, tiny)]  # noqa: E731
    (engine,) = engines()
    os.kill(engine, 9)
    with pytest.raises(openai.APIStatusError):
        for _ in range(50):
            say(client, max_tokens=100, extra_body={"ignore_eos": True})

    def answers():
        try:
            return bool(say(client).choices)
        except openai.APIError:
            return False

    eventually("a new engine answers", answers, deadline_s=300)
    assert engine not in engines()


def is_engine(pid: int, server) -> bool:
    """Returns whether a process is the engine of a worker of the server."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        title = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()
    except (OSError, IndexError):
        return False
    return parent in server.workers() and b"EngineCor" in title


def test_tokens_of_texts_and_prompts_as_tokens(client, tiny):
    """The tokenizer of the engine answers, and a prompt can be tokens."""
    send = lambda path, **body: json.loads(tiny.ask("POST", path, json.dumps({"model": "tiny"} | body))[1])  # noqa: E731
    found = send("/tokenize", prompt="one two", return_token_strs=True)
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 512
    assert found["token_strs"][0] == "<s>" and "".join(found["token_strs"][1:]) == "one two"
    assert send("/tokenize", prompt="one two", add_special_tokens=False)["tokens"] == found["tokens"][1:]
    assert send("/detokenize", tokens=found["tokens"][1:])["prompt"] == "one two"
    assert send("/detokenize", tokens=[10**6])["error"]["message"].startswith("the token id 1000000 is not allowed")
    texts = [client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=4).choices[0].text for prompt in ("one two", found["tokens"])]
    assert texts[0] == texts[1]


def test_the_probabilities_of_a_prompt(client):
    """With `echo` and `logprobs`, a request scores its prompt; `prompt_logprobs` is vLLM's field for it."""
    answer = client.completions.create(model="tiny", prompt="one two", echo=True, logprobs=1, max_tokens=0, temperature=0)
    (choice,) = answer.choices
    assert choice.text == "one two" and choice.finish_reason == "length"
    found = choice.logprobs
    assert found.tokens[0] == "<s>" and "".join(found.tokens[1:]) == "one two"
    assert found.token_logprobs[0] is None and all(one < 0 for one in found.token_logprobs[1:])
    answer = client.completions.create(model="tiny", prompt="one two", max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert [None if one is None else len(one) for one in answer.choices[0].prompt_logprobs] == [None] + [1] * (len(found.tokens) - 1)


def change(server, operation: str, **body) -> tuple:
    """Loads or unloads an adapter. Returns the status and the text, or the message of the error."""
    status, text = server.ask("POST", f"/v1/{operation}_lora_adapter", json.dumps(body))
    return status, text if status == 200 else json.loads(text)["error"]["message"]


def text_of(client, model: str) -> str:
    """Returns the text of a model or of an adapter."""
    fields = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    answer = client.completions.create(model=model, prompt="one two", **fields)
    return str(answer.choices[0].token_ids)


def test_adapters_are_loaded_and_unloaded(client, tiny):
    """More than vLLM has places for; a name that is loaded again has the new weights. Wrong ones leave the engine alone."""
    texts = {name: text_of(client, name) for name in ("tiny", "listed")}
    for seed in (2, 3, 4):
        answer = change(tiny, "load", lora_name=f"seed-{seed}", lora_path=str(seed))
        assert answer == (200, f"Success: LoRA adapter 'seed-{seed}' added successfully.")
    texts |= {f"seed-{seed}": text_of(client, f"seed-{seed}") for seed in (2, 3, 4)}
    assert len(set(texts.values())) == 5
    for _ in range(2):
        assert {name: text_of(client, name) for name in texts} == texts
    assert client.models.retrieve("seed-2").parent == "tiny"
    assert change(tiny, "load", lora_name="seed-2", lora_path="4", load_inplace=True)[0] == 200
    assert text_of(client, "seed-2") == texts["seed-4"]
    for path, part in [("../outside", "is not in"), ("missing", "cannot be read"), (".", "No adapter found for")]:
        status, why = change(tiny, "load", lora_name="wrong", lora_path=path)
        assert status == 400 and "the adapter 'wrong' cannot be loaded: " in why and part in why, why
    for seed in (2, 3, 4):
        assert change(tiny, "unload", lora_name=f"seed-{seed}")[0] == 200
    with pytest.raises(openai.NotFoundError):
        text_of(client, "seed-2")
    assert {name: text_of(client, name) for name in ("tiny", "listed")} == {name: texts[name] for name in ("tiny", "listed")}


def test_a_stream_keeps_an_unloaded_adapter(client, tiny):
    """The engine frees it after the stream."""
    assert change(tiny, "load", lora_name="short", lora_path="2")[0] == 200
    fields = {"prompt": "one two", "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole = client.completions.create(model="short", **fields).choices[0].token_ids
    stream = iter(client.completions.create(model="short", stream=True, **fields))
    found = list(next(stream).choices[0].token_ids)
    assert change(tiny, "unload", lora_name="short")[0] == 200
    for chunk in stream:
        found += chunk.choices[0].token_ids if chunk.choices else []
    assert found == whole


def test_the_requests_of_adapters_are_counted(client, tiny):
    """By the name that clients use, also for an adapter that was loaded by request: one of the two runs, since `max_loras` is 1."""
    assert change(tiny, "load", lora_name="short", lora_path="2")[0] == 200

    def counts() -> dict:
        found = {}
        for (name, labels), value in tiny.scrape().items():
            if name == "pharos_llm_adapter_requests" and value:
                labels = dict(labels)
                found[labels["state"], labels["adapter"]] = value
        return found

    expected = [{("running", one): 1, ("waiting", other): 1} for one, other in (("short", "listed"), ("listed", "short"))]
    fields = {"prompt": "one two", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(client.completions.create, model=model, **fields) for model in ("short", "listed")]
        eventually("one runs and one waits", lambda: counts() in expected)
        assert [answer.result().usage.completion_tokens for answer in answers] == [400, 400]
    eventually("they have ended", lambda: not counts())
    assert total(tiny.scrape(), "pharos_llm_adapter_slots", model="tiny") == 1
    assert change(tiny, "unload", lora_name="short")[0] == 200


def test_a_directory_of_hugging_face_is_a_model(tiny, start):
    """`pharos serve DIRECTORY` needs no configuration; `model.json` beside the weights has the arguments of the engine."""
    directory = tiny.folder / "models/tiny/1/hf"
    (directory / "model.json").write_text(json.dumps(OWN))
    single = start([], f"--python={PYTHON}", repository=directory, environment=VARIABLES)
    with openai.OpenAI(base_url=f"http://{single.http}/v1", api_key="none", max_retries=0, timeout=120) as client:
        (model,) = client.models.list()
        assert (model.id, model.max_model_len) == ("hf", 512)
        messages = [{"role": "user", "content": "one two"}]
        assert client.chat.completions.create(model="hf", messages=messages, max_tokens=4).usage.completion_tokens > 0
