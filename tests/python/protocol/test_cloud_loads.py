"""Loads at the endpoints of Amazon SageMaker and Google Vertex AI: too little memory, concurrent loads, loads that fail, files."""

import base64
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.models import IO, copy_models, write
from harness.ports import free_ports
from harness.server import EXAMPLES, Server, total
from harness.waiting import eventually
from protocol.cloud import ENSEMBLE, ENVIRONMENT, PREDICT, Both, MultiModel, options, until_there
from python_backend.worker import PYTHON, has_worker

needs_worker = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")


@contextlib.contextmanager
def sagemaker(folder, *more):
    """Starts this server with a multi-model endpoint and yields both."""
    (folder / "none").mkdir()
    port = free_ports(1)[0]
    flags = ["--allow-sagemaker=true", f"--sagemaker-port={port}", "--model-control-mode=explicit", *more]
    with Server(folder, [folder / "none"], flags) as server:
        yield server, MultiModel(port, folder, False)


def test_a_load_beyond_the_memory_limit_is_507(tmp_path):
    """SageMaker then unloads other models."""
    with sagemaker(tmp_path, "--model-memory-limit=1000") as (_, there):
        url = there.place(copy_models(tmp_path / "all", ["simple"], EXAMPLES), "m")
        status, answer = there.ask("POST", "/models", {"model_name": "m", "url": url})
    assert status == 507 and "not enough memory" in answer["error"], answer


MEMORY = """
class TritonPythonModel:
    def execute(self, requests):
        raise RuntimeError("CUDA out of memory" if requests[0].request_id() == "large" else "broken")
"""


@needs_worker
def test_an_inference_without_memory_is_507(tmp_path):
    """The status of a model of a multi-model endpoint is 507, as in Triton, and counted; other errors have the status of v2."""
    with sagemaker(tmp_path, f"--python={PYTHON}") as (server, there):
        write(tmp_path / "m" / "model", "m", f'backend: "python" max_batch_size: 0 {IO}')
        (tmp_path / "m/model/m/1/model.py").write_text(MEMORY)
        assert there.ask("POST", "/models", {"model_name": "m", "url": str(tmp_path / "m/model")}) == (200, None)
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
        status, answer = there.ask("POST", "/models/m/invoke", body | {"id": "large"})
        assert status == 507 and "CUDA out of memory" in answer["error"], answer
        status, answer = there.ask("POST", "/models/m/invoke", body)
        assert status == 500 and "broken" in answer["error"], answer
        assert total(server.scrape(), "pharos_requests_total", route="infer", code="507") == 1


def test_one_of_two_concurrent_loads_with_an_identifier_is_refused(tmp_path):
    """Otherwise one of the models would remain loaded without an identifier by which it could be unloaded."""
    with sagemaker(tmp_path) as (server, there):
        all_models = copy_models(tmp_path / "all", ["simple"], EXAMPLES)
        urls = {name: there.place(all_models, name) for name in ("a", "b")}
        load = lambda name: there.ask("POST", "/models", {"model_name": "id", "url": urls[name]}, X_Amzn_SageMaker_Target_Model=name)
        with ThreadPoolExecutor(2) as pool:
            answers = dict(zip(urls, pool.map(load, urls)))
        assert sorted(status for status, _ in answers.values()) == [200, 409], answers
        (loaded,) = (name for name, (status, _) in answers.items() if status == 200)
        assert [name for name, entries in server.index().items() if entries[0].get("state") == "READY"] == [loaded]
        assert there.ask("DELETE", "/models/id") == (200, None)
        assert load("b") == (200, None), "the identifier is free"


def test_an_ensemble_that_cannot_be_loaded_leaves_no_members(tmp_path):
    """No identifier refers to the members, so that no request could unload them. A corrected ensemble can be loaded."""
    with sagemaker(tmp_path) as (server, there):
        place = copy_models(tmp_path / "e" / "model", ["identity_fp32"])
        (place / "ensemble" / "1").mkdir(parents=True)
        for key, expected in (("WRONG", 400), ("INPUT0", 200)):
            (place / "ensemble/config.pbtxt").write_text(ENSEMBLE.replace("INPUT0", key))
            status, answer = there.ask("POST", "/models", {"model_name": "e", "url": str(place)})
            assert status == expected, answer
            if expected == 400:
                eventually("no worker is left", lambda: not server.workers())


@needs_worker
def test_the_flag_forbids_directories_of_sagemaker(tmp_path):
    """A request names any directory, whose code runs: `--allow-model-upload=false` refuses it before the directory is read."""
    mark = tmp_path / "it-ran"
    write(tmp_path / "m" / "model", "m", f'backend: "python" max_batch_size: 0 {IO}')
    (tmp_path / "m/model/m/1/model.py").write_text(f"open({str(mark)!r}, 'w').close()\n{MEMORY}")
    with sagemaker(tmp_path, f"--python={PYTHON}", "--allow-model-upload=false") as (server, there):
        status, answer = there.ask("POST", "/models", {"model_name": "m", "url": str(tmp_path / "m/model")})
        assert status == 400 and "is outside of the model repositories and can contain code" in answer["error"], answer
        assert "--allow-model-upload=true" in answer["error"]
        assert not mark.exists() and not server.workers() and "m" not in server.index()


def test_the_flag_permits_uploads_by_vertex_ai(tmp_path):
    """`--allow-model-upload` and a management token permit loads with files at all listeners."""
    ports = free_ports(2)
    models = copy_models(tmp_path / "models", ["simple"], EXAMPLES)
    file = base64.b64encode((EXAMPLES / "digits/1/model.onnx").read_bytes()).decode()
    body = json.dumps({"parameters": {"config": json.dumps({"backend": "onnxruntime"}), "file:1/model.onnx": file}})
    load = {"X_Vertex_Ai_Triton_Redirect": "v2/repository/models/sent/load"}
    for flag, status in (("true", 200), ("false", 501)):
        server = Server(tmp_path, [models], [*options(*ports), "--model-control-mode=explicit", "--load-model=*", f"--allow-model-upload={flag}"])
        server.environment = ENVIRONMENT
        with server:
            both = Both(*ports, False)
            until_there(both)
            got, _, answer = both.ask("vertex_ai", "POST", PREDICT, body, **load)
            assert got == status, answer
