"""The exit while a registration waits for a server that stalls, from which an archive or its packages come."""

import json
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import grpc
import pytest

from harness.server import alive, children
from harness.waiting import DEADLINE_S, eventually
from torchserve.archive_files import files, zipped
from torchserve.home import HOST, INFERENCE, PYTHON, Home

ANYWHERE = "allowed_urls=http://.*"
REFUSED = [(503, {"code": 503, "type": "ServiceUnavailableException", "message": "Server exiting"})]


class Silent:
    """A server that sends `begin` to each client, and nothing more."""

    def __init__(self, begin: bytes):
        self.begin, self.clients = begin, []
        self.listener = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self.listener.getsockname()[1]}/a.mar"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        """Accepts clients until the listener is closed."""
        try:
            while True:
                client, _ = self.listener.accept()
                client.recv(4096)
                client.sendall(self.begin)
                self.clients.append(client)
        except OSError:
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (self.listener, *self.clients):
            each.close()


def ends_at_once(home):
    began = time.monotonic()
    home.process.send_signal(signal.SIGTERM)
    assert home.process.wait(DEADLINE_S) == 0
    assert time.monotonic() - began < 3
    for log in (home.folder / "out", *(home.folder / "logs").glob("*.log")):
        assert "panicked" not in log.read_text(), log


SLEEPS = """import time

def handle(data, context):
    time.sleep(float(bytes(data[0]["body"])) if data else 0)
    return data and ["done"] * len(data)
"""


def health(home) -> dict:
    """Returns the answers of all health checks, of the server and of a model, each as whether it is healthy."""
    _, _, of_model = home.ask("GET", "/v1/models/sleeps", port=home.management)
    with grpc.insecure_channel(f"{HOST}:{home.grpc}") as channel:
        ping = channel.unary_unary(f"{INFERENCE}Ping")(b"", timeout=DEADLINE_S)
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=DEADLINE_S)
    return {
        "/ping": home.ask("GET", "/ping")[0] == 200,
        "Ping": b"Healthy" in ping,
        "/v2/health/ready": home.ask("GET", "/v2/health/ready")[0] == 200,
        "ServerReady": ready == b"\x08\x01",
        "/v1/models/sleeps": json.loads(of_model)["ready"],
    }


def test_no_health_check_is_healthy_while_the_server_exits(tmp_path):
    """A request is in flight, so that the server drains."""
    with Home(tmp_path, ["metrics_mode=prometheus"]) as home:
        (home.store / "sleeps.mar").write_bytes(zipped(files("sleeps", SLEEPS)))
        home.register("sleeps.mar")
        assert set(health(home).values()) == {True}
        answers = []
        asked = threading.Thread(target=lambda: answers.append(home.predict("sleeps", b"4")))
        asked.start()
        eventually("the request runs", lambda: home.manage("GET", "/models/sleeps")[1][0]["workers"] and running(home))
        home.process.send_signal(signal.SIGTERM)
        eventually("the server drains", lambda: "exiting: waiting" in (home.folder / "out").read_text())
        assert set(health(home).values()) == {False}, health(home)
        assert home.predict("sleeps", b"0")[0] == 503
        asked.join(DEADLINE_S)
        assert answers == [(200, b"done")]
        assert home.process.wait(DEADLINE_S) == 0


def test_ping_is_unhealthy_before_requests_are_refused(tmp_path):
    """`--exit-delay-secs`: load balancers learn of the exit while the server still answers."""
    with Home(tmp_path) as home:
        pass
    home.command.append("--exit-delay-secs=600")
    (home.store / "sleeps.mar").write_bytes(zipped(files("sleeps", SLEEPS)))
    with home:
        home.register("sleeps.mar")
        home.process.send_signal(signal.SIGTERM)
        eventually("the exit begins", lambda: "no longer ready" in (home.folder / "out").read_text())
        found = health(home)
        assert not any(found[name] for name in ("/ping", "Ping", "/v2/health/ready", "ServerReady")), found
        assert home.predict("sleeps", b"0") == (200, b"done")
        home.process.send_signal(signal.SIGTERM)
        home.process.wait(DEADLINE_S)


def running(home) -> bool:
    """Returns whether the request has been counted."""
    return any(name == "ts_inference_requests_total" and value > 0 for (name, _), value in home.scrape().items())


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nPK"], ids=["head", "body"])
def test_a_registration_gets_an_answer(tmp_path, begin):
    """The client learns that the server exits, and no part of the archive is left."""
    with Silent(begin) as silent, Home(tmp_path, [ANYWHERE]) as home:
        answers = []
        asked = threading.Thread(target=lambda: answers.append(home.manage("POST", f"/models?url={silent.url}")))
        asked.start()
        eventually("the download stalls", lambda: silent.clients)
        ends_at_once(home)
        asked.join(DEADLINE_S)
        assert answers == REFUSED
        assert list(home.store.iterdir()) == []


def test_pip_ends(tmp_path):
    """As the download does; pip does not outlive the server."""
    if subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no pip")
    with Silent(b"") as silent, Home(tmp_path, ["install_py_dep_per_model=true"]) as home:
        required = {"requirements.txt": f"--index-url {silent.url}\npharos-none\n"}
        (home.store / "a.mar").write_bytes(zipped(files("a", requirementsFile="requirements.txt") | required))
        answers = []
        asked = threading.Thread(target=lambda: answers.append(home.manage("POST", "/models?url=a.mar")))
        asked.start()
        eventually("pip waits", lambda: silent.clients)
        pip = [pid for pid in children(home.process.pid) if b"pip" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert pip
        ends_at_once(home)
        asked.join(DEADLINE_S)
        assert answers == REFUSED
        eventually("pip has ended", lambda: not any(alive(pid) for pid in pip))
