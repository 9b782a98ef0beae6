"""Ports for clients of OpenAI's API: `--openai-port`, `/metrics` on the port of the API, and pages of other origins (CORS)."""

import json
import subprocess

import openai
import pytest

from harness.models import copy_models
from harness.ports import free_ports
from harness.server import Server, binary

ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with all of these flags."""
    folder = tmp_path_factory.mktemp("openai")
    (port,) = free_ports(1)
    flags = [f"--openai-port={port}", "--http-metrics", f"--allowed-origins={ORIGIN},http://localhost:3000"]
    with Server(folder, [copy_models(folder / "models", ["identity_fp32"])], flags) as server:
        server.openai = f"127.0.0.1:{port}"
        yield server


@pytest.mark.smoke
def test_the_port_has_the_api_alone(server):
    """OpenAI's client and probes find their paths; the protocols of KServe are on the HTTP port only."""
    with openai.OpenAI(base_url=f"http://{server.openai}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["identity_fp32"]
        assert client.models.retrieve("identity_fp32").id == "identity_fp32"
        with pytest.raises(openai.BadRequestError, match="does not generate text"):
            client.completions.create(model="identity_fp32", prompt="x")
    for path in ("/health", "/health/ready", "/v2/health/ready", "/v2/health/live", "/metrics"):
        assert server.get(path, server.openai)[0] == 200, path
    for method, path in [("POST", "/v2/models/identity_fp32/infer"), ("GET", "/v2"), ("POST", "/v2/repository/index"), ("GET", "/dashboard")]:
        assert server.ask(method, path, b"{}", server.openai)[0] == 404, path
    assert server.ask("POST", "/v1/models/identity_fp32:predict", b"{}", server.openai)[0] == 405


def test_metrics_on_the_port_of_the_api(server):
    """A scrape there reads what the metrics port shows, and is not counted as a request."""
    names = lambda text: {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}  # noqa: E731
    before = server.scrape()
    status, text = server.get("/metrics", server.http)
    assert status == 200 and names(text) == names(server.get("/metrics", server.metrics)[1])
    requests = lambda metrics: sum(value for (name, _), value in metrics.items() if name == "pharos_requests_total")  # noqa: E731
    assert requests(server.scrape()) == requests(before)


def test_metrics_are_on_their_own_port_by_default(start):
    """Without the flag, the path does not exist on the HTTP port."""
    server = start(["identity_fp32"])
    assert server.get("/metrics", server.http)[0] == 404


def preflight(server, origin):
    """Sends what a browser sends before a request with a token; returns the status and the headers of the answer."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    connection = server.connect()
    try:
        connection.request("OPTIONS", "/v1/chat/completions", headers=headers)
        response = connection.getresponse()
        response.read()
        return response.status, dict(response.headers)
    finally:
        connection.close()


def test_pages_of_listed_origins_may_read_answers(server):
    """A browser asks first, and then reads the answer, errors too. Other origins get no permission."""
    status, headers = preflight(server, ORIGIN)
    assert status == 204
    assert headers["access-control-allow-origin"] == ORIGIN
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in headers["access-control-allow-methods"]
    status, headers = preflight(server, "https://other.example")
    assert status == 405 and "access-control-allow-origin" not in headers
    for origin, is_allowed in [(ORIGIN, True), ("https://other.example", False)]:
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps({"model": "none", "prompt": "x"}), {"Origin": origin})
        response = connection.getresponse()
        response.read()
        assert response.status == 404
        assert (response.headers["access-control-allow-origin"] == origin) == is_allowed
        assert not is_allowed or "origin" in response.headers["vary"]
        connection.close()


def test_wrong_values_are_refused(tmp_path):
    """The error names the flag and what it expects."""
    for flags, part in [
        (["--allowed-origins=example.com"], "--allowed-origins: invalid origin"),
        (["--openai-port=x"], "invalid --openai-port"),
        (["--openai-port=8000", "--http-port=8000"], "Give each its own port"),
    ]:
        command = [binary(), f"--model-repository={tmp_path}", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert ended.returncode != 0 and part in ended.stdout + ended.stderr
