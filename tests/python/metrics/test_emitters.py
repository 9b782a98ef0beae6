"""Metrics from other sources: lines that a worker prints in TorchServe's format, and StatsD datagrams, in addition to the
ring."""

import math
import os
import re
import socket
import stat
import subprocess
import time

import pytest

from harness.inference import one
from harness.models import IO, write
from harness.server import Server, binary, total
from harness.waiting import DEADLINE_S, eventually, run_for
from torchserve.home import has_worker

HOST = socket.gethostname()
OWN = """
ts_metrics:
  counter:
    - {name: pharos_metric_samples_total, unit: Count, dimensions: [source]}
    - {name: pharos_metric_lines_malformed_total, unit: Count, dimensions: [source]}
    - {name: pharos_metric_samples_dropped_total, unit: Count, dimensions: [model, version]}
model_metrics:
  counter:
    - {name: Orders, unit: Count, dimensions: [shop, Level, Hostname]}
  gauge:
    - {name: Temperature, unit: Celsius, dimensions: [room]}
    - {name: Users, unit: Count, dimensions: [page]}
  histogram:
    - {name: Size, unit: Bytes, dimensions: [kind], buckets: [1, 10, 100]}
    - {name: Wait, unit: Seconds, dimensions: [], buckets: [0.1, 1]}
    # The one metric that a worker's own runtime sends over the ring, here as a histogram so that samples can be counted.
    - {name: PredictionTime, unit: ms, dimensions: [ModelName, Level, Hostname]}
  summary:
    - {name: Spread, unit: ms, dimensions: []}
"""


class Emitters:
    """A server with the model `print`, and a client for each source."""

    def __init__(self, start, folder, *options, definition=OWN, address=""):
        file = folder / "metrics.yaml"
        file.write_text(definition)
        if not address:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.address = address
        self.server = start(["print"], f"--metrics-config={file}", f"--statsd-address={address}", *options)
        self.path = address.removeprefix("unix:") if address.startswith("unix:") else ""
        self.socket = socket.socket(socket.AF_UNIX if self.path else socket.AF_INET, socket.SOCK_DGRAM)

    def print(self, *lines: str):
        """Makes the worker print lines: one batch, and so one sample of PredictionTime."""
        status, answer = self.server.infer("print", one("BYTES", [len(lines)], list(lines)))
        assert status == 200, answer

    def send(self, datagram):
        """Sends one datagram."""
        data = datagram if isinstance(datagram, bytes) else datagram.encode()
        host, _, port = self.address.rpartition(":")
        self.socket.sendto(data, self.path or (host, int(port)))

    def value(self, name: str, **labels):
        """Returns a series' value, or None if it does not exist."""
        found = [value for (n, pairs), value in self.server.scrape().items() if n == name and dict(pairs) == labels]
        return found[0] if found else None

    def becomes(self, expected: float, name: str, **labels):
        """Waits for a value."""
        eventually(f"{name}{labels} is {expected}", lambda: self.value(name, **labels) == expected)

    def logged(self, pattern: str) -> list:
        """Returns the matches in the server's log."""
        return re.findall(pattern, self.server.log.read_text(errors="replace"))


@pytest.fixture
def emitters(start, tmp_path):
    """A server that accepts only declared metrics, with StatsD over UDP."""
    return Emitters(start, tmp_path)


def refused(emitters, source: str) -> float:
    """Returns the number of refused lines."""
    return total(emitters.server.scrape(), "pharos_metric_lines_malformed_total", source=source)


def test_ring_stdout_and_statsd_give_the_same_series(emitters):
    """PredictionTime comes over the ring with each batch; printed and StatsD samples of it go to the same series."""
    labels = {"ModelName": "print", "Level": "Model", "Hostname": HOST}
    for _ in range(5):
        emitters.print(f"[METRICS]PredictionTime.Milliseconds:2000|#ModelName:print,Level:Model|#hostname:{HOST},1,id")
        emitters.send("PredictionTime:4000:4000|ms|#Level:Model,ModelName:print")
    emitters.becomes(20, "PredictionTime_count", **labels)
    scrape = emitters.server.scrape()
    assert [dict(pairs) for name, pairs in scrape if name == "PredictionTime_count"] == [labels]
    assert 50_000 <= total(scrape, "PredictionTime_sum") < 55_000
    assert total(scrape, "pharos_metric_samples_total", source="stdout") == 5
    assert total(scrape, "pharos_metric_samples_total", source="statsd") == 10


def test_printed_lines_of_old_and_new_formats(emitters):
    """Lines with and without type, host and ids, and labels in any order; a line without a metric goes to the log."""
    emitters.print(
        f"[METRICS]Orders.Count:1|#shop:a,Level:Model|#type:COUNTER|#hostname:{HOST},1699061430,6d17-1,6d17-2",
        f"INFO > [METRICS]Orders.Count:2|#shop:a,Level:Model|#hostname:{HOST},1699061430,6d17-1",
        "[METRICS]Orders.Other:4|#Level:Model,shop:a",
        "[METRICS]Orders.Count:8|#shop:a,ModelName:print,Level:Model|#type:GAUGE",
        "[METRICS]Orders.Count:1e+16|#shop:http://h:80/x,y,Level:Model",
        "[METRICS]Temperature.Celsius:-3.5|#room:",
        "[METRICS]Temperature.Celsius:nan|#room:broken",
        "[METRICS]Size.Kilobytes:0.0048828125|#kind:x|#type:HISTOGRAM",
        "[METRICS]PredictionTime.Seconds:0.25|#ModelName:print,Level:printed",
        "an ordinary line",
    )
    emitters.becomes(15, "Orders", shop="a", Level="Model", Hostname=HOST)
    emitters.becomes(1e16, "Orders", shop="http://h:80/x,y", Level="Model", Hostname=HOST)
    emitters.becomes(-3.5, "Temperature", room="")
    emitters.becomes(1, "Size_bucket", kind="x", le="10")
    emitters.becomes(250, "PredictionTime_sum", ModelName="print", Level="printed", Hostname=HOST)
    assert math.isnan(emitters.value("Temperature", room="broken"))
    eventually("the log has the ordinary line", lambda: emitters.logged("an ordinary line"))
    assert not emitters.logged(r"\[METRICS\]")
    assert refused(emitters, "stdout") == 0


def test_malformed_printed_lines_are_counted_and_logged_once_a_second(emitters):
    """A worker that prints malformed lines causes one log line per second and affects nothing else."""
    started = time.monotonic()
    emitters.print(*["[METRICS]Failed to update metric with name:X"] * 500, "[METRICS]Orders.Count:1|#shop:b,Level:L")
    emitters.becomes(1, "Orders", shop="b", Level="L", Hostname=HOST)
    emitters.print("[METRICS]Temperature.Celsius:a|#room:a", "[METRICS]Two Words.ms:1|#", "[METRICS]Size.B:1|#a:1,b:2")
    emitters.print("[METRICS]Orders.Count:nan|#shop:a", "[METRICS]Orders.Count:1|#first:a,second:Model")
    eventually("all lines are counted", lambda: refused(emitters, "stdout") == 502)
    dropped = lambda: total(emitters.server.scrape(), "pharos_metric_samples_dropped_total", model="print")
    eventually("lines with wrong labels or values count as dropped samples of the model", lambda: dropped() == 3)
    assert not any(name == "Orders" and "first" in str(labels) for name, labels in emitters.server.scrape())
    logged_refusals = emitters.logged("a metric line from the output of print.* was refused: .*")
    assert 1 <= len(logged_refusals) <= time.monotonic() - started + 1
    assert "a metric line begins with Name.Unit:value; line: `[METRICS]Failed to update" in logged_refusals[0]
    assert emitters.server.infer("print", one("BYTES", [1], ["still here"]))[0] == 200


def test_a_long_line_and_a_dying_worker(emitters):
    """A line may have 1000 request ids; a line that is cut because its worker was killed is not parsed as a shorter number."""
    ids = ",".join(["6d1726a7-172c-4010-b671-01d71bacc451"] * 1000)
    emitters.print(f"[METRICS]Orders.Count:1|#shop:long,Level:L|#hostname:{HOST},1,{ids}")
    emitters.becomes(1, "Orders", shop="long", Level="L", Hostname=HOST)
    emitters.print("[METRICS]Orders.Count:1|#shop:" + "x" * 100_000, "[METRICS]Orders.Count:1|#shop:after,Level:L")
    emitters.becomes(1, "Orders", shop="after", Level="L", Hostname=HOST)
    assert refused(emitters, "stdout") == 1
    (worker,) = emitters.server.workers()
    os.kill(worker, 9)
    eventually("the worker is restarted", lambda: emitters.server.workers() not in (set(), {worker}))
    eventually("the model is ready", lambda: emitters.server.get("/v2/models/print/ready")[0] == 200)
    emitters.print("[METRICS]Orders.Count:1|#shop:after,Level:L")
    emitters.becomes(2, "Orders", shop="after", Level="L", Hostname=HOST)


def test_statsd_types(emitters):
    """Rates, signs, several values and lines, timers, distributions, and omitted parts."""
    emitters.send("Orders:1|c|@0.1|#shop:a,Level:Model\nOrders:2:3|c|#Level:Model,shop:a\nOrders:1|c\n")
    emitters.send(f"Orders:0.5|c|#shop:a,Level:Model,Hostname:{HOST}|@0.5")
    emitters.becomes(16, "Orders", shop="a", Level="Model", Hostname=HOST)
    emitters.becomes(1, "Orders", shop="", Level="", Hostname=HOST)
    emitters.send("Temperature:20|g|#room:a\nTemperature:+2.5|g|#room:a\nTemperature:-5|g|#room:a")
    emitters.becomes(17.5, "Temperature", room="a")
    emitters.send("Size:5|ms|@0.1|#kind:k\nSize:50|h|#kind:k\nSize:500|d|#kind:k")
    emitters.becomes(12, "Size_count", kind="k")
    emitters.becomes(10, "Size_bucket", kind="k", le="10")
    emitters.becomes(600, "Size_sum", kind="k")
    emitters.send("Spread:7|ms")
    emitters.becomes(1, "Spread_count")
    emitters.send("Wait:250|ms\nWait:0.5|h")
    emitters.becomes(0.75, "Wait_sum")
    assert emitters.value("Wait_bucket", le="1") == 2, "milliseconds become seconds"
    assert refused(emitters, "statsd") == 0


LATE = """import subprocess, triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, args):
        print("[METRICS]Orders.Count:1|#shop:early", flush=True)
        wait = "until [ -e '{signal}' ]; do sleep 0.01; done; echo '[METRICS]Orders.Count:1|#shop:late'"
        subprocess.Popen(["sh", "-c", wait], start_new_session=True)

    def execute(self, requests):
        return [utils.InferenceResponse([]) for _ in requests]
"""


@pytest.mark.skipif(not has_worker, reason="pharos_worker is not installed")
def test_a_late_line_of_an_unloaded_model_leaves_no_series(tmp_path):
    """A process that a model has started prints a line after the unload of the model."""
    signal = tmp_path / "print"
    (tmp_path / "metrics.yaml").write_text(OWN)
    write(tmp_path / "models", "late", 'backend: "python" max_batch_size: 0\n' + IO)
    (tmp_path / "models/late/1/model.py").write_text(LATE.replace("{signal}", str(signal)))
    options = ["--model-control-mode=explicit", "--load-model=late", f"--metrics-config={tmp_path / 'metrics.yaml'}"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        shops = lambda: [dict(pairs)["shop"] for name, pairs in server.scrape() if name == "Orders"]
        eventually("the first line has arrived", lambda: shops() == ["early"])
        assert server.ask("POST", "/v2/repository/models/late/unload", b"")[0] == 200
        eventually("its series are removed", lambda: not shops())
        signal.touch()
        refused = "the model was unloaded before the sample arrived"
        eventually("the late line is refused", lambda: refused in server.log.read_text())
        assert not shops()


@pytest.mark.slow
def test_statsd_sets(emitters):
    """A set is a gauge of the distinct values in each interval of ten seconds."""
    emitters.send("Users:ann|s|#page:p\nUsers:bob|s|#page:p\nUsers:ann|s|#page:p")
    eventually("two users", lambda: emitters.value("Users", page="p") == 2)
    eventually("no users in the next interval", lambda: emitters.value("Users", page="p") == 0)


def test_statsd_refusals(emitters):
    """Invalid lines are counted and logged once a second with the reason; valid lines in the same datagram are accepted."""
    bad = ["Orders:1|g", "Temperature:1|c", "Orders:1|c|#shop:a,extra:b", "Unknown:1|c", "Orders", "Orders:nan|c", "_sc|n|0|h"]
    bad.append("Orders:1:-1:5|c|#shop:packed")
    emitters.send("\n".join([*bad, "Temperature:1|g|#room:z"]).encode() + b"\n\xff:1|c")
    emitters.becomes(1, "Temperature", room="z")
    eventually("two of three values count", lambda: total(emitters.server.scrape(), "Orders", shop="packed") == 6)
    eventually("all lines are counted", lambda: refused(emitters, "statsd") == len(bad) + 1)
    logged_refusals = emitters.logged("a metric line from StatsD was refused: .*")
    assert len(logged_refusals) == 1 and "metric `Orders` is a counter, not a gauge; line: `Orders:1|g`" in logged_refusals[0]
    run_for("refusals are logged once a second", 1.1)
    emitters.send("Unknown:1|c|#shop:a")
    eventually("logged again", lambda: len(emitters.logged("from StatsD was refused")) == 2)
    logged_refusals = emitters.logged("a metric line from StatsD was refused: .*")[1]
    assert "`Unknown` is not defined in metrics.yaml; add under model_metrics.counter" in logged_refusals
    assert f"and {len(bad)} others" in logged_refusals


def test_undeclared_metrics_are_detected(start, tmp_path):
    """With `--model-metrics-auto-detect` the first line defines the metric."""
    emitters = Emitters(start, tmp_path, "--model-metrics-auto-detect")
    emitters.print(
        "[METRICS]ExamplePercentMetric.Percent:50|#ModelName:m,Level:Model|#type:HISTOGRAM|#hostname:w,1,id",
        "[METRICS]bad-name.tokens/s:3|#dash-label:x",
    )
    emitters.becomes(1, "ExamplePercentMetric_count", ModelName="m", Level="Model", Hostname="w")
    emitters.becomes(3, "bad_name", dash_label="x")
    emitters.send("web.hits:2|c|#b:2,a:1\nweb.time:3|ms")
    emitters.becomes(2, "web_hits", a="1", b="2")
    emitters.becomes(1, "web_time_bucket", le="5")
    _, text = emitters.server.get("/metrics", emitters.server.metrics)
    for line in ("ExamplePercentMetric histogram", "bad_name gauge", "web_hits counter", "web_time histogram"):
        assert f"# TYPE {line}\n" in text


def test_a_flood_of_datagrams_is_accepted_during_inference(emitters):
    """One sender sends 20,000 lines in datagrams of 20 over loopback at full speed while requests are answered."""
    for sent in range(1000):
        emitters.send("\n".join(["Orders:1|c|#shop:flood,Level:L"] * 20))
        if sent % 100 == 0:
            emitters.print("x")
    emitters.becomes(20_000, "Orders", shop="flood", Level="L", Hostname=HOST)


def test_unix_datagrams(start, tmp_path_factory):
    """A Unix socket: accepts datagrams of the maximum size and refuses truncated ones; the server removes the socket file at exit
    and a stale one at start."""
    folder = tmp_path_factory.mktemp("s")
    path = folder / "statsd.sock"
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stale.bind(str(path))
    stale.close()
    emitters = Emitters(start, folder, address=f"unix:{path}")
    line = "Orders:1|c|#shop:u,Level:L\n"
    count = 65536 // len(line)
    emitters.send(line * count)
    emitters.becomes(count, "Orders", shop="u", Level="L", Hostname=HOST)
    emitters.send(line * (count + 1))
    eventually("a longer datagram is refused", lambda: refused(emitters, "statsd") == 1)
    assert emitters.value("Orders", shop="u", Level="L", Hostname=HOST) == count
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert emitters.server.stop() == 0
    assert not path.exists()


def cannot_start(address: str) -> str:
    """Starts a server with this address, which must fail, and returns its output."""
    command = [str(binary()), "--model-repository=/nowhere", f"--statsd-address={address}"]
    command += [f"--allow-{name}=false" for name in ("http", "grpc", "metrics")]
    done = subprocess.run([*command, "--worker-binary", str(binary())], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode != 0
    return done.stderr


def test_bad_addresses(tmp_path):
    """Each error has the flag, the address, the reason and the allowed values."""
    for address, expected in [
        ("8125", "HOST:PORT"),
        ("localhost:99999", "'99999' is not a port"),
        ("::1:8125", "[::1]:8125"),
        ("unix:", "unix:PATH"),
    ]:
        text = cannot_start(address)
        assert expected in text and "--statsd-address" in text and address in text, text
    file = tmp_path / "file"
    file.write_text("mine")
    for address, expected in [
        ("203.0.113.1:8125", "assign"),
        (f"unix:{file}", "the path exists and is not a socket"),
        (f"unix:{tmp_path}/no/s", "No such file"),
        (f"unix:{tmp_path}/{'x' * 120}", "path"),
    ]:
        text = cannot_start(address)
        assert expected in text and "--statsd-address" in text and address in text, text
    assert file.read_text() == "mine"
