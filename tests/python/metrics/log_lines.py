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
"""Matches every metric line of TorchServe, both in its files and on its console."""


def folder(server) -> Path:
    """Returns the directory of a server's metric logs."""
    return server.logs


def raw(server, name: str) -> list:
    """Returns the complete lines of a log, those of archived files first."""

    def place(path):
        return path.name.split(".")[1], int(path.name.split(".")[2])

    archived = sorted(folder(server).glob(f"{name}.*.log.gz"), key=place)
    text = b"".join(gzip.decompress(path.read_bytes()) for path in archived)
    plain = folder(server) / f"{name}.log"
    text += plain.read_bytes() if plain.exists() else b""
    return text.decode().split("\n")[:-1]


def lines(server, name: str) -> list:
    """Returns the parsed lines of a log. Every line must have TorchServe's format."""
    found = []
    for line in raw(server, name):
        match = LINE.match(line)
        assert match, f"not in TorchServe's format: {line!r}"
        fields = match.groupdict()
        assert (fields["rid"] is not None) == (name == "model_metrics"), line
        assert fields["logger"] is None
        found.append(fields)
    return found


def sums(found: list) -> dict:
    """Returns the sums of the values by name and dimensions."""
    result = defaultdict(float)
    for fields in found:
        result[fields["name"], fields["dims"]] += float(fields["value"])
    return result


def by_name(found: list, name: str) -> list:
    """Returns the lines of one metric."""
    return [fields for fields in found if fields["name"] == name]
