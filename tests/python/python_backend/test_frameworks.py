"""Model files of scikit-learn, XGBoost and PyTorch are served without code, with the same results as without a server."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from harness.server import ROOT, Server, binary
from harness.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
PACKAGES = {"sklearn": "scikit-learn", "xgboost": "xgboost-cpu", "pytorch": "torch"}
MODULES = {"pytorch": "torch"}
FAILING = {
    "sklearn": ("no_model", "no_file", "no_method"), "xgboost": ("no_model", "wrong_parameter"), "pytorch": ("wrong_names", "says_nothing"),
}  # fmt: skip
"""The models that do not load."""
UNCONFIGURED = {"sklearn": ("classifier", "texts"), "xgboost": ("regression", ""), "pytorch": ("exported", "texts")}
"""A model whose configuration does not mention batching, and one whose configuration selects no scheduler."""


def missing(framework: str) -> str:
    """Returns why a framework cannot be tested and the command that installs it; empty if it can be tested."""
    module = MODULES.get(framework, framework)
    found = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, text=True)
    if found.returncode == 0:
        return ""
    return f"{PYTHON} has no {module}: '{PYTHON} -m pip install {PACKAGES[framework]}', or set PHAROS_PYTHON"


@pytest.fixture(scope="module", params=PACKAGES)
def served(request, tmp_path_factory):
    """A server with a framework's models, and their expected answers."""
    why_not = missing(request.param)
    if why_not:
        pytest.skip(why_not)
    folder = tmp_path_factory.mktemp(request.param)
    subprocess.run([PYTHON, HERE / "framework_models.py", request.param, folder], check=True, timeout=300)
    server = Server(
        folder, [folder / "models"], [f"--python={PYTHON}", "--exit-on-error=false", "--strict-readiness=false"]
    )
    with server:
        yield server, json.loads((folder / "cases.json").read_text()), request.param


def ask(server, model: str, inputs: dict, outputs) -> tuple:
    """Sends one request; returns the status, and the outputs by name or the error."""
    body = {
        "inputs": [{"name": n, "datatype": d, "shape": s, "data": v} for n, (d, s, v) in inputs.items()],
        "outputs": [{"name": name} for name in outputs],
    }
    status, answer = server.infer(model, json.loads(json.dumps(body)))
    found = {o["name"]: [o["datatype"], o["shape"], o["data"]] for o in answer.get("outputs", [])}
    return status, found or answer


def same(found: list, wanted: list) -> bool:
    """Returns whether two tensors are equal; FP32 numbers may differ in the last bits, because batches change the order of
    sums."""
    if found[:2] != wanted[:2]:
        return False
    return found[2] == wanted[2] if wanted[0] in ("BYTES", "BOOL") else np.allclose(found[2], wanted[2], 1e-5, 1e-6)


def test_answers(served):
    """The answer to each case, sent separately, has the expected outputs."""
    server, cases, _ = served
    assert len(cases) >= 3
    for model, inputs, outputs in cases:
        status, found = ask(server, model, inputs, outputs)
        assert status == 200, f"{model}: {found}\n{server.log_tail()}"
        assert [name for name in outputs if not same(found[name], outputs[name])] == [], (model, found, outputs)


def test_answers_in_batches(served):
    """Each of several concurrent clients gets the rows that it requested."""
    server, cases, _ = served
    model, inputs, outputs = next(
        c for c in cases if c[0] in ("classifier_as_told", "classifier", "by_name") and len(c[2]) > 1
    )
    rows = next(iter(inputs.values()))[1][0]
    wrong = []

    def client(row):
        part = lambda of: [of[0], [1, *of[1][1:]], np.reshape(of[2], of[1])[row].ravel().tolist()]  # noqa: E731
        for _ in range(20):
            status, found = ask(server, model, {n: part(of) for n, of in inputs.items()}, outputs)
            if status != 200 or not all(same(found[n], part(of)) for n, of in outputs.items()):
                wrong.append((row, found))

    threads = [threading.Thread(target=client, args=(row,)) for row in range(rows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.statistics(model)["inference_count"] >= 20 * rows


def test_a_model_without_a_configuration_batches(served):
    """The server adds a maximum batch size and the dynamic batcher, as for an ONNX model. Configured values are kept."""
    server, _, framework = served
    config = lambda model: json.loads(server.get(f"/v2/models/{model}/config")[1])  # noqa: E731
    bare, told = UNCONFIGURED[framework]
    assert config(bare)["max_batch_size"] > 1 and "dynamic_batching" in config(bare), config(bare)
    assert not told or "dynamic_batching" not in config(told), config(told)


def test_named_features_are_logged_once(served):
    """The columns of a model that was trained with a table of named columns are logged at its load, and its batches log nothing."""
    server, cases, framework = served
    if framework != "sklearn":
        pytest.skip("only scikit-learn warns about missing names")
    model, inputs, outputs = next(case for case in cases if case[0] == "named_features")
    for _ in range(20):
        assert ask(server, model, inputs, outputs)[0] == 200
    lines = [line for line in server.log.read_text().splitlines() if "named_features" in line or "feature names" in line]
    assert [line for line in lines if "warn" in line.lower()] == []
    (names,) = (line for line in lines if "columns of the input" in line)
    assert ", in this order, the features length, width, height, weight instance=" in names


REASONS = {
    "no_model": ("cannot load",),
    "no_file": ("has no file in", "model.joblib, model.pkl"),
    "no_method": ("output 'transform'", "has no method 'transform'"),
    "wrong_parameter": ("'iterations' is 'all'", "'0:20'"),
    "wrong_names": ("the inputs a, b, c do not match the model's forward(left, right)",),
    "says_nothing": ("name its inputs in config.pbtxt (left, right)",),
}


def test_load_errors_have_the_reason(served):
    """The index has the file, the value and the allowed values."""
    server, _, framework = served
    index = server.index()
    for model in FAILING[framework]:
        state = index[model][0]
        assert state["state"] == "UNAVAILABLE", state
        assert [text for text in REASONS[model] if text not in state["reason"]] == [], state


WRONG_VALUES = {
    "sklearn": ("classifier", {"input": ["FP32", [1, 4], [1, 2, 3, "NaN"]]}, ("predict",), "NaN"),
    "pytorch": (
        "any_width",
        {"left": ["FP32", [1, 4], [1, 2, 3, 4]], "right": ["FP32", [1, 3], [1, 2, 3]]},
        ("sum",),
        "size",
    ),
}


def test_invalid_values_fail_only_their_request(served):
    """A request with values that the model does not accept gets the framework's error; the next one is answered."""
    server, cases, framework = served
    if framework not in WRONG_VALUES:
        pytest.skip("XGBoost takes every number but infinity")
    model, inputs, outputs, word = WRONG_VALUES[framework]
    if "NaN" in word:
        body = b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1,4],"parameters":{"binary_data_size":16}}]}'
        headers = {"Inference-Header-Content-Length": str(len(body))}
        nan = np.full(4, np.nan, np.float32).tobytes()
        status, answer = server.ask("POST", f"/v2/models/{model}/infer", body + nan, headers=headers)
    else:
        status, answer = ask(server, model, inputs, outputs)
    assert status in (400, 500) and word in str(answer), answer
    model, inputs, outputs = cases[0]
    assert ask(server, model, inputs, outputs)[0] == 200


TOGETHER = {
    "sklearn": ("text", "BYTES", [[b"\xff"]], [[b"a good day"]], "can't decode byte 0xff"),
    "xgboost": ("features", "FP32", [[1, np.inf, 3, 4]], [[1, 2, 3, 4]], "inf"),
}
"""For each framework, the input of a model that batches three requests, an invalid value, a valid one, and the error."""


def test_an_invalid_value_fails_only_its_request_of_a_batch(served):
    server, _, framework = served
    if framework not in TOGETHER:
        pytest.skip(f"{framework} has no such model")
    name, datatype, invalid, valid, word = TOGETHER[framework]

    def one(at):
        array = np.array(valid if at else invalid, np.object_ if datatype == "BYTES" else np.float32)
        given = http.InferInput(name, list(array.shape), datatype)
        given.set_data_from_numpy(array)
        with http.InferenceServerClient(server.http, network_timeout=DEADLINE_S) as client:
            try:
                return client.infer("together", [given]).as_numpy("predict").tolist()
            except InferenceServerException as error:
                return error.status(), error.message()

    with ThreadPoolExecutor(3) as pool:
        (status, text), *others = pool.map(one, range(3))
    assert status == "400" and word in text, text
    assert len(others[0]) == 1 and others[0] == others[1], others


SCALAR = """
from pharos_worker.runners import pytorch
import numpy as np
import triton_python_backend_utils as pb_utils

model = pytorch.TritonPythonModel()
tensors = [{"x": pb_utils.Tensor("x", np.ones((1, 4), np.float32))}] * 2
try:
    model.answers([None, None], tensors, {"mean": np.float32(1)})
except ValueError as error:
    print(error)
"""


def test_an_output_without_rows_is_not_split():
    """The requests are then executed alone, as one that came alone."""
    done = subprocess.run([PYTHON, "-c", SCALAR], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "output 'mean' has 0 rows for a batch of 2\n", done.stderr


@pytest.mark.parametrize("framework", PACKAGES)
def test_missing_package_says_the_command(framework, tmp_path):
    """If the framework is missing, the index has the command that installs it."""
    if not missing(framework):
        pytest.skip(f"{PYTHON} has it")
    source = ROOT / f"examples/frameworks/{framework}/models"
    model = next(source.iterdir())
    (tmp_path / "models" / model.name / "1").mkdir(parents=True)
    (tmp_path / "models" / model.name / "config.pbtxt").write_text((model / "config.pbtxt").read_text())
    options = [f"--python={PYTHON}", "--exit-on-error=false", "--strict-readiness=false"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        reason = server.index()[model.name][0]["reason"]
    assert f"-m pip install {MODULES.get(framework, PACKAGES[framework]).replace('xgboost-cpu', 'xgboost')}" in reason


@pytest.mark.slow
@pytest.mark.parametrize("framework", PACKAGES)
def test_example(framework, tmp_path):
    """The example trains and serves a model with one command and classifies most held-out pictures correctly."""
    # The pictures are part of scikit-learn.
    why_not = missing(framework) or missing("sklearn")
    if why_not:
        pytest.skip(why_not)
    folder = ROOT / "examples/frameworks"
    for model in sorted((folder / framework / "models").iterdir()):
        (tmp_path / model.name).mkdir()
        (tmp_path / model.name / "config.pbtxt").write_text((model / "config.pbtxt").read_text())
    made = [PYTHON, folder / "make_models.py", framework, "--into", tmp_path]
    subprocess.run(made, check=True, timeout=300)
    names = sorted(path.name for path in tmp_path.iterdir() if list(path.glob("1/model*")))
    command = [PYTHON, folder / "ask.py", "--server", binary(), "--models", tmp_path, "--python", PYTHON, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    shares = [float(line.split(": ")[1].partition("%")[0]) for line in done.stdout.splitlines() if "held-out" in line]
    assert len(shares) == len(names) and min(shares) > 94, done.stdout
