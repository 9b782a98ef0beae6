"""The served model `digits` returns the results of the same model run offline, with every encoding of the pictures."""

import shutil
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc
import tritonclient.http

from harness.server import EXAMPLES, ROOT, Server
from harness.tract import HAS_TRACT
from harness.waiting import DEADLINE_S

HELD_OUT = np.load(ROOT / "examples/digits_held_out.npz")
BATCH = 32
WITH_BACKENDS = ["digits_onnxruntime", "digits_tract"] if HAS_TRACT else ["digits_onnxruntime"]
MODELS = ["digits", *WITH_BACKENDS, "digits_bare"]
"""The example's configuration; with each backend set; without any configuration."""


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    """Returns the held-out pictures, FP32 [360, 8, 8]."""
    return HELD_OUT["images"].astype(np.float32)


@pytest.fixture(scope="module")
def offline(pictures) -> dict:
    """Returns the results of ONNX Runtime in this process."""
    session = onnxruntime.InferenceSession(str(EXAMPLES / "digits/1/model.onnx"), providers=["CPUExecutionProvider"])
    names = ["probabilities", "label"]
    return dict(zip(names, session.run(names, {"image": pictures})))


@pytest.fixture(scope="module")
def digits_server(tmp_path_factory):
    """A server with the variants of the model."""
    folder = tmp_path_factory.mktemp("digits")
    for name in MODELS:
        shutil.copytree(EXAMPLES / "digits", folder / "models" / name)
        config = folder / "models" / name / "config.pbtxt"
        text = config.read_text().replace('name: "digits"', f'name: "{name}"')
        config.write_text(text + (f'backend: "{name.split("_")[1]}"\n' if name in WITH_BACKENDS else ""))
    (folder / "models/digits_bare/config.pbtxt").unlink()
    with Server(folder, [folder / "models"]) as running:
        yield running


def by_json(server, model: str, pictures: np.ndarray) -> tuple:
    """Sends requests in JSON; returns the results."""
    image = {"name": "image", "datatype": "FP32", "shape": list(pictures.shape), "data": pictures.tolist()}
    status, answer = server.infer(model, {"inputs": [image]})
    assert status == 200, answer
    outputs = {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]}
    return outputs["probabilities"].astype(np.float32), outputs["label"]


def by_client(module, address: str, model: str, pictures: np.ndarray) -> tuple:
    """Sends requests with tritonclient: binary over HTTP or raw over gRPC."""
    with module.InferenceServerClient(address) as client:
        image = module.InferInput("image", list(pictures.shape), "FP32")
        image.set_data_from_numpy(pictures)
        result = client.infer(model, [image])
        return result.as_numpy("probabilities"), result.as_numpy("label")


ENCODINGS = {
    "json": by_json,
    "binary": lambda server, *more: by_client(tritonclient.http, server.http, *more),
    "grpc": lambda server, *more: by_client(tritonclient.grpc, server.grpc, *more),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("model", MODELS)
def test_served_results_equal_offline_results(digits_server, pictures, offline, model, encoding):
    """All 360 held-out pictures have the same digits and probabilities, and so the same accuracy."""
    size = 4 if model == "digits_bare" else BATCH
    parts = [ENCODINGS[encoding](digits_server, model, pictures[i : i + size]) for i in range(0, len(pictures), size)]
    probabilities, labels = (np.concatenate(column) for column in zip(*parts))
    np.testing.assert_array_equal(labels, offline["label"])
    np.testing.assert_allclose(probabilities, offline["probabilities"], rtol=1e-4, atol=1e-6)
    accuracy = (labels[:, 0] == HELD_OUT["labels"]).mean()
    assert accuracy == (offline["label"][:, 0] == HELD_OUT["labels"]).mean()
    assert accuracy > 0.95


def test_the_onnxruntime_backend_computes_exactly_as_offline(digits_server, pictures, offline):
    """The same library on the same machine returns identical bits, one picture at a time."""
    for index in range(10):
        got, _ = ENCODINGS["binary"](digits_server, "digits_onnxruntime", pictures[index : index + 1])
        np.testing.assert_allclose(got[0], offline["probabilities"][index], rtol=1e-6)


def test_without_a_configuration_the_file_defines_the_model(digits_server):
    """Inputs, outputs and the batch dimension come from the ONNX file; Triton's default batch limit is 4."""
    with tritonclient.http.InferenceServerClient(digits_server.http) as client:
        config = client.get_model_config("digits_bare")
        metadata = client.get_model_metadata("digits_bare")
    assert config["max_batch_size"] == 4
    assert "dynamic_batching" in config
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 8, 8]}]
    assert sorted(output["name"] for output in metadata["outputs"]) == ["label", "probabilities"]


def test_the_configuration_shows_the_backend(digits_server):
    """The configuration has the selected backend."""
    with tritonclient.http.InferenceServerClient(digits_server.http) as client:
        named = {model: client.get_model_config(model)["backend"] for model in MODELS}
    assert named["digits_onnxruntime"] == "onnxruntime"
    assert named.get("digits_tract") == ("tract" if HAS_TRACT else None)
    assert named["digits"] in ("onnxruntime", "tract")


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.smoke), ["--grpc"]])
def test_classify_example(server, options):
    """The example program recognises the digit in every picture's name."""
    address = server.grpc if options else server.http
    paths = sorted((ROOT / "examples/images").glob("digit_*.pgm"))
    command = [sys.executable, str(ROOT / "examples/classify.py"), "--url", address, *options, *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 10
    for path, line in zip(paths, lines):
        assert line.startswith(f"{path}: {path.stem[-1]} ("), line
