"""Triton's own Python backend, `libtriton_python.so` of the package nvidia-pytriton, in a worker of this server and in a real Triton:
both give the same answers, statistics and metrics."""

import http.client
import json
import os
import queue
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import triton_to_np_dtype

from backends import triton_backends
from backends.native_backends import parameter, write
from harness.peers import Triton, missing
from harness.server import alive, samples
from harness.waiting import eventually

pytestmark = [pytest.mark.peers, pytest.mark.skipif(bool(missing("triton", "triton")), reason=missing("triton", "triton"))]

HOME = Path(os.environ.get("PEERS_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pharos-peers")
IO = """
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_STRING dims: [ -1 ] optional: true } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
MODELS = {"echo": "", "calls": "", "raises": "", "gathers": "", "streams": "model_transaction_policy { decoupled: true }"}
TYPES = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"]
REQUESTS = [
    ("echo", {"id": "7", "inputs": [{"name": "INPUT0", "shape": [2, 3], "datatype": "INT32", "data": [1, 2, 3, 4, 5, 6]}]}),
    ("echo", {"inputs": [
        {"name": "INPUT0", "shape": [1, 0], "datatype": "INT32", "data": []},
        {"name": "INPUT1", "shape": [1, 2], "datatype": "BYTES", "data": ["ä", ""]},
    ]}),
    ("echo", {"inputs": [
        {"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [1]},
        {"name": "INPUT1", "shape": [1, 1], "datatype": "BYTES", "data": ["x" * 3000]},
    ], "outputs": [{"name": "OUTPUT1"}]}),
    ("echo", {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [-1]}]}),
    ("calls", {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "INT32", "data": [3, 4]}]}),
    ("gathers", {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [5]}]}),
    ("raises", {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [5]}]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A folder with the models in `models`."""
    folder = tmp_path_factory.mktemp("python")
    code = (triton_backends.SOURCES / "models.py").read_text()
    for name, more in MODELS.items():
        text = f'backend: "python" runtime: "libtriton_python.so" max_batch_size: 8\n{IO}{more}\n{parameter("kind", name)}'
        (write(folder / "models", name, text) / "model.py").write_text(code)
    kinds = [(number, "STRING" if name == "BYTES" else name) for number, name in enumerate(TYPES)]
    sides = [
        f"{side} [ " + ", ".join(f'{{ name: "{side.upper()}{number}" data_type: TYPE_{kind} dims: [ -1 ] }}' for number, kind in kinds) + " ]"
        for side in ("input", "output")
    ]
    text = 'backend: "python" runtime: "libtriton_python.so" max_batch_size: 8\ninstance_group [ { kind: KIND_CPU } ]\n'
    text += "\n".join([*sides, parameter("kind", "echo")])
    (write(folder / "models", "types", text) / "model.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def triton(repository):
    """A real Triton with the models."""
    peer = Triton(repository / "models", repository / "triton.log")
    peer.ensure()
    yield peer
    peer.stop()


@pytest.fixture(scope="module")
def served(triton, repository):
    """This server with the models and the library of the same package."""
    del triton  # Its script has copied the library and its stub to one folder.
    site = next((HOME / "triton/lib").glob("python3*/site-packages"))
    running = triton_backends.server(repository, HOME / "triton-backends")
    running.environment = {"LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"), "PATH": f"{HOME}/triton/bin:{os.environ['PATH']}"}
    with running:
        found = triton_backends.states(running)
        assert all(state == "READY" for state, _ in found.values()), found
        yield running


def answer_of(address: str, model: str, request: dict) -> tuple:
    """Returns the status and the JSON of an answer."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(request))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_the_same_answers(served, triton, number):
    """Answers, errors and their statuses; the text of an exception has a line number of the same file, and a class."""
    model, request = REQUESTS[number]
    expected = answer_of(triton.http, model, request)
    assert answer_of(served.http, model, request) == expected


def test_every_datatype(served, triton):
    """One request with all datatypes, in binary form."""
    rng = np.random.default_rng(1)
    inputs = []
    for number, name in enumerate(TYPES):
        values = rng.integers(0, 2, (3, 4))
        given = np.array(values.astype(str), object) if name == "BYTES" else values.astype(triton_to_np_dtype(name))
        tensor = tritonclient.grpc.InferInput(f"INPUT{number}", given.shape, name)
        tensor.set_data_from_numpy(given)
        inputs.append((tensor, given))
    for address in (triton.grpc, served.grpc):
        with tritonclient.grpc.InferenceServerClient(address) as client:
            answer = client.infer("types", [tensor for tensor, _ in inputs])
        for number, (_, given) in enumerate(inputs):
            returned = answer.as_numpy(f"OUTPUT{number}")
            expected = given.astype("S") if given.dtype == object else given
            assert returned.shape == given.shape and np.array_equal(returned.astype(expected.dtype), expected), TYPES[number]


def responses(address: str, count: int) -> list:
    """Returns the values of all responses to a request of the decoupled model."""
    results = queue.Queue()
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[count]], np.int32))
    with tritonclient.grpc.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer("streams", [tensor], enable_empty_final_response=True)
        found = []
        while True:
            result, error = results.get(timeout=60)
            assert error is None, error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found
            found.append(result.as_numpy("OUTPUT0").tolist())


@pytest.mark.parametrize("count", [0, 1, 60])
def test_streams(served, triton, count):
    """The responses of a decoupled model."""
    assert responses(served.grpc, count) == responses(triton.grpc, count) == [[[count + number]] for number in range(count)]


def test_the_same_statistics_and_metrics(served, triton):
    """The counts of the same requests, and the metrics that the models record. This library reports success for a response that is an
    error, which Triton counts; here such a request has failed."""

    def counts(address: str, model: str) -> dict:
        with urllib.request.urlopen(f"http://{address}/v2/models/{model}/stats", timeout=60) as response:
            statistics = json.load(response)["model_stats"][0]
        stats = statistics["inference_stats"]
        kinds = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        return {kind: stats[kind]["count"] for kind in kinds} | {key: statistics[key] for key in ("inference_count", "execution_count")}

    for model, request in REQUESTS:
        before = [counts(address, model) for address in (served.http, triton.http)]
        statuses = {answer_of(address, model, request)[0] for address in (served.http, triton.http)}
        after = [counts(address, model) for address in (served.http, triton.http)]
        changes = [{key: new[key] - old[key] for key in new} for old, new in zip(before, after)]
        if statuses == {200}:
            assert changes[0] == changes[1], (model, changes)
        else:
            assert changes[0]["fail"] == 1 and changes[0]["success"] == 0, (model, changes)

    def recorded(address: str) -> dict:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
            found = samples(response.read().decode())
        return {name: value for name, value in found.items() if name[0].startswith("peer_")}

    assert recorded(served.metrics)
    eventually("both have recorded the same", lambda: recorded(served.metrics).keys() == recorded(triton.metrics).keys())


def test_a_killed_worker(served):
    """A worker that is killed under load: each request is answered, its stub ends with it, and its model is served again."""

    def stub_of(worker: int) -> list:
        return [pid for pid in all_processes() if parent_of(pid) == worker and b"/echo/" in command(pid)]

    stub, victim = next((stub, worker) for worker in served.workers() for stub in stub_of(worker))
    model, request = REQUESTS[0]
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(answer_of, served.http, model, request) for _ in range(200)]
        eventually("requests are answered", lambda: sum(future.done() for future in asked) > 20)
        os.kill(victim, signal.SIGKILL)
    assert {future.result()[0] for future in asked} <= {200, 500, 503}
    eventually("the model is served again", lambda: answer_of(served.http, model, request)[0] == 200)
    eventually("the stub of the killed worker has ended", lambda: not alive(stub))


def all_processes() -> list:
    """Returns the ids of all processes."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def command(pid: int) -> bytes:
    """Returns the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    """Returns the parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
