"""The servers of the benchmark: start, wait until ready, requests and answers, end.

Each serves the same folder of a model on loopback, on the processors of this process, and may use as many threads for a text as there
are. A peer runs in a separate environment, which `environments` creates. Only processes that this module started are ended.
"""

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
THREADS = len(os.sched_getaffinity(0))
START_S, STOP_S = 180, 30


def free_ports(count: int) -> list:
    """Returns ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Server:
    """A server with OpenAI's path for embeddings, whose model has the name `text`."""

    name = ""
    setup = ""
    """Its settings for the report."""
    path = "/v1/embeddings"
    ready = "/health"
    """A path that is answered with 200 when the model is ready."""

    def __init__(self, options, folder: Path):
        self.options, self.model, self.folder = options, options.model.resolve(), folder
        self.process, self.address = None, ""

    def missing(self) -> str:
        """Returns why the server cannot be measured here; empty if it can."""
        return ""

    def version(self) -> str:
        """Returns the versions of its packages."""
        return ""

    def command(self, port: int) -> list:
        """Returns the command line. Writes the files that it names."""
        raise NotImplementedError

    def variables(self) -> dict:
        """Returns the environment variables besides those of this process."""
        return {}

    def where(self) -> Path:
        """Returns the folder in which it runs."""
        return self.folder

    def body(self, text: str) -> str:
        """Returns the body of a request with one text."""
        return json.dumps({"model": "text", "input": text, "encoding_format": "base64"})

    def vector(self, answer: bytes):
        """Returns the vector of an answer."""
        encoded = json.loads(answer)["data"][0]["embedding"]
        return np.frombuffer(base64.b64decode(encoded), np.float32)

    def start(self):
        """Starts the server and waits until the model is ready."""
        port = free_ports(1)[0]
        self.address = f"127.0.0.1:{port}"
        self.folder.mkdir(parents=True)
        with open(self.folder / "log", "wb") as log:
            # A session of processes, so that all processes of the server can be ended together.
            self.process = subprocess.Popen(
                self.command(port), cwd=self.where(), env=os.environ | self.variables(), stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.is_ready():
                return
            time.sleep(0.1)
        reason = f"is not ready after {START_S} s" if self.process.poll() is None else "ended"
        log = (self.folder / "log").read_text(errors="replace")
        raise SystemExit(f"{self.name} {reason}; the end of its log:\n{log[-2000:]}")

    def is_ready(self) -> bool:
        """Returns whether the model is ready."""
        connection = http.client.HTTPConnection(self.address, timeout=START_S)
        try:
            connection.request("GET", self.ready)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self):
        """Terminates the server, then kills the rest of its processes."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process = None


class Pharos(Server):
    """Pharos with the backend `text`."""

    name = "pharos"
    ready = "/v2/health/ready"

    def version(self) -> str:
        """See `Server`."""
        return subprocess.run([self.options.server, "--version"], capture_output=True, text=True).stdout.strip()

    def command(self, port: int) -> list:
        """See `Server`."""
        models = self.folder / "models"
        (models / "text").mkdir(parents=True)
        (models / "text/1").symlink_to(self.model)
        if self.options.config:
            (models / "text/config.pbtxt").write_text(self.options.config)
        ports = ["--grpc-port=0", "--metrics-port=0", f"--http-port={port}"]
        return [str(self.options.server.resolve()), "--model-repository", str(models), *ports]

    def variables(self) -> dict:
        """See `Server`: ONNX Runtime is found beside this Python."""
        return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


class Given(Server):
    """A server that was started before, with OpenAI's path."""

    def __init__(self, name: str, address: str):
        self.name, self.address, self.process = name, address, None

    def start(self):
        """Does nothing."""


class Peer(Server):
    """A server in a separate virtual environment."""

    environment = ""
    packages = ()
    """The packages of its version."""

    def python(self) -> Path:
        """Returns the Python of the environment."""
        return Path(f"{self.options.environments.absolute()}-{self.environment}/bin/python")

    def missing(self) -> str:
        """See `Server`."""
        python = self.python()
        return "" if python.is_file() else f"{python} does not exist: tests/bench_text/environments creates it"

    def version(self) -> str:
        """See `Server`."""
        code = "import sys; from importlib.metadata import version; print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))"
        done = subprocess.run([self.python(), "-c", code, *self.packages], capture_output=True, text=True)
        return done.stdout.strip()

    def variables(self) -> dict:
        """See `Server`: nothing is fetched or sent."""
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "cache"), "DO_NOT_TRACK": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        return {"OMP_NUM_THREADS": str(THREADS), "PATH": f"{self.python().parent}:{os.environ['PATH']}"} | quiet


class FastApi(Peer):
    """sentence-transformers behind FastAPI, without batching."""

    name = "fastapi"
    environment = "fastapi"
    packages = ("fastapi", "sentence-transformers", "transformers", "torch")
    setup = "one request at a time"
    backend = "torch"
    ready = "/openapi.json"

    def command(self, port: int) -> list:
        """See `Server`."""
        where = ["--app-dir", str(HERE), "--host", "127.0.0.1", "--port", str(port)]
        return [str(self.python()), "-m", "uvicorn", "peer_fastapi:app", *where, "--no-access-log", "--log-level", "warning"]

    def variables(self) -> dict:
        """See `Server`."""
        return super().variables() | {"MODEL_FOLDER": str(self.model), "MODEL_BACKEND": self.backend}


class FastApiOnnx(FastApi):
    """The same with the graph in ONNX Runtime."""

    name = "fastapi-onnx"
    packages = ("fastapi", "sentence-transformers", "optimum-onnx", "onnxruntime")
    backend = "onnx"


class Infinity(Peer):
    """Infinity with torch."""

    name = "infinity"
    environment = "infinity"
    packages = ("infinity-emb", "sentence-transformers", "transformers", "torch")
    setup = "its defaults: batches of at most 32 texts"
    engine = ("--engine", "torch")

    def command(self, port: int) -> list:
        """See `Server`. With a path other than that of the folder in which it runs, Infinity does not find graphs."""
        where = ["--host", "127.0.0.1", "--port", str(port), "--url-prefix", "/v1", "--log-level", "warning"]
        program = [str(self.python().parent / "infinity_emb"), "v2"]
        return [*program, "--model-id", ".", "--served-model-name", "text", "--device", "cpu", *self.engine, *where]

    def variables(self) -> dict:
        """See `Server`."""
        return super().variables() | {"INFINITY_HOME": str(self.folder), "INFINITY_ANONYMOUS_USAGE_STATS": "0"}

    def where(self) -> Path:
        """See `Server`."""
        return self.model


class InfinityOnnx(Infinity):
    """Infinity with the graph in ONNX Runtime."""

    name = "infinity-onnx"
    packages = ("infinity-emb", "optimum-onnx", "onnxruntime")
    engine = ("--engine", "optimum", "--pooling-method", "mean")


class MLServer(Peer):
    """sentence-transformers in MLServer, with a custom runtime."""

    name = "mlserver"
    environment = "mlserver"
    packages = ("mlserver", "sentence-transformers", "transformers", "torch")
    setup = "`peer_mlserver.py`, `max_batch_size: 32`, `max_batch_time: 0.001`, `parallel_workers: 1`"
    path = "/v2/models/text/infer"
    ready = "/v2/models/text/ready"
    runtime = "peer_mlserver.Embeddings"
    max_batch_size = 32
    extra = {}

    def command(self, port: int) -> list:
        """See `Server`."""
        grpc, metrics = free_ports(2)
        ports = {"http_port": port, "grpc_port": grpc, "metrics_port": metrics}
        general = {"debug": False, "host": "127.0.0.1", "parallel_workers": 1, "metrics_dir": str(self.folder / "metrics"), **ports}
        parameters = {"uri": str(self.model), "extra": self.extra}
        batches = {"max_batch_size": self.max_batch_size, "max_batch_time": 0.001} if self.max_batch_size else {}
        described = {"name": "text", "implementation": self.runtime, "parameters": parameters, **batches}
        (self.folder / "models/text").mkdir(parents=True)
        (self.folder / "models/settings.json").write_text(json.dumps(general))
        (self.folder / "models/text/model-settings.json").write_text(json.dumps(described))
        return [str(self.python().parent / "mlserver"), "start", str(self.folder / "models")]

    def variables(self) -> dict:
        """See `Server`."""
        return super().variables() | {"PYTHONPATH": str(HERE), "USE_TF": "0"}

    def body(self, text: str) -> str:
        """See `Server`."""
        return json.dumps({"inputs": [{"name": "args", "shape": [1], "datatype": "BYTES", "data": [text]}]})

    def vector(self, answer: bytes):
        """See `Server`."""
        return np.array(json.loads(answer)["outputs"][0]["data"], np.float32)


class MLServerHuggingFace(MLServer):
    """MLServer with its runtime for models of Hugging Face, which answers with the vectors of all tokens."""

    name = "mlserver-huggingface"
    packages = ("mlserver-huggingface", "transformers", "torch")
    setup = "`feature-extraction`, no batching, `parallel_workers: 1`; it answers with the vectors of all tokens, as JSON"
    runtime = "peer_mlserver_huggingface.HuggingFaceRuntime"
    max_batch_size = 0
    optimum = False

    def command(self, port: int) -> list:
        """See `Server`."""
        folder = str(self.model)
        task = {"task": "feature-extraction", "framework": "pt", "device": "cpu", "intra_op_threads": THREADS}
        self.extra = task | {"pretrained_model": folder, "pretrained_tokenizer": folder, "optimum_model": self.optimum}
        return super().command(port)

    def vector(self, answer: bytes):
        """See `Server`: the client makes the mean of all tokens."""
        tokens = np.array(json.loads(json.loads(answer)["outputs"][0]["data"][0]), np.float32)
        mean = tokens.reshape(-1, tokens.shape[-1]).mean(0)
        return mean / np.linalg.norm(mean)


class MLServerHuggingFaceOnnx(MLServerHuggingFace):
    """The same with the graph in ONNX Runtime."""

    name = "mlserver-huggingface-onnx"
    packages = ("mlserver-huggingface", "optimum", "onnxruntime")
    optimum = True


PEERS = {kind.name: kind for kind in (FastApi, FastApiOnnx, Infinity, InfinityOnnx, MLServer, MLServerHuggingFace, MLServerHuggingFaceOnnx)}
