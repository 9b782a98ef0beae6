"""A server with TorchServe's endpoints: `pharos torchserve`, its ports, its files, and requests to it."""

import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

import grpc

from harness.ports import free_ports
from harness.server import Process, alive, binary, check_process, samples, workers
from harness.waiting import DEADLINE_S, eventually
from torchserve import models

PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
has_worker = subprocess.run([PYTHON, "-c", "import pharos_worker"], capture_output=True).returncode == 0
HOST = "127.0.0.1"


class Home:
    """`pharos torchserve` with a model store in `folder`; `config` has additional lines of config.properties."""

    def __init__(self, folder: Path, config=(), arguments=("--disable-token-auth", "--enable-model-api")):
        self.inference, self.management, self.metrics, self.grpc, self.grpc_management = free_ports(5)
        self.folder, self.store = folder, folder / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{name}_address=http://{HOST}:{getattr(self, name)}" for name in ("inference", "management", "metrics")
        ]
        lines += [f"grpc_inference_port={self.grpc}", f"grpc_management_port={self.grpc_management}"]
        lines += ["default_workers_per_model=1", *config]
        (folder / "config.properties").write_text("\n".join(lines) + "\n")
        self.command = [str(binary()), "torchserve", "--foreground", "--ncs", f"--model-store={self.store}"]
        self.command += [f"--ts-config={folder / 'config.properties'}", *arguments, "--", f"--python={PYTHON}"]
        self.process = None

    def archive(self, name, handler="shown", yaml="", version="1.0"):
        """Writes an archive to the model store; its handler streams only if `yaml` enables it."""
        yaml = yaml if "streaming" in yaml else f"streaming: false\n{yaml}"
        model = {"modelName": name, "modelVersion": version, "handler": handler}
        if yaml:
            model["configFile"] = "model-config.yaml"
        found = models.contents(handler, yaml, manifest={"model": model})
        models.write(self.folder / f"made-{name}-{version}", name, found)
        os.replace(self.folder / f"made-{name}-{version}" / f"{name}.mar", self.store / f"{name}-{version}.mar")
        return f"{name}-{version}.mar"

    def __enter__(self):
        # The location of the file that identifies the running server.
        own = self.folder / "tmp"
        own.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "TMPDIR": str(own),
            "LOG_LOCATION": str(self.folder / "logs"),
            "METRICS_LOCATION": str(self.folder / "logs"),
        }
        with (self.folder / "out").open("wb") as out:
            self.process = Process(self.command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=self.folder)
        eventually("the server has started", self.has_started)
        return self

    def has_started(self):
        text = (self.folder / "out").read_text(errors="replace")
        assert self.process.poll() is None, text[-3000:]
        return "Model server started." in text

    def __exit__(self, kind, error, trace):
        is_running = self.process.poll() is None
        try:
            if kind is None:
                check_process(self.process, self.folder / "out")
            self.process.terminate()
            code = self.process.wait(DEADLINE_S)
            if kind is None:
                assert code == 0 or not is_running, (code, (self.folder / "out").read_text(errors="replace")[-3000:])
                check_process(self.process, self.folder / "out")
        finally:
            self.process.kill()

    def ask(self, method, path, body=None, headers=None, port=None):
        """Returns the status, headers (with names in lower case) and body of an answer."""
        connection = http.client.HTTPConnection(HOST, port or self.inference, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, {**found, ":reason": answer.reason}, answer.read()
        finally:
            connection.close()

    def manage(self, method, path, body=None, headers=None):
        """Returns the status and JSON of an answer of the management port."""
        status, _, answer = self.ask(method, path, body, headers, self.management)
        return status, json.loads(answer)

    def predict(self, model, body=b"", headers=None, path=""):
        """Returns the status and body of a prediction."""
        status, _, answer = self.ask("POST", f"/predictions/{model}{path}", body, headers)
        return status, answer

    def register(self, url, query=""):
        """Registers an archive and waits for its workers."""
        status, answer = self.manage("POST", f"/models?url={url}{query}")
        assert status == 200, answer
        return answer["status"]

    def workers(self) -> set:
        """Returns the process ids of the live workers of the server."""
        return {pid for pid in workers(self.process.pid) if alive(pid)}

    def scrape(self):
        """Returns the metrics, as `harness.server.samples` parses them."""
        status, _, text = self.ask("GET", "/metrics", port=self.metrics)
        assert status == 200, text
        return samples(text.decode())

    def access(self):
        """Returns the access log."""
        return (self.folder / "logs" / "access_log.log").read_text()


def varint(number):
    """Encodes a number as a protobuf varint."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def message(*parts):
    """Encodes a protobuf message: pairs of a field number and an integer, a string or bytes."""
    out = b""
    for number, value in parts:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            value = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def fields(data):
    """Decodes the fields of a message by number: integers and bytes."""

    def read():
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    at, found = 0, {}
    while at < len(data):
        key = read()
        value = read()
        if key & 7 == 2:
            at, value = at + value, data[at : at + value]
        found.setdefault(key >> 3, []).append(value)
    return found


def call(port, method, *parts, metadata=(), stream=False):
    """Calls a gRPC method; returns the fields of the answer, or of each answer of a stream."""
    channel = grpc.insecure_channel(f"{HOST}:{port}")
    make = channel.unary_stream if stream else channel.unary_unary
    answer = make(method)(message(*parts), metadata=metadata, timeout=DEADLINE_S)
    return [fields(part) for part in answer] if stream else fields(answer)


INFERENCE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/"
MANAGEMENT = "/org.pytorch.serve.grpc.management.ManagementAPIsService/"


def body(text):
    """Encodes an entry of the map of inputs."""
    return (3, message((1, "body"), (2, text)))
