"""Objectives in tests: their counts, the rules that `pharos slo rules` prints, and the parts of promtool's unit tests of rules."""

import subprocess

from harness.server import binary
from harness.waiting import DEADLINE_S

SERIES = 'pharos_slo_{}_total{{job="pharos",instance="{}",slo="{}",sli="{}",model="m",version="1"}}'


def counts(metrics: dict, name: str) -> dict:
    """Returns (model, slo, sli) -> value of a family."""
    found = {}
    for (family, pairs), value in metrics.items():
        if family == name:
            labels = dict(pairs)
            found[labels["model"], labels["slo"], labels["sli"]] = value
    return found


def rules(file) -> subprocess.CompletedProcess:
    command = [binary(), "slo", "rules", f"--metrics-config={file}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def series(instance: str, slo: str, sli: str, good: str, every: str) -> str:
    """Returns the input series of an objective, as promtool writes them."""
    lines = [(SERIES.format("good_requests", instance, slo, sli), good), (SERIES.format("requests", instance, slo, sli), every)]
    return "".join(f"      - series: '{name}'\n        values: '{values}'\n" for name, values in lines)


def alert(at: str, *severities: str) -> str:
    """Returns the expectation that exactly these alerts of the objective fire."""
    text = f"      - eval_time: {at}\n        alertname: PharosSloBudgetBurn\n        exp_alerts:"
    labels = "slo: fast, sli: latency, model: m"
    fired = [f"\n          - exp_labels: {{severity: {severity}, {labels}}}" for severity in severities]
    return text + ("".join(fired) or " []") + "\n"


def case(inputs: str, alerts: str, expressions: str = "") -> str:
    text = f"  - interval: 1m\n    input_series:\n{inputs}"
    text += f"    alert_rule_test:\n{alerts}" if alerts else ""
    return text + (f"    promql_expr_test:\n{expressions}" if expressions else "")


def value(expression: str, at: str, expected: float) -> str:
    return (
        f"      - expr: round({expression}, 0.0001)\n        eval_time: {at}\n"
        f"        exp_samples: [{{labels: '{{slo=\"fast\",sli=\"latency\",model=\"m\"}}', value: {expected}}}]\n"
    )
