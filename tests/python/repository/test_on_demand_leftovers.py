"""What a load on demand leaves that failed, or whose ensemble has ended: it is unloaded when it has no use, and does not keep others
from loading."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.inference import one
from harness.server import total
from harness.waiting import eventually
from python_backend.worker import PYTHON, has_worker

MODE = "--model-control-mode=on-demand"
IO = """input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }"""
PYTHON_CONFIG = f'backend: "python" max_batch_size: 4 {IO} version_policy {{ all {{ }} }}'
BUILTIN_CONFIG = f'backend: "builtin" max_batch_size: 4 {IO} parameters {{ key: "function" value {{ string_value: "identity" }} }}'
CODE = """import os
import triton_python_backend_utils as utils

held = os.urandom(1000) * (SIZE // 1000)

class TritonPythonModel:
    def execute(self, requests):
        tensors = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""
MB = 1_000_000
VALUES = one("FP32", [1, 2], [3, 4])
needs_worker = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")


def write(folder, name: str, config: str, **versions: str):
    """Writes a model with these versions, `v1` and so on, and the code of each."""
    for version, code in versions.items():
        (folder / name / version[1:]).mkdir(parents=True)
        if code:
            (folder / name / version[1:] / "model.py").write_text(code)
    (folder / name / "config.pbtxt").write_text(config)


def write_ensemble(folder, name: str, *members: str):
    """Writes an ensemble whose tensor passes the members one after the other."""
    names = ["INPUT0", *(f"t{number}" for number in range(1, len(members))), "OUTPUT0"]
    steps = [
        f'{{ model_name: "{member}" model_version: -1 input_map {{ key: "INPUT0" value: "{names[number]}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{names[number + 1]}" }} }}'
        for number, member in enumerate(members)
    ]
    config = f'platform: "ensemble" max_batch_size: 4 {IO} ensemble_scheduling {{ step [ {", ".join(steps)} ] }}'
    write(folder, name, config, v1="")


def ready(server) -> set:
    """Returns the loaded versions."""
    return {(name, one["version"]) for name, all in server.index().items() for one in all if one.get("state") == "READY"}


@needs_worker
def test_versions_beside_one_that_failed_are_unloaded_when_idle(start, tmp_path):
    """The next load brings all of them, also the one that failed."""
    folder = tmp_path / "models"
    write(folder, "two", PYTHON_CONFIG, v1=CODE.replace("SIZE", "1000"), v2="raise RuntimeError('broken')\n")
    server = start([], MODE, "--model-idle-unload-secs=1", f"--python={PYTHON}", repository=folder)
    status, answer = server.infer("two", VALUES)
    assert status == 503 and "broken" in answer["error"], answer
    assert ready(server) == {("two", "1")}
    assert server.ask("POST", "/v2/models/two/versions/1/infer", json.dumps(VALUES).encode())[0] == 200
    eventually("the version is unloaded", lambda: not ready(server))
    (folder / "two/2/model.py").write_text(CODE.replace("SIZE", "1000"))
    eventually("the repaired version answers", lambda: server.infer("two", VALUES)[0] == 200)
    assert ready(server) == {("two", "1"), ("two", "2")}


def test_members_of_an_ensemble_that_has_ended_are_unloaded_when_idle(start, tmp_path):
    """Because a client has unloaded another member; a request loads them again."""
    folder = tmp_path / "models"
    for name in ("a", "b"):
        write(folder, name, BUILTIN_CONFIG, v1="")
    write_ensemble(folder, "both", "a", "b")
    server = start([], MODE, "--model-idle-unload-secs=1", repository=folder)
    assert server.infer("both", VALUES)[0] == 200
    assert server.ask("POST", "/v2/repository/models/a/unload", b"")[0] == 200
    eventually("the other member is unloaded", lambda: not ready(server))
    assert server.infer("both", VALUES)[0] == 200
    assert ready(server) == {("a", "1"), ("b", "1"), ("both", "1")}


def test_a_model_added_after_the_start_is_loaded_again(start, tmp_path):
    """Once a client has loaded it by name, as a model that was there. So is a version that was added while the model was loaded, and
    a version without a directory is forgotten."""
    folder = tmp_path / "models"
    write(folder, "first", BUILTIN_CONFIG, v1="")
    server = start([], MODE, repository=folder)

    def ask(what: str) -> int:
        return server.ask("POST", f"/v2/repository/models/added/{what}", b"")[0]

    def version(number: int) -> int:
        return server.ask("POST", f"/v2/models/added/versions/{number}/infer", json.dumps(VALUES).encode())[0]

    def index() -> list:
        return [(one["version"], one["state"], one.get("reason", "")) for one in server.index()["added"]]

    write(folder, "added", BUILTIN_CONFIG + " version_policy { all { } }", v1="")
    assert server.infer("added", VALUES)[0] in (400, 404)
    assert [ask("load"), server.infer("added", VALUES)[0], ask("unload")] == [200] * 3
    eventually("it is unloaded", lambda: index() == [("1", "UNAVAILABLE", "loaded on demand")])
    assert server.infer("added", VALUES)[0] == 200
    (folder / "added/2").mkdir()
    assert [version(2), ask("load"), version(2), ask("unload")] == [404, 200, 200, 200]
    eventually("both are unloaded", lambda: index() == [(one, "UNAVAILABLE", "loaded on demand") for one in "12"])
    assert version(2) == 200
    (folder / "added/1").rmdir()
    assert [ask("unload"), ask("load"), ask("unload"), version(2)] == [200] * 4
    eventually("version 1, which may still have been unloading, is forgotten", lambda: index() == [("2", "READY", "")])
    assert version(1) == 404


@needs_worker
def test_members_of_an_ensemble_that_does_not_load_are_unloaded_when_idle(start, tmp_path):
    folder = tmp_path / "models"
    write(folder, "good", BUILTIN_CONFIG, v1="")
    write(folder, "bad", PYTHON_CONFIG, v1="raise RuntimeError('broken')\n")
    write_ensemble(folder, "both", "good", "bad")
    server = start([], MODE, "--model-idle-unload-secs=1", f"--python={PYTHON}", repository=folder)
    status, answer = server.infer("both", VALUES)
    assert status == 503 and "broken" in answer["error"], answer
    eventually("the other member is unloaded", lambda: not ready(server))


@needs_worker
def test_a_model_beyond_the_limit_does_not_make_others_of_its_backend_impossible(start, tmp_path):
    """The size of a model that was never loaded is guessed from others, but not from one that does not fit into the limit."""
    folder = tmp_path / "models"
    kept = 'parameters { key: "min_loaded" value { string_value: "1" } }'
    for name, size, more in (("kept", 1, kept), ("large", 400, ""), ("small", 1, "")):
        write(folder, name, PYTHON_CONFIG + more, v1=CODE.replace("SIZE", str(size * MB)))
    server = start([], MODE, f"--model-memory-limit={250 * MB}", f"--python={PYTHON}", repository=folder)
    assert server.infer("kept", VALUES)[0] == 200
    status, answer = server.infer("large", VALUES)
    assert status == 503 and "not enough memory: model 'large'" in answer["error"], answer
    assert server.infer("small", VALUES)[0] == 200
    assert ready(server) == {("kept", "1"), ("small", "1")}
    assert total(server.scrape(), "pharos_on_demand_loads_total", model="small", result="success") == 1


@needs_worker
def test_a_loaded_model_stays_until_the_requests_that_waited_for_it_have_found_it(start, tmp_path):
    """Models have room for two of six, so that each load makes others leave. All requests are answered."""
    folder, names = tmp_path / "models", [f"m{number}" for number in range(6)]
    for name in names:
        write(folder, name, PYTHON_CONFIG, v1=CODE.replace("SIZE", str(60 * MB)))
    server = start([], MODE, f"--model-memory-limit={180 * MB}", f"--python={PYTHON}", repository=folder)
    for name in names:
        # Now their sizes are known.
        assert server.infer(name, VALUES)[0] == 200
    refused = []

    def client(seed: int):
        chance = random.Random(seed)
        for _ in range(40):
            name = chance.choice(names)
            status, answer = server.infer(name, VALUES)
            if status != 200:
                refused.append((name, status, answer))

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(client, range(12)))
    assert not refused, refused[:3]
    assert total(server.scrape(), "pharos_on_demand_unloads_total", reason="memory") > 20
