"""Writes the generated pages of the book's reference: `PHAROS_BIN=... PYTHONPATH=tests/python python -m documents.reference`."""

import json
import re
import subprocess

from harness.server import ROOT, binary

FOLDER = ROOT / "docs/src/reference"

GUIDES = {
    "Server": "guides/production.md", "Model repository": "guides/model-repository.md", "Workers": "guides/backends.md",
    "GPUs": "guides/gpus.md", "Rate limiter": "guides/scheduling.md#rate-limiter",
    "Accepted for compatibility with Triton (no effect)": "triton/triton.md", "Response cache": "guides/response-cache.md",
    "HTTP": "guides/limits.md", "Metrics": "metrics/overview.md", "gRPC": "guides/limits.md",
    "Access control": "guides/security.md", "Client timeouts": "guides/limits.md", "Metric logs": "metrics/tslog.md",
    "Logging": "guides/production.md#the-log", "Tracing": "guides/traces.md", "SageMaker": "guides/cloud-platforms.md#sagemaker",
    "Vertex AI": "guides/cloud-platforms.md#vertex-ai",
    "OpenAI's API": "guides/language-models.md#ports",
}  # fmt: skip
"""The page that describes the flags of each section of the help."""


def flags() -> str:
    """Returns the flags of `pharos --help` by section. Defaults that are sentences stay in the help text only."""
    text = subprocess.run([binary(), "--help"], capture_output=True, text=True, check=True).stdout
    page = [
        "# Flags", "",
        "`pharos --help` describes each flag. A flag on the command line overrides its environment variable. The start warns about",
        "variables `PHAROS_...` that set no flag.", "",
        "| flag | variable | default | section |", "|---|---|---|---|",
    ]  # fmt: skip
    for title, section in re.findall(r"^(\w[^\n]*):\n((?: +[^\n]*\n|\n)+)", text.partition("\nOptions:\n")[2], re.M):
        # Flags are indented by six spaces, their descriptions by more.
        for flag, value, rest in re.findall(r"^ {6}--([\w-]+)(?: (\S+))?(.*?)(?=^ {6}--|\Z)", section, re.M | re.S):
            rest = " ".join(rest.split())
            variable, default = re.search(r"\[env: (\w+)=", rest), re.search(r"\[default: (\S+)\]", rest)
            cells = [f"--{flag} {value}".strip(), variable and variable[1], default and default[1]]
            cells = [f"`{cell}`".replace("|", "\\|") if cell else "" for cell in cells] + [f"[{title}](../{GUIDES[title]})"]
            page.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(page) + "\n"


def metrics() -> str:
    """Returns the metrics of the built-in definition by type."""
    command = [binary(), "metrics", "list", "--format", "json"]
    defined = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    page = [
        "# Metrics catalog", "",
        "The metrics of the built-in [`metrics.yaml`](../metrics/definition.md). `pharos metrics list` also shows how each leaves",
        "the server. Metrics marked `(off)` are defined and switched off.",
    ]  # fmt: skip
    for kind in dict.fromkeys(metric["type"] for metric in defined):
        page += ["", f"## Type: {kind}", "", "| metric | unit | labels | help |", "|---|---|---|---|"]
        for metric in (metric for metric in defined if metric["type"] == kind):
            name = f"`{metric['name']}`" + ("" if metric["enabled"] else " (off)")
            labels = ", ".join(f"`{label}`" for label in metric["dimensions"])
            page.append(f"| {name} | {metric['unit']} | {labels} | {metric['help']} |".replace("|  |", "| |"))
    return "\n".join(page) + "\n"


PAGES = {"flags.md": flags, "metrics.md": metrics}

if __name__ == "__main__":
    for page, contents in PAGES.items():
        (FOLDER / page).write_text(contents())
