"""Models are loaded, reloaded and unloaded while the server runs: through real clients, under load, with hostile names, by
polling, and without leaks."""

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from harness import onnx_file
from harness.inference import one
from harness.peers import missing, script
from harness.processes import held as stopped
from harness.sequence_models import config as sequences, controls
from harness.server import Server, alive, total
from harness.statistics import until_received
from harness.waiting import DEADLINE_S, eventually, eventually_async, holds_for, join_all, pause_as_client, run_for, settled
from repository.repositories import World
from repository.repository_tables import CPU, CPUS, ensemble, model

RELOADS = int(os.environ.get("PHAROS_RELOADS", "10"))
EXPLICIT = "--model-control-mode=explicit"
NO_PERF = missing("perf_analyzer", "perf")
REQUEST = one("FP32", [1, 1], [1])


@pytest.fixture
def serve(tmp_path):
    """Starts a server with the models that `serve({name: (config, versions)}, *options)` writes; returns its World."""
    started = []

    def begin(models: dict, *options, environment=None):
        repository = tmp_path / "models"
        repository.mkdir()
        world = World(None, repository, False)
        for name, (config, versions) in models.items():
            world.put(name, config, versions)
        world.server = Server(tmp_path, [repository], options or [EXPLICIT])
        world.server.environment = environment or {}
        world.server.__enter__()
        started.append(world.server)
        return world

    yield begin
    for server in started:
        server.__exit__(None, None, None) if server.process.poll() is None else None


def identity_onnx() -> bytes:
    """Returns a model that computes Y = X."""
    node = onnx_file.node("Identity", ["X"], ["Y"])
    return onnx_file.model([node], [("X", "FP32", ["n", 2])], [("Y", "FP32", ["n", 2])])


def client(world, protocol: str):
    """Returns a client of tritonclient."""
    kind = tritonclient.http if protocol == "http" else tritonclient.grpc
    return kind.InferenceServerClient(getattr(world.server, protocol))


def infer(world, name: str, version="") -> tuple:
    """Sends one request; returns the status and the answer."""
    status, text = world.ask(f"{world.path(name, version)}/infer", json.dumps(REQUEST))
    return status, json.loads(text)


def test_only_an_index_may_name_a_repository(start):
    """As in Triton, the name in the path of an index has no effect, and a load or an unload with one is refused."""
    server = start(["identity_fp32"], "--model-control-mode=explicit", "--load-model=identity_fp32")
    status, text = server.ask("POST", "/v2/repository/r/index")
    assert (status, text) == server.ask("POST", "/v2/repository/index") and status == 200
    for verb in ("load", "unload"):
        status, text = server.ask("POST", f"/v2/repository/r/models/identity_fp32/{verb}")
        assert status == 501 and "'repository_name' specification is not supported" in text, text
    assert server.ask("POST", "/v2/repository/r/models/identity_fp32/other")[0] == 404
    assert server.ask("POST", "/v2/repository/r/s/index")[0] == 404


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient(serve, protocol):
    """Every call of the repository extension, in all its forms."""
    world = serve({"m": (model(), [1]), "both": (ensemble("both", "m"), [1]), "other": (model(), [1])})
    kind = tritonclient.http if protocol == "http" else tritonclient.grpc
    with client(world, protocol) as c:

        def index() -> dict:
            found = c.get_model_repository_index()
            if protocol == "grpc":
                return {entry.name: entry.state for entry in found.models}
            return {entry["name"]: entry.get("state", "") for entry in found}

        assert index() == {"m": "", "both": "", "other": ""}
        assert not c.is_model_ready("m")
        c.load_model("both", headers={"x-some": "header"})
        assert index() == {"m": "READY", "both": "READY", "other": ""}
        assert c.is_model_ready("m") and c.is_model_ready("both", "1") and not c.is_model_ready("both", "2")
        assert c.is_server_ready()
        c.unload_model("both", unload_dependents=True)
        eventually("both models are unloaded", lambda: set(index().values()) == {"UNAVAILABLE", ""})
        assert c.is_server_ready(), "explicitly unloaded models do not affect the readiness"
        c.load_model("m", config=json.dumps({"backend": "builtin", "max_batch_size": "16", **tensors()}))
        config = c.get_model_config("m")
        assert (config["max_batch_size"] if protocol == "http" else config.config.max_batch_size) == 16
        c.load_model("m")
        config = c.get_model_config("m")
        assert (config["max_batch_size"] if protocol == "http" else config.config.max_batch_size) == 16, "it is kept"
        c.unload_model("m")
        eventually("the model is unloaded", lambda: index()["m"] == "UNAVAILABLE")
        c.load_model("m")
        config = c.get_model_config("m")
        assert (config["max_batch_size"] if protocol == "http" else config.config.max_batch_size) == 8
        # A model that is in no repository.
        c.load_model("new", config='{"backend":"onnxruntime"}', files={"file:1/model.onnx": identity_onnx()})
        tensor = kind.InferInput("X", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
        assert c.infer("new", [tensor]).as_numpy("Y").tolist() == [[1, 2]]
        c.unload_model("new")
        eventually("the model is not in the index", lambda: "new" not in index())
        for name, parameters, text in [
            ("new", {}, "failed to load 'new', failed to poll from model repository"),
            ("", {}, "Model name cannot be empty"),
            ("a/../b", {}, "must not contain path traversal characters"),
            ("m", {"config": "no json"}, "Invalid config override"),
            ("m", {"files": {"file:1/x": b"x"}, "config": ""}, "failed to load 'm'"),
            ("m", {"files": {"file:../../x": b"x"}, "config": "{}"}, "it leads out of the directory with '..'"),
        ]:
            with pytest.raises(InferenceServerException) as raised:
                c.load_model(name, **parameters)
            assert text in raised.value.message()
        assert c.is_model_ready("m"), "the model still serves"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient_aio(serve, protocol):
    """Concurrent calls of the asynchronous clients, with the same methods."""
    world = serve({"m": (model(), [1]), "both": (ensemble("both", "m"), [1]), "other": (model(), [1])})
    kind = tritonclient.http.aio if protocol == "http" else tritonclient.grpc.aio

    async def calls():
        async with kind.InferenceServerClient(getattr(world.server, protocol)) as c:

            async def index(**more) -> dict:
                found = await c.get_model_repository_index(**more)
                if protocol == "grpc":
                    return {entry.name: entry.state for entry in found.models}
                return {entry["name"]: entry.get("state", "") for entry in found}

            async def both_is_unloaded() -> bool:
                return (await index())["both"] == "UNAVAILABLE"

            async def all_are_unloaded() -> bool:
                return set((await index()).values()) == {"UNAVAILABLE"}

            await asyncio.gather(c.load_model("both"), c.load_model("other"), c.load_model("m"))
            assert set((await index()).values()) == {"READY"}
            if protocol == "grpc":
                assert len((await c.get_model_repository_index(as_json=True))["models"]) == 3
            assert await c.is_model_ready("both", "1") and not await c.is_model_ready("m", "7")
            await c.load_model("m", config=json.dumps({"backend": "builtin", "max_batch_size": 8, **tensors()}))
            await c.load_model("new", config='{"backend":"onnxruntime"}', files={"file:1/model.onnx": identity_onnx()})
            assert await c.is_model_ready("new")
            with pytest.raises(InferenceServerException, match="path traversal"):
                await c.load_model("a\\b")
            await c.unload_model("m")
            await eventually_async("both is unloaded", both_is_unloaded)
            await c.load_model("both")
            await c.unload_model("both", unload_dependents=True)
            await asyncio.gather(c.unload_model("other"), c.unload_model("new"), c.unload_model("nowhere"))
            await eventually_async("all are unloaded", all_are_unloaded)
            assert not await c.is_model_ready("m") and await c.is_server_ready()

    asyncio.run(asyncio.wait_for(calls(), 60))


def tensors() -> dict:
    """Returns the tensors of an identity model's configuration."""
    return {
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "parameters": {"function": {"string_value": "identity"}},
    }


class Load:
    """Clients over both protocols that send requests continuously and record every answer and its latency."""

    def __init__(self, world, name: str, clients=2):
        self.stop, self.failed, self.took = threading.Event(), [], []
        self.threads = [threading.Thread(target=self.http, args=(world, name), daemon=True) for _ in range(clients)]
        self.threads += [threading.Thread(target=self.grpc, args=(world, name), daemon=True) for _ in range(clients)]

    def run(self, ask):
        while not self.stop.is_set():
            began = time.perf_counter()
            try:
                ask()
            except (InferenceServerException, OSError) as error:
                self.failed.append(str(error))
            self.took.append(time.perf_counter() - began)

    def http(self, world, name):
        with tritonclient.http.InferenceServerClient(world.server.http) as c:
            self.run(lambda: c.infer(name, [self.tensor(tritonclient.http)]))

    def grpc(self, world, name):
        with tritonclient.grpc.InferenceServerClient(world.server.grpc) as c:
            self.run(lambda: c.infer(name, [self.tensor(tritonclient.grpc)]))

    def tensor(self, kind):
        tensor = kind.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        return tensor

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self.stop.set()
        join_all(self.threads)


def held(pid: int) -> dict:
    """Returns the descriptors, the threads and the resident MiB of a server, after it has closed the descriptors of ended workers."""
    settled("the number of descriptors", lambda: len(os.listdir(f"/proc/{pid}/fd")), 0.5)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "mib": int(status["VmRSS"].split()[0]) / 1024,
    }


def reload(world, name: str, times: int, load=None):
    """Changes a file of the model and loads it repeatedly, each time after some requests of `load`."""
    for _ in range(times):
        goal = len(load.took) + 20 if load else 0
        world.text(f"{name}/1/changed", str(time.monotonic_ns()))
        assert world.load(name, {}) == [200, ""]
        if load:
            eventually("requests are answered", lambda: len(load.took) >= goal)


@pytest.mark.alone
@pytest.mark.soak
def test_reload_under_load(serve):
    """No request fails while the model is reloaded, no resources leak, and the statistics start at zero with each load."""
    world = serve({"m": (model(function="delay", delay_ms=2, extra=CPUS), [1])})
    assert world.load("m", {}) == [200, ""]
    first = world.server.workers()
    with Load(world, "m") as load:
        # The first reloads allocate memory that the later ones reuse.
        reload(world, "m", 3)
        eventually("the old workers have ended", lambda: len(world.server.workers()) == 2)
        before = held(world.server.process.pid)
        asked = len(load.took)
        reload(world, "m", RELOADS, load)
        eventually("the old workers have ended", lambda: len(world.server.workers()) == 2)
        after = held(world.server.process.pid)
        during = sorted(load.took[asked:])
    assert load.failed == []
    assert len(during) >= 20 * RELOADS
    p99 = during[len(during) * 99 // 100] * 1000
    print(f"\n{RELOADS} reloads, {len(during)} requests, median {statistics.median(during) * 1000:.1f} ms, p99 {p99:.1f} ms, "
          f"longest {during[-1] * 1000:.1f} ms; {before} -> {after}")  # fmt: skip
    assert not first & world.server.workers()
    assert abs(after["descriptors"] - before["descriptors"]) <= 8, (before, after)
    assert after["threads"] <= before["threads"] + 8
    assert after["mib"] - before["mib"] < 20 + RELOADS * 0.05, (before, after)
    assert world.count("m")[1]["1"] < len(load.took), "the statistics begin with the last load"
    changes = world.server.scrape()
    assert total(changes, "pharos_model_changes_total", change="load", result="success") == RELOADS + 4
    assert total(changes, "pharos_instances", model="m", state="ready") == 2


def changed(number: int) -> str:
    """Returns a configuration that differs from the previous one, alternately in the instances only and in another field too."""
    count = 1 + number % 2 + number // 2 % 2
    instances = f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]\n"
    return model(batch=8 if number // 2 % 2 else 16, extra=instances)


@pytest.mark.alone
@pytest.mark.soak
@pytest.mark.peers
@pytest.mark.skipif(bool(NO_PERF), reason=NO_PERF)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_reload_under_perf_analyzer(serve, protocol):
    """The same with the real perf_analyzer, which exits with an error if a request fails; every second change is in place."""
    world = serve({"m": (changed(0), [1])})
    assert world.load("m", {}) == [200, ""]
    command = [
        str(script("perf_analyzer")), "-m", "m", "-u", getattr(world.server, protocol), "-i", protocol, "--async",
        "--shape", "INPUT0:16", "--concurrency-range", "8", "--max-trials", "3", "--stability-percentage", "999",
        "--measurement-interval", str(1000 * max(2, RELOADS // 10)), "--percentile", "99",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    eventually("requests arrive", lambda: total(world.server.scrape(), "ts_inference_requests_total") > 100)
    took = []
    while process.poll() is None and len(took) < RELOADS:
        world.config("m", changed(1 + len(took)))
        began = time.monotonic()
        assert world.load("m", {}) == [200, ""]
        took.append(time.monotonic() - began)
        pause_as_client(0.2)
    output = process.communicate(timeout=300)[0]
    print(f"\n{len(took)} reloads, {statistics.median(took):.3f} s each, at most {max(took):.3f} s\n{output}")
    assert process.returncode == 0 and "error" not in output.lower(), output
    assert len(took) == RELOADS
    metrics = world.server.scrape()
    for change in ("load", "resize"):
        assert total(metrics, "pharos_model_changes_total", change=change, result="success") >= RELOADS // 2
    failed = {key: count for key, count in metrics.items() if key[0] == "pharos_request_failures_total" and count}
    assert not failed


def test_instances_change_in_place(serve):
    """Instances are added and removed; those in both configurations continue, and so do the statistics."""
    world = serve({"m": (model(extra=CPU), [1])})
    assert world.load("m", {}) == [200, ""]
    assert infer(world, "m")[0] == 200
    first = world.server.workers()
    with Load(world, "m") as load:
        for count in (3, 2, 4, 1):
            world.config("m", model(extra=f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]\n"))
            assert world.load("m", {}) == [200, ""]
            assert world.field("m", "instance_group") == [200, [count]]
            eventually("the others have ended", lambda count=count: len(world.server.workers()) == count)
            assert first <= world.server.workers()
            ready = lambda: total(world.server.scrape(), "pharos_instances", model="m", state="ready")  # noqa: E731
            eventually("the gauge has this number", lambda count=count: ready() == count)
            of_workers = lambda: sum(name == "WorkerLoadTime" for name, _ in world.server.scrape())  # noqa: E731
            eventually("each worker has a load time, and no other", lambda count=count: of_workers() == count)
    assert load.failed == []
    assert world.count("m") == [200, {"1": len(load.took) + 1}]
    assert world.server.workers() == first
    assert total(world.server.scrape(), "pharos_model_changes_total", change="resize", result="success") == 4


def test_a_reload_that_fails_changes_nothing(serve):
    """The previous model continues with its workers, even if only one of several versions cannot be loaded."""
    every = "version_policy { all {} }\n"
    world = serve({"m": (model(extra=CPU + every), [1, 2])})
    assert world.load("m", {}) == [200, ""]
    workers = world.server.workers()
    with Load(world, "m") as load:
        world.config("m", model(function="no such", extra=CPU + every))
        status, text = world.load("m", {})
        assert status == 400 and "version 1 is at UNAVAILABLE state" in text and "version 2 is at" in text
        world.config("m", "max_batch_size: what")
        assert world.load("m", {})[0] == 500
        world.config("m", model(extra=CPU + every + 'model_warmup { name: "w" inputs { key: "INPUT0" value {'
                     ' data_type: TYPE_FP32 dims: 1 input_data_file: "none" } } }'))  # fmt: skip
        assert world.load("m", {})[0] == 400
    assert load.failed == [] and world.server.workers() == workers
    assert world.index(["m"], False) == [
        {"name": "m", "version": version, "state": "READY"} for version in ("1", "2")
    ]
    assert world.server.get("/v2/health/ready")[0] == 200


def test_versions_are_added_and_removed_separately(serve):
    """An added or removed version directory, or another policy, does not affect the workers and statistics of other versions."""
    policy = lambda text: model(extra=CPU + f"version_policy {{ {text} }}\n")  # noqa: E731
    world = serve({"m": (policy("all {}"), [1, 2])})
    assert world.load("m", {}) == [200, ""]
    assert [infer(world, "m", version)[0] for version in ("1", "2")] == [200, 200]
    first = world.server.workers()
    world.version("m", 3)
    assert world.load("m", {}) == [200, ""]
    assert first < world.server.workers() and world.count("m") == [200, {"1": 1, "2": 1, "3": 0}]
    world.drop("m/1")
    assert world.load("m", {}) == [200, ""]
    assert infer(world, "m", "1")[0] == 503
    world.config("m", policy("specific { versions: [ 2 ] }"))
    assert world.load("m", {}) == [200, ""]
    eventually("one worker remains", lambda: len(world.server.workers()) == 1)
    assert world.server.workers() < first and world.count("m") == [200, {"2": 1}]
    # Only the description in the configuration changes.
    world.config("m", policy("latest { num_versions: 1 }"))
    world.drop("m/3")
    assert world.load("m", {}) == [200, ""]
    assert world.server.workers() < first and world.count("m") == [200, {"2": 1}]
    assert json.loads(world.ask("v2/models/m/config")[1])["version_policy"] == {"latest": {"num_versions": 1}}


def test_requests_in_flight_finish_after_an_unload(serve):
    """An unload is answered at once, accepted requests succeed, and then all resources are released."""
    world = serve({"slow": (model(function="delay", delay_ms=500), [1]), "m": (model(), [1])})
    assert world.load("slow", {}) == [200, ""]
    with ThreadPoolExecutor(4) as pool, stopped(world.server, "slow"):
        answers = [pool.submit(infer, world, "slow") for _ in range(4)]
        until_received(world.server, "slow", 4)
        assert world.unload("slow", {}) == [200, ""]
        assert world.entries(["slow"]) == [{"name": "slow", "version": "1", "state": "UNLOADING"}]
        assert infer(world, "slow") == (404, {"error": "Request for unknown model: 'slow' has no available versions"})
        assert infer(world, "slow", "1")[0] == 503
        # The model can be loaded again meanwhile.
        assert world.load("slow", {}) == [200, ""]
        assert world.unload("slow", {}) == [200, ""]
    assert [answer.result()[0] for answer in answers] == [200] * 4
    gone = [{"name": "slow", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]
    eventually("the model is unloaded", lambda: world.entries(["slow"]) == gone)
    eventually("its workers have ended", lambda: not world.server.workers())

    def series() -> set:
        labels = {("model", "slow"), ("model_name", "slow")}
        return {name for name, own in world.server.scrape() if labels & set(own)}

    eventually("its series are removed", lambda: series() == {"pharos_model_state", "pharos_model_last_load_successful"})


def sequence(world, number: int, value: int, start=False, end=False) -> tuple:
    """Sends one request of a sequence; returns the status, and the sum or the error."""
    body = {
        "parameters": {"sequence_id": number, "sequence_start": start, "sequence_end": end},
        "inputs": [{"name": "VALUE", "shape": [1, 1], "datatype": "INT32", "data": [value]}],
        "outputs": [{"name": "SUM"}],
    }
    status, text = world.ask("v2/models/seq/infer", json.dumps(body))
    answer = json.loads(text)
    return status, answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


def test_running_sequences_stay_on_the_replaced_model(serve):
    """A sequence continues on the model that has its state, while new sequences begin on the new model."""
    text = sequences(f"max_sequence_idle_microseconds: 600000000 direct {{ }} {controls()}").replace('backend: "test"', "")
    world = serve({"seq": (text, [1])})
    assert world.load("seq", {}) == [200, ""]
    assert sequence(world, 1, 10, start=True) == (200, 10)
    first = world.server.workers()
    reload(world, "seq", 1)
    assert sequence(world, 1, 5) == (200, 15)
    assert sequence(world, 2, 7, start=True) == (200, 7)
    reload(world, "seq", 1)
    assert sequence(world, 2, 7) == (200, 14)
    assert len(world.server.workers()) == 3
    assert sequence(world, 1, 1, end=True) == (200, 16)
    eventually("the first worker has ended", lambda: not first & world.server.workers())
    assert sequence(world, 1, 1)[0] == 400, "the sequence has ended"
    assert sequence(world, 2, 1) == (200, 15)
    # Another version is the latest now; running sequences are not affected.
    assert sequence(world, 4, 2, start=True) == (200, 2)
    world.version("seq", 2)
    assert world.load("seq", {}) == [200, ""]
    assert sequence(world, 3, 4, start=True) == (200, 4)
    assert sequence(world, 2, 1) == (200, 16)
    assert sequence(world, 4, 2) == (200, 4)
    assert [entry["state"] for entry in world.entries(["seq"])] == ["UNLOADING", "READY"]
    assert world.unload("seq", {}) == [200, ""]
    assert sequence(world, 2, 1)[0] == 404
    eventually("all workers have ended", lambda: not world.server.workers())


HANGS = model(function="hang", extra=CPU + 'model_warmup { name: "w" inputs { key: "INPUT0" value { data_type: TYPE_FP32 '
              'dims: 1 input_data_file: "one" } } }\n')  # fmt: skip


def test_a_hanging_load_blocks_no_other_load(serve):
    """Other models load meanwhile, and an unload ends the hanging load."""
    world = serve({"hangs": (HANGS, [1]), "m": (model(), [1])})
    (world.repository / "hangs/warmup").mkdir()
    (world.repository / "hangs/warmup/one").write_bytes(b"\1\0\0\0")
    with ThreadPoolExecutor(6) as pool:
        loads = [pool.submit(world.load, "hangs", {}) for _ in range(5)]
        eventually("the model is loading", lambda: world.states(["hangs"]) == ["LOADING"])
        assert pool.submit(world.load, "m", {}).result(DEADLINE_S) == [200, ""]
        assert infer(world, "hangs")[0] == 404 and infer(world, "m")[0] == 200
        assert not any(load.done() for load in loads)
        assert world.unload("hangs", {}) == [200, ""]
        for load in loads:
            status, text = load.result(DEADLINE_S)
            assert status == 400 and "it was unloaded during the load" in text
    assert world.entries(["hangs"])[0].get("reason") == "unloaded"
    eventually("its worker has ended", lambda: len(world.server.workers()) == 1)
    eventually("its series are gone", lambda: not [key for key in world.server.scrape() if "W-0-hangs" in str(key)])


@pytest.mark.parametrize("threads", [1, 2])
def test_loads_at_the_same_time(serve, threads):
    """`--model-load-thread-count` limits the concurrent loads of all requests."""
    world = serve({"hangs": (HANGS, [1]), "m": (model(), [1])}, EXPLICIT, f"--model-load-thread-count={threads}")
    (world.repository / "hangs/warmup").mkdir()
    (world.repository / "hangs/warmup/one").write_bytes(b"\1\0\0\0")
    with ThreadPoolExecutor(4) as pool:
        hanging = [pool.submit(world.load, "hangs", {}) for _ in range(2)]
        eventually("the model is loading", lambda: world.states(["hangs"]) == ["LOADING"])
        other = pool.submit(world.load, "m", {})
        if threads == 1:
            holds_for("the second load waits", 0.5, lambda: not other.done())
            assert infer(world, "m")[0] == 404
            assert world.unload("hangs", {}) == [200, ""]
        assert other.result(DEADLINE_S) == [200, ""] and infer(world, "m")[0] == 200
        assert world.unload("hangs", {}) == [200, ""]
        assert [load.result(DEADLINE_S)[0] for load in hanging] == [400, 400]


def test_concurrent_loads_and_unloads(serve):
    """Concurrent loads and unloads of the same and of different models: each is answered, and the last operation determines the
    state."""
    names = ["a", "b", "c"]
    world = serve({name: (model(), [1]) for name in names} | {"abc": (ensemble("abc", *names), [1])})
    with ThreadPoolExecutor(12) as pool:
        for number in range(3):
            done = [pool.submit(world.load, name, {}) for name in (*names, "abc") for _ in range(2)]
            done += [pool.submit(world.unload, name, {}) for name in names]
            for answer in done:
                status, text = answer.result(DEADLINE_S)
                assert status == 200 or "unloaded during" in text or "abc" in text, (status, text)
    assert world.load("abc", {}) == [200, ""]
    assert {entry["state"] for entry in world.index([*names, "abc"], False)} == {"READY"}
    assert infer(world, "abc")[0] == 200
    for name in ["abc", *names]:
        assert world.unload(name, {}) == [200, ""]
    eventually("no worker remains", lambda: not world.server.workers())
    reasons = lambda: {entry.get("reason") for entry in world.index([*names, "abc"], False)}  # noqa: E731
    eventually("all are unloaded", lambda: reasons() == {"unloaded"})


def test_files_of_a_load_are_removed_with_the_model(serve, tmp_path):
    """The files of a load are in one directory per load and nowhere else, whatever their names are."""
    (tmp_path / "tmp").mkdir()
    world = serve({"m": (model(), [1])}, environment={"TMPDIR": str(tmp_path / "tmp")})
    directories = lambda: sorted(path for path in (tmp_path / "tmp").glob("pharos-load-*/*") if path.is_dir())  # noqa: E731
    models = lambda: {path for path in tmp_path.rglob("*") if not {"logs", "tmp"} & set(path.parts[len(tmp_path.parts) :])}  # noqa: E731
    config = {"backend": "builtin", "max_batch_size": 8, **tensors()}
    before = models()
    escapes = ["../x", "1/../../x", "/../x", "..", "", "1/..", "/", "1/", "n" * 300, "1/" + "n/" * 3000 + "x", "1\0x"]
    for path in escapes:
        status, text = world.load("m", {"config": config, f"file:{path}": "eA=="})
        assert status == 500 and "must be a path in the model's directory" in text, (path, text)
    # A path with a leading slash is relative to the model's directory, which then has no version.
    status, text = world.load("m", {"config": config, "file:/etc/pharos-escape": "eA=="})
    assert status == 400 and "at least one version must be available" in text
    assert models() == before and not directories()
    assert not Path("/etc/pharos-escape").exists()
    for number in range(3):
        assert world.load("m", {"config": config, "file:1/any": "eA==", "file:a/b/c": "eA=="}) == [200, ""]
        eventually("only the newest directory exists", lambda: len(directories()) == 1)
    (given,) = directories()
    assert given.stat().st_mode & 0o777 == 0o700
    assert (given / "a/b/c").read_text() == "x"
    assert world.load("m", {"config": config | {"max_batch_size": -5}, "file:1/any": "eA=="})[0] == 500
    assert world.load("m", {"config": config, "file:1/any": "eA==", "file:1/any/x": "eA=="})[0] == 500
    assert directories() == [given] and infer(world, "m")[0] == 200
    assert world.unload("m", {}) == [200, ""]
    eventually("the directory is removed", lambda: not directories())


def test_hostile_names(serve):
    """Names that refer to other directories load nothing, over both protocols; the server continues."""
    world = serve({"m": (model(), [1])})
    outside = world.repository.parent / "outside"
    shutil.copytree(world.repository / "m", outside)
    for name in ["..%2Foutside", "%2e%2e%2Foutside", "..%5Coutside", "%2Fetc", ".", "..", "m%2F..%2Fm", "m%00", "m%0A", "x" * 4000]:
        status, text = world.load(name, {})
        assert status == 400, (name, status, text)
    for name in ["../outside", str(outside), "m/../m", "m/", "./m", "m\0", "\n", "é" * 200]:
        code, text = world.grpc_load(name, {})
        assert code == "INVALID_ARGUMENT" and text, (name, code, text)
        assert world.grpc_unload(name, {}) == ["OK", ""]
    assert [entry["name"] for entry in json.loads(world.ask("v2/repository/index", "")[1])] == ["m"]
    assert not world.server.workers()
    assert world.load("m", {}) == [200, ""]


def test_devices_and_pipes_are_refused(serve):
    """Devices and pipes in a model's directory are refused without reading; other models are not affected."""
    world = serve({name: (model(), [1]) for name in ("device", "pipe", "m")})
    folder = world.repository
    (folder / "device/config.pbtxt").unlink()
    (folder / "device/config.pbtxt").symlink_to("/dev/zero")
    (folder / "pipe/config.pbtxt").unlink()
    os.mkfifo(folder / "pipe/config.pbtxt")
    for name in ("device", "pipe"):
        status, text = world.load(name, {})
        assert status == 500 and f"{name}/config.pbtxt' cannot be read: it is not a regular file" in text
    os.mkfifo(folder / "m/labels.txt")
    world.config("m", model().replace('name: "OUTPUT0"', 'name: "OUTPUT0" label_filename: "labels.txt"'))
    status, text = world.load("m", {})
    assert status == 400 and "it is not a regular file" in text
    (folder / "m/labels.txt").unlink()
    world.text("m/labels.txt", "a\nb\n")
    assert world.load("m", {}) == [200, ""]


POLL = ["--model-control-mode=poll", "--repository-poll-secs=1"]


@pytest.mark.slow
def test_polling_waits_until_a_model_is_completely_written(serve):
    """A directory is loaded once its files stop changing; changes of any file count."""
    world = serve({"m": (model(), [1])}, *POLL)
    folder = world.repository / "written"
    (folder / "1").mkdir(parents=True)
    for piece in range(6):
        with open(folder / "1/weights", "ab") as file:
            file.write(b"x" * 1000)
        run_for("the copy takes longer than a polling interval", 0.4)
    (folder / "config.pbtxt").write_text(world.configuration("written", model()))
    world.await_(["written"], ["READY"])
    assert "written" not in [line for line in world.server.log.read_text().splitlines() if "ERROR" in line]
    assert "ERROR" not in world.server.log.read_text()
    pids = world.server.workers()
    world.text("m/labels.txt", "a\nb\n")
    eventually("the model is reloaded", lambda: len(world.server.workers() - pids) == 1)
    # A modification time before that of the old file, as copies may have.
    pids = world.server.workers()
    world.text("m/1/weights", "x")
    os.utime(world.repository / "m/1/weights", (1, 1))
    eventually("the model is reloaded", lambda: len(world.server.workers() - pids) == 1)
    pids = eventually("the old worker has ended", lambda: w if len(w := world.server.workers()) == 2 else None)
    # An equal configuration with other text is no change, nor are Python's cache files.
    world.config("m", "# a remark\n" + model())
    (world.repository / "m/1/__pycache__").unlink()
    (world.repository / "m/1/__pycache__").mkdir()
    holds_for("no worker is replaced", 3, lambda: world.server.workers() == pids)
    with Load(world, "m") as load:
        world.config("m", model(batch=3))
        world.field_becomes("m", "max_batch_size", 3)
        world.version("m", 2)
        world.await_(["m"], ["UNAVAILABLE", "READY"])
        world.drop("m/2")
        world.await_(["m"], ["READY", "UNAVAILABLE"])
    assert load.failed == []
    shutil.rmtree(folder)
    world.await_(["written"], [])
    assert world.server.get("/v2/health/ready")[0] == 200


def test_polling_reaches_ensembles(serve):
    """An ensemble is unloaded when its member is removed, and loaded again with it."""
    world = serve({"a": (model(), [1]), "b": (model(), [1]), "both": (ensemble("both", "a", "b"), [1])}, *POLL)
    assert infer(world, "both")[0] == 200
    shutil.move(world.repository / "b", world.repository.parent / "aside")
    world.await_(["both"], ["UNAVAILABLE"])
    assert infer(world, "both")[0] == 404
    shutil.move(world.repository.parent / "aside", world.repository / "b")
    world.await_(["both"], ["READY"])
    assert infer(world, "both")[0] == 200


def test_configuration_name_and_load_retries(serve):
    """`--model-config-name` and `--model-load-retry-count`."""
    world = serve({"m": (model(), [1]), "never": (model(function="no such"), [1])}, EXPLICIT, "--model-config-name=small",
                  "--model-load-retry-count=2")  # fmt: skip
    assert world.load("m", {}) == [200, ""]
    assert world.field("m", "max_batch_size") == [200, 8]
    (world.repository / "m/configs").mkdir()
    (world.repository / "m/configs/small.pbtxt").write_text(world.configuration("m", model(batch=2)))
    (world.repository / "m/configs/other.pbtxt").write_text("what")
    assert world.load("m", {}) == [200, ""]
    assert world.field("m", "max_batch_size") == [200, 2]
    assert world.load("never", {})[0] == 400
    assert world.server.log.read_text().count("load failed, retrying") == 2


def test_a_reload_drops_cache_entries_and_keeps_resources_consistent(serve):
    """The response cache does not return answers of the old model; a reload with the rate limiter neither stops nor leaks."""
    limited = "instance_group [ { kind: KIND_CPU count: COUNT rate_limiter { resources [ { name: \"R\" count: 2 } ] } } ]\n"
    extra = limited + "response_cache { enable: true }\n"
    world = serve({"m": (model(extra=extra.replace("COUNT", "1")), [1])}, EXPLICIT, "--cache-config=local,size=1000000",
                  "--rate-limit=execution_count")  # fmt: skip
    hits = lambda: total(world.server.scrape(), "nv_cache_num_hits_per_model", model="m")  # noqa: E731
    used = lambda name: total(world.server.scrape(), f"pharos_rate_limiter_resource_{name}", resource="R")  # noqa: E731
    assert world.load("m", {}) == [200, ""]
    assert [infer(world, "m")[0] for _ in range(2)] == [200, 200] and hits() == 1
    world.text("m/1/weights", "other")
    assert world.load("m", {}) == [200, ""]
    assert infer(world, "m")[0] == 200 and hits() == 0
    assert infer(world, "m")[0] == 200 and hits() == 1
    # With the rate limiter too, instances change in place: the statistics and the cache continue.
    world.config("m", model(extra=extra.replace("COUNT", "2")))
    assert world.load("m", {}) == [200, ""]
    assert world.count("m") == [200, {"1": 2}]
    assert infer(world, "m")[0] == 200 and hits() == 2
    eventually("two workers run", lambda: len(world.server.workers()) == 2)
    eventually("the resources of the requests are released", lambda: (used("limit"), used("used")) == (2, 0))
    assert world.unload("m", {}) == [200, ""]
    eventually("the resources are released", lambda: used("limit") == 0)


def test_a_changed_member_invalidates_the_cache_of_its_ensemble(serve):
    """The cache drops the ensemble's answers when a member changes; requests in flight continue with the previous members."""
    world = serve({"m": (model(extra=CPU), [1]), "both": (ensemble("both", "m") + "response_cache { enable: true }\n", [1])},
                  EXPLICIT, "--cache-config=local,size=1000000")  # fmt: skip
    hits = lambda: total(world.server.scrape(), "nv_cache_num_hits_per_model", model="both")  # noqa: E731
    assert world.load("both", {}) == [200, ""]
    assert [infer(world, "both")[0] for _ in range(2)] == [200, 200] and hits() == 1
    reload(world, "m", 1)
    assert infer(world, "both")[0] == 200 and hits() == 0
    assert infer(world, "both")[0] == 200 and hits() == 1
    world.config("both", ensemble("both", "m"))
    assert world.load("both", {}) == [200, ""]
    with Load(world, "both") as load:
        reload(world, "m", 5, load)
        world.config("m", model(extra=CPUS))
        assert world.load("m", {}) == [200, ""]
        world.version("m", 2)
        assert world.load("m", {}) == [200, ""]
    assert load.failed == []


def test_no_worker_outlives_a_server_that_is_reloading(serve):
    """Including workers that are starting or stopping."""
    world = serve({"m": (model(function="delay", delay_ms=300), [1])})
    assert world.load("m", {}) == [200, ""]
    with ThreadPoolExecutor(2) as pool:
        with stopped(world.server, "m"):
            answer = pool.submit(infer, world, "m")
            until_received(world.server, "m", 1)
            reload(world, "m", 1)
        workers = world.server.workers()
        world.server.stop()
        assert answer.result()[0] == 200
    assert not any(alive(pid) for pid in workers)
