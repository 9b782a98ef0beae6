#!/usr/bin/env python3
"""Copies the objects of `deploy/kubernetes` and the dashboards of `grafana` into the chart, whose templates only change them.

    python3 deploy/helm/shared_files.py

Run it after a change of these files; a test compares the copies. Links would not do: Flux leaves links out of what it fetches, and a
packaged chart contains no files outside its directory."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy/helm/pharos/files"
OBJECTS = (
    "base/deployment.yaml",
    "base/disruption_budget.yaml",
    "base/service.yaml",
    "base/storage.yaml",
    "components/gpu/deployment.yaml",
    "components/hpa/autoscaler.yaml",
    "components/keda/scaled_object.yaml",
    "components/keda-language-models/scaled_object.yaml",
    "components/monitoring/pod_monitor.yaml",
    "components/monitoring/prometheus_rule.yaml",
    "components/network-policy/network_policy.yaml",
    "components/object-store/deployment.yaml",
    "llm-d/inference_pool.yaml",
)
"""The shared files of `deploy/kubernetes`. The namespace is missing: Helm creates it (`--create-namespace`)."""


def copies() -> dict:
    """Returns the source of each file of the chart's folder `files`, by its path there."""
    found = {f"kubernetes/{path}": ROOT / "deploy/kubernetes" / path for path in OBJECTS}
    found |= {f"dashboards/{path.name}": path for path in sorted((ROOT / "grafana/dashboards").glob("*.json"))}
    return found


if __name__ == "__main__":
    shutil.rmtree(FILES, ignore_errors=True)
    for name, source in copies().items():
        (FILES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, FILES / name)
