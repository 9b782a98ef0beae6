"""A disk that does not answer while the server runs: writes wait until the file system is thawed (fsfreeze(8)), and reads until a
control group gives the server its share of the disk. Requests do not wait for it."""

import contextlib
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.isolated import Isolated, missing
from harness.inference import one
from harness.models import copy_models
from harness.waiting import eventually

LOOP = Path("/dev/loop-control")
WHY_NOT = missing("mount", "mount", "mkfs.ext4", "fsfreeze") or ("" if LOOP.exists() else f"no {LOOP}")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ONE = one("FP32", [1, 1], [1])
SIZE = 64 << 20
"""Bytes of the file system."""
CLIENTS = 8
"""More connections than the server has event loops, so that none may wait."""
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device")
"""The file of the root group with which reads of a group are held back."""


class OnHangingDisk(Isolated):
    """A server with a disk in a file, on which `prepare` has been done. Thaws it at the end, since nothing can end a write that waits."""

    def __init__(self, folder: Path, repository, *options, prepare: str = ""):
        self.disk, image = folder / "disk", folder / "image"
        self.disk.mkdir()
        with open(image, "wb") as file:
            file.truncate(SIZE)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        prepare = f"mount -o loop {image} {self.disk}\nmkdir {self.disk}/logs {self.disk}/tmp\n{prepare}"
        super().__init__("mount", prepare, folder, [repository], options)
        self.logs = self.disk / "logs"
        self.environment = {"TMPDIR": str(self.disk / "tmp")}

    def seen(self, path: str) -> Path:
        """Returns the path outside of the namespace of a file on the disk."""
        return Path(f"/proc/{self.process.pid}/root{self.disk}/{path}")

    @contextlib.contextmanager
    def frozen(self):
        """Writes to the disk wait until the block ends."""
        self.inside(f"fsfreeze --freeze {self.disk}")
        try:
            yield
        finally:
            self.inside(f"fsfreeze --unfreeze {self.disk}")

    def check_serves(self):
        """Sends requests over several connections, which are all answered."""

        def requests(_):
            connection = self.connect()
            for _ in range(50):
                connection.request("POST", "/v2/models/identity_fp32/infer", json.dumps(ONE))
                answer = connection.getresponse()
                assert answer.status == 200 and json.loads(answer.read())["outputs"][0]["data"] == [1]
            connection.close()

        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(requests, range(CLIENTS)))
        for path, address in (("/v2/health/ready", ""), ("/v2/models/identity_fp32/stats", ""), ("/metrics", self.metrics)):
            assert self.get(path, address)[0] == 200

    def load(self, model: str, **parameters) -> tuple:
        """Loads a model; returns the status and the text."""
        return self.ask("POST", f"/v2/repository/models/{model}/load", json.dumps({"parameters": parameters}))


def test_logs_and_traces_on_a_disk_that_hangs_delay_no_request(tmp_path):
    """What waits is written when the disk answers again, and the server ends as usual."""
    models = copy_models(tmp_path / "models", ["identity_fp32"])
    options = ["--metrics-mode=both", "--log-access", f"--log-file={tmp_path}/disk/logs/pharos.log", "--trace-config=rate=1"]
    options += [f"--trace-config=triton,file={tmp_path}/disk/trace.json", "--trace-config=level=TIMESTAMPS"]
    with OnHangingDisk(tmp_path, models, *options) as server:
        server.check_serves()
        files = ("logs/pharos.log", "logs/ts_metrics.log", "logs/model_metrics.log", "trace.json")
        with server.frozen():
            before = [server.seen(file).stat().st_size for file in files]
            server.check_serves()
            server.check_serves()
            assert [server.seen(file).stat().st_size for file in files] == before
        eventually("the rest is written", lambda: all(server.seen(file).stat().st_size > size for file, size in zip(files, before)))
        server.check_serves()


def test_a_load_that_waits_for_a_disk_delays_no_request(tmp_path):
    """Its files are written when the disk answers again; until then, other models are served, loaded and unloaded."""
    models = copy_models(tmp_path / "models", ["identity_fp32", "identity_fp64"])
    options = ["--model-control-mode=explicit", "--load-model=identity_fp32"]
    with OnHangingDisk(tmp_path, models, *options) as server, ThreadPoolExecutor(1) as client:
        config = json.dumps(json.loads(server.get("/v2/models/identity_fp32/config")[1]) | {"name": "uploaded"})
        with server.frozen():
            waiting = client.submit(server.load, "uploaded", config=config, **{"file:1/data": "AAAA"})
            status, text = server.load("identity_fp64")
            assert status == 200, text
            server.check_serves()
            assert server.ask("POST", "/v2/repository/models/identity_fp64/unload", b"")[0] == 200
            assert not waiting.done()
        status, text = waiting.result()
        assert status == 200, text
        assert server.infer("uploaded", ONE)[0] == 200


def throttle() -> str:
    """Returns why reads cannot be held back; empty if they can."""
    if not os.access(THROTTLE, os.W_OK):
        return "no control groups of version 1 for block devices"
    return ""


@pytest.mark.skipif(bool(throttle()), reason=throttle())
def test_a_repository_on_a_disk_that_hangs_delays_no_request(tmp_path):
    """A load whose files cannot be read waits. Other models are served."""
    group = THROTTLE.with_name(f"pharos-{os.getpid()}")
    group.mkdir()
    disk = tmp_path / "disk"
    copy_models(tmp_path / "models", ["identity_fp32"])
    late = copy_models(tmp_path / "late", ["identity_fp64"])
    # The second mount has read nothing yet.
    prepare = f"cp -r {late} {disk}/models\numount {disk}\nmount -o loop {tmp_path}/image {disk}\necho $$ > {group}/cgroup.procs"
    options = ["--model-control-mode=explicit", "--load-model=identity_fp32", f"--model-repository={disk}/models"]
    server = OnHangingDisk(tmp_path, tmp_path / "models", *options, prepare=prepare)
    try:
        with server, ThreadPoolExecutor(1) as client:
            device = os.stat(server.seen("")).st_dev

            def limit(bytes_per_s: int):
                """Sets the rate at which the group reads; 0 for no limit."""
                (group / THROTTLE.name).write_text(f"{os.major(device)}:{os.minor(device)} {bytes_per_s}")

            limit(1)
            try:
                waiting = client.submit(server.load, "identity_fp64")
                for _ in range(3):
                    server.check_serves()
                assert not waiting.done()
            finally:
                limit(0)
            status, text = waiting.result()
            assert status == 200, text
    finally:
        eventually("the group is empty", lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
