"""TLS and mutual TLS on every listener, through unmodified clients; reloaded and invalid files."""

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import time

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from harness.certificates import Authority, Files, key_pem, new_key
from harness.inference import one
from harness.prometheus import Prometheus, missing
from harness.server import binary, kill_all, total
from harness.tls_server import LISTENERS, MODEL, TlsServer
from harness.waiting import DEADLINE_S, eventually

@pytest.fixture(scope="module", params=[False, True], ids=["tls", "mutual"])
def secured(request, tmp_path_factory):
    """A server that requires TLS, or TLS with client certificates."""
    folder = tmp_path_factory.mktemp("tls")
    with TlsServer(folder, Files(folder / "pem"), mutual=request.param) as server:
        yield server


def tensor(module):
    """Returns the input of the model."""
    value = module.InferInput("INPUT0", [1, 2], "FP32")
    value.set_data_from_numpy(np.array([[1, 2]], np.float32))
    return value


def grpc_options(server) -> dict:
    """Returns the TLS options of tritonclient's gRPC clients."""
    files = server.files
    options = {"ssl": True, "root_certificates": str(files.root)}
    if server.mutual:
        options |= {"private_key": str(files.client_key), "certificate_chain": str(files.client_cert)}
    return options


@pytest.mark.smoke
def test_http_client(secured):
    """tritonclient over HTTPS."""
    with tritonclient.http.InferenceServerClient(
        secured.http, ssl=True, ssl_context_factory=secured.context
    ) as client:
        assert client.is_server_ready()
        result = client.infer(MODEL, [tensor(tritonclient.http)])
        assert result.as_numpy("OUTPUT0").tolist() == [[1, 2]]


def test_health_check(secured):
    """`pharos health` verifies the server, by a name of its certificate that the address need not have, and identifies itself."""
    files, port = secured.files, secured.http_port
    identity = [f"--cert={files.client_cert}", f"--key={files.client_key}"] if secured.mutual else []

    def ask(address: str, *flags: str) -> tuple[int, str]:
        command = [binary(), "health", address, *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        return ended.returncode, ended.stderr

    trusted = [f"--root-cert={files.root}", *identity]
    assert ask(f"https://localhost:{port}", *trusted) == (0, "")
    assert ask(f"https://127.0.0.1:{port}", "--server-name=localhost", *trusted) == (0, "")
    for flags, reason in [
        (identity, "invalid peer certificate: UnknownIssuer"),
        (["--server-name=other.example", *trusted], "not valid for name"),
        (["--root-cert=/missing", *identity], "cannot read the certificates in '/missing'"),
    ]:
        code, text = ask(f"https://localhost:{port}", *flags)
        assert code == 1 and reason in text, text
    if secured.mutual:
        # The server's alert, unless it has closed the connection before the end of the request.
        code, text = ask(f"https://localhost:{port}", f"--root-cert={files.root}")
        assert code == 1 and re.search("CertificateRequired|Broken pipe|reset by peer", text), text
    code, text = ask(f"localhost:{port}")
    assert code == 1 and text == f'localhost:{port} is not ready: it answered 400: {{"error":"this port requires TLS: use https"}}\n'


def test_http_client_with_files(secured):
    """tritonclient's options that name certificate files."""
    files = secured.files
    options = {"ca_certs": str(files.root)}
    if secured.mutual:
        options |= {"certfile": str(files.client_cert), "keyfile": str(files.client_key)}
    with tritonclient.http.InferenceServerClient(secured.http, ssl=True, ssl_options=options) as client:
        assert client.infer(MODEL, [tensor(tritonclient.http)]).as_numpy("OUTPUT0").tolist() == [[1, 2]]


def test_http_client_aio(secured):
    """tritonclient's client for asyncio."""

    async def run():
        async with tritonclient.http.aio.InferenceServerClient(
            secured.http, ssl=True, ssl_context=secured.context()
        ) as client:
            result = await client.infer(MODEL, [tensor(tritonclient.http)])
            return result.as_numpy("OUTPUT0").tolist()

    assert asyncio.run(run()) == [[1, 2]]


@pytest.mark.smoke
def test_grpc_client(secured):
    """tritonclient over gRPC, a unary call and a stream."""
    with tritonclient.grpc.InferenceServerClient(secured.grpc, **grpc_options(secured)) as client:
        assert client.infer(MODEL, [tensor(tritonclient.grpc)]).as_numpy("OUTPUT0").tolist() == [[1, 2]]
        answers = []
        client.start_stream(lambda result, error: answers.append(error or result.as_numpy("OUTPUT0").tolist()))
        client.async_stream_infer(MODEL, [tensor(tritonclient.grpc)])
        client.stop_stream()
        assert answers == [[[1, 2]]]


def test_grpc_client_aio(secured):
    """tritonclient's client for asyncio."""

    async def run():
        async with tritonclient.grpc.aio.InferenceServerClient(secured.grpc, **grpc_options(secured)) as client:
            return (await client.infer(MODEL, [tensor(tritonclient.grpc)])).as_numpy("OUTPUT0").tolist()

    assert asyncio.run(run()) == [[1, 2]]


@pytest.mark.parametrize(("offered", "agreed"), [
    (["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), ([], None),
])  # fmt: skip
def test_protocols_are_agreed_on(secured, offered, agreed):
    """ALPN: HTTP/2 if the client offers it, HTTP/1.1 if it offers only that or sends no ALPN."""
    context = secured.context()
    if offered:
        context.set_alpn_protocols(offered)
    with socket.create_connection(("127.0.0.1", secured.http_port), timeout=DEADLINE_S) as plain:
        with context.wrap_socket(plain, server_hostname="localhost") as wire:
            assert wire.selected_alpn_protocol() == agreed
            if agreed == "h2":
                wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                assert wire.recv(9)[3] == 4, "a SETTINGS frame"
            else:
                wire.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                assert wire.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda v: v.name)
def test_versions(secured, version):
    """TLS 1.2 and 1.3 are supported."""
    context = secured.context()
    context.minimum_version = context.maximum_version = version
    connection = http.client.HTTPSConnection(secured.http, timeout=DEADLINE_S, context=context)
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().status == 200
    connection.close()


def test_large_tensors(secured):
    """16 MiB in each direction."""
    values = np.arange(4 * 2**20, dtype=np.float32).reshape(1, -1)
    value = tritonclient.grpc.InferInput("INPUT0", list(values.shape), "FP32")
    value.set_data_from_numpy(values)
    with tritonclient.grpc.InferenceServerClient(secured.grpc, **grpc_options(secured)) as client:
        np.testing.assert_array_equal(client.infer(MODEL, [value]).as_numpy("OUTPUT0"), values)


def refusals(server, listener: str, reason: str) -> float:
    """Returns the number of connections that were refused for this reason."""
    return total(server.scrape(), "pharos_connections_refused_total", listener=listener, reason=reason)


def test_clear_text_at_a_port_with_tls(secured):
    """HTTP clients get an HTTP error, gRPC clients the status UNAVAILABLE; other connections are closed; all are counted."""
    before = {name: refusals(secured, name, "NOT_TLS") for name in LISTENERS}
    connection = http.client.HTTPConnection(secured.http, timeout=DEADLINE_S)
    connection.request("GET", "/v2/health/live")
    response = connection.getresponse()
    assert (response.status, json.load(response)) == (400, {"error": "this port requires TLS: use https"})
    connection.close()
    with tritonclient.grpc.InferenceServerClient(secured.grpc) as client:
        with pytest.raises(InferenceServerException) as error:
            client.is_server_live(client_timeout=20)
    assert error.value.status() == "StatusCode.UNAVAILABLE"
    with socket.create_connection(("127.0.0.1", secured.metrics_port), timeout=DEADLINE_S) as wire:
        wire.sendall(bytes(100))
        try:
            assert wire.recv(100) == b""
        except ConnectionResetError:
            pass
    after = {name: refusals(secured, name, "NOT_TLS") for name in LISTENERS}
    assert all(after[name] > before[name] for name in LISTENERS), after
    assert "the client does not use TLS, which this port requires" in secured.log_tail()


def test_a_client_without_a_certificate(secured):
    """It is accepted only by a server without mutual TLS."""
    context = ssl.create_default_context(cafile=secured.files.root)
    connection = http.client.HTTPSConnection(secured.http, timeout=DEADLINE_S, context=context)
    if not secured.mutual:
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().status == 200
        return
    is_refused(secured, connection)
    options = {"ssl": True, "root_certificates": str(secured.files.root)}
    with tritonclient.grpc.InferenceServerClient(secured.grpc, **options) as client:
        with pytest.raises(InferenceServerException) as error:
            client.is_server_live(client_timeout=20)
    assert error.value.status() == "StatusCode.UNAVAILABLE"


def is_refused(secured, connection):
    """Checks that the server refuses the handshake of a client at once: a client that waits for an answer gets a `TimeoutError`."""
    before = refusals(secured, "http", "HANDSHAKE")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        connection.request("GET", "/v2/health/live")
        connection.getresponse()
    assert refusals(secured, "http", "HANDSHAKE") == before + 1


def test_a_client_of_another_authority(secured, tmp_path):
    """With mutual TLS only certificates of the configured authorities are accepted."""
    if not secured.mutual:
        pytest.skip("the server requires no client certificates")
    stranger = Files(tmp_path / "other")
    context = ssl.create_default_context(cafile=secured.files.root)
    context.load_cert_chain(stranger.client_cert, stranger.client_key)
    connection = http.client.HTTPSConnection(secured.http, timeout=DEADLINE_S, context=context)
    is_refused(secured, connection)


@pytest.mark.skipif(bool(missing()), reason=missing() or "there")
def test_prometheus_scrapes_over_tls(secured, tmp_path):
    """A real Prometheus with `tls_config` scrapes the server."""
    files = secured.files
    lines = ["    scheme: https", "    tls_config:", f"      ca_file: {files.root}"]
    if secured.mutual:
        lines += [f"      cert_file: {files.client_cert}", f"      key_file: {files.client_key}"]
    prometheus = Prometheus(tmp_path, secured.metrics)
    prometheus.config.write_text(prometheus.config.read_text() + "\n".join(lines) + "\n")
    with prometheus as running:
        eventually("Prometheus has scraped the server", running.ready)
        assert running.query("nv_inference_request_success")


# ---- servers with other configurations --------------------------------------------------------------------------------


@pytest.fixture
def serve(tmp_path):
    """Starts a server with TLS and ends it with the test."""
    started = []

    def begin(files, *options, wait=True, **more):
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        running = TlsServer(folder, files, *options, **more)
        started.append(running)
        running.launch()
        if wait:
            running.wait_until_ready()
        return running

    yield begin
    kill_all(started)


@pytest.mark.parametrize("kind", ["pkcs8", "pkcs1", "sec1"])
def test_kinds_of_keys_and_chains(serve, tmp_path, kind):
    """Keys in PKCS#8, PKCS#1 and SEC1; an intermediate certificate, which the server sends too."""
    files = Files(tmp_path / "pem")
    key = new_key(kind)
    chain, _ = Authority("between", files.authority).issue("server", key)
    files.cert.write_bytes(chain)
    files.key.write_bytes(key_pem(key, kind))
    assert serve(files).get("/v2/health/live")[0] == 200


def test_certificates_are_read_again(serve, tmp_path):
    """New connections get a new certificate, and open connections continue; an invalid one changes nothing and is reported;
    SIGHUP reloads at once."""
    files = Files(tmp_path / "pem")
    server = serve(files)
    kept = server.connect()
    kept.request("GET", "/v2/health/live")
    kept.getresponse().read()
    with tritonclient.grpc.InferenceServerClient(server.grpc, **grpc_options(server)) as client:
        assert client.is_server_live()
        files.renew("renewed")
        eventually("HTTP has the new certificate", lambda: server.certificate_of() == "renewed")
        eventually("gRPC has the new certificate", lambda: server.certificate_of(server.grpc) == "renewed")
        eventually("the metrics port has the new certificate", lambda: server.certificate_of(server.metrics) == "renewed")
        good = files.cert.read_bytes()
        files.cert.write_text("-----BEGIN CERTIFICATE-----\nnot base64!\n-----END CERTIFICATE-----\n")
        reloads = lambda result: total(server.scrape(), "pharos_credential_reloads_total", file="http_tls", result=result)  # noqa: E731
        eventually("the invalid file is reported", lambda: reloads("failure") == 1)
        assert f"http_tls reload failed, keeping the previous ones: '{files.cert}' is not valid PEM" in server.log_tail()
        assert server.certificate_of() == "renewed"
        files.cert.write_bytes(good)
        eventually("the valid file is read", lambda: reloads("success") == 2)
        server.process.send_signal(signal.SIGHUP)
        eventually("SIGHUP reloads the file", lambda: reloads("success") == 3)
        kept.request("GET", "/v2/health/live")
        assert kept.getresponse().status == 200, "the open connection must continue"
        assert client.is_server_live()
    kept.close()
    server.stop()


def test_files_behind_a_link_that_is_exchanged(serve, tmp_path):
    """Kubernetes renews a secret like this: the files are links into a folder that is replaced as a whole."""
    folder = tmp_path / "pem"
    files = Files(folder)
    for name, certificate in (("one", "server"), ("two", "exchanged")):
        (folder / name).mkdir()
        for path, text in zip(("cert.pem", "key.pem"), files.authority.issue(certificate)):
            (folder / name / path).write_bytes(text)
    (folder / "now").symlink_to("one")
    files.cert, files.key = folder / "now/cert.pem", folder / "now/key.pem"
    server = serve(files)
    assert server.certificate_of() == "server"
    (folder / "next").symlink_to("two")
    os.replace(folder / "next", folder / "now")
    eventually("the server has the new certificate", lambda: server.certificate_of() == "exchanged")


def test_a_removed_authority(serve, tmp_path):
    """After a change of the list of authorities, clients of a removed authority are refused, even with a resumed session."""
    files = Files(tmp_path / "pem")
    server = serve(files, mutual=True, listeners=("http",))
    context = server.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    def connect(session=None):
        plain = socket.create_connection(("127.0.0.1", server.http_port), timeout=DEADLINE_S)
        return context.wrap_socket(plain, server_hostname="localhost", session=session)

    with connect() as first:
        session = first.session
    with connect(session) as second:
        assert second.session_reused
    files.root.write_bytes(Authority("another").pem)
    eventually("the list is read", lambda: "http_tls reloaded" in server.log_tail())
    with pytest.raises((ssl.SSLError, OSError)):
        with connect(session) as third:
            third.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert third.recv(100) == b""
            raise ConnectionResetError


def faults(files: Files) -> dict:
    """Returns the faults: the change to the files, and the text that the error must have."""
    other, own = key_pem(new_key()), new_key("pkcs8")
    return {
        "no file": (lambda: files.cert.unlink(), ["cert.pem' cannot be read", "No such file"]),
        "not PEM": (lambda: files.cert.write_text("hello"), ["cert.pem' has no certificate in PEM"]),
        "cut": (
            lambda: files.cert.write_bytes(files.cert.read_bytes()[:300]),
            ["cert.pem' is not valid PEM", "section end"],
        ),
        "no key": (lambda: files.key.write_bytes(files.cert.read_bytes()), ["key.pem' has no private key"]),
        "another key": (
            lambda: files.key.write_bytes(other),
            ["the key in", "key.pem' does not belong to the certificate in", "cert.pem'"],
        ),
        "a password": (
            lambda: files.key.write_bytes(key_pem(own, "pkcs8", b"secret")),
            ["key.pem' is protected by a password", "openssl pkey"],
        ),
        "an old password": (
            lambda: files.key.write_bytes(key_pem(own, "pkcs1", b"secret")),
            ["key.pem' is protected by a password"],
        ),
        "no certificate but noise": (
            lambda: files.cert.write_text("-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n"),
            ["the certificate in", "cert.pem'", "cannot be used"],
        ),
    }


@pytest.mark.parametrize("fault", [
    "no file", "not PEM", "cut", "no key", "another key", "a password", "an old password", "no certificate but noise",
])  # fmt: skip
def test_files_that_cannot_be_used(serve, tmp_path, fault):
    """The server does not start and reports the file and the reason."""
    files = Files(tmp_path / "pem")
    spoil, words = faults(files)[fault]
    spoil()
    server = serve(files, wait=False, listeners=("grpc",))
    assert server.process.wait(DEADLINE_S) == 1
    log = server.log_tail()
    assert [word for word in ["TLS of grpc", *words] if word not in log] == [], log


@pytest.mark.parametrize(("options", "text"), [
    (["--grpc-use-ssl=true"], "--grpc-use-ssl needs --grpc-server-cert FILE"),
    (["--http-use-ssl-mutual=true", "--http-server-cert=c", "--http-server-key=k"],
     "--http-use-ssl-mutual needs --http-root-cert FILE"),
])  # fmt: skip
def test_options_that_lack_a_file(start, options, text):
    """The error names the missing option."""
    server = start([MODEL], *options, wait=False)
    assert server.process.wait(DEADLINE_S) == 1
    assert text in server.log_tail()


def test_tls_at_a_port_with_clear_text(start):
    """The client gets a TLS alert, and the log has one line."""
    server = start([MODEL])
    context = ssl.create_default_context()
    for name, port in (("http", server.http_port), ("grpc", server.grpc_port), ("metrics", server.metrics_port)):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain:
                with pytest.raises(ssl.SSLError, match="protocol version|PROTOCOL_VERSION"):
                    context.wrap_socket(plain, server_hostname="localhost")
        assert refusals(server, name, "UNEXPECTED_TLS") == 3
        assert server.log.read_text().count(f"{name}: refused a connection") == 1, "all refusals share one log line"
    assert server.infer(MODEL, one("FP32", [1, 1], [1]))[0] == 200


def test_a_handshake_that_does_not_end(serve, tmp_path):
    """`--client-handshake-timeout-secs`: the connection is closed; others are served meanwhile."""
    server = serve(Files(tmp_path / "pem"), "--client-handshake-timeout-secs=1")
    begun = time.monotonic()
    slow = [socket.create_connection(("127.0.0.1", server.http_port), timeout=DEADLINE_S) for _ in range(50)]
    for wire in slow:
        wire.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
    assert server.get("/v2/health/live")[0] == 200
    for wire in slow:
        assert wire.recv(10) == b""
        wire.close()
    assert time.monotonic() - begun > 0.9
    assert refusals(server, "http", "HANDSHAKE_TIMEOUT") == 50
    assert server.log.read_text().count("the TLS handshake took more than 1 s") == 1
