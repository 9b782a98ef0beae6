"""HTTP/1.1 over plain sockets, and the headers of a gRPC call."""

import socket

from harness.waiting import DEADLINE_S

INFER = "/inference.GRPCInferenceService/ModelInfer"
GRPC_HEADERS = {
    ":method": "POST", ":scheme": "http", ":authority": "localhost", ":path": INFER,
    "content-type": "application/grpc", "te": "trailers",
}  # fmt: skip


def connect(port: int) -> socket.socket:
    """Opens a plain connection."""
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Returns the bytes of a POST request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def next_bytes(connection: socket.socket) -> bytes:
    """Returns the next bytes of a connection that the server must not close yet: its end is a `ConnectionError`."""
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("the server has closed the connection")
    return data


def read_response(connection: socket.socket) -> tuple:
    """Reads one HTTP/1.1 response with a Content-Length; returns the status and the body. Status 0: the connection was closed
    before the end of the head. Its end within the body is a `ConnectionError`."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return 0, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields.get(b"content-length", 0)):
        body += next_bytes(connection)
    return int(head.split()[1]), body
