"""The servers of the benchmark: start, wait until ready, requests and answers, end.

Every server listens on loopback, has the model in the same number of processes, and uses the same threads and options of ONNX
Runtime. Each has the dynamic batching of its documentation, if it has any. Only processes that this module started are ended.
"""

import http.client
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import session
from models import MAX_BATCH_SIZE, Model
from harness import peers
from harness.ports import free_ports

HERE = Path(__file__).resolve().parent
START_S, STOP_S = 120, 30


class Server:
    """A server that runs one model, with its files in `folder`. Use it with `with`, after `missing` returned no reason."""

    name = ""
    package = ""
    """The package of its version, for servers from PyPI."""
    setup = ""
    """Its settings for the report; `PROCESSES` stands for the number of processes with the model."""
    path = "/predict"

    def __init__(self, options, folder: Path):
        self.options, self.folder = options, folder
        self.process, self.port, self.model = None, 0, None

    def missing(self) -> str:
        """Returns why the server cannot be measured here; empty if it can."""
        return ""

    def version(self) -> str:
        """Returns the version."""
        return importlib.metadata.version(self.package)

    def description(self) -> dict:
        """Returns the name, the version and the settings for the report."""
        setup = self.setup.replace("PROCESSES", str(self.options.processes))
        return {"name": self.name, "version": self.version(), "setup": setup}

    def command(self) -> list:
        """Returns the command line. Writes the files that it names."""
        raise NotImplementedError

    def variables(self) -> dict:
        """Returns the environment variables besides those of this process."""
        return {}

    def request(self, row) -> dict:
        """Returns the JSON document of a request with one row of input."""
        return {"row": row.tolist()}

    def numbers(self, answer: dict) -> list:
        """Returns the numbers of the output."""
        return answer["output"]

    def requests(self) -> list:
        """Returns the text of a request for each input of the model."""
        return [self.encode(row) for row in self.model.rows()]

    def encode(self, row) -> str:
        """Returns the text of a request over HTTP/1.1."""
        body = json.dumps(self.request(row))
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}"

    def start(self, model: Model):
        """Starts the server and waits until it answers a request."""
        self.model, self.port = model, free_ports(1)[0]
        self.folder.mkdir(parents=True, exist_ok=True)
        described = session.describe(model, self.options.threads)
        own = {session.VARIABLE: described, session.PROCESSES: str(self.options.processes), "PYTHONPATH": str(HERE)}
        environment = os.environ | own | self.variables()
        with open(self.folder / "log", "ab") as log:
            # A session of processes, so that all processes of the server can be ended together.
            self.process = subprocess.Popen(
                self.command(), cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.wait_until_ready()

    def wait_until_ready(self):
        """Waits until a request is answered. Raises an error after `START_S`, or if the process has ended."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.answers():
                return
            time.sleep(0.1)
        log = (self.folder / "log").read_text(errors="replace")
        raise RuntimeError(f"{self.name} did not become ready within {START_S} s; the end of its log:\n{log[-2000:]}")

    def answers(self) -> bool:
        """Returns whether a request is answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            body = json.dumps(self.request(self.model.rows()[0]))
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def processor_s(self) -> float:
        """Returns the processor time that the processes of the server have used."""
        ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in processes(self.process.pid))
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self):
        """Terminates the server, then kills the rest of its processes."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        for pid, _ in processes(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def processes(session_id: int) -> list:
    """Returns the ids of the processes of a session, each with the fields of `/proc/PID/stat` after the name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The state, the parent, the group, the session.
        if int(fields[3]) == session_id:
            found.append((int(path.parent.name), fields))
    return found


class KServe(Server):
    """A server of the KServe v2 protocol."""

    def request(self, row) -> dict:
        """See `Server`; the first dimension is the batch."""
        given = {"name": self.model.input, "datatype": self.model.datatype, "shape": [1, *self.model.shape]}
        return {"inputs": [given | {"data": row.flatten().tolist()}], "outputs": [{"name": self.model.output}]}

    def numbers(self, answer: dict) -> list:
        """See `Server`."""
        return answer["outputs"][0]["data"]

    def batching(self) -> str:
        """Returns the dynamic batching of a model configuration."""
        return f"dynamic_batching {{ max_queue_delay_microseconds: {1000 * self.model.wait_ms} }}"

    @property
    def path(self) -> str:
        """The path of requests for the model."""
        return f"/v2/models/{self.model.name}/infer"

    def write_model(self, config: str, source: Path, name: str) -> Path:
        """Writes a model repository with one model, whose version has the file `name`; returns its path."""
        version = self.folder / "models" / self.model.name / "1"
        version.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, version / name)
        (version.parent / "config.pbtxt").write_text(config)
        return self.folder / "models"


class Pharos(KServe):
    """This server, with ONNX Runtime's library from the package of this Python."""

    name = "Pharos"
    setup = f"`max_batch_size: {MAX_BATCH_SIZE}`, `dynamic_batching` with the wait, `count: PROCESSES`"

    def missing(self) -> str:
        """See `Server`."""
        return "" if self.options.server.is_file() else f"{self.options.server} does not exist: make build, or --server PATH"

    def version(self) -> str:
        """See `Server`."""
        return subprocess.run([self.options.server, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]

    def command(self) -> list:
        """See `Server`."""
        config = f'backend: "onnxruntime"\nmax_batch_size: {MAX_BATCH_SIZE}\n{self.batching()}\n'
        config += f"instance_group [ {{ count: {self.options.processes} kind: KIND_CPU }} ]\n"
        for name, value in (
            ("intra_op_thread_count", self.options.threads),
            ("session.intra_op.allow_spinning", int(self.model.spinning)),
        ):
            config += f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        repository = self.write_model(config, self.model.path, "model.onnx")
        command = [str(self.options.server), f"--model-repository={repository}"]
        for name, port in zip(("http", "grpc", "metrics"), (self.port, *free_ports(2))):
            command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
        return command

    def variables(self) -> dict:
        """See `Server`. The first `python3` of the path has the package `onnxruntime`."""
        return {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


class Triton(KServe):
    """Triton's Python backend, where the peer is installed: see `harness/peers.py`."""

    name = "Triton (Python backend)"
    setup = f"{Pharos.setup}, a `model.py` with ONNX Runtime"

    def missing(self) -> str:
        """See `Server`."""
        reason = peers.missing("triton", "triton")
        if reason:
            return reason
        theirs, ours = self.interpreter("sys.version_info[:2]"), str(sys.version_info[:2])
        return "" if theirs == ours else f"its Python has the version {theirs}, not {ours}, so it cannot import ONNX Runtime"

    def interpreter(self, expression: str) -> str:
        """Returns the value of an expression in the Python of the peer."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        home = Path(os.environ.get("PEERS_HOME") or Path(cache) / "pharos-peers")
        command = [home / "triton/bin/python", "-c", f"import sys, importlib.metadata as packages; print({expression})"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    def version(self) -> str:
        """See `Server`."""
        return "2.51 of nvidia-pytriton " + self.interpreter("packages.version('nvidia-pytriton')")

    def command(self) -> list:
        """See `Server`."""
        dims = ", ".join(map(str, self.model.shape))
        config = f'backend: "python"\nmax_batch_size: {MAX_BATCH_SIZE}\n{self.batching()}\n'
        config += f"instance_group [ {{ count: {self.options.processes} kind: KIND_CPU }} ]\n"
        config += f'input [ {{ name: "{self.model.input}" data_type: TYPE_{self.model.datatype} dims: [ {dims} ] }} ]\n'
        config += f'output [ {{ name: "{self.model.output}" data_type: TYPE_FP32 dims: [ -1 ] }} ]\n'
        repository = self.write_model(config, HERE / "triton_model.py", "model.py")
        return [str(peers.script("triton")), str(repository)]

    def variables(self) -> dict:
        """See `Server`. The model imports ONNX Runtime and numpy from the packages of this Python."""
        grpc, metrics = free_ports(2)
        ports = {"HTTP_PORT": str(self.port), "GRPC_PORT": str(grpc), "METRICS_PORT": str(metrics)}
        return ports | {"BENCH_PATH": os.pathsep.join([str(HERE), sysconfig.get_path("purelib")])}


class LitServe(Server):
    """LitServe with its faster queue between processes."""

    name = "LitServe"
    package = "litserve"
    setup = (
        f"`max_batch_size={MAX_BATCH_SIZE}`, `batch_timeout` with the wait, `fast_queue=True`, `workers_per_device=PROCESSES`, "
        "`num_api_servers=2`"
    )

    def command(self) -> list:
        """See `Server`."""
        return [sys.executable, str(HERE / "litserve_server.py"), str(self.port)]


class Mosec(Server):
    """mosec, whose web server is written in Rust."""

    name = "mosec"
    package = "mosec"
    setup = f"`max_batch_size={MAX_BATCH_SIZE}`, `max_wait_time=1`, `num=PROCESSES`"
    path = "/inference"

    def command(self) -> list:
        """See `Server`."""
        # mosec does not start where its sockets of an ended server are. The path of a socket has at most 107 characters.
        sockets = self.folder / "sockets"
        shutil.rmtree(sockets, ignore_errors=True)
        command = [sys.executable, str(HERE / "mosec_server.py"), "--address", "127.0.0.1", "--port", str(self.port)]
        return [*command, "--path", str(sockets), "--log-level", "warning"]


class MLServer(KServe):
    """MLServer in its environment."""

    name = "MLServer"
    setup = f"`max_batch_size: {MAX_BATCH_SIZE}`, `max_batch_time: 0.001`, `parallel_workers: PROCESSES`"

    def missing(self) -> str:
        """See `Server`."""
        program = self.options.mlserver
        return "" if program.is_file() else f"{program} does not exist: MLServer needs Python 3.9 to 3.12"

    def version(self) -> str:
        """See `Server`."""
        command = [self.options.mlserver.parent / "python", "-c", "import mlserver; print(mlserver.__version__)"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def command(self) -> list:
        """See `Server`."""
        grpc, metrics = free_ports(2)
        ports = {"http_port": self.port, "grpc_port": grpc, "metrics_port": metrics}
        general = {"debug": False, "host": "127.0.0.1", "parallel_workers": self.options.processes, **ports}
        model = {"name": self.model.name, "implementation": "mlserver_model.Classifier"}
        model |= {"max_batch_size": MAX_BATCH_SIZE, "max_batch_time": 0.001}
        (self.folder / "settings.json").write_text(json.dumps(general))
        (self.folder / "model-settings.json").write_text(json.dumps(model))
        return [str(self.options.mlserver), "start", str(self.folder)]


class FastApi(Server):
    """FastAPI with uvicorn."""

    name = "FastAPI"
    package = "fastapi"
    setup = "a function that is not a coroutine, `--workers PROCESSES`; no batching"

    def version(self) -> str:
        """See `Server`."""
        return f"{super().version()}, uvicorn {importlib.metadata.version('uvicorn')}"

    def command(self) -> list:
        """See `Server`."""
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        command = [sys.executable, "-m", "uvicorn", "fastapi_server:app", *where, "--workers", str(self.options.processes)]
        return [*command, "--no-access-log", "--log-level", "warning"]


ALL = [Pharos, Triton, LitServe, Mosec, MLServer, FastApi]
