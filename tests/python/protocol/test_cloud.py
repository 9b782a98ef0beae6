"""The endpoints of Amazon SageMaker and Google Vertex AI. Sends the same requests to this server and to a real Triton and expects
the same answers from both; the rows for Triton list the intended differences."""

import json
import shutil

import numpy as np
import pytest

from harness import triton_repository
from harness.models import copy_models
from harness.peers import Triton, missing
from harness.ports import free_ports
from harness.server import EXAMPLES, MODELS, Server, total
from harness.waiting import eventually
from protocol.cloud import ENSEMBLE, ENVIRONMENT, HEALTH, PREDICT, Both, MultiModel, is_there, options, until_there

SAGEMAKER = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
ROW = list(range(16))
REQUEST = json.dumps(
    {"id": "1", "inputs": [{"name": f"INPUT{n}", "datatype": "INT32", "shape": [1, 16], "data": ROW} for n in (0, 1)]}
)


def binary_request() -> tuple:
    """Returns a request with binary data that requests binary output: the body and the length of its JSON."""
    data = np.arange(16, dtype=np.int32).tobytes()
    inputs = [
        {"name": f"INPUT{n}", "datatype": "INT32", "shape": [1, 16], "parameters": {"binary_data_size": len(data)}}
        for n in (0, 1)
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + data + data, len(head)


@pytest.fixture(scope="module", params=["pharos", "triton"])
def both(request, tmp_path_factory):
    """This server, and the peer if it is installed."""
    folder = tmp_path_factory.mktemp("cloud")
    ports = free_ports(2)
    if request.param == "triton":
        if reason := missing("triton", "triton"):
            pytest.skip(reason)
        models = triton_repository.build(folder / "all")
        shutil.copytree(models / "simple", folder / "models" / "simple")
        peer = Triton(folder / "models", folder / "log", ENVIRONMENT, options(*ports))
        peer.ensure()
        here = Both(*ports, True)
        until_there(here)
        yield here
        peer.stop()
        return
    models = copy_models(folder / "models", ["simple"], EXAMPLES)
    server = Server(folder, [models], options(*ports))
    server.environment = ENVIRONMENT
    with server:
        here = Both(*ports, False)
        until_there(here)
        yield here


def doubled(body: bytes) -> bool:
    """Returns whether a JSON answer has the sum of both inputs."""
    return json.loads(body)["outputs"][0]["data"] == [2 * value for value in ROW]


def test_health(both):
    """`/ping` and Vertex AI's health route answer."""
    assert both.ask("sagemaker", "GET", "/ping")[0] == 200
    assert both.ask("vertex_ai", "GET", HEALTH)[0] == 200
    assert both.ask("sagemaker", "POST", "/ping", "{}")[0] == 405


@pytest.mark.parametrize("where, path", [("sagemaker", "/invocations"), ("vertex_ai", PREDICT)])
def test_inference_in_json(both, where, path):
    """Bodies have the format of v2."""
    status, content_type, body = both.ask(where, "POST", path, REQUEST, Content_Type="application/json")
    assert (status, content_type) == (200, "application/json")
    assert doubled(body) and json.loads(body)["model_name"] == "simple"
    status, content_type, body = both.ask(where, "POST", path, '{"inputs": []}')
    assert (status, content_type, list(json.loads(body))) == (400, "application/json", ["error"])
    assert both.ask(where, "GET", path)[0] == 405


@pytest.mark.parametrize("where, path, media_type", [("sagemaker", "/invocations", SAGEMAKER), ("vertex_ai", PREDICT, VERTEX_AI)])
def test_inference_in_binary(both, where, path, media_type):
    """The length of the JSON is in the content type of requests and of SageMaker's answers; Vertex AI's answers use the header of
    v2."""
    body, length = binary_request()
    status, content_type, answer = both.ask(where, "POST", path, body, Content_Type=f"{media_type}{length}")
    assert status == 200, answer
    if where == "sagemaker":
        assert content_type.startswith(media_type) and both.length is None
        head = int(content_type.removeprefix(media_type))
    else:
        assert content_type == "application/octet-stream"
        head = int(both.length)
    sums = np.frombuffer(answer[head : head + 64], np.int32)
    assert sums.tolist() == [2 * value for value in ROW]
    assert len(answer) == head + 128
    json.loads(answer[:head])
    for wrong in (f"text/plain; {media_type}{length}", f"{media_type}{len(body) + 1}", f"{media_type}-1"):
        status, _, answer = both.ask(where, "POST", path, body, Content_Type=wrong)
        assert (status, list(json.loads(answer))) == (400, ["error"])


@pytest.mark.parametrize(
    "redirect, status, fragment",
    [
        ("v2", 200, b'"extensions"'),
        ("v2/health/ready", 200, b""),
        ("v2/models/simple", 200, b'"INPUT0"'),
        ("v2/models/simple/versions/1/config", 200, b'"max_batch_size"'),
        ("v2/models/simple/stats", 200, b'"model_stats"'),
        ("v2/models/stats", 200, b'"model_stats"'),
        ("v2/models/simple/infer", 200, b'"OUTPUT0"'),
        ("v2/repository/index", 200, b'"simple"'),
        ("v2/systemsharedmemory/status", 200, b"["),
        ("metrics", 200, b"nv_inference_request_success"),
        ("v2/nothing", 400, b""),
        ("other", 400, b""),
        ("", 400, b""),
    ],
)
def test_redirections(both, redirect, status, fragment):
    """The header selects a v2 path, which determines the method."""
    body = REQUEST if "infer" in redirect else ""
    got, _, answer = both.ask("vertex_ai", "POST", PREDICT, body, X_Vertex_Ai_Triton_Redirect=redirect)
    assert got == status, answer
    assert fragment in answer
    assert both.ask("vertex_ai", "GET", PREDICT, X_Vertex_Ai_Triton_Redirect="v2")[0] == 405


@pytest.mark.parametrize(
    "where, path", [("sagemaker", "/"), ("sagemaker", "/v2"), ("sagemaker", "/ping/"), ("vertex_ai", "/"), ("vertex_ai", "/v2")]
)
def test_nothing_else_is_there(both, where, path):
    """Other paths get 400, as in Triton; so do v2 paths."""
    assert both.ask(where, "GET", path)[0] == 400


def test_tokens_and_metrics(tmp_path):
    """The access checks and the counters are those of v2."""
    tokens = tmp_path / "tokens"
    tokens.write_text("infer-1\n")
    management = tmp_path / "management"
    management.write_text("admin-1\n")
    ports = free_ports(2)
    files = [f"--inference-token-file={tokens}", f"--management-token-file={management}"]
    server = Server(tmp_path, [copy_models(tmp_path / "models", ["simple"], EXAMPLES)], [*options(*ports), *files])
    server.environment = ENVIRONMENT
    infer, admin = {"Authorization": "Bearer infer-1"}, {"Authorization": "Bearer admin-1"}
    with server:
        both = Both(*ports, False)
        until_there(both)
        for where, path in [("sagemaker", "/invocations"), ("vertex_ai", PREDICT)]:
            assert both.ask(where, "POST", path, REQUEST)[0] == 401
            assert both.ask(where, "POST", path, REQUEST, **infer)[0] == 200
        index = {"X_Vertex_Ai_Triton_Redirect": "v2/repository/index"}
        assert both.ask("vertex_ai", "POST", PREDICT, "", **index, **infer)[0] == 403
        assert both.ask("vertex_ai", "POST", PREDICT, "", **index, **admin)[0] == 200
        assert both.ask("vertex_ai", "POST", PREDICT, "", X_Vertex_Ai_Triton_Redirect="metrics")[0] == 401
        assert both.ask("sagemaker", "GET", "/ping")[0] == 200
        scraped = server.scrape()
        assert total(scraped, "pharos_requests_total", route="infer", code="200") == 2
        assert total(scraped, "pharos_requests_total", route="infer", code="401") == 2


ONLY = "Expect the model repository contains only a single model if default model is not specified"


@pytest.mark.parametrize("which", ["pharos", "triton"])
@pytest.mark.parametrize(
    "models, default, refusal",
    [
        (["identity_fp32"], [], ""),
        (["identity_fp32", "simple"], [], ONLY),
        (["identity_fp32", "simple"], ["--vertex-ai-default-model=identity_fp32"], ""),
        (["simple"], ["--vertex-ai-default-model=identity_fp32"], "Expect the default model 'identity_fp32' is loaded"),
    ],
)
def test_the_default_model_of_vertex_ai(tmp_path, which, models, default, refusal):
    """Without the flag the only model is the default. The server exits at the start if there are several models or if the
    default model is not loaded."""
    ports = free_ports(1)
    flags = ["--allow-vertex-ai=true", f"--vertex-ai-port={ports[0]}", *default]
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    if which == "triton":
        if reason := missing("triton", "triton"):
            pytest.skip(reason)
        everything = triton_repository.build(tmp_path / "all")
        for model in models:
            shutil.copytree(everything / model, tmp_path / "models" / model)
        server = Triton(tmp_path / "models", tmp_path / "log", ENVIRONMENT, flags)
    else:
        for source in (MODELS, EXAMPLES):
            copy_models(tmp_path / "models", models, source)
        server = Server(tmp_path, [tmp_path / "models"], flags)
        server.environment = ENVIRONMENT
    server.launch()
    there = Both(ports[0], ports[0], which == "triton")
    try:
        if refusal:
            eventually("the server ends", lambda: server.process.poll() is not None, deadline_s=120)
            log = server.log if which == "triton" else server.log_path
            assert server.process.returncode != 0 and refusal in log.read_text()
            return
        eventually("the endpoint answers", lambda: is_there(there, "vertex_ai", HEALTH), deadline_s=120)
        status, _, answer = there.ask("vertex_ai", "POST", PREDICT, json.dumps(body))
        assert (status, json.loads(answer).get("model_name")) == (200, "identity_fp32"), answer
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.mark.parametrize("absent", ["AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"])
def test_vertex_ai_needs_its_routes(tmp_path, absent):
    """Without its routes the server does not start and reports the missing one."""
    flags = ["--allow-vertex-ai=true", f"--vertex-ai-port={free_ports(1)[0]}"]
    server = Server(tmp_path, [copy_models(tmp_path / "models", ["identity_fp32"])], flags)
    server.environment = {key: value for key, value in ENVIRONMENT.items() if key != absent}
    server.launch()
    eventually("the server ends", lambda: server.process.poll() is not None)
    assert server.process.returncode != 0
    assert f"{absent} is not defined for Vertex AI endpoint" in server.log_tail()


@pytest.fixture(params=["pharos", "triton"])
def multi_model(request, tmp_path):
    """This server and the peer, without models; the directory `all` has some."""
    (tmp_path / "none").mkdir()
    port = free_ports(1)[0]
    flags = ["--allow-sagemaker=true", f"--sagemaker-port={port}", "--model-control-mode=explicit"]
    environment = {"SAGEMAKER_MULTI_MODEL": "true"}
    there = MultiModel(port, tmp_path, request.param == "triton")
    if request.param == "triton":
        if reason := missing("triton", "triton"):
            pytest.skip(reason)
        triton_repository.build(tmp_path / "all")
        peer = Triton(tmp_path / "none", tmp_path / "log", environment, flags)
        peer.ensure()
        eventually("the peer's endpoints answer", lambda: is_there(there.endpoint, "sagemaker", "/ping"))
        yield there
        peer.stop()
        return
    copy_models(tmp_path / "all", ["simple"], EXAMPLES)
    copy_models(tmp_path / "all", ["identity_fp32"])
    server = Server(tmp_path, [tmp_path / "none"], flags)
    server.environment = environment
    with server:
        yield there


def test_models_are_loaded_invoked_and_unloaded(multi_model):
    """The identifier in a load request refers to the model until it is unloaded."""
    ask, url = multi_model.ask, multi_model.place(multi_model.folder / "all", "abc")
    load = {"model_name": "abc", "url": url}
    assert ask("GET", "/models") == (200, {"models": []})
    for method, path in [("GET", "/models/abc"), ("DELETE", "/models/abc"), ("POST", "/models/abc/invoke")]:
        assert ask(method, path, REQUEST if method == "POST" else None)[0] == 404
    assert ask("PUT", "/models")[0] == 400
    assert ask("POST", "/models", load) == (200, None)
    assert ask("POST", "/models", load)[0] == 409
    described = {"modelName": "abc", "modelUrl": url}
    assert ask("GET", "/models") == (200, {"models": [described]})
    assert ask("GET", "/models/abc") == (200, described)
    assert ask("GET", "/models/simple")[0] == 404
    status, answer = ask("POST", "/models/abc/invoke", REQUEST)
    assert (status, answer["model_name"]) == (200, "abc") and doubled(json.dumps(answer))
    assert ask("POST", "/models/abc/invoke", '{"inputs": []}')[0] == 400
    assert ask("DELETE", "/models/abc") == (200, None)
    assert ask("GET", "/models/abc")[0] == 404
    assert ask("GET", "/models") == (200, {"models": []})
    assert ask("POST", "/models", load) == (200, None)


def test_the_target_model_names_the_model(multi_model):
    """SageMaker's header has the name of the archive; the body has a hash."""
    url, target = multi_model.place(multi_model.folder / "all", "hash"), {"X_Amzn_SageMaker_Target_Model": "m.tar.gz"}
    assert multi_model.ask("POST", "/models", {"model_name": "hash", "url": url}, **target) == (200, None)
    status, answer = multi_model.ask("POST", "/models/hash/invoke", REQUEST, **target)
    assert (status, answer["model_name"]) == (200, "m.tar.gz")
    assert multi_model.ask("GET", "/models/hash") == (200, {"modelName": "hash", "modelUrl": url})
    assert multi_model.ask("DELETE", "/models/hash", **target) == (200, None)
    assert multi_model.ask("POST", "/models/hash/invoke", REQUEST, **target)[0] == 404


def test_an_ensemble_is_loaded_with_its_members(multi_model):
    """The identifier refers to the ensemble; its members keep their names and are unloaded with it."""
    place = multi_model.folder / "e" / "model"
    shutil.copytree(multi_model.folder / "all" / "identity_fp32", place / "identity_fp32")
    (place / "ensemble" / "1").mkdir(parents=True)
    (place / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]})
    for _ in range(2):
        assert multi_model.ask("POST", "/models", {"model_name": "e", "url": str(place)}) == (200, None)
        status, answer = multi_model.ask("POST", "/models/e/invoke", body)
        assert (status, answer["model_name"], answer["outputs"][0]["data"]) == (200, "e", [1, 2])
        assert multi_model.ask("GET", "/models/identity_fp32")[0] == 404
        assert multi_model.ask("DELETE", "/models/e") == (200, None)


def test_what_cannot_be_loaded_is_refused(multi_model):
    """The status is 400, and another directory can then be loaded under the same identifier. Triton crashes for other bodies."""
    (multi_model.folder / "empty").mkdir()
    for place in ("empty", "nowhere"):
        status, answer = multi_model.ask("POST", "/models", {"model_name": "m", "url": str(multi_model.folder / place)})
        assert (status, list(answer)) == (400, ["error"])
    if not multi_model.endpoint.real:
        for body in ("{", "[]", "", {"model_name": "m"}, {"model_name": 1, "url": "/tmp"}, {"model_name": "m", "url": "/proc/self"}):
            status, answer = multi_model.ask("POST", "/models", body)
            assert (status, list(answer)) == (400, ["error"])
    url = multi_model.place(multi_model.folder / "all", "m")
    assert multi_model.ask("POST", "/models", {"model_name": "m", "url": url}) == (200, None)


def test_the_management_of_models_needs_its_token(tmp_path):
    """Listing, loads and unloads require the management token. A load requires `--model-control-mode=explicit`."""
    management = tmp_path / "management"
    management.write_text("admin-1\n")
    inference = tmp_path / "inference"
    inference.write_text("infer-1\n")
    port = free_ports(1)[0]
    flags = ["--allow-sagemaker=true", f"--sagemaker-port={port}", "--model-control-mode=explicit"]
    tokens = [f"--management-token-file={management}", f"--inference-token-file={inference}"]
    infer, admin = {"Authorization": "Bearer infer-1"}, {"Authorization": "Bearer admin-1"}
    (tmp_path / "none").mkdir()
    there = MultiModel(port, tmp_path, False)
    url = there.place(copy_models(tmp_path / "all", ["simple"], EXAMPLES), "m")
    load = {"model_name": "m", "url": url}
    with Server(tmp_path, [tmp_path / "none"], [*flags, *tokens]):
        assert there.ask("POST", "/models", load)[0] == 401
        assert there.ask("POST", "/models", load, **infer)[0] == 403
        assert there.ask("POST", "/models", load, **admin)[0] == 200
        assert there.ask("GET", "/models", **infer)[0] == 403
        assert there.ask("DELETE", "/models/m", **infer)[0] == 403
        assert there.ask("POST", "/models/m/invoke", REQUEST)[0] == 401
        assert there.ask("POST", "/models/none/invoke", REQUEST)[0] == 401
        assert there.ask("POST", "/models/m/invoke", REQUEST, **infer)[0] == 200
        assert there.ask("DELETE", "/models/m", **admin)[0] == 200
    with Server(tmp_path, [tmp_path / "none"], flags[:2]):
        status, answer = there.ask("POST", "/models", load)
        assert status == 400 and "--model-control-mode=explicit" in answer["error"]
