#!/usr/bin/env python3
"""Writes `components/monitoring/prometheus_rule.yaml`: the rules of `grafana/rules` as PrometheusRules.

    python3 deploy/kubernetes/prometheus_rules.py

Run it after a change of the rules; a test compares the file with them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ROOT / "deploy/kubernetes/components/monitoring/prometheus_rule.yaml"
HEAD = """---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: pharos-{name}
spec:
"""


def document(rules: Path) -> str:
    """Returns the PrometheusRule of one file of rules: the text from `groups:` on, indented into `spec`."""
    text = rules.read_text()
    groups = text[text.index("groups:\n") :]
    lines = (f"  {line}" if line.strip() else "" for line in groups.splitlines())
    return HEAD.format(name=rules.stem) + "\n".join(lines) + "\n"


def whole() -> str:
    """Returns the content of the file."""
    files = sorted((ROOT / "grafana/rules").glob("*.yaml"))
    return "# Written by deploy/kubernetes/prometheus_rules.py from grafana/rules.\n" + "".join(map(document, files))


if __name__ == "__main__":
    WRITTEN.write_text(whole())
