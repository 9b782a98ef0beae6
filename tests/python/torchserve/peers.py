#!/usr/bin/env python3
"""Sends the rows of `table.py` to this server or to a real TorchServe, and records the outcomes.

python -m torchserve.peers record [PATTERN]     runs the real TorchServe and writes golden_torchserve.json (only matching rows)
"""

import contextlib
import fnmatch
import http.client
import json
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness.waiting import every, pause_as_client, run_for, settled
from torchserve import wire as torchserve_wire
from torchserve.peer import install, missing, torch_folder, torchserve
from torchserve.repository import build
from torchserve.row_types import SETUPS, Grpc, Rest, Row, Wait
from torchserve.table import ROWS

GOLDEN = Path(__file__).resolve().parent / "golden_torchserve.json"
TIMEOUT_S = 60
NO_ANSWER = {"status": "no answer"}

UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
TIMES = {
    "HandlerTime",
    "PredictionTime",
    "QueueTime",
    "WorkerThreadTime",
    "WorkerLoadTime",
    "ts_queue_latency_microseconds",
    "ts_inference_latency_microseconds",
    "ts_handler_preprocess",
    "ts_handler_inference",
    "ts_handler_postprocess",
}
"""Metrics whose values are times."""
SYSTEM = ("CPU", "Memory", "Disk", "GPU", "WorkerLoadTime", "WorkerThreadTime")
"""Prefixes of metrics that do not belong to a row: those of the machine, and of workers, which are written at any time."""
LINE = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - (?P<name>[\w ]+)\.(?P<unit>[^:|]*):(?P<value>[^|]*)\|#(?P<dims>[^|]*)"
    r"\|#hostname:(?P<host>[^,]+)(?:,requestID:(?P<rid>.*))?,timestamp:\d+$"
)
ACCESS = re.compile(r'^\S+ - /127\.0\.0\.1:\d+ "(?P<what>[^"]*)" (?P<status>\S+) \d+$')
HEADERS_LEFT_OUT = ("date", "content-length", "server")
TOO_LONG = 5000


def masked(text: str) -> str:
    """Returns a text with placeholders for values of this run: processes, times, memory, ids of requests and workers."""
    text = re.sub(r'Hostname="[^"]*"', 'Hostname="*"', UUID.sub("UUID", text))
    text = re.sub(r'"startTime": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"', '"startTime": "*"', text)
    text = re.sub(r'"(pid|memoryUsage)": (\d+)', r'"\1": "*"', text)
    text = re.sub(r'"id": "\d+"', '"id": "*"', text)
    return text if len(text) < TOO_LONG else f"{text[:100]}... {len(text)}"


def readable(body: bytes) -> str:
    """Returns a body as text."""
    try:
        return masked(body.decode())
    except UnicodeDecodeError:
        return f"{len(body)} bytes, {body[:32].hex()}"


@dataclass
class Peer:
    """A client of a server that has been launched as TorchServe is."""

    server: object
    keys: dict = field(default_factory=dict)

    def run(self, row: Row) -> dict:
        """Runs a row; returns its outcome."""
        if row.logs:
            self.settled()
        before = {name: self.log(name) for name in ("model_metrics", "ts_metrics", "access_log")}
        counted = self.counted() if row.scrape else {}
        found = {"answers": self.together(row) if row.at_once else [self.send(request) for request in row.requests]}
        if row.logs:
            self.settled()
            found["logged"] = {name: self.lines(name, text) for name, text in before.items()}
        if row.scrape:
            found["scraped"] = self.scraped(row.scrape, counted)
        return found

    def together(self, row: Row) -> list:
        """Sends the requests of one row concurrently, each after its delay."""
        answers = [None] * len(row.requests)

        def one(place):
            answers[place] = self.send(row.requests[place])

        threads = [threading.Thread(target=one, args=(place,)) for place in range(len(row.requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def send(self, request) -> dict:
        """Sends one request; returns its outcome."""
        if isinstance(request, Wait):
            run_for("the table's pause between two requests", request.seconds)
            return {}
        if isinstance(request, Grpc):
            metadata = tuple((name, self.named_token(value)) for name, value in request.metadata)
            found = torchserve_wire.call(
                self.server.address, Grpc(request.call, request.request, request.many, metadata)
            )
            return json.loads(
                json.dumps(found),
                object_hook=lambda o: {k: masked(v) if isinstance(v, str) else v for k, v in o.items()},
            )
        pause_as_client(request.delay_s)
        for _ in every(0.2, 30):
            answer = self.rest(request)
            if not request.until or answer["status"] == request.until:
                break
        return answer

    def rest(self, request: Rest) -> dict:
        """Sends one HTTP request on a separate connection."""
        method = request.method or ("GET" if request.body is None else "POST")
        body = request.body.encode() if isinstance(request.body, str) else request.body
        headers = {name: self.named_token(value) for name, value in request.headers.items()}
        connection = http.client.HTTPConnection(self.server.address(request.at), timeout=TIMEOUT_S)
        try:
            connection.request(method, request.path, body, headers)
            response = connection.getresponse()
            parts = []
            while part := (response.read1() if request.parts else response.read()):
                parts.append(part)
        except TimeoutError:
            return NO_ANSWER
        except (http.client.HTTPException, OSError) as error:
            return {"status": "connection lost", "error": type(error).__name__}
        finally:
            connection.close()
        kept = {name.lower(): masked(value) for name, value in response.getheaders()}
        kept = {name: value for name, value in sorted(kept.items()) if name not in HEADERS_LEFT_OUT}
        found = {
            "status": response.status,
            "reason": response.reason,
            "headers": kept,
            "body": readable(b"".join(parts)),
        }
        return found | ({"parts": [readable(part) for part in parts]} if request.parts else {})

    def named_token(self, value: str) -> str:
        """Returns a header with the token that it names; the first inference token is kept as the old one."""
        file = self.server.folder / "key_file.json"
        if not value.split(" ")[-1].isupper() or not file.exists():
            return value
        keys = {name.upper(): said["key"] for name, said in json.loads(file.read_text()).items()}
        self.keys.setdefault("OLD_INFERENCE", keys["INFERENCE"])
        before, space, name = value.rpartition(" ")
        return f"{before}{space}{(keys | self.keys).get(name, name)}"

    def log(self, name: str) -> str:
        """Returns a log file of the server."""
        file = self.server.folder / f"logs/{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def settled(self):
        """Waits until the logs have not changed for a while."""
        logged = lambda: sum(len(self.log(name)) for name in ("model_metrics", "ts_metrics", "access_log"))  # noqa: E731
        settled("the logs", logged, 0.5)

    def lines(self, name: str, before: str) -> list:
        """Returns the new lines of a log, sorted, without times and names of this run."""
        new = self.log(name)[len(before) :].splitlines()
        shapes = [access(line) if name == "access_log" else metric(line) for line in new]
        return sorted(shape for shape in shapes if shape)

    def scrape(self) -> list:
        """Returns the lines of /metrics without the host's name."""
        connection = http.client.HTTPConnection(self.server.address("metrics"), timeout=TIMEOUT_S)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return re.sub(r'([Hh]ostname)="[^"]*"', r'\1="*"', text).splitlines()

    def counted(self) -> dict:
        """Returns the counts of requests: series -> value."""
        series = (line.rpartition(" ") for line in self.scrape() if line.startswith("Requests"))
        return {name: float(value) for name, _, value in series}

    def scraped(self, families: tuple, before: dict) -> list:
        """Returns the lines of these families; times without their values, and counts of requests relative to `before`."""
        wanted = re.compile(rf"(?:# (?:HELP|TYPE) )?(?:{'|'.join(families)})(?:_bucket|_sum|_count)?(?:[ {{]|$)")

        def shown(line: str) -> str:
            name, _, value = line.rpartition(" ")
            if line.startswith("Requests"):
                return f"{name} +{float(value) - before.get(name, 0)}"
            return f"{name} *" if re.match(r"\w*", line)[0] in TIMES else line

        return sorted(shown(line) for line in self.scrape() if families == ("",) or wanted.match(line))


def access(line: str) -> str:
    """Returns a line of the access log without the client, the time and the duration."""
    found = ACCESS.match(line)
    return f"{found['what']} {found['status']}" if found else f"not as it should be: {line}"


def metric(line: str) -> str:
    """Returns a metric line without its timestamp, and without values that are times."""
    found = LINE.match(line)
    if not found:
        return f"not as it should be: {line}"
    if found["name"].startswith(SYSTEM):
        return ""
    rid = found["rid"]
    ids = "" if rid is None else f"|{rid}" if rid == "null" else f"|{UUID.sub('UUID', rid)}"
    value = "*" if found["name"] in TIMES else found["value"]
    return f"{found['name']}.{found['unit']}:{value}|#{found['dims']}{ids}"


def at_start(setup, peer: Peer) -> list:
    """Waits until the workers of all models are ready; uses tokens if the server requires them."""
    token = {"Authorization": "Bearer MANAGEMENT"}
    end = time.monotonic() + 60

    def ask(path: str):
        body = peer.rest(Rest(path, headers=token, at="management"))["body"]
        return json.loads(body)

    while True:
        names = [model["modelName"] for model in ask("/models")["models"]]
        models = [ask(f"/models/{name}")[0] for name in names]
        slow = [m["modelName"] for m in models if not m["workers"] or any(w["status"] != "READY" for w in m["workers"])]
        if not slow:
            return names
        assert time.monotonic() < end, f"not ready: {slow}\n{peer.server.console()[-4000:]}"
        run_for("listing all models takes the server time", 0.2)


@contextlib.contextmanager
def served(launch, folder: Path, name: str, stores: dict):
    """Starts a server of a setup with `launch`; `stores` caches the model stores."""
    setup = SETUPS[name]
    if setup.stores not in stores:
        stores[setup.stores] = build(folder / ("store-" + "-".join(setup.stores)), setup.stores)
    own = folder / name
    own.mkdir(parents=True)
    with launch(own, stores[setup.stores], setup.properties, setup.options, setup.torch) as server:
        peer = Peer(server)
        at_start(setup, peer)
        peer.settled()
        yield peer


def ask_torchserve(folder: Path, rows) -> dict:
    """Returns the outcomes of the rows on a real TorchServe; writes the golden file after each setup."""
    found, stores = {}, {}
    for name in dict.fromkeys(row.setup for row in rows):
        if SETUPS[name].torch and not torch_folder():
            print(f"{name}: no torch")
            continue
        with served(torchserve, folder, name, stores) as peer:
            for row in (row for row in rows if row.setup == name):
                started = time.monotonic()
                found[row.name] = peer.run(row)
                print(f"{row.name}: {time.monotonic() - started:.1f} s", flush=True)
        write((golden() if GOLDEN.exists() else {}) | found)
    return found


def golden() -> dict:
    """Returns TorchServe's recorded outcomes."""
    return json.loads(GOLDEN.read_text())


def write(found: dict):
    """Writes the golden file, with a line for each answer and each log."""
    line = lambda value: json.dumps(value, ensure_ascii=False)  # noqa: E731
    rows = []
    for name in (row.name for row in ROWS if row.name in found):
        parts = ",\n  ".join(line(answer) for answer in found[name]["answers"])
        more = [f'"answers": [\n  {parts}]']
        more += [f'"{key}": {line(found[name][key])}' for key in ("logged", "scraped") if key in found[name]]
        rows.append(f"{line(name)}: {{" + ",\n ".join(more) + "}")
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main() -> int:
    """Runs the program."""
    if sys.argv[1:2] != ["record"] or len(sys.argv) > 3:
        print(__doc__)
        return 2
    why_not = missing() and install()
    if why_not:
        print(why_not)
        return 1
    pattern = sys.argv[2] if len(sys.argv) > 2 else "*"
    rows = [row for row in ROWS if fnmatch.fnmatchcase(row.name, pattern)]
    with tempfile.TemporaryDirectory() as folder:
        found = ask_torchserve(Path(folder), rows)
    print(f"{len(found)} rows written to {GOLDEN.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
