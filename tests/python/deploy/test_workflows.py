"""`.github/workflows`: rules that actionlint and zizmor do not check. `make lint` runs both where they are installed."""

import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest
import yaml

from harness.server import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = ROOT / ".github/workflows/release.yml"
PINNED = re.compile(r"[\w/-]+@[0-9a-f]{40}|\./\.github/workflows/\w+\.yml")
MACHINES = ["x86_64", "aarch64"]
BEFORE_PUBLICATION = {"tag", "checks", "packages", "files"}
"""The jobs that check and build."""
RIGHTS = {
    "pypi": {"id-token"},
    "registry": {"packages", "id-token", "attestations"},
    "page": {"contents", "id-token", "attestations"},
}
"""The jobs that publish, and what they may write."""
MOST_LINES = 3
"""A step has few lines: what it does is in a target of the Makefile or in a script, which run on any machine."""


def parsed(path) -> dict:
    """Returns a workflow."""
    return yaml.safe_load(path.read_text())


def steps(workflow: dict) -> list:
    """Returns the steps of all jobs."""
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def commands(workflow: dict) -> list:
    """Returns the commands of all steps."""
    return [step["run"] for step in steps(workflow) if "run" in step]


def needed(jobs: dict, name: str) -> set:
    """Returns the jobs that end before a job begins."""
    direct = jobs[name].get("needs", [])
    direct = {direct} if isinstance(direct, str) else set(direct)
    return direct.union(*(needed(jobs, other) for other in direct))


def written(job: dict) -> set:
    """Returns what a job may write."""
    return {right for right, access in job.get("permissions", {}).items() if access == "write"}


def mistakes(workflow: dict) -> list:
    """Returns what is wrong with the order, the rights and the triggers of a release."""
    jobs = workflow["jobs"]
    found = []
    # YAML reads the key `on` as true.
    if workflow[True] != {"push": {"tags": ["v*"]}}:
        found.append(f"a release begins with {workflow[True]}")
    rights = {name: written(job) for name, job in jobs.items() if written(job)}
    found += [f"{name} may write {sorted(right)}" for name, right in rights.items() if right != RIGHTS.get(name)]
    found += [f"{name} may not write" for name in RIGHTS.keys() - rights.keys()]
    for name in RIGHTS:
        found += [f"{name} does not wait for {other}" for other in sorted(BEFORE_PUBLICATION - needed(jobs, name))]
        found += [f"{name} runs without success of the others" for condition in [str(jobs[name].get("if", ""))] if "()" in condition]
    found += [f"page does not wait for {other}" for other in sorted(RIGHTS.keys() - {"page"} - needed(jobs, "page"))]
    if jobs["pypi"].get("environment", {}).get("name") != "pypi":
        found.append("pypi has no environment")
    if "secrets." in yaml.safe_dump(workflow):
        found.append("a secret is used")
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_limits(path):
    """Minimal rights by default, one run of each branch, a time limit, and actions of a fixed commit."""
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 180, name
        used = [step["uses"] for step in job.get("steps", []) if "uses" in step] + ([job["uses"]] if "uses" in job else [])
        assert [action for action in used if not PINNED.fullmatch(action)] == [], name
        assert path == RELEASE or "permissions" not in job, name
    for command in commands(workflow):
        assert len(command.strip().splitlines()) <= MOST_LINES, command


def test_an_action_has_one_version():
    pins = set()
    for path in WORKFLOWS:
        uses = re.findall(r"uses: ([\w/-]+)@(\w+)(.*)", path.read_text())
        assert [use for use in uses if not re.fullmatch(r" # v\d+\.\d+\.\d+", use[2])] == [], path.name
        pins |= set(uses)
    names = [name for name, _, _ in pins]
    assert len(names) == len(set(names)), sorted(pins)


def test_what_workflows_call_exists():
    """Scripts, targets of the Makefile, the subcommands and flags of the release's scripts, and workflows."""
    targets = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.M)
    targets = {target for line in targets for target in line.split()}
    for path in WORKFLOWS:
        workflow = parsed(path)
        for command in commands(workflow):
            for script in re.findall(r"(?:^|python3 )((?:\.ci|deploy)/[\w./-]+)", command):
                assert (ROOT / script).exists(), f"{path.name}: {script}"
            for target in re.findall(r"\bmake ([a-z-]+)", command):
                assert target in targets, f"{path.name}: make {target}"
            for script, subcommand, rest in re.findall(r"python3 (\S+) (\S+)(.*)", command):
                done = subprocess.run([sys.executable, ROOT / script, subcommand, "--help"], capture_output=True, text=True)
                assert done.returncode == 0, f"{path.name}: {command}\n{done.stderr}"
                assert [flag for flag in re.findall(r"--[a-z-]+", rest) if flag not in done.stdout] == [], f"{path.name}: {command}"
            for flag in re.findall(r"deploy/build-images (--\w+)", command):
                assert f"  {flag})" in (ROOT / "deploy/build-images").read_text(), f"{path.name}: {command}"
        for called in [job["uses"] for job in workflow["jobs"].values() if "uses" in job]:
            assert "workflow_call" in parsed(ROOT / called)[True], f"{path.name}: {called}"


def test_a_release_publishes_last_and_with_minimal_rights():
    assert mistakes(parsed(RELEASE)) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('    tags: ["v*"]', "    branches: [main]", "a release begins with"),
        ("    needs: files\n", "    needs: packages\n", "pypi does not wait for files"),
        ("    needs: [checks, packages]\n", "    needs: packages\n", "page does not wait for checks"),
        ("    needs: [files, pypi, registry]\n", "    needs: [files, pypi]\n", "page does not wait for registry"),
        ("    needs: files\n", "    needs: files\n    if: always()\n", "pypi runs without success"),
        ("  files:\n", "  files:\n    permissions:\n      id-token: write\n", "files may write ['id-token']"),
        ("      packages: write", "      actions: write\n      packages: write", "registry may write"),
        ("      packages: write", "      packages: read", "registry may write ['attestations', 'id-token']"),
        ("      name: pypi\n", "      name: other\n", "pypi has no environment"),
        ("${{ github.token }}", "${{ secrets.TOKEN }}", "a secret is used"),
    ],
)
def test_a_wrong_release_is_reported(old, new, expected):
    text = RELEASE.read_text()
    assert old in text
    found = mistakes(yaml.safe_load(text.replace(old, new, 1)))
    assert any(expected in mistake for mistake in found), found


def test_packages_are_for_both_machines():
    """Images are built and started without emulation: each on a runner of its architecture, from the wheel for it."""
    jobs = parsed(ROOT / ".github/workflows/packages.yml")["jobs"]
    assert jobs["wheels"]["strategy"]["matrix"]["machine"] == MACHINES
    built = jobs["images"]["strategy"]["matrix"]["include"]
    assert [one["machine"] for one in built] == MACHINES
    assert [one["runner"].endswith("-arm") for one in built] == [False, True]
    assert jobs["images"]["runs-on"] == "${{ matrix.runner }}"
    assert re.findall(r'"(\w+)": "(?:amd|arm)64"', (ROOT / "deploy/release/registry.py").read_text()) == MACHINES


def test_what_a_job_downloads_was_uploaded():
    uploaded = set()
    for path in WORKFLOWS:
        for step in steps(parsed(path)):
            if step.get("uses", "").startswith("actions/upload-artifact@"):
                name = step["with"]["name"]
                uploaded |= {name.replace("${{ matrix.machine }}", machine) for machine in MACHINES}
    for path in WORKFLOWS:
        for step in steps(parsed(path)):
            if step.get("uses", "").startswith("actions/download-artifact@"):
                pattern = step["with"].get("pattern") or step["with"]["name"].replace("${{ matrix.machine }}", "x86_64")
                assert [name for name in uploaded if fnmatch(name, pattern)], f"{path.name}: {pattern}"


def test_everything_published_is_attested():
    """The images, the chart and the files: each attestation names the digest that was pushed under its name."""
    jobs = parsed(RELEASE)["jobs"]
    attested = [step["with"] for step in steps(parsed(RELEASE)) if step.get("uses", "").startswith("actions/attest@")]
    pushed = {one["subject-name"].partition("repository_owner }}/")[2]: one["subject-digest"] for one in attested if "subject-name" in one}
    assert pushed == {
        "pharos": "${{ steps.images.outputs.pharos }}",
        "pharos-slim": "${{ steps.images.outputs.pharos-slim }}",
        "charts/pharos": "${{ steps.chart.outputs.pharos }}",
    }
    identifiers = {step["id"]: step["run"] for step in jobs["registry"]["steps"] if "id" in step}
    piped = [step for step in steps(parsed(RELEASE)) if " | " in step.get("run", "")]
    assert [step for step in piped if step.get("shell") != "bash"] == [], "the default shell ignores failures before a pipe"
    assert {name: re.findall(r"registry.py (\w+) .* \| tee -a \"\$GITHUB_OUTPUT\"", run) for name, run in identifiers.items()} == {
        "images": ["images"],
        "chart": ["chart"],
    }
    assert [one for one in attested if one.get("subject-checksums") == "release-files/SHA256SUMS"]
    assert [one for one in attested if one.get("sbom-path") == "release-files/pharos.cdx.json"]
