"""A model that attacks as its client says (`hostile_model.py`)."""

from pathlib import Path

CONFIG = """backend: "python"
input [ {{ name: "ATTACK" data_type: TYPE_STRING dims: [ 2 ] }} ]
output [ {{ name: "RESULT" data_type: TYPE_STRING dims: [ 1 ] }} ]
{}
"""
CODE = Path(__file__).with_name("hostile_model.py")


def write_model(repository: Path, name: str, parameter: str = ""):
    """Writes the model, with this value of its parameter `sandbox`."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1/model.py").write_text(CODE.read_text())
    text = f'parameters {{ key: "sandbox" value {{ string_value: "{parameter}" }} }}' if parameter else ""
    (repository / name / "config.pbtxt").write_text(CONFIG.format(text))


def attack(server, kind: str, target="", model="hostile") -> str:
    """Lets the model attack; returns `done`, what it found, or the name of the error."""
    request = {"inputs": [{"name": "ATTACK", "datatype": "BYTES", "shape": [2], "data": [kind, str(target)]}]}
    status, answer = server.infer(model, request)
    assert status == 200, answer
    return answer["outputs"][0]["data"][0]
