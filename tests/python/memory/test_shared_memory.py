"""Memory that clients share with the server, through tritonclient's functions: in every form of request, while a region is
unregistered, truncated, removed and registered again, and its cost."""

import base64
import concurrent.futures
import itertools
import os
import queue
import re
import resource
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from harness import onnx_file
from harness.peers import missing, script
from harness.sequence_models import config as sequence_model
from harness.processes import held, worker_model
from harness.server import Server, binary, total
from harness.statistics import dispatched, until_dispatched
from harness.stream_models import REPEAT, build, model, pair, tensor
from harness.waiting import DEADLINE_S, eventually, every, join_all

CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}
TEN = np.arange(10, dtype=np.int32).reshape(1, 10)
FOUR = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 20000000 }\n"
"""A batch is dispatched when it has four rows."""


def io(datatype: str, dims: list) -> str:
    """Returns one input and one output."""
    return pair(0, datatype, dims)


ADD = "".join(
    tensor(kind, name, "INT32", [-1])
    for kind, name in [("input", "A"), ("input", "B"), ("output", "SUM"), ("output", "DIFFERENCE")]
)
STEP = 'step [ {{ model_name: "{}" model_version: -1 input_map {{ key: "{}" value: "{}" }} {} }} ]'
OWN = {
    "rows": model("identity", io("INT32", [-1]), 8, False),
    "add": model("add_sub", ADD, 8, False),
    "four": model("identity", io("INT32", [-1]), 4, False, extra=FOUR),
    "four_texts": model("identity", io("BYTES", [-1]), 4, False, extra=FOUR),
    "texts": model("identity", io("BYTES", [-1]), 8, False),
    "slow": model("delay", io("INT32", [-1]), 0, False, delay_ms=1000),
    "slower": model("delay", io("INT32", [-1]), 0, False, delay_ms=5000),
    "slow_rows": model("delay", io("INT32", [-1]), 4, False, extra=FOUR, delay_ms=1000),
    "cached": model("identity", io("INT32", [-1]), 8, False, extra="response_cache { enable: true }\n"),
    "repeat": model("repeat", REPEAT),
    "large": model("identity", io("FP32", [-1]), 0, False),
    "large_sum": model("add_sub", ADD.replace("INT32", "FP32"), 0, False),
    "crashing": model("crash", io("INT32", [-1]), 0, False),
}

ENSEMBLE = """platform: "ensemble" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "MIDDLE" data_type: TYPE_INT32 dims: [ -1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "add" model_version: -1 input_map { key: "A" value: "IN" } input_map { key: "B" value: "IN" }
      output_map { key: "SUM" value: "MIDDLE" } },
    { model_name: "add" model_version: -1 input_map { key: "A" value: "MIDDLE" } input_map { key: "B" value: "IN" }
      output_map { key: "SUM" value: "OUT" } }
  ]
}
"""
"""OUT = 3 IN, computed from MIDDLE = 2 IN, which is also an output."""


PASSING = """platform: "ensemble" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "add" model_version: -1 input_map { key: "A" value: "IN" } input_map { key: "B" value: "IN" }
      output_map { key: "SUM" value: "OUT" } }
  ]
}
"""
"""One of its outputs is its input."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with the models above."""
    folder = tmp_path_factory.mktemp("shared_memory")
    repository = build(folder / "models", OWN)
    for name, text in [("triple", ENSEMBLE), ("passing", PASSING), ("sums", sequence_model("direct { }"))]:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text)
    with Server(folder, [repository], ["--cache-config=local,size=1048576"]) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request, server):
    """A client of either protocol; no region is registered before and after the test."""
    kind = CLIENTS[request.param]
    # The HTTP client sends one request at a time by default.
    more = {"concurrency": 8} if request.param == "http" else {}
    with kind.InferenceServerClient(getattr(server, request.param), **more) as made:
        made.kind = kind
        made.unregister_system_shared_memory()
        yield made
        made.unregister_system_shared_memory()


@pytest.fixture
def memory():
    """Creates shared-memory objects, which are removed after the test: `memory("name", size)`."""
    handles = []

    def make(name: str, size: int):
        handle = shm.create_shared_memory_region(name, f"pharos_test_{os.getpid()}_{name}", size)
        handles.append(handle)
        return handle

    yield make
    for handle in handles:
        shm.destroy_shared_memory_region(handle)


def key_of(handle) -> str:
    """Returns the name of an object."""
    return handle._shm_key


def give(client, handle, name: str, size: int, offset: int = 0):
    """Registers an object."""
    client.register_system_shared_memory(name, key_of(handle), size, offset)


def fill(handle, *arrays, offset: int = 0):
    """Writes arrays into an object; texts are serialized."""
    flat = [serialize_byte_tensor(array) if array.dtype == np.object_ else array for array in arrays]
    shm.set_shared_memory_region(handle, flat, offset=offset)


def put(client, name: str, array, region=None, offset: int = 0, datatype="INT32"):
    """Returns an input: in a region, or with its data in the request."""
    made = client.kind.InferInput(name, list(array.shape), datatype)
    if region is None:
        made.set_data_from_numpy(array)
        return made
    size = len(serialize_byte_tensor(array).item()) if datatype == "BYTES" else array.nbytes
    made.set_shared_memory(region, size, offset)
    return made


def want(client, name: str, region=None, size: int = 0, offset: int = 0):
    """Returns a requested output: in a region, or with its data in the response."""
    made = client.kind.InferRequestedOutput(name)
    if region is not None:
        made.set_shared_memory(region, size, offset)
    return made


def regions(client) -> dict:
    """Returns the status of all regions by name."""
    found = client.get_system_shared_memory_status()
    if isinstance(found, list):
        return {region["name"]: region for region in found}
    return dict(found.regions)


def infer(client, name: str, inputs: list, outputs: list, **more):
    """Sends a request that must succeed."""
    return client.infer(name, inputs, outputs=outputs, **more)


def fails(client, fragment: str, *request, **more):
    """Sends a request that must fail with a text."""
    with pytest.raises(InferenceServerException, match=re.escape(fragment)):
        client.infer(*request, **more)


@pytest.mark.smoke
def test_both_inputs_and_both_outputs_in_one_region(client, memory):
    """Each tensor has a different offset; the response has only names, datatypes and shapes."""
    handle = memory("one", 1000)
    give(client, handle, "one", 900, 100)
    fill(handle, TEN, TEN + 5, offset=100)
    inputs = [put(client, "A", TEN, "one"), put(client, "B", TEN, "one", 40)]
    outputs = [want(client, "SUM", "one", 40, 301), want(client, "DIFFERENCE", "one", 100, 400)]
    result = infer(client, "add", inputs, outputs)
    assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 401) == TEN + TEN + 5).all()
    assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 500) == -5).all()
    got = result.get_output("SUM")
    if isinstance(got, dict):
        assert got == {"name": "SUM", "datatype": "INT32", "shape": [1, 10]}
    else:
        assert list(got.shape) == [1, 10] and list(result.get_response().raw_output_contents) == [b"", b""]
    region = regions(client)["one"]
    offset = region["offset"] if isinstance(region, dict) else region.offset
    assert offset == 100
    client.unregister_system_shared_memory("one")
    eventually("the answered request no longer uses the region", lambda: regions(client) == {})


@pytest.mark.parametrize("which", range(4))
def test_beside_ordinary_tensors(client, memory, which):
    """Any one of the tensors can be in a region while the others are not."""
    handle = memory("mixed", 80)
    give(client, handle, "mixed", 80)
    fill(handle, TEN)
    inputs = [
        put(client, "A", TEN, "mixed" if which == 0 else None),
        put(client, "B", TEN, "mixed" if which == 1 else None),
    ]
    outputs = [
        want(client, "SUM", "mixed" if which == 2 else None, 40, 40),
        want(client, "DIFFERENCE", "mixed" if which == 3 else None, 40, 40),
    ]
    result = infer(client, "add", inputs, outputs)
    expected = {"SUM": 2 * TEN, "DIFFERENCE": 0 * TEN}
    for number, (name, right) in enumerate(expected.items()):
        got = shm.get_contents_as_numpy(handle, np.int32, [1, 10], 40) if which == 2 + number else result.as_numpy(name)
        assert (got == right).all(), name


def test_texts(client, memory):
    """Texts in regions have the serialization of tritonclient."""
    handle = memory("texts", 4096)
    give(client, handle, "texts", 4096)
    array = np.array([[b"one", b"", "zwölf".encode()]], dtype=np.object_)
    fill(handle, array)
    size = len(serialize_byte_tensor(array).item())
    infer(client, "texts", [put(client, "I0", array, "texts", 0, "BYTES")], [want(client, "O0", "texts", size, 1024)])
    assert (shm.get_contents_as_numpy(handle, np.object_, [1, 3], 1024) == array).all()
    result = infer(client, "texts", [put(client, "I0", array, "texts", 0, "BYTES")], [want(client, "O0")])
    assert (result.as_numpy("O0") == array).all()


def asynchronous(client, name: str, inputs: list, outputs: list):
    """Starts a request; returns a function that waits for its result."""
    if client.kind is tritonclient.http:
        return client.async_infer(name, inputs, outputs=outputs).get_result
    answers = queue.Queue()
    client.async_infer(name, inputs, lambda result, error: answers.put((result, error)), outputs=outputs)

    def wait():
        result, error = answers.get(timeout=DEADLINE_S)
        if error:
            raise error
        return result

    return wait


def at_once(server, client, requests: list) -> list:
    """Sends requests concurrently, each over a separate connection; returns results or errors."""

    def ask(request):
        with client.kind.InferenceServerClient(server.http if client.kind is tritonclient.http else server.grpc) as own:
            try:
                return own.infer(*request[:2], outputs=request[2])
            except InferenceServerException as error:
                return error

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def test_asynchronously(client, memory):
    """One client sends several requests concurrently."""
    handle = memory("async", 800)
    give(client, handle, "async", 800)
    waits = []
    for number in range(10):
        fill(handle, TEN + number, offset=40 * number)
        inputs = [put(client, "I0", TEN, "async", 40 * number)]
        waits.append(asynchronous(client, "rows", inputs, [want(client, "O0", "async", 40, 400 + 40 * number)]))
    for number, wait in enumerate(waits):
        wait()
        assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 400 + 40 * number) == TEN + number).all()


def test_streamed(server, memory):
    """Regions work over ModelStreamInfer; each response of a decoupled model overwrites the response before."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.kind = tritonclient.grpc
        handle = memory("stream", 800)
        give(client, handle, "stream", 800)
        fill(handle, np.array([4, 5, 6], dtype=np.int32))
        answers = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        few = np.zeros(3, dtype=np.int32)
        outputs = [want(client, "OUT", "stream", 40, 400), want(client, "IDX")]
        client.async_stream_infer("repeat", [put(client, "IN", few, "stream")], outputs=outputs)
        for index in range(3):
            result, error = answers.get(timeout=DEADLINE_S)
            assert error is None and result.as_numpy("IDX").tolist() == [index]
            assert list(result.get_output("OUT").shape) == [1]
            assert result.get_response().raw_output_contents[0] == b""
        assert shm.get_contents_as_numpy(handle, np.int32, [1], 400).tolist() == [6]
        small = [want(client, "OUT", "stream", 3, 400)]
        client.async_stream_infer("repeat", [put(client, "IN", few, "stream")], outputs=small)
        for _ in range(3):
            _, error = answers.get(timeout=DEADLINE_S)
            assert "(3 bytes) should be at least 4 bytes" in str(error)
        client.async_stream_infer(
            "rows", [put(client, "I0", few[None], "stream")], outputs=[want(client, "O0", "stream", 12, 40)]
        )
        result, error = answers.get(timeout=DEADLINE_S)
        assert error is None
        assert shm.get_contents_as_numpy(handle, np.int32, [3], 40).tolist() == [4, 5, 6]
        client.stop_stream()
        client.unregister_system_shared_memory()


@pytest.mark.parametrize("name", ["four", "four_texts"])
def test_batches_mix_what_is_where(server, client, memory, name):
    """Four requests of different clients form one batch, with inputs and outputs in regions or not."""
    handle = memory("batch", 8192)
    give(client, handle, "batch", 8192)
    before = server.statistics(name)
    datatype = "BYTES" if name == "four_texts" else "INT32"
    rows = [
        np.array([[b"%d" % (10**n), b"x" * n]], dtype=np.object_)
        if datatype == "BYTES"
        else np.array([[n, 10 * n]], dtype=np.int32)
        for n in range(4)
    ]
    requests = []
    for n, row in enumerate(rows):
        fill(handle, row, offset=100 * n)
        size = len(serialize_byte_tensor(row).item()) if datatype == "BYTES" else row.nbytes
        inside = put(client, "I0", row, None if n == 1 else "batch", 100 * n, datatype)
        requests.append((name, [inside], [want(client, "O0", None if n == 2 else "batch", size, 1000 + 100 * n)]))
    results = at_once(server, client, requests)
    kind = np.object_ if datatype == "BYTES" else np.int32
    for n, (row, result) in enumerate(zip(rows, results)):
        got = result.as_numpy("O0") if n == 2 else shm.get_contents_as_numpy(handle, kind, [1, 2], 1000 + 100 * n)
        assert (got == row).all(), n
    after = server.statistics(name)
    assert after["execution_count"] - before["execution_count"] == 1
    assert after["inference_count"] - before["inference_count"] == 4


def test_a_truncated_region_fails_only_its_request_in_a_batch(server, client, memory):
    """Only the request whose region was truncated before the execution fails, with a text that names the region."""
    good, bad = memory("good", 400), memory("bad", 4096 * 3)
    give(client, good, "good", 400)
    give(client, bad, "bad", 4096 * 3)
    fill(good, TEN)
    os.truncate(f"/dev/shm/{key_of(bad)}", 4096)
    inputs = [("good", 0), ("bad", 8192), ("good", 0), ("bad", 0)]
    requests = [
        ("slow_rows", [put(client, "I0", TEN, region, offset)], [want(client, "O0")]) for region, offset in inputs
    ]
    results = at_once(server, client, requests)
    text = "shared memory region 'bad' was registered with 12288 bytes, of which 4096 are left"
    invalid = {tritonclient.http: "400", tritonclient.grpc: "StatusCode.INVALID_ARGUMENT"}[client.kind]
    for (region, _), result in zip(inputs, results):
        if region == "good":
            assert (result.as_numpy("O0") == TEN).all()
        else:
            assert text in str(result) and result.status() == invalid


def test_a_worker_without_free_descriptors(server, client, memory):
    """Requests fail with a reason until the worker can receive the region; the next request then works. Others are not affected."""
    known, late, other = (memory(name, 400) for name in ("known", "late", "other"))
    for handle, name in [(known, "known"), (late, "late"), (other, "other")]:
        give(client, handle, name, 400)
        fill(handle, TEN)
    request = lambda region: ("rows", [put(client, "I0", TEN, region)], [want(client, "O0")])  # noqa: E731
    infer(client, *request("known"))
    [worker] = [pid for pid in server.workers() if worker_model(pid) == "rows"]
    limits = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, limits[1]))
    unavailable = {tritonclient.http: "503", tritonclient.grpc: "StatusCode.UNAVAILABLE"}[client.kind]
    try:
        for region in ["late", "late", "other", "late"]:
            with pytest.raises(InferenceServerException, match=f"'{region}' cannot be used: the worker could not receive") as failed:
                client.infer(*request(region)[:2], outputs=request(region)[2])
            assert failed.value.status() == unavailable
            assert (infer(client, *request("known")).as_numpy("O0") == TEN).all()
        client.unregister_system_shared_memory("other")
    finally:
        resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)
    give(client, other, "other", 400)
    for region in ["late", "other", "known"]:
        assert (infer(client, *request(region)).as_numpy("O0") == TEN).all(), region
    assert worker in server.workers()


@pytest.mark.slow
def test_a_region_truncated_during_execution(server, client, memory):
    """Only the request fails; the worker continues and serves other requests."""
    handle = memory("cut", 1 << 20)
    give(client, handle, "cut", 1 << 20)
    large = np.zeros(1 << 16, dtype=np.int32)
    workers = server.workers()
    for inside, outside in [("cut", None), (None, "cut")]:
        os.truncate(f"/dev/shm/{key_of(handle)}", 1 << 20)
        before = dispatched(server, "slower")
        wait = asynchronous(
            client,
            "slower",
            [put(client, "I0", large, inside, 1 << 18)],
            [want(client, "O0", outside, large.nbytes, 1 << 19)],
        )
        eventually("the request is executed", lambda: sample(server, "pharos_shared_memory_in_use") > 0)
        until_dispatched(server, "slower", before + 1)
        os.truncate(f"/dev/shm/{key_of(handle)}", 4096)
        with pytest.raises(
            InferenceServerException, match="shared memory region 'cut' was registered with 1048576 bytes"
        ):
            wait()
    assert server.workers() == workers
    result = infer(client, "slow", [put(client, "I0", TEN[0])], [want(client, "O0")])
    assert (result.as_numpy("O0") == TEN[0]).all()
    # Restore the size.
    os.truncate(f"/dev/shm/{key_of(handle)}", 1 << 20)
    infer(
        client, "slow", [put(client, "I0", large, "cut", 1 << 18)], [want(client, "O0", "cut", large.nbytes, 1 << 19)]
    )


def test_removed_while_it_is_registered(client):
    """The memory of a removed object stays usable until the region is unregistered."""
    handle = shm.create_shared_memory_region("gone", f"pharos_test_{os.getpid()}_gone", 80)
    give(client, handle, "gone", 80)
    fill(handle, TEN)
    os.unlink(f"/dev/shm/{key_of(handle)}")
    infer(client, "rows", [put(client, "I0", TEN, "gone")], [want(client, "O0", "gone", 40, 40)])
    assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 40) == TEN).all()
    client.unregister_system_shared_memory("gone")
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region"):
        give(client, handle, "gone", 80)
    shm.mapped_shared_memory_regions()
    handle._mpsm_handle.close()


def sample(server, name: str, **labels) -> float:
    """Returns a sample of the metrics of system memory."""
    return server.scrape()[name, tuple(sorted({"kind": "system", **labels}.items()))]


def mapped(server, key: str) -> list:
    """Returns the processes of the server that have an object mapped."""
    pids = [server.process.pid, *server.workers()]
    return [pid for pid in pids if key in open(f"/proc/{pid}/maps").read()]


def test_unregistered_in_use(server, client, memory):
    """The region stays usable and in the status until its last request ends; then it is removed and unmapped."""
    handle, key = memory("used", 80), None
    give(client, handle, "used", 80)
    key = key_of(handle)
    fill(handle, TEN)
    with held(server, "slow"):
        wait = asynchronous(client, "slow", [put(client, "I0", TEN[0], "used")], [want(client, "O0", "used", 40, 40)])
        eventually("the region is in use", lambda: sample(server, "pharos_shared_memory_in_use") == 2)
        client.unregister_system_shared_memory("used")
        assert list(regions(client)) == ["used"]
        infer(client, "rows", [put(client, "I0", TEN, "used")], [want(client, "O0", "used", 40, 40)])
        assert list(regions(client)) == ["used"]
        # The name can be registered again: new requests use the new region.
        other = memory("other", 64)
        give(client, other, "used", 64)
        region = regions(client)["used"]
        assert (region["byte_size"] if isinstance(region, dict) else region.byte_size) == 64
    wait()
    assert (shm.get_contents_as_numpy(handle, np.int32, [10], 40) == TEN[0]).all()
    client.unregister_system_shared_memory()
    eventually("the answered requests no longer use the regions", lambda: regions(client) == {})
    fails(client, "Unable to find shared memory region: 'used'", "rows", [put(client, "I0", TEN, "used")])
    eventually("no process has it mapped", lambda: not mapped(server, key))
    assert sample(server, "pharos_shared_memory_regions") == 0


def test_the_frontend_maps_nothing(server, client, memory):
    """Only the worker of the model maps the region."""
    handle = memory("mapped", 80)
    give(client, handle, "mapped", 80)
    infer(client, "rows", [put(client, "I0", TEN, "mapped")], [want(client, "O0", "mapped", 40, 40)])
    found = mapped(server, key_of(handle))
    assert len(found) == 1 and found[0] != server.process.pid


def test_registered_again_under_load(server, client, memory):
    """Requests use the region, or fail because it is not registered; they never read other memory."""
    handles = [memory(f"again{n}", 1 << 16) for n in range(2)]
    rows = [np.full((1, 16384), n + 1, dtype=np.int32) for n in range(2)]
    for handle, row in zip(handles, rows):
        fill(handle, row)
    stop, seen, wrong = threading.Event(), [0, 0], []
    kind, address = client.kind, server.http if client.kind is tritonclient.http else server.grpc

    def load():
        with kind.InferenceServerClient(address) as own:
            own.kind = kind
            while not stop.is_set():
                try:
                    result = own.infer("rows", [put(own, "I0", rows[0], "again")], outputs=[want(own, "O0")])
                    first, last = result.as_numpy("O0")[0, [0, -1]]
                    seen[0] += 1
                    if first != last or first not in (1, 2):
                        wrong.append((first, last))
                except InferenceServerException as error:
                    seen[1] += 1
                    if "Unable to find shared memory region: 'again'" not in str(error):
                        wrong.append(str(error))

    threads = [threading.Thread(target=load, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        for handle in handles:
            give(client, handle, "again", 1 << 16)
            client.unregister_system_shared_memory("again")
    stop.set()
    join_all(threads)
    assert wrong == [] and seen[0] > 10, (seen, wrong[:3])
    eventually("no process has a region mapped", lambda: not mapped(server, "again"))


def test_truncated_and_grown_under_load(server, client, memory):
    """At any time a request gets an answer, or an error that its region is truncated. The workers are the same as before."""
    handle = memory("race", 1 << 20)
    give(client, handle, "race", 1 << 20)
    path, workers = f"/dev/shm/{key_of(handle)}", server.workers()
    stop, answers = threading.Event(), {"ok": 0, "cut": 0, "other": []}
    kind, address = client.kind, server.http if client.kind is tritonclient.http else server.grpc
    array = np.zeros((1, 1 << 16), dtype=np.int32)

    def load(which):
        with kind.InferenceServerClient(address) as own:
            own.kind = kind
            while not stop.is_set():
                try:
                    inside, outside = [("race", None), (None, "race"), ("race", "race")][which]
                    own.infer(
                        "rows",
                        [put(own, "I0", array, inside, 1 << 19)],
                        outputs=[want(own, "O0", outside, array.nbytes)],
                    )
                    answers["ok"] += 1
                except InferenceServerException as error:
                    if "shared memory region 'race' was registered with 1048576 bytes" in str(error):
                        answers["cut"] += 1
                    else:
                        answers["other"].append(str(error))

    threads = [threading.Thread(target=load, args=(n,), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    sizes = itertools.cycle((0, 1 << 20, 4096, 1 << 20))
    for _ in every(0.001, 3):
        os.truncate(path, next(sizes))
    os.truncate(path, 1 << 20)
    stop.set()
    join_all(threads)
    assert answers["other"] == [] and answers["ok"] > 10 and answers["cut"] > 10, answers
    assert server.workers() == workers


def test_texts_that_change_while_they_are_read(server, client, memory):
    """Lengths are valid and invalid in turn: a request gets an answer or an error about its strings, and no worker is lost."""
    handle = memory("liar", 4096)
    give(client, handle, "liar", 4096)
    array = np.array([[b"x" * 1000, b"y" * 1000]], dtype=np.object_)
    fill(handle, array)
    stop, workers = threading.Event(), server.workers()
    file = os.open(f"/dev/shm/{key_of(handle)}", os.O_RDWR)

    def lie():
        while not stop.is_set():
            for length in (b"\xe8\x03\0\0", b"\xff\xff\xff\xff", b"\xe7\x03\0\0"):
                os.pwrite(file, length, 0)

    thread = threading.Thread(target=lie, daemon=True)
    thread.start()
    results = set()
    for _ in range(300):
        try:
            result = infer(client, "texts", [put(client, "I0", array, "liar", 0, "BYTES")], [want(client, "O0")])
            results.add(result.as_numpy("O0").shape)
        except InferenceServerException as error:
            assert "string" in str(error), error
            results.add("refused")
    stop.set()
    join_all([thread])
    os.close(file)
    assert results <= {(1, 2), "refused"} and server.workers() == workers


def test_ensemble(client, memory):
    """A region can be the input of the first step and the output of any step; other steps can still use an output in a region."""
    handle = memory("pipe", 400)
    give(client, handle, "pipe", 400)
    fill(handle, TEN)
    inputs = [put(client, "IN", TEN, "pipe")]
    outputs = [want(client, "OUT", "pipe", 40, 40), want(client, "MIDDLE", "pipe", 40, 80)]
    result = infer(client, "triple", inputs, outputs)
    assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 40) == 3 * TEN).all()
    assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 80) == 2 * TEN).all()
    result = infer(
        client, "triple", [put(client, "IN", TEN)], [want(client, "OUT"), want(client, "MIDDLE", "pipe", 40, 120)]
    )
    assert (result.as_numpy("OUT") == 3 * TEN).all()
    assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 120) == 2 * TEN).all()
    fails(
        client,
        "in ensemble 'triple', shared memory size specified with the request for output 'SUM' (39 bytes)",
        "triple",
        inputs,
        outputs=[want(client, "OUT", "pipe", 39, 40)],
    )


def test_ensemble_with_an_input_as_output(client, memory):
    """No step computes this output, so it cannot be written to a region: the error says so."""
    handle = memory("passed", 400)
    give(client, handle, "passed", 400)
    fill(handle, TEN)
    text = "output 'IN' of ensemble 'passing' is one of its inputs: it cannot be in shared memory"
    for inside, outside in [("passed", None), (None, "passed"), ("passed", "passed")]:
        fails(client, text, "passing", [put(client, "IN", TEN, inside)], outputs=[want(client, "IN", outside, 40, 40)])
    result = infer(
        client, "passing", [put(client, "IN", TEN)], [want(client, "IN"), want(client, "OUT", "passed", 40, 40)]
    )
    assert (result.as_numpy("IN") == TEN).all()
    assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 40) == 2 * TEN).all()


def test_names_that_are_not_utf8(server):
    """Region names that are not UTF-8 get 404."""
    for path in ("/v2/systemsharedmemory/region/%ff/status", "/v2/cudasharedmemory/region/%ff/status"):
        assert server.get(path)[0] == 404
    assert server.ask("POST", "/v2/systemsharedmemory/region/%ff/register", b"{}")[0] == 404


def test_sequence(client, memory):
    """Inputs and outputs of the steps of a sequence can be in regions, also in a batch with padding."""
    handle = memory("sum", 400)
    give(client, handle, "sum", 400)
    total = 0
    for step in range(5):
        fill(handle, np.array([[step + 1]], dtype=np.int32))
        total += step + 1
        infer(
            client,
            "sums",
            [put(client, "VALUE", np.zeros((1, 1), np.int32), "sum")],
            [want(client, "SUM", "sum", 4, 40)],
            sequence_id=77,
            sequence_start=step == 0,
            sequence_end=step == 4,
        )
        assert shm.get_contents_as_numpy(handle, np.int32, [1], 40).tolist() == [total]


def test_not_in_the_response_cache(server, client, memory):
    """A region can change between lookup and execution, so that requests with regions are neither looked up nor stored."""
    handle = memory("cached", 80)
    give(client, handle, "cached", 80)
    before = server.statistics("cached")["inference_stats"]
    for number in range(3):
        row = TEN + 100 * number
        fill(handle, row)
        result = infer(client, "cached", [put(client, "I0", TEN, "cached")], [want(client, "O0")])
        assert (result.as_numpy("O0") == row).all()
        infer(client, "cached", [put(client, "I0", row)], [want(client, "O0", "cached", 40, 40)])
        assert (shm.get_contents_as_numpy(handle, np.int32, [1, 10], 40) == row).all()
    after = server.statistics("cached")["inference_stats"]
    assert all(after[kind]["count"] == before[kind]["count"] for kind in ("cache_hit", "cache_miss"))
    assert after["success"]["count"] - before["success"]["count"] == 6


def test_after_a_worker_has_died(server, client, memory):
    """The next worker gets the regions as well."""
    handle = memory("crash", 80)
    give(client, handle, "crash", 80)
    fill(handle, TEN)
    ask = lambda: infer(client, "crashing", [put(client, "I0", TEN[0], "crash")], [want(client, "O0", "crash", 40, 40)])
    ask()
    assert (shm.get_contents_as_numpy(handle, np.int32, [10], 40) == TEN[0]).all()
    (worker,) = mapped(server, key_of(handle))
    os.kill(worker, signal.SIGKILL)
    fill(handle, TEN + 1, offset=0)
    fill(handle, TEN + 4)
    eventually("another worker answers", lambda: tried(ask))
    assert (shm.get_contents_as_numpy(handle, np.int32, [10], 40) == TEN[0] + 4).all()


def tried(call) -> bool:
    """Returns whether a call succeeds."""
    try:
        call()
        return True
    except InferenceServerException:
        return False


def test_many_regions(client, memory):
    """More regions can be registered and used than fit in one packet to the worker."""
    handle = memory("many", 1 << 16)
    array = np.arange(1, dtype=np.int32)
    for number in range(100):
        give(client, handle, f"many{number}", 64, 64 * number)
        fill(handle, array + number, offset=64 * number)
    for number in range(100):
        infer(
            client,
            "rows",
            [put(client, "I0", array[None], f"many{number}")],
            [want(client, "O0", f"many{99 - number}", 4, 32)],
        )
        assert shm.get_contents_as_numpy(handle, np.int32, [1], 64 * (99 - number) + 32).tolist() == [number]
    assert len(regions(client)) == 100


def test_metrics(server, client, memory):
    """Regions, their bytes, and tensors in regions are counted."""
    handle = memory("counted", 4096)
    names = [
        ("pharos_shared_memory_tensors_total", "input", 1),
        ("pharos_shared_memory_tensor_bytes_total", "input", 40),
        ("pharos_shared_memory_tensors_total", "output", 1),
        ("pharos_shared_memory_tensor_bytes_total", "output", 100),
    ]
    before = [sample(server, name, direction=direction) for name, direction, _ in names]
    give(client, handle, "counted", 4000)
    infer(client, "rows", [put(client, "I0", TEN, "counted")], [want(client, "O0", "counted", 100, 40)])
    after = [sample(server, name, direction=direction) for name, direction, _ in names]
    assert [b - a for a, b in zip(before, after)] == [more for _, _, more in names]
    assert sample(server, "pharos_shared_memory_regions") == 1
    assert sample(server, "pharos_shared_memory_region_bytes") == 4000
    status, text = server.get("/v2/systemsharedmemory/region/counted/status")
    assert status == 200 and '"in_use":0,"uses":2' in text
    refusals = lambda: total(server.scrape(), "pharos_request_failures_total", route="infer", reason="SHARED_MEMORY")  # noqa: E731
    refused = refusals()
    fails(client, "Unable to find shared memory region: 'nothing'", "rows", [put(client, "I0", TEN, "nothing")])
    assert refusals() == refused + 1


def test_switched_off(start, memory):
    """Registrations and unregistrations get Triton's text; the status is available and empty."""
    server = start(["identity_fp32"], "--allow-client-shm=false")
    handle = memory("off", 64)
    text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    for protocol, kind in CLIENTS.items():
        with kind.InferenceServerClient(getattr(server, protocol)) as client:
            for call in (
                lambda: give(client, handle, "off", 64),
                client.unregister_system_shared_memory,
                client.unregister_cuda_shared_memory,
                lambda: client.register_cuda_shared_memory("c", b"A" * 88, 0, 8),
            ):
                with pytest.raises(InferenceServerException, match=re.escape(text)) as caught:
                    call()
                assert caught.value.status() == {"http": "501", "grpc": "StatusCode.UNIMPLEMENTED"}[protocol]
            client.kind = kind
            assert regions(client) == {} and not mapped(server, key_of(handle))
            array = np.zeros((1, 4), dtype=np.float32)
            fails(
                client,
                "Unable to find shared memory region: 'off'",
                "identity_fp32",
                [put(client, "INPUT0", array, "off", 0, "FP32")],
            )


def resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", open(f"/proc/{pid}/status").read())[1]) << 10


@pytest.mark.alone
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", ["large", "large_sum"])
def test_a_quarter_of_a_gibibyte(server, memory, protocol, name, capsys):
    """256 MiB in and out cost the frontend no memory, and little time compared with the model's execution."""
    size, kind = 256 << 20, CLIENTS[protocol]
    handle = memory("large", 2 * size)
    array = np.frombuffer(handle._mpsm_handle.buf, dtype=np.float32, count=size // 4)
    array[:] = 1.5
    with kind.InferenceServerClient(
        getattr(server, protocol), **({"network_timeout": 120, "connection_timeout": 120} if protocol == "http" else {})
    ) as client:
        client.kind = kind
        give(client, handle, "large", 2 * size)
        inputs = [("I0",), ("A", "B")][name == "large_sum"]
        output = "O0" if name == "large" else "SUM"
        request = (
            [put(client, one, array, "large", 0, "FP32") for one in inputs],
            [want(client, output, "large", size, size)],
        )
        infer(client, name, *request)
        before, pid, ratios = server.statistics(name), server.process.pid, []
        memory_before = resident(pid)
        for _ in range(5):
            begun = time.monotonic_ns()
            infer(client, name, *request)
            took = time.monotonic_ns() - begun
            after = server.statistics(name)
            own = after["inference_stats"]["compute_infer"]["ns"] - before["inference_stats"]["compute_infer"]["ns"]
            before = after
            ratios.append(took / own)
        grown = resident(pid) - memory_before
        client.unregister_system_shared_memory()
    out = np.frombuffer(handle._mpsm_handle.buf, dtype=np.float32, count=size // 4, offset=size)
    right = 1.5 if name == "large" else 3.0
    assert (out[:: 1 << 16] == right).all() and out[-1] == right
    del out, array, request
    with capsys.disabled():
        print(
            f"\n{protocol} {name}: request / model {sorted(ratios)[2]:.3f} (median of {[f'{r:.2f}' for r in ratios]}), frontend grew {grown >> 10} KiB"
        )
    assert grown < 8 << 20
    assert sorted(ratios)[2] < 1.2


@pytest.mark.skipif(bool(missing("perf_analyzer", "perf")), reason=missing("perf_analyzer", "perf"))
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer(server, protocol):
    """The unmodified program registers, sends, reads and unregisters with `--shared-memory system`."""
    command = [
        str(script("perf_analyzer")), "-m", "add", "-i", protocol, "-u", getattr(server, protocol), "--async", "--shape", "A:64",
        "--shape", "B:64", "--shared-memory", "system", "--output-shared-memory-size", "1024", "--concurrency-range", "2",
        "--measurement-interval", "500", "--max-trials", "3", "--stability-percentage", "999",
    ]  # fmt: skip
    before = sample(server, "pharos_shared_memory_tensors_total", direction="input")
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sample(server, "pharos_shared_memory_tensors_total", direction="input") > before + 20
    assert sample(server, "pharos_shared_memory_regions") == 0


def test_onnx_runtime_gets_copies(tmp_path, memory):
    """An ONNX model gets copies, which the client cannot change, and its outputs are written after the execution."""
    (tmp_path / "models/double/1").mkdir(parents=True)
    graph = onnx_file.model(
        [onnx_file.node("Add", ["X", "X"], ["Y"])], [("X", "FP32", ["n", 4])], [("Y", "FP32", ["n", 4])]
    )
    (tmp_path / "models/double/1/model.onnx").write_bytes(graph)
    text = (
        'backend: "onnxruntime" max_batch_size: 4\n'
        + tensor("input", "X", "FP32", [4])
        + tensor("output", "Y", "FP32", [4])
    )
    (tmp_path / "models/double/config.pbtxt").write_text(text)
    handle = memory("double", 4096)
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    with (
        Server(tmp_path, [tmp_path / "models"]) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc) as client,
    ):
        client.kind = tritonclient.grpc
        give(client, handle, "double", 4000, 13)
        fill(handle, array, offset=14)
        infer(client, "double", [put(client, "X", array, "double", 1, "FP32")], [want(client, "Y", "double", 32, 103)])
        assert (shm.get_contents_as_numpy(handle, np.float32, [2, 4], 116) == 2 * array).all()


PROBE = """#!/bin/sh
if [ "$1" = --look-at-cuda-memory ]; then
  handle=$(head -c 64 | od -An -tx1 | tr -d ' \\n')
  case $handle in
    00*) echo "refused invalid resource handle" ;;
    *) echo "a library says something"; echo "bytes 4096" ;;
  esac
  exit 0
fi
exec "{worker}" "$@"
"""
"""A worker that reports CUDA memory when it is probed, but cannot use a GPU."""


def test_cuda_regions_with_a_fake_gpu(tmp_path, memory):
    """Registration, status and unregistration work as with a GPU; only a request that uses the region fails in the worker."""
    worker = tmp_path / "worker"
    worker.write_text(PROBE.format(worker=binary().with_name("pharos-worker")))
    worker.chmod(0o755)
    good, bad = (base64.b64encode(bytes([first]) * 64) for first in (1, 0))
    handle = memory("beside", 64)
    repository = build(tmp_path / "models", {"rows": OWN["rows"]})
    with Server(tmp_path, [repository], [f"--worker-binary={worker}"]) as server:
        for protocol, kind in CLIENTS.items():
            with kind.InferenceServerClient(getattr(server, protocol)) as client:
                client.kind = kind
                client.register_cuda_shared_memory("c", good, 0, 4096)
                give(client, handle, "s", 64)
                for name, args, text in [
                    ("c", (good, 0, 64), "shared memory region 'c' already in manager"),
                    ("s", (good, 0, 64), "shared memory region 's' already in manager"),
                    ("d", (good, 0, 4097), "'d': 4097 bytes requested, the memory has 4096"),
                    ("d", (good, 0, 0), "'d': 0 bytes requested, the memory has 4096"),
                    ("d", (bad, 0, 64), "'d': invalid resource handle"),
                    ("d", (b"AAAA", 0, 64), "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"),
                ]:
                    with pytest.raises(InferenceServerException, match=re.escape(text)):
                        client.register_cuda_shared_memory(name, *args)
                status = client.get_cuda_shared_memory_status("c")
                status = status[0] if protocol == "http" else status.regions["c"]
                told = [
                    status[key] if protocol == "http" else getattr(status, key)
                    for key in ("name", "device_id", "byte_size")
                ]
                assert told == ["c", 0, 4096]
                assert list(regions(client)) == ["s"]
                with pytest.raises(InferenceServerException, match="registered as CUDA shared memory, not system"):
                    client.get_system_shared_memory_status("c")
                fails(client, "shared memory region 'c' cannot be used", "rows", [put(client, "I0", TEN, "c")])
                infer(client, "rows", [put(client, "I0", TEN)], [want(client, "O0")])
                assert server.scrape()["pharos_shared_memory_region_bytes", (("kind", "cuda"),)] == 4096
                client.unregister_cuda_shared_memory()
                assert list(regions(client)) == ["s"]
                client.unregister_system_shared_memory()
