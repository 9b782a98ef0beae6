"""Threads of models emit samples at full speed while their workers are killed: no committed sample is lost.

Each `emit` model counts the samples that it has begun and recorded in memory that survives its process (see
`tests/backends/src/emit.rs`); the test compares them with the counter in `/metrics`. `PHAROS_SOAK_S=60` is the long run of
`make soak`; it prints its measurements (`-s` shows them).
"""

import mmap
import os
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest

from harness.inference import one
from harness.processes import worker_model
from harness.server import alive, total, workers
from harness.waiting import eventually, every, run_for, settled
from metrics.emitter import emitter

pytestmark = pytest.mark.alone

SECONDS = int(os.environ.get("PHAROS_SOAK_S", "0"))
WORKERS = 4
RATE = int(os.environ.get("PHAROS_SOAK_RATE", "100000" if SECONDS else "20000"))
"""Samples per second of each worker; fewer in the short run, which shares its machine with others."""

METRICS = """
mode: prometheus
ts_metrics:
  counter:
    - {name: pharos_metric_samples_total, unit: Count, dimensions: [source]}
    - {name: pharos_metric_samples_dropped_total, unit: Count, dimensions: [model, version]}
    - {name: pharos_instance_restarts_total, unit: Count, dimensions: [model, version]}
  gauge:
    - {name: pharos_metric_channel_bytes, unit: Bytes, dimensions: [model, version, instance]}
model_metrics:
  counter:
    - {name: Emitted, unit: Count, dimensions: [ModelName]}
    - {name: Orders, unit: Count, dimensions: [shop, ModelName]}
  gauge:
    - {name: Depth, unit: m, dimensions: [shop, Hostname]}
  histogram:
    - {name: Size, unit: B, dimensions: [shop], buckets: [10, 50]}
"""


@pytest.fixture
def emitting(start, tmp_path):
    """Starts a server with emitters: `emitting({name: parameters, ...}, *options)`."""

    def begin(models, *options, **more):
        folder = tmp_path / "emitters"
        shutil.rmtree(folder, ignore_errors=True)
        for name, parameters in models.items():
            emitter(folder, name, **parameters)
        (tmp_path / "metrics.yaml").write_text(METRICS)
        return start([], f"--metrics-config={tmp_path / 'metrics.yaml'}", *options, repository=folder, **more)

    return begin


class Ledger:
    """The samples that one worker process has begun and recorded, read from its memory even after its exit."""

    def __init__(self, pid: int, descriptor: Path):
        self.pid, self.model = pid, worker_model(pid)
        with open(descriptor, "rb") as memory:
            self.memory = mmap.mmap(memory.fileno(), 16, mmap.MAP_SHARED, mmap.PROT_READ)

    def read(self) -> tuple:
        """Returns the samples begun and the samples recorded."""
        return struct.unpack("=QQ", self.memory[:16])


def ledgers(server, known: dict) -> dict:
    """Adds new workers to `known`, by process id."""
    for pid in workers(server.process.pid):
        if pid in known or not alive(pid):
            continue
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if "pharos-emit-ledger" in os.readlink(descriptor):
                    known[pid] = Ledger(pid, descriptor)
                    break
            except OSError:
                break  # it has ended meanwhile
    return known


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def emitted(server, model: str) -> float:
    """Returns the current value of a model's counter in the metrics."""
    return total(server.scrape(), "Emitted", ModelName=model)


@pytest.mark.soak
def test_nothing_is_lost_when_workers_are_killed(emitting):
    """Half of the workers are killed: counters only increase, and in the end equal the recorded samples."""
    seconds = SECONDS or 5
    models = [f"emit{n}" for n in range(WORKERS)]
    running = {"metrics": "counter Emitted Count ModelName", "rate": RATE, "seconds": 100 * seconds}
    # A worker that is killed every few seconds must be restarted at once.
    server = emitting({name: running for name in models}, "--worker-max-backoff-secs=1")
    known = {}
    eventually("every worker has a ledger", lambda: len(ledgers(server, known)) == WORKERS)
    began, before, highest, killed = time.monotonic(), cpu_seconds(server.process.pid), dict.fromkeys(models, 0), []
    recorded_before = sum(ledger.read()[1] for ledger in known.values())
    living_s, looked = 0.0, began
    for _ in every(0.25, seconds):
        living_s += (time.monotonic() - looked) * sum(alive(ledger.pid) for ledger in ledgers(server, known).values())
        looked, metrics = time.monotonic(), server.scrape()
        for model in models:
            now = total(metrics, "Emitted", ModelName=model)
            assert now >= highest[model], f"{model} fell from {highest[model]} to {now}"
            highest[model] = now
        if time.monotonic() - began < len(killed) + 1:
            continue
        living = [ledger for ledger in ledgers(server, known).values() if alive(ledger.pid)]
        turn = models[len(killed) % WORKERS]
        victim = next((ledger for ledger in living if ledger.model == turn), next(iter(living), None))
        if victim:
            os.kill(victim.pid, signal.SIGKILL)
            eventually("the worker has ended", lambda pid=victim.pid: not alive(pid))
            killed.append(victim)
            recorded = sum(ledger.read()[1] for ledger in killed if ledger.model == victim.model)
            eventually("its recorded samples are counted", lambda: emitted(server, victim.model) >= recorded)
    elapsed, cpu = time.monotonic() - began, cpu_seconds(server.process.pid) - before
    assert len(killed) >= 0.8 * seconds, "workers were not restarted often enough"
    finish(server, known, models)
    samples = sum(ledger.read()[1] for ledger in known.values()) - recorded_before
    print(
        f"\n{samples / elapsed:,.0f} samples/s, {samples / living_s:,.0f} for each living worker of {RATE:,} wanted, "
        f"{len(killed)} kills, "
        f"frontend {cpu / samples * 1e9:.0f} ns of CPU time per sample (scrapes and restarts included)"
    )


def finish(server, known: dict, models: list):
    """Kills the last workers one by one and compares the samples that each has recorded with the counters of the frontend."""
    for _ in every(0.05, 30):
        # Workers restarted in the meantime are added first; the restart delay grows with each restart.
        for ledger in ledgers(server, known).values():
            if alive(ledger.pid):
                os.kill(ledger.pid, signal.SIGSTOP)
        stopped = [ledger for ledger in known.values() if alive(ledger.pid)]
        if len({ledger.model for ledger in stopped}) == len(models):
            break
    # The process stops at once, its threads a moment later; samples that they sent may still be in the ring.
    settled("the number of counted samples", lambda: total(server.scrape(), "Emitted"), 0.5)
    metrics = server.scrape()
    for model in models:
        read = [ledger.read() for ledger in known.values() if ledger.model == model]
        begun, recorded = (sum(column) for column in zip(*read, strict=True))
        counted = total(metrics, "Emitted", ModelName=model)
        assert recorded <= counted <= begun, f"{model}: {recorded} recorded, {begun} begun, {counted} counted"
        assert begun - recorded <= len(read), "each worker may have at most one unfinished sample"
    assert total(metrics, "pharos_metric_samples_dropped_total") == 0
    for ledger in known.values():
        if alive(ledger.pid):
            os.kill(ledger.pid, signal.SIGKILL)


def test_samples_of_requests_and_of_every_type(emitting):
    """A request's samples are in the metrics when its answer arrives; the numbers are exact for each type."""
    metrics = "counter Orders Count shop;gauge Depth m shop;histogram Size B shop"
    server = emitting({"emit": {"metrics": metrics, "series": 2, "samples": 12}})
    for _ in range(10):
        assert server.infer("emit", one("FP32", [1], [1]))[0] == 200
    shown = server.scrape()
    for shop in ("0", "1"):
        assert total(shown, "Orders", shop=shop, ModelName="emit") == 20
        assert total(shown, "Size_count", shop=shop) == 20
    assert total(shown, "Size_sum") == 10 * sum(n for n in range(12) if n % 6 in (4, 5))
    assert total(shown, "Depth", shop="1") == 9
    assert total(shown, "pharos_metric_samples_total", source="ring") == 120
    assert total(shown, "pharos_metric_samples_dropped_total") == 0
    request = one("FP32", [1], [1]) | {"parameters": {"samples": 60_000}}
    assert server.infer("emit", request)[0] == 200
    assert total(server.scrape(), "pharos_metric_samples_total", source="ring") == 60_120, "more than the ring holds"


def test_the_channel_of_each_instance_is_shown(emitting):
    """It exists from the first scrape on and disappears with the instance."""
    server = emitting({"emit": {"metrics": "counter Emitted Count ModelName", "rate": 2000}})
    labels = {"model": "emit", "version": "1", "instance": "emit_0"}
    key = ("pharos_metric_channel_bytes", tuple(sorted(labels.items())))
    eventually("samples wait", lambda: server.scrape()[key] > 0)
    assert server.scrape()[key] <= 256 << 10
    server.process.send_signal(signal.SIGSTOP)
    (pid,) = server.workers()
    os.kill(pid, signal.SIGKILL)
    server.process.send_signal(signal.SIGCONT)
    eventually("the series is removed with the worker", lambda: key not in server.scrape())
    eventually("the series exists again with the next worker", lambda: key in server.scrape())


def test_an_undeclared_metric_fails_the_load_or_is_detected(emitting):
    """The reason has the line to add; with auto-detection the first sample registers the metric."""
    models = {"emit": {"metrics": "gauge Waves Meters beach", "samples": 3}}
    server = emitting(models, "--exit-on-error=false", wait=False)
    server.wait_until_ready("/v2/health/live")
    reason = eventually("the load has failed", lambda: server.index().get("emit", [{}])[0].get("reason"))
    assert "`- {name: Waves, unit: Meters, dimensions: [beach]}`" in reason, reason
    server.kill()
    server = emitting(models, "--model-metrics-auto-detect")
    assert server.infer("emit", one("FP32", [1], [1]))[0] == 200
    assert server.scrape()[("Waves", (("beach", "0"),))] == 2


def test_idle_workers_cause_no_wakeups(emitting):
    """An idle server with workers uses almost no CPU time: only one tick every half second."""
    server = emitting({f"emit{n}": {"metrics": "counter Emitted Count ModelName"} for n in range(WORKERS)})
    run_for("the server has started", 0.5)
    before = cpu_seconds(server.process.pid)
    run_for("the CPU time is measured over two seconds", 2)
    assert cpu_seconds(server.process.pid) - before <= 0.05
