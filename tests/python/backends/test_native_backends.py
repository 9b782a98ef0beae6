"""Backends in shared libraries: the example in C, the functions of the interface, and the effects of faulty libraries."""

import os
import queue
import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.utils import InferenceServerException

from backends import native_backends
from backends.native_backends import EXAMPLE, HEADERS, MISSING, TESTING, compile, config_of, parameter, place, write
from harness.server import ROOT, binary, total
from harness.statistics import dispatched, until_dispatched
from harness.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

METRICS = """
ts_metrics:
  counter:
    - {name: pharos_batches_total, unit: Count, dimensions: [model, version, reason]}
    - {name: pharos_instance_restarts_total, unit: Count, dimensions: [model, version]}
model_metrics:
  counter:
    - {name: RowsNormalized, unit: Count, dimensions: []}
    - {name: Baked, unit: Count, dimensions: [kind]}
  gauge:
    - {name: OvenHeat, unit: Celsius, dimensions: []}
  histogram:
    - {name: Weight, unit: Grams, dimensions: [], buckets: [1, 10]}
"""
MODELS = {
    "plain": config_of(),
    "other": config_of(),
    "strict": config_of(parameter("strict_output_types", "true")),
    "whole": config_of(batch=0),
    "many": config_of("model_transaction_policy { decoupled: true }"),
    "steps": config_of("sequence_batching { max_sequence_idle_microseconds: 2000000 }"),
    "again": config_of("sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 10000000 }"),
    "fails": config_of(parameter("create", "fail")),
    "silent": config_of(parameter("create", "silent")),
    "crashes": config_of(parameter("create", "crash")),
}
UNLOADABLE = {"fails", "silent", "crashes"}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The backend of `testing.c`, compiled once."""
    return compile(TESTING, tmp_path_factory.mktemp("library") / "libpharos_testing.so")


@pytest.fixture(scope="module")
def served(tmp_path_factory, library):
    """A server with the models above and the example."""
    folder = tmp_path_factory.mktemp("native")
    for name, config in MODELS.items():
        write(folder / "models", name, config)
    shutil.copytree(EXAMPLE / "models/normalize", folder / "models/normalize")
    compile(EXAMPLE / "normalize.c", place(folder / "backends", "normalize"))
    place(folder / "backends", "testing").parent.mkdir()
    shutil.copy(library, place(folder / "backends", "testing"))
    (folder / "metrics.yaml").write_text(METRICS)
    options = ["--worker-execution-timeout-secs=1", f"--metrics-config={folder / 'metrics.yaml'}"]
    running = native_backends.server(folder, folder / "models", folder / "backends", *options)
    running.launch()
    running.wait_until_ready("/v2/health/live")
    eventually("all loads have succeeded or failed", lambda: settled(running))
    yield running
    if running.process.poll() is None:
        running.stop()


def settled(running) -> bool:
    """Returns whether all loads have ended."""
    states = {name: entries[0].get("state") for name, entries in running.index().items()}
    return all(state == ("UNAVAILABLE" if name in UNLOADABLE else "READY") for name, state in states.items())


def request(client, values, name="IN"):
    """Returns the input of a request for the client library `client`."""
    values = np.asarray(values, dtype=np.float32)
    tensor = client.InferInput(name, values.shape, "FP32")
    tensor.set_data_from_numpy(values)
    return [tensor]


def ask(server, model: str, values, outputs=(), **options):
    """Sends a request over HTTP; options except `id` are parameters of the request."""
    number = options.pop("id", "")
    with tritonclient.http.InferenceServerClient(server.http, network_timeout=DEADLINE_S) as client:
        wanted = [tritonclient.http.InferRequestedOutput(name) for name in outputs] or None
        inputs = request(tritonclient.http, values)
        return client.infer(model, inputs, outputs=wanted, request_id=number, parameters=options or None)


def refused(server, model: str, values=((1, 2),), **options) -> str:
    """Returns the error text of a request that must fail."""
    with pytest.raises(InferenceServerException) as error:
        ask(server, model, values, **options)
    return error.value.message()


def answers(server, model="plain") -> bool:
    """Returns whether a model answers correctly."""
    try:
        return ask(server, model, [[3, 4]], outputs=["OUT"]).as_numpy("OUT").tolist() == [[3, 4]]
    except InferenceServerException:
        return False


def crashes(server, model: str) -> float:
    """Returns how often instances of a model were restarted."""
    return total(server.scrape(), "pharos_instance_restarts_total", model=model)


@pytest.mark.parametrize("protocol", [tritonclient.http, tritonclient.grpc])
def test_the_example_in_c_normalizes(served, protocol):
    """Rows are normalized as numpy does; a constant row fails its request."""
    values = np.random.default_rng(1).normal(5, 3, (4, 100)).astype(np.float32)
    address = served.http if protocol is tritonclient.http else served.grpc
    with protocol.InferenceServerClient(address) as client:
        result = client.infer("normalize", request(protocol, values, "INPUT")).as_numpy("OUTPUT")
        expected = (values - values.mean(1, keepdims=True)) / values.std(1, keepdims=True)
        np.testing.assert_allclose(result, expected, atol=1e-5)
        values[2] = 7
        with pytest.raises(InferenceServerException) as error:
            client.infer("normalize", request(protocol, values, "INPUT"))
    assert "row 2 has a standard deviation of 0; the minimum is 0.001" in error.value.message()


@pytest.mark.smoke
def test_requests_of_a_batch_fail_alone(served):
    """Of many concurrent requests every third cannot be normalized; the counter has the rows of the others."""
    before = total(served.scrape(), "RowsNormalized", ModelName="normalize") or total(served.scrape(), "RowsNormalized")

    def one(number):
        values = np.full((1, 8), 1.0) if number % 3 == 0 else np.arange(8.0)[None] * number
        with tritonclient.http.InferenceServerClient(served.http) as client:
            try:
                return client.infer("normalize", request(tritonclient.http, values, "INPUT")).as_numpy("OUTPUT").std()
            except InferenceServerException as error:
                return error.message()

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(one, range(48)))
    bad = results[::3]
    assert all(isinstance(text, str) and "row 0 has a standard deviation" in text for text in bad), bad
    assert all(abs(value - 1) < 1e-5 for number, value in enumerate(results) if number % 3)
    assert total(served.scrape(), "RowsNormalized") - before == 32


def test_configuration_of_the_example_is_checked(tmp_path):
    """For a wrong parameter and for wrong tensors the index has the library's error text."""
    good = (EXAMPLE / "models/normalize/config.pbtxt").read_text()
    write(tmp_path / "models", "wrong_number", good.replace('"0.001"', '"little"'))
    texts = good.replace('"OUTPUT" data_type: TYPE_FP32', '"OUTPUT" data_type: TYPE_INT8')
    write(tmp_path / "models", "wrong_tensors", texts)
    compile(EXAMPLE / "normalize.c", place(tmp_path / "backends", "normalize"))
    with native_backends.server(tmp_path, tmp_path / "models", tmp_path / "backends") as running:
        reasons = eventually("the index has both reasons", lambda: reasons_of(running, 2))
    assert "parameter 'least_deviation' is 'little'; expected a number greater than 0" in reasons["wrong_number"]
    assert "normalize needs one input and one output, both of TYPE_FP32" in reasons["wrong_tensors"]


def reasons_of(running, count: int) -> dict:
    """Returns the reasons of the unavailable models, once there are `count` of them."""
    index = {name: entries[0] for name, entries in running.index().items()}
    told = {name: entry.get("reason", "") for name, entry in index.items() if entry.get("state") == "UNAVAILABLE"}
    return told if len(told) == count else {}


def test_the_library_gets_the_context_of_a_load(served):
    """The library logs the context of a load; it refuses the load if sizes of structures differ between both sides."""
    pattern = r"model plain version 1 instance (\S+) directory (\S+) threads (\d+) name in config 1"
    line = re.search(pattern, log(served))
    assert line and line[1].startswith("plain_0") and line[2].endswith("/models/plain/1") and int(line[3]) >= 1


def log(server) -> str:
    """Returns the whole log of the server."""
    return server.log.read_text(errors="replace")


def test_log_lines_have_levels(served):
    """Information, a warning of two lines and an error are logged; verbose lines only if the server's log is verbose."""
    ask(served, "plain", [[1]], do="log")
    eventually("the lines are logged", lambda: "a level: error" in log(served))
    lines = re.findall(r" (\w+) (a level: .*) instance=plain_0", log(served))
    texts = ["information", "warning", "second line", "error"]
    levels = ["INFO", "WARN", "WARN", "ERROR"]
    assert lines == [(level, f"a level: {text}") for level, text in zip(levels, texts)]


def test_the_library_reads_ids_and_parameters(served):
    """The library reads IDs, row counts and parameters of every kind, and sets parameters of responses."""
    options = {"do": "describe", "flag": True, "count": -3, "share": 0.25, "name": "Zoë"}
    result = ask(served, "plain", [[1, 2], [3, 4]], outputs=["TEXT"], id="number 5", **options)
    texts = [text.decode() for text in result.as_numpy("TEXT").flatten()]
    assert len(texts) == 2 and texts[0] == texts[1]
    assert texts[0].startswith("number 5|8|2|000|")
    assert set(texts[0].split("|")[4:]) == {
        "do=5:0:0:0:0:describe", "flag=1:1:0:0:0:", "count=2:0:-3:0:0:", "share=4:0:0:0:0.25:", "name=5:0:0:0:0:Zoë",
    }
    assert result.get_response()["parameters"] == {"b": True, "i": -5, "d": 0.5, "t": texts[0]}


def test_the_library_reads_the_steps_of_sequences(served):
    """The library reads start and end of a sequence, and is notified of the end of an idle sequence."""
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:

        def step(start, end):
            inputs = request(tritonclient.grpc, [[1]])
            options = {"sequence_id": 9, "sequence_start": start, "sequence_end": end, "parameters": {"do": "describe"}}
            return client.infer("steps", inputs, **options).as_numpy("TEXT")[0, 0].decode().split("|")[3]

        assert [step(True, False), step(False, False)] == ["110", "100"]
        eventually("the library is notified of the end of the sequence", lambda: "sequence ended: 1" in log(served))
        assert [step(True, False), step(False, True)] == ["110", "101"]


def test_shapes_without_batches(served):
    """Shapes of a model with max_batch_size 0 have no batch dimension."""
    assert ask(served, "whole", [1, 2, 3], outputs=["OUT"]).as_numpy("OUT").tolist() == [1, 2, 3]


def test_only_requested_outputs_are_computed(served):
    """The library calls is_wanted, and can discard an output and allocate it again."""
    result = ask(served, "plain", [[1]], outputs=["TEXT"], do="describe")
    assert [output["name"] for output in result.get_response()["outputs"]] == ["TEXT"]
    assert ask(served, "plain", [[5, 6]], outputs=["OUT"], do="again").as_numpy("OUT").tolist() == [[5, 6]]


REFUSED = {
    "unknown_datatype": "output 'OUT' has datatype 99; 1 to 14 are allowed",
    "index": "there is no output 7: the model has 2, counted from 0",
    "too_large": "bytes of output do not fit in the 8589934592 bytes of the output arena",
    "overflow": "which has no size",
    "negative": "output 'OUT' has shape [-1,2], which has no size",
    "rank": "the output's shape has 1000 values; at most 64 are allowed",
    "null_shape": "the output's shape is 0x0, which is not a valid pointer",
    "small_structure": "output has size 8; expected at least",
    "bytes": "output 'OUT' has 9 bytes, which does not match its shape [1,2]",
    "few_bytes": "output 'TEXT' has 3 bytes, which does not match its shape [1,2]",
    "null_output": "output is 0x0, which is not a valid pointer",
    "null_data": "the destination of the result is 0x0, which is not a valid pointer",
    "twice": "output 'OUT' is allocated already",
    "fail_far": "there is no request 1000 in a batch of 1, counted from 0",
    "fail_oddly": "77 is not an error code; allowed are 1 to 10",
    "reschedule": "while the model is not configured to handle such a flag",
    "respond": "its model_transaction_policy is not decoupled",
    "code": "the backend returned the code 2 and gave no reason",
    "fail_batch": "the batch \ufffd failed",
    "fail_and_go_on": "never",
    "wrong_text": "output 'TEXT' does not hold 1 BYTES elements",
}
"""Faults of the library, and the error texts that its client gets."""


@pytest.mark.parametrize("what", REFUSED)
def test_a_fault_of_the_library_fails_only_its_batch(served, what):
    """The client's error names the fault; the same process answers the next request."""
    workers, lost = served.workers(), crashes(served, "plain")
    assert REFUSED[what] in refused(served, "plain", do=what)
    assert answers(served) and served.workers() >= workers and crashes(served, "plain") == lost


UNLIKE = {
    "wrong_datatype": ("INT32", [1, 1], "output 'OUT' is INT32, but its configured datatype is FP32"),
    "wrong_rows": ("FP32", [2, 1], "output 'OUT' has shape [2, 1] for a batch of 1"),
}
"""Outputs that differ from the configuration: their datatypes and shapes, and the error with `strict_output_types`."""


@pytest.mark.parametrize("what", UNLIKE)
def test_outputs_unlike_their_configuration_are_passed_on(served, what):
    """The client gets the library's output, unless the model's configuration is strict."""
    datatype, shape, error = UNLIKE[what]
    output = ask(served, "plain", [[1, 2]], outputs=["OUT"], do=what).get_response()["outputs"][0]
    assert (output["datatype"], output["shape"]) == (datatype, shape)
    assert error in refused(served, "strict", do=what)


@pytest.mark.parametrize("code", [-1, 11, 12345, 2**31 - 1])
def test_invalid_codes(served, code):
    """An invalid code is an internal error."""
    assert refused(served, "plain", do="code", code=code) == f"the backend returned {code}, which is not a valid code"


def test_codes_become_statuses(served):
    """Each of the ten codes has a status in both protocols."""
    http = {1: 400, 2: 500, 3: 404, 4: 400, 5: 503, 6: 501, 7: 400, 8: 400, 9: 504, 10: 429}
    grpc = ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARGUMENT", "UNAVAILABLE", "UNIMPLEMENTED", "ALREADY_EXISTS"]
    grpc += ["CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"]
    tensors = [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1]}]
    for code, status in http.items():
        body = {"inputs": tensors, "parameters": {"do": "fail_batch", "code": code}}
        assert served.infer("plain", body)[0] == status
        with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
            with pytest.raises(InferenceServerException) as error:
                inputs = request(tritonclient.grpc, [[1]])
                client.infer("plain", inputs, parameters={"do": "fail_batch", "code": code})
        assert error.value.status() == f"StatusCode.{grpc[code - 1]}"


def test_large_positions_and_null_pointers(served):
    """Indexes near the limit of 64 bits and null pointers in every function do not crash the worker."""
    assert "there is no output 9223372036854775807" in refused(served, "plain", do="index", index=2**63 - 1)
    assert ask(served, "plain", [[1]], do="null") is not None
    assert answers(served)


def test_handles_of_a_finished_batch_are_refused(served):
    """A thread that uses handles of a batch after execute has returned gets an error."""
    assert ask(served, "plain", [[1]], outputs=["OUT"], do="later").as_numpy("OUT").tolist() == [[1]]
    text = "later: 4 0 no batch is being executed: pharos_backend_execute has returned"
    eventually("the late call is refused", lambda: text in log(served))
    assert answers(served)


def test_a_response_without_outputs(served):
    """If the library computes no output, the response has no outputs."""
    assert ask(served, "plain", [[1]], do="nothing").get_response()["outputs"] == []


def test_requests_fail_alone(served):
    """The library can fail single requests of a batch."""
    bodies = [[-1, 2]], [[3, 4]]
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(refused, served, "plain", bodies[0], do="negative_fails")
        good = pool.submit(ask, served, "plain", bodies[1], ["OUT"], do="negative_fails")
        assert bad.result() == "a negative value" and good.result().as_numpy("OUT").tolist() == [[3, 4]]


def test_is_cancelled_reports_a_cancelled_request(served):
    """is_cancelled becomes true while the batch is executed."""
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        done = queue.Queue()
        inputs = request(tritonclient.grpc, [[1]])
        before = dispatched(served, "plain")
        call = client.async_infer(
            "plain", inputs, lambda result, error: done.put(error), parameters={"do": "cancelled"}
        )
        until_dispatched(served, "plain", before + 1)
        call.cancel()
        assert "CANCELLED" in str(done.get(timeout=DEADLINE_S))
    eventually("is_cancelled is true", lambda: "seen: cancelled" in log(served))
    eventually("the model answers", lambda: answers(served))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["crash", "segfault", "exit", "hang"])
def test_an_instance_that_ends_or_hangs_is_restarted(served, how):
    """The request fails and the process is restarted; another model of the same library is unaffected."""
    lost = crashes(served, "plain")
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(refused, served, "plain", do=how)
        while not failed.done():
            assert answers(served, "other")
        assert failed.result()
    eventually("a new instance answers", lambda: answers(served))
    assert crashes(served, "plain") > lost and crashes(served, "other") == 0


def collect(server, model="many", **options) -> list:
    """Returns the responses of a decoupled model: (value, parameter, last) or the text of an error."""
    found = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        inputs = request(tritonclient.grpc, [[1]])
        client.async_stream_infer(model, inputs, enable_empty_final_response=True, parameters=options)
        responses = []
        while True:
            result, error = found.get(timeout=DEADLINE_S)
            if error:
                responses.append(error.message())
                if not options.get("error_at"):
                    return responses
                continue
            response = result.get_response()
            value = result.as_numpy("OUT")
            turn = response.parameters["turn"].int64_param if "turn" in response.parameters else None
            last = response.parameters["triton_final_response"].bool_param
            responses.append((None if value is None else value.item(), turn, last))
            if last:
                return responses


def test_any_number_of_responses(served):
    """A request can have some responses, with the final flag on the last or alone, none, more than its credit, and an error."""
    assert collect(served) == [(0, 0, False), (1, 1, False), (2, 2, True)]
    assert collect(served, count=2, last=0) == [(0, 0, False), (1, 1, False), (None, None, True)]
    assert collect(served, count=0) == [(None, None, True)]
    assert [turn for _, turn, _ in collect(served, count=200)] == list(range(200))
    with_error = collect(served, count=3, error_at=1)
    assert with_error[0] == (0, 0, False) and "not this one" in with_error[1] and with_error[2] == (2, 2, True)


def test_requests_that_a_library_answers_later(served):
    """Threads answer after the batch has ended, from kept inputs, each request with its own shape; the instance executes other
    batches meanwhile."""
    values = [np.arange(4.0 * (1 + number)).reshape(1 + number, 4) for number in range(3)]
    with ThreadPoolExecutor(8) as pool:
        later = [pool.submit(ask, served, "plain", rows, ["OUT"], do="detach") for rows in values * 4]
        others = [pool.submit(answers, served) for _ in range(20)]
        for rows, answer in zip(values * 4, later):
            assert answer.result().as_numpy("OUT").tolist() == rows.sum(1, keepdims=True).tolist()
            assert answer.result().get_response()["parameters"] == {"turn": 0}
        assert all(answer.result() for answer in others)
    assert ask(served, "whole", [1, 2, 3], ["OUT"], do="detach").as_numpy("OUT").tolist() == [6]
    assert refused(served, "plain", do="detach_and_fail") == "not today"
    assert "released the request without answering it" in refused(served, "plain", do="detach_and_forget")
    assert answers(served) and "sent twice" not in log(served)


def test_responses_that_come_later(served):
    """Threads of a decoupled model can send more responses than the credit of a request, and detect a cancelled request."""
    assert collect(served, do="detach", count=3) == [(1, 0, False), (2, 1, False), (3, 2, True)]
    assert [turn for _, turn, _ in collect(served, do="detach", count=150)] == list(range(150))
    assert "not today" in collect(served, do="detach_and_fail")[0]
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        found = queue.Queue()
        client.start_stream(lambda result, error: found.put(result))
        options = {"do": "detach", "count": 100_000_000}
        client.async_stream_infer("many", request(tritonclient.grpc, [[1]]), parameters=options)
        found.get(timeout=DEADLINE_S)
        client.stop_stream(cancel_requests=True)
    eventually("the thread detects the cancellation", lambda: "the thread sees: cancelled" in log(served))
    assert collect(served, count=1) == [(0, 0, True)]


def test_a_library_can_request_details(served):
    """The details are the correlation ID as number and text, the priority and the time limit."""
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        inputs, options = request(tritonclient.grpc, [[1]]), {"parameters": {"do": "details"}}
        details = lambda **more: client.infer("plain", inputs, **options, **more).get_response().parameters["details"]
        assert details().string_param == "0|(number)|0|0"
        assert details(sequence_id=77, timeout=5_000_000).string_param == "77|(number)|0|5000000"
        assert details(sequence_id="Zoë's").string_param == "0|Zoë's|0|0"


def test_memory_of_clients_is_used_in_place(served):
    """A library that tolerates concurrent writes gets the client's memory at the client's offset, for inputs and outputs."""
    name, values = f"/pharos-native-{os.getpid()}", np.array([[1, -2, 3]], dtype=np.float32)
    region = shared_memory.create_shared_memory_region("native", name, 4096)
    try:
        shared_memory.set_shared_memory_region(region, [values], offset=20)
        with tritonclient.http.InferenceServerClient(served.http) as client:
            client.register_system_shared_memory("native", name, 4096)
            tensor = tritonclient.http.InferInput("IN", values.shape, "FP32")
            tensor.set_shared_memory("native", values.nbytes, offset=20)
            wanted = tritonclient.http.InferRequestedOutput("OUT")
            wanted.set_shared_memory("native", values.nbytes, offset=2052)
            answer = client.infer("plain", [tensor], outputs=[wanted], parameters={"do": "alignment"}).get_response()
            client.unregister_system_shared_memory("native")
        assert answer["parameters"] == {"alignment": 20}
        written = shared_memory.get_contents_as_numpy(region, np.float32, values.shape, offset=2052)
        assert written.tolist() == values.tolist()
    finally:
        shared_memory.destroy_shared_memory_region(region)
    assert ask(served, "plain", values, do="alignment").get_response()["parameters"] == {"alignment": 0}


def test_metrics_of_a_library(served):
    """Counter, gauge and histogram are in the scrape when the answer has arrived."""
    before = total(served.scrape(), "Baked", kind="bread")
    ask(served, "other", [[1]], do="record", times=21)
    after = served.scrape()
    assert total(after, "Baked", kind="bread") - before == 42
    assert total(after, "OvenHeat") == 180.5 and total(after, "Weight_count") >= 1


def test_undefined_metrics_are_logged(tmp_path, library):
    """The log names the missing line of metrics.yaml, and the library works without the metric."""
    write(tmp_path / "models", "plain", config_of())
    place(tmp_path / "backends", "testing").parent.mkdir(parents=True)
    shutil.copy(library, place(tmp_path / "backends", "testing"))
    with native_backends.server(tmp_path, tmp_path / "models", tmp_path / "backends") as running:
        assert answers(running)
        assert "series is 0x0, which is not a valid pointer" in refused(running, "plain", do="record")
        eventually("the log names metric and file", lambda: "Baked" in log(running) and "metrics.yaml" in log(running))


def test_models_that_the_library_refuses(served):
    """The index has the reason, or the code if there is no reason; a crash during the load is reported as for any worker."""
    index = served.index()
    assert "there is no oil left" in index["fails"][0]["reason"]
    assert "the backend 'testing' returned the code 3 and gave no reason" in index["silent"][0]["reason"]
    assert index["crashes"][0]["state"] == "UNAVAILABLE" and index["crashes"][0]["reason"]


EMPTY = "int nothing;"
OLD = '#include "pharos_backend.h"\nuint32_t pharos_backend_abi_version(void) { return 4711; }\n'
HALF = OLD.replace("4711", "PHAROS_BACKEND_ABI_VERSION") + "void pharos_backend_destroy(void *i) { (void)i; }\n"
UNDEFINED = HALF + "void not_there(void);\nvoid use(void) { not_there(); }\n"
NO_BACKENDS = {
    "no_symbols": (EMPTY, "has no function pharos_backend_abi_version: it is not a backend for this server"),
    "old": (OLD, "was built for version 4711 of pharos_backend.h, this server has version 1: rebuild it"),
    "half": (HALF, "has no function pharos_backend_create, pharos_backend_execute"),
    "undefined": (UNDEFINED, "cannot be loaded: undefined symbol: not_there"),
    "foreign": (None, "was built for aarch64, this server runs on x86-64"),
    "cut": (None, "is truncated: it has 1000 bytes, expected at least "),
    "words": (None, "is not a shared library (not an ELF file)"),
}
"""Files that are not backends, and the ends of the error texts about them."""


def test_libraries_that_are_no_backends(tmp_path, library):
    """Each model is unavailable, and the error text names the file and the reason."""
    whole = library.read_bytes()
    machine = {b"\x3e\x00": b"\xb7\x00", b"\xb7\x00": b"\x3e\x00"}[whole[18:20]]
    contents = {"foreign": whole[:18] + machine + whole[20:], "cut": whole[:1000], "words": b"a library\n" * 10}
    for name, (source, _) in NO_BACKENDS.items():
        write(tmp_path / "models", name, config_of(backend=name))
        target = place(tmp_path / "backends", name)
        if source is None:
            target.parent.mkdir(parents=True)
            target.write_bytes(contents[name])
        else:
            (tmp_path / f"{name}.c").write_text(source)
            compile(tmp_path / f"{name}.c", target)
    with native_backends.server(tmp_path, tmp_path / "models", tmp_path / "backends") as running:
        reasons = eventually("the index has all reasons", lambda: reasons_of(running, len(NO_BACKENDS)))
    ends = {name: text for name, (_, text) in NO_BACKENDS.items()}
    if whole[18:20] != b"\x3e\x00":
        ends["foreign"] = "was built for x86-64, this server runs on aarch64"
    for name, text in ends.items():
        assert f"backend library '{place(tmp_path / 'backends', name)}' {text}" in reasons[name]


def test_the_header_is_c11_and_cxx(tmp_path):
    """The header compiles alone, without a warning, as C11 and as C++."""
    compilers = [("cc", "c", "c11"), ("c++", "c++", "c++11"), ("c++", "c++", "c++20")]
    for compiler, language, standard in compilers:
        if shutil.which(compiler):
            flags = [f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
            command = [compiler, "-x", language, *flags, str(HEADERS / "pharos_backend.h")]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_a_custom_worker(tmp_path):
    """The example in Rust is a program that uses the worker's library and adds a backend."""
    program = binary().with_name("pharos-worker-scale")
    if not program.exists():
        pytest.skip(f"{program} is not built: make example-backends")
    models = ROOT / "examples/backend_rust/models"
    (tmp_path / "backends/scale").mkdir(parents=True)
    os.symlink(program, tmp_path / "backends/scale/pharos-worker-scale")
    with native_backends.server(tmp_path, models, tmp_path / "backends") as running:
        with tritonclient.http.InferenceServerClient(running.http) as client:
            values = np.array([[1, -2, 3.5]], dtype=np.float32)
            result = client.infer("scale", request(tritonclient.http, values, "INPUT"))
        assert result.as_numpy("OUTPUT").tolist() == [[2.5, -5, 8.75]]
        for pid in running.workers():
            os.kill(pid, signal.SIGKILL)
        eventually("a new worker of the same program answers", lambda: running.get("/v2/models/scale/ready")[0] == 200)
