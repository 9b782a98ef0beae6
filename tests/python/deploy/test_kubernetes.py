"""`deploy/kubernetes`: the documents against the schemas of their kinds, their references to each other, and the container's
command line with its probes against the real server."""

import importlib.util
import json
import re
import signal
import time

import pytest

from deploy import schemas
from deploy.containers import DEPLOY, EXIT_STEPS_S, Container, default, documents, flag, kubectl_missing, one, port, rendered
from harness.prometheus import RULES, missing, promtool
from harness.server import EXAMPLES, ROOT
from harness.waiting import eventually, holds_for

KUSTOMIZATIONS = ["kubernetes/base", "kubernetes/overlays/production", "kubernetes/overlays/gpu", "kubernetes/overlays/language-models"]
SCALED = KUSTOMIZATIONS[2:]
"""The overlays with KEDA."""
OTHER_KINDS = ("keda.sh/", "monitoring.coreos.com/")
NAME = {"app.kubernetes.io/name": "pharos"}
pytestmark = pytest.mark.skipif(bool(kubectl_missing()), reason=kubectl_missing())


def needs(name: str):
    """Skips a test without the packages of a set."""
    return pytest.mark.skipif(bool(schemas.missing(name)), reason=schemas.missing(name))


def is_kubernetes(document: dict) -> bool:
    """Returns whether a document has a kind of Kubernetes itself."""
    return not document["apiVersion"].startswith(OTHER_KINDS)


def deployment(folder: str) -> dict:
    """Returns the Deployment of a Kustomize folder."""
    return one(rendered(folder), "Deployment")


def container(folder: str = "kubernetes/base") -> dict:
    """Returns the only container of the Deployment."""
    (found,) = deployment(folder)["spec"]["template"]["spec"]["containers"]
    return found


@needs("kubernetes")
@pytest.mark.parametrize("version", schemas.VERSIONS)
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_documents_of_kubernetes_match_their_schemas(folder, version):
    found = [document for document in rendered(folder) if is_kubernetes(document)]
    assert {"Deployment", "Service", "PodDisruptionBudget", "PersistentVolumeClaim"} <= {d["kind"] for d in found}
    assert [error for error in schemas.kubernetes_errors(found, version) if error] == []


@needs("kubernetes")
def test_the_schemas_of_kubernetes_find_an_unknown_field():
    broken = json.loads(json.dumps(deployment("kubernetes/base")))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    (error,) = schemas.kubernetes_errors([broken], schemas.VERSIONS[0])
    assert "readinesProbe" in error


@needs("models")
@pytest.mark.parametrize("folder", KUSTOMIZATIONS[1:])
def test_documents_of_operators_match_their_models(folder, tmp_path):
    found = [document for document in rendered(folder) if not is_kubernetes(document)]
    kinds = sorted(document["kind"] for document in found)
    scaled = ["ScaledObject"] if folder in SCALED else []
    assert kinds == ["PodMonitor", "PrometheusRule", "PrometheusRule", *scaled]
    assert [error for error in schemas.model_errors(found) if error] == []
    assert schemas.unknown_field_errors(found, tmp_path) == ""


@needs("models")
def test_the_models_of_operators_find_wrong_and_unknown_fields(tmp_path):
    scaled = json.loads(json.dumps(one(rendered("kubernetes/overlays/gpu"), "ScaledObject")))
    scaled["spec"]["polingInterval"] = 1
    assert "polingInterval" in schemas.unknown_field_errors([scaled], tmp_path)
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 4
    assert "must be string" in schemas.model_errors([scaled])[0]


def test_rules_and_dashboards_are_those_of_grafana():
    """The PrometheusRules have the groups of `grafana/rules`, and each dashboard has a ConfigMap."""
    spec = importlib.util.spec_from_file_location("prometheus_rules", DEPLOY / "kubernetes/prometheus_rules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.WRITTEN.read_text() == module.whole(), "run deploy/kubernetes/prometheus_rules.py"
    found = rendered("kubernetes/overlays/production")
    groups = [group for d in found if d["kind"] == "PrometheusRule" for group in d["spec"]["groups"]]
    assert groups == [group for path in RULES for group in documents(path)[0]["groups"]]
    maps = [document for document in found if document["kind"] == "ConfigMap"]
    assert all(document["metadata"]["labels"]["grafana_dashboard"] == "1" for document in maps)
    boards = {name: text for document in maps for name, text in document["data"].items()}
    assert boards == {path.name: path.read_text() for path in (ROOT / "grafana/dashboards").glob("*.json")}


def test_images_have_the_version_of_this_tree():
    version = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    images = {container(folder)["image"] for folder in KUSTOMIZATIONS}
    assert images == {f"pharos:{version}", f"registry.example.com/pharos:{version}"}
    runtimes = {c["image"] for d in rendered("kserve") for c in d["spec"]["containers"]}
    assert runtimes == {f"pharos:{version}"}


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_references_lead_to_the_pods(folder):
    """Selectors select the pods, and ports are those of the container."""
    found, spec = rendered(folder), deployment(folder)["spec"]
    ports = {entry["name"]: entry["containerPort"] for entry in container(folder)["ports"]}
    assert spec["selector"]["matchLabels"] == NAME and NAME.items() <= spec["template"]["metadata"]["labels"].items()
    for service in (document for document in found if document["kind"] == "Service"):
        assert service["spec"]["selector"] == NAME
        assert all(ports[entry["targetPort"]] == entry["port"] for entry in service["spec"]["ports"])
    assert one(found, "PodDisruptionBudget")["spec"]["selector"] == {"matchLabels": NAME}
    (claim,) = [volume["persistentVolumeClaim"] for volume in spec["template"]["spec"]["volumes"] if "emptyDir" not in volume]
    assert claim["claimName"] == one(found, "PersistentVolumeClaim")["metadata"]["name"]
    assert {document["metadata"].get("namespace", "pharos") for document in found} == {"pharos"}
    if folder.endswith("base"):
        return
    monitor = one(found, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"] == NAME and NAME.keys() == {monitor["jobLabel"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports.keys()
    policy = one(found, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == NAME
    assert {entry["port"] for rule in policy["ingress"] for entry in rule["ports"]} == set(ports)
    kind = "ScaledObject" if folder in SCALED else "HorizontalPodAutoscaler"
    assert one(found, kind)["spec"]["scaleTargetRef"]["name"] == deployment(folder)["metadata"]["name"]
    assert "replicas" not in spec, "the autoscaler owns the number of replicas"


def test_ports_are_those_that_the_server_listens_on():
    found = container()
    for name in ("http", "grpc", "metrics"):
        assert str(port(found, name)) == flag(found, f"{name}-port")
        assert not [argument for argument in found["args"] if argument.startswith(f"--{name}-address")]
    assert default("http-address") == default("grpc-address") == "0.0.0.0", "probes come from outside the pod"


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_the_grace_period_covers_every_step_of_the_exit(folder):
    spec, found = deployment(folder)["spec"]["template"]["spec"], container(folder)
    steps = found["lifecycle"]["preStop"]["sleep"]["seconds"], float(flag(found, "exit-delay-secs"))
    assert sum(steps) + float(flag(found, "exit-timeout-secs")) + EXIT_STEPS_S <= spec["terminationGracePeriodSeconds"]
    probe = found["readinessProbe"]
    noticed = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert noticed <= steps[1], "the exit delay is longer than the time in which the probe notices"


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_a_rollout_waits_longer_than_a_pod_may_start(folder):
    startup = container(folder)["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] < deployment(folder)["spec"]["progressDeadlineSeconds"]


def test_pods_of_language_models_finish_their_answers():
    """They have more time for it, one model, and the label by which an endpoint picker knows the names of their metrics."""
    folder = "kubernetes/overlays/language-models"
    assert float(flag(container(folder), "exit-timeout-secs")) >= 300
    assert flag(container(folder), "strict-readiness") == "true"
    assert len(container(folder)["args"]) == len(container()["args"])
    assert deployment(folder)["spec"]["template"]["metadata"]["labels"]["llm-d.ai/engine-type"] == "pharos"


def test_pods_have_no_rights_and_write_only_to_their_volumes():
    spec = deployment("kubernetes/base")["spec"]["template"]["spec"]
    found, pod = container(), spec["securityContext"]
    own = found["securityContext"]
    assert (pod["runAsNonRoot"], pod["runAsUser"], pod["seccompProfile"]) == (True, 1000, {"type": "RuntimeDefault"})
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert (spec["enableServiceLinks"], spec["automountServiceAccountToken"]) == (False, False)
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in found["volumeMounts"]}
    assert mounts == {"/mnt/models": True, "/tmp": False}


@pytest.mark.slow
def test_the_container_answers_its_probes_and_leaves_in_order(tmp_path):
    """At SIGTERM readiness fails at once, requests are served for the exit delay, and the exit is clean."""
    with Container(tmp_path, container(), EXAMPLES) as server:
        assert [server.probe(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")] == [200] * 3
        assert server.get("/metrics", server.metrics)[0] == 200
        delay, begun = float(flag(server.container, "exit-delay-secs")), time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        eventually("readiness fails", lambda: server.probe("readinessProbe") >= 400)
        serves = lambda: (server.probe("livenessProbe"), server.get("/v2/models/digits")[0]) == (200, 200)  # noqa: E731
        holds_for("requests are served in the exit delay", delay - 2, serves)
        assert server.process.wait(30) == 0
        assert time.monotonic() - begun >= delay
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert any("no longer ready" in str(line) for line in lines), "--log-format=json"


def test_models_that_do_not_load_end_the_container(tmp_path):
    """The pod restarts and shows the reason; the startup probe never succeeds."""
    (tmp_path / "models/broken/1").mkdir(parents=True)
    (tmp_path / "models/broken/1/model.onnx").write_bytes(b"no model")
    server = Container(tmp_path / "run", container(), tmp_path / "models")
    server.launch()
    assert server.process.wait(60) == 1
    assert "broken" in server.log_tail()


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("folder", SCALED)
def test_queries_of_the_autoscaler_read_recorded_metrics(folder, tmp_path):
    """The queries are valid, and their metrics are recording rules that are deployed with them."""
    found = rendered(folder)
    queries = [trigger["metadata"]["query"] for trigger in one(found, "ScaledObject")["spec"]["triggers"]]
    recorded = {rule.get("record") for path in RULES for group in documents(path)[0]["groups"] for rule in group["rules"]}
    for query in queries:
        metric = re.fullmatch(r'max\((.*)\{job="pharos", namespace="pharos"\}\)', query)[1]
        assert metric in recorded
    rules = [{"record": f"q{at}", "expr": query} for at, query in enumerate(queries)]
    (tmp_path / "queries.yaml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", tmp_path / "queries.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
