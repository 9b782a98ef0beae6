"""Compiled backends with Triton's interface: the functions that they call, answers during and after the execution, completed
configurations, and the effects of faulty libraries."""

import os
import queue
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import triton_to_np_dtype

from backends import triton_backends
from backends.native_backends import parameter, write
from backends.triton_backends import MISSING, compile, config, model, states
from harness.server import alive, total
from harness.waiting import eventually, run_for

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

NAMES = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"]
"""The datatypes that a client of numpy sends."""
TEXT = """
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU profile: [ "small", "large" ] } ]
"""
"""The tensors and the instances of the model that calls each function."""
SUMS = """
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SEQUENCES = """
sequence_batching {
  oldest { max_candidate_sequences: 16 max_queue_delay_microseconds: 2000 }
  state [ {
    input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ]
    initial_state: { name: "zero" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }
  } ]
}
"""
"""A model whose state is the sum of a sequence's inputs."""
AT_LOAD = ["Initialize", "GetBackendAttribute", "ModelInitialize", "ModelInstanceInitialize"]
"""The entry points in which a load can fail."""
AT_END = ["ModelInstanceFinalize", "ModelFinalize", "Finalize"]
"""The entry points at the end of an instance."""


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """A backend directory with the libraries of all sources."""
    folder = tmp_path_factory.mktemp("backends")
    for source in ("identity.c", "detached.c", "trouble.c", "complete.c", "functions.c", "states.c", "calls.c"):
        compile(source, folder)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory, backends):
    """A server of models that can be loaded."""
    folder = tmp_path_factory.mktemp("served")
    models = folder / "models"
    model(models, "echo", "identity", "dynamic_batching { max_queue_delay_microseconds: 100000 preferred_batch_size: [ 4 ] }")
    model(models, "later", "detached")
    model(models, "many", "detached", "model_transaction_policy { decoupled: true }")
    model(models, "functions", "functions", io=TEXT)
    model(models, "sums", "states", SEQUENCES, io=SUMS)
    for name in NAMES:
        kind = "STRING" if name == "BYTES" else name
        io = "".join(f'{side} [ {{ name: "{side.upper()}0" data_type: TYPE_{kind} dims: [ -1, 2 ] }} ]\n' for side in ("input", "output"))
        model(models, f"of_{name}", "identity", io=io)
    with triton_backends.server(folder, backends) as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    """A client of the server."""
    with tritonclient.http.InferenceServerClient(served.http, concurrency=8) as made:
        yield made


def tensor(name: str, datatype: str, values: np.ndarray, kind=tritonclient.http):
    """Returns an input with these values."""
    made = kind.InferInput(name, values.shape, datatype)
    made.set_data_from_numpy(values)
    return made


def numbers(rows):
    """Returns the input of INT32 values for a client of gRPC."""
    return tensor("INPUT0", "INT32", np.array(rows, np.int32), tritonclient.grpc)


def test_every_function(served):
    """A library calls each function with good and bad arguments; it reports what differs from the expected results."""
    request = {
        "id": "the id",
        "parameters": {"number": 12, "half": 0.5, "yes": True, "timeout": 5000000},
        "inputs": [{"name": "INPUT0", "shape": [1, 3], "datatype": "INT32", "data": [1, 2, 3]}],
    }
    for _ in range(2):
        status, answer = served.infer("functions", request)
        assert status == 200, f"{answer}\n{served.log_tail()}"
        assert answer["outputs"][0]["data"] == ["ok"], answer["outputs"][0]["data"][0]
    log = served.log.read_text()
    assert "functions.c:" in log and "] two" in log and "INFO lines" in log
    # A function that is not supported is in the log once, with its name.
    assert log.count("TRITONSERVER_ServerMetadata is not supported by this server") == 1

    def check():
        metrics = served.scrape()
        found = [total(metrics, name, color="red") for name in ("functions_counted", "functions_level", "functions_spread_count")]
        return found == [5, 4, 2]

    eventually("the metrics of the library have arrived", check)


@pytest.mark.parametrize("name", NAMES)
def test_datatypes(client, name):
    """Each datatype is passed through, with several rows and without elements."""
    for shape in ((1, 3, 2), (8, 1, 2), (2, 0, 2)):
        given = np.random.default_rng(0).integers(0, 2, shape).astype(triton_to_np_dtype(name))
        if name == "BYTES":
            given = np.array([str(value) * 3 for value in given.ravel()], object).reshape(shape)
        returned = client.infer(f"of_{name}", [tensor("INPUT0", name, given)]).as_numpy("OUTPUT0")
        expected = np.char.encode(given.astype(str)) if name == "BYTES" and given.size else given
        assert returned.shape == shape and np.array_equal(returned.astype(expected.dtype), expected)


def request(rows, texts=None, outputs=(), **parameters) -> dict:
    """Returns a request in JSON: rows of INT32 values, and texts."""
    inputs = [{"name": "INPUT0", "shape": [len(rows), len(rows[0])], "datatype": "INT32", "data": rows}]
    if texts is not None:
        inputs.append({"name": "INPUT1", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts})
    return {"inputs": inputs, "outputs": [{"name": name} for name in outputs], "parameters": parameters}


def test_batches(served):
    """Each request of a batch gets its own rows, and the outputs that it asks for; statistics are those that the library reports."""
    before = served.statistics("echo")

    def ask(number: int):
        wanted = f"OUTPUT{number % 2}"
        status, answer = served.infer("echo", request([[number, 1], [number, 2]], [f"text {number}"] * 2, [wanted]) | {"id": str(number)})
        assert status == 200 and answer["id"] == str(number), answer
        values = [f"text {number}"] * 2 if number % 2 else [number, 1, number, 2]
        assert [(output["name"], output["data"]) for output in answer["outputs"]] == [(wanted, values)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(32)))
    after = served.statistics("echo")
    assert after["inference_count"] - before["inference_count"] == 64
    assert after["execution_count"] - before["execution_count"] < 32
    # The library reports that its computation begins with its execution and ends with it.
    times = {name: after["inference_stats"][f"compute_{name}"]["ns"] for name in ("input", "infer", "output")}
    assert times["infer"] > 0, times


def test_failed_requests_of_a_batch(served):
    """A request that the library fails, or releases without a response, fails alone; the error has the library's code and text."""
    parameters = [{}, {"fail": "number one"}, {"lose": "yes"}, {}]
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(served.infer, "echo", request([[at]], **given)) for at, given in enumerate(parameters)]
    answers = [future.result() for future in asked]
    assert [status for status, _ in answers] == [200, 400, 500, 200]
    assert [answers[at][1]["outputs"][0]["data"] for at in (0, 3)] == [[0], [3]]
    assert [answers[at][1]["error"] for at in (1, 2)] == ["number one", "the model released the request without answering it"]
    assert served.statistics("echo")["inference_stats"]["fail"]["count"] >= 2


def test_answers_after_the_execution(served):
    """Requests that a thread answers later: with parameters, an error, and without an answer."""
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda number: served.infer("later", request([[number, 5]])), range(40))
        for number, (status, answer) in enumerate(answers):
            assert status == 200 and answer["outputs"][0]["data"] == [number, 5], answer
            assert answer["parameters"]["number"] == 0
    assert served.infer("later", request([[1]], fail="later")) == (503, {"error": "later"})
    assert served.infer("later", request([[1]], lose="yes")) == (500, {"error": "the model released the request without answering it"})


def test_requests_that_are_never_answered(tmp_path, backends):
    """`--worker-execution-timeout-secs` also limits requests that are answered after their batch; other requests are answered until then,
    and the model is served again."""
    model(tmp_path / "models", "later", "detached")
    with triton_backends.server(tmp_path, backends, "--worker-execution-timeout-secs=1") as running, ThreadPoolExecutor(4) as threads:
        never = threads.submit(running.infer, "later", request([[1]], never="yes"))
        assert running.infer("later", request([[2]]))[0] == 200
        status, answer = never.result()
        assert status >= 500 and "twice" in answer["error"], answer
        eventually("the model is served again", lambda: running.infer("later", request([[3]]))[0] == 200)


def test_batching_hooks(tmp_path, backends):
    """A model with a library that decides about batches does not load; a file of the usual name is in the log."""
    model(tmp_path / "models", "hooked", "identity", parameter("TRITON_BATCH_STRATEGY_PATH", "/x.so"))
    (model(tmp_path / "models", "beside", "identity") / "batchstrategy.so").write_bytes(b"")
    with triton_backends.server(tmp_path, backends) as running:
        state, reason = states(running)["hooked"]
        assert state == "UNAVAILABLE" and "the parameter TRITON_BATCH_STRATEGY_PATH names '/x.so'" in reason
        assert "batchstrategy.so' has no effect" in running.log.read_text()


def test_ragged_inputs(tmp_path, backends):
    """Requests of one batch whose inputs have different lengths."""
    io = triton_backends.IO.replace("dims: [ -1 ] }, { name: \"INPUT1\"", "dims: [ -1 ] allow_ragged_batch: true }, { name: \"INPUT1\"", 1)
    assert "allow_ragged_batch" in io
    model(tmp_path / "models", "ragged", "identity", "dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [ 4 ] }", io=io)
    with triton_backends.server(tmp_path, backends) as running, ThreadPoolExecutor(4) as threads:
        given = [list(range(number + 1)) for number in range(4)]
        answers = threads.map(lambda values: running.infer("ragged", request([values])), given)
        for values, (status, answer) in zip(given, answers):
            assert status == 200 and answer["outputs"][0]["data"] == values and answer["outputs"][0]["shape"] == [1, len(values)], answer
        assert running.statistics("ragged")["execution_count"] < 4


def test_calls_of_other_models(tmp_path, backends):
    """A library calls other models, in all ways and with good and bad arguments; it reports what differs from the expected results."""
    models = tmp_path / "models"
    model(models, "echo", "identity")
    model(models, "spare", "identity")
    model(models, "many", "detached", "model_transaction_policy { decoupled: true }")
    model(models, "calls", "calls", io=TEXT)
    options = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in ("echo", "many", "calls"))]
    options += [f"--trace-config=triton,file={tmp_path / 'trace.json'}", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1"]
    with triton_backends.server(tmp_path, backends, *options) as running:
        for _ in range(3):
            status, answer = running.infer("calls", request([[1]]))
            assert status == 200, f"{answer}\n{running.log_tail()}"
            assert answer["outputs"][0]["data"] == ["ok"], answer["outputs"][0]["data"][0]

        def parents():
            # The file is a whole list only between two writes.
            entries = (tmp_path / "trace.json").read_text()
            return len(re.findall(r'"model_name":"echo"[^}]*"parent_id"', entries))

        # Each round has one call with a trace.
        eventually("the calls with a trace are in the file", lambda: parents() == 3)
        entries = (tmp_path / "trace.json").read_text()
        named = dict(re.findall(r'"id":(\d+),"model_name":"([^"]*)"', entries))
        reported = re.findall(r'"id":(\d+),"timestamps":\[{"name":"(DECODE_START|before the request)"', entries)
        assert [(named[trace], name) for trace, name in reported] == [("calls", "DECODE_START"), ("calls", "before the request")] * 3


def test_a_sandbox(tmp_path, backends):
    """Libraries are loaded, complete configurations and answer in a sandbox."""
    write(tmp_path / "models", "made", 'backend: "complete"')
    model(tmp_path / "models", "later", "detached")
    with triton_backends.server(tmp_path, backends, "--worker-sandbox=on", "--backend-config=complete,default-max-batch-size=4") as running:
        found = states(running)
        if any("sandbox" in reason for _, reason in found.values()):
            pytest.skip(f"no sandbox: {found}")
        assert running.infer("made", request([[0, 1, 2, 3]]))[1]["outputs"][0]["data"] == [0, 1, 2, 3]
        assert running.infer("later", request([[7]]))[1]["outputs"][0]["data"] == [7]


def step(running, sequence: int, value: int, start=False, end=False, **parameters):
    """Sends a step of a sequence; returns its sum, or the error."""
    given = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end, **parameters}
    status, answer = running.infer("sums", request([[value]], **given))
    return answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


def test_states(served):
    """The server keeps the states of sequences, answered at once or later, in batches; a step that fails or does not update keeps the
    old value."""

    def sequence(number: int):
        later = {"later": "yes"} if number % 2 else {}
        assert step(served, number, number, start=True, **later) == number
        assert step(served, number, 10, **later) == number + 10
        assert step(served, number, 100, keep="yes", **later) == number + 110
        assert step(served, number, 1000, fail="yes", **later) == "failed"
        assert step(served, number, 10000, end=True, **later) == number + 10010

    with ThreadPoolExecutor(12) as threads:
        for done in [threads.submit(sequence, number) for number in range(1, 25)]:
            done.result()
    statistics = served.statistics("sums")
    assert statistics["execution_count"] < 24 * 5, statistics


def test_decoupled(served):
    """A decoupled model: no response, one and a hundred, an error, and a request whose client leaves."""
    results = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))

        def responses(count: int, **parameters):
            client.async_stream_infer("many", [numbers([[count]])], enable_empty_final_response=True, parameters=parameters)
            found = []
            while True:
                result, error = results.get(timeout=20)
                if error is not None:
                    return error
                answer = result.get_response()
                if answer.parameters["triton_final_response"].bool_param:
                    return found
                found.append(answer.parameters["number"].int64_param)

        assert responses(0) == []
        assert responses(1) == [0]
        assert responses(100) == list(range(100))
        assert responses(1, fail="not now").message() == "not now"
        assert "released the request without answering it" in responses(1, lose="yes").message()
        client.async_stream_infer("many", [numbers([[1]])], parameters={"wait": "yes"})
        run_for("the library has the request", 0.2)
        client.stop_stream(cancel_requests=True)
    eventually("the library sees the cancellation", lambda: "the request was cancelled" in served.log.read_text())


def test_completed_configurations(tmp_path, backends):
    """The library completes a configuration, with the settings of the command line, or refuses it; without auto-complete it is not asked."""
    models = tmp_path / "models"
    write(models, "made", 'backend: "complete"')
    write(models, "bare", 'backend: "complete" max_batch_size: 3')
    write(models, "not_made", 'backend: "complete"\n' + parameter("refuse", "yes"))
    with triton_backends.server(tmp_path, backends, "--backend-config=complete,default-max-batch-size=16") as running:
        for name in ("made", "bare"):
            completed = config(running, name)
            assert completed["max_batch_size"] == 16, completed
            assert [(one["name"], one["data_type"], one["dims"]) for one in completed["input"]] == [("INPUT0", "TYPE_INT32", [4])]
        assert running.infer("made", request([[0, 1, 2, 3], [4, 5, 6, 7]]))[1]["outputs"][0]["data"] == list(range(8))
        state, reason = states(running)["not_made"]
        assert state == "UNAVAILABLE" and "this model is refused" in reason
    with triton_backends.server(tmp_path, backends, "--disable-auto-complete-config") as running:
        assert config(running, "made")["input"] == []


@pytest.mark.parametrize("where", AT_LOAD)
def test_trouble_at_a_load(tmp_path, backends, where):
    """An error, an error without a message, a crash and an endless entry point fail the load with a reason; others are served."""
    models = tmp_path / "models"
    model(models, "sound", "trouble")
    options = ["--worker-start-timeout-secs=3"]
    hows = ["error", "null", "crash", "exit", "hang"]
    for how in hows:
        if where in ("Initialize", "GetBackendAttribute"):
            # These have no model: the settings of the backend say what happens, for all its models.
            continue
        model(models, how, "trouble", parameter("where", where) + parameter("how", how))
    if where in ("Initialize", "GetBackendAttribute"):
        for how in hows:
            library = compile("trouble.c", tmp_path / "own", f"trouble_{how}")
            model(models, how, library.parent.name)
            options.append(f"--backend-config={library.parent.name},trouble={where} {how}")
        (tmp_path / "own/trouble").symlink_to(backends / "trouble")
        backends = tmp_path / "own"
    with triton_backends.server(tmp_path, backends, *options) as running:
        index = states(running)
        assert index["sound"][0] == "READY"
        assert f"trouble in {where}" in index["error"][1]
        assert f"TRITONBACKEND_{where} of the backend" in index["null"][1] and "failed without a message" in index["null"][1]
        assert "signal 11" in index["crash"][1]
        assert "status 3" in index["exit"][1] or "exit" in index["exit"][1]
        assert "within 3 s" in index["hang"][1] or "did not" in index["hang"][1]
        assert running.infer("sound", request([[4]]))[0] == 200


def test_trouble_in_an_execution(tmp_path, backends):
    """An error fails the batch; a crash or an endless execution ends the instance, which is started again, and nothing else."""
    models = tmp_path / "models"
    for how in ("error", "null", "crash", "exit", "hang"):
        model(models, how, "trouble", parameter("where", "ModelInstanceExecute") + parameter("how", how))
    with triton_backends.server(tmp_path, backends, "--worker-execution-timeout-secs=1") as running:
        def ask(name: str, **parameters):
            return running.infer(name, request([[4]], **parameters))

        for how, text in (("error", "trouble in ModelInstanceExecute"), ("null", ""), ("crash", "died twice"), ("exit", "died twice"), ("hang", "")):
            status, answer = ask(how, now="yes")
            assert status >= 500 and text in answer["error"], (how, answer)
            others = [name for name in ("error", "null") if name != how]
            assert all(ask(name)[0] == 200 for name in others)

            eventually(f"'{how}' is served again", lambda how=how: ask(how)[0] == 200)


def test_trouble_at_the_end(tmp_path, backends):
    """An entry point at the end that fails, crashes or never returns does not hold up an unload, and is in the log."""
    models = tmp_path / "models"
    for where in AT_END:
        for how in ("error", "crash"):
            model(models, f"{where}_{how}", "trouble", parameter("where", where) + parameter("how", how))
    with triton_backends.server(tmp_path, backends, "--model-control-mode=explicit", "--load-model=*") as running:
        for name in list(states(running)):
            assert running.ask("POST", f"/v2/repository/models/{name}/unload")[0] == 200
        eventually("all instances have ended", lambda: not running.workers())
        for where in AT_END:
            assert f"TRITONBACKEND_{where}: trouble in {where}" in running.log.read_text()


def test_libraries_that_are_not_backends(tmp_path):
    """A library that needs an unknown function, has no entry point, or is no library fails the load with the reason."""
    backends = tmp_path / "backends"
    sources = {
        "unknown": "void *TRITONSERVER_NewerThing(void); void *TRITONBACKEND_ModelInstanceExecute(void) { return TRITONSERVER_NewerThing(); }",
        "without": "int anything(void) { return 1; }",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.c").write_text(source)
        (backends / name).mkdir(parents=True)
        command = ["cc", "-shared", "-fPIC", "-o", backends / name / f"libtriton_{name}.so", tmp_path / f"{name}.c"]
        subprocess.run(command, check=True)
    for name, content in (("empty", b""), ("script", b"#!/bin/sh\n"), ("cut", None)):
        (backends / name).mkdir()
        whole = (backends / "without/libtriton_without.so").read_bytes()
        (backends / name / f"libtriton_{name}.so").write_bytes(whole[: len(whole) // 2] if content is None else content)
    for name in ("unknown", "without", "empty", "script", "cut"):
        model(tmp_path / "models", name, name)
    with triton_backends.server(tmp_path, backends) as running:
        index = states(running)
        assert "calls functions that this server does not have: TRITONSERVER_NewerThing" in index["unknown"][1]
        assert "has no function TRITONBACKEND_ModelInstanceExecute" in index["without"][1]
        for name in ("empty", "script", "cut"):
            assert "is not a valid shared library" in index[name][1], index[name]


def test_places_of_libraries(tmp_path, backends):
    """A library is found in the version's directory, the model's, and the backend's, in this order; `runtime` names another one."""
    models = tmp_path / "models"
    places = {"version": "of_version/1", "above": "above"}
    for name in ("of_version", "above", "named"):
        model(models, name, "lonely" if name != "named" else "identity", 'runtime: "libtriton_other.so"' if name == "named" else "")
    for place in places.values():
        compile("identity.c", tmp_path, "lonely").rename(models / place / "libtriton_lonely.so")
    compile("identity.c", tmp_path, "other").rename(models / "named/1/libtriton_other.so")
    model(models, "nowhere", "identity", 'runtime: "libtriton_missing.so"')
    # No name leads out of these directories.
    model(models, "outside", "identity", 'runtime: "libtriton_/../../named/1/libtriton_other.so"')
    model(models, "absolute", str(models / "named/1"), 'runtime: "libtriton_other.so"')
    with triton_backends.server(tmp_path, backends) as running:
        index = states(running)
        assert [index[name][0] for name in ("of_version", "above", "named")] == ["READY"] * 3, index
        assert "runtime 'libtriton_missing.so' of model 'nowhere' does not exist in" in index["nowhere"][1]
        assert "named/1/libtriton_other.so' of model 'outside' does not exist in" in index["outside"][1]
        assert "of model 'absolute' is not a valid backend name" in index["absolute"][1]


def test_a_killed_worker_under_load(tmp_path, backends):
    """A worker that is killed while its library answers many requests: each request is answered, and the model is served again."""
    model(tmp_path / "models", "later", "detached", "instance_group [ { count: 2 kind: KIND_CPU } ]")
    with triton_backends.server(tmp_path, backends) as running:
        states(running)
        with ThreadPoolExecutor(16) as threads:
            asked = [threads.submit(running.infer, "later", request([[number]])) for number in range(600)]
            eventually("requests are answered", lambda: sum(future.done() for future in asked) > 50)
            victim = min(running.workers())
            os.kill(victim, signal.SIGKILL)
        statuses = [future.result()[0] for future in asked]
        assert set(statuses) <= {200, 500, 503} and statuses.count(200) > 300, statuses
        eventually("the worker is gone", lambda: not alive(victim))
        assert running.infer("later", request([[3]]))[1]["outputs"][0]["data"] == [3]


def test_a_model_of_a_platform(tmp_path):
    """`platform` of a backend that an operator has added selects its library, as in Triton."""
    backends = tmp_path / "backends"
    compile("identity.c", backends, "tensorrt")
    io = triton_backends.IO
    write(tmp_path / "models", "plan", f'platform: "tensorrt_plan" max_batch_size: 8\n{io}')
    write(tmp_path / "models", "by_file", f"max_batch_size: 8\n{io}")
    (tmp_path / "models/by_file/1/model.plan").write_bytes(b"plan")
    with triton_backends.server(tmp_path, backends) as running:
        index = states(running)
        assert [index[name][0] for name in ("plan", "by_file")] == ["READY", "READY"], index
        assert config(running, "by_file")["backend"] == "tensorrt"
