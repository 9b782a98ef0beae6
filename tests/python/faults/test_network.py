"""Clients that vanish without closing their connections, and a network that loses packets. Packets are dropped in a separate network
namespace."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from faults.isolated import Network, missing
from harness.connections import post, read_response
from harness.inference import one
from harness.server import MODELS, total
from harness.waiting import eventually

WHY_NOT = missing("net", "iptables", "ip")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
ONE = json.dumps(one("FP32", [1, 1], [1])).encode()
INFER = "/v2/models/identity_fp32/infer"
SMALL = post(INFER, ONE)
COUNT = 1 << 20
"""Numbers in a tensor that does not fit the buffers of a connection."""
VANISHING = "127.0.0.2"
"""The address of the clients whose packets are lost."""
HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
"""The preface of a client, and its empty settings."""
EACH = 20
"""Clients of each kind."""
LIMITS = [f"--client-{name}-timeout-secs=2" for name in ("head", "body", "write", "idle")]
LIMITS += ["--grpc-keepalive-time=1000", "--grpc-keepalive-timeout=1000"]
OPTIONS = ["--model-control-mode=explicit", "--load-model=identity_fp32"]


def large(count: int) -> bytes:
    """Returns a request with a binary tensor, which the answer repeats."""
    tensor = {"name": "INPUT0", "shape": [1, count], "datatype": "FP32", "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    numbers = np.arange(count, dtype=np.float32).tobytes()
    return post(INFER, head + numbers, f"Inference-Header-Content-Length: {len(head)}")


def answered(connection: socket.socket) -> socket.socket:
    """Sends a request and reads its answer."""
    connection.sendall(SMALL)
    assert read_response(connection)[0] == 200
    return connection


def vanishing(server) -> list:
    """Opens the connections of clients in each state."""
    started = []
    for _ in range(EACH):
        http = [server.opened(server.http_port, VANISHING) for _ in range(4)]
        answered(http[0])
        http[1].sendall(SMALL[:20])
        http[2].sendall(SMALL[:-5])
        http[3].sendall(large(COUNT))
        grpc = server.opened(server.grpc_port, VANISHING)
        grpc.sendall(HTTP2_START)
        started += [*http, grpc]
    return started


def open_connections(server) -> float:
    """Returns the number of connections for requests; the scrape uses another listener."""
    metrics = server.scrape()
    return sum(total(metrics, "pharos_connections_open", listener=name) for name in ("http", "grpc"))


def descriptors(server) -> int:
    """Returns the number of open descriptors of the frontend."""
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_clients_that_vanish_hold_nothing(tmp_path):
    """Idle clients, and clients in the middle of a head, of a body and of a large answer: all their packets are lost. The limits of
    time end their connections, and other clients are served meanwhile."""
    with Network(tmp_path, [MODELS], [*OPTIONS, *LIMITS]) as server:
        with answered(server.opened(server.http_port)):
            before = descriptors(server)
        clients = vanishing(server)
        eventually("the server has accepted all", lambda: open_connections(server) >= len(clients))
        for side in ("s", "d"):
            server.inside(f"iptables -A INPUT -{side} {VANISHING} -j DROP")
        with answered(server.opened(server.http_port)) as other:

            def only_this_one() -> bool:
                answered(other)
                return open_connections(server) == 1

            eventually("the connections of the vanished clients are closed", only_this_one)
        eventually("their descriptors are free", lambda: descriptors(server) <= before)
        for client in clients:
            client.close()


def test_a_network_that_loses_packets_changes_no_byte(tmp_path):
    """One of fifty packets is lost in each direction."""
    with Network(tmp_path, [MODELS], OPTIONS) as server:
        server.inside("iptables -A INPUT -m statistic --mode random --probability 0.02 -j DROP")
        request = large(1 << 16)
        expected = np.arange(1 << 16, dtype=np.float32).tobytes()

        def ask(_) -> bool:
            with server.opened(server.http_port) as connection:
                connection.sendall(request)
                status, body = read_response(connection)
            return status == 200 and body.endswith(expected)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(ask, range(100)))
