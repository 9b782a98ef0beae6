"""The endpoints of Amazon SageMaker and Google Vertex AI: their options and variables, and requests to them."""

import http.client
import json
import shutil

from harness.waiting import DEADLINE_S, eventually

PREDICT, HEALTH = "/v1/endpoints/1/deployedModels/2:predict", "/v1/endpoints/1/deployedModels/2"
ENVIRONMENT = {
    "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "simple",
    "AIP_PREDICT_ROUTE": PREDICT,
    "AIP_HEALTH_ROUTE": HEALTH,
}
ENSEMBLE = """name: "other"
platform: "ensemble"
max_batch_size: 8
input [{ name: "X" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [{
  model_name: "identity_fp32" model_version: -1
  input_map { key: "INPUT0" value: "X" } output_map { key: "OUTPUT0" value: "Y" } }] }
"""
"""The configuration of an ensemble with the member `identity_fp32`."""


def options(sagemaker: int, vertex_ai: int) -> list:
    """Returns the options that enable the endpoints in both servers."""
    return [
        "--allow-sagemaker=true", f"--sagemaker-port={sagemaker}",
        "--allow-vertex-ai=true", f"--vertex-ai-port={vertex_ai}", "--vertex-ai-default-model=simple",
    ]  # fmt: skip


class Both:
    """The platforms' endpoints of one server."""

    def __init__(self, sagemaker: int, vertex_ai: int, real: bool):
        self.sagemaker, self.vertex_ai, self.real = f"127.0.0.1:{sagemaker}", f"127.0.0.1:{vertex_ai}", real

    def ask(self, where: str, method: str, path: str, body=None, **headers) -> tuple:
        """Returns the status, the content type and the body."""
        connection = http.client.HTTPConnection(getattr(self, where), timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, {key.replace("_", "-"): value for key, value in headers.items()})
            response = connection.getresponse()
            self.length = response.headers.get("inference-header-content-length")
            return response.status, response.headers.get("content-type"), response.read()
        finally:
            connection.close()


def is_there(both: Both, where: str, path: str) -> bool:
    """Returns whether the path answers 200."""
    try:
        return both.ask(where, "GET", path)[0] == 200
    except OSError:
        return False


def until_there(both: Both):
    """Waits until both endpoints know their default model, which may be after the server is ready."""
    eventually("the endpoints answer", lambda: is_there(both, "sagemaker", "/ping") and is_there(both, "vertex_ai", HEALTH))


class MultiModel:
    """A SageMaker multi-model endpoint and the directory of its models."""

    def __init__(self, port: int, folder, real: bool):
        self.folder, self.endpoint = folder, Both(port, port, real)

    def place(self, repository, name: str) -> str:
        """Returns a directory with one model in it, as SageMaker unpacks an archive."""
        place = self.folder / name / "model"
        shutil.copytree(repository / "simple", place / "simple")
        return str(place)

    def ask(self, method: str, path: str, body=None, **headers) -> tuple:
        """Returns the status and the body, parsed if there is one."""
        text = json.dumps(body) if isinstance(body, dict) else body
        status, _, answer = self.endpoint.ask("sagemaker", method, path, text, **headers)
        return status, json.loads(answer) if answer else None
