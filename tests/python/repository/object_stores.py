"""A test S3-compatible server (moto), and a proxy that counts requests and breaks answers."""

import base64
import hashlib
import hmac
import http.client
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import boto3
import botocore.config

from harness.generate import with_backend
from harness.ports import free_ports
from harness.waiting import DEADLINE_S, eventually
from repository.repository_tables import model

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
POLICY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


class Store:
    """moto's server with one bucket. A context manager."""

    def __init__(self, folder: Path, bucket="models", certificate=None):
        self.port, self.bucket, self.log = free_ports(1)[0], bucket, folder / "moto.log"
        self.command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.scheme, self.certificate = "http", certificate
        if certificate:
            self.scheme = "https"
            self.command += ["-s", "-c", str(certificate[0]), "-k", str(certificate[1])]
        self.process = None

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def __enter__(self):
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        eventually("moto answers", self.answers)
        self.s3 = self.client("s3", CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
        self.s3.create_bucket(Bucket=self.bucket)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        except OSError:
            return False

    def client(self, service: str, key: str, secret: str):
        """Returns a boto3 client."""
        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            region_name="us-east-1",
            verify=False,
            config=botocore.config.Config(connect_timeout=10, read_timeout=30),
        )

    def user(self) -> tuple:
        """Creates a user and returns its key and secret; from then on the store rejects other credentials and checks
        signatures."""
        iam = self.client("iam", "test", "test")
        iam.create_user(UserName="user")
        made = iam.create_access_key(UserName="user")["AccessKey"]
        iam.put_user_policy(UserName="user", PolicyName="all", PolicyDocument=json.dumps(POLICY))
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset-auth", b"0", {"content-type": "text/plain"})
        urllib.request.urlopen(request, timeout=DEADLINE_S).read()
        return made["AccessKeyId"], made["SecretAccessKey"]

    def put(self, key: str, body="", bucket=""):
        """Writes an object."""
        body = body if isinstance(body, bytes) else body.encode()
        self.s3.put_object(Bucket=bucket or self.bucket, Key=key, Body=body)

    def drop(self, prefix: str):
        """Removes all objects with this prefix."""
        for found in self.s3.list_objects_v2(Bucket=self.bucket, Prefix=prefix).get("Contents", []):
            self.s3.delete_object(Bucket=self.bucket, Key=found["Key"])

    def model(self, name: str, prefix="m/", versions=(1,), config="", **more):
        """Writes a model, its configuration last."""
        for version in versions:
            self.put(f"{prefix}{name}/{version}/weights.bin", f"weights of {name} {version}")
        text = config or model(**more)
        self.put(f"{prefix}{name}/config.pbtxt", with_backend(f'name: "{name}"\n{text}'))


class Between(http.server.ThreadingHTTPServer):
    """A proxy before a store. `trouble(path)` selects what happens to a request: None forwards it, a status or `(status, body)`
    is the answer, `("cut", n)` closes the connection after n bytes of the body, and "stall" sends nothing. With `plain`, %2F
    means "/" as in Google's interface, and every request is forwarded with valid credentials."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, store: Store):
        super().__init__(("127.0.0.1", 0), Forwarding)
        self.store, self.seen, self.trouble = store, [], lambda path: None
        self.ended, self.plain = threading.Event(), False

    @property
    def endpoint(self) -> str:
        """The proxy's URL."""
        return f"http://127.0.0.1:{self.server_port}"

    def url(self, path="m") -> str:
        """Returns the value for `--model-repository`."""
        return f"s3://{self.endpoint}/{self.store.bucket}/{path}".rstrip("/")

    def fetched(self) -> list:
        """Returns the keys that were read since the last call, without the bucket."""
        seen, self.seen = self.seen, []
        return sorted(path.split("/", 2)[2] for path in seen if "?" not in path)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Ignores errors of closed connections."""


class Forwarding(http.server.BaseHTTPRequestHandler):
    """A connection to the proxy."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        self.server.seen.append(self.path)
        trouble = self.server.trouble(self.path)
        if trouble == "stall":
            self.server.ended.wait(300)
            self.close_connection = True
            return
        if isinstance(trouble, int):
            trouble = (trouble, b"<Error><Code>Made</Code><Message>simulated</Message></Error>")
        if trouble and trouble[0] != "cut":
            self.answer(trouble[0], [], trouble[1])
            return
        path = self.path.replace("%2F", "/") if self.server.plain else self.path
        connection = http.client.HTTPConnection("127.0.0.1", self.server.store.port, timeout=DEADLINE_S)
        headers = dict(self.headers)
        if self.server.plain:
            headers["authorization"] = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body, kept = response.read(), {"etag", "last-modified", "content-type", "content-range", "accept-ranges"}
        headers = [(name, value) for name, value in response.getheaders() if name.lower() in kept]
        connection.close()
        self.answer(response.status, headers, body, trouble[1] if trouble else None)

    def answer(self, status, headers, body, cut=None):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])
        self.wfile.flush()
        if cut is not None:
            self.close_connection = True

    def log_message(self, *_):
        pass


def files_below(folder: Path) -> list:
    """Returns the relative paths of all files. A server may remove folders meanwhile."""
    found = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    return sorted(str(path.relative_to(folder)) for path in found)


def empty(folder: Path) -> Path:
    """Returns a new empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def azurite() -> str:
    """Returns the path of the Azure emulator, which comes from npm; empty if it is not installed."""
    return os.environ.get("PHAROS_AZURITE") or shutil.which("azurite-blob") or ""


class Azurite:
    """Azurite with one container. A context manager."""

    account = "devstoreaccount1"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    """The key that is built into every Azurite."""

    def __init__(self, folder: Path, container="models"):
        self.port, self.container, self.log = free_ports(1)[0], container, folder / "azurite.log"
        self.command = [azurite(), "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent"]
        self.command += ["--location", str(folder / "azurite"), "--skipApiVersionCheck"]
        self.endpoint = f"http://127.0.0.1:{self.port}/{self.account}"
        self.process = None

    def __enter__(self):
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        eventually("Azurite answers", self.answers)
        self.ask("PUT", f"/{self.container}", {"restype": "container"})
        return self

    __exit__, answers = Store.__exit__, Store.answers

    def ask(self, method: str, path: str, query=None, body=b"", headers=None):
        """Sends one request, signed with the shared key as in the documentation of Azure's storage services."""
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"} | (headers or {})
        own = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        resource = f"/{self.account}/{self.account}{urllib.parse.quote(path)}"
        resource += "".join(f"\n{name}:{value}" for name, value in sorted((query or {}).items()))
        length = str(len(body)) if body else ""
        kind = "application/octet-stream" if body else ""
        text = f"{method}\n\n\n{length}\n\n{kind}\n\n\n\n\n\n\n{own}{resource}"
        signature = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256).digest()
        headers["authorization"] = f"SharedKey {self.account}:{base64.b64encode(signature).decode()}"
        headers |= {"content-type": kind} if kind else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        target = f"/{self.account}{urllib.parse.quote(path)}?{urllib.parse.urlencode(query or {})}"
        connection.request(method, target, body, headers)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        assert response.status < 300, (response.status, answer)

    def put(self, key: str, body=""):
        """Writes a blob."""
        self.ask("PUT", f"/{self.container}/{key}", None, body.encode(), {"x-ms-blob-type": "BlockBlob"})

    model = Store.model
