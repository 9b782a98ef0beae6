"""The files that the server writes, leaves and removes; it never removes foreign files."""

import base64
import json
import os
import subprocess

import pytest

from harness.inference import one
from harness.models import copy_models
from harness.ports import free_ports
from harness.server import Server, binary, kill_all, total
from harness.waiting import DEADLINE_S, eventually

CONFIG = {
    "name": "given",
    "backend": "builtin",
    "max_batch_size": 8,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "parameters": {"function": {"string_value": "identity"}},
}


@pytest.fixture
def serve(tmp_path):
    """Starts servers that load by request, with temporary files in `tmp` and the working directory `work`."""
    servers = []
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work").mkdir()

    def begin(*options, environment=()):
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        repository = copy_models(folder / "models", ["identity_fp32"])
        server = Server(folder, [repository], ["--model-control-mode=explicit", "--load-model=*", *options])
        servers.append(server)
        server.environment = {"TMPDIR": str(tmp_path / "tmp")} | dict(environment)
        # No option configures a directory for logs.
        server.command = ["env", "-u", "PHAROS_METRICS_LOCATION", *server.command]
        server.launch(cwd=tmp_path / "work")
        server.wait_until_ready()
        return server

    yield begin
    kill_all(servers)


def load(server):
    """Loads a model whose files are part of the request."""
    files = {"file:1/weights": base64.b64encode(b"x" * 1000).decode()}
    body = json.dumps({"parameters": {"config": json.dumps(CONFIG)} | files})
    status, text = server.ask("POST", "/v2/repository/models/given/load", body)
    assert status == 200, text
    assert server.infer("given", one("FP32", [1, 1], [1]))[0] == 200


def names(folder) -> list:
    """Returns the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_files_of_a_load_by_request_are_removed_at_exit(serve, tmp_path):
    """After a clean exit no temporary files are left."""
    server = serve()
    load(server)
    weights = list((tmp_path / "tmp").rglob("weights"))
    assert len(weights) == 1 and weights[0].read_bytes() == b"x" * 1000
    server.stop()
    assert names(tmp_path / "tmp") == []


def test_files_of_a_killed_server_are_removed_at_the_next_start(serve, tmp_path):
    """Files of a killed server are removed; files of a running server and foreign files are kept."""
    killed, other = serve(), serve()
    load(killed)
    load(other)
    killed.process.kill()
    killed.process.wait()
    temporary = tmp_path / "tmp"
    left = [name for name in names(temporary) if f"-{killed.process.pid}-" in name]
    # The files of the load, and the directory of its sandbox.
    assert len(left) == 2 and len(names(temporary)) == 4
    for name in ("pharos-load-1-0", "pharos-store-mine", "pharos-torchserve-1-0"):
        (temporary / name / "models").mkdir(parents=True)
        (temporary / name / "lock").write_text("")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/lock").write_text("")
    (temporary / "pharos-load-2-0").symlink_to(tmp_path / "precious")
    before = set(names(temporary))
    third = serve()
    assert set(names(temporary)) == before - set(left)
    assert (tmp_path / "precious/lock").exists()
    assert other.infer("given", one("FP32", [1, 1], [1]))[0] == 200
    other.stop()
    third.stop()
    assert set(names(temporary)) == {
        "pharos-load-1-0",
        "pharos-load-2-0",
        "pharos-store-mine",
        "pharos-torchserve-1-0",
    }


def test_the_working_directory_is_not_changed(serve, tmp_path):
    """Nothing is written there unless a mode enables metric logs; a configured directory gets them."""
    server = serve()
    assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    assert "nv_inference_request_success" in server.get("/metrics", server.metrics)[1]
    server.stop()
    assert names(tmp_path / "work") == []
    server = serve("--tslog-stdout")
    assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    eventually("a line on standard output", lambda: "ts_inference_requests_total" in server.log.read_text())
    server.stop()
    assert names(tmp_path / "work") == []
    server = serve("--metrics-mode=tslog")
    server.stop()
    assert names(tmp_path / "work") == ["logs"]
    server = serve(f"--log-location={tmp_path / 'named'}")
    server.stop()
    assert names(tmp_path / "named") == ["model_metrics.log", "ts_metrics.log"]
    server = serve(environment={"METRICS_LOCATION": str(tmp_path / "variable")})
    server.stop()
    assert names(tmp_path / "variable") == ["model_metrics.log", "ts_metrics.log"]


def test_a_mode_in_a_file_enables_logs(serve, tmp_path):
    """The mode in the user's file applies; a file without a mode writes nothing."""
    labels = "[model_name, model_version, hostname]"
    metrics = f"ts_metrics:\n  counter:\n    - {{name: ts_inference_requests_total, unit: Count, dimensions: {labels}}}\n"
    for mode, expected in (("", []), ("mode: log\n", ["logs"])):
        (tmp_path / "metrics.yaml").write_text(mode + metrics)
        server = serve(f"--metrics-config={tmp_path / 'metrics.yaml'}")
        server.stop()
        assert names(tmp_path / "work") == expected, mode


def test_logs_that_cannot_be_written(serve, tmp_path):
    """The server starts and answers; the error is logged once per file and counted."""
    server = serve("--metrics-mode=both", environment={"LOG_LOCATION": "/dev/null/logs"})
    for _ in range(3):
        assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    errors = lambda: total(server.scrape(), "pharos_tslog_write_errors_total", file="ts_metrics")  # noqa: E731
    eventually("the file is tried again", lambda: errors() >= 2)
    assert server.log.read_text().count("cannot log metrics to '/dev/null/logs/ts_metrics.log'") == 1
    server.stop()


class TorchServe(Server):
    """`pharos torchserve` in `folder`."""

    def __init__(self, folder, **environment):
        super().__init__(folder, [])
        (folder / "store").mkdir()
        (folder / "tmp").mkdir()
        self.folder = folder
        addresses = zip(("inference", "management", "metrics"), free_ports(3), strict=True)
        ports = dict(addresses)
        lines = [f"{name}_address=http://127.0.0.1:{port}\n" for name, port in ports.items()]
        (folder / "config.properties").write_text("".join(lines))
        self.http = f"127.0.0.1:{ports['inference']}"
        self.metrics = f"127.0.0.1:{ports['metrics']}"
        self.command = [str(binary()), "torchserve", "--foreground", "--ncs", "--model-store", "store"]
        self.command += ["--ts-config", "config.properties"]
        self.environment = {"TMPDIR": str(folder / "tmp"), "LOG_LOCATION": "", "METRICS_LOCATION": ""} | environment

    def launch(self, stdout=None, stderr=None, cwd=None):
        """Launches it in the folder."""
        super().launch(stdout, stderr, cwd or self.folder)


def test_torchserves_logs_that_cannot_be_written(tmp_path):
    """As above: the console has the lines, and reports each file that cannot be written once."""
    server = TorchServe(tmp_path, LOG_LOCATION="/dev/null/logs", METRICS_LOCATION=str(tmp_path / "metrics"))
    server.command += ["--disable-token-auth"]
    server.launch()
    try:
        server.wait_until_ready("/ping")
        for _ in range(10):
            assert server.get("/ping")[0] == 200
        said = lambda name: server.log.read_text().count(f"cannot write '/dev/null/logs/{name}.log'")  # noqa: E731
        eventually("the console has the lines", lambda: server.log.read_text().count("GET /ping") >= 10)
        eventually("both files are reported", lambda: said("access_log") and said("ts_log"))
        assert [said("access_log"), said("ts_log")] == [1, 1]
        server.stop(check=False)
        assert server.process.returncode == 0
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.mark.parametrize("kind", ["a link", "a file", "a directory"])
def test_foreign_files_at_the_paths_of_the_servers_files(tmp_path, kind):
    """The PID file and the key file replace only files that the server has written."""
    for at, name in (("tmp", ".model_server.pid"), (".", "key_file.json")):
        folder = tmp_path / f"{name}-server"
        folder.mkdir()
        server = TorchServe(folder)
        precious, path = folder / "precious", folder / at / name
        precious.write_text("mine")
        if kind == "a link":
            path.symlink_to(precious)
        elif kind == "a file":
            path.write_text("mine")
        else:
            path.mkdir()
        server.launch()
        try:
            assert server.process.wait(DEADLINE_S) == 1
        finally:
            server.process.kill()
        assert name in server.log_tail()
        assert precious.read_text() == "mine"
        assert path.is_symlink() == (kind == "a link")
        if kind == "a file":
            assert path.read_text() == "mine"
        done = subprocess.run(
            [str(binary()), "torchserve", "--stop"],
            capture_output=True,
            text=True,
            env=os.environ | server.environment,
            timeout=DEADLINE_S,
        )
        assert "TorchServe is not currently running." in done.stdout
        assert os.path.lexists(path), "foreign files must not be removed"
