#!/usr/bin/env python3
"""Requests for trace settings and their answers, step by step, over both protocols.

    python -m traces.trace_table record      sends the steps to the Triton peer and writes golden_trace.json

The steps build on each other: each is sent to one server, in order. `test_trace_settings.py` sends them to this server and
compares status, text and settings.
"""

import http.client
import json
import sys
import tempfile
from pathlib import Path

import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2

from harness.waiting import DEADLINE_S

GOLDEN = Path(__file__).resolve().parent / "golden_trace.json"
FILE = "trace.json"
"""The name of the trace file; its folder is omitted from the golden file and from comparisons."""
OPTIONS = [f"triton,file=FOLDER/{FILE}", "level=TIMESTAMPS", "rate=7", "triton,log-frequency=0", "mode=triton", "count=-1"]
"""The options of both servers, each after `--trace-config`."""
MODELS = ["one", "two"]
UNKNOWN = "nobody"
"""A model that does not exist; `golden_trace.json` has this name."""


class Http:
    """One HTTP request; a body that is not a string is sent as JSON."""

    def __init__(self, path: str, body=None, method: str = ""):
        self.path, self.method = path, method or ("GET" if body is None else "POST")
        self.body = body if body is None or isinstance(body, str) else json.dumps(body)
        self.name = f"{self.method} {path} {self.body if self.body is not None else ''}".strip()

    def ask(self, http_address: str, _: str) -> dict:
        """Returns the status, and the settings or the error."""
        connection = http.client.HTTPConnection(http_address, timeout=DEADLINE_S)
        try:
            connection.request(self.method, self.path, self.body)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            answer = json.loads(text)
        except ValueError:
            return {"status": response.status, "error": text}
        if response.status != 200:
            return {"status": response.status, "error": answer["error"]}
        return {"status": 200, "settings": without_folder(answer)}


class Grpc:
    """One call of TraceSetting; values of `settings` are lists."""

    def __init__(self, model: str, settings=None):
        self.model, self.settings = model, settings or {}
        self.name = f"grpc {model or 'global'} {json.dumps(self.settings)}"

    def ask(self, _: str, grpc_address: str) -> dict:
        """Returns the status, and the settings or the error."""
        request = service_pb2.TraceSettingRequest(model_name=self.model)
        for key, values in self.settings.items():
            request.settings[key].value.extend(values)
        with grpcclient.InferenceServerClient(grpc_address) as client:
            try:
                response = client._client_stub.TraceSetting(request)
            except Exception as error:
                return {"status": error.code().name, "error": error.details()}
        settings = {key: list(value.value) for key, value in response.settings.items()}
        return {"status": "OK", "settings": without_folder(settings)}


def without_folder(settings: dict) -> dict:
    """Returns the settings with the trace file's name without its folder."""
    shown = dict(settings)
    file = shown.get("trace_file")
    if isinstance(file, list):
        shown["trace_file"] = [Path(name).name for name in file]
    elif file:
        shown["trace_file"] = Path(file).name
    return shown


ALL = "/v2/trace/setting"
ONE = "/v2/models/one/trace/setting"
TWO = "/v2/models/two/trace/setting"

STEPS = [
    Http(ALL),
    Http(ONE),
    Grpc(""),
    Grpc("one"),
    # Requests that change no setting.
    Http(ALL, ""),
    Http(ALL, {}),
    Http(ONE, {}),
    # Global settings, in all forms.
    Http(ALL, {"trace_rate": "5"}),
    Http(ONE),
    Http(ALL, {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_count": "10", "log_frequency": "3"}),
    Http(ALL, {"trace_level": ["TENSORS"]}),
    Http(ALL, {"trace_level": ["MIN"]}),
    Http(ALL, {"trace_level": ["MAX"]}),
    Http(ALL, {"trace_level": ["OFF"]}),
    Http(ALL, {"trace_level": []}),
    Http(ALL, {"trace_level": None}),
    Http(ALL, {"trace_rate": None, "trace_count": None, "log_frequency": None}),
    # Settings of a model.
    Http(ONE, {"trace_rate": "3"}),
    Http(ONE),
    Http(TWO),
    Http(ALL),
    # Settings that a model does not set follow the global ones.
    Http(ALL, {"trace_rate": "11", "trace_count": "99", "log_frequency": "5"}),
    Http(ONE),
    Http(TWO),
    Http(ONE, {"trace_count": "4"}),
    Http(ALL, {"trace_count": "77"}),
    Http(ONE),
    Http(ONE, {"trace_rate": None}),
    Http(ONE, {"trace_count": None}),
    Http(ONE),
    Http(ALL, {"trace_rate": None, "trace_count": None, "log_frequency": None}),
    Http(ONE),
    # As above, over gRPC.
    Grpc("one", {"trace_rate": ["12"], "trace_level": ["TENSORS", "TIMESTAMPS"]}),
    Grpc("one"),
    Grpc("two"),
    Grpc("", {"trace_count": ["44"], "log_frequency": ["2"], "trace_level": ["OFF"]}),
    Grpc("one"),
    Grpc("two"),
    Grpc("one", {"trace_rate": [], "trace_level": []}),
    Grpc("one"),
    Grpc("", {"trace_count": [], "log_frequency": [], "trace_level": []}),
    Grpc("two"),
    # Refused updates change nothing.
    Http(ALL, {"trace_file": "other.json"}),
    Http(ONE, {"trace_file": "other.json"}),
    Http(ALL, {"trace_file": None}),
    Http(ALL, {"trace_rate": "x"}),
    Http(ALL, {"trace_rate": ""}),
    Http(ALL, {"trace_rate": "1.5"}),
    Http(ALL, {"trace_rate": "-1"}),
    Http(ALL, {"trace_rate": "10000000000"}),
    Http(ALL, {"trace_rate": "99999999999999999999999"}),
    Http(ALL, {"trace_rate": "4294967295"}),
    Http(ALL, {"trace_rate": "4294967296"}),
    Http(ALL, {"trace_rate": "0"}),
    Http(ONE, {"trace_rate": "0"}),
    Http(ALL, {"trace_rate": "0", "trace_level": ["OFF"]}),
    Http(ALL, {"trace_level": ["TIMESTAMPS"]}),
    Http(ALL, {"trace_rate": None, "trace_level": None}),
    Http(ALL, {"trace_count": "x"}),
    Http(ALL, {"trace_count": "-1"}),
    Http(ALL, {"trace_count": "-2"}),
    Http(ALL, {"trace_count": "0"}),
    Http(ALL, {"trace_count": "2147483647"}),
    Http(ALL, {"trace_count": "2147483648"}),
    Http(ALL, {"trace_count": "10000000000"}),
    Http(ALL, {"trace_count": None}),
    Http(ALL, {"log_frequency": "x"}),
    Http(ALL, {"log_frequency": "-1"}),
    Http(ALL, {"log_frequency": "10000000000"}),
    Http(ALL, {"log_frequency": None}),
    Http(ALL, {"trace_level": ["OFF", "TIMESTAMPS"]}),
    Http(ALL, {"trace_level": ["TIMESTAMPS", "OFF"]}),
    Http(ALL, {"trace_level": ["OFF", "OFF"]}),
    Http(ALL, {"trace_level": ["TIMESTAMP"]}),
    Http(ALL, {"trace_level": ["timestamps"]}),
    Http(ALL, {"trace_level": "TIMESTAMPS"}),
    Http(ALL, {"trace_level": [1]}),
    Http(ALL, {"trace_rate": 5}),
    Http(ALL, {"trace_count": 5}),
    Http(ALL, {"log_frequency": 5}),
    Http(ALL, {"trace_rate": ["5"]}),
    Http(ALL, {"trace_mode": "opentelemetry"}),
    Http(ALL, {"nonsense": "1"}),
    Http(ALL, {"nonsense": None}),
    Http(ALL, "{"),
    Http(ALL, "[1]"),
    Http(ALL, "7"),
    Http(ALL, {"trace_rate": "6", "trace_count": "x"}),
    Http(ALL),
    Grpc("", {"trace_file": ["other.json"]}),
    Grpc("", {"trace_file": []}),
    Grpc("", {"trace_rate": ["x"]}),
    Grpc("", {"trace_rate": ["1", "2"]}),
    Grpc("", {"trace_rate": ["10000000000"]}),
    Grpc("", {"trace_rate": ["0"]}),
    Grpc("", {"trace_count": ["x"]}),
    Grpc("", {"trace_count": ["1", "2"]}),
    Grpc("", {"trace_count": ["-2"]}),
    Grpc("", {"log_frequency": ["x"]}),
    Grpc("", {"log_frequency": ["1", "2"]}),
    Grpc("", {"trace_level": ["OFF", "TIMESTAMPS"]}),
    Grpc("", {"trace_level": ["nonsense"]}),
    Grpc("", {"trace_level": [""]}),
    Grpc("", {"nonsense": ["1"]}),
    Grpc("", {"trace_mode": ["triton"]}),
    Grpc(""),
    # Models that do not exist.
    Http(f"/v2/models/{UNKNOWN}/trace/setting"),
    Http(f"/v2/models/{UNKNOWN}/trace/setting", {"trace_rate": "3"}),
    Http("/v2/models/one/versions/1/trace/setting"),
    Http("/v2/models/one/versions/1/trace/setting", {"trace_rate": "3"}),
    Grpc(UNKNOWN),
    Grpc(UNKNOWN, {"trace_rate": ["3"]}),
    Http(ALL, None, "PUT"),
    Http(ALL, None, "DELETE"),
    # An invalid global setting, with a setting of a model.
    Http(ONE, {"trace_level": ["TIMESTAMPS"]}),
    Http(ALL, {"trace_level": ["OFF"], "trace_rate": "0"}),
    Http(ALL),
    Http(ONE),
    Http(ALL, {"trace_level": None, "trace_rate": None}),
    Http(ONE, {"trace_level": None}),
    Http(ONE),
    Http(ALL),
]


def answers(http_address: str, grpc_address: str) -> list:
    """Returns the answers to all steps, in order."""
    return [{"step": step.name} | step.ask(http_address, grpc_address) for step in STEPS]


def build(repository: Path):
    """Writes models for Triton; they are never executed."""
    for name in MODELS:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(
            'backend: "python"\ninput [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
            'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]\ninstance_group [ { kind: KIND_CPU } ]\n'
        )
        (repository / name / "1/model.py").write_text(
            "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
        )


def run_triton(folder: Path) -> list:
    """Returns the answers of a new Triton, whose files are in `folder`."""
    from harness.peers import Triton

    build(folder / "models")
    options = [f"--trace-config={option.replace('FOLDER', str(folder))}" for option in OPTIONS]
    triton = Triton(folder / "models", folder / "log", options=options)
    triton.ensure()
    try:
        return answers(triton.http, triton.grpc)
    finally:
        triton.stop()


def record():
    """Records the answers of a new Triton."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = run_triton(Path(folder))
    lines = ",\n".join(json.dumps(answer) for answer in recorded)
    GOLDEN.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["record"]:
        sys.exit(__doc__)
    record()
