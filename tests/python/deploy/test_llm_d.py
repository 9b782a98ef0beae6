"""`deploy/kubernetes/llm-d`: the pool and the route fit the pods of the overlay, and the endpoint picker finds each metric in a scrape of
a real server with a real engine."""

import re

import pytest
import yaml

from deploy import schemas
from deploy.containers import DEPLOY, documents, kubectl_missing, one, rendered
from harness.gguf import write_model
from harness.server import Server, binary

FOLDER = DEPLOY / "kubernetes/llm-d"
OVERLAY = "kubernetes/overlays/language-models"
LIBRARY = binary().parent / "backends/llamacpp/libpharos_llamacpp.so"
needs_llamacpp = pytest.mark.skipif(not LIBRARY.is_file(), reason=f"{LIBRARY} is not built: `make llamacpp` builds it")
needs_kubectl = pytest.mark.skipif(bool(kubectl_missing()), reason=kubectl_missing())
PLUGINS = {plugin["type"]: plugin.get("parameters", {}) for plugin in yaml.safe_load((FOLDER / "endpoint_picker.yaml").read_text())["plugins"]}
ENGINES = {engine["name"]: engine for engine in PLUGINS["core-metrics-extractor"]["engineConfigs"]}
SPECS = ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with one language model in one instance."""
    folder = tmp_path_factory.mktemp("llm-d")
    (folder / "models/tiny/1").mkdir(parents=True)
    write_model(folder / "models/tiny/1/model.gguf")
    with Server(folder, [folder / "models"]) as running:
        yield running


def first(scrape: str, name: str) -> list:
    """Returns the series of a metric in the order of a scrape: the picker reads the first."""
    return re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? .*$", scrape, re.M)


@needs_kubectl
def test_the_pool_selects_the_pods_of_the_overlay():
    pool = one(documents(FOLDER / "inference_pool.yaml"), "InferencePool")["spec"]
    assert set(pool) == {"selector", "targetPorts", "endpointPickerRef"}
    template = one(rendered(OVERLAY), "Deployment")["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {entry["name"]: entry["containerPort"] for entry in template["spec"]["containers"][0]["ports"]}
    assert pool["targetPorts"] == [{"number": ports["http"]}]
    engine = template["metadata"]["labels"][PLUGINS["core-metrics-extractor"]["engineLabelKey"]]
    assert engine in ENGINES and PLUGINS["core-metrics-extractor"]["defaultEngine"] in ENGINES


@pytest.mark.skipif(bool(schemas.missing("models")), reason=schemas.missing("models"))
def test_the_route_leads_to_the_pool(tmp_path):
    found = documents(FOLDER / "inference_pool.yaml")
    route, pool = one(found, "HTTPRoute"), one(found, "InferencePool")
    assert schemas.model_errors([route]) == [""] and schemas.unknown_field_errors([route], tmp_path) == ""
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"], backend["group"]) == ("InferencePool", pool["metadata"]["name"], pool["apiVersion"].partition("/")[0])
    assert route["metadata"]["namespace"] == pool["metadata"]["namespace"]


def test_each_plugin_of_the_profile_is_defined():
    configuration = yaml.safe_load((FOLDER / "endpoint_picker.yaml").read_text())
    for profile in configuration["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= set(PLUGINS)


def test_the_source_parses_what_the_extractor_reads():
    """A family that is not listed would not be found."""
    read = {engine[spec] for engine in ENGINES.values() for spec in SPECS} - {""}
    assert set(PLUGINS["metrics-data-source"]["families"]) == read


@needs_llamacpp
@pytest.mark.parametrize("engine", ENGINES)
def test_a_scrape_has_one_series_of_each_metric(server, engine):
    """A second one would be ignored."""
    status, scrape = server.get(PLUGINS["metrics-data-source"]["path"], server.metrics)
    assert status == 200
    for spec in SPECS:
        if name := ENGINES[engine][spec]:
            assert len(first(scrape, name)) == 1 and f"# TYPE {name} gauge" in scrape, name
