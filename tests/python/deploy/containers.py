"""Reads the documents of `deploy/`, and runs the command line of a container with the real server."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from harness.server import ROOT, Process, Server, binary

DEPLOY = ROOT / "deploy"
MODELS = "/mnt/models"
EXIT_STEPS_S = 24
"""The limits of the last steps of an exit after its delay and its timeout, rounded up: ends of workers, responses, traces, metric logs."""


def documents(path: Path) -> list:
    """Returns the documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


@functools.cache
def rendered(folder: str) -> list:
    """Returns the documents of a Kustomize folder below `deploy/`."""
    return kustomized(DEPLOY / folder)


def kustomized(folder: Path) -> list:
    """Returns the documents of a Kustomize folder."""
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def kubectl_missing() -> str:
    """Returns why Kustomize folders cannot be rendered; empty if they can."""
    return "" if shutil.which("kubectl") else "kubectl is not installed"


def one(found: list, kind: str, name: str = "") -> dict:
    """Returns the only document of a kind, with a name if it is given."""
    (match,) = [d for d in found if d["kind"] == kind and name in ("", d["metadata"]["name"])]
    return match


@functools.cache
def help_text() -> str:
    """Returns the help of the server."""
    return subprocess.run([binary(), "--help"], capture_output=True, text=True, check=True).stdout


def default(flag: str) -> str:
    """Returns the default of a flag of the server."""
    found = re.search(rf"--{flag} <[^>]*>.*?\[default:\s+([^\]]*)\]", help_text(), re.S)
    assert found, f"--{flag} is not in the help"
    return found[1]


def flag(container: dict, name: str) -> str:
    """Returns the value of a flag in a container's arguments, or else its default."""
    given = [argument.partition("=")[2] for argument in container["args"] if argument.startswith(f"--{name}=")]
    return given[-1] if given else default(name)


def port(container: dict, named) -> int:
    """Returns the port that a probe or a Service names, by name or by number."""
    declared = {entry.get("name", ""): entry["containerPort"] for entry in container["ports"]}
    return declared[named] if isinstance(named, str) else named


class Container(Server):
    """A container's command line. `models` replaces `/mnt/models` and `folder` replaces `/tmp`; ports are free ones on
    loopback. The process has the variables of the container and no others except those of `variables`. `python` is the interpreter."""

    def __init__(self, folder: Path, container: dict, models: Path, name: str = "", variables=None, python=sys.executable):
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, [])
        self.container = container
        self.declared = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

        def local(text: str) -> str:
            text = text.replace("{{.Name}}", name)
            return re.sub(r"(^|=)/tmp", rf"\g<1>{folder}", text).replace(MODELS, str(models))

        init, end, program, *rest = container["command"]
        assert (init, end) == ("tini", "--") and program in ("pharos", "sh")
        arguments = [local(argument) for argument in [*rest, *container["args"]]]
        values = {entry["name"]: local(entry["value"]) for entry in container.get("env", [])}
        if "torchserve" in rest:
            values |= self.torchserve_addresses(values)
        else:
            arguments += self.listener_flags()
        self.command = [str(binary()) if program == "pharos" else program, *arguments]
        # The Python of the tests has the packages that the image has, and those of `PACKAGES` in the guides. A script finds the server
        # by its name.
        path = [Path(python).parent, binary().absolute().parent, os.environ["PATH"]]
        self.environment = {"PATH": ":".join(map(str, path)), **values, **(variables or {})}

    def listener_flags(self) -> list:
        """Returns the flags that open the listeners on the ports of this server."""
        pairs = self.declared.items()
        return [flag for name, number in pairs for flag in (f"--{name}-address=127.0.0.1", f"--{name}-port={number}")]

    def torchserve_addresses(self, values: dict) -> dict:
        """Returns the variables of TorchServe's addresses with the ports of this server."""
        assert all(values[f"TS_{name}_ADDRESS"].startswith("http://0.0.0.0:") for name in ("INFERENCE", "METRICS"))
        return {
            "TS_INFERENCE_ADDRESS": f"http://{self.http}",
            "TS_MANAGEMENT_ADDRESS": "http://127.0.0.1:0",
            "TS_METRICS_ADDRESS": f"http://{self.metrics}",
            "TS_GRPC_INFERENCE_ADDRESS": "127.0.0.1",
            "TS_GRPC_INFERENCE_PORT": str(self.grpc_port),
            "TS_GRPC_MANAGEMENT_PORT": "0",
        }

    def launch(self, **_):
        """Starts the process without the variables of the tests."""
        with open(self.log_path, "wb") as log:
            self.process = Process(self.command, stdout=log, stderr=log, env=self.environment)

    def probe(self, name: str) -> int:
        """Sends the request of a probe; returns the status."""
        request = self.container[name]["httpGet"]
        number = port(self.container, request["port"])
        listener = next(key for key in self.declared if key == "http" or str(number) == flag(self.container, f"{key}-port"))
        address = f"127.0.0.1:{self.declared[listener]}"
        return self.get(request["path"], address)[0]

    def wait_until_ready(self, path=""):
        """Waits until the readiness probe succeeds."""
        super().wait_until_ready(path or self.container["readinessProbe"]["httpGet"]["path"])
