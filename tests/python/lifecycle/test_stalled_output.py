"""A stalled reader of the server's output causes lost log lines and nothing else: requests are answered, and the server exits in
time."""

import contextlib
import fcntl
import os
import re
import signal
import threading

from harness.inference import one
from harness.models import copy_models
from harness.ports import free_ports
from harness.server import Server, binary, total
from harness.waiting import eventually, join_all

F_SETPIPE_SZ = 1031
"""From <linux/fcntl.h>; Python has it since 3.10."""
END_S = 15
"""The limit for the exit after SIGTERM, on a busy machine too: the server waits 1 s for its log."""
PRINTING = '''
import sys
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        for number in range({lines}):
            print(f"numbered {{number:07d}} " + "x" * 40, file=sys.{stream})

    def execute(self, requests):
        tensor = lambda request: pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
        return [pb_utils.InferenceResponse([tensor(request)]) for request in requests]
'''
CONFIG = """backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU }
"""
NOTICE = re.compile(r" WARN (\d+) log lines were dropped here because the destination was too slow$", re.M)


def printing(folder, name: str, lines: int, stream="stdout"):
    """Writes a model that prints this many lines of 60 bytes while it is loaded."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1/model.py").write_text(PRINTING.format(lines=lines, stream=stream))
    (folder / name / "config.pbtxt").write_text(CONFIG)


@contextlib.contextmanager
def unread(size=4096):
    """Returns a pipe that holds `size` bytes: its read end and its write end."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, F_SETPIPE_SZ, size)
    try:
        yield reading, writing
    finally:
        for end in (reading, writing):
            with contextlib.suppress(OSError):
                os.close(end)


@contextlib.contextmanager
def stalled(folder, repository, *options, stdout=False, size=4096):
    """A server whose standard error (with `stdout`: standard output too) is a pipe without a reader; also yields its read end."""
    server = Server(folder, [repository], options)
    with unread(size) as (reading, writing):
        try:
            server.launch(stdout=writing if stdout else None, stderr=writing)
            os.close(writing)
            server.wait_until_ready()
            yield server, reading
        finally:
            if server.process.poll() is None:
                server.kill()


def ends(server):
    """Checks that SIGTERM ends the server in time although its output is not read."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(END_S) == 0


def test_lines_about_requests(tmp_path):
    """`--log-access` into a pipe that is full after about 30 requests."""
    copy_models(tmp_path / "models", ["identity_fp32"])
    with stalled(tmp_path, tmp_path / "models", "--log-access") as (server, _):
        for _ in range(200):
            assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
            assert server.get("/v2/health/ready")[0] == 200
        assert total(server.scrape(), "nv_inference_request_success", model="identity_fp32") == 200
        ends(server)


def test_models_that_print(tmp_path):
    """With default flags: three models that print 300 KB each while they are loaded."""
    for name in ("one", "two", "three"):
        printing(tmp_path / "models", name, 5000, "stderr" if name == "two" else "stdout")
    with stalled(tmp_path, tmp_path / "models", size=64 << 10) as (server, _):
        for name in ("one", "two", "three"):
            request = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
            assert server.infer(name, request)[0] == 200
        assert total(server.scrape(), "nv_inference_request_success") == 3
        ends(server)


def test_metric_lines_and_the_log_on_one_pipe(tmp_path):
    """`--tslog-stdout` and the log write to the same full pipe."""
    copy_models(tmp_path / "models", ["identity_fp32"])
    with stalled(tmp_path, tmp_path / "models", "--log-access", "--tslog-stdout", stdout=True) as (server, _):
        for _ in range(200):
            assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
        assert total(server.scrape(), "nv_inference_request_success", model="identity_fp32") == 200
        ends(server)


def test_lost_lines_are_counted_and_the_others_whole(tmp_path):
    """Lines that do not fit into the queue are dropped. When the pipe is read again, a line in their place has their number,
    which equals the metric."""
    count = 300_000
    printing(tmp_path / "models", "much", count)
    with stalled(tmp_path, tmp_path / "models") as (server, reading):
        lost = lambda: total(server.scrape(), "pharos_log_lines_lost_total", file="stderr")  # noqa: E731
        eventually("most lines are lost", lambda: lost() > count / 2)
        parts = []

        def read():
            while part := os.read(reading, 1 << 16):
                parts.append(part)

        reader = threading.Thread(target=read)
        reader.start()
        text = lambda: b"".join(parts).decode()  # noqa: E731
        reported = lambda: sum(int(found[1]) for found in NOTICE.finditer(text()))  # noqa: E731
        eventually("the lost lines are reported", lambda: reported() == lost())
        counted = lost()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
        join_all([reader])
    lines = text().splitlines()
    assert text().endswith("\n") and all(re.match(r"\d{4}-\d\d-\d\dT\S+Z +(INFO|WARN) ", line) for line in lines)
    numbers = [int(found[1]) for line in lines if (found := re.search(r" numbered (\d{7}) x{40} instance=much_0_0$", line))]
    assert numbers == sorted(set(numbers)), "lines must be in order"
    assert reported() == counted
    assert 0 <= reported() - (count - len(numbers)) < 20, "the lost lines are the model's, and a few of the server's"
    assert "exiting" in lines[-1]


def test_torchserves_log(tmp_path):
    """Standard output is not read; the files are written nevertheless."""
    (tmp_path / "store").mkdir()
    inference, management, metrics = free_ports(3)
    addresses = zip(("inference", "management", "metrics"), (inference, management, metrics), strict=True)
    properties = "".join(f"{name}_address=http://127.0.0.1:{port}\n" for name, port in addresses)
    (tmp_path / "config.properties").write_text(properties)
    command = [str(binary()), "torchserve", "--foreground", "--model-store", "store", "--ts-config", "config.properties"]
    server = Server(tmp_path, [])
    server.command, server.http = [*command, "--ncs", "--disable-token-auth"], f"127.0.0.1:{inference}"
    server.environment = {"TMPDIR": str(tmp_path)}
    with unread() as (_, writing):
        server.launch(stdout=writing, stderr=writing, cwd=tmp_path)
        try:
            server.wait_until_ready("/ping")
            for _ in range(200):
                assert server.get("/ping")[0] == 200
            log = tmp_path / "logs/access_log.log"
            eventually("the file has the lines", lambda: log.read_text().count('"GET /ping HTTP/1.1" 200') >= 200)
            assert server.get("/metrics", f"127.0.0.1:{metrics}")[0] == 200
            ends(server)
        finally:
            if server.process.poll() is None:
                server.kill()


def test_a_log_file_that_cannot_be_written(start):
    """A full disk: lines go to standard error, and one line reports the reason."""
    server = start(["identity_fp32"], "--log-file=/dev/full", "--log-access")
    for _ in range(20):
        assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
    log = server.log.read_text()
    assert log.count("cannot write --log-file '/dev/full': No space left on device") == 1, log
    assert log.count("request=POST /v2/models/identity_fp32/infer") == 20
    assert total(server.scrape(), "pharos_log_lines_lost_total", file="log_file") == 0
    server.stop()
