"""Unmodified TorchServe handlers: archives, arguments and return values of handlers, errors, streaming, metrics. Requests use the
KServe protocol with the request parameter `torchserve`, by which TorchServe's endpoints pass on headers and parts.

Requires a Python with the package `pharos-worker`: `PHAROS_PYTHON`, or that of the tests."""

import json
import math
import os
import queue
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from harness.server import Server
from harness.waiting import DEADLINE_S, eventually
from torchserve import models

PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
ARCHIVER = Path(PYTHON).parent / "torch-model-archiver"
has_worker = subprocess.run([PYTHON, "-c", "import pharos_worker"], capture_output=True).returncode == 0
has_torch = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")

METRICS = """
dimensions:
  - &ModelName "ModelName"
  - &Level "Level"
  - &Hostname "Hostname"
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [*Level, *Hostname]}
model_metrics:
  counter:
    - {name: Loads, unit: Count, dimensions: [*ModelName, *Level]}
    - {name: Calls, unit: Count, dimensions: [*ModelName, *Level]}
    - {name: Errors, unit: unit, dimensions: [*Level]}
  gauge:
    - {name: HandlerTime, unit: ms, dimensions: [*ModelName, *Level]}
    - {name: PredictionTime, unit: ms, dimensions: [*ModelName, *Level]}
    - {name: Took, unit: ms, dimensions: [Step, *ModelName, *Level]}
    - {name: Picture, unit: kB, dimensions: [*ModelName, *Level]}
    - {name: Share, unit: percent, dimensions: [*ModelName, *Level]}
    - {name: Declared, unit: m, dimensions: [Where]}
    - {name: Own, unit: tokens/s, dimensions: [*ModelName, *Level]}
    - {name: Stored, unit: ms, dimensions: [*ModelName, *Level]}
  histogram:
    - {name: Spread, unit: s, dimensions: [*ModelName, *Level]}
"""
BATCHED = "batchSize: 4\nmaxBatchDelay: 1500\n"


@pytest.fixture(scope="module", autouse=True)
def unpacked(tmp_path_factory):
    """The folder into which archives are unpacked."""
    folder = tmp_path_factory.mktemp("unpacked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with all models of this file."""
    folder = tmp_path_factory.mktemp("torchserve")
    repository = folder / "models"
    models.model(repository, "told", "told", "own: {a: [1, 2]}\n")
    models.model(repository, "alone", "told", config="")
    models.model(repository, "packed", "told", kind="tar.gz")
    models.model(repository, "spread", "told", BATCHED, kind="directory")
    models.model(repository, "two", "told", "minWorkers: 2\nbatchSize: many\n")
    models.model(repository, "function", "function")
    models.model(repository, "other", "function:other")
    models.model(repository, "raw", "told", config='backend: "torchserve"\n' + parameter("decode_input_request", "false"))
    models.model(repository, "measured", "measured", BATCHED)
    models.model(repository, "streamed", "streamed")
    models.model(repository, "unstreamed", "streamed", "streaming: false\n")
    models.model(repository, "continued", "continued", "batchSize: 4\ncontinuousBatching: true\n")
    models.model(repository, "looped", "continued", "batchSize: 4\nstreaming: true\n")
    models.model(repository, "talks", "talks", "batchSize: 2\ncontinuousBatching: true\nsequenceBatching: true\nmaxNumSequence: 3\n")
    models.model(repository, "later", "later")
    models.model(repository, "later_streamed", "later", "streaming: true\n")
    tensors = 'input { name: "data" data_type: TYPE_STRING dims: [-1] } output { name: "prediction" data_type: TYPE_STRING dims: [-1] }'
    models.model(repository, "any_number", "told", config=f'backend: "torchserve" max_batch_size: 1 {tensors}')
    models.model(repository, "micro", "micro", "batchSize: 8\nmaxBatchDelay: 1500\nmicro_batching: {micro_batch_size: 2, parallelism: {inference: 2}}\n")
    limits = "responseTimeout: 2\nstartupTimeout: 33\nmaxRetryTimeoutInSec: 44\nuseJobTicket: true\n"
    models.model(repository, "sequence", "told", f"sequenceBatching: true\nmaxNumSequence: 4\n{limits}")
    for envelope in ("body", "json", "kserve", "kservev2"):
        config = 'backend: "torchserve"\n' + parameter("envelope", envelope)
        models.model(repository, envelope, "items", "batchSize: 2\nmaxBatchDelay: 1500\n", config=config)
    (folder / "metrics.yaml").write_text(METRICS)
    options = [f"--python={PYTHON}", f"--metrics-config={folder / 'metrics.yaml'}", "--metrics-mode=both"]
    with Server(folder, [repository], options) as server:
        server.folder = folder
        yield server


def parameter(name, value):
    """Returns a parameter of a configuration."""
    return f'parameters {{ key: "torchserve_{name}" value {{ string_value: "{value}" }} }}\n'


def given(body):
    """Returns the input of a request with this body, or these bodies."""
    bodies = body if isinstance(body, list) else [body]
    tensor = http.InferInput("data", [len(bodies), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text] for text in bodies], np.object_))
    return tensor


def parts(*named, **more):
    """Returns the parameter of a request with these parts (name, content type, bytes), and the body."""
    listed = [{"name": name, "content_type": kind, "length": len(content)} for name, kind, content in named]
    return b"".join(content for _, _, content in named), json.dumps({"headers": {}, "parts": listed} | more)


def ask(server, model, body, extra=None, identity="", **more):
    """Sends one request; returns the body of its answer and its `torchserve` parameter."""
    with http.InferenceServerClient(server.http, network_timeout=DEADLINE_S, connection_timeout=DEADLINE_S) as client:
        parameters = {"torchserve": extra} if extra else None
        result = client.infer(model, [given(body)], request_id=identity, parameters=parameters, **more)
        extra = result.get_response().get("parameters", {}).get("torchserve")
        return result.as_numpy("prediction").ravel().tolist(), json.loads(extra) if extra else None


def do(server, model, what, **more):
    """Returns a handler's answer to a JSON body."""
    body, extra = parts(("body", "application/json", json.dumps({"do": what} | more).encode()))
    answer, extra = ask(server, model, body, extra)
    return answer[0], extra


def refused(server, model, what, **more):
    """Returns the error text of a handler's requests."""
    with pytest.raises(InferenceServerException) as failure:
        do(server, model, what, **more)
    return failure.value.message()


def together(count, call):
    """Makes calls concurrently; returns their results in order."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


@pytest.mark.parametrize("model", ["told", "alone", "packed", "spread", "two"])
def test_archives_of_every_kind_are_served(served, model):
    answer, extra = do(served, model, "echo")
    assert json.loads(answer) == {"body": ["dict", {"do": "echo"}]} and extra is None


def test_archives_complete_the_configuration(served):
    def config(model):
        return json.loads(served.get(f"/v2/models/{model}/config")[1])

    assert config("spread")["max_batch_size"] == 4
    batching = config("spread")["dynamic_batching"]
    assert (int(batching["max_queue_delay_microseconds"]), batching["default_queue_policy"]["max_queue_size"]) == (1_500_000, 100)
    assert config("alone")["backend"] == "torchserve"
    assert config("two")["instance_group"][0]["count"] == 2 and config("two")["max_batch_size"] == 1
    assert config("streamed")["model_transaction_policy"]["decoupled"]
    assert not config("unstreamed").get("model_transaction_policy", {}).get("decoupled")
    assert config("continued")["sequence_batching"]["iterative_sequence"]
    talks = config("talks")
    assert talks["max_batch_size"] == 4 and talks["parameters"]["torchserve_batch_size"]["string_value"] == "2"
    assert talks["parameters"]["overlapping_sequences"]["string_value"] == "true"
    assert talks["sequence_batching"]["iterative_sequence"]
    assert talks["sequence_batching"]["oldest"]["max_candidate_sequences"] == 3
    said = {name: value["string_value"] for name, value in config("sequence")["parameters"].items()}
    assert said == {
        "torchserve_response_timeout": "2", "torchserve_startup_timeout": "33", "torchserve_max_retry_timeout": "44",
        "implicit_sequence_start": "true", "max_queued_sequences": "none", "max_queue_size_per_sequence": "1",
        "engine": said["engine"],
    }  # fmt: skip
    assert "useJobTicket has no effect in the server's model repository" in served.log_tail()


def test_functions_are_entry_points(served):
    assert ask(served, "function", b"x")[0] == [b"['function'] 1"]
    assert ask(served, "other", b"x")[0] == [b"other"]


def test_the_context_is_complete(served):
    body, extra = parts(("body", "application/json", b'{"do": "about"}'), headers={"X-Mine": "1", "url_path": "a/b"})
    answer, _ = ask(served, "told", body, extra, "the-id")
    about = json.loads(answer[0])
    assert about["id"] == "the-id" and about["batch"] == 1 and about["sequence"] is None
    assert about["headers"] == {"body": {"content-type": "application/json"}, "X-Mine": "1", "url_path": "a/b"}
    properties = about["properties"]
    assert properties | {"model_dir": ""} == {
        "model_dir": "",
        "gpu_id": None,
        "batch_size": 1,
        "server_name": "MMS",
        "server_version": "0.12.0",
        "limit_max_image_pixels": True,
    }
    assert properties["model_dir"] == about["here"] == about["decode"]
    assert about["yaml"] == {"own": {"a": [1, 2]}}
    assert about["manifest"]["model"]["modelVersion"] == "2.1"


def test_parts_are_decoded_by_their_type(served):
    body, extra = parts(
        ("a", "application/json", b'{"x": 1}'),
        ("b", "text/plain; charset=utf-8", "ä".encode()),
        ("c", "", b"\x01\x02"),
        ("d", "application/json", b"{no"),
        ("e", "text/plain", b"\xff"),
        ("f", "image/png", b""),
    )
    expected = {"a": ["dict", {"x": 1}], "b": ["str", "ä"], "c": ["bytearray", "0102"], "d": ["bytearray", b"{no".hex()]}
    expected |= {"e": ["bytearray", "ff"], "f": ["bytearray", ""]}
    assert json.loads(ask(served, "told", body, extra)[0][0]) == expected
    assert json.loads(ask(served, "told", b"raw")[0][0]) == {"body": ["bytearray", b"raw".hex()]}
    body, extra = parts(("body", "application/json", b"{}"))
    assert json.loads(ask(served, "raw", body, extra)[0][0]) == {"body": ["bytearray", b"{}".hex()]}


@pytest.mark.parametrize("kind, expected", [
    ("bytes", b"\x00\xff"), ("bytearray", b"ab"), ("text", "täxt".encode()), ("number", b"7"),
])  # fmt: skip
def test_answers_are_encoded_by_their_type(served, kind, expected):
    assert do(served, "told", "value", kind=kind)[0] == expected


def test_status_headers_and_type_of_an_answer(served):
    answer, extra = do(served, "told", "answered", status=418, phrase="Short", type="image/x")
    assert answer == b"answer 0"
    assert extra == {"status": 418, "reason": "Short", "content_type": "image/x", "headers": {"x-place": "0"}}


@pytest.mark.parametrize("what, more, text", [
    ("raises", {"kind": "value"}, "Prediction failed"),
    ("raises", {"kind": "memory"}, "HTTP 507: Out of resources"),
    ("raises", {"kind": "runtime", "text": "CUDA error: 2"}, "HTTP 507: Out of resources"),
    ("refuses", {"text": "I am a teapot", "code": 418}, "HTTP 418: I am a teapot"),
    ("refuses", {"text": "not now", "code": 503}, "not now"),
    ("wrong", {"kind": "none"}, "Invalid model predict output"),
    ("wrong", {"kind": "number"}, "Invalid model predict output"),
    ("wrong", {"kind": "few"}, "number of batch response mismatched"),
    ("wrong", {"kind": "many"}, "number of batch response mismatched"),
    ("value", {"kind": "set"}, "Unsupported model output data type."),
    ("value", {"kind": "surrogate"}, "Unsupported model output data type."),
])  # fmt: skip
def test_errors_have_torchserves_codes(served, what, more, text):
    before = served.statistics("told")["inference_stats"]["fail"]["count"]
    assert refused(served, "told", what, **more) == text
    assert served.statistics("told")["inference_stats"]["fail"]["count"] == before + 1
    assert do(served, "told", "echo")[0]


@pytest.mark.parametrize("extra", [
    "{", "5", '{"parts": 5}', '{"parts": [{"name": "body"}]}', '{"parts": [{"name": "body", "length": 9}]}', '{"parts": []}',
    '{"parts": [{"name": "body", "length": "1"}]}', '{"parts": [{"name": [], "length": 1}]}', '{"headers": 5, "parts": []}',
    "[" * 100_000,
])  # fmt: skip
def test_an_invalid_request_does_not_affect_others(served, extra):
    def one(at):
        try:
            return ask(served, "spread", b"x", extra if at == 0 else None)[0][0]
        except InferenceServerException as error:
            return error.message()

    answers = together(3, one)
    assert answers[0].startswith("HTTP 400: the request's parameter 'torchserve' is malformed"), answers[0]
    assert [json.loads(answer)["body"] for answer in answers[1:]] == [["bytearray", "78"]] * 2


def test_a_body_that_is_nested_too_deeply_does_not_affect_others(served):
    deep = b"[" * 100_000

    def one(at):
        body, extra = parts(("body", "application/json", deep if at == 0 else b"{}"))
        return json.loads(ask(served, "spread", body, extra)[0][0])["body"]

    assert together(3, one) == [["bytearray", deep.hex()], ["dict", {}], ["dict", {}]]


def test_a_request_without_elements_is_refused(served):
    tensor = http.InferInput("data", [1, 0], "BYTES")
    tensor.set_data_from_numpy(np.empty((1, 0), np.object_))
    with http.InferenceServerClient(served.http) as client, pytest.raises(InferenceServerException) as failure:
        client.infer("any_number", [tensor])
    assert failure.value.message().startswith("HTTP 400: ") and "has no element" in failure.value.message()


@pytest.mark.parametrize("kind", ["exit", "kill"])
def test_a_handler_that_ends_its_process_fails_its_request(served, kind):
    def serves():
        try:
            return do(served, "packed", "echo")[0]
        except InferenceServerException:
            return None

    eventually("the model serves", serves)
    text = refused(served, "packed", "ends", kind=kind)
    assert text == "the worker of model 'packed' version 1 died while it executed this request", "the request must not be retried"
    eventually("the model serves again", serves)


def test_a_handler_may_print_without_limit(served):
    assert do(served, "told", "prints", lines=20_000)[0] == b"printed"


def test_requests_are_batched(served):
    def one(at):
        body, extra = parts(("body", "application/json", b'{"do": "about"}'))
        return json.loads(ask(served, "spread", body, extra, f"id-{at}")[0][0])

    answers = together(4, one)
    assert [answer["batch"] for answer in answers] == [4] * 4
    assert [answer["id"] for answer in answers] == [f"id-{at}" for at in range(4)]
    answers, _ = ask(served, "spread", [b"a", b"b", b"c"])
    assert [json.loads(answer)["body"][1] for answer in answers] == ["61", "62", "63"]


def test_describe_and_explain_are_not_batched(served):
    def one(at):
        flags = {"describe": at == 0, "explain": at == 1}
        body, extra = parts(("body", "text/plain", b"%d" % at), **flags)
        return json.loads(ask(served, "spread", body, extra)[0][0])

    answers = together(4, one)
    assert answers[0] == {"about": "spread"} and answers[1] == {"explained": "{'body': '1'}"}
    assert answers[2:] == [{"body": ["str", "2"]}, {"body": ["str", "3"]}]


def streamed(server, model, body, identity="s", sequence=0):
    """Returns the parts of an answer over gRPC: the bodies, the `torchserve` parameter of the first, and the error."""
    tensor = grpc.InferInput("data", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[body]], np.object_))
    answers, bodies, extra, error = queue.Queue(), [], [], None
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            model, [tensor], request_id=identity, enable_empty_final_response=True, sequence_id=sequence
        )
        while True:
            result, error = answers.get(timeout=DEADLINE_S)
            if error is not None:
                break
            response = result.get_response()
            if response.outputs:
                bodies.append(result.as_numpy("prediction").ravel()[0])
                if "torchserve" in response.parameters:
                    extra.append(json.loads(response.parameters["torchserve"].string_param))
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    return bodies, extra, error


def test_parts_of_an_answer(served):
    bodies, extra, error = streamed(served, "streamed", b"2")
    assert (bodies, error) == ([b"0:0 ", b"0:1 ", b"end"], None)
    assert [part["headers"]["ts_stream_next"] for part in extra] == ["true", "true", "false"]
    assert extra[0]["content_type"] == "text/plain"
    bodies, _, error = streamed(served, "streamed", b"3")
    assert bodies == [b"0:0 ", b"0:1 ", b"0:2 "] and error.message() == "Prediction failed"
    with pytest.raises(InferenceServerException, match="Prediction failed"):
        ask(served, "unstreamed", b"1")
    assert ask(served, "unstreamed", b"0")[0] == [b"end"]
    assert "streaming: true" in served.log.read_text()


@pytest.mark.parametrize("model", ["continued", "looped"])
def test_requests_continue_until_their_criterion_stops_them(served, model):
    answers = together(3, lambda at: streamed(served, model, b"%d" % (at + 1), f"{model}-{at}"))
    for at, (bodies, _, error) in enumerate(answers):
        assert error is None, error and error.message()
        assert [body.split()[0] for body in bodies] == [b"%d" % left for left in range(at, -1, -1)]


@pytest.mark.parametrize("identity, other", [("long", "short"), ("same", "same"), ("", "")])
def test_requests_join_running_requests(served, identity, other):
    """Clients choose the ids, so those of two requests may be equal."""
    before = served.statistics("continued")["execution_count"]
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(streamed, served, "continued", b"4000", identity)
        eventually("the long request is executed", lambda: served.statistics("continued")["execution_count"] > before + 50)
        short, _, error = streamed(served, "continued", b"3", other)
        assert error is None and b"batch of 2" in short[-1]
        assert not long.done()
        assert [[int(body.split()[0]) for body in bodies] for bodies in (long.result()[0], short)] == [
            list(range(3999, -1, -1)), [2, 1, 0]
        ]  # fmt: skip


def test_a_criterion_that_raises_an_exception_fails_the_request(served):
    bodies, _, error = streamed(served, "continued", b"2 raises", "raises")
    assert (len(bodies), error.message()) == (1, "Prediction failed")
    bodies, _, error = streamed(served, "continued", b"1", "raises")
    assert error is None and [body.split()[0] for body in bodies] == [b"0"], "the id must not belong to the failed request"


def test_a_request_joins_the_stream_of_its_sequence(served):
    before = served.statistics("talks")
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(streamed, served, "talks", b"stream 400", "long", 7)
        eventually("it is streamed", lambda: served.statistics("talks")["execution_count"] > before["execution_count"] + 3)
        assert streamed(served, "talks", b"-1", "other", 8)[0] == [b"cancels 0"], "another sequence must not be cancelled"
        assert streamed(served, "talks", b"-1", "cancel", 7)[0] == [b"cancels 1"]
        bodies, _, error = long.result()
    assert error is None and bodies[-1] == b"cancelled;" and len(bodies) < 200
    # The batch of the last answer ends after the answer.
    ends = before["execution_count"] + len(bodies)
    eventually("the last batch has ended", lambda: served.statistics("talks")["execution_count"] >= ends)
    after = served.statistics("talks")
    grown = {key: after[key] - before[key] for key in ("execution_count", "inference_count")}
    assert grown["inference_count"] == 3 and grown["execution_count"] <= len(bodies) + 2
    counts = {name: after["inference_stats"][name]["count"] for name in ("success", "fail")}
    assert counts["success"] - before["inference_stats"]["success"]["count"] == 3
    assert counts["fail"] == before["inference_stats"]["fail"]["count"]


def test_coroutines_run_side_by_side(served):
    answers = together(8, lambda at: json.loads(ask(served, "later", b"2")[0][0]))
    assert all(answer["same"] for answer in answers) and max(answer["most"] for answer in answers) > 3


@pytest.mark.parametrize("what", ["value", "cancelled", "interrupt", "generator"])
def test_an_exception_in_a_coroutine_fails_its_request(served, what):
    with pytest.raises(InferenceServerException, match="Prediction failed"):
        ask(served, "later", what.encode())
    bodies, _, error = streamed(served, "later_streamed", what.encode())
    assert not bodies and error is not None and error.message() == "Prediction failed"
    assert ask(served, "later", b"0")[0] and streamed(served, "later_streamed", b"0")[0]


def test_micro_batches(served):
    answers = together(8, lambda at: ask(served, "micro", b"%d" % at)[0][0])
    assert answers == [b"%d in 2" % (at * 10) for at in range(8)]
    with pytest.raises(InferenceServerException, match="Prediction failed"):
        ask(served, "micro", b"13")
    assert ask(served, "micro", b"14")[0] == [b"140 in 1"]


def test_sequences_have_their_id_in_a_header(served):
    for start, end in ((True, False), (False, True)):
        body, extra = parts(("body", "application/json", b'{"do": "about"}'))
        options = {"sequence_id": 42, "sequence_start": start, "sequence_end": end}
        about = json.loads(ask(served, "sequence", body, extra, **options)[0][0])
        headers = about["headers"]
        assert (about["sequence"], headers.get("ts_request_sequence_start")) == ("42", "true" if start else None)
        assert headers.get("ts_request_sequence_end") == ("true" if end else None)
    body, extra = parts(("body", "application/json", b'{"do": "about"}'))
    about = json.loads(ask(served, "sequence", body, extra, sequence_id=43)[0][0])
    assert about["sequence"] == "43", "a START is not required"


def enveloped(server, envelope, content, explain=False):
    """Returns an answer through an envelope, in JSON."""
    body, extra = parts(("body", "application/json", json.dumps(content).encode()), explain=explain)
    return json.loads(ask(server, envelope, body, extra, "the-id")[0][0])


def test_envelopes(served):
    assert enveloped(served, "body", {"data": [1]}) == [1]
    assert ask(served, "body", b"text")[1] is None
    assert enveloped(served, "json", {"instances": [1, {"b64": "YWI="}]}) == {"predictions": [1, "ab"]}
    assert enveloped(served, "kserve", {"instances": [1, 2]}) == {"predictions": [1, 2]}
    assert enveloped(served, "kserve", {"instances": [1, 2]}, explain=True) == {"explanations": [1, 2]}
    tensor = {"name": "in", "shape": [1, 2], "datatype": "INT64", "data": [3, 4]}
    expected = {"name": "in", "datatype": "INT64", "data": [3, 4], "shape": [2]}
    assert enveloped(served, "kservev2", {"id": "mine", "inputs": [tensor]}) == {
        "id": "mine",
        "model_name": "items",
        "model_version": "2.1",
        "outputs": [expected],
    }
    raw, _ = ask(served, "kservev2", json.dumps({"inputs": [tensor]}).encode(), identity="x")
    assert json.loads(raw[0])["outputs"] == [expected]


@pytest.mark.parametrize("envelope", ["json", "kserve", "kservev2"])
def test_envelopes_answer_every_request_of_a_batch(served, envelope):
    def one(at):
        if envelope != "kservev2":
            return enveloped(served, envelope, {"instances": [at] * (at + 1)})["predictions"]
        tensor = {"name": "in", "shape": [1], "datatype": "FP32", "data": [at + 0.5]}
        return enveloped(served, envelope, {"inputs": [tensor] * (at + 1)})["outputs"]

    before = served.statistics(envelope)["execution_count"]
    answers = together(2, one)
    assert served.statistics(envelope)["execution_count"] == before + 1
    if envelope == "kservev2":
        answers = [[output["data"][0] for output in outputs] for outputs in answers]
        assert answers == [[0.5], [1.5, 1.5]]
    else:
        assert answers == [[0], [1, 1]]


LINE = re.compile(r"^\S+ - (\w+)\.([^:]*):([^|]*)\|#([^|]*)\|#hostname:[^,]+,requestID:(.*),timestamp:\d+$")


def lines(server, name):
    """Returns the lines of a metric in the log of models: unit, value, dimensions, request ids."""
    path = server.logs / "model_metrics.log"
    found = [LINE.match(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [match.groups()[1:] for match in found if match and match[1] == name]


def measure(server, identity, **extra):
    body, extra = parts(("body", "application/json", json.dumps(extra).encode()))
    return ask(server, "measured", body, extra, identity)


def of(server, name, **labels):
    """Returns the value of a series."""
    wanted = {"ModelName": "measured", "Level": "Model"} | labels
    found = [value for (series, given), value in server.scrape().items()
             if series == name and wanted.items() <= dict(given).items()]  # fmt: skip
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_metrics_of_every_call(served):
    before = of(served, "Calls") if lines(served, "Calls") else 0
    measure(served, "id-all", do="all")
    assert of(served, "Loads") == 1
    assert of(served, "Calls") == before + 3
    assert of(served, "Took", Step="pre:a,b/c") == 12.5
    assert (of(served, "Picture"), of(served, "Share")) == (3, 50.5)
    scraped = {(name, tuple(sorted(labels))): value for (name, labels), value in served.scrape().items()}
    host = dict(next(labels for name, labels in served.scrape() if name == "Errors"))["Hostname"]
    assert scraped["Errors", (("Hostname", host), ("Level", "Error"))] == 1
    assert scraped["Declared", (("Hostname", host), ("Where", "north"))] == 4.5
    assert scraped["Own", (("Hostname", host), ("Level", "y"), ("ModelName", "x"))] == 9
    assert of(served, "Spread_count") == 1
    eventually("the lines are written", lambda: lines(served, "Spread"))
    assert lines(served, "Calls")[0] == ("Count", "2.0", "ModelName:measured,Level:Model", "id-all")
    assert [line[1::2] for line in lines(served, "Declared")] == [("4.5", "given-id"), ("5.5", "null")]
    assert lines(served, "Errors") == [("unit", "1.0", "Level:Error", "null")]
    (loaded,) = lines(served, "Loads")
    assert re.fullmatch(r"[0-9a-f-]{36}", loaded[3]), "a load has a separate id"
    assert "`Undeclared` is not defined in metrics.yaml" in served.log.read_text()


def test_values_that_text_lines_cannot_hold(served):
    measure(served, "id-values", do="values")
    assert math.isnan(of(served, "Took", Step="nan"))
    assert of(served, "Took", Step="large") == 1e16
    assert of(served, "Took", Step="http://h:1/?q=1,2") == math.inf
    assert "the metric 'Took' cannot take the value 1000" in served.log.read_text()


def test_a_burst_of_metrics_is_recorded(served):
    measure(served, "id-before", do="burst", times=1)
    before = of(served, "Calls")
    measure(served, "id-burst", do="burst", times=20_000)
    assert of(served, "Calls") == before + 20_000


def test_metrics_of_older_handlers(served):
    measure(served, "id-before", do="burst", times=1)
    before = of(served, "Calls")
    measure(served, "id-store", do="store")
    assert of(served, "Calls") == before + 10 and of(served, "Stored") == 7
    assert "the metric 'Errors' cannot take the value 'not a number'" in served.log.read_text()


def test_times_are_those_of_the_handler(served):
    for _ in range(3):
        do(served, "spread", "sleeps", s=0.05)
    refused(served, "spread", "raises", kind="value")

    def written(name):
        return [line for line in lines(served, name) if "ModelName:spread," in line[2]]

    eventually("the lines are written", lambda: len(written("PredictionTime")) >= 3)
    count = served.statistics("spread")["execution_count"]
    assert 3 <= len(written("PredictionTime")) <= count + 2
    assert float(written("HandlerTime")[-1][1]) >= 50
    assert re.fullmatch(r"\d+\.\d{1,2}", written("PredictionTime")[-1][1]), "two decimals, as in TorchServe"
    # A batch has the ids of all its requests.
    together(4, lambda at: ask(served, "spread", b"x", identity=f"many-{at}"))
    eventually("the batch is written", lambda: written("PredictionTime")[-1][3].count(",") == 3)


NETWORK = b"""
import torch


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(12, 6)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""
MAKE = """
import sys
sys.path.insert(0, ".")
import torch, network
torch.manual_seed(1)
model = network.Network().eval()
torch.save(model.state_dict(), "state.pt")
torch.jit.script(model).save("script.pt")
x = torch.arange(24.0).reshape(2, 3, 2, 2) / 24
print(torch.softmax(model(x), 1).tolist())
"""


def network(folder, **model):
    """Returns an archive of a network for a handler of TorchServe."""
    files = {name: (folder / name).read_bytes() for name in ("network.py", "state.pt", "script.pt")}
    files["index_to_name.json"] = json.dumps({str(number): f"class {number}" for number in range(6)}).encode()
    return files | {"MAR-INF/MANIFEST.json": json.dumps({"model": {"modelName": "n", "modelVersion": "1.0"} | model}).encode()}


@pytest.mark.skipif(not has_torch, reason=f"{PYTHON} does not have PyTorch")
def test_handlers_that_torchserve_has(tmp_path):
    (tmp_path / "network.py").write_bytes(NETWORK)
    made = subprocess.run([PYTHON, "-c", MAKE], cwd=tmp_path, capture_output=True, text=True, check=True)
    probabilities = json.loads(made.stdout)
    state = {"modelFile": "network.py", "serializedFile": "state.pt"}
    repository = tmp_path / "models"
    for name, model in {"eager": state, "script": {"serializedFile": "script.pt"}}.items():
        models.write(repository / name / "1", name, network(tmp_path, handler="image_classifier", **model))
        (repository / name / "config.pbtxt").write_text('backend: "torchserve" max_batch_size: 4\n')
    models.write(repository / "base/1", "base", network(tmp_path, handler="base_handler", **state))
    (repository / "base/config.pbtxt").write_text('backend: "torchserve"\n' + parameter("envelope", "body"))
    code = b"import torch\n\n\ndef handle(data, context):\n    return None if data is None else [torch.arange(3)] * len(data)\n"
    models.model(repository, "tensor", "function", files={"function.py": code})
    models.write(repository / "wrong/1", "wrong", network(tmp_path, handler="base_handler", serializedFile="network.py"))
    (repository / "wrong/config.pbtxt").write_text('backend: "torchserve"\n')
    pictures = (np.arange(24.0).reshape(2, 3, 2, 2) / 24).tolist()
    bodies = [parts(("body", "application/json", json.dumps(picture).encode())) for picture in pictures]
    with Server(tmp_path, [repository], [f"--python={PYTHON}", "--strict-readiness=false", "--exit-on-error=false"]) as server:
        for name in ("eager", "script"):
            for (body, extra), expected in zip(bodies, probabilities):
                found = json.loads(ask(server, name, body, extra)[0][0])
                assert len(found) == 5
                assert found == pytest.approx({label: expected[int(label[-1])] for label in found}, rel=1e-5)
        found = json.loads(ask(server, "base", *bodies[0])[0][0])
        shares = np.exp(found) / np.exp(found).sum()
        assert shares.tolist() == pytest.approx(probabilities[0], rel=1e-5)
        (tmp_path / "answer.pt").write_bytes(ask(server, "tensor", b"")[0][0])
        read = [PYTHON, "-c", "import torch; print(torch.load('answer.pt').tolist())"]
        assert subprocess.run(read, cwd=tmp_path, capture_output=True, text=True).stdout == "[0, 1, 2]\n"
        assert "its serializedFile is" in server.log.read_text()


def test_undefined_metrics(tmp_path):
    models.model(tmp_path / "models", "measured", "measured")
    (tmp_path / "metrics.yaml").write_text(METRICS.replace("- {name: Own,", "- {name: Other,"))
    options = [f"--python={PYTHON}", f"--metrics-config={tmp_path / 'metrics.yaml'}", "--metrics-mode=both"]
    with Server(tmp_path, [tmp_path / "models"], [*options, "--model-metrics-auto-detect"]) as server:
        measure(server, "the-id", do="all")
        assert (of(server, "Undeclared"), of(server, "Own", ModelName="x", Level="y")) == (1, 9)
        eventually("the lines are written", lambda: lines(server, "Undeclared"))
        assert lines(server, "Undeclared") == [("Count", "1.0", "ModelName:measured,Level:Model", "the-id")]
        assert lines(server, "Own") == [("tokens/s", "9.0", "ModelName:x,Level:y", "null")]


@pytest.mark.parametrize("found, text", [
    ({"MAR-INF/MANIFEST.json": b'{"model": {}}'}, "names no handler"),
    (models.contents("told", manifest={"model": {"handler": "nowhere.py"}}), "Unable to load module nowhere.py"),
    (models.contents("told", manifest={"model": {"handler": "told:nothing"}}), "names a function that"),
    (models.contents("told", files={"told.py": b"class A: pass\nclass B: pass\n"}), "Expected only one class"),
    (models.contents("told", files={"told.py": b"class A:\n    def initialize(self, c): raise MemoryError()\n    handle = None\n"}),
     "System out of memory"),
    (models.contents("told", files={"told.py": b"import no_such_package\n"}), "No module named 'no_such_package'"),
    (models.contents("micro", "micro_batching: {micro_batch_size: 2, parallelism: {inference: 0}}\n"), "parallelism of 'inference' is 0; steps are"),
    (models.contents("micro", "micro_batching: {micro_batch_size: 2, parallelism: 0}\n"), "parallelism is 0; expected a number of threads for each of"),
])  # fmt: skip
def test_load_failures_have_the_reason(tmp_path, found, text):
    models.write(tmp_path / "models/broken/1", "broken", found)
    (tmp_path / "models/broken/config.pbtxt").write_text('backend: "torchserve"\n')
    options = [f"--python={PYTHON}", "--model-control-mode=explicit"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        status, answer = server.ask("POST", "/v2/repository/models/broken/load", "{}")
        assert status == 400 and text in answer


def test_broken_archives(tmp_path):
    repository = tmp_path / "models"
    for name, files in {"two": ["a.mar", "b.mar"], "torn": ["a.mar"], "none": []}.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text('backend: "torchserve"\n')
        for file in files:
            (repository / name / "1" / file).write_bytes(b"PK\x03\x04 no archive")
    models.model(repository, "damaged", "told")
    damaged = repository / "damaged/1/damaged.mar"
    with zipfile.ZipFile(damaged) as file:
        # The content of the first file, behind its header of 30 bytes and its name.
        begin, size = 30 + len(file.infolist()[0].filename), file.infolist()[0].compress_size
    content = damaged.read_bytes()
    damaged.write_bytes(content[:begin] + b"\xff" * size + content[begin + size :])
    options = [f"--python={PYTHON}", "--model-control-mode=explicit"]
    with Server(tmp_path, [repository], options) as server:
        texts = {"two": "2 archives, a.mar, b.mar", "torn": "cannot unpack", "none": "names no handler"}
        for name, text in (texts | {"damaged": f"cannot unpack '{damaged}'"}).items():
            status, answer = server.ask("POST", f"/v2/repository/models/{name}/load", "{}")
            assert status == 400 and text in answer, answer


def test_the_archivers_own_archives(tmp_path):
    if not ARCHIVER.exists():
        pytest.skip(f"{ARCHIVER} is missing: {PYTHON} -m pip install torch-model-archiver")
    (tmp_path / "label.txt").write_text("of the archive")
    (tmp_path / "mine.py").write_text(
        "def handle(data, context):\n    return None if data is None else [open('label.txt').read()] * len(data)\n"
    )
    for kind, name in {"default": "a", "tgz": "b", "no-archive": "c"}.items():
        version = tmp_path / "models" / name / "1"
        version.mkdir(parents=True)
        options = ["--model-name", name, "--version", "1.0", "--handler", "mine.py", "--extra-files", "label.txt"]
        options += ["--archive-format", kind, "--export-path", str(version)]
        subprocess.run([str(ARCHIVER), *options], cwd=tmp_path, check=True, capture_output=True)
        (version.parent / "config.pbtxt").write_text('backend: "torchserve"\n')
    with Server(tmp_path, [tmp_path / "models"], [f"--python={PYTHON}"]) as server:
        assert [ask(server, name, b"x")[0] for name in "abc"] == [[b"of the archive"]] * 3
