"""The Grafana dashboards of this repository, and their expressions."""

import json
import re

from harness.server import ROOT

DASHBOARDS = sorted((ROOT / "grafana/dashboards").glob("*.json"))


def load(path) -> dict:
    """Reads a dashboard."""
    return json.loads(path.read_text())


def panels(dashboard: dict) -> list:
    """Returns all panels, including those in collapsed rows."""
    found = []
    for panel in dashboard["panels"]:
        found += [panel, *panel.get("panels", [])]
    return found


def expressions(dashboard: dict) -> list:
    """Returns (location, PromQL) of each panel and annotation, with the variables replaced as Grafana does for "All"."""
    found = []
    for panel in panels(dashboard):
        found += [(f"{dashboard['title']}: {panel['title']}", t["expr"]) for t in panel.get("targets", [])]
    for annotation in dashboard["annotations"]["list"]:
        found.append((f"{dashboard['title']}: annotation {annotation['name']}", annotation["expr"]))
    return [(where, filled(expression)) for where, expression in found]


def filled(expression: str) -> str:
    """Replaces Grafana's variables: `$__rate_interval` by a duration that fits one scrape per second, others by "all"."""
    expression = expression.replace("$__rate_interval", "5s")
    expression = re.sub(r"\$\w+", ".*", expression)
    assert "$" not in expression, expression
    return expression
