"""Certificates for tests: an authority, and certificates that it signs."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM
FORMATS = {
    "pkcs8": serialization.PrivateFormat.PKCS8,
    "pkcs1": serialization.PrivateFormat.TraditionalOpenSSL,
    "sec1": serialization.PrivateFormat.TraditionalOpenSSL,
}
"""The traditional form is PKCS#1 for an RSA key and SEC1 for an elliptic-curve key."""


def new_key(kind: str = "sec1"):
    """Returns a new key: RSA for `pkcs1` and `pkcs8`, elliptic-curve for `sec1`."""
    return ec.generate_private_key(ec.SECP256R1()) if kind == "sec1" else rsa.generate_private_key(65537, 2048)


def key_pem(key, kind: str = "pkcs8", password: bytes = b"") -> bytes:
    """Returns a key in PEM."""
    protection = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(PEM, FORMATS[kind], protection)


class Authority:
    """A certificate authority: self-signed, or signed by `issuer`."""

    def __init__(self, name: str = "authority", issuer: "Authority" = None):
        self.key, self.name, self.issuer = new_key(), name, issuer
        self.certificate = sign(name, self.key, issuer or self, authority=True)

    @property
    def pem(self) -> bytes:
        """The certificate in PEM."""
        return self.certificate.public_bytes(PEM)

    def issue(self, name: str, key=None, alternative=()) -> tuple:
        """Returns a certificate for `name` on this machine, followed by its chain, and its key (PKCS#8); both in PEM. `alternative`
        are further alternative names; an empty `name` is no common name."""
        key = key or new_key()
        chain, above = sign(name, key, self, alternative=alternative).public_bytes(PEM), self
        while above.issuer:
            chain, above = chain + above.pem, above.issuer
        return chain, key_pem(key)


def sign(name: str, key, issuer: Authority, authority: bool = False, alternative=()):
    """Returns a certificate for `key`, valid for a day."""
    now = datetime.datetime.now(datetime.timezone.utc)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else []))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer.name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([*hosts, *alternative]), critical=not name)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(issuer.key, hashes.SHA256())
    )


class Files:
    """Files of a server and of a client in a folder: `root`, `cert`, `key`, `client_cert`, `client_key`."""

    def __init__(self, folder: Path):
        self.folder, self.authority = folder, Authority()
        folder.mkdir(exist_ok=True)
        self.root, self.cert, self.key, self.client_cert, self.client_key = (
            folder / f"{name}.pem" for name in ("root", "cert", "key", "client-cert", "client-key")
        )
        self.root.write_bytes(self.authority.pem)
        self.renew()
        for path, text in zip((self.client_cert, self.client_key), self.authority.issue("client")):
            path.write_bytes(text)

    def renew(self, name: str = "server"):
        """Writes a new certificate of the server; the key is written first."""
        certificate, key = self.authority.issue(name)
        self.key.write_bytes(key)
        self.cert.write_bytes(certificate)

    def options(self, *listeners: str, mutual: bool = False) -> list:
        """Returns the options that enable TLS on these listeners."""
        options = []
        for name in listeners:
            options += [f"--{name}-use-ssl{'-mutual' if mutual else ''}=true", f"--{name}-server-cert={self.cert}"]
            options += [f"--{name}-server-key={self.key}"] + [f"--{name}-root-cert={self.root}"] * mutual
        return options
