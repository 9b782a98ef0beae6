"""Loads with files or with configurations that run code: permitted by a token, a restricted API or `--allow-model-upload`."""

import base64
import json

import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness.server import EXAMPLES, Server
from python_backend.worker import PYTHON, has_worker

FLAG = "--allow-model-upload"
CODE = (
    "import triton_python_backend_utils as pb_utils\n"
    "class TritonPythonModel:\n"
    "    def execute(self, requests):\n"
    "        return [pb_utils.InferenceResponse([]) for _ in requests]\n"
)
CONFIG = json.dumps({"backend": "python", "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [1]}]})
MODEL = (EXAMPLES / "digits/1/model.onnx").read_bytes()
FILES = {"file:1/model.py": CODE.encode()}
UPLOADS = {
    "code": {"config": CONFIG, **FILES},
    "a file without code": {"config": json.dumps({"backend": "onnxruntime"}), "file:1/model.onnx": MODEL},
    "a backend with code": {"config": CONFIG},
    "a parameter of the sandbox": {
        "config": json.dumps({"backend": "onnxruntime", "parameters": {"sandbox": {"string_value": "off"}}})
    },
    "a library of operators": {
        "config": json.dumps({"backend": "onnxruntime", "model_operations": {"op_library_filename": ["/tmp/operators.so"]}})
    },
    "a file of an accelerator": {
        "config": json.dumps(
            {
                "backend": "onnxruntime",
                "optimization": {
                    "execution_accelerators": {
                        "cpu_execution_accelerator": [{"name": "openvino", "parameters": {"cache_dir": "/tmp"}}]
                    }
                },
            }
        )
    },
}
"""The parameters of loads that need a permission."""
TOKEN = {"Authorization": "Bearer manager"}
KEY = {"admin": "yes"}
PERMISSIONS = {
    "no token": (lambda folder: [], {}, False),
    "a token": (lambda folder: [f"--management-token-file={folder / 'tokens'}"], TOKEN, True),
    "a restricted API": (lambda folder: ["--http-restricted-api=model-repository:admin=yes"], KEY, True),
    "a restricted API of the other protocol": (lambda folder: ["--grpc-restricted-protocol=model-repository:admin=yes"], {}, False),
    "a token for inference": (lambda folder: [f"--inference-token-file={folder / 'tokens'}"], TOKEN, True),
    "the flag": (lambda folder: [FLAG], {}, True),
    "the flag off, with a token": (lambda folder: [f"{FLAG}=false", f"--management-token-file={folder / 'tokens'}"], TOKEN, False),
}
"""The options of a server, the headers of a client, and whether it may bring code."""


def server_with(folder, *options) -> Server:
    """Returns a server that has only these options."""
    (folder / "tokens").write_text("manager\n")
    server = Server(folder, [EXAMPLES], ["--model-control-mode=explicit", *options])
    if FLAG not in options and FLAG in server.command:
        server.command.remove(FLAG)
    return server


def load(server: Server, model: str, parameters: dict, headers=None) -> tuple:
    """Loads a model over HTTP; returns the status and the answer."""
    encoded = {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in parameters.items()
    }
    return server.ask("POST", f"/v2/repository/models/{model}/load", json.dumps({"parameters": encoded}), headers=headers)


@pytest.mark.parametrize("case", PERMISSIONS)
def test_a_permission_is_needed_to_bring_code(tmp_path, case):
    options, headers, permitted = PERMISSIONS[case]
    with server_with(tmp_path, *options(tmp_path)) as server:
        status, answer = load(server, "code", UPLOADS["code"], headers)
        if permitted:
            assert status == 200, answer
            assert load(server, "file", UPLOADS["a file without code"], headers)[0] == 200
        else:
            assert status == 501 and f"{FLAG}=true" in answer, answer
            assert '"code"' not in server.ask("POST", "/v2/repository/index", b"", headers=headers)[1]
        assert load(server, "digits", {}, headers)[0] == 200


def test_everything_that_can_run_code_is_refused_over_both_protocols(tmp_path):
    with server_with(tmp_path) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc)
        for case, parameters in UPLOADS.items():
            status, answer = load(server, "digits", parameters)
            files = {name: value for name, value in parameters.items() if name.startswith("file:")}
            with pytest.raises(InferenceServerException) as refused:
                client.load_model("digits", config=parameters["config"], files=files or None)
            assert status == 501 and json.loads(answer)["error"] == refused.value.message(), case
            assert refused.value.status() == "StatusCode.UNIMPLEMENTED", case
            assert "failed to load 'digits', " in answer and FLAG in answer, case
        assert not client.is_model_ready("digits")
        assert server.workers() == set(), "no process was started for a refused load"
        client.load_model("digits", config=json.dumps({"backend": "onnxruntime", "max_batch_size": 2}))
        assert client.get_model_config("digits", as_json=True)["config"]["max_batch_size"] == 2
        client.close()


PYTHON_MODEL = (
    'backend: "python" max_batch_size: 8 input { name: "A" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "B" data_type: TYPE_FP32 dims: 1 } parameters { key: "token" value { string_value: "x" } }\n'
)


@pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
def test_a_load_that_changes_settings_needs_no_permission(tmp_path):
    """As Model Analyzer in its remote mode does, for a model whose code lies in the repository."""
    models = tmp_path / "models"
    for version in ("1", "2"):
        (models / "code" / version).mkdir(parents=True)
        (models / "code" / version / "model.py").write_text(CODE)
    (models / "code/config.pbtxt").write_text(PYTHON_MODEL)
    with server_with(tmp_path, f"--python={PYTHON}", f"--model-repository={models}") as server:
        assert load(server, "code", {})[0] == 200
        shown = json.loads(server.get("/v2/models/code/config")[1])
        for change in (
            {"instance_group": [{"count": 2, "kind": "KIND_CPU"}]},
            {"version_policy": {"specific": {"versions": [1]}}},
            {"max_batch_size": 4, "dynamic_batching": {"max_queue_delay_microseconds": 100}},
            {"response_cache": {"enable": False}},
        ):
            status, answer = load(server, "code", {"config": json.dumps({**shown, **change})})
            assert status == 200, (change, answer)
        narrowed = {"backend": "python", "version_policy": {"specific": {"versions": [1]}}, "max_batch_size": 8}
        written = {"parameters": {"token": {"string_value": "x"}}, "input": shown["input"], "output": shown["output"]}
        assert load(server, "code", {"config": json.dumps(narrowed | written)})[0] == 200
        versions = {entry["version"]: entry["state"] for entry in server.index()["code"]}
        assert versions["1"] == "READY" and versions.get("2") != "READY", versions
        # What a configuration leaves out is completed from the operator's files.
        assert load(server, "digits", {"config": json.dumps({"max_batch_size": 2})})[0] == 200
        for change, field in (
            ({"backend": "other"}, "backend"),
            ({"default_model_filename": "other.py"}, "default_model_filename"),
            ({"parameters": {}}, "parameters['token']"),
            ({"parameters": {"token": {"string_value": "x"}, "sandbox": {"string_value": "off"}}}, "parameters['sandbox']"),
            (
                {"parameters": {"token": {"string_value": "x"}, "EXECUTION_ENV_PATH": {"string_value": "/tmp/e.tar.gz"}}},
                "parameters['EXECUTION_ENV_PATH']",
            ),
            ({"model_repository_agents": {"agents": [{"name": "checksum"}]}}, "model_repository_agents"),
        ):
            status, answer = load(server, "code", {"config": json.dumps({**shown, **change})})
            assert status == 501 and f"in {field}" in answer and f"{FLAG}=true" in answer, (change, answer)
        status, answer = load(server, "digits", {"config": CONFIG})
        assert status == 501, answer


def test_members_of_ensembles_are_models_of_the_repositories(tmp_path):
    """The name of a member is not a path: a configuration without code must not start the code of another directory."""
    outside = tmp_path / "outside"
    (outside / "1").mkdir(parents=True)
    (outside / "1/model.py").write_text(CODE)
    (outside / "config.pbtxt").write_text(
        'backend: "python"\ninput { name: "A" data_type: TYPE_FP32 dims: 1 }\noutput { name: "B" data_type: TYPE_FP32 dims: 1 }\n'
    )
    with server_with(tmp_path) as server:
        for member in (str(outside), f"digits/../../{outside.name}", "../outside"):
            step = {"model_name": member, "model_version": -1, "input_map": {"A": "X"}, "output_map": {"B": "Y"}}
            tensors = [[{"name": name, "data_type": "TYPE_FP32", "dims": [1]}] for name in "XY"]
            config = {"platform": "ensemble", "input": tensors[0], "output": tensors[1], "ensemble_scheduling": {"step": [step]}}
            status, answer = load(server, "digits", {"config": json.dumps(config)})
            assert status == 400 and "contains models that are not available" in answer, answer
        assert "outside" not in server.ask("POST", "/v2/repository/index", b"")[1]
        assert server.workers() == set()
