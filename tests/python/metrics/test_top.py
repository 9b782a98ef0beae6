"""`pharos top`: the server's numbers in a terminal, which an emulator shows, and as text."""

import contextlib
import fcntl
import http.server
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading

import pyte
import pytest

from harness.certificates import Files
from harness.inference import one, simple
from harness.ports import free_ports
from harness.server import EXAMPLES, ROOT, Server, binary
from harness.tls_server import TlsServer
from harness.waiting import DEADLINE_S, eventually

COLUMNS, ROWS = 150, 40
PAGE_UP, PAGE_DOWN = b"\x1b[5~", b"\x1b[6~"


class Top:
    """`pharos top` in a terminal."""

    def __init__(self, *arguments):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.master, self.screen = master, pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.written = b""
        environment = {**os.environ, "TERM": "xterm-256color"}
        command = [binary(), "top", "--interval=0.2", *arguments]
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        os.close(slave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def lines(self) -> list:
        """Returns the lines of the screen."""
        while select.select([self.master], [], [], 0.05)[0]:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # The program has ended.
                break
            self.written += data
            self.stream.feed(data)
        return self.screen.display

    def shows(self, pattern: str) -> str:
        """Waits until a line of the screen fits the pattern, and returns it."""
        find = lambda: next((line for line in self.lines() if re.search(pattern, line)), None)  # noqa: E731
        return eventually(f"a line fits {pattern}", find)

    def press(self, keys: bytes):
        os.write(self.master, keys)

    def ends(self) -> int:
        """Waits until the program has ended, and returns its exit code."""

        def ended():
            self.lines()
            return self.process.poll() is not None

        eventually("the program ends", ended)
        # What it has written between the last read and its end.
        self.lines()
        return self.process.returncode


def once(*arguments) -> subprocess.CompletedProcess:
    command = [binary(), "top", "--once", "--interval=0.5", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@contextlib.contextmanager
def load(server, model="simple", body=None):
    """Sends requests until the block ends."""
    over = threading.Event()

    def send():
        while not over.is_set():
            server.ask("POST", f"/v2/models/{model}/infer", json.dumps(body or simple()), headers={"x-tenant": "acme"})

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_the_screen_follows_the_server(tmp_path):
    """Rates and percentiles of models under load, objectives, tenants and events; keys sort, pause and end."""
    definition = tmp_path / "metrics.yaml"
    more = "tenants: {header: x-tenant}\nslos: [{name: fast, latency: {threshold: 1us, share: 90%}}]\n"
    definition.write_text((ROOT / "metrics.yaml").read_text() + more)
    options = [f"--metrics-config={definition}", "--metrics-mode=prometheus", "--model-control-mode=explicit", "--load-model=*"]
    with Server(tmp_path, [EXAMPLES], options) as server, load(server), Top(server.metrics) as top:
        top.shows(rf"^pharos top http://{server.metrics}/metrics   version \S+   up .* series   every 200 ms")
        top.shows(r"^requests [1-9]\S*/s   failures 0/s   p99 [\d.]+ (us|ms|s)   .*instances ready 6 of 6")
        # The busiest model is first.
        eventually("simple is the first model", lambda: re.match(r"simple +1 +1/1 +[1-9]\S*/s +0/s ", top.lines()[5]))
        row = top.shows(r"^simple +1 ")
        assert re.match(r"simple +1 +1/1 +\S+/s +0/s( +[\d.]+ (us|ms|s)){3} +[\d.]+ %", row), row
        top.shows(r"^fast latency +simple/1 +90 % in 1 us +0 % +10 +-900 %")
        top.shows(r"^acme +[1-9]\S*/s +0/s +[\d.]+ (us|ms|s) ")
        assert server.ask("POST", "/v2/repository/models/digits/unload", "{}")[0] == 200
        top.shows(r"s ago  digits, version 1 is not ready any more")
        top.press(b"S")
        top.shows("^model▼")
        top.press(b"r")
        top.shows("^model▲")
        top.press(b"p")
        top.shows("   paused")
        top.press(b"p")
        top.shows("   every 200 ms")
        top.press(b"q")
        assert top.ends() == 0
        assert b"\x1b[?1049l" in top.written, "the terminal shows what it had before"


def test_a_server_that_is_away(start):
    """The reason is shown until the server answers again; the numbers stay. Ctrl-C ends the program."""
    server = start(["identity_fp32"])
    server.infer("identity_fp32", one("FP32", [1, 1], [1]))
    with Top(server.metrics) as top:
        top.shows("^identity_fp32 ")
        server.kill()
        top.shows(rf"cannot read http://{server.metrics}/metrics: .*refused")
        assert any(line.startswith("identity_fp32 ") for line in top.lines())
        server.launch()
        server.wait_until_ready()
        top.shows("every 200 ms")
        top.shows("s ago  the server was restarted")
        top.press(b"\x03")
        assert top.ends() == 0


@pytest.mark.smoke
def test_once_prints_a_page(server):
    """Without a terminal, and without control characters."""
    with load(server):
        result = once(server.metrics)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"pharos top http://{server.metrics}/metrics   version ")
    assert re.search(r"^simple +1 +1/1 +[1-9]\S*/s +", result.stdout, re.MULTILINE), result.stdout
    assert "\x1b" not in result.stdout and "q quit" not in result.stdout


def test_errors(tmp_path):
    """The reason is printed, with what is allowed; nothing else is."""
    (port,) = free_ports(1)
    for arguments, code, expected in [
        ([f"127.0.0.1:{port}"], 1, f"cannot read http://127.0.0.1:{port}/metrics: "),
        (["localhost:99999"], 1, "'localhost:99999' is not a URL of metrics; allowed are"),
        (["ftp://host"], 1, "allowed are [http[s]://]HOST[:PORT][/PATH]"),
        (["host", f"--root-cert={tmp_path}/missing"], 1, "missing"),
        (["host", "--interval=0"], 2, "allowed are 0.1 to 3600 seconds"),
        (["host", "--cert=c"], 2, "--key"),
    ]:
        result = once(*arguments)
        assert (result.returncode, result.stdout) == (code, "") and expected in result.stderr, result.stderr
    command = [binary(), "top", f"127.0.0.1:{port}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
    assert result.returncode == 1 and "needs a terminal; `--once` prints one page" in result.stderr


def test_tls_with_a_client_certificate(tmp_path):
    """The server's certificate is verified, and the client identifies itself."""
    files = Files(tmp_path / "files")
    with TlsServer(tmp_path, files, mutual=True) as server:
        url = f"https://localhost:{server.metrics_port}"
        result = once(url, f"--root-cert={files.root}", f"--cert={files.client_cert}", f"--key={files.client_key}")
        assert result.returncode == 0 and "identity_fp32" in result.stdout, result.stderr
        assert once(url, f"--root-cert={files.root}").returncode == 1
        assert once(url).returncode == 1


def test_a_server_with_tritons_metrics_only():
    """What Triton has is shown, and `-` for the rest."""
    requests = {"made": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests["made"] += 1
            labels, count = 'model="resnet",version="1"', 100 * requests["made"]
            body = (
                f"# TYPE nv_inference_request_success counter\nnv_inference_request_success{{{labels}}} {count}\n"
                f'nv_inference_request_failure{{{labels},reason="OTHER"}} 0\nnv_inference_count{{{labels}}} {4 * count}\n'
                f"nv_inference_exec_count{{{labels}}} {count}\nnv_inference_request_duration_us{{{labels}}} {2000 * count}\n"
                f"nv_inference_queue_duration_us{{{labels}}} {500 * count}\n"
                f"nv_inference_pending_request_count{{{labels}}} 3\nnv_cpu_utilization 0.25\n"
                f'nv_gpu_utilization{{gpu_uuid="GPU-1"}} 0.5\n'
            ).encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as triton:
        threading.Thread(target=triton.serve_forever, daemon=True).start()
        result = once(f"127.0.0.1:{triton.server_address[1]}")
        triton.shutdown()
    row = re.search(r"^resnet +1 +- +\S+/s +0/s +2 ms +- +- +25 % +3 +4 +- +-$", result.stdout, re.MULTILINE)
    assert row and "CPU 25 %" in result.stdout and "GPUs 50 %" in result.stdout, result.stdout


def test_pages_of_models():
    """Page Down and Page Up move by the rows that are on the screen, and not beyond the last model; End and Home go to the ends."""
    body = "".join(f'nv_inference_request_success{{model="m{n:03}",version="1"}} 1\n' for n in range(100)).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    def models(top) -> list:
        return [int(line[1:4]) for line in top.lines() if re.match(r"m\d{3} ", line)]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Top(f"127.0.0.1:{server.server_address[1]}") as top:
            top.shows(r"^m000 ")
            room = len(models(top))
            assert 15 < room < ROWS

            def shown(keys: bytes, first: int):
                top.press(keys)
                eventually(f"{keys} shows m{first:03} first", lambda: models(top) == list(range(first, first + room)))

            shown(PAGE_DOWN, room)
            shown(10 * PAGE_DOWN, 100 - room)
            shown(PAGE_UP, 100 - 2 * room)
            shown(b"\x1b[H", 0)
            shown(b"\x1b[F", 100 - room)
            shown(b"k", 99 - room)
        server.shutdown()


class Metrics(http.server.ThreadingHTTPServer):
    """A server of these metrics."""

    def __init__(self, body: bytes):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


def test_names_of_models_do_not_control_the_terminal():
    """Characters that move the cursor, turn the direction of text or are invisible are shown as escapes."""
    names = ["a\u202eb", "c\u2066d", "e\u200bf", "g\x1b[31mh", "größe"]
    body = "".join(f'nv_inference_request_success{{model="{name}",version="1"}} 1\n' for name in names).encode()
    with Metrics(body) as server:
        page = once(f"127.0.0.1:{server.server_address[1]}").stdout
    assert not [hex(ord(c)) for c in page if not c.isprintable() and c != "\n"], page
    for shown in ("a\\u{202e}b", "c\\u{2066}d", "e\\u{200b}f", "g\\u{1b}[31mh", "größe"):
        assert re.search(rf"^{re.escape(shown)} ", page, re.MULTILINE), page


def test_many_models_take_little_memory():
    body = "".join(f'nv_inference_request_success{{model="m{n:06}",version="1"}} 1\n' for n in range(200_000)).encode()
    measure = "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
    measure += "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    with Metrics(body) as server:
        command = [binary(), "top", "--once", "--interval=0.5", f"127.0.0.1:{server.server_address[1]}"]
        found = subprocess.run([sys.executable, "-c", measure, *command], capture_output=True, text=True, timeout=DEADLINE_S)
    code, kibibytes = map(int, found.stdout.split())
    assert code == 0 and kibibytes < 500 << 10, f"200,000 models take {kibibytes >> 10} MiB"
