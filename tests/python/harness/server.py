"""Starts, queries and stops the real server, one process and its workers, on free ports."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from harness.ports import free_ports
from harness.waiting import DEADLINE_S, eventually

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples/models"
MODELS = ROOT / "tests/models"
BROKEN = ROOT / "tests/models_broken"
STANDIN = ROOT / "tests/python/harness/standin"
"""A package `pharos_worker` that records how it was started and follows the instructions of a file."""
TRITON_MODELS = ROOT / "tests/python/harness/triton_models"
"""The code of models for the Python backend of a real Triton."""
START_S = 300
"""Longer than the usual deadline: many workers import large Python packages at the same time. A server that ends fails at once."""
STOP_S = 45
"""More than `--exit-timeout-secs`, 30 s by default."""
PANIC = re.compile(rb"thread '[^'\n]*'(?: \(\d+\))? panicked at .*")
"""The line of a panic, of the server or of a worker."""


def binary() -> Path:
    """Returns the server's executable: `PHAROS_BIN`, or the path where `cargo build --release` writes it."""
    return Path(os.environ.get("PHAROS_BIN") or ROOT / "target/release/pharos")


def log_is_written(pid: int) -> bool:
    """Returns whether each thread that writes the log waits for lines or has ended."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            if (task / "comm").read_text() == "log\n" and (task / "stat").read_text().rsplit(") ")[1][0] != "S":
                return False
        # The thread ended before its file was opened, or between opening and reading.
        except (FileNotFoundError, ProcessLookupError):
            pass
    return True


class Process(subprocess.Popen):
    """The process of a server, which knows what its test expects. `is_expected_to_end`: the test has sent a signal that ends a
    process, or has waited for its end."""

    def __init__(self, *arguments, **options):
        self.is_expected_to_end, self.signals = False, set()
        super().__init__(*arguments, **options)

    def send_signal(self, number: int):
        """Sends a signal, unless the process has ended; `terminate` and `kill` call it too."""
        if self.poll() is None:
            self.signals.add(number)
            self.is_expected_to_end |= number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
        super().send_signal(number)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code."""
        code = super().wait(timeout)
        self.is_expected_to_end = True
        return code


def check_process(process: Process, log: Path, may_panic=False):
    """Fails if a process has ended although its test did not end it, or by a signal that its test has not sent, or if a thread of the
    server or of a worker has panicked. `log` is the file with the output."""
    code = process.poll()
    tail = lambda: log.read_bytes()[-4000:].decode(errors="replace")  # noqa: E731
    assert code is None or process.is_expected_to_end, f"the server ended with {code}, but the test did not end it:\n{tail()}"
    assert code is None or code >= 0 or -code in {*process.signals, signal.SIGTERM}, f"signal {-code} ended the server:\n{tail()}"
    panics = [] if may_panic or not log.exists() else PANIC.findall(log.read_bytes())
    assert not panics, f"{[panic.decode(errors='replace') for panic in panics]} in the log:\n{tail()}"


class Server:
    """A server that serves `repositories`; `options` are further command line options. Use it with `with`. After each end, the test
    fails if the server crashed or if a thread panicked, unless `may_panic` is set."""

    def __init__(self, folder: Path, repositories, options=()):
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.http, self.grpc = f"127.0.0.1:{self.http_port}", f"127.0.0.1:{self.grpc_port}"
        self.metrics = f"127.0.0.1:{self.metrics_port}"
        self.log_path = folder / f"pharos-{self.http_port}.log"
        self.logs = folder / f"logs-{self.http_port}"
        self.command = [str(binary())]
        for name in ("http", "grpc", "metrics"):
            self.command += [f"--{name}-address=127.0.0.1", f"--{name}-port={getattr(self, f'{name}_port')}"]
        self.command += [f"--model-repository={path}" for path in repositories]
        self.command += options
        # Off by default; most tests with shared memory or with files of a load are not about that.
        for flag in ("--allow-client-shm", "--allow-model-upload"):
            if not any(str(option).startswith(flag) for option in options):
                self.command.append(flag)
        self.environment = {}
        self.process = None
        self.may_panic = False

    @property
    def log(self) -> Path:
        """The file with the server's output; waits until it contains all lines that were logged before."""
        if self.process is not None and self.process.poll() is None:
            eventually("the log is written", lambda: log_is_written(self.process.pid))
        return self.log_path

    def __enter__(self):
        self.launch()
        self.wait_until_ready()
        return self

    def __exit__(self, kind, error, trace):
        if self.process.poll() is None:
            self.stop(check=kind is None)
        elif kind is None:
            self.check()

    def check(self):
        """Fails as [`check_process`]."""
        check_process(self.process, self.log_path, self.may_panic)

    def launch(self, stdout=None, stderr=None, cwd=None):
        """Starts the process and does not wait. The Python of the tests is first on its PATH, so that it finds that Python's
        ONNX Runtime. Metric logs go to `logs`, output goes to `log` or to the descriptors `stdout` and `stderr`."""
        if self.process is not None:
            self.check()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PHAROS_")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment |= {"PHAROS_METRICS_LOCATION": str(self.logs)} | self.environment
        with open(self.log, "wb") as log:
            self.process = Process(self.command, stdout=stdout or log, stderr=stderr or log, env=environment, cwd=cwd)

    def wait_until_ready(self, path="/v2/health/ready"):
        """Waits until `path` answers 200; fails with the end of the log if the server ends or exceeds the deadline."""

        def check():
            assert self.process.poll() is None, f"the server ended with {self.process.poll()}:\n{self.log_tail()}"
            try:
                return self.get(path)[0] == 200
            except OSError:
                return False

        try:
            eventually(f"{path} answers 200", check, deadline_s=START_S)
        except AssertionError as error:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{error}\n{self.log_tail()}") from None

    def log_tail(self) -> str:
        """Returns the end of the server's output."""
        return self.log.read_text(errors="replace")[-4000:]

    def get(self, path: str, address: str = "", headers=None) -> tuple:
        """Sends a GET request; returns the status and the body as text."""
        return self.ask("GET", path, address=address, headers=headers)

    def connect(self, address: str = "") -> http.client.HTTPConnection:
        """Returns a connection that stays open."""
        return http.client.HTTPConnection(address or self.http, timeout=DEADLINE_S)

    def ask(self, method: str, path: str, body=None, address: str = "", headers=None) -> tuple:
        """Sends one HTTP request on a new connection; returns the status and the body as text."""
        connection = self.connect(address)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def infer(self, model: str, request: dict) -> tuple:
        """Sends an inference request in JSON; returns the status and the parsed answer."""
        status, text = self.ask("POST", f"/v2/models/{model}/infer", json.dumps(request))
        return status, json.loads(text)

    def statistics(self, model: str, version: str = "1") -> dict:
        """Returns the statistics of one version of a model."""
        status, text = self.get(f"/v2/models/{model}/versions/{version}/stats")
        assert status == 200, text
        return json.loads(text)["model_stats"][0]

    def index(self) -> dict:
        """Returns the repository index: model -> its entries."""
        status, text = self.ask("POST", "/v2/repository/index", b"")
        assert status == 200, text
        entries = {}
        for entry in json.loads(text):
            entries.setdefault(entry["name"], []).append(entry)
        return entries

    def scrape(self) -> dict:
        """Returns the metrics: name and labels `(name, ((label, value), ...))` -> value."""
        status, text = self.get("/metrics", self.metrics)
        assert status == 200, text
        return samples(text)

    def workers(self) -> set:
        """Returns the process ids of the live workers of the server."""
        return {pid for pid in workers(self.process.pid) if alive(pid)}

    def resident_bytes(self) -> int:
        """Returns the memory of the server's process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self, check=True) -> int:
        """Sends SIGTERM and waits; returns the exit code. `check`: the code must be 0 and no worker may remain, the server must not have
        crashed before, and no thread may have panicked."""
        if check:
            self.check()
        workers = self.workers()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not end within {STOP_S} s of SIGTERM:\n{self.log_tail()}") from None
        if check:
            assert code == 0, f"ended with {code} after SIGTERM:\n{self.log_tail()}"
            self.check()
            eventually("the workers are gone", lambda: not any(alive(pid) for pid in workers))
        return code

    def kill(self):
        """Sends SIGKILL and waits; fails if the server crashed before, or if a thread panicked."""
        self.process.kill()
        try:
            self.check()
        finally:
            self.process.wait()


def kill_all(servers):
    """Kills the servers that still run, at the end of a fixture; then fails if one of them crashed before, or if a thread panicked."""
    for server in servers:
        server.process.kill()
    for server in servers:
        server.kill()


def children(pid: int) -> list:
    """Returns the direct children of a process, zombies included. Reads all of `/proc`, since not every kernel lists children."""
    processes = filter(str.isdigit, os.listdir("/proc"))
    return [int(process) for process in processes if parent_of(Path("/proc", process, "stat")) == pid]


def workers(pid: int) -> list:
    """Returns the worker processes of a server, zombies included: its children, without those that render chat templates, and those of
    its fork servers."""
    processes = [child for child in children(pid) if b"chat-template-process" not in command_line(child)]
    servers = fork_servers(pid)
    return [child for child in processes if child not in servers] + [copy for server in servers for copy in children(server)]


def fork_servers(pid: int) -> list:
    """Returns the processes from which a server forks workers."""
    return [child for child in children(pid) if b"--fork-server" in command_line(child)]


def command_line(pid: int) -> list:
    """Returns the program and the arguments of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []


def parent_of(stat: Path) -> int:
    """Returns the parent's process id from a `/proc/PID/stat`; 0 if the process has ended."""
    try:
        return int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def alive(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def samples(text: str) -> dict:
    """Parses the Prometheus text format: name and labels, sorted -> value. A duplicate series is an error."""
    result = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name, _, rest = series.partition("{")
        labels = []
        for pair in rest.rstrip("}").split('",') if rest else []:
            key, _, label = pair.partition('="')
            labels.append((key, label.rstrip('"')))
        key = (name, tuple(sorted(labels)))
        assert key not in result, f"duplicate series {series}"
        result[key] = float(value)
    return result


def total(metrics: dict, name: str, **labels) -> float:
    """Returns the sum of the series of `name` that have these labels."""
    wanted = set(labels.items())
    return sum(value for (n, pairs), value in metrics.items() if n == name and wanted <= set(pairs))
