#!/usr/bin/env python3
"""Measures how the cost of small models grows: requests per second and latency over numbers of clients, models and instances, and
over sizes of tensors. Writes a table and a picture of the curves.

    make bench-growth
    make bench-growth BENCH_FLAGS="--only clients --rounds 1"

All models are identities without files, so that the server is what limits. The clients run on the same processors. See
docs/src/internals/performance.md.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import curves  # noqa: E402
from harness.server import Server  # noqa: E402

FUNCTION = 'parameters {{ key: "function" value {{ string_value: "{}" }} }}\n'
TENSORS = """max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
"""
IDENTITY = 'backend: "builtin"\n' + TENSORS + FUNCTION.format("identity")
DELAY_MS = 2
DELAY = 'backend: "test"\n' + TENSORS + FUNCTION.format("delay") + f'parameters {{ key: "delay_ms" value {{ string_value: "{DELAY_MS}" }} }}\n'
OPTIONS = [f"--http-max-input-size={1 << 28}", f"--grpc-max-input-size={1 << 28}"]
KIB, MIB = 1 << 10, 1 << 20


class Curve(typing.NamedTuple):
    """One curve: its values on the horizontal axis, the base of the ticks there, and for each value the configurations of the models
    and the options of a measurement."""

    name: str
    axis: str
    base: int
    values: list
    repository: typing.Callable
    options: typing.Callable
    protocols: tuple = ("http", "grpc")


def identities(count: int) -> list:
    """Returns the configurations of `count` models."""
    return [IDENTITY] * count


CURVES = [
    Curve(
        "clients",
        "clients, 64 B",
        10,
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
        lambda _: identities(1),
        lambda clients: {"clients": clients},
    ),
    Curve(
        "models",
        "models that 8 clients send to in turn, 64 B",
        10,
        [1, 2, 5, 10, 20, 50, 100, 200, 500],
        identities,
        lambda models: {"models": models},
        ("http",),
    ),
    Curve(
        "instances",
        f"instances of a model that takes {DELAY_MS} ms, 64 clients, 64 B",
        2,
        [1, 2, 4, 8, 16],
        lambda instances: [f"{DELAY}instance_group {{ count: {instances} kind: KIND_CPU }}\n"],
        lambda _: {"clients": 64},
        ("http",),
    ),
    Curve(
        "bytes",
        "bytes of a tensor, 4 clients",
        32,
        [64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB],
        lambda _: identities(1),
        lambda size: {"clients": 4, "bytes": size},
    ),
]


def write(folder: Path, configurations: list) -> Path:
    """Writes the models `m000`, `m001`, ... and returns the repository."""
    for number, text in enumerate(configurations):
        version = folder / f"models/m{number:03}/1"
        version.mkdir(parents=True, exist_ok=True)
        (version.parent / "config.pbtxt").write_text(text)
    return folder / "models"


def measure(bench: Path, server: Server, protocol: str, options: dict) -> dict:
    """Returns requests per second and latencies in microseconds of one measurement."""
    address = ["--address", server.grpc, "--grpc"] if protocol == "grpc" else ["--address", server.http]
    flags = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run([bench, "growth", *address, *flags], capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{protocol}, {options}: {done.stderr}")
    return json.loads(done.stdout)


def points(curve: Curve, options) -> dict:
    """Returns the results of all rounds: protocol -> one list of results for each value. Values with the same models share a server;
    each round measures all of them, upwards and downwards in turn."""
    found = {protocol: [[] for _ in curve.values] for protocol in curve.protocols}
    groups = {}
    for at, value in enumerate(curve.values):
        groups.setdefault(tuple(curve.repository(value)), []).append(at)
    for configurations, members in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            with Server(Path(folder), [write(Path(folder), configurations)], OPTIONS) as server:
                for number in range(options.rounds):
                    for at in members[:: -1 if number % 2 else 1]:
                        for protocol in curve.protocols:
                            wanted = {**curve.options(curve.values[at]), "seconds": options.seconds}
                            found[protocol][at].append(measure(options.bench, server, protocol, wanted))
        print(f"{curve.name}: {', '.join(str(curve.values[at]) for at in members)}", file=sys.stderr)
    return found


def median(rounds: list) -> dict:
    """Returns the median of each number."""
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def machine() -> str:
    """Describes the machine in a line."""
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} processors ({names[0] if names else platform.machine()}), Linux {platform.release()}"


def main():
    """Measures the chosen curves and writes the results into a folder."""
    names = [curve.name for curve in CURVES]
    parser = argparse.ArgumentParser(description="Measures how the cost of small models grows.")
    parser.add_argument("--bench", type=Path, required=True, help="the load generator, target/release/bench")
    parser.add_argument("--to", type=Path, required=True, help="the folder for the results")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="the curves to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each point (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1, help="duration of a measurement (default: %(default)s)")
    options = parser.parse_args()
    measured = []
    for curve in (curve for curve in CURVES if curve.name in options.only):
        lines = {protocol: [median(rounds) for rounds in found] for protocol, found in points(curve, options).items()}
        measured.append({"axis": curve.axis, "base": curve.base, "values": curve.values, "lines": lines})
    setting = f"{machine()}; medians of {options.rounds} rounds of {options.seconds:g} s"
    curves.write({"setting": setting, "curves": measured}, options.to)


if __name__ == "__main__":
    main()
