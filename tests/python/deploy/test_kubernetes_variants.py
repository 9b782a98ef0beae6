"""Kustomize folders that no overlay of `deploy/kubernetes` renders: models from an object store, and the canary release of the
guide, with their containers' command lines on a real S3-compatible store; and KServe's PodMonitor, with the relabeling of a real
Prometheus."""

import json
import re
import shutil

import numpy as np
import pytest
import yaml

from deploy import schemas
from deploy.containers import DEPLOY, Container, documents, flag, kubectl_missing, kustomized, one
from harness.prometheus import missing, promtool
from harness.server import EXAMPLES, ROOT, total
from repository.object_stores import CREDENTIALS, Store

GUIDE = ROOT / "docs/src/guides/kubernetes.md"
OBJECT_STORE = """apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../production]
components: [../../components/object-store]
"""
"""An overlay as the guide describes it."""
OTHER_KINDS = ("monitoring.coreos.com/", "gateway.networking.k8s.io/")
HELD_OUT = np.load(ROOT / "examples/digits_held_out.npz")
IMAGES, DIGITS = HELD_OUT["images"][:4].astype(np.float32), HELD_OUT["labels"][:4].astype(int)

needs_kubectl = pytest.mark.skipif(bool(kubectl_missing()), reason=kubectl_missing())
needs_kubernetes = pytest.mark.skipif(bool(schemas.missing("kubernetes")), reason=schemas.missing("kubernetes"))
needs_models = pytest.mark.skipif(bool(schemas.missing("models")), reason=schemas.missing("models"))
needs_prometheus = pytest.mark.skipif(bool(missing()), reason=missing())


def guide_block(first: str) -> str:
    """Returns the block of the guide whose text begins so."""
    (found,) = [block for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S) if block.startswith(first)]
    return found


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """The documents of the variants by name, rendered in a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(DEPLOY / "kubernetes", tree / "deploy/kubernetes")
    shutil.copytree(ROOT / "grafana", tree / "grafana")
    canary = guide_block("# deploy/kubernetes/overlays/canary/kustomization.yaml\n")
    found = {}
    for name, text in {"object-store": OBJECT_STORE, "canary": canary}.items():
        folder = tree / "deploy/kubernetes/overlays" / name
        folder.mkdir()
        (folder / "kustomization.yaml").write_text(text)
        found[name] = kustomized(folder)
    return found


VARIANTS = ["object-store", "canary"]


def container(found: list) -> dict:
    """Returns the only container of the Deployment."""
    (only,) = one(found, "Deployment")["spec"]["template"]["spec"]["containers"]
    return only


def is_kubernetes(document: dict) -> bool:
    """Returns whether a document has a kind of Kubernetes itself."""
    return not document["apiVersion"].startswith(OTHER_KINDS)


@needs_kubectl
@needs_kubernetes
@pytest.mark.parametrize("version", schemas.VERSIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_documents_of_kubernetes_match_their_schemas(variants, name, version):
    found = [document for document in variants[name] if is_kubernetes(document)]
    kinds = {document["kind"] for document in found}
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert "PersistentVolumeClaim" not in kinds
    assert [error for error in schemas.kubernetes_errors(found, version) if error] == []


@needs_kubectl
@needs_models
def test_documents_of_operators_match_their_models(variants, tmp_path):
    """Those of the overlay, the PodMonitor of KServe, and the route of the guide."""
    found = [document for document in variants["object-store"] if not is_kubernetes(document)]
    found += [*documents(DEPLOY / "kserve/pod_monitor.yaml"), route()]
    kinds = [document["kind"] for document in found]
    assert kinds == ["PodMonitor", "PrometheusRule", "PrometheusRule", "PodMonitor", "HTTPRoute"]
    assert [error for error in schemas.model_errors(found) if error] == []
    assert schemas.unknown_field_errors(found, tmp_path) == ""


@needs_models
def test_the_models_find_wrong_and_unknown_fields(tmp_path):
    (monitor,) = documents(DEPLOY / "kserve/pod_monitor.yaml")
    broken, unknown = json.loads(json.dumps([monitor, route()]))
    broken["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["action"] = "discard"
    unknown["spec"]["rules"][0]["backendRefs"][0]["wait"] = 90
    errors = schemas.model_errors([broken, unknown])
    assert "action" in errors[0]
    assert "wait" in schemas.unknown_field_errors([unknown], tmp_path)


def route() -> dict:
    """Returns the route of the guide. GATEWAY and NAMESPACE, which users replace, are no valid names."""
    text = guide_block("apiVersion: gateway.networking.k8s.io/v1\n")
    return yaml.safe_load(text.replace("GATEWAY", "gateway").replace("NAMESPACE", "gateways"))


@needs_kubectl
@pytest.mark.parametrize("name", VARIANTS)
def test_models_are_copied_into_a_volume_of_the_pod(variants, name):
    """The claim is gone, and the directory of the copies is the only further one that the container may write."""
    spec, found = one(variants[name], "Deployment")["spec"]["template"]["spec"], container(variants[name])
    volumes = {volume["name"]: set(volume) - {"name"} for volume in spec["volumes"]}
    assert set.union(*volumes.values()) == {"emptyDir"}
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in found["volumeMounts"]}
    assert mounts == {"/mnt/models": False, "/tmp": False}
    assert flag(found, "repository-cache-directory") in mounts
    assert found["securityContext"]["readOnlyRootFilesystem"] is True
    assert found["envFrom"] == [{"secretRef": {"name": "pharos-object-store"}}]
    assert "create secret generic pharos-object-store" in GUIDE.read_text()
    (address,) = [argument for argument in found["args"] if argument.startswith("--model-repository=")]
    assert address.startswith("--model-repository=s3://models/")


@needs_kubectl
def test_the_canary_has_its_pods_and_the_route_has_both(variants):
    """No selector of the first release selects pods of the canary, or the reverse."""
    canary, stable = variants["canary"], variants["object-store"]
    names = {"canary": "pharos-canary", "object-store": "pharos"}
    for name, found in variants.items():
        label = {"app.kubernetes.io/name": names[name]}
        selectors = [document["spec"]["selector"] for document in found if document["kind"] == "Service"]
        selectors += [one(found, kind)["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
        selectors.append(one(found, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"])
        assert selectors == [label] * 5
        assert label.items() <= one(found, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    services = {d["metadata"]["name"]: d for d in [*canary, *stable] if d["kind"] == "Service"}
    assert set(services) == {"pharos", "pharos-pods", "pharos-canary", "pharos-pods-canary"}
    (rule,) = route()["spec"]["rules"]
    assert {entry["name"] for entry in rule["backendRefs"]} == {"pharos", "pharos-canary"}
    for entry in rule["backendRefs"]:
        assert entry["port"] in {service_port["port"] for service_port in services[entry["name"]]["spec"]["ports"]}
    assert sum(entry["weight"] for entry in rule["backendRefs"]) == 100
    assert container(canary)["image"] == container(stable)["image"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with the model `digits`: version 1 in production, and version 2 in the second release."""
    with Store(tmp_path_factory.mktemp("store")) as running:
        for prefix, version in (("production", 1), ("releases/2", 2)):
            model = EXAMPLES / "digits"
            running.put(f"{prefix}/digits/{version}/model.onnx", (model / "1/model.onnx").read_bytes())
            for path in model.glob("*.*"):
                running.put(f"{prefix}/digits/{path.name}", path.read_bytes())
        yield running


@pytest.fixture
def serve(store, variants, tmp_path):
    """Starts the container of a variant, with a Secret for the store and an empty volume. Ends all of them."""
    started = []

    def begin(name: str):
        volume = tmp_path / f"volume-{name}"
        volume.mkdir(exist_ok=True)
        secret = CREDENTIALS | {"AWS_ENDPOINT_URL": store.endpoint}
        running = Container(tmp_path / f"{name}-{len(started)}", container(variants[name]), volume, variables=secret)
        started.append(running)
        running.launch()
        running.wait_until_ready()
        return running

    yield begin
    for running in started:
        if running.process.poll() is None:
            running.kill()


def versions(server) -> list:
    """Classifies pictures with `digits`, and returns the versions of the model that the index has."""
    tensor = {"name": "image", "shape": [4, 8, 8], "datatype": "FP32", "data": IMAGES.ravel().tolist()}
    status, answer = server.infer("digits", {"inputs": [tensor]})
    assert status == 200, answer
    labels = next(output["data"] for output in answer["outputs"] if output["name"] == "label")
    assert np.mean(np.array(labels) == DIGITS) > 0.7
    return [entry["version"] for entry in server.index()["digits"]]


@needs_kubectl
def test_the_containers_serve_their_releases_beside_each_other(serve):
    stable, canary = serve("object-store"), serve("canary")
    for server, expected in ((stable, ["1"]), (canary, ["2"])):
        assert [server.probe(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")] == [200] * 3
        assert versions(server) == expected


@needs_kubectl
def test_a_restarted_container_finds_its_models(serve):
    """The volume outlives the container, so no object is fetched again."""
    first = serve("object-store")
    fetched = "pharos_repository_fetched_bytes_total"
    assert total(first.scrape(), fetched) > 0
    first.kill()
    second = serve("object-store")
    assert versions(second) == ["1"] and total(second.scrape(), fetched) == 0


@needs_kubectl
def test_a_container_whose_store_does_not_answer_ends(variants, tmp_path):
    """The pod restarts and shows the reason; the startup probe never succeeds."""
    volume = tmp_path / "volume"
    volume.mkdir()
    variables = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_SKIP_SIGNATURE": "true"}
    server = Container(tmp_path / "run", container(variants["object-store"]), volume, variables=variables)
    server.launch()
    assert server.process.wait(60) == 1
    assert "s3://models/production" in server.log_tail()


RUNTIMES = {document["metadata"]["name"]: document["spec"] for document in documents(DEPLOY / "kserve/runtimes.yaml")}


def scraped(folder, discovered: list) -> list:
    """Returns the labels of the targets that a real Prometheus makes of discovered ones with the relabelings of the PodMonitor."""
    (monitor,) = documents(DEPLOY / "kserve/pod_monitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    rules = [{names.get(key, key): value for key, value in rule.items()} for rule in endpoint["relabelings"]]
    targets = [{"targets": [labels["__address__"]], "labels": labels} for labels in discovered]
    job = {"job_name": "kserve", "metrics_path": endpoint["path"], "static_configs": targets, "relabel_configs": rules}
    (folder / "prometheus.yaml").write_text(json.dumps({"scrape_configs": [job]}))
    done = promtool("check", "service-discovery", "--timeout=2s", folder / "prometheus.yaml", "kserve")
    assert done.returncode == 0, done.stderr
    return [target["labels"] for target in json.loads(done.stdout) if target.get("labels")]


@needs_prometheus
def test_the_pod_monitor_of_kserve_scrapes_the_metrics_port(tmp_path):
    """Each container port of a pod is a target; equal ones are one. Other containers, and pods that do not run yet, are left out."""
    pods = [("10.0.0.7", "10.0.0.7:{}"), ("fd00::7", "[fd00::7]:{}")]
    pending = ("10.0.0.8", "10.0.0.8:{}")
    discovered = [
        {
            "__address__": address.format(number),
            "__meta_kubernetes_pod_ip": ip,
            "__meta_kubernetes_pod_container_name": name,
            "__meta_kubernetes_pod_phase": "Pending" if ip == pending[0] else "Running",
        }
        for ip, address in [*pods, pending]
        for name, number in (("kserve-container", 8080), ("kserve-container", 9000), ("queue-proxy", 8012))
    ]
    found = scraped(tmp_path, discovered)
    number = flag(RUNTIMES["pharos"]["containers"][0], "metrics-port")
    expected = {("pharos", address.format(number)) for _, address in pods}
    assert {(labels["job"], labels["instance"]) for labels in found} == expected
    assert {labels["__metrics_path__"] for labels in found} == {"/metrics"}


def test_the_pod_monitor_of_kserve_selects_the_pods_of_the_runtimes():
    (monitor,) = documents(DEPLOY / "kserve/pod_monitor.yaml")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted and all(wanted.items() <= spec["labels"].items() for spec in RUNTIMES.values())
    assert {spec["containers"][0]["name"] for spec in RUNTIMES.values()} == {"kserve-container"}
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
