"""What the server writes where, what it leaves, and what it never removes: files of others."""

import base64
import json
import os
import subprocess

import pytest

from conftest import copy_models
from peers import free_ports
from request_table import one
from server import Server, binary, eventually, total

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
    """Starts servers that load by request, with temporary files in `tmp` and `work` as their working directory."""
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
        # Nothing names a directory for logs.
        server.command = ["env", "-u", "PHAROS_METRICS_LOCATION", *server.command]
        server.launch(cwd=tmp_path / "work")
        server.wait_until_ready()
        return server

    yield begin
    for server in servers:
        if server.process.poll() is None:
            server.kill()


def load(server):
    """Loads a model whose files come with the request."""
    files = {"file:1/weights": base64.b64encode(b"x" * 1000).decode()}
    body = json.dumps({"parameters": {"config": json.dumps(CONFIG)} | files})
    status, text = server.ask("POST", "/v2/repository/models/given/load", body)
    assert status == 200, text
    assert server.infer("given", one("FP32", [1, 1], [1]))[0] == 200


def names(folder) -> list:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_files_of_a_load_by_request_go_with_the_server(serve, tmp_path):
    """After a clean exit nothing is left among the temporary files."""
    server = serve()
    load(server)
    weights = list((tmp_path / "tmp").rglob("weights"))
    assert len(weights) == 1 and weights[0].read_bytes() == b"x" * 1000
    server.stop()
    assert names(tmp_path / "tmp") == []


def test_files_of_a_killed_server_go_with_the_next_start(serve, tmp_path):
    """What a killed server has left is removed; what another server uses, and what others have put there, stays."""
    killed, other = serve(), serve()
    load(killed)
    load(other)
    killed.process.kill()
    killed.process.wait()
    temporary = tmp_path / "tmp"
    left = [name for name in names(temporary) if name.startswith(f"pharos-load-{killed.process.pid}-")]
    assert len(left) == 1 and len(names(temporary)) == 2
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
        """In the folder."""
        super().launch(stdout, stderr, cwd or self.folder)


@pytest.mark.parametrize("kind", ["a link", "a file", "a directory"])
def test_files_of_others_in_the_place_of_ours(tmp_path, kind):
    """The file of the process id and the file of the keys replace files that the server has written, and nothing else."""
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
            assert server.process.wait(30) == 1
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
            timeout=60,
        )
        assert "TorchServe is not currently running." in done.stdout
        assert os.path.lexists(path), "nothing is removed either"
