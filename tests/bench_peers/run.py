#!/usr/bin/env python3
"""Compares Pharos with other servers of ONNX models, and with ONNX Runtime in a loop without a server, in one run.

    make bench-peers
    target/venv-peers/bin/python tests/bench_peers/run.py --server target/release/pharos --rounds 5 --only encoder

Each round measures every model with every server, one server at a time, in an order that changes from round to round: a change
of the machine's speed then affects all servers. The last answer of every connection is compared with ONNX Runtime's result. Writes
`results.json`, `report.md` and `report.svg`. See docs/src/internals/performance.md.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import report
import session
from models import all_models
from servers import ALL

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WARMUP_S = 1.0
TOLERANCE = 1e-3
"""The largest accepted absolute difference of an output; batches may change the order of sums."""


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Compares Pharos with other servers of ONNX models.")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="length of each measurement (default: %(default)s)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="numbers of clients (default: 1 8 32)")
    parser.add_argument(
        "--only", nargs="+", default=[], help="measure only servers and models with one of these texts in their names"
    )
    parser.add_argument("--server", type=Path, default=ROOT / "target/release/pharos", help="Pharos (default: %(default)s)")
    environment = Path(f"{sys.prefix}-mlserver/bin/mlserver")
    parser.add_argument("--mlserver", type=Path, default=environment, help="MLServer (default: %(default)s)")
    processors = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads", type=int, default=processors, help="threads of ONNX Runtime in a process (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=1, help="processes with the model in every server (default: %(default)s)")
    parser.add_argument("--to", type=Path, default=ROOT / "target/bench-peers", help="folder of the results (default: %(default)s)")
    options = parser.parse_args()
    options.server, options.mlserver = options.server.absolute(), options.mlserver.absolute()
    return options


def chosen(named: list, words: list) -> list:
    """Returns those whose name contains a word; all if no name does."""
    found = [one for one in named if any(word.lower() in one.name.lower() for word in words)]
    return found or named


def machine() -> dict:
    """Describes the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processors": f"{len(os.sched_getaffinity(0))} x {', '.join(sorted(models)) or platform.machine()}",
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }


def run_program(name: str, given: str, *words: str, **variables) -> dict:
    """Runs a program of this folder with a text on standard input; returns the JSON object that it prints."""
    command = [sys.executable, str(HERE / name), *words]
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=os.environ | variables)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip().splitlines()[-1][:500]}")
    return json.loads(done.stdout)


class OtherLoad:
    """The processor time of processes outside the benchmark since this object was created, and that of other guests of the host."""

    def __init__(self):
        self.begun, self.busy = time.perf_counter(), self.busy_s()

    def busy_s(self) -> float:
        """Returns the processor time that was not idle, of all processors."""
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

    def processors(self, own_s: float) -> float:
        """Returns the mean number of processors in use, besides `own_s` seconds of the benchmark's processes."""
        return max((self.busy_s() - self.busy - own_s) / (time.perf_counter() - self.begun), 0.0)


class Benchmark:
    """The measurements of a run and their results."""

    def __init__(self, options, folder: Path):
        self.options, self.folder = options, folder
        self.models = chosen(all_models(folder), options.only)
        self.servers = self.available(chosen(ALL, options.only))
        self.rows = {}
        """(model, server, clients) -> the results of the rounds."""
        self.limits = {model.name: [] for model in self.models}

    def available(self, kinds: list) -> list:
        """Returns the servers that can be measured here; prints why others cannot."""
        found = []
        for kind in kinds:
            server = kind(self.options, self.folder / kind.__name__)
            reason = server.missing()
            if reason:
                print(f"{server.name} is not measured: {reason}", flush=True)
            else:
                found.append(server)
        return found

    def measure_all(self):
        """Runs all rounds."""
        for number in range(self.options.rounds):
            for model in self.models:
                self.limits[model.name].append(self.limit(model))
                for server in self.servers[number % len(self.servers) :] + self.servers[: number % len(self.servers)]:
                    self.measure(server, model, number)

    def limit(self, model) -> dict:
        """Returns the rows per second of ONNX Runtime in a loop, for each batch size."""
        described = session.describe(model, self.options.threads)
        return run_program("limit.py", "", str(self.options.seconds), **{session.VARIABLE: described})

    def measure(self, server, model, number: int):
        """Measures one server with one model and all numbers of clients. Each gets a result or an error, so that the results of a
        round have the same position in all rows."""
        results = {}
        try:
            server.start(model)
            for clients in self.options.clients:
                results[clients] = self.measure_clients(server, clients)
                rate = results[clients]["rate"]
                print(f"round {number + 1}: {model.name}, {server.name}, {clients} clients: {rate:.1f} requests/s", flush=True)
        except (RuntimeError, OSError, ValueError) as error:
            print(f"round {number + 1}: {model.name}, {server.name}: {error}", flush=True)
            results |= {clients: {"error": str(error)} for clients in self.options.clients if clients not in results}
        finally:
            server.stop()
        for clients, result in results.items():
            self.rows.setdefault((model.name, server.name, clients), []).append(result)

    def measure_clients(self, server, clients: int) -> dict:
        """Measures a server that runs, and compares the last answer of every connection."""
        told = {"port": server.port, "requests": server.requests(), "clients": clients}
        before, others = server.processor_s(), OtherLoad()
        result = run_program("client.py", json.dumps(told | {"warmup": WARMUP_S, "seconds": self.options.seconds}))
        used = server.processor_s() - before
        result["others"] = others.processors(used + result.pop("processor_s"))
        result["processor_ms"] = 1000 * used / result.pop("count")
        expected = self.expected(server.model)
        for turn, text in result.pop("answers"):
            found = np.array(server.numbers(json.loads(text)))
            # A comparison with NaN is false.
            if found.size != expected[turn].size or not np.abs(found.flatten() - expected[turn].flatten()).max() <= TOLERANCE:
                raise ValueError(f"wrong output for input {turn}: {text[:300]}")
        return result

    def expected(self, model) -> np.ndarray:
        """Returns ONNX Runtime's outputs for the inputs of a model."""
        return session.Session(session.describe(model, self.options.threads)).run(model.rows())

    def results(self) -> dict:
        """Returns everything that the report shows."""
        rows = [dict(zip(("model", "server", "clients"), key)) | {"rounds": rounds} for key, rounds in self.rows.items()]
        return {
            "machine": machine(),
            "setting": {name: getattr(self.options, name) for name in ("rounds", "seconds", "threads", "processes")},
            "servers": [server.description() for server in self.servers],
            "limits": self.limits,
            "rows": rows,
        }


def main() -> int:
    """Runs the command line."""
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    try:
        benchmark = Benchmark(options, folder)
        benchmark.measure_all()
        results = benchmark.results()
    finally:
        shutil.rmtree(folder)
    report.write(results, options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
