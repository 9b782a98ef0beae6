"""A file system that becomes full or read-only while the server runs: it is mounted in a separate namespace."""

import base64
import json
import re
import tarfile
from pathlib import Path

import pytest

from faults.isolated import Isolated, missing
from harness.inference import one
from harness.models import write
from harness.server import MODELS
from harness.waiting import eventually

WHY_NOT = missing("mount", "mount")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ONE = one("FP32", [1, 1], [1])
SIZE = 1 << 20
"""Bytes of the file system."""
FULL, READ_ONLY = "No space left on device", "Read-only file system"


class OnDisk(Isolated):
    """A server whose temporary directory is on a small file system; with `logs`, its metric logs and traces as well."""

    def __init__(self, folder, logs: bool, *more):
        self.disk = folder / "disk"
        self.disk.mkdir()
        options = ["--model-control-mode=explicit", "--load-model=identity_fp32", "--metrics-mode=tslog", *more]
        if logs:
            options += [f"--trace-config=triton,file={self.disk}/trace.json", "--trace-config=rate=1", "--trace-config=level=TIMESTAMPS"]
        super().__init__("mount", f"mount -t tmpfs -o size={SIZE} tmpfs {self.disk}\nmkdir {self.disk}/tmp", folder, [MODELS], options)
        if logs:
            self.logs = self.disk / "logs"
        self.environment = {"TMPDIR": str(self.disk / "tmp")}

    def seen(self, path: str) -> Path:
        """Returns the path outside of the namespace of a file on the file system."""
        return Path(f"/proc/{self.process.pid}/root{self.disk}/{path}")

    def infer_often(self):
        """Sends requests, which all succeed."""
        for _ in range(50):
            status, answer = self.infer("identity_fp32", ONE)
            assert status == 200 and answer["outputs"][0]["data"] == [1]

    def load(self) -> tuple:
        """Loads a model whose files come with the request; returns the status and the answer."""
        config = json.loads(self.get("/v2/models/identity_fp32/config")[1]) | {"name": "m"}
        files = {f"file:1/data_{at}": base64.b64encode(bytes(SIZE // 8)).decode() for at in range(4)}
        return self.ask("POST", "/v2/repository/models/m/load", json.dumps({"parameters": {"config": json.dumps(config), **files}}))

    def check_recovered(self):
        """The same model can be loaded now, and its files are removed with it."""
        status, answer = self.load()
        assert status == 200, answer
        assert self.ask("POST", "/v2/repository/models/m/unload", "{}")[0] == 200
        eventually("the files of the model are removed", lambda: not list(self.seen("tmp").rglob("data_*")))


def test_a_full_disk_costs_logs_and_loads_and_no_request(tmp_path):
    """The load is refused with the reason, and leaves nothing behind. Each file is reported once. Later there is space again."""
    with OnDisk(tmp_path, logs=True) as server:
        server.inside(f"head -c {SIZE * 3 // 4} /dev/zero > {server.disk}/fill")
        status, answer = server.load()
        assert status == 500 and FULL in answer, answer
        assert not list(server.seen("tmp").rglob("data_*")), "the files that fitted are removed"
        server.inside(f"head -c {SIZE} /dev/zero > {server.disk}/more || true")
        for _ in range(3):
            server.infer_often()
        log = server.log.read_text()
        assert log.count(f"cannot write traces to '{server.disk}/trace.json': {FULL}") == 1, log
        assert log.count(f"cannot log metrics to '{server.logs}/model_metrics.log': {FULL}") == 1, log
        # Much space, because the waiting lines and the traces of further requests use it too.
        server.inside(f"rm {server.disk}/fill {server.disk}/more && mount -o remount,size={256 * SIZE} {server.disk}")
        server.check_recovered()
        before = server.seen("logs/ts_metrics.log").stat().st_size

        def written() -> bool:
            server.infer_often()
            return server.seen("logs/ts_metrics.log").stat().st_size > before

        eventually("lines are written again", written)


HEADER = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z +[A-Z]+ ")
"""How a line of the log begins."""


def test_lines_of_the_log_are_whole_after_a_full_disk(tmp_path):
    """The line that did not fit is also on standard error, and the next one does not continue it."""
    with OnDisk(tmp_path, False, f"--log-file={tmp_path / 'disk/server.log'}") as server:
        server.inside(f"head -c {2 * SIZE} /dev/zero > {server.disk}/fill || true")

        def refused() -> bool:
            server.ask("POST", "/v2/repository/models/unknown/load", "{}")
            return f"cannot write --log-file '{server.disk}/server.log': {FULL}" in server.log.read_text()

        eventually("the disk is full", refused)
        server.inside(f"rm {server.disk}/fill")
        server.ask("POST", "/v2/repository/models/later/load", "{}")
        written = lambda: server.seen("server.log").read_text()  # noqa: E731
        eventually("lines are written again", lambda: "later" in written())
        lines, elsewhere = written().splitlines(), server.log.read_text().splitlines()
        for line in lines + elsewhere:
            assert len(HEADER.findall(line)) <= 1 and ("later" not in line or HEADER.match(line)), line
        cut = lines[next(at for at, line in enumerate(lines) if "later" in line) - 1]
        assert cut not in elsewhere and any(line.startswith(cut) for line in elsewhere), cut


PYTHON = '''backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
'''


def python_model(folder, config=PYTHON) -> str:
    """Writes a model in Python; returns the option of its repository."""
    write(folder / "python", "p", config)
    (folder / "python/p/1/model.py").write_text("class TritonPythonModel:\n    pass\n")
    return f"--model-repository={folder / 'python'}"


def test_a_sandbox_without_space_for_temporary_files(tmp_path):
    """The reason names the directory and its variable, and not a process that ended: none was started."""
    options = [python_model(tmp_path), "--worker-sandbox=auto", "--disable-auto-complete-config"]
    with OnDisk(tmp_path, False, *options) as server:
        server.inside(f"head -c {2 * SIZE} /dev/zero > {server.disk}/fill || true")
        status, answer = server.ask("POST", "/v2/repository/models/p/load")
        why = "the worker process could not be started: no directory for its temporary files (TMPDIR of the server): "
        assert status == 400 and f"{why}'{server.disk}/tmp/pharos-worker-" in answer and FULL in answer, answer
        assert "Stub process" not in answer


def test_an_environment_without_space(tmp_path):
    """The reason names the folder, the file and the cause."""
    (tmp_path / "big").write_bytes(bytes(2 * SIZE))
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "big", "lib/big")
    config = f'{PYTHON}parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{tmp_path}/packed.tar.gz" }} }}'
    cache = tmp_path / "disk/environments"
    with OnDisk(tmp_path, False, python_model(tmp_path, config), f"--environment-cache-directory={cache}") as server:
        status, answer = server.ask("POST", "/v2/repository/models/p/load")
        assert status == 400 and f"it cannot be unpacked into '{cache}/pharos-environments': failed to unpack" in answer, answer
        assert "lib/big" in answer and FULL in answer, answer


def test_a_disk_that_becomes_read_only(tmp_path):
    """Models are served; a load that needs the temporary directory is refused with the reason until it can be written again."""
    with OnDisk(tmp_path, logs=False) as server:
        server.inside(f"mount -o remount,ro {server.disk}")
        status, answer = server.load()
        assert status == 500 and READ_ONLY in answer, answer
        server.infer_often()
        server.inside(f"mount -o remount,rw {server.disk}")
        server.check_recovered()
