"""Requests that are answered before their body is read: the client gets the answer even if it sends the whole body first, and the
connection can be used again."""

import http.client
import json

import pytest

from harness.connections import connect, read_response
from harness.inference import one
from harness.models import copy_models
from harness.server import Server

BODY = bytes(32 << 20)
INFER = "/v2/models/identity_fp32/infer"
REQUEST = json.dumps(one("FP32", [1, 1], [3]))

CASES = {
    "no access": ("POST", INFER, {}, 403),
    "no such path": ("POST", "/v2/nowhere", {}, 404),
    "wrong method": ("PUT", INFER, {"key": "secret"}, 405),
    "unknown model": ("POST", "/v1/models/unknown:predict", {"key": "secret"}, 404),
    "unknown coding": ("POST", INFER, {"key": "secret", "Content-Encoding": "br"}, 501),
    "too large": ("POST", INFER, {"key": "secret"}, 400),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unread")
    options = ["--http-restricted-api=inference:key=secret", "--http-max-input-size=1048576"]
    with Server(folder, [copy_models(folder / "models", ["identity_fp32"])], options) as running:
        yield running


@pytest.mark.parametrize("chunked", (False, True), ids=("declared", "chunked"))
@pytest.mark.parametrize("case", CASES)
def test_the_answer_arrives(server, case, chunked):
    method, path, headers, status = CASES[case]
    connection = http.client.HTTPConnection(server.http, timeout=30)
    body = (BODY[:65536] for _ in range(len(BODY) // 65536)) if chunked else BODY
    connection.request(method, path, body, headers, encode_chunked=chunked)
    response = connection.getresponse()
    assert (response.status, bool(response.read())) == (status, True)
    socket = connection.sock
    is_closed = socket is None
    # A body that is too large is the only case in which the server closes the connection.
    assert is_closed == (case == "too large")
    connection.request("POST", INFER, REQUEST, {"key": "secret"})
    again = connection.getresponse()
    assert (again.status, socket in (None, connection.sock)) == (200, True), again.read()


def test_a_client_that_waits_is_not_asked_to_send(server):
    """With `Expect: 100-continue` the client gets the final answer at once, and the connection ends."""
    head = f"POST /v2/nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n"
    with connect(server.http_port) as wire:
        wire.sendall(head.encode())
        assert read_response(wire)[0] == 404
        assert wire.recv(1) == b""


def test_an_answer_does_not_wait_for_the_body(server):
    """A client that reads meanwhile gets the answer before it has sent the body; one that stops sending is disconnected."""
    with connect(server.http_port) as wire:
        wire.sendall(f"POST /v2/nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\nbegin".encode())
        assert read_response(wire)[0] == 404
        assert wire.recv(1) == b""
