"""`.github/workflows`: rules that actionlint does not check. `make lint` runs actionlint where it is installed."""

import re

import pytest
import yaml

from harness.server import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"[\w/-]+@[0-9a-f]{40}|\./\.github/workflows/\w+\.yml")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_limits(path):
    """Minimal rights by default, one run of each branch, a time limit, and actions of a fixed commit."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 180, name
        used = [step["uses"] for step in job.get("steps", []) if "uses" in step] + ([job["uses"]] if "uses" in job else [])
        assert [action for action in used if not PINNED.fullmatch(action)] == [], name


def test_scripts_of_workflows_exist():
    for path in WORKFLOWS:
        for script in re.findall(r"(?:run: |python3 )((?:\.ci|deploy)/[\w./-]+)", path.read_text()):
            assert (ROOT / script).exists(), f"{path.name}: {script}"
