"""A repository that is itself a model, as storage initializers create: a model file, a directory with a model's files, or a
model's directory."""

import shutil
import struct

import pytest

from harness.onnx_file import model, node
from harness.server import MODELS, Server
from harness.waiting import DEADLINE_S, eventually
from security.sandbox_support import lacking

REQUEST = {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
PYTHON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = (pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""
CONFIG = """
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 4 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }
"""


IDENTITY = model([node("Identity", ["INPUT0"], ["OUTPUT0"])], [("INPUT0", "FP32", ["n", 4])], [("OUTPUT0", "FP32", ["n", 4])])


def tree(folder) -> dict:
    """Returns all files below a folder with their contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path):
    """The folder that storage initializers fill."""
    folder = tmp_path / "mnt" / "models"
    folder.mkdir(parents=True)
    return folder


def check_served(folder, repository, name, *options):
    """Checks that the repository serves one model with this name, and that the server writes nothing into it."""
    before = tree(repository) if repository.is_dir() else repository.read_bytes()
    with Server(folder, [repository], options) as server:
        assert {found: entries[0]["state"] for found, entries in server.index().items()} == {name: "READY"}
        status, answer = server.infer(name, REQUEST)
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == [1, 2, 3, 4] and answer["model_version"] == "1"
    assert (tree(repository) if repository.is_dir() else repository.read_bytes()) == before


def test_a_model_file_is_served_under_the_name_of_its_directory(tmp_path, place):
    (place / "model.onnx").write_bytes(IDENTITY)
    check_served(tmp_path, place, "models")
    check_served(tmp_path, place, "mine", "--model-name=mine")
    check_served(tmp_path, place / "model.onnx", "models")


def test_a_model_file_may_have_another_name(tmp_path, place):
    (place / "resnet.onnx").write_bytes(IDENTITY)
    check_served(tmp_path, place, "models")
    check_served(tmp_path, place / "resnet.onnx", "resnet")


@pytest.mark.smoke
def test_a_configuration_beside_the_file_is_used(tmp_path, place):
    (place / "config.pbtxt").write_text('name: "named"' + CONFIG + 'backend: "python"\n')
    (place / "model.py").write_text(PYTHON)
    check_served(tmp_path, place, "named")
    check_served(tmp_path, place, "mine", "--model-name=mine")


@pytest.mark.skipif(bool(lacking()), reason=f"this kernel cannot make a whole sandbox: {lacking()}")
@pytest.mark.parametrize("files", [{"resnet.onnx": IDENTITY}, {"config.pbtxt": (CONFIG + 'backend: "python"\n').encode(), "model.py": PYTHON.encode()}])
def test_a_model_in_a_sandbox_reads_its_files_through_the_links(tmp_path, place, files):
    for name, content in files.items():
        (place / name).write_bytes(content)
    check_served(tmp_path, place, "models", "--worker-sandbox=on")


def test_labels_warm_up_data_and_initial_states_beside_the_file_are_used(tmp_path, place):
    """In a repository these are beside the directories of versions."""
    (place / "model.onnx").write_bytes(IDENTITY)
    (place / "classes.txt").write_text("cat\ndog\n\nbird\n")
    (place / "warmup").mkdir()
    (place / "warmup/data").write_bytes(struct.pack("<4f", 1, 2, 3, 4))
    (place / "config.pbtxt").write_text(
        CONFIG.replace("dims: 4 }\n", 'dims: 4 label_filename: "classes.txt" }\n').replace('dims: 4 label_filename: "classes.txt" }', "dims: 4 }", 1)
        + 'model_warmup { name: "w" batch_size: 1 inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: 4 input_data_file: "data" } } }'
    )
    with Server(tmp_path, [place]) as server:
        asked = {**REQUEST, "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}]}
        status, answer = server.infer("models", asked)
        assert (status, answer["outputs"][0]["data"]) == (200, ["4.000000:3:bird", "3.000000:2"]), answer


def test_a_model_directory_is_served_under_its_configured_name(tmp_path, place):
    shutil.copytree(MODELS / "identity_fp32", place, dirs_exist_ok=True)
    check_served(tmp_path, place, "identity_fp32")
    check_served(tmp_path, place, "mine", "--model-name=mine")


def test_version_directories_without_a_configuration(tmp_path, place):
    (place / "1").mkdir()
    (place / "1" / "model.onnx").write_bytes(IDENTITY)
    check_served(tmp_path, place, "models")


def test_polling_detects_a_new_model_file(tmp_path, place):
    """The log warns about an empty repository and shows the expected layout."""
    options = ["--model-control-mode=poll", "--repository-poll-secs=1"]
    with Server(tmp_path, [place], options) as server:
        assert server.index() == {}
        log = server.log.read_text()
        assert "WARN" in log and f"no models found in '{place}'" in log and "NAME/1/model.onnx" in log
        (tmp_path / "new").write_bytes(IDENTITY)
        (tmp_path / "new").rename(place / "model.onnx")
        ready = lambda: server.get("/v2/models/models/ready")[0] == 200  # noqa: E731
        eventually("the new file is served", ready)
        assert server.infer("models", REQUEST)[0] == 200


def test_an_empty_repository_of_models_that_are_loaded_by_request(tmp_path, place):
    """The log does not warn: models may be added before they are loaded."""
    with Server(tmp_path, [place], ["--model-control-mode=explicit"]) as server:
        assert server.index() == {} and "no models found" not in server.log.read_text()


def test_a_file_of_an_unknown_kind_is_refused(tmp_path, place):
    (place / "notes.txt").write_text("x")
    server = Server(tmp_path, [place / "notes.txt"])
    server.launch()
    assert server.process.wait(DEADLINE_S) == 1
    assert "not a model file of a known kind" in server.log_tail()


