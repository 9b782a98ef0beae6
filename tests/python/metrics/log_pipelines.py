"""Applies the configurations of `examples/log-pipelines` to lines. No package has Vector or Fluent Bit themselves.

For Vector, its language VRL compiles and runs the programs of the transforms (`vrl-python`). For Fluent Bit, Oniguruma applies
the regular expressions (Fluent Bit has its fork Onigmo), LuaJIT runs the filter as in Fluent Bit, and this module does what the
documentation says of parsers. Sources, sinks and the conversion of events to metrics do not run.
"""

import datetime
import json
import re
import sys

import yaml

from deploy import schemas
from harness.server import ROOT

FOLDER = ROOT / "examples/log-pipelines"
VECTOR = yaml.safe_load((FOLDER / "vector.yaml").read_text())
PARSERS = {entry["name"]: entry for entry in yaml.safe_load((FOLDER / "parsers.yaml").read_text())["parsers"]}
FLUENT_BIT = yaml.safe_load((FOLDER / "fluent-bit.yaml").read_text())
NOTE = "Vector and Fluent Bit did not run: their expressions and programs did, in the libraries of these languages"


def missing() -> str:
    """Returns why the programs cannot run; empty if they can."""
    return schemas.missing("pipelines")


def load():
    """Makes the packages importable."""
    path = str(schemas.home() / "pipelines")
    if path not in sys.path:
        sys.path.append(path)


def utc(text: str, form: str) -> datetime.datetime:
    """Parses a time of UTC."""
    return datetime.datetime.strptime(text, form).replace(tzinfo=datetime.timezone.utc)


class Vector:
    """The programs of Vector's transforms, in the time zone of UTC."""

    def __init__(self):
        load()
        from vrl_python import VRLRuntime

        self.runtime = VRLRuntime("UTC")

    def run(self, transform: str, event: dict) -> dict:
        """Returns the event that a transform makes of an event."""
        result = self.runtime.execute(VECTOR["transforms"][transform]["source"], event).processed_event
        if isinstance(result.get("timestamp"), str):
            text = result["timestamp"].removesuffix(" UTC")
            result["timestamp"] = utc(text, "%Y-%m-%d %H:%M:%S" + (".%f" if "." in text else "")).timestamp()
        return result

    def sample(self, line: str) -> dict:
        """Returns the sample in a line of a metric log."""
        return self.run("samples", {"message": line})

    def log(self, line: str, parser: str) -> dict:
        """Returns the event of a line of the server's log, without fields of the source."""
        event = self.run("server_events", {"message": line})
        assert "timestamp" in event, f"no expression matches {line!r}"
        return event


class FluentBit:
    """The parsers and the filter of Fluent Bit."""

    def __init__(self):
        load()
        import onigurumacffi
        from lupa import luajit21

        self.compiled = {
            name: (re.findall(r"\(\?<(\w+)>", parser["regex"]), onigurumacffi.compile(parser["regex"]))
            for name, parser in PARSERS.items()
            if parser["format"] == "regex"
        }
        self.lua = luajit21.LuaRuntime()
        self.lua.execute((FOLDER / "tslog.lua").read_text())

    def parse(self, name: str, line: str) -> tuple:
        """Returns the time (`None` without `time_key`) and the record of a line. Empty fields are skipped, as by default."""
        parser = PARSERS[name]
        if parser["format"] == "json":
            record = json.loads(line)
        else:
            names, expression = self.compiled[name]
            match = expression.match(line)
            assert match, f"{name} does not match {line!r}"
            record = {field: match.group(at) for at, field in enumerate(names, 1) if match.group(at)}
        for field, kind in (entry.split(":") for entry in parser.get("types", "").split()):
            record[field] = {"integer": int}[kind](record[field])
        if "time_key" not in parser:
            return None, record
        return utc(record.pop(parser["time_key"]), parser["time_format"].replace("%L", "%f")).timestamp(), record

    def sample(self, line: str) -> dict:
        """Returns the sample in a line of a metric log, with its time."""
        _, record = self.parse("pharos_tslog_json" if line.startswith("{") else "pharos_tslog", line)
        (used,) = [entry for entry in FLUENT_BIT["pipeline"]["filters"] if entry["name"] == "lua"]
        call = self.lua.globals()[used["call"]]
        code, timestamp, made = call("pharos.metrics", 0, self.lua.table_from(record, recursive=True))
        assert code == 1, line
        sample = {name: made[name] for name in made}
        sample |= {"dimensions": dict(sample["dimensions"]), "request_ids": list(sample["request_ids"].values())}
        return sample | {"timestamp": timestamp}

    def log(self, line: str, parser: str) -> dict:
        """Returns the event of a line of the server's log."""
        timestamp, record = self.parse(parser, line)
        return record | {"timestamp": timestamp}


TOOLS = {"vector": Vector, "fluent-bit": FluentBit}
