"""The forms of ONNX models: a directory with external data, ORT format, models that the embedded engine cannot run, and models
whose outputs are no batch."""

import base64
import concurrent.futures
import json
import shutil

import numpy as np
import onnxruntime
import pytest

from backends.onnx_models import fp32
from harness import onnx_file
from harness.onnx_file import SEQUENCE, constant, external_constant, node
from harness.server import Server, binary
from harness.tract import HAS_TRACT, needs_tract
from harness.waiting import eventually
from harness.wire import tensor

SYSTEM_PATH = "/usr/bin:/bin"
"""A PATH whose `python3` has no ONNX Runtime."""

WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)
PRODUCT = [node("MatMul", ["x", "w"], ["y"])]
LENIENT = ["--exit-on-error=false", "--strict-readiness=false"]


def request(*data) -> dict:
    """Returns a request with the row `x`."""
    return {"inputs": [tensor("x", "FP32", [1, 4], list(data))]}


def write(path, content: bytes):
    """Writes a file and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def product(*constants) -> bytes:
    """Returns the model `y = x . w`; its weight is in the file unless `constants` has another."""
    weights = constants or [constant("w", "FP32", WEIGHTS)]
    return onnx_file.model(PRODUCT, [fp32("x", "N", 4)], [fp32("y", "N", 3)], weights)


def write_directory(version, name="model.onnx"):
    """Writes the model `y = x . w` as the directory `name` with the weights in a file beside the model's file."""
    write(version / name / "model.onnx", product(external_constant("w", "FP32", WEIGHTS, "w.bin")))
    write(version / name / "w.bin", WEIGHTS.tobytes())


def loaded(server, model: str) -> tuple:
    """Waits until a model is ready or has failed; returns its state and the reason."""

    def ended():
        entry = server.index()[model][0]
        return entry if entry.get("state") in ("READY", "UNAVAILABLE") else None

    entry = eventually(f"{model} is ready or has failed", ended)
    return entry["state"], entry.get("reason", "")


def row(server, model: str) -> list:
    """Returns the product for one row."""
    assert loaded(server, model) == ("READY", "")
    status, answer = server.infer(model, request(1, 2, 3, 4))
    assert status == 200, answer
    return answer["outputs"][0]["data"]


def signature(server, model: str) -> dict:
    """Returns what was completed: the maximum batch size, and the names and dimensions of inputs and outputs."""
    config = json.loads(server.get(f"/v2/models/{model}/config")[1])
    tensors = {tensor["name"]: tensor["dims"] for tensor in config["input"] + config["output"]}
    return {"max_batch_size": config["max_batch_size"], **tensors}


COMPLETED = {"max_batch_size": 4, "x": [4], "y": [3]}


def server_of(folder, *options, path=None) -> Server:
    """Returns a server of the models in `folder / "models"`; `path`: its PATH."""
    server = Server(folder, [folder / "models"], [*LENIENT, *options])
    if path:
        server.environment["PATH"] = path
    return server


def test_a_directory_in_place_of_the_file(tmp_path):
    """Triton's layout for external data, for both engines: the configuration is completed, also in a sandbox; a changed file within is
    a changed model."""
    models = tmp_path / "models"
    write_directory(models / "plain/1")
    write_directory(models / "named/1", "net.onnx")
    (models / "named/config.pbtxt").write_text('backend: "onnxruntime" default_model_filename: "net.onnx"')
    names = ["plain", "named"]
    if HAS_TRACT:
        write_directory(models / "embedded/1")
        (models / "embedded/config.pbtxt").write_text('backend: "tract"')
        names.append("embedded")
    explicit = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in names)]
    with server_of(tmp_path, "--worker-sandbox=auto", *explicit) as server:
        for name in names:
            assert row(server, name) == [60, 70, 80], name
            assert signature(server, name) == COMPLETED, name
            write(models / name / "1" / ("net.onnx" if name == "named" else "model.onnx") / "w.bin", (WEIGHTS + 1).tobytes())
            status, answer = server.ask("POST", f"/v2/repository/models/{name}/load")
            assert status == 200, answer
            eventually("the changed weights are used", lambda name=name: row(server, name) == [70, 80, 90])


def test_a_directory_in_a_load_request(tmp_path):
    """Files of a load may have this form."""
    (tmp_path / "models").mkdir()
    files = {"model.onnx": product(external_constant("w", "FP32", WEIGHTS, "w.bin")), "w.bin": WEIGHTS.tobytes()}
    sent = {f"file:1/model.onnx/{name}": base64.b64encode(content).decode() for name, content in files.items()}
    with server_of(tmp_path, "--model-control-mode=explicit") as server:
        status, answer = server.ask("POST", "/v2/repository/models/m/load", json.dumps({"parameters": {"config": "{}", **sent}}))
        assert status == 200, answer
        assert row(server, "m") == [60, 70, 80]
        assert signature(server, "m") == COMPLETED


def test_a_directory_without_the_file(tmp_path):
    """The load fails and names the file."""
    write(tmp_path / "models/m/1/model.onnx/w.bin", b"")
    (tmp_path / "models/m/config.pbtxt").write_text(
        'backend: "onnxruntime" input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 3 }'
    )
    with server_of(tmp_path) as server:
        state, reason = loaded(server, "m")
    assert state == "UNAVAILABLE"
    assert f"the model file '{tmp_path}/models/m/1/model.onnx/model.onnx' does not exist" in reason


@pytest.mark.parametrize("loose", [True, False], ids=["beside nothing", "in a version directory"])
def test_a_single_model_that_is_a_directory(tmp_path, loose):
    """A repository path that is the model itself, as storage initializers create it."""
    write_directory(tmp_path / "models" if loose else tmp_path / "models/1")
    with server_of(tmp_path) as server:
        assert row(server, "models") == [60, 70, 80]


@pytest.mark.parametrize("name", ["model.ort", "net.ort"])
def test_ort_format(tmp_path, name):
    """A file in ORT format completes its configuration as an ONNX file does; the embedded engine refuses it with the remedy."""
    write(tmp_path / "model.onnx", product())
    folder = tmp_path / "models/m"
    (folder / "1").mkdir(parents=True)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "1" / name)
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options, providers=["CPUExecutionProvider"])
    if name != "model.ort":
        (folder / "config.pbtxt").write_text(f'default_model_filename: "{name}"')
    with server_of(tmp_path) as server:
        assert row(server, "m") == [60, 70, 80]
        assert signature(server, "m") == COMPLETED
    with server_of(tmp_path, path=SYSTEM_PATH) as server:
        state, reason = loaded(server, "m")
    assert state == "UNAVAILABLE"
    assert ("only ONNX Runtime reads its own format" if HAS_TRACT else "ONNX models need ONNX Runtime") in reason
    assert "pip install onnxruntime" in reason


MISSING = {
    "sequence": (
        "SequenceConstruct",
        [node("Relu", ["x"], ["y"]), node("SequenceConstruct", ["y"], ["q"])],
        [fp32("x", "N", 4)],
        [fp32("y", "N", 4), ("q", SEQUENCE, [])],
    ),
    "det": ("Det", [node("Det", ["x"], ["y"])], [fp32("x", "N", 2, 2)], [fp32("y", "N")]),
    "unique": ("Unique", [node("Unique", ["x"], ["y"])], [fp32("x", "N")], [fp32("y", "M")]),
    "normalizer": (
        "StringNormalizer",
        [node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER")],
        [("x", "BYTES", ["N"])],
        [("y", "BYTES", ["M"])],
    ),
}
"""Models with an operator that tract does not have: the operator, operations, inputs and outputs."""


@needs_tract
def test_operators_that_the_embedded_engine_does_not_have(tmp_path):
    """Such a model fails at its load, with the operator and the remedy, with which it serves."""
    for name, (_, nodes, inputs, outputs) in MISSING.items():
        write(tmp_path / "models" / name / "1/model.onnx", onnx_file.model(nodes, inputs, outputs))
    # An operator that only an unused part of the graph needs does no harm.
    unused = [*PRODUCT, node("Det", ["x"], ["d"])]
    file = onnx_file.model(unused, [fp32("x", "N", 4)], [fp32("y", "N", 3)], [constant("w", "FP32", WEIGHTS)])
    write(tmp_path / "models/unused/1/model.onnx", file)
    weights = [constant("w", "FP32", np.ones((1, 6, 4), np.float32)), constant("r", "FP32", np.ones((1, 6, 2), np.float32))]
    reverse = [node("GRU", ["x", "w", "r"], ["y"], hidden_size=2, direction="reverse")]
    file = onnx_file.model(reverse, [fp32("x", "N", 1, 4)], [fp32("y", "N", 1, 1, 2)], weights)
    write(tmp_path / "models/reverse/1/model.onnx", file)
    # Types that do not fit, which ONNX Runtime refuses too.
    unfit = onnx_file.model(PRODUCT, [fp32("x", "N", 5)], [fp32("y", "N", 3)], [constant("w", "FP32", WEIGHTS)])
    write(tmp_path / "models/unfit/1/model.onnx", unfit)
    with server_of(tmp_path, path=SYSTEM_PATH) as server:
        for name, (operator, *_) in MISSING.items():
            state, reason = loaded(server, name)
            assert state == "UNAVAILABLE", name
            assert f"tract cannot load '{tmp_path}/models/{name}/1/model.onnx': it does not have the operators {operator};" in reason
            assert "`pip install onnxruntime`" in reason and "--onnxruntime-library" in reason
        state, reason = loaded(server, "reverse")
        assert state == "UNAVAILABLE" and "it computes GRU with direction 'reverse' wrong; " in reason and "pip install onnxruntime" in reason
        state, reason = loaded(server, "unfit")
        assert state == "UNAVAILABLE" and "pip install onnxruntime" in reason
        assert row(server, "unused") == [60, 70, 80]
    with server_of(tmp_path) as server:
        # ONNX Runtime's StringNormalizer needs a locale that many machines do not have.
        served = MISSING.keys() - {"normalizer"}
        assert {name: loaded(server, name) for name in served} == dict.fromkeys(served, ("READY", ""))


def test_a_build_without_an_engine_for_onnx_says_what_is_missing(tmp_path):
    """Neither ONNX Runtime nor tract, as after `cargo build`. A model that names tract loads no library from its directory in its place."""
    for name in ("pharos", "pharos-worker"):
        shutil.copy(binary().with_name(name), tmp_path / name)
    for model, config in {"m": "", "named": 'backend: "onnxruntime"', "tract": 'backend: "tract"'}.items():
        write(tmp_path / "models" / model / "1/model.onnx", product())
        if config:
            (tmp_path / "models" / model / "config.pbtxt").write_text(config)
    write(tmp_path / "models/tract/libpharos_tract.so", b"")
    server = Server(tmp_path, [tmp_path / "models"], LENIENT)
    server.command[0] = str(tmp_path / "pharos")
    server.environment = {"PATH": SYSTEM_PATH, "ORT_DYLIB_PATH": ""}
    with server:
        for model in ("m", "named"):
            state, reason = loaded(server, model)
            assert state == "UNAVAILABLE" and "`pip install onnxruntime`" in reason and "`make tract`" in reason, reason
        state, reason = loaded(server, "tract")
        assert state == "UNAVAILABLE" and "backend 'tract' of model 'tract' is not available here" in reason and "`make tract`" in reason, reason
        assert "ONNX models need ONNX Runtime" in server.log.read_text()


def select(first: str, last: str) -> bytes:
    """Returns a model that returns the elements of all rows that are above 0: `[first, 4] -> [last]`."""
    nodes = [
        node("Greater", ["x", "zero"], ["m"]),
        node("Reshape", ["x", "flat"], ["xf"]),
        node("Reshape", ["m", "flat"], ["mf"]),
        node("Compress", ["xf", "mf"], ["y"], axis=0),
    ]
    constants = [constant("zero", "FP32", np.array(0, np.float32)), constant("flat", "INT64", np.array([-1]))]
    return onnx_file.model(nodes, [fp32("x", first, 4)], [fp32("y", last)], constants)


def test_an_output_whose_first_dimension_is_no_batch(tmp_path):
    """Concurrent requests to a model whose output has another first dimension than its input are not one batch: each gets its own
    elements. With the same name, the dimension is the batch."""
    folder = tmp_path / "models/select"
    write(folder / "1/model.onnx", select("N", "M"))
    (folder / "config.pbtxt").write_text("dynamic_batching { max_queue_delay_microseconds: 200000 }")
    write(tmp_path / "models/same/1/model.onnx", product())
    requests = [request(1, -1, 2, -2), request(3, 4, 5, 6)]
    with server_of(tmp_path) as server:
        assert loaded(server, "select") == ("READY", "")
        assert signature(server, "select") == {"max_batch_size": 0, "x": [-1, 4], "y": [-1]}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda body: server.infer("select", body), requests))
        assert [(status, answer["outputs"][0]["data"]) for status, answer in answers] == [(200, [1, 2]), (200, [3, 4, 5, 6])]
        assert loaded(server, "same") == ("READY", "")
        assert signature(server, "same") == COMPLETED
        warning = "requests are not batched: the first dimension of 'x' is named 'N' and that of 'y' 'M'"
        assert warning in server.log.read_text()
