"""A server with TLS on its listeners."""

import http.client
import socket
import ssl

from harness.certificates import Files
from harness.models import copy_models
from harness.server import Server
from harness.waiting import DEADLINE_S

MODEL = "identity_fp32"
LISTENERS = ("http", "grpc", "metrics")


class TlsServer(Server):
    """A server with TLS on its listeners; the test's own requests use TLS too."""

    def __init__(self, folder, files: Files, *options, mutual=False, listeners=LISTENERS):
        models = copy_models(folder / "models", [MODEL])
        super().__init__(folder, [models], [*files.options(*listeners, mutual=mutual), *options])
        self.files, self.mutual = files, mutual

    def context(self) -> ssl.SSLContext:
        """Returns the TLS context of a client of this server."""
        context = ssl.create_default_context(cafile=self.files.root)
        if self.mutual:
            context.load_cert_chain(self.files.client_cert, self.files.client_key)
        return context

    def connect(self, address: str = "") -> http.client.HTTPSConnection:
        """Returns a connection that stays open."""
        return http.client.HTTPSConnection(address or self.http, timeout=DEADLINE_S, context=self.context())

    def certificate_of(self, address: str = "") -> str:
        """Returns the common name in the certificate that a new connection receives."""
        host, port = (address or self.http).split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as plain:
            with self.context().wrap_socket(plain, server_hostname=host) as wire:
                return dict(pair[0] for pair in wire.getpeercert()["subject"])["commonName"]
