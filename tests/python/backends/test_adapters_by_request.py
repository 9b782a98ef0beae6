"""Adapters (LoRA) that clients load and unload by request, in the form of vLLM, with the backend `llamacpp`."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from harness.gguf import COUNT, write_adapter, write_model
from harness.llamacpp import SETTINGS, client_of, needs_llamacpp
from harness.server import Server, kill_all, total, workers
from harness.waiting import eventually

pytestmark = needs_llamacpp
MAX_ADAPTERS = 2
OWN = """
instance_group [ { count: 2 } ]
parameters { key: "adapter_directory" value: { string_value: "../../../adapters" } }
parameters { key: "max_adapters" value: { string_value: "2" } }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with `tiny`, whose two instances keep two adapters each, with `other`, which has no parameters, and with a model that makes
    embeddings."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("tiny", "other", "mean"):
        (folder / "models" / name / "1").mkdir(parents=True)
        write_model(folder / "models" / name / "1/model.gguf", pooling=1 if name == "mean" else None)
    (folder / "models/tiny/config.pbtxt").write_text(SETTINGS + OWN)
    (folder / "models/other/config.pbtxt").write_text(SETTINGS)
    write_adapter(folder / "models/tiny/1/listed.gguf", "one", "nine")
    (folder / "models/tiny/1/multi_lora.json").write_text(json.dumps({"listed": "listed.gguf"}))
    (folder / "adapters").mkdir()
    for word in COUNT[2:]:
        write_adapter(folder / f"adapters/{word}.gguf", "one", word)
    write_adapter(folder / "adapters/loop.gguf", "one", "loop")
    write_adapter(folder / "outside.gguf", "one", "nine")
    (folder / "adapters/link.gguf").symlink_to(folder / "outside.gguf")
    (folder / "adapters/wrong.gguf").write_text("not a GGUF file")
    server = Server(folder, [folder / "models"], ["--model-control-mode=explicit", "--load-model=*"])
    server.folder = folder
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


@pytest.fixture
def client(server):
    """A client of the server. At the end of the test, no adapter is loaded."""
    with client_of(server) as client:
        yield client
        for model in client.models.list():
            if getattr(model, "parent", None) and model.id != "listed":
                assert change(server, "unload", lora_name=model.id)[0] == 200


def change(server, operation: str, **body) -> tuple:
    """Loads or unloads an adapter. Returns the status and the text, or the message of the error."""
    status, text = server.ask("POST", f"/v1/{operation}_lora_adapter", json.dumps(body))
    return status, text if status == 200 else json.loads(text)["error"]["message"]


def load(server, name: str, path: str, **more):
    """Loads an adapter of `tiny`."""
    expected = (200, f"Success: LoRA adapter '{name}' added successfully.")
    assert change(server, "load", lora_name=name, lora_path=path, model="tiny", **more) == expected


def after_one(client, model: str) -> str:
    """Returns the word that a model, or an adapter, has after `one`."""
    answer = client.completions.create(model=model, prompt="seven eight one", max_tokens=1, temperature=0)
    assert answer.model == model
    return answer.choices[0].text.strip()


def test_an_adapter_is_a_model_until_it_is_unloaded(server, client):
    """Both instances have it, although its load is one request. `/v1/models` lists it after its model."""
    load(server, "to-five", "five.gguf")
    with ThreadPoolExecutor(8) as pool:
        names = ["tiny", "to-five", "listed"] * 20
        words = list(pool.map(lambda name: after_one(client, name), names))
    assert words == ["two", "five", "nine"] * 20
    assert client.models.retrieve("to-five").parent == "tiny"
    assert [model.id for model in client.models.list() if getattr(model, "parent", None)] == ["listed", "to-five"]
    assert change(server, "unload", lora_name="to-five") == (200, "Success: LoRA adapter 'to-five' removed successfully.")
    with pytest.raises(openai.NotFoundError):
        after_one(client, "to-five")
    assert "to-five" not in {model.id for model in client.models.list()}
    assert change(server, "unload", lora_name="to-five") == (404, "the lora adapter 'to-five' cannot be found")


def test_a_load_in_place_replaces_an_adapter(server, client):
    """Also from the same path, if its file has changed. Without `load_inplace`, the name is taken."""
    file = server.folder / "adapters/changing.gguf"
    shutil.copy(server.folder / "adapters/four.gguf", file)
    load(server, "changing", "changing.gguf")
    assert after_one(client, "changing") == "four"
    status, why = change(server, "load", lora_name="changing", lora_path="six.gguf", model="tiny")
    assert status == 400 and "already been loaded: load_inplace true" in why
    shutil.copy(server.folder / "adapters/six.gguf", file)
    assert after_one(client, "changing") == "four"
    load(server, "changing", "changing.gguf", load_inplace=True)
    assert {after_one(client, "changing") for _ in range(10)} == {"six"}
    load(server, "changing", str(server.folder / "adapters/seven.gguf"), load_inplace=True)
    assert {after_one(client, "changing") for _ in range(10)} == {"seven"}


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"lora_path": "missing.gguf"}, 400, "the adapter 'wrong' cannot be loaded: '.*missing.gguf' cannot be read: No such file"),
        ({"lora_path": "../outside.gguf"}, 400, "'../outside.gguf' is not in '.*/models/tiny' or '.*/adapters'; the parameter 'adapter_dir"),
        ({"lora_path": "link.gguf"}, 400, "'link.gguf' is not in"),
        ({"lora_path": "/etc/passwd"}, 400, "'/etc/passwd' is not in"),
        ({"lora_path": "."}, 400, "it is not a file"),
        ({"lora_path": "wrong.gguf"}, 400, "the adapter 'wrong' cannot be loaded: '.*wrong.gguf': "),
        ({"lora_path": "../models/tiny/1/model.gguf"}, 400, "the adapter 'wrong' cannot be loaded: "),
        ({"lora_path": "five.gguf", "model": None}, 400, "model is required, because several models may load adapters: other, tiny"),
        ({"lora_path": "five.gguf", "model": "mean"}, 400, "'mean' does not load adapters"),
        ({"lora_path": "five.gguf", "model": "unknown"}, 404, "unknown"),
        ({"lora_path": "../../../adapters/five.gguf", "model": "other"}, 400, "is not in '.*/models/other'"),
        ({"lora_path": "five.gguf", "lora_name": "other"}, 400, "has the name of a model"),
        ({"lora_path": "five.gguf", "lora_name": "listed"}, 400, "in the file multi_lora.json of the model 'tiny'"),
        ({"lora_path": "five.gguf", "lora_name": "listed", "load_inplace": True}, 400, "in the file multi_lora.json"),
        ({}, 400, "lora_path"),
    ],
)
def test_a_wrong_load_is_refused(server, client, body, status, part):
    """The error names the value and what is allowed, and no name is taken."""
    found, why = change(server, "load", **({"lora_name": "wrong", "model": "tiny"} | body))
    assert found == status
    with pytest.raises(AssertionError, match=part):
        raise AssertionError(why)
    with pytest.raises(openai.NotFoundError):
        after_one(client, "wrong")
    assert after_one(client, "tiny") == "two"


def test_an_adapter_outlives_its_worker(server, client):
    """A new process loads it with the first request that needs it. A file that is missing by then fails the requests with its reason."""
    file = server.folder / "adapters/short.gguf"
    shutil.copy(server.folder / "adapters/eight.gguf", file)
    load(server, "to-eight", "short.gguf")
    before = set(workers(server.process.pid))
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually("new workers run", lambda: len(set(workers(server.process.pid)) - before) == len(before))
    server.wait_until_ready()
    assert {after_one(client, "to-eight") for _ in range(10)} == {"eight"}
    for _ in range(MAX_ADAPTERS):
        assert after_one(client, "tiny") == "two"
    file.unlink()
    # The instances have it in memory.
    assert {after_one(client, "to-eight") for _ in range(10)} == {"eight"}
    before = set(workers(server.process.pid))
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually("new workers run", lambda: len(set(workers(server.process.pid)) - before) == len(before))
    server.wait_until_ready()
    with pytest.raises(openai.BadRequestError, match="the adapter 'to-eight' cannot be loaded: '.*short.gguf' cannot be read"):
        after_one(client, "to-eight")


def test_more_adapters_than_places_take_turns(server, client):
    """The instances keep two each; requests to others make them load again, and none gets the text of another one."""
    words = COUNT[2:8]
    for word in words:
        load(server, f"to-{word}", f"{word}.gguf")
    with ThreadPoolExecutor(8) as pool:
        for word, found in zip(words * 12, pool.map(lambda word: after_one(client, f"to-{word}"), words * 12)):
            assert found == word


def test_running_requests_keep_an_unloaded_adapter(server, client):
    """Its name is gone at once. The stream goes on with it, and another adapter loads meanwhile."""
    load(server, "to-loop", "loop.gguf")
    stream = client.completions.create(model="to-loop", prompt="one", max_tokens=400, temperature=0, stream=True)
    parts = iter(stream)
    text = next(parts).choices[0].text
    assert change(server, "unload", lora_name="to-loop")[0] == 200
    with pytest.raises(openai.NotFoundError):
        after_one(client, "to-loop")
    load(server, "to-five", "five.gguf")
    assert after_one(client, "to-five") == "five"
    text += "".join(part.choices[0].text for part in parts if part.choices)
    assert text.split() == ["loop"] * 400


def test_the_requests_of_adapters_are_counted_in_the_engines(server, client):
    """By name and state, for adapters of requests and of the model; they are 0 after the requests."""
    load(server, "to-loop", "loop.gguf")

    def counts() -> dict:
        found = {}
        for (name, labels), value in server.scrape().items():
            labels = dict(labels)
            if name == "pharos_llm_adapter_requests" and labels["model"] == "tiny":
                key = labels["adapter"], labels["state"]
                found[key] = found.get(key, 0) + value
        return found

    streams = []
    for model in ("to-loop", "to-loop", "listed", "tiny"):
        more = {"stream": True, "temperature": 0, "extra_body": {"ignore_eos": True}}
        streams.append(client.completions.create(model=model, prompt="one", max_tokens=400, **more))
    running = {("to-loop", "running"): 2, ("listed", "running"): 1}
    eventually("the requests of adapters run", lambda: running.items() <= counts().items())
    for stream in streams:
        stream.close()
    eventually("they have ended", lambda: not any(counts().values()))
    assert total(server.scrape(), "pharos_llm_adapter_slots", model="tiny") == 2, "one for each instance"
    assert not [labels for (name, labels) in server.scrape() if "adapters_info" in name or "lora_requests_info" in name]


def test_only_the_server_writes_the_parameter(server):
    """An adapter that a client names itself over another protocol would need no access to loads."""
    adapter = json.dumps({"name": "x", "path": "five.gguf", "load": 99})
    body = {"text_input": "one", "parameters": {"triton_adapter": adapter}}
    status, text = server.ask("POST", "/v2/models/tiny/generate", json.dumps(body))
    assert status == 400 and "reserved" in text
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["one"]}]
    status, text = server.ask("POST", "/v2/models/tiny/infer", json.dumps({"inputs": inputs, "parameters": {"triton_adapter": adapter}}))
    assert status == 400 and "reserved" in text
    body = {"text_input": "", "operation": "load_adapter"}
    status, text = server.ask("POST", "/v2/models/tiny/generate", json.dumps(body))
    assert status == 400 and "POST /v1/load_lora_adapter" in text


def test_a_reload_of_the_model_forgets_its_adapters(server, client):
    """As documented."""
    load(server, "to-five", "five.gguf")
    for operation in ("unload", "load"):
        assert server.ask("POST", f"/v2/repository/models/tiny/{operation}", "{}")[0] == 200
    server.wait_until_ready()
    with pytest.raises(openai.NotFoundError):
        after_one(client, "to-five")
    load(server, "to-five", "six.gguf")
    assert after_one(client, "to-five") == "six"


def test_loads_need_model_control(start, tmp_path):
    """With the default mode, adapters are refused as models are. A directory that does not exist fails the load of the model."""
    (tmp_path / "models/tiny/1").mkdir(parents=True)
    write_model(tmp_path / "models/tiny/1/model.gguf")
    single = start([], repository=tmp_path / "models")
    for operation in ("load", "unload"):
        status, why = change(single, operation, lora_name="a", lora_path="b")
        assert status == 503 and "the model control mode is 'none'" in why
    text = 'backend: "llamacpp"\nparameters { key: "adapter_directory" value: { string_value: "nothing" } }\n'
    (tmp_path / "models/tiny/config.pbtxt").write_text(text)
    broken = start([], "--exit-on-error=false", repository=tmp_path / "models", wait=False)
    eventually("the load fails", lambda: "the parameter 'adapter_directory' is 'nothing'" in broken.log_tail())
