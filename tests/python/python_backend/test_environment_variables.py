"""The environment variables of an operator in the processes of models."""

import json
import os

import numpy as np
import pytest
import tritonclient.http

from harness.models import write
from harness.server import Server
from torchserve.home import PYTHON, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")

CONFIG = """backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
MODEL = """import json, os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        seen = np.array([json.dumps(dict(os.environ))], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", seen)]) for _ in requests]
"""
OWN = {
    "OMP_NUM_THREADS": "1",
    "OMP_PROC_BIND": "true",
    "MKL_NUM_THREADS": "3",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
}
OTHERS = {"MODEL_DIR": "/m", "MY_SETTING": "1", "HF_TOKEN": "t"}


@pytest.mark.parametrize(
    "options",
    [[], ["--worker-fork=false"], ["--worker-sandbox=auto"], ["--worker-threads=2"], ["--worker-hidden-variables=OMP_NUM_.*"]],
    ids=["copies", "programs", "sandbox", "threads", "hidden"],
)
def test_variables_of_the_operator_reach_models(tmp_path, options):
    """As in Triton. The server's values are defaults. Variables that belong to no library are passed by name only."""
    write(tmp_path / "models", "env", CONFIG)
    (tmp_path / "models/env/1/model.py").write_text(MODEL)
    server = Server(tmp_path, [tmp_path / "models"], options)
    server.environment = OWN | OTHERS | {"PHAROS_PYTHON": PYTHON}
    with server, tritonclient.http.InferenceServerClient(server.http) as client:
        tensor = tritonclient.http.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.array([1], np.int32))
        seen = json.loads(client.infer("env", [tensor]).as_numpy("OUT").item())
    expected = dict(OWN)
    if options == ["--worker-hidden-variables=OMP_NUM_.*"]:
        expected["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    assert {name: value for name, value in seen.items() if name in OWN} == expected
    assert not set(OTHERS) & set(seen)
