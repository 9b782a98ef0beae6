"""`/sleep`, `/wake_up` and `/is_sleeping` with a model that has the operations."""

import json
import shutil

import pytest

from harness.server import ROOT, Server, kill_all

SLEEPER = ROOT / "tests/python/protocol/language_models/sleeper"


def write_models(folder):
    """Writes `sleeper`, `double`, which has two instances, and `restless`, which has no sleep mode."""
    for name in ("sleeper", "double", "restless"):
        shutil.copytree(SLEEPER, folder / name)
    config = (SLEEPER / "config.pbtxt").read_text()
    (folder / "double/config.pbtxt").write_text(config.replace("count: 1", "count: 2"))
    (folder / "restless/config.pbtxt").write_text(config.replace('"true"', '"false"'))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose models can be loaded and unloaded."""
    folder = tmp_path_factory.mktemp("sleep")
    write_models(folder / "models")
    running = Server(folder, [folder / "models"], ["--model-control-mode=explicit", "--load-model=*"])
    running.launch()
    running.wait_until_ready()
    yield running
    kill_all([running])


def ask(server, method: str, path: str) -> tuple:
    """Sends a request. Returns the status and the body, or the error."""
    status, text = server.ask(method, path)
    body = json.loads(text)
    return status, body.get("error", body)


def complete(server) -> tuple:
    """Returns the status of a completion of `sleeper`, and its text or the message of its error."""
    status, text = server.ask("POST", "/v1/completions", json.dumps({"model": "sleeper", "prompt": "one two"}))
    body = json.loads(text)
    return status, body["choices"][0]["text"] if status == 200 else body["error"]["message"]


@pytest.mark.parametrize("prefix", ["", "/v1", "/openai/v1"])
def test_a_model_sleeps_and_wakes_up(server, prefix):
    """Its requests fail meanwhile, and a part that wakes up is not enough. Names are those of vLLM."""
    model = "model=sleeper"
    assert complete(server) == (200, "one two")
    assert ask(server, "GET", f"{prefix}/is_sleeping?{model}") == (200, {"is_sleeping": False})
    assert ask(server, "POST", f"{prefix}/sleep?level=2&mode=wait&{model}") == (200, {"status": "sleeping", "level": 2})
    assert ask(server, "GET", f"{prefix}/is_sleeping?{model}") == (200, {"is_sleeping": True})
    assert complete(server) == (503, "the model sleeps at level 2 (wait)")
    assert ask(server, "POST", f"{prefix}/wake_up?tags=weights&{model}") == (200, {"status": "sleeping", "tags": ["weights"]})
    assert complete(server)[0] == 503
    assert ask(server, "POST", f"{prefix}/wake_up?tags=kv_cache&{model}") == (200, {"status": "awake", "tags": ["kv_cache"]})
    assert complete(server) == (200, "one two")
    assert ask(server, "POST", f"{prefix}/sleep?{model}") == (200, {"status": "sleeping", "level": 1})
    assert complete(server) == (503, "the model sleeps at level 1 (abort)")
    assert ask(server, "POST", f"{prefix}/wake_up?{model}") == (200, {"status": "awake", "tags": None})


@pytest.mark.parametrize(
    ("path", "status", "part"),
    [
        ("/sleep?model=sleeper&level=0", 400, "invalid level 0: expected 1 or 2"),
        ("/sleep?model=sleeper&mode=keep", 400, "invalid mode keep: expected abort or wait"),
        ("/wake_up?model=sleeper&tags=all", 400, "invalid tags all: expected weights or kv_cache"),
        ("/sleep", 400, "model is required, because several models may sleep: double, sleeper"),
        ("/sleep?model=double", 400, "the model 'double' has 2 instances"),
        ("/sleep?model=restless", 400, "the model 'restless' cannot sleep: its parameter 'sleep_mode'"),
        ("/wake_up?model=unknown", 404, "unknown"),
    ],
)
def test_wrong_requests_are_refused(server, path, status, part):
    """With the value and what is allowed; no model sleeps after it."""
    found, error = ask(server, "POST", path)
    assert found == status and part in error["message"]
    if "'" in part:
        assert error["code"] == "model_not_supported"
    assert complete(server)[0] == 200


def test_only_the_server_asks_for_a_sleep(server):
    """A client of another protocol needs no access to unloads."""
    inputs = [{"name": name, "datatype": "BYTES", "shape": [1], "data": [text]} for name, text in (("text_input", ""), ("operation", "sleep"))]
    body = {"inputs": inputs, "parameters": {"triton_sleep": '{"level": 1, "mode": "abort"}'}}
    status, text = server.ask("POST", "/v2/models/sleeper/infer", json.dumps(body))
    assert status == 400 and "reserved" in text
    assert complete(server)[0] == 200


def test_a_new_process_is_awake(server):
    """A reload of the model ends its sleep."""
    assert ask(server, "POST", "/sleep?model=sleeper")[0] == 200
    for operation in ("unload", "load"):
        assert server.ask("POST", f"/v2/repository/models/sleeper/{operation}", "{}")[0] == 200
    server.wait_until_ready()
    assert ask(server, "GET", "/is_sleeping?model=sleeper") == (200, {"is_sleeping": False})
    assert complete(server)[0] == 200


def test_the_only_model_with_a_sleep_mode_is_meant(start, tmp_path):
    """The others need no name in the request. With the default model control, all three are refused."""
    write_models(tmp_path / "models")
    shutil.rmtree(tmp_path / "models/double")
    single = start([], "--model-control-mode=explicit", "--load-model=*", repository=tmp_path / "models")
    assert ask(single, "POST", "/sleep") == (200, {"status": "sleeping", "level": 1})
    assert ask(single, "POST", "/wake_up") == (200, {"status": "awake", "tags": None})
    fixed = start([], repository=tmp_path / "models")
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        status, error = ask(fixed, method, path)
        assert status == 503 and "the model control mode is 'none'" in error["message"]
