#!/usr/bin/env python3
"""Performs the operations of `repository_tables.py` on this server or on a real Triton, and records the answers.

    python -m repository.repositories record     runs them on the Triton peer and writes golden_repository.json
"""

import base64
import json
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from harness.generate import with_backend
from harness.peers import Triton
from harness.server import TRITON_MODELS
from harness.waiting import DEADLINE_S, eventually, run_for, settled
from repository.repository_tables import EXPLICIT, NONE, POLL, STARTED, TWO, TWO_AT_START, ensemble, model

GOLDEN = Path(__file__).resolve().parent / "golden_repository.json"
CRASHED = "crashed"
"""The status of a request that ended Triton."""
REQUEST = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
MODES = {
    "explicit": (EXPLICIT, ["--model-control-mode=explicit"]),
    "none": (NONE, []),
    "poll": (POLL, ["--model-control-mode=poll", "--repository-poll-secs=1"]),
    "two": (TWO, ["--model-control-mode=explicit"]),
    "two at start": (TWO_AT_START, ["--exit-on-error=false", "--strict-readiness=false"]),
}
SECOND = "second"
"""The folder of the second repository, beside the first; it exists in modes whose names begin with `two`."""


class World:
    """A server with its address and repository. `live_triton` tells whether it is a Triton."""

    def __init__(self, server, repository: Path, live_triton: bool):
        self.server, self.repository, self.live_triton = server, repository, live_triton
        self.backend = "python" if live_triton else "builtin"

    def put(self, name, config, versions, repository=None):
        """Writes a model, complete before its folder appears."""
        folder = (repository or self.repository) / name
        shutil.rmtree(folder, ignore_errors=True)
        made = Path(tempfile.mkdtemp(dir=self.repository.parent))
        for version in versions:
            self.fill(made / str(version), "ensemble" in config)
        (made / "config.pbtxt").write_text(self.configuration(name, config))
        made.chmod(0o755)
        made.rename(folder)

    def twin(self, name, config, versions):
        self.put(name, config, versions, self.repository.parent / SECOND)

    def fill(self, folder: Path, is_ensemble=False):
        """Writes a version."""
        folder.mkdir(parents=True)
        if not is_ensemble:
            shutil.copy(TRITON_MODELS / "model.py", folder / "model.py")
            # Python's cache folder: if Python created it later, Triton would detect a change and reload the model.
            (folder / "__pycache__").touch()

    def configuration(self, name: str, config: str) -> str:
        """Returns the text of `config.pbtxt`."""
        text = f'name: "{name}"\n{config}'
        if self.live_triton:
            return text if "ensemble" in config else f'backend: "python"\n{text}'
        return with_backend(text)

    def config(self, name, config):
        run_for("consecutively written files have different times", 0.01)
        new = self.repository / f"../{name}.new"
        new.write_text(self.configuration(name, config))
        new.replace(self.repository / name / "config.pbtxt")

    def version(self, name, number):
        self.fill(self.repository / name / str(number))

    def drop(self, path):
        shutil.rmtree(self.repository / path)

    def touch(self, path):
        os.utime(self.repository / path)

    def text(self, path, text):
        (self.repository / path).write_text(text)

    def sleep(self, seconds):
        run_for("the pause in the table: polling intervals", seconds)

    def ask(self, path, body=None, method=None) -> tuple:
        """Sends one request; returns the status and the body of the answer."""
        data = body.encode() if isinstance(body, str) else body
        request = urllib.request.Request(f"http://{self.server.http}/{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path, body) -> list:
        try:
            status, text = self.ask(path, body)
        except OSError:
            if not self.live_triton:
                raise
            self.server.wait_for_end()
            self.server.ensure()
            return [CRASHED, ""]
        try:
            answer = json.loads(text)
        except ValueError:
            return [status, self.plain(text)]
        error = answer.get("error") if isinstance(answer, dict) else None
        return [status, self.plain(error) if error else ""]

    def plain(self, text: str) -> str:
        """Returns the text without the parts that differ from run to run."""
        return text.replace(str(self.repository), "REPOSITORY")

    def value(self, name, value):
        """Returns the value of a parameter with its placeholders replaced."""
        if isinstance(value, dict) and value:
            return json.dumps(value).replace("BACKEND", self.backend)
        if isinstance(value, str) and "BACKEND" in value:
            return value.replace("BACKEND", self.backend)
        if value == "MODEL":
            return base64.b64encode(self.model_file()).decode()
        return value

    def model_file(self) -> bytes:
        return (TRITON_MODELS / "model.py").read_bytes()

    def load(self, name, parameters) -> list:
        return self.control(name, "load", parameters)

    def unload(self, name, parameters) -> list:
        return self.control(name, "unload", parameters)

    def control(self, name, verb, parameters) -> list:
        values = {key: self.value(key, value) for key, value in parameters.items()}
        return self.post(f"v2/repository/models/{name}/{verb}", json.dumps({"parameters": values} if values else {}))

    def call(self, rpc: str, request) -> list:
        with grpc.insecure_channel(self.server.grpc) as channel:
            try:
                getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), rpc)(request, timeout=DEADLINE_S)
                return ["OK", ""]
            except grpc.RpcError as error:
                return [error.code().name, self.plain(error.details())]

    def fill_parameters(self, request, parameters):
        for key, (kind, value) in parameters.items():
            if kind == "json_param":
                kind, value = "string_param", self.value(key, value)
            if kind == "model_param":
                kind, value = "bytes_param", self.model_file()
            setattr(request.parameters[key], kind, value)
        return request

    def grpc_load(self, name, parameters) -> list:
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        return self.call("RepositoryModelLoad", self.fill_parameters(request, parameters))

    def grpc_unload(self, name, parameters) -> list:
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        return self.call("RepositoryModelUnload", self.fill_parameters(request, parameters))

    def grpc_index(self, repository) -> list:
        return self.call("RepositoryIndex", service_pb2.RepositoryIndexRequest(repository_name=repository))

    def entries(self, names, ready=False) -> list:
        body = '{"ready":true}' if ready else "{}"
        found = [entry for entry in json.loads(self.ask("v2/repository/index", body)[1]) if entry["name"] in names]
        found.sort(key=lambda entry: (entry["name"], entry.get("version", "")))
        return [{key: self.plain(value) for key, value in entry.items()} for entry in found]

    def until(self, what, check):
        """Waits until `check()` is true."""
        eventually(what, check)

    def index(self, names, ready) -> list:
        busy = lambda: any(e.get("state") in ("LOADING", "UNLOADING") for e in self.entries(names))  # noqa: E731
        self.until(f"{names} settle", lambda: not busy())
        return self.entries(names, ready)

    def states(self, names) -> list:
        return [entry.get("state") for entry in self.entries(names)]

    def await_(self, names, states):
        self.until(f"{names} are {states}: {self.entries(names)}", lambda: self.states(names) == states)

    def gone(self, name):
        self.until(f"{name} is gone", lambda: self.ready(name, "") != 200)

    def path(self, name, version) -> str:
        return f"v2/models/{name}" + (f"/versions/{version}" if version else "")

    def healthy(self) -> int:
        return self.ask("v2/health/ready")[0]

    def asked(self, name, version) -> dict:
        """Sends every kind of request about a model; returns the answers by request."""
        row = {"infer": self.infer(name, version)}
        for what in ("", "/config", "/stats", "/ready"):
            status, text = self.ask(self.path(name, version) + what)
            row[f"GET {what}"] = [status, "" if status == 200 else json.loads(text).get("error", "") if text else ""]
        named = {"model_name": name, "model_version": version}
        row["ModelInfer"] = self.call("ModelInfer", service_pb2.ModelInferRequest(**named))
        for what in ("Metadata", "Config", "Statistics"):
            request = getattr(service_pb2, f"Model{what}Request")(name=name, version=version)
            row[f"Model{what}"] = self.call(f"Model{what}", request)
        return row

    def ready(self, name, version) -> int:
        return self.ask(f"{self.path(name, version)}/ready")[0]

    def infer(self, name, version) -> list:
        status, text = self.ask(f"{self.path(name, version)}/infer", json.dumps(REQUEST))
        answer = json.loads(text)
        return [status, answer.get("error") or answer["model_version"]]

    def field(self, name, field) -> list:
        status, text = self.ask(f"v2/models/{name}/config")
        answer = json.loads(text)
        value = answer.get(field, answer.get("error"))
        return [status, [group["count"] for group in value] if field == "instance_group" and status == 200 else value]

    def field_becomes(self, name, field, value):
        self.until(f"{field} of {name} becomes {value}", lambda: self.field(name, field)[1] == value)

    def count(self, name) -> list:
        """Returns the successes by version after they stop changing: Triton answers before it counts."""
        status, text = self.ask(f"v2/models/{name}/stats")
        if status != 200:
            return [status, json.loads(text)["error"]]
        read = lambda: json.loads(self.ask(f"v2/models/{name}/stats")[1])["model_stats"]  # noqa: E731
        stats = settled(f"the statistics of {name}", read, 0.3)
        return [status, {s["version"]: s["inference_stats"]["success"]["count"] for s in stats}]

    def versions(self, name) -> list:
        return json.loads(self.ask(f"v2/models/{name}")[1])["versions"]

    def perform(self, step) -> list | None:
        """Performs one step and returns its row."""
        verb, *arguments = step
        return getattr(self, {"await": "await_"}.get(verb, verb))(*arguments)

    def scenario(self, steps) -> list:
        """Performs all steps and returns the rows."""
        rows = []
        for step in steps:
            row = self.perform(step)
            if row is not None:
                rows.append([label(step), row])
        return rows


def label(step) -> str:
    """Returns the label of the row that a step makes."""
    return " ".join(word if isinstance(word, str) else json.dumps(word, default=repr) for word in step)[:300]


def prepare(world: World, mode: str):
    """Writes the initial repository of a mode."""
    if mode.startswith("two"):
        (world.repository.parent / SECOND).mkdir()
    if mode not in ("explicit", "two"):
        world.put("one", model(), [1])
    if mode == "two at start":
        world.put("both", model(), [1])
        world.twin("both", model(), [1, 2])
        world.put("over", ensemble("over", "one", "both"), [1])


def options_of(mode: str, repository: Path) -> list:
    """The command line options of a mode, in addition to the repository."""
    second = [f"--model-repository={repository.parent / SECOND}"] if mode.startswith("two") else []
    return MODES[mode][1] + second


def started(world: World):
    """Writes the repository for the command lines of `STARTED`."""
    world.put("one", model(), [1])
    world.put("two", model(), [1])
    world.put("both", ensemble("both", "one", "two"), [1])


def ask_triton(folder: Path, wanted, rows: dict, save=None):
    """Records Triton's rows of the scenarios in `wanted`, or of all; calls `save` with the rows so far after each scenario."""
    save = save or write_golden
    for mode, (scenarios, _) in MODES.items():
        for name, steps in scenarios.items():
            if wanted and name not in wanted:
                continue
            own = folder / name.replace(" ", "_")
            (own / "models").mkdir(parents=True)
            triton = Triton(own / "models", own / "log", options=options_of(mode, own / "models"))
            world = World(triton, own / "models", True)
            prepare(world, mode)
            try:
                triton.ensure()
                rows[name] = world.scenario(steps)
            finally:
                triton.stop()
            save(rows)
            print(name, len(rows[name]), flush=True)
    if not wanted or "started" in wanted:
        rows["started"] = {}
        for name, options in STARTED.items():
            rows["started"][name] = start_triton(folder / "started" / name.replace(" ", "_"), options)
            save(rows)


def write_golden(rows: dict):
    """Writes the golden file."""
    GOLDEN.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def start_triton(own: Path, options) -> list:
    """Returns the result of a start with this command line."""
    (own / "models").mkdir(parents=True)
    triton = Triton(own / "models", own / "log", options=options)
    world = World(triton, own / "models", True)
    started(world)
    try:
        triton.ensure()
        return ["started", world.index(["one", "two", "both", "nowhere"], False)]
    except RuntimeError:
        triton.wait_for_end()
        return ["ended", triton.process.returncode]
    finally:
        triton.stop()


def main() -> int:
    """The command line."""
    if sys.argv[1:2] != ["record"]:
        print(__doc__)
        return 2
    found = json.loads(GOLDEN.read_text()) if GOLDEN.exists() and sys.argv[2:] else {}
    with tempfile.TemporaryDirectory() as folder:
        ask_triton(Path(folder), sys.argv[2:], found)
    print(f"{len(found)} scenarios written to {GOLDEN.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
