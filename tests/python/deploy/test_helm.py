"""`deploy/helm`: a real Helm renders the chart. The objects are those that Kustomize renders, each value reaches them, and wrong values are
refused. The container serves, and `helm test` finds it. `deploy/gitops`: the samples against the models of Argo CD and Flux."""

import functools
import importlib.util
import json
import re
import subprocess

import jsonschema
import pytest
import yaml

from deploy import schemas
from deploy.containers import DEPLOY, EXIT_STEPS_S, Container, documents, flag, kubectl_missing, kustomized, one
from harness.server import EXAMPLES, ROOT, binary

CHART = DEPLOY / "helm/pharos"
HELMS = {"4": "helm", "3": "helm3"}
"""The major versions of Helm, and the sets of packages that have them."""
MISSING = next(filter(None, map(schemas.missing, HELMS.values())), "")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
IMAGE = "registry.example.com/pharos"
DIGEST = f"sha256:{'5' * 64}"
OPERATORS = ("keda.sh/", "monitoring.coreos.com/")
GATEWAY = ("inference.networking.k8s.io/", "gateway.networking.k8s.io/")
MONITORING = ("monitoring.podMonitor=true", "monitoring.rules=true", "monitoring.dashboards=true")
VARIANTS = {
    "base": ("base", [], []),
    "gpu": ("base", ["gpu"], ["gpus.count=1"]),
    "hpa": ("base", ["hpa"], ["autoscaling.kind=hpa"]),
    "keda": ("base", ["keda"], ["autoscaling.kind=keda"]),
    "keda-language-models": ("base", ["keda-language-models"], ["autoscaling.kind=keda-language-models"]),
    "monitoring": ("base", ["monitoring"], MONITORING),
    "network-policy": ("base", ["network-policy"], ["networkPolicy.enabled=true"]),
    "object-store": ("base", ["object-store"], ["models.objectStore.url=s3://models/production"]),
    "gpu-object-store": ("base", ["gpu", "object-store"], ["gpus.count=1", "models.objectStore.url=s3://models/production"]),
    "overlay-production": ("overlays/production", [], ["production.yaml"]),
    "overlay-gpu": ("overlays/gpu", [], ["gpu.yaml"]),
    "overlay-language-models": ("overlays/language-models", [], ["language-models.yaml"]),
    "overlay-gpu-object-store": ("overlays/gpu", ["object-store"], ["gpu.yaml", "models.objectStore.url=s3://models/production"]),
}
"""A folder of `deploy/kubernetes` and components beside it, and the values of the chart for the same objects: files of
`pharos/overlays`, and settings."""
EVERYTHING = """
image: {digest: "%s", pullPolicy: Always}
imagePullSecrets: [{name: registry}]
serviceAccount: {create: true, annotations: {eks.amazonaws.com/role-arn: "arn:aws:iam::1:role/models"}}
service: {type: LoadBalancer, annotations: {example.com/zone: a}}
autoscaling:
  {kind: keda, minReplicas: 3, maxReplicas: 8, fallbackReplicas: 5, prometheusAddress: "http://thanos:9090", thresholds: {queue-time: 0.1}}
resources: {requests: {cpu: 2500m, memory: null}, limits: {memory: 12Gi, ephemeral-storage: 8Gi}}
gpus: {count: 2, resource: nvidia.com/mig-1g.10gb}
runtimeClassName: nvidia
models: {claim: {size: 1Ti, accessModes: [ReadOnlyMany], storageClassName: nfs}}
flags: {http-metrics: true, pinned-memory-pool-byte-size: 536870912, load-model: [digits, text], log-format: default}
strictReadiness: true
startup: {seconds: 1201, progressDeadlineSeconds: 1500}
exit: {delaySeconds: 20, timeoutSeconds: 100}
env: [{name: HOME, value: /mnt/home}, {name: OMP_NUM_THREADS, value: "2"}]
envFrom: [{configMapRef: {name: settings}}]
volumes: [{name: tokens, secret: {secretName: tokens}}]
volumeMounts: [{name: tokens, mountPath: /etc/pharos, readOnly: true}]
tmpSizeLimit: 9Gi
maxUnavailable: 25%%
podLabels: {team: vision}
podAnnotations: {example.com/restarted: now}
podSecurityContext: {runAsUser: null, runAsGroup: 2000}
containerSecurityContext: {privileged: false}
nodeSelector: {kubernetes.io/arch: amd64}
tolerations: [{key: spot, operator: Exists}]
affinity: {nodeAffinity: {}}
priorityClassName: serving
monitoring: {podMonitor: true, rules: true, dashboards: true, labels: {release: prometheus}}
networkPolicy:
  {enabled: true, prometheusNamespace: observability, ingress: [{from: [{podSelector: {}}]}], egress: [{ports: [{port: 9000}]}]}
inferencePool: {enabled: true, endpointPicker: picker, gateway: {name: edge, namespace: edge}}
""" % DIGEST
"""Values beside the defaults for every part of the chart."""


def helm(version: str, *arguments, values="", fails=False) -> str:
    """Runs Helm, with values as its input, without the user's settings and clusters; returns its output, or its message if it must fail."""
    home = schemas.home() / HELMS[version]
    command = [home / "helm", *arguments]
    environment = {"HOME": str(home)}
    done = subprocess.run(list(map(str, command)), input=values, capture_output=True, text=True, timeout=60, env=environment)
    assert bool(done.returncode) == fails, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stderr if fails else done.stdout


def options(values) -> list:
    """Returns the options of Helm for files of `pharos/overlays` and for settings."""
    found = []
    for value in values:
        found += ["--values", CHART / "overlays" / value] if value.endswith(".yaml") else ["--set", value]
    return found


@functools.cache
def rendered(values: tuple = (), more="", version="4", release="pharos", namespace="pharos", chart=CHART) -> list:
    """Returns the documents of a release: `values` are files of `pharos/overlays` and settings, `more` is YAML."""
    command = ["template", release, chart, f"--namespace={namespace}", "--values=-", *options(values), "--set", f"image.repository={IMAGE}"]
    return [document for document in yaml.safe_load_all(helm(version, *command, values=more)) if document]


def variant(name: str) -> list:
    """Returns the documents of a variant, or with values beside the defaults for every part."""
    return rendered(more=EVERYTHING) if name == "everything" else rendered(tuple(VARIANTS[name][2]))


def is_test(document: dict) -> bool:
    """Returns whether only `helm test` creates an object."""
    return "helm.sh/hook" in document["metadata"].get("annotations", {})


def container(found: list) -> dict:
    """Returns the only container of the Deployment."""
    (only,) = one(found, "Deployment")["spec"]["template"]["spec"]["containers"]
    return only


@pytest.fixture(scope="module")
def kustomize(tmp_path_factory):
    """Returns the documents of a variant as Kustomize renders them, in a copy of the tree."""
    if kubectl_missing():
        pytest.skip(kubectl_missing())
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("deploy/kubernetes", "grafana"):
        (tree / folder).parent.mkdir(exist_ok=True)
        (tree / folder).symlink_to(ROOT / folder)

    @functools.cache
    def render(name: str) -> list:
        folder, components, _ = VARIANTS[name]
        (tree / name).mkdir()
        content = {
            "resources": [f"../deploy/kubernetes/{folder}"],
            "components": [f"../deploy/kubernetes/components/{component}" for component in components],
            "images": [{"name": "pharos", "newName": IMAGE}, {"name": IMAGE, "newName": IMAGE}],
        }
        (tree / name / "kustomization.yaml").write_text(json.dumps(content))
        return kustomized(tree / name)

    return render


def without_instance(value):
    """Returns a document without the label of the release, which Kustomize does not have."""
    if isinstance(value, list):
        return [without_instance(entry) for entry in value]
    if isinstance(value, dict):
        return {key: without_instance(entry) for key, entry in value.items() if key != "app.kubernetes.io/instance"}
    return value


def comparable(found: list) -> dict:
    """Returns documents by kind and name, without what only Helm or only Kustomize adds: labels of the objects, the namespace, the test,
    and the annotation that keeps the claim when a release is removed."""
    by_name = {}
    for document in found:
        if document["kind"] == "Namespace" or is_test(document):
            continue
        metadata = dict(document["metadata"])
        labels = {"app.kubernetes.io/name", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"}
        rest = {key: value for key, value in metadata.pop("labels", {}).items() if key not in labels}
        annotations = {key: value for key, value in metadata.pop("annotations", {}).items() if key != "helm.sh/resource-policy"}
        metadata |= {"labels": rest, "annotations": annotations, "namespace": metadata.get("namespace", "pharos")}
        by_name[document["kind"], metadata["name"]] = without_instance({**document, "metadata": metadata})
    return by_name


@pytest.mark.parametrize("version", HELMS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_objects_are_those_of_kustomize(kustomize, name, version):
    expected, found = comparable(kustomize(name)), comparable(rendered(tuple(VARIANTS[name][2]), version=version))
    assert found.keys() == expected.keys()
    for key, document in expected.items():
        assert found[key] == document, key


def test_the_shared_files_are_copies():
    spec = importlib.util.spec_from_file_location("shared_files", DEPLOY / "helm/shared_files.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {str(path.relative_to(module.FILES)): path for path in module.FILES.rglob("*") if path.is_file()}
    copies = module.copies()
    assert found.keys() == copies.keys(), "run deploy/helm/shared_files.py"
    for name, source in copies.items():
        assert found[name].read_bytes() == source.read_bytes(), f"{name}: run deploy/helm/shared_files.py"


def test_versions_are_those_of_this_tree():
    version = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    (chart,) = documents(CHART / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert chart["kubeVersion"] == f">={schemas.VERSIONS[0]}-0"
    assert {document["metadata"]["labels"]["helm.sh/chart"] for document in rendered()} == {f"pharos-{version}"}
    assert container(rendered())["image"] == f"{IMAGE}:{version}"
    assert application()["source"]["targetRevision"] == f"v{version}"
    assert one(documents(DEPLOY / "gitops/flux.yaml"), "OCIRepository")["spec"]["ref"] == {"tag": version}


@pytest.mark.parametrize("version", HELMS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_chart_passes_the_linter(name, version):
    output = helm(version, "lint", "--strict", CHART, "--set", f"image.repository={IMAGE}", *options(VARIANTS[name][2]))
    assert "0 chart(s) failed" in output and "[WARNING]" not in output


@pytest.mark.parametrize("version", HELMS)
def test_a_packaged_chart_has_all_files(tmp_path, version):
    helm(version, "package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("pharos-*.tgz")
    assert rendered(more=EVERYTHING, version=version, chart=package) == rendered(more=EVERYTHING, version=version)


@pytest.mark.skipif(bool(schemas.missing("kubernetes")), reason=schemas.missing("kubernetes"))
@pytest.mark.parametrize("version", schemas.VERSIONS)
@pytest.mark.parametrize("name", VARIANTS | {"everything": None})
def test_documents_of_kubernetes_match_their_schemas(name, version):
    found = [document for document in variant(name) if not document["apiVersion"].startswith(OPERATORS + GATEWAY)]
    assert {"Deployment", "Service", "PodDisruptionBudget", "Pod"} <= {document["kind"] for document in found}
    assert [error for error in schemas.kubernetes_errors(found, version) if error] == []


@pytest.mark.skipif(bool(schemas.missing("models")), reason=schemas.missing("models"))
@pytest.mark.parametrize("name", ["overlay-gpu", "overlay-language-models", "everything"])
def test_documents_of_operators_match_their_models(tmp_path, name):
    found = [d for d in variant(name) if d["apiVersion"].startswith((*OPERATORS, GATEWAY[1]))]
    assert {"ScaledObject", "PodMonitor", "PrometheusRule"} <= {document["kind"] for document in found}
    assert [error for error in schemas.model_errors(found) if error] == []
    assert schemas.unknown_field_errors(found, tmp_path) == ""


def test_objects_are_in_the_namespace_with_labels_and_limits():
    """What checkov checks: the namespace (CKV_K8S_21), the digest of images (CKV_K8S_43), requests and limits (CKV_K8S_10 to 13)."""
    for document in rendered(more=EVERYTHING, namespace="models"):
        metadata = document["metadata"]
        assert metadata["namespace"] == "models", metadata
        labels = {"name", "instance", "version", "managed-by"}
        assert {f"app.kubernetes.io/{label}" for label in labels} | {"helm.sh/chart"} <= metadata["labels"].keys(), metadata
        pod = document if document["kind"] == "Pod" else document["spec"]["template"] if document["kind"] == "Deployment" else None
        for found in pod["spec"]["containers"] if pod else []:
            assert found["image"] == f"{IMAGE}@{DIGEST}"
            assert found["resources"]["limits"]["memory"] and found["resources"]["requests"]["cpu"]
            assert found["securityContext"]["readOnlyRootFilesystem"] and found["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("version", HELMS)
def test_values_reach_the_objects(version):
    found = rendered(more=EVERYTHING, version=version)
    spec = one(found, "Deployment")["spec"]
    pod, only = spec["template"]["spec"], container(found)
    assert "replicas" not in spec and spec["progressDeadlineSeconds"] == 1500
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert spec["template"]["metadata"]["labels"]["team"] == "vision"
    assert spec["template"]["metadata"]["annotations"] == {"example.com/restarted": "now"}
    assert only["imagePullPolicy"] == "Always" and pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["serviceAccountName"] == one(found, "ServiceAccount")["metadata"]["name"] == "pharos"
    assert one(found, "ServiceAccount")["automountServiceAccountToken"] is False
    assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "serving")
    assert (pod["nodeSelector"], pod["affinity"]) == ({"kubernetes.io/arch": "amd64"}, {"nodeAffinity": {}})
    assert [entry["key"] for entry in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    assert "runAsUser" not in pod["securityContext"] and pod["securityContext"]["runAsGroup"] == 2000
    assert only["securityContext"] | {"privileged": False} == only["securityContext"]
    limits = {"memory": "12Gi", "ephemeral-storage": "8Gi", "nvidia.com/mig-1g.10gb": 2}
    assert only["resources"] == {"requests": {"cpu": "2500m"}, "limits": limits}
    assert only["args"] == [
        "--model-repository=/mnt/models",
        "--exit-delay-secs=20",
        "--exit-timeout-secs=100",
        "--strict-readiness=true",
        "--log-format=default",
        "--environment-cache-directory=/tmp/environments",
        "--http-metrics=true",
        "--load-model=digits",
        "--load-model=text",
        "--pinned-memory-pool-byte-size=536870912",
    ]
    assert pod["terminationGracePeriodSeconds"] >= 5 + 20 + 100 + EXIT_STEPS_S
    assert only["startupProbe"]["failureThreshold"] * only["startupProbe"]["periodSeconds"] in (1201, 1202)
    assert {entry["name"]: entry["value"] for entry in only["env"]} == {"HOME": "/mnt/home", "OMP_NUM_THREADS": "2"}
    assert only["envFrom"] == [{"configMapRef": {"name": "settings"}}]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["tokens"]["secret"] == {"secretName": "tokens"} and volumes["tmp"]["emptyDir"] == {"sizeLimit": "9Gi"}
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in only["volumeMounts"]}
    assert mounts == {"/mnt/models": True, "/tmp": False, "/etc/pharos": True}
    claim = one(found, "PersistentVolumeClaim")["spec"]
    assert (claim["accessModes"], claim["storageClassName"]) == (["ReadOnlyMany"], "nfs")
    assert claim["resources"]["requests"] == {"storage": "1Ti"}
    assert one(found, "PodDisruptionBudget")["spec"]["maxUnavailable"] == "25%"
    service, pods = one(found, "Service", "pharos"), one(found, "Service", "pharos-pods")
    assert service["spec"]["type"] == "LoadBalancer" and service["metadata"]["annotations"] == {"example.com/zone": "a"}
    assert pods["spec"]["clusterIP"] == "None" and "type" not in pods["spec"]
    scaled = one(found, "ScaledObject")["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"], scaled["fallback"]["replicas"]) == (3, 8, 5)
    triggers = {trigger["name"]: trigger["metadata"] for trigger in scaled["triggers"]}
    assert {name: metadata["threshold"] for name, metadata in triggers.items()} == {"queue-time": "0.1", "waiting-requests": "4"}
    assert {metadata["serverAddress"] for metadata in triggers.values()} == {"http://thanos:9090"}
    labelled = [d for d in found if d["metadata"]["labels"].get("release") == "prometheus"]
    assert {d["kind"] for d in labelled} == {"PodMonitor", "PrometheusRule", "ConfigMap"}
    policy = one(found, "NetworkPolicy")["spec"]
    assert policy["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "observability"}
    assert policy["ingress"][2:] == [{"from": [{"podSelector": {}}]}] and policy["egress"][2:] == [{"ports": [{"port": 9000}]}]
    pool, route = one(found, "InferencePool")["spec"], one(found, "HTTPRoute")["spec"]
    assert pool["endpointPickerRef"]["name"] == "picker" and route["parentRefs"] == [{"name": "edge", "namespace": "edge"}]


def test_autoscaling_by_cpu_has_its_values():
    limits = "autoscaling.minReplicas=3,autoscaling.maxReplicas=4,autoscaling.targetCPUUtilizationPercentage=50"
    found = rendered(("production.yaml", limits))
    spec = one(found, "HorizontalPodAutoscaler")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 4)
    assert spec["metrics"][0]["resource"]["target"] == {"type": "Utilization", "averageUtilization": 50}
    assert one(rendered(("replicas=5",)), "Deployment")["spec"]["replicas"] == 5


def test_models_of_a_claim_or_of_a_store():
    """An existing claim, and a store without a Secret whose credentials come from a role."""
    existing = rendered(("models.claim.existing=shared",))
    assert "PersistentVolumeClaim" not in {document["kind"] for document in existing}
    (volume,) = [v for v in one(existing, "Deployment")["spec"]["template"]["spec"]["volumes"] if v["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "shared", "readOnly": True}
    store = rendered(("models.objectStore.url=gs://models", "models.objectStore.secret=", "models.objectStore.sizeLimit=3Gi"))
    (volume,) = [v for v in one(store, "Deployment")["spec"]["template"]["spec"]["volumes"] if v["name"] == "models"]
    assert volume["emptyDir"] == {"sizeLimit": "3Gi"} and "envFrom" not in container(store)
    assert one(rendered(), "PersistentVolumeClaim")["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_probes_use_tls_if_the_server_does():
    """`helm test` would need the certificates, so that it has nothing to run."""
    found = rendered(("flags.http-use-ssl=true",))
    only = container(found)
    assert {only[probe]["httpGet"]["scheme"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {"HTTPS"}
    assert not any(map(is_test, found))
    assert "scheme" not in container(rendered())["readinessProbe"]["httpGet"]


@pytest.mark.parametrize("values", [("language-models.yaml", "inferencePool.enabled=true"), ("production.yaml",)])
def test_a_second_release_has_separate_objects(values):
    """Its names, its pods, and its queries; the job of the metrics remains, because alerts select it."""
    first, second = rendered(values), rendered(values, release="canary", namespace="other")
    names = {(document["kind"], document["metadata"]["name"]) for document in second}
    assert len(names) == len(second) == len(first)
    assert all(name.startswith("pharos-canary") for _, name in names)
    selector = {"app.kubernetes.io/name": "pharos", "app.kubernetes.io/instance": "canary"}
    spec = one(second, "Deployment")["spec"]
    assert spec["selector"]["matchLabels"] == selector and selector.items() <= spec["template"]["metadata"]["labels"].items()
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"] == {"matchLabels": selector}
    assert all(d["spec"]["selector"] == selector for d in second if d["kind"] == "Service")
    for kind in ("PodDisruptionBudget", "PodMonitor", "InferencePool"):
        assert all(d["spec"]["selector"]["matchLabels"] == selector for d in second if d["kind"] == kind)
    assert one(second, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == selector
    (volume,) = [v for v in spec["template"]["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
    for document in second:
        if document["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            assert ("Deployment", document["spec"]["scaleTargetRef"]["name"]) in names
        for trigger in document["spec"].get("triggers", []) if document["kind"] == "ScaledObject" else []:
            assert '{job="pharos", namespace="other"}' in trigger["metadata"]["query"]
        if document["kind"] == "HTTPRoute":
            backends = [entry["name"] for rule in document["spec"]["rules"] for entry in rule["backendRefs"]]
            assert [("InferencePool", name) in names for name in backends] == [True]
    (test,) = filter(is_test, second)
    assert not selector.items() <= test["metadata"]["labels"].items(), "the Service would send requests to the pod of the test"


LONGEST = "a" * 53
"""Helm permits no longer names of releases."""


def test_names_fit_the_limits_of_kubernetes():
    found = rendered(("production.yaml",), release=LONGEST)
    assert max(len(document["metadata"]["name"]) for document in found if document["kind"] == "Service") <= 63
    assert {d["metadata"]["name"] for d in rendered(("fullnameOverride=models",)) if d["kind"] == "Deployment"} == {"models"}


REFUSED = {
    "replcas=3": "replcas",
    "replicas=-1": "replicas",
    "image.repository=pharos:0.3.0": "repository",
    "image.digest=0.3.0": "digest",
    "autoscaling.kind=vpa": "kind",
    "autoscaling.thresholds.queue=1": "queue",
    "gpus.count=one": "count",
    "models.claim.accessModes={ReadWriteOften}": "accessModes",
    "models.objectStore.url=models": "url",
    "resources.limits.memory=lots": "memory",
    "monitoring.podmonitor=true": "podmonitor",
    "strictReadiness=yes": "strictReadiness",
    "flags.Http=1": "Http",
    "flags.http-port=80": "flags.http-port cannot be set: the ports of the probes and Services are fixed",
    "flags.exit-timeout-secs=5": "flags.exit-timeout-secs cannot be set: set exit.timeoutSeconds",
    "flags.model-repository=/models": "flags.model-repository cannot be set: set models",
    "startup.seconds=900": "startup.progressDeadlineSeconds (900) must exceed startup.seconds (900)",
    "autoscaling.kind=keda,autoscaling.thresholds.time-to-first-token=1": "keda has the triggers queue-time, waiting-requests",
}
"""Settings, and a part of the message that refuses them."""


@pytest.mark.parametrize("version", HELMS)
@pytest.mark.parametrize("setting", REFUSED)
def test_wrong_values_are_refused(setting, version):
    message = helm(version, "template", "pharos", CHART, "--set", f"image.repository={IMAGE}", "--set", setting, fails=True)
    assert REFUSED[setting] in message


@pytest.mark.parametrize("version", HELMS)
def test_a_release_without_an_image_is_refused(version):
    message = helm(version, "template", "pharos", CHART, fails=True)
    assert "image.repository is empty" in message and "deploy/Containerfile" in message


def schema_of(schema: dict, found: dict) -> dict:
    """Returns a schema, or the definition that it names."""
    return found["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def test_the_schema_has_exactly_the_values():
    """Each value has a schema, each schema a default, and no object with known names permits others."""
    whole, values = json.loads((CHART / "values.schema.json").read_text()), yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(whole)
    jsonschema.validate(values, whole, jsonschema.Draft7Validator)

    def compare(schema: dict, defaults: dict, place: str):
        assert schema["additionalProperties"] is False, place
        names = schema["properties"].keys()
        assert names == defaults.keys() | ({"global"} if not place else set()) | ({"requests", "limits"} & names), place
        for name, default in defaults.items():
            inner = schema_of(schema["properties"][name], whole)
            if isinstance(default, dict) and default:
                compare(inner, default, f"{place}{name}.")

    compare(whole, values, "")


def test_the_notes_name_the_objects():
    """Only Helm 4 shows them without a cluster."""
    command = ["install", "canary", CHART, "--dry-run=client", "--namespace=other", "--set", f"image.repository={IMAGE}"]
    notes = helm("4", *command).partition("NOTES:\n")[2]
    assert "kubectl -n other rollout status deployment/pharos-canary" in notes and "helm -n other test canary" in notes
    assert "the claim pharos-canary-models" in notes and "recording rules" not in notes
    notes = helm("4", *command, "--set", "models.objectStore.url=s3://models,autoscaling.kind=keda").partition("NOTES:\n")[2]
    assert "create secret generic pharos-object-store" in notes and "monitoring.rules=true" in notes


def test_the_container_serves_and_the_test_of_the_release_finds_it(tmp_path):
    # Without the exit delay, so that the test does not wait for it.
    found = rendered(("flags.http-metrics=true", "exit.delaySeconds=0"))
    (test,) = filter(is_test, found)
    (only,) = test["spec"]["containers"]
    program, command, address = only["command"]
    service = one(found, "Service", address.partition(":")[0])
    assert address.partition(":")[2] in {str(entry["port"]) for entry in service["spec"]["ports"]}
    assert (program, command) == ("pharos", "health")
    with Container(tmp_path, container(found), EXAMPLES) as server:
        assert server.get("/metrics")[0] == 200, "--http-metrics=true"
        ready = subprocess.run([binary(), command, server.http], capture_output=True, text=True, timeout=30)
        assert (ready.returncode, ready.stderr) == (0, "")
    gone = subprocess.run([binary(), command, server.http], capture_output=True, text=True, timeout=30)
    assert gone.returncode == 1


def test_reserved_flags_are_flags_of_the_container():
    """The names in the template are those of the base's arguments, so that values replace them."""
    only = container(rendered(("models.objectStore.url=s3://models",)))
    for name in ("exit-delay-secs", "exit-timeout-secs", "strict-readiness", "model-repository", "repository-cache-directory"):
        assert sum(argument.startswith(f"--{name}=") for argument in only["args"]) == 1, name
    assert flag(only, "http-port") == "8000"


def application() -> dict:
    """Returns the specification of the sample for Argo CD."""
    (found,) = documents(DEPLOY / "gitops/argo_cd.yaml")
    return found["spec"]


@pytest.mark.skipif(bool(schemas.missing("models")), reason=schemas.missing("models"))
def test_samples_match_the_models_of_argo_cd_and_flux(tmp_path):
    found = [d for name in ("argo_cd", "flux") for d in documents(DEPLOY / f"gitops/{name}.yaml") if d["kind"] != "Namespace"]
    assert [document["kind"] for document in found] == ["Application", "OCIRepository", "HelmRelease"]
    assert [error for error in schemas.model_errors(found) if error] == []
    assert schemas.unknown_field_errors(found, tmp_path) == ""
    (tmp_path / "broken").mkdir()
    broken = json.loads(json.dumps(found))
    broken[0]["spec"]["source"]["helm"]["valuesFiles"] = []
    broken[2]["spec"]["test"]["enable"] = "yes"
    assert "valuesFiles" in schemas.unknown_field_errors(broken[:1], tmp_path / "broken")
    assert "enable" in schemas.model_errors(broken)[2]


def test_samples_install_the_chart():
    """Their values are those of the overlays and an image, and their namespaces have the label of Kustomize's."""
    label = one(documents(DEPLOY / "kubernetes/base/namespace.yaml"), "Namespace")["metadata"]["labels"]
    source, flux = application()["source"], documents(DEPLOY / "gitops/flux.yaml")
    assert ROOT / source["path"] == CHART and source["helm"]["valueFiles"] == ["overlays/gpu.yaml"]
    assert application()["syncPolicy"]["managedNamespaceMetadata"]["labels"] == label == one(flux, "Namespace")["metadata"]["labels"]
    release = one(flux, "HelmRelease")["spec"]
    values = dict(release["values"])
    assert values.pop("image") == source["helm"]["valuesObject"]["image"]
    (overlay,) = documents(CHART / "overlays/production.yaml")
    assert values == overlay
    assert one(flux, "OCIRepository")["metadata"]["name"] == release["chartRef"]["name"]
    limit = int(release["timeout"].removesuffix("m")) * 60
    assert limit > one(rendered(("production.yaml",)), "Deployment")["spec"]["progressDeadlineSeconds"]
