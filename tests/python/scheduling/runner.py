#!/usr/bin/env python3
"""Runs rows of `scheduling_tables.py` against this server or a real Triton, and collects the outcomes.

    python -m scheduling.runner record     runs all rows several times on the Triton peer, writes golden_scheduling.json
    python -m scheduling.runner compare    runs them once, prints the outcomes that are not in that file

The file has every observed outcome: several where Triton's threads race (`triton_differences.SCHEDULING_RACES`).
"""

import argparse
import concurrent.futures
import contextlib
import fnmatch
import http.client
import json
import re
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from harness import onnx_file
from harness.generate import one_to_one, parameters, tensor
from harness.onnx_file import node
from harness.peers import Triton
from harness.server import TRITON_MODELS, Server, samples
from harness.waiting import eventually, run_for, settled
from scheduling.scheduling_tables import LONG, ROWS, Answered, Row, Send, Wait

GOLDEN = Path(__file__).resolve().parent / "golden_scheduling.json"
VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"
PENDING = "nv_inference_pending_request_count"
RECEIVED = "ts_inference_requests_total"
FAILURES = "nv_inference_request_failure"
DEADLINE_S = 90
"""A request without an answer within this time fails: it has waited for a queue delay of `FAR`."""
APART_S = 0.12
"""Answers within this time of each other count as simultaneous; a gauge that is constant for this time counts as stable."""
AT_ONCE = 6
"""The number of rows that run concurrently; they mostly sleep."""


def configuration(row: Row, live_triton: bool) -> str:
    """Returns the row's config.pbtxt."""
    tensors = one_to_one("FP32")
    if row.optional:
        optional = tensor("input", "INPUT1", "FP32", [-1], "    optional: true\n")
        tensors += optional + tensor("output", "OUTPUT1", "FP32", [-1])
    backend = "python" if live_triton else "onnxruntime" if row.slow_shape else "test"
    group = f"instance_group [ {{ count: {row.instances} kind: KIND_CPU }} ]\n"
    head = f'name: "{row.model}"\nbackend: "{backend}"\nmax_batch_size: {row.max_batch}\n'
    function = parameters(function="delay", delay_ms=row.delay_ms, delay_items=LONG if row.slow_shape else 0)
    return head + tensors + group + row.batching + function


def write_model(row: Row, target: Path, live_triton: bool):
    """Writes the row's model into the folder `target`."""
    version = target / row.model / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(configuration(row, live_triton))
    if live_triton:
        shutil.copy(TRITON_MODELS / "model.py", version / "model.py")
    elif row.slow_shape:
        (version / "model.onnx").write_bytes(slow_by_shape())


def slow_by_shape() -> bytes:
    """Returns a model whose work grows with the third power of its input's length."""
    nodes = [
        node("Transpose", ["INPUT0"], ["COLUMN"], perm=[1, 0]),
        node("MatMul", ["COLUMN", "INPUT0"], ["SQUARE"]),
        node("MatMul", ["SQUARE", "SQUARE"], ["CUBE"]),
        node("MatMul", ["INPUT0", "CUBE"], ["OUTPUT0"]),
    ]
    return onnx_file.model(nodes, [("INPUT0", "FP32", ["N", "M"])], [("OUTPUT0", "FP32", ["N", "M"])])


class Watch:
    """Polls a model's pending gauge: [`now`] is its last value, `seen` has all values with their times. `received` is the number
    of requests that the scheduler has received, including executed ones, if the server counts them."""

    def __init__(self, address: str, model: str):
        self.address, self.series, self.now, self.seen = address, f'{PENDING}{{model="{model}"', 0, []
        self.arrivals, self.received = re.compile(rf'^{RECEIVED}{{[^}}]*model_name="{model}"[^}}]*}} (\d+)', re.M), None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        """Polls until the end."""
        connection = http.client.HTTPConnection(self.address, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            while not self.ended.wait(0.01):
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
                at = text.find(self.series)
                line = text[at:].partition("\n")[0] if at >= 0 else "0"
                self.now = int(float(line.rpartition(" ")[2]))
                received = self.arrivals.search(text)
                self.received = int(received[1]) if received else None
                self.seen.append((time.monotonic(), self.now))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def until_received(self, count: int, answered, quiet_s: float):
        """Waits until the scheduler has received `count` requests, or the last one is answered. Triton does not count received
        requests: there it waits until the gauge changes, at most `quiet_s` seconds."""
        before, begun = self.now, time.monotonic()

        def arrived():
            if self.received is None:
                return self.now != before or time.monotonic() - begun > quiet_s
            return self.received >= count

        eventually(f"{count} requests are received", lambda: answered() or arrived(), deadline_s=DEADLINE_S)

    def at_rest(self, since: float) -> list:
        """Returns the stable values of the gauge since the time `since`, in order."""
        spans = []
        for moment, value in self.seen:
            if moment < since:
                continue
            if spans and spans[-1][0] == value:
                spans[-1][2] = moment
            else:
                spans.append([value, moment, moment])
        rested = [value for value, start, end in spans if end - start >= APART_S]
        return [value for n, value in enumerate(rested) if n == 0 or rested[n - 1] != value]


class Run:
    """Runs one row. `http`, `grpc`, `metrics` are the addresses of the server."""

    def __init__(self, row: Row, server):
        self.row, self.http, self.metrics = row, server.http, server.metrics
        self.channel = grpc.insecure_channel(server.grpc)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.pool = concurrent.futures.ThreadPoolExecutor(32)
        self.answers, self.refused, self.begun = [], [], None

    def facts(self) -> dict:
        """Runs the row and returns its outcome."""
        with self.channel, self.pool, Watch(self.metrics, self.row.model) as watch:
            grpc.channel_ready_future(self.channel).result(DEADLINE_S)
            for step in self.row.steps:
                if isinstance(step, Send):
                    self.send(step, watch)
                    continue
                if isinstance(step, Wait):
                    run_for("the pause in the table between two arrivals", step.ms / 1000)
                    self.begun = time.monotonic()
                else:
                    self.begun = self.begun or time.monotonic()
                    self.wait_for_answers(step)
            self.begun = self.begun or time.monotonic()
            results = [answer.result(DEADLINE_S) for answer in self.answers]
            statistics = self.statistics(watch)
        errors = {str(n): error for n, (_, error) in enumerate(results) if error}
        waited = {n: moment for n, (moment, _) in enumerate(results) if n not in self.refused}
        facts = {"answers": together(waited), "refused": self.refused, "errors": errors}
        return facts | {"pending": watch.at_rest(self.begun), **statistics}

    def send(self, request: Send, watch: Watch):
        """Sends a request, and waits until the server has received it."""
        number = len(self.answers)
        ask = self.ask_grpc if number % 2 else self.ask_http
        answer = self.pool.submit(lambda: (ask(request, number), time.monotonic())[::-1])
        self.answers.append(answer)
        watch.until_received(number + 1, answer.done, APART_S)
        if answer.done() and answer.result()[1]:
            self.refused.append(number)

    def wait_for_answers(self, step: Answered):
        """Waits until this number of requests is answered."""
        enough = lambda: sum(answer.done() for answer in self.answers) >= step.count  # noqa: E731
        eventually(f"{self.row.name}: {step.count} answers", enough, deadline_s=DEADLINE_S)

    def ask_http(self, request: Send, number: int):
        """Sends one request with an id over HTTP; returns None, or the status and the text of the error."""
        shape = [request.batch, request.items] if self.row.max_batch else [request.items]
        data = [1] * (request.batch * request.items)
        inputs = [{"name": n, "datatype": "FP32", "shape": shape, "data": data} for n in request.inputs]
        body = {"id": f"number {number}", "inputs": inputs, "parameters": chosen(request)}
        connection = http.client.HTTPConnection(self.http, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request("POST", f"/v2/models/{self.row.model}/infer", json.dumps(body))
            response = connection.getresponse()
            text = response.read()
        return None if response.status == 200 else [response.status, json.loads(text)["error"]]

    def ask_grpc(self, request: Send, _number: int):
        """Sends the same request over gRPC without an id."""
        message = pb.ModelInferRequest(model_name=self.row.model)
        shape = [request.batch, request.items] if self.row.max_batch else [request.items]
        for name in request.inputs:
            message.inputs.add(name=name, datatype="FP32", shape=shape)
            message.raw_input_contents.append(np.ones(shape, dtype=np.float32).tobytes())
        for key, value in chosen(request).items():
            message.parameters[key].int64_param = value
        try:
            self.stub.ModelInfer(message, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return [error.code().name, error.details()]
        return None

    def statistics(self, watch: Watch) -> dict:
        """Returns the statistics after they stop changing; Triton updates them shortly after its answers."""
        read = lambda: (self.statistics_now(), watch.now)  # noqa: E731
        return settled("the statistics", read, 2 * APART_S, deadline_s=DEADLINE_S)[0]

    def statistics_now(self) -> dict:
        """Returns the current statistics that the tables contain."""
        texts = []
        for address, path in [(self.http, f"/v2/models/{self.row.model}/stats"), (self.metrics, "/metrics")]:
            connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
            with contextlib.closing(connection):
                connection.request("GET", path)
                texts.append(connection.getresponse().read().decode())
        stats, metrics = json.loads(texts[0])["model_stats"][0], samples(texts[1])
        failures = [(dict(labels), int(value)) for (name, labels), value in metrics.items() if name == FAILURES]
        return {
            "batch_stats": {str(b["batch_size"]): b["compute_infer"]["count"] for b in stats.get("batch_stats", [])},
            "execution_count": stats.get("execution_count", 0),
            "inference_count": stats.get("inference_count", 0),
            "success": stats["inference_stats"]["success"].get("count", 0),
            "fail": stats["inference_stats"]["fail"].get("count", 0),
            "failures": {f["reason"]: n for f, n in failures if f["model"] == self.row.model and n},
        }


def chosen(request: Send) -> dict:
    """Returns the request's parameters."""
    wanted = {"priority": request.priority, "timeout": request.timeout_ms * 1000}
    return {key: value for key, value in wanted.items() if value}


def together(moments: dict) -> list:
    """Returns the requests in the order of their answers, in lists of simultaneous ones."""
    groups, last = [], 0.0
    for moment, number in sorted((moment, number) for number, moment in moments.items()):
        if moment - last > APART_S:
            groups.append([])
        groups[-1].append(number)
        last = moment
    return [sorted(group) for group in groups]


def run_rows(rows: list, server, at_once: int = AT_ONCE) -> dict:
    """Runs rows against a running server; returns their outcomes by name."""
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return dict(zip((row.name for row in rows), pool.map(lambda row: Run(row, server).facts(), rows)))


def by_hold(rows: list) -> dict:
    """Groups the rows by the server that they need."""
    groups = {}
    for row in rows:
        groups.setdefault(row.hold, []).append(row)
    return groups


def environment(hold: int) -> dict:
    """Returns the additional environment of the server."""
    return {VARIABLE: str(hold)} if hold else {}


def run_ours(rows: list, folder: Path) -> dict:
    """Runs rows against this project's server."""
    facts = {}
    for hold, group in by_hold(rows).items():
        here = folder / str(hold)
        for row in group:
            write_model(row, here / "models", live_triton=False)
        server = Server(here, [here / "models"])
        server.environment = environment(hold)
        with server:
            facts |= run_rows(group, server)
    return facts


def run_triton(rows: list, folder: Path) -> dict:
    """Runs rows against the Triton peer; a failed start is retried, because Triton may crash."""
    facts = {}
    for hold, group in by_hold(rows).items():
        here = folder / str(hold)
        for row in group:
            write_model(row, here / "models", live_triton=True)
        triton = Triton(here / "models", here / "triton.log", environment(hold))
        try:
            start_with_retries(triton)
            facts |= run_rows(group, triton)
        finally:
            triton.stop()
    return facts


def start_with_retries(triton: Triton, attempts: int = 3):
    """Starts it, with retries."""
    for attempt in range(attempts):
        try:
            return triton.ensure()
        except RuntimeError:
            triton.stop()
            if attempt == attempts - 1:
                raise


def ask_triton(rows: list) -> dict:
    """Returns the outcomes of rows on the Triton peer."""
    with tempfile.TemporaryDirectory() as folder:
        return run_triton(rows, Path(folder))


def record(times: int, rows: list):
    """Writes the outcomes of rows into the golden file."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    golden = {row.name: [] if row in rows else golden.get(row.name, []) for row in ROWS}
    for _ in range(times):
        for name, facts in ask_triton(rows).items():
            if facts not in golden[name]:
                golden[name].append(facts)
    outcomes = ((json.dumps(name), ",\n  ".join(map(json.dumps, seen))) for name, seen in golden.items())
    GOLDEN.write_text("{\n" + ",\n".join(f" {name}: [\n  {seen}\n ]" for name, seen in outcomes) + "\n}\n")
    several = [name for name, seen in golden.items() if len(seen) > 1]
    print(f"{len(rows)} rows written to {GOLDEN.name}; more than one outcome: {several}")


def compare(rows: list) -> int:
    """Prints every row whose outcome has not been recorded; returns their number."""
    golden = json.loads(GOLDEN.read_text())
    unlike = {name: facts for name, facts in ask_triton(rows).items() if facts not in golden[name]}
    for name, facts in unlike.items():
        print(f"{name}: {facts}, recorded {golden[name]}")
    print(f"{len(rows)} rows, {len(unlike)} outcomes that are not recorded")
    return len(unlike)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["record", "compare"])
    parser.add_argument("--times", type=int, default=4, help="how often each row is recorded")
    parser.add_argument("--rows", default="*", help="a pattern of names: leaves out the others")
    options = parser.parse_args()
    rows = [row for row in ROWS if fnmatch.fnmatchcase(row.name, options.rows)]
    if options.verb == "record":
        record(options.times, rows)
        return 0
    return 1 if compare(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
