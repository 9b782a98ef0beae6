"""Azure Blob Storage, by a server that answers as it does: shared access signatures, which are in the query of every request."""

import http.server
import json
import threading
import urllib.parse

import pytest

from harness.server import Server
from repository.repository_tables import model

SIGNATURE = "very-secret"
CONFIG = f'backend: "builtin"\n{model()}'.encode()


class Blobs(http.server.ThreadingHTTPServer):
    """The container `models` with these blobs, for requests with the signature. A context manager."""

    daemon_threads = True

    def __init__(self, blobs: dict):
        super().__init__(("127.0.0.1", 0), Request)
        self.blobs = blobs

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def listing(self, query: dict) -> bytes:
        """Returns a listing: blobs, or with a delimiter also the folders."""
        start, delimiter, found = query.get("prefix", ""), query.get("delimiter"), set()
        for name, content in self.blobs.items():
            if not name.startswith(start):
                continue
            folder, inside, _ = name[len(start) :].partition(delimiter or "\0")
            if inside:
                found.add(f"<BlobPrefix><Name>{start}{folder}{delimiter}</Name></BlobPrefix>")
                continue
            time = "<Last-Modified>Mon, 01 Jun 2026 00:00:00 GMT</Last-Modified>"
            kind = "<Etag>0x1</Etag><Content-Type>x</Content-Type><BlobType>BlockBlob</BlobType>"
            size = f"<Content-Length>{len(content)}</Content-Length>"
            found.add(f"<Blob><Name>{name}</Name><Properties>{time}{kind}{size}</Properties></Blob>")
        blobs = "".join(sorted(found))
        return f'<EnumerationResults ContainerName="models"><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>'.encode()


class Request(http.server.BaseHTTPRequestHandler):
    """A request of a client."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        name = urllib.parse.unquote(parts.path).removeprefix("/models/")
        if query.get("sig") != SIGNATURE:
            self.answer(403, b"<Error><Code>AuthenticationFailed</Code></Error>")
        elif query.get("comp") == "list":
            self.answer(200, self.server.listing(query))
        elif name in self.server.blobs:
            self.answer(200, self.server.blobs[name])
        else:
            self.answer(404, b"<Error><Code>BlobNotFound</Code></Error>")

    def answer(self, status: int, content: bytes):
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.send_header("content-type", "application/octet-stream")
        self.send_header("etag", '"0x1"')
        self.send_header("last-modified", "Mon, 01 Jun 2026 00:00:00 GMT")
        self.end_headers()
        try:
            self.wfile.write(content)
        except OSError:
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def blobs():
    with Blobs({"m/large/config.pbtxt": CONFIG, "m/large/1/weights.bin": bytes(65 << 20)}) as running:
        yield running


def test_a_signature_reads_models_of_any_size(blobs, tmp_path):
    """Only listings are read as a whole and have a limit, of 64 MiB. No message has the signature."""
    server = Server(tmp_path, ["as://account/models/m"], ["--model-control-mode=explicit"])
    server.environment = {
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{blobs.server_port}",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2022-11-02&sp=rl&sig={SIGNATURE}",
        "TMPDIR": str(tmp_path),
    }
    with server:
        status, answer = server.ask("POST", "/v2/repository/models/large/load", b"{}")
        assert (status, answer) == (200, "")
        blobs.listing = lambda query: b"<broken"
        status, answer = server.ask("POST", "/v2/repository/models/other/load", b"{}")
        assert status == 500 and "cannot be read" in json.loads(answer)["error"], answer
    assert SIGNATURE not in answer and SIGNATURE not in server.log.read_text()
