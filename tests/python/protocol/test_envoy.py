"""A real Envoy in front of two servers, one of which is slower. With client-side weighted round robin, which uses the load reports
in responses, the traffic shifts to the fast server; with plain round robin it does not."""

import http.client
import json
import threading

import pytest

from harness import envoy
from harness.models import write
from harness.server import Server, kill_all
from harness.waiting import DEADLINE_S, eventually, join_all
from harness.wire import tensor

pytestmark = pytest.mark.skipif(bool(envoy.missing()), reason=envoy.missing() or "Envoy is installed")
REQUEST = json.dumps({"inputs": [tensor("INPUT0", "FP32", [1], [1.0])]})
FAST_MS, SLOW_MS = 5, 50
CLIENTS = 2
MODEL = """
backend: "test"
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ count: 2 kind: KIND_CPU }} ]
parameters {{ key: "function" value {{ string_value: "delay" }} }}
parameters {{ key: "delay_ms" value {{ string_value: "{delay_ms}" }} }}
"""


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """The HTTP ports of the fast and the slow server."""
    servers = []
    for delay_ms in (FAST_MS, SLOW_MS):
        folder = tmp_path_factory.mktemp(f"delay-{delay_ms}")
        models = write(folder / "models", "m", MODEL.format(delay_ms=delay_ms))
        servers.append(Server(folder, [models]))
        servers[-1].launch()
    try:
        for server in servers:
            server.wait_until_ready()
        yield [server.http_port for server in servers]
    finally:
        kill_all(servers)


class Clients:
    """Clients that each send one request after the other. Use it with `with`."""

    def __init__(self, port: int):
        self.port, self.ended, self.statuses = port, threading.Event(), set()
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(CLIENTS)]

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        while not self.ended.is_set():
            connection.request("POST", "/v2/models/m/infer", REQUEST)
            response = connection.getresponse()
            response.read()
            self.statuses.add(response.status)
        connection.close()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self.ended.set()
        join_all(self.threads)
        assert self.statuses == {200}


def share(proxy, count: int) -> float:
    """Returns the part of the next `count` requests that the fast server gets."""
    before = proxy.requests()

    def counted():
        new = [now - then for now, then in zip(proxy.requests(), before)]
        return sum(new) >= count and new

    fast, slow = eventually(f"{count} more requests", counted)
    return fast / (fast + slow)


@pytest.mark.parametrize("report_format", ["json", "text", "binary"])
def test_with_load_reports_the_fast_server_gets_most_requests(tmp_path, ports, report_format):
    with envoy.Envoy(tmp_path, ports, envoy.WEIGHTED_ROUND_ROBIN, report_format) as proxy, Clients(proxy.port):
        eventually("the traffic shifts", lambda: share(proxy, 50) > 0.7)
        assert share(proxy, 200) > 0.65


def test_without_them_both_get_the_same_number(tmp_path, ports):
    with envoy.Envoy(tmp_path, ports, envoy.ROUND_ROBIN, "json") as proxy, Clients(proxy.port):
        for _ in range(3):
            assert 0.4 < share(proxy, 50) < 0.6
