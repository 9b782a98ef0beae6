"""Reads the lines of metric logs."""

import gzip
import re
from collections import defaultdict
from pathlib import Path

LINE = re.compile(
    r"^(?P<ts>\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2},\d{3}) "
    r"(?:\[(?P<lvl>[A-Z ]{5})\] (?P<thread>\S+) (?P<logger>TS_METRICS|MODEL_METRICS) )?- "
    r"(?P<name>[\w ]+)\.(?P<unit>[^:|]*):(?P<value>-?[0-9.]+(?:E-?\d+)?|NaN|-?Infinity)\|#(?P<dims>[^|]*)\|#"
    r"hostname:(?P<host>[^,]+)(?:,requestID:(?P<rid>.*))?,timestamp:(?P<epoch>\d+)$"
)
"""The expression that reads every line of TorchServe, of its files and of its console."""


def folder(server) -> Path:
    """Where a server logs metrics."""
    return server.logs


def raw(server, name: str) -> list:
    """The lines of a file, complete ones only; those of archived files first."""

    def place(path):
        return path.name.split(".")[1], int(path.name.split(".")[2])

    archived = sorted(folder(server).glob(f"{name}.*.log.gz"), key=place)
    text = b"".join(gzip.decompress(path.read_bytes()) for path in archived)
    plain = folder(server) / f"{name}.log"
    text += plain.read_bytes() if plain.exists() else b""
    return text.decode().split("\n")[:-1]


def lines(server, name: str) -> list:
    """The parsed lines of a file. Every line must be one of TorchServe's."""
    found = []
    for line in raw(server, name):
        match = LINE.match(line)
        assert match, f"no line of TorchServe's: {line!r}"
        fields = match.groupdict()
        assert (fields["rid"] is not None) == (name == "model_metrics"), line
        assert fields["logger"] is None
        found.append(fields)
    return found


def sums(found: list) -> dict:
    """The sums of values by name and dimensions."""
    result = defaultdict(float)
    for fields in found:
        result[fields["name"], fields["dims"]] += float(fields["value"])
    return result


def by_name(found: list, name: str) -> list:
    """The lines of one metric."""
    return [fields for fields in found if fields["name"] == name]
