"""`deploy/kserve`: the documents against the models of KServe's SDK, and the command lines of the runtimes against the real
server, with files under `/mnt/models` as KServe's storage initializer writes them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openai
import pytest

from deploy import schemas
from deploy.containers import DEPLOY, EXIT_STEPS_S, Container, documents, flag, one, port
from harness.gguf import write_model
from harness.server import EXAMPLES, ROOT, binary, total
from torchserve import models as archives

RUNTIMES = {document["metadata"]["name"]: document for document in documents(DEPLOY / "kserve/runtimes.yaml")}
FILES = sorted((DEPLOY / "kserve/examples").glob("*.yaml"))
SERVICES = {d["metadata"]["name"]: d for file in FILES for d in documents(file) if d["kind"] == "InferenceService"}
LLM_SERVICE = one([d for file in FILES for d in documents(file)], "LLMInferenceService")
VARIABLES = {"STORAGE_URI": "s3://models/digits", "STORAGE_CONFIG": '{"type": "s3"}'}
"""Variables of the storage initializer, which the server must not interpret."""
HELD_OUT = np.load(ROOT / "examples/digits_held_out.npz")
IMAGES, DIGITS = HELD_OUT["images"][:20].astype(np.float32), HELD_OUT["labels"][:20].astype(int)
"""Images of digits, [20, 8, 8] from 0 to 16, and the digits."""
CONFIG = """enable_envvars_config=true
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
install_py_dep_per_model=true
model_store=/mnt/models/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"archive":{"1.0":{"defaultVersion":true,\
"marName":"archive.mar","minWorkers":1,"maxWorkers":1,"batchSize":1,"maxBatchDelay":10,"responseTimeout":120}}}}
"""
"""The `config.properties` of KServe's documentation."""

LANGUAGE = {"pharos-llamacpp", "pharos-vllm"}
"""The runtimes of language models."""
VLLM_PYTHON = os.environ.get("PHAROS_VLLM_PYTHON", "")

needs_llamacpp = pytest.mark.skipif(
    not (binary().parent / "backends/llamacpp/libpharos_llamacpp.so").is_file(), reason="the backend llamacpp is not built: make llamacpp"
)
needs_kubernetes = pytest.mark.skipif(bool(schemas.missing("kubernetes")), reason=schemas.missing("kubernetes"))
needs_models = pytest.mark.skipif(bool(schemas.missing("kserve")), reason=schemas.missing("kserve"))
needs_worker = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import pharos_worker"], capture_output=True).returncode != 0,
    reason="the package pharos-worker is not installed: make python-worker",
)


def runtime_container(name: str) -> dict:
    """Returns the only container of a runtime."""
    (container,) = RUNTIMES[name]["spec"]["containers"]
    return container


def service_container(service: str) -> dict:
    """Returns the container of a service, as KServe merges it: arguments are appended, and variables are replaced by their names."""
    model = SERVICES[service]["spec"]["predictor"]["model"]
    container = json.loads(json.dumps(runtime_container(model["runtime"])))
    container["args"] += model.get("args", [])
    variables = {entry["name"]: entry for entry in [*container["env"], *model.get("env", [])]}
    container["env"] = list(variables.values())
    return container


def frameworks(name: str):
    """Returns what trains a model of `examples/frameworks` into a folder."""

    def make(folder: Path):
        script = ROOT / "examples/frameworks/make_models.py"
        subprocess.run([sys.executable, script, name, "--into", folder], check=True, capture_output=True, timeout=120)
        for config in (script.parent / name / "models").glob("*/config.pbtxt"):
            shutil.copy(config, folder / config.parent.name)

    return make


def archive(folder: Path):
    """Writes an archive in the layout of KServe's documentation."""
    archives.write(folder / "archive/model-store", "archive", archives.contents("told"))
    (folder / "archive/config").mkdir()
    (folder / "archive/config/config.properties").write_text(CONFIG)


def gguf(folder: Path):
    """Writes a small model under the name of a service's file."""
    write_model(folder / Path(SERVICES["qwen"]["spec"]["predictor"]["model"]["storageUri"]).name)


def examples(folder: Path):
    """Copies the example models, one by one and as a repository."""
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    shutil.copytree(EXAMPLES, folder / "examples")


@pytest.fixture
def serve(tmp_path):
    """Returns a function that starts the container of a service, after `make` has written the store's objects."""
    started = []

    def begin(service: str, make):
        model = SERVICES[service]["spec"]["predictor"]["model"]
        store, mount = tmp_path / "store", tmp_path / f"mnt-{service}"
        if not store.exists():
            store.mkdir()
            make(store)
        # The initializer copies what is below the address of the object store, or the file with this address.
        source = store / model["storageUri"].removeprefix("s3://models/")
        if source.is_file():
            mount.mkdir()
            shutil.copy(source, mount)
        else:
            shutil.copytree(source, mount)
        container = service_container(service)
        running = Container(tmp_path / service, container, mount, service, VARIABLES)
        started.append(running)
        running.launch()
        running.wait_until_ready()
        assert running.probe("livenessProbe") == 200
        return running

    yield begin
    for running in started:
        running.kill()


def predict(server, name: str, instances) -> list:
    """Sends a prediction of the v1 protocol; returns the predictions."""
    status, text = server.ask("POST", f"/v1/models/{name}:predict", json.dumps({"instances": instances}))
    assert status == 200, text
    return json.loads(text)["predictions"]


def infer(server, model: str, name: str, array, datatype="FP32") -> dict:
    """Sends a request of the v2 protocol; returns the data of the outputs."""
    tensor = {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.ravel().tolist()}
    status, answer = server.infer(model, {"inputs": [tensor]})
    assert status == 200, answer
    return {output["name"]: output["data"] for output in answer["outputs"]}


@needs_models
def test_documents_match_the_models_of_the_sdk():
    found = [*RUNTIMES.values(), *(document for file in FILES for document in documents(file) if document != LLM_SERVICE)]
    assert {document["kind"] for document in found} == {"ClusterServingRuntime", "InferenceService", "InferenceGraph"}
    errors = {d["metadata"]["name"]: error for d, error in zip(found, schemas.kserve_errors(found)) if error}
    assert errors == {}


@needs_models
def test_the_models_of_the_sdk_find_unknown_missing_and_wrong_fields():
    cases = [
        (["spec", "predictor", "autoscaling"], {}, "autoscaling"),
        (["spec", "predictor", "model", "storageUrl"], "s3://x", "storageUrl"),
        (["spec"], {}, "predictor"),
        (["spec", "predictor", "minReplicas"], "1", "expected int"),
    ]
    broken = []
    for path, value, _ in cases:
        document = json.loads(json.dumps(SERVICES["digits"]))
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        broken.append(document)
    for (_, _, expected), error in zip(cases, schemas.kserve_errors(broken)):
        assert expected in error


@pytest.mark.parametrize("name", SERVICES)
def test_the_runtime_of_a_service_supports_its_format_and_protocol(name):
    model = SERVICES[name]["spec"]["predictor"]["model"]
    spec = RUNTIMES[model["runtime"]]["spec"]
    assert model["modelFormat"]["name"] in {known["name"] for known in spec["supportedModelFormats"]}
    assert model["protocolVersion"] in spec["protocolVersions"]


def test_services_over_grpc_have_the_port_of_grpc():
    (model,) = [d["spec"]["predictor"]["model"] for d in SERVICES.values() if d["spec"]["predictor"]["model"]["protocolVersion"] == "grpc-v2"]
    container = runtime_container(model["runtime"])
    assert [(entry["name"], entry["containerPort"]) for entry in model["ports"]] == [("h2c", 9000)]
    assert flag(container, "grpc-port") == "9000" and flag(container, "http-port") == "8080"
    assert port(container, container["readinessProbe"]["httpGet"]["port"]) == 8080


def test_the_port_of_scrapes_is_that_of_the_metrics():
    for runtime in RUNTIMES.values():
        scraped = runtime["spec"]["annotations"]["prometheus.kserve.io/port"]
        (container,) = runtime["spec"]["containers"]
        values = {entry["name"]: entry["value"] for entry in container["env"]}
        address = values.get("TS_METRICS_ADDRESS", f"http://0.0.0.0:{flag(container, 'metrics-port')}")
        assert address == f"http://0.0.0.0:{scraped}"


def test_a_model_directory_has_the_name_of_its_service(serve):
    """The name in its config.pbtxt does not matter. Both protocols serve it."""
    server = serve("digits-v1", examples)
    found = [row["label"][0] for row in predict(server, "digits-v1", IMAGES.tolist())]
    assert np.mean(np.array(found) == DIGITS) > 0.9
    assert infer(server, "digits-v1", "image", IMAGES)["label"] == found
    assert server.get("/metrics", server.metrics)[0] == 200


def test_a_bare_file_is_served(tmp_path):
    """The initializer copies one file if the address names one."""
    mount = tmp_path / "mnt"
    mount.mkdir()
    shutil.copy(EXAMPLES / "digits/1/model.onnx", mount / "model.onnx")
    with Container(tmp_path, runtime_container("pharos"), mount, "bare", VARIABLES) as server:
        # A file without a configuration gets a maximum batch size of 4.
        assert np.mean(np.array(infer(server, "bare", "image", IMAGES[:4])["label"]) == DIGITS[:4]) > 0.7


def test_a_repository_keeps_the_names_of_its_models(serve):
    server = serve("digits-pipeline", examples)
    assert {"digits", "digits_pipeline", "digits_preprocess"} <= set(server.index())
    picture = np.full((1, 64, 64), 255)
    assert set(infer(server, "digits_pipeline", "picture", picture, "UINT8")) >= {"digit", "confidence"}


@needs_worker
def test_a_bare_joblib_file_is_served(serve):
    server = serve("digits-sklearn", frameworks("sklearn"))
    found = [row["predict"][0] for row in predict(server, "digits-sklearn", IMAGES.reshape(-1, 64).tolist())]
    assert np.mean(np.array(found) == DIGITS) > 0.9


@needs_worker
def test_an_xgboost_directory_is_served(serve):
    server = serve("digits-xgboost", frameworks("xgboost"))
    outputs = infer(server, "digits-xgboost", "input", IMAGES.reshape(-1, 64))
    assert np.mean(np.array(outputs["predict"]).reshape(-1, 10).argmax(axis=1) == DIGITS) > 0.9


@needs_worker
def test_archives_of_torchserve_are_served(serve):
    server = serve("archive", archive)
    status, text = server.ask("POST", "/predictions/archive", b'{"do": "about"}', headers={"Content-Type": "application/json"})
    assert (status, json.loads(text)["batch"]) == (200, 1), text
    assert json.loads(server.get("/v2/models/archive")[1])["platform"] == "torchserve"
    assert total(server.scrape(), "nv_inference_count", model="archive") == 1, "pod_monitor.yaml scrapes the metrics"


def chat(server, base: str, model: str) -> str:
    """Sends a chat with OpenAI's client; returns the text of the answer."""
    with openai.OpenAI(base_url=f"http://{server.http}{base}", api_key="none", max_retries=0, timeout=120) as client:
        assert model in [entry.id for entry in client.models.list().data]
        messages = [{"role": "user", "content": "hi"}]
        return client.chat.completions.create(model=model, messages=messages, max_tokens=8).choices[0].message.content


@needs_llamacpp
def test_a_gguf_file_is_served_over_the_api_of_openai(serve):
    """Its model has the name of the service, below both prefixes, and its metrics are those that autoscalers read."""
    server = serve("qwen", gguf)
    assert [chat(server, base, "qwen").strip() for base in ("/openai/v1", "/v1")] == ["hello world"] * 2
    assert server.probe("startupProbe") == 200
    assert total(server.scrape(), "pharos_llm_generation_tokens_total", model="qwen") == 6


def test_the_script_of_vllm_makes_a_model_of_the_files(tmp_path):
    """The layout of Triton's vllm_backend, in which the arguments of the service extend those of the runtime. Without vLLM, the server
    says that it is missing, and ends."""
    mount = tmp_path / "mnt"
    mount.mkdir()
    server = Container(tmp_path / "run", service_container("qwen-vllm"), mount, "qwen-vllm")
    # Without the packages of the user.
    server.environment["PYTHONNOUSERSITE"] = "1"
    server.launch()
    try:
        assert server.process.wait(60) == 1
    finally:
        server.kill()
    folder = tmp_path / "run/repository/qwen-vllm"
    assert json.loads((folder / "1/model.json").read_text()) == {"model": str(mount), "max_model_len": 8192, "max_num_seqs": 64}
    assert "vllm" in server.log_tail() and "qwen-vllm" in server.log_tail()


@pytest.mark.skipif(not VLLM_PYTHON, reason="PHAROS_VLLM_PYTHON names no interpreter with vLLM: `make test-vllm` installs it (6 GB)")
@pytest.mark.timeout(600)
def test_a_directory_of_hugging_face_is_served(tmp_path):
    """With a real vLLM on CPUs and random weights."""
    mount = tmp_path / "mnt"
    subprocess.run([VLLM_PYTHON, ROOT / "tests/vllm/tiny.py", mount], check=True, capture_output=True, timeout=120)
    own = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
    variables = {"ENGINE_ARGUMENTS": json.dumps(own), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with Container(tmp_path / "run", service_container("qwen-vllm"), mount, "qwen-vllm", variables, VLLM_PYTHON) as server:
        assert chat(server, "/openai/v1", "qwen-vllm")
        assert server.probe("livenessProbe") == 200


@needs_kubernetes
@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_the_template_of_an_llm_inference_service_is_a_pod(version):
    """The SDK has no models of the other fields."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "labels": LLM_SERVICE["spec"]["labels"]}}
    assert schemas.kubernetes_errors([pod | {"spec": LLM_SERVICE["spec"]["template"]}], version) == [""]
    assert set(LLM_SERVICE["spec"]) <= {"model", "replicas", "labels", "router", "template"}


@needs_llamacpp
def test_the_container_of_an_llm_inference_service_answers(tmp_path):
    """The route of KServe removes the prefix of its paths, so that requests arrive at /v1 of port 8000."""
    spec = LLM_SERVICE["spec"]
    (container,) = spec["template"]["containers"]
    mount = tmp_path / "mnt"
    mount.mkdir()
    write_model(mount / Path(spec["model"]["uri"]).name)
    assert (flag(container, "http-port"), port(container, "http"), container["name"]) == ("8000", 8000, "main")
    with Container(tmp_path / "run", container, mount) as server:
        assert chat(server, "/v1", spec["model"]["name"]).strip() == "hello world"
        assert [server.probe(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")] == [200] * 3
    steps = float(flag(container, "exit-delay-secs")) + float(flag(container, "exit-timeout-secs"))
    assert steps + EXIT_STEPS_S <= spec["template"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", sorted(LANGUAGE))
def test_engines_may_take_long_to_load(name):
    """Ready says that the model is loaded. The liveness probe must not end the container before."""
    container = runtime_container(name)
    startup, readiness = container["startupProbe"], container["readinessProbe"]
    assert startup["httpGet"] == readiness["httpGet"] and startup["httpGet"]["path"] == "/v2/health/ready"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900


def test_answers_have_time_when_a_pod_ends():
    """The grace period of the services of language models covers every step of the exit."""
    found = {name: d["spec"]["predictor"] for name, d in SERVICES.items() if d["spec"]["predictor"]["model"]["runtime"] in LANGUAGE}
    assert len(found) == len(LANGUAGE)
    for name, predictor in found.items():
        container = service_container(name)
        steps = float(flag(container, "exit-delay-secs")) + float(flag(container, "exit-timeout-secs"))
        assert steps > 100 and steps + EXIT_STEPS_S <= predictor["terminationGracePeriodSeconds"]
        assert SERVICES[name]["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == "RawDeployment"


def test_archives_may_take_long_to_unpack_and_install():
    """The ports open afterwards. The liveness probe must not end the container before: pip alone may take ten minutes."""
    container = runtime_container("pharos-torchserve")
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    assert startup["httpGet"] == liveness["httpGet"] and startup["periodSeconds"] * startup["failureThreshold"] > 600


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_exit_leaves_time_for_its_last_steps(name):
    """KServe's pods get the 30 s of Kubernetes, unless a service sets more."""
    container = runtime_container(name)
    assert float(flag(container, "exit-delay-secs")) + float(flag(container, "exit-timeout-secs")) <= 20


def test_the_graph_passes_predictions_on_as_instances(serve):
    """Sends the requests of the router of an InferenceGraph: a sequence with `mapPredictionsToInstances`."""
    graph = one(documents(DEPLOY / "kserve/examples/graph.yaml"), "InferenceGraph")
    instances = np.full((2, 64, 64), 255).tolist()
    for step in graph["spec"]["nodes"]["root"]["steps"]:
        if step.get("data") == "$response":
            assert step["mapPredictionsToInstances"]
        instances = predict(serve(step["serviceName"], examples), step["serviceName"], instances)
    assert [set(row) for row in instances] == [{"label", "probabilities"}] * 2
