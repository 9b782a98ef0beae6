"""Concurrent registrations and unregistrations, registrations that ask for too much or name a pipe, paths of archives, the default
version, headers of handlers, and the variables that they see.

Requires a Python with the package `pharos-worker`: `PHAROS_PYTHON`, or that of the tests."""

import http.client
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.waiting import DEADLINE_S, eventually
from torchserve.archive_files import files, zipped
from torchserve.home import HOST, Home, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason="there is no Python with the package pharos-worker: make python-worker")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with Home(tmp_path_factory.mktemp("home")) as server:
        (server.folder / "now").touch()
        yield server


def waits(home, name, go="never", version="1.0"):
    """Writes an archive whose handler loads when the file `go` exists, and fails if the file `ill` exists then."""
    yaml = f"go: {home.folder / go}\nill: {home.folder / 'ill'}\nstartupTimeout: 600\n"
    return home.archive(name, "waits", yaml, version)


def states(home) -> dict:
    """Returns the URL of each registered model."""
    return {model["modelName"]: model["modelUrl"] for model in home.manage("GET", "/models")[1]["models"]}


def test_a_model_whose_first_version_fails_has_another_default(home):
    """The first version is the default, also while its workers start. If they fail, it is unregistered and the other version becomes
    the default: without one, the model answers no request."""
    first, second = waits(home, "pair", "late"), waits(home, "pair", "now", "2.0")
    with ThreadPoolExecutor(1) as pool:
        registered = pool.submit(home.manage, "POST", f"/models?url={first}")
        eventually("the first version is registered", lambda: "pair" in states(home))
        home.register(second)
        (home.folder / "ill").touch()
        (home.folder / "late").touch()
        status, answer = registered.result(DEADLINE_S)
    (home.folder / "ill").unlink()
    assert status == 500 and "it is ill" in answer["message"], answer
    assert [found["modelVersion"] for found in home.manage("GET", "/models/pair")[1]] == ["2.0"]
    assert states(home)["pair"] == second
    assert home.predict("pair") == (200, b"0123456789")
    assert home.manage("DELETE", "/models/pair")[0] == 200
    assert "pair" not in states(home)


@pytest.mark.parametrize("wait", ["true", "false"])
def test_a_model_can_be_unregistered_while_it_loads(home, wait):
    """The load is cancelled: it could last until `startupTimeout`, and registrations of other models would wait for that too."""
    name = f"slow-{wait}"
    with ThreadPoolExecutor(1) as pool:
        before = home.workers()
        registered = pool.submit(home.manage, "POST", f"/models?url={waits(home, name)}&synchronous={wait}")
        eventually("its worker starts", lambda: home.workers() - before)
        began = time.monotonic()
        assert home.manage("DELETE", f"/models/{name}") == (200, {"status": f'Model "{name}" unregistered'})
        home.register(waits(home, f"other-{wait}", "now"))
        assert time.monotonic() - began < 10
        status, answer = registered.result(DEADLINE_S)
    assert status == {"true": 500, "false": 202}[wait], answer
    assert wait == "false" or "it was unregistered meanwhile" in answer["message"], answer
    assert name not in states(home)
    index = json.loads(home.ask("POST", "/v2/repository/index", b"")[2])
    assert all(entry.get("state") != "READY" for entry in index if entry["name"] == name), index
    assert home.manage("DELETE", f"/models/other-{wait}")[0] == 200
    eventually("no worker is left", lambda: home.workers() <= before)
    home.register(waits(home, name, "now", "2.0"))
    assert home.predict(name)[0] == 200
    assert home.manage("DELETE", f"/models/{name}")[0] == 200


@pytest.mark.parametrize("wait", ["true", "false"])
def test_scaling_to_no_workers_does_not_wait_for_a_load(home, wait):
    """The load is cancelled, the model stays registered, and it can be scaled again."""
    name = f"scaled-{wait}"
    with ThreadPoolExecutor(1) as pool:
        before = home.workers()
        registered = pool.submit(home.manage, "POST", f"/models?url={waits(home, name, name)}&synchronous={wait}")
        eventually("its worker starts", lambda: home.workers() - before)
        began = time.monotonic()
        status, answer = home.manage("PUT", f"/models/{name}?min_worker=0&synchronous=true")
        assert (status, answer["status"]) == (200, f"Workers scaled to 0 for model: {name}")
        assert time.monotonic() - began < 10
        assert registered.result(DEADLINE_S)[0] == {"true": 200, "false": 202}[wait]
    assert home.manage("GET", f"/models/{name}")[1][0]["workers"] == [] and home.predict(name)[0] == 503
    eventually("no worker is left", lambda: home.workers() <= before)
    (home.folder / name).touch()
    assert home.manage("PUT", f"/models/{name}?min_worker=1&synchronous=true")[0] == 200
    assert home.predict(name)[0] == 200
    assert home.manage("DELETE", f"/models/{name}")[0] == 200


def test_a_number_of_workers_that_no_machine_has_is_refused(home):
    """A description lists the workers, so that it would need gigabytes."""
    archive = waits(home, "many", "now")
    status, answer = home.manage("POST", f"/models?url={archive}&initial_workers=4097")
    assert (status, answer["type"]) == (400, "BadRequestException"), answer
    assert answer["message"].startswith("The number of workers is 4097") and "many" not in states(home)
    home.register(archive, "&initial_workers=0")
    for number in (4097, 3_000_000, 99_999_999_999):
        status, answer = home.manage("PUT", f"/models/many?min_worker={number}&synchronous=true")
        assert (status, answer["type"]) == (400, "BadRequestException"), answer
        assert answer["message"].endswith("allowed are whole numbers from 0 to 4096"), answer
    assert home.manage("GET", "/models/many")[1][0]["minWorkers"] == 0
    assert home.manage("DELETE", "/models/many")[0] == 200


def test_handlers_do_not_frame_responses(home):
    """A wrong length would make the rest of a response the begin of the next one."""
    home.register(waits(home, "framed", "now"))
    connection = http.client.HTTPConnection(HOST, home.inference, timeout=DEADLINE_S)

    def ask(asked):
        connection.request("POST", "/predictions/framed", json.dumps(asked))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()

    for name, value in (("Content-Length", "3"), ("content-length", "30"), ("Transfer-Encoding", "chunked"), ("Upgrade", "h2c")):
        status, headers, content = ask({"headers": {name: value, "X-Own": "1"}})
        assert (status, content, headers["X-Own"]) == (200, b"0123456789", "1"), name
        assert headers["content-length"] == "10" and not headers["transfer-encoding"] and not headers["upgrade"], name
    for number in (100, 101, 103):
        status, _, content = ask({"status": number})
        answer = json.loads(content)
        assert (status, answer["type"]) == (500, "InternalServerException"), content
        assert answer["message"] == f"the handler's status is {number}; allowed are 200 to 999"
    connection.close()
    assert home.manage("DELETE", "/models/framed")[0] == 200


def test_pipes_and_devices_are_no_archives(home):
    """Reading them might never end."""
    os.mkfifo(home.folder / "pipe.mar")
    os.mkfifo(home.store / "stored.mar")
    (home.store / "plain").mkdir()
    os.mkfifo(home.store / "plain/code.py")
    for url in (f"file://{home.folder}/pipe.mar", "file:///dev/zero", "stored.mar"):
        status, answer = home.manage("POST", f"/models?url={url}&model_name=pipe&handler=waits")
        assert status == 400 and "regular file" in answer["message"], answer
    assert not list(home.store.glob("*.part")) and not list(home.store.glob("zero"))
    assert home.manage("POST", "/models?url=plain&handler=waits&initial_workers=0")[0] == 200
    assert home.manage("DELETE", "/models/plain")[0] == 200
    os.remove(home.store / "stored.mar")


def test_a_path_names_a_file_of_the_model_store(home):
    """As in TorchServe, which takes the last part of a path."""
    archive = waits(home, "stored", "now")
    for url in (f"store/{archive}", f"a/b/{archive}", f"/elsewhere/{archive}", str(home.store / archive)):
        assert home.manage("POST", f"/models?url={url}&initial_workers=0")[0] == 200, url
        assert home.manage("GET", "/models/stored")[1][0]["modelUrl"] == url
        assert home.manage("DELETE", "/models/stored")[0] == 200
    (home.store / "folder").mkdir()
    (home.store / "folder/deep.mar").write_bytes((home.store / archive).read_bytes())
    assert home.manage("POST", "/models?url=folder/deep.mar&initial_workers=0")[0] == 200, "only the folder has it"
    assert home.manage("DELETE", "/models/stored")[0] == 200
    for url in ("store/none.mar", "/elsewhere/none.mar", "store/"):
        status, answer = home.manage("POST", f"/models?url={url}")
        assert (status, answer["type"]) == (404, "ModelNotFoundException"), (url, answer)


def test_a_path_in_the_arguments_names_a_file_of_the_model_store(tmp_path):
    """The path from the user's directory, `--models store/m.mar`."""
    arguments = ("--disable-token-auth", "--enable-model-api", "--models", "store/given-1.0.mar", "other=store/given-1.0.mar")
    home = Home(tmp_path, arguments=arguments)
    home.archive("given")
    with home:
        assert set(states(home)) == {"given", "other"}


@pytest.mark.parametrize("default", ["1.0", "2.0"])
def test_the_version_that_is_marked_as_the_default_wins(tmp_path, default):
    """Whatever the order in which `load_models=all` finds them."""
    marked = {"both": {default: {"defaultVersion": True, "marName": f"both-{default}.mar", "minWorkers": 1, "maxWorkers": 1}}}
    home = Home(tmp_path, ["load_models=all", f"models={json.dumps(marked)}"])
    for version in ("1.0", "2.0"):
        home.archive("both", version=version)
    with home:
        assert home.manage("GET", "/models/both")[1][0]["modelVersion"] == default


NAMED = """
def handle(data, context):
    if data:
        context.set_response_header(0, "X-Same", context.get_request_header(0, "X-Name"))
        context.set_response_header(0, "X-Own", "caf\\u00e9 \\u4e2d")
    return data and ["named"] * len(data)
"""


def test_headers_are_in_latin_1(home):
    """The encoding of HTTP/1.1, which clients and TorchServe use. The module of the standard library also does."""
    (home.store / "named.mar").write_bytes(zipped(files("named", NAMED)))
    home.register("named.mar")
    status, headers, _ = home.ask("POST", "/predictions/named", b"x", {"X-Name": "M\u00fcnchen"})
    assert (status, headers["x-same"], headers["x-own"]) == (200, "M\u00fcnchen", "caf\u00e9 ?")
    assert home.manage("DELETE", "/models/named")[0] == 200


SEES = """import json, os

def handle(data, context):
    return data and [json.dumps(dict(os.environ))] * len(data)
"""


def test_variables_of_the_operator_reach_handlers(tmp_path, monkeypatch):
    """Those of thread pools and GPUs. The server sets defaults only for those that the environment does not have."""
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "3", "MKL_DYNAMIC": "FALSE", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    for given in (own, {}):
        for name in own:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / str(len(given))
        folder.mkdir()
        with Home(folder) as home:
            (home.store / "sees.mar").write_bytes(zipped(files("sees", SEES)))
            home.register("sees.mar")
            seen = json.loads(home.predict("sees", b"x")[1])
            expected = given or {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
            assert {name: value for name, value in seen.items() if name in own} == expected
