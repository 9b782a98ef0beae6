"""The reasons of ensembles whose members cannot be loaded, if models are loaded by request or on demand: the table forgets such
members."""

import json
import re

import pytest

from harness.models import IO, write
from harness.server import Server

STEP = 'step [ {{ model_name: "{}" model_version: {} input_map {{ key: "INPUT0" value: "INPUT0" }} output_map {{ key: "OUTPUT0" value: "OUTPUT0" }} }} ]'
IDENTITY = f'backend: "builtin" {IO} parameters {{ key: "function" value {{ string_value: "identity" }} }}'
UNAVAILABLE = "contains models that are not available or ambiguous: "
EXPECTED = {
    "invalid": f"{UNAVAILABLE}invalid: ",
    "unreadable": f"{UNAVAILABLE}unreadable: ",
    "empty": "has no version directories; create 'empty/1' with the model's files",
    "unselected": "no version to run: ",
    "other_version": "depends on 'good' whose required version 7 is not loaded: known versions: 1",
    "nested": f"depends on 'invalid_member' which is not valid. Model 'invalid_member' failed with error: ensemble invalid_member {UNAVAILABLE}invalid: ",
}
CAUSES = {
    "invalid": "'nonsense' is not a field of ModelConfig",
    "unreadable": "not an ONNX model",
    "empty": "models/empty'",
    "unselected": "models/unselected' has versions [1], and its 'version_policy' selects [3]",
    "other_version": "'good'",
    "nested": "'nonsense' is not a field of ModelConfig",
}


@pytest.fixture(scope="module", params=["explicit", "on-demand"])
def server(request, tmp_path_factory):
    """A server with a good model, three that cannot be loaded, and ensembles of them."""
    folder = tmp_path_factory.mktemp(request.param)
    models = folder / "models"
    write(models, "good", IDENTITY)
    write(models, "invalid", f"{IDENTITY} nonsense: 3")
    write(models, "unreadable", f'backend: "onnxruntime" {IO}', b"x")
    write(models, "empty", IDENTITY)
    (models / "empty/1").rmdir()
    write(models, "unselected", f"{IDENTITY} version_policy {{ specific {{ versions: [ 3 ] }} }}")
    members = {"unselected": ("unselected", -1), "invalid": ("invalid", -1), "unreadable": ("unreadable", -1), "empty": ("empty", -1), "other_version": ("good", 7), "nested": ("invalid_member", -1)}
    for name, (member, version) in members.items():
        write(models, f"{name}_member" if name != "nested" else "nested_member", f'platform: "ensemble" {IO} ensemble_scheduling {{ {STEP.format(member, version)} }}')
    write(models, "absent_member", f'platform: "ensemble" {IO} ensemble_scheduling {{ {STEP.format("absent", -1)} }}')
    write(models, "bare", f'platform: "ensemble" {IO} ensemble_scheduling {{ {STEP.format("good", -1)} }}')
    (models / "bare/1").rmdir()
    with Server(folder, [models], [f"--model-control-mode={request.param}", "--exit-on-error=false", "--strict-readiness=false"]) as running:
        running.mode = request.param
        yield running


@pytest.mark.parametrize("name", EXPECTED)
def test_the_reason_names_the_member_and_the_cause(server, name):
    """In the answer and in the index."""
    model = f"{name}_member"
    if server.mode == "explicit":
        status, text = server.ask("POST", f"/v2/repository/models/{model}/load")
        assert status == 400
    else:
        body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]})
        status, text = server.ask("POST", f"/v2/models/{model}/infer", body)
        assert status == 503
    reason = server.index()[model][0]["reason"]
    for text in (json.loads(text)["error"], reason):
        assert EXPECTED[name] in text and CAUSES[name] in text, text


def test_the_reason_of_an_absent_member_names_the_repositories(server):
    """In the answer to a load, and in the index of models on demand, which are prepared at the start."""
    model = "absent_member"
    if server.mode == "explicit":
        status, text = server.ask("POST", f"/v2/repository/models/{model}/load")
        assert status == 400
    else:
        text = server.index()[model][0]["reason"]
    assert f"{UNAVAILABLE}absent: model 'absent' is not in '" in text and "/models'" in text, text


def test_an_ensemble_without_a_version_directory(server):
    """The reason says which directory to create, as for other models."""
    if server.mode == "explicit":
        status, text = server.ask("POST", "/v2/repository/models/bare/load")
        assert status == 400
        reason = json.loads(text)["error"]
    else:
        reason = server.index()["bare"][0]["reason"]
    assert re.search(r"no version to run: '.*/models/bare' has no version directories; create 'bare/1', which stays empty for an ensemble$", reason), reason
