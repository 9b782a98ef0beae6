"""Clients for the access walk: HTTP/1.1, HTTP/2 with prior knowledge and gRPC, which send requests unmodified; and the servers
under test."""

import http.client
import itertools
import json
import select
import socket
from dataclasses import dataclass
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from harness.waiting import DEADLINE_S

HOST = "127.0.0.1"

# Invalid values of `Authorization`, used in turn.
WRONG = itertools.cycle([
    "Bearer wrong", "Bearer", "Bearer  ", "Basic aW5mZXItMTphZG1pbi0x", "admin-1", "Bearer admin-1x", "Bearer admin-",
    "Bearer ADMIN-1", "Bearer infer-1 admin-1", "Bearer infer-1,Bearer admin-1", "Token admin-1",
])  # fmt: skip
PARTS = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace", "logging",
    "load-report",
)  # fmt: skip
GRPC_PREFIX = "triton-grpc-protocol-"
ENDLESS = ("StreamCoreMetrics",)
"""Calls whose responses do not end: the first message is enough."""
CODES = {0: "OK", 7: "PERMISSION_DENIED", 12: "UNIMPLEMENTED", 14: "UNAVAILABLE", 16: "UNAUTHENTICATED"}


@dataclass
class Answer:
    """The status, the gRPC code and message (`None` without them), and the text of the body."""

    status: int
    code: str | None
    text: str

    def outcome(self) -> str:
        """Returns a refusal as the access tables name it, or `ok` for an answer of a handler."""
        if self.code is not None:
            refusals = {
                ("PERMISSION_DENIED", "Token Authorization failed"): "key",
                ("PERMISSION_DENIED", "Model API disabled"): "model_api",
                ("PERMISSION_DENIED", "needs a token for management; the request"): "scope",
                ("UNAVAILABLE", "This protocol is restricted, expecting header"): "restricted",
                ("UNAUTHENTICATED", "token"): "token",
            }
            found = [name for (code, words), name in refusals.items() if code == self.code and words in self.text]
            return found[0] if found else "unknown" if (self.code, self.text) == ("UNIMPLEMENTED", "") else "ok"
        refusals = {
            (401, ""): "token",
            (405, ""): "method",
            (403, "needs a token for management; the request"): "scope",
            (403, "This API is restricted, expecting header"): "restricted",
            (403, "Model API disabled"): "model_api",
            (400, "InvalidKeyException"): "key",
            (400, '{"error":"Bad Request"}'): "unknown",
            (404, '{"error":"Not Found"}'): "unknown",
            (404, "ResourceNotFoundException"): "unknown",
            (404, "Metrics are at /metrics"): "unknown",
        }
        found = [name for (status, words), name in refusals.items() if status == self.status and words in self.text]
        return found[0] if found else "ok"


class Http1:
    """An HTTP/1.1 connection that is opened again if the server has closed it."""

    def __init__(self, port: int):
        self.port, self.connection = port, None

    def ask(self, method: str, target: str, headers: dict, body: bytes | None, withheld: bool) -> Answer:
        """Sends a request; with `withheld` it announces a body and does not send it."""
        reused = self.connection is not None
        try:
            return self.try_ask(method, target, headers, body, withheld)
        except (http.client.RemoteDisconnected, ConnectionError):
            self.close()
            if not reused:
                raise
            return self.try_ask(method, target, headers, body, withheld)

    def try_ask(self, method, target, headers, body, withheld) -> Answer:
        if self.connection is None:
            self.connection = http.client.HTTPConnection(HOST, self.port, timeout=DEADLINE_S)
        self.connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        self.connection.putheader("Host", f"{HOST}:{self.port}")
        for name, value in headers.items():
            self.connection.putheader(name, value)
        if body is not None:
            self.connection.putheader("Content-Length", str(len(body)))
        self.connection.endheaders(None if withheld else body)
        response = self.connection.getresponse()
        answer = Answer(response.status, None, response.read().decode(errors="replace"))
        if withheld or response.will_close:
            self.close()
        return answer

    def close(self):
        """Closes the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Http2:
    """An HTTP/2 connection in clear text, without an upgrade; also for gRPC."""

    def __init__(self, port: int):
        self.port, self.socket, self.h2 = port, None, None

    def ask(self, method: str, path: str, headers: dict, body: bytes | None, withheld: bool) -> Answer:
        """Sends a request; see `Http1.ask`."""
        for attempt in range(3):
            if self.socket is None:
                self.open()
            answer = self.try_ask(method, path, headers, body, withheld)
            if answer is not None:
                return answer
            self.close()
        raise AssertionError(f"no answer to {method} {path} over HTTP/2")

    def open(self):
        """Connects."""
        self.socket = socket.create_connection((HOST, self.port), timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = h2.config.H2Configuration(
            client_side=True, header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()

    def try_ask(self, method, path, headers, body, withheld) -> Answer | None:
        if select.select([self.socket], [], [], 0)[0] and not self.receive():
            return None
        pseudo = {":method": method, ":scheme": "http", ":authority": f"{HOST}:{self.port}", ":path": path}
        stream = self.h2.get_next_available_stream_id()
        fields = [*pseudo.items(), *((name.lower(), value) for name, value in headers.items())]
        has_body = body is not None or withheld
        self.h2.send_headers(stream, fields, end_stream=not has_body)
        if has_body and not withheld:
            self.h2.send_data(stream, body, end_stream=True)
        self.socket.sendall(self.h2.data_to_send())
        found, data, is_rpc = {}, b"", headers.get("content-type", "").startswith("application/grpc")
        while True:
            events = self.receive()
            if events is None:
                return None
            for event in events:
                if getattr(event, "stream_id", stream) != stream:
                    continue
                if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                    found |= dict(event.headers)
                elif isinstance(event, h2.events.DataReceived):
                    data += event.data
                    self.h2.acknowledge_received_data(event.flow_controlled_length, stream)
                    self.socket.sendall(self.h2.data_to_send())
                over = isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset))
                if data and any(endless in path for endless in ENDLESS):
                    self.h2.reset_stream(stream)
                    over = True
                if over:
                    self.end(stream)
                    if ":status" not in found:
                        return None
                    return self.answer(found, data, is_rpc)

    def answer(self, found: dict, data: bytes, is_rpc: bool) -> Answer:
        status = int(found[":status"])
        if "grpc-status" not in found and not (is_rpc and status == 200):
            return Answer(status, None, data.decode(errors="replace"))
        number = int(found.get("grpc-status", "0"))
        return Answer(status, CODES.get(number, str(number)), found.get("grpc-message", "").replace("%20", " "))

    def end(self, stream: int):
        """Resets a stream whose request is not complete."""
        try:
            self.h2.end_stream(stream)
        except h2.exceptions.ProtocolError:
            pass
        self.socket.sendall(self.h2.data_to_send())

    def receive(self) -> list | None:
        """Returns the next events, or `None` if the connection is closed."""
        data = self.socket.recv(1 << 16)
        events = self.h2.receive_data(data) if data else []
        over = not data or any(isinstance(event, h2.events.ConnectionTerminated) for event in events)
        if not over:
            self.socket.sendall(self.h2.data_to_send())
        return None if over else events

    def close(self):
        """Closes the connection."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class Credentials:
    """The headers of a credential that the access tables name; `key_file` has TorchServe's keys."""

    def __init__(self, key_file: Path | None = None):
        self.key_file = key_file

    def bearer(self, name: str) -> str | None:
        """Returns the token of a credential, if any. Keys are read each time, because a request may renew one."""
        keys = {"inference_key": "inference", "management_key": "management", "renewal_key": "API"}
        if name in keys:
            return json.loads(self.key_file.read_text())[keys[name]]["key"]
        return {"inference": "infer-1", "management": "admin-1"}.get(name)

    def headers(self, credential: str, part: str, prefix: str) -> dict:
        """Random bytes on the HTTP and gRPC ports."""
        found = {}
        for name in credential.split("+"):
            if token := self.bearer(name):
                found["authorization"] = f"Bearer {token}"
            elif name == "wrong":
                found["authorization"] = next(WRONG)
            elif part in PARTS and name in ("own", "own_wrong", "other"):
                sent = PARTS[PARTS.index(part) - 1] if name == "other" else part
                found[f"{prefix}key-{sent}"] = "wrong" if name == "own_wrong" else f"value-{sent}"
            else:
                assert name == "none" or part not in PARTS, f"unknown credential {name}"
        return found


def restrictions() -> list:
    """Returns options that restrict every part of the protocol to a separate key."""
    options = ("--http-restricted-api", "--grpc-restricted-protocol")
    return [f"{option}={part}:key-{part}=value-{part}" for option in options for part in PARTS]


def token_files(folder, case: str) -> list:
    """Returns the token file options of a configuration, by the words of its name."""
    (folder / "inference-tokens").write_text("# comment\ninfer-0\ninfer-1\n")
    (folder / "management-tokens").write_text("admin-1\n")
    scopes = [scope for scope in ("inference", "management") if case.endswith(scope + " tokens")]
    scopes = scopes or (["inference", "management"] if case.endswith("tokens") else [])
    return [f"--{scope}-token-file={folder / f'{scope}-tokens'}" for scope in scopes]
