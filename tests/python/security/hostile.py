"""A model that attacks as its client says (`hostile_model.py`)."""

import base64
import json
import subprocess
import sys
import tarfile
from pathlib import Path

CONFIG = """backend: "python"
input [ {{ name: "ATTACK" data_type: TYPE_STRING dims: [ 2 ] }} ]
output [ {{ name: "RESULT" data_type: TYPE_STRING dims: [ 1 ] }} ]
{}
"""
CODE = Path(__file__).with_name("hostile_model.py")


def configuration(**parameters) -> dict:
    """Returns the configuration of the model with these parameters, for a load."""
    tensors = [{"name": name, "data_type": "TYPE_STRING", "dims": [count]} for name, count in (("ATTACK", 2), ("RESULT", 1))]
    named = {name: {"string_value": str(value)} for name, value in parameters.items()}
    return {"backend": "python", "input": tensors[:1], "output": tensors[1:], "parameters": named}


def load(server, name: str, **parameters) -> tuple:
    """Loads the model by request with its code; returns the status and the answer."""
    files = {"file:1/model.py": base64.b64encode(CODE.read_bytes()).decode()}
    body = json.dumps({"parameters": files | {"config": json.dumps(configuration(**parameters))}})
    return server.ask("POST", f"/v2/repository/models/{name}/load", body)


def write_model(repository: Path, name: str, parameter: str = ""):
    """Writes the model, with this value of its parameter `sandbox`."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1/model.py").write_text(CODE.read_text())
    text = f'parameters {{ key: "sandbox" value {{ string_value: "{parameter}" }} }}' if parameter else ""
    (repository / name / "config.pbtxt").write_text(CONFIG.format(text))


def write_environment(repository: Path, folder: Path, script: str, *options):
    """Gives the model an archive with an environment, made with these options of `venv`, whose `conda-unpack` is the script. The
    script has the variable `home`, the directory of the unpacked environment."""
    unpack, home = folder / "conda-unpack", folder / "environment"
    unpack.write_text(f"import os, sys\nhome = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))\n{script}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, str(home)], check=True)
    with tarfile.open(repository / "hostile/env.tar.gz", "w:gz") as archive:
        archive.add(home, ".")
        archive.add(unpack, "bin/conda-unpack")
    with (repository / "hostile/config.pbtxt").open("a") as config:
        config.write('parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }')


def attack(server, kind: str, target="", model="hostile") -> str:
    """Lets the model attack; returns `done`, what it found, or the name of the error."""
    request = {"inputs": [{"name": "ATTACK", "datatype": "BYTES", "shape": [2], "data": [kind, str(target)]}]}
    status, answer = server.infer(model, request)
    assert status == 200, answer
    return answer["outputs"][0]["data"][0]
