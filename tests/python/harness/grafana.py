"""A Grafana with the repository's dashboards (https://grafana.com/docs/grafana/latest/administration/provisioning/).

`PHAROS_GRAFANA` names the program (`grafana` of Grafana 10 and later), `PHAROS_GRAFANA_HOME` the folder with its `conf` and `public`,
by default `/usr/share/grafana`. Debian has no package of Grafana: see https://grafana.com/grafana/download.
"""

import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

from harness.peers import wait_or_kill
from harness.ports import free_ports
from harness.server import ROOT
from harness.waiting import DEADLINE_S, eventually

SOURCE = Path("datasources/prometheus.yaml")
SOURCE_URL = "http://localhost:9090"


def program() -> str | None:
    """Returns the path of Grafana, or None."""
    return shutil.which(os.environ.get("PHAROS_GRAFANA", "grafana"))


def missing() -> str:
    """Returns why Grafana cannot be started; empty if it can."""
    return "" if program() else "no grafana on the PATH, and PHAROS_GRAFANA names none (https://grafana.com/grafana/download)"


class Grafana:
    """A Grafana on loopback that shows the dashboards without a login, with the data of a Prometheus. Use it with `with`."""

    def __init__(self, folder: Path, prometheus: str):
        self.folder, self.process = folder, None
        self.port = free_ports(1)[0]
        shutil.copytree(ROOT / "grafana/provisioning", folder / "provisioning")
        source = folder / "provisioning" / SOURCE
        assert SOURCE_URL in source.read_text()
        source.write_text(source.read_text().replace(SOURCE_URL, f"http://{prometheus}"))

    def environment(self) -> dict:
        """The variables that replace settings of `defaults.ini`."""
        settings = {
            "PATHS_PROVISIONING": self.folder / "provisioning", "PATHS_DATA": self.folder / "grafana",
            "SERVER_HTTP_ADDR": "127.0.0.1", "SERVER_HTTP_PORT": self.port, "AUTH_ANONYMOUS_ENABLED": "true",
            "ANALYTICS_REPORTING_ENABLED": "false", "ANALYTICS_CHECK_FOR_UPDATES": "false",
            "ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false", "PLUGINS_PREINSTALL_DISABLED": "true", "LOG_MODE": "console",
        }  # fmt: skip
        ours = {f"GF_{name}": str(value) for name, value in settings.items()}
        return os.environ | ours | {"PHAROS_DASHBOARDS": str(ROOT / "grafana/dashboards")}

    def __enter__(self):
        home = os.environ.get("PHAROS_GRAFANA_HOME", "/usr/share/grafana")
        self.log = open(self.folder / "grafana.log", "wb")
        command = [program(), "server", f"--homepath={home}"]
        self.process = subprocess.Popen(command, env=self.environment(), stdout=self.log, stderr=self.log)
        try:
            eventually("Grafana is ready", self.ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.terminate()
        wait_or_kill(self.process, 10)
        self.log.close()

    def ready(self) -> bool:
        """Returns whether it answers. Fails if it has ended."""
        if self.process.poll() is not None:
            log = (self.folder / "grafana.log").read_text(errors="replace")
            raise AssertionError(f"Grafana ended with {self.process.returncode}:\n{log[-2000:]}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/health", timeout=DEADLINE_S).close()
            return True
        except OSError:
            return False

    def url(self, dashboard: str, minutes: float, **variables: str) -> str:
        """Returns the address of a dashboard by its `uid`, without menus, with the last minutes."""
        chosen = "".join(f"&var-{name}={value}" for name, value in variables.items())
        return f"http://127.0.0.1:{self.port}/d/{dashboard}?kiosk&theme=light&from=now-{round(60 * minutes)}s&to=now{chosen}"
