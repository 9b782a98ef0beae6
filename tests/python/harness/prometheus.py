"""Finds, downloads and runs a real Prometheus and its promtool.

They are taken from the PATH, or from Debian's package `prometheus` unpacked in `~/.cache/pharos-prometheus`, without root
and without an installation. `python -m harness.prometheus` downloads the package if it is missing; `make test` runs that first.
`PHAROS_PROMETHEUS` names another folder with the two programs; `none` skips these tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from harness import debian
from harness.peers import wait_or_kill
from harness.ports import free_ports
from harness.server import ROOT
from harness.waiting import DEADLINE_S

RULES = sorted((ROOT / "grafana/rules").glob("*.yaml"))
RULE_TESTS = sorted((ROOT / "grafana/rules/tests").glob("*.yaml"))
CACHE = debian.cache("pharos-prometheus")
SHIPPED = (ROOT / "prometheus.yaml").read_text()
RELABELING = SHIPPED[SHIPPED.index("    metric_relabel_configs:") :]


def program(name: str) -> str | None:
    """Returns the path of `prometheus` or `promtool`, or None."""
    named = os.environ.get("PHAROS_PROMETHEUS")
    if named:
        return shutil.which(name, path=named)
    return debian.program(name, CACHE)


def missing() -> str:
    """Returns why Prometheus cannot be used; empty if it can."""
    if program("prometheus") and program("promtool"):
        return ""
    if os.environ.get("PHAROS_PROMETHEUS"):
        return f"no prometheus and promtool in PHAROS_PROMETHEUS={os.environ['PHAROS_PROMETHEUS']}"
    return "prometheus and promtool are not installed: apt-get install prometheus, or PYTHONPATH=tests/python python -m harness.prometheus"


def fetch() -> str:
    """Unpacks Debian's package in the cache. Returns a message about the result. A failed download is no error."""
    if not missing() or os.environ.get("PHAROS_PROMETHEUS"):
        return missing() or f"prometheus: {program('prometheus')}"
    return debian.fetch("prometheus", CACHE) or missing() or f"prometheus: {program('prometheus')}"


def promtool(*arguments, text: str = "") -> subprocess.CompletedProcess:
    """Runs promtool with `text` as its standard input, and captures its output as text."""
    command = [program("promtool"), *map(str, arguments)]
    # It evaluates the rules of days, which takes long on a busy machine.
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=3 * DEADLINE_S)


def version() -> tuple:
    """Returns the version of `prometheus` as numbers: (2, 42)."""
    text = subprocess.run([program("prometheus"), "--version"], capture_output=True, text=True, timeout=DEADLINE_S)
    return tuple(map(int, re.search(r"version (\d+)\.(\d+)", text.stdout + text.stderr).groups()))


class Prometheus:
    """A Prometheus on loopback that scrapes `targets` (host:port) each second, with the relabeling of `prometheus.yaml`, and
    evaluates Pharos' rules; with `native`, it scrapes native histograms. Use it with `with`."""

    def __init__(self, folder: Path, *targets: str, native: bool = False):
        self.folder = folder
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        rules = "".join(f"  - {path}\n" for path in RULES)
        self.config = folder / "prometheus.yaml"
        # From 3.8 on, a setting replaces the flag.
        self.flags = ["--enable-feature=native-histograms"] if native and version() < (3, 8) else []
        setting = ", scrape_native_histograms: true" if native and not self.flags else ""
        self.config.write_text(
            f"global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s{setting}}}\n"
            f"rule_files:\n{rules}"
            f"scrape_configs:\n  - job_name: pharos\n    static_configs: [{{targets: {json.dumps(targets)}}}]\n"
            f"{RELABELING}"
        )
        self.process = None

    def __enter__(self):
        command = [
            program("prometheus"),
            f"--config.file={self.config}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            "--storage.tsdb.retention.time=1h",
            f"--web.listen-address={self.address}",
            "--log.level=warn",
            *self.flags,
        ]
        self.log = open(self.folder / "prometheus.log", "wb")
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=self.log, stderr=self.log)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        wait_or_kill(self.process, 10)
        self.log.close()

    def ask(self, path: str, **parameters) -> dict:
        """Returns the `data` of an answer of the HTTP API; raises an exception with the text of a Prometheus error."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode(errors='replace')}") from None

    def query(self, expression: str) -> list:
        """Returns the samples of an instant vector."""
        return self.ask("query", query=expression)["result"]

    def ready(self) -> bool:
        """Returns whether it has scraped the target."""
        try:
            urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=DEADLINE_S).close()
            return any(float(sample["value"][1]) == 1 for sample in self.query("up"))
        except OSError:
            return False


if __name__ == "__main__":
    print(fetch())
    sys.exit(0)
