#!/usr/bin/env python3
"""Runs rows of `sequence_tables.py` against this server or a real Triton, and collects the outcomes.

    python -m sequences.runner record     runs all rows and loads on the Triton peer, writes golden_sequences.json and
                                          golden_sequence_loads.json
"""

import concurrent.futures
import json
import re
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from harness import sequence_models
from harness.peers import Triton
from harness.server import TRITON_MODELS, Server
from harness.waiting import eventually, run_for
from scheduling import runner as scheduling
from scheduling.runner import APART_S, DEADLINE_S, Watch, together
from sequences.sequence_tables import LOADS, ROWS, Row

GOLDEN = Path(__file__).resolve().parent / "golden_sequences.json"
GOLDEN_LOADS = Path(__file__).resolve().parent / "golden_sequence_loads.json"
TOKEN = re.compile(r"""(?P<start>\()?(?P<id>\d+|'[^']*')(?P<end>\))?(?P<longer>\+)?(t(?P<timeout>\d+))?(\#(?P<batch>\d+))?$""")


def write_model(row: Row, target: Path, live_triton: bool):
    """Writes the row's model into the folder `target`."""
    version = target / row.model / "1"
    version.mkdir(parents=True)
    backend = "python" if live_triton else "test"
    text = sequence_models.config(row.batching, row.batch, backend, row.instances, row.dims, delay_ms=row.delay_ms)
    if live_triton:
        shutil.copy(TRITON_MODELS / "model.py", version / "model.py")
    version.with_name("config.pbtxt").write_text(f'name: "{row.model}"\n{text}')


class Run(scheduling.Run):
    """Runs one row."""

    def facts(self) -> dict:
        """Runs the row and returns its outcome."""
        with self.channel, self.pool, Watch(self.metrics, self.row.model) as watch:
            self.watch = watch
            grpc.channel_ready_future(self.channel).result(DEADLINE_S)
            self.calls, self.moments = [], {}
            for token in re.findall(r"(?:\('|')[^']*'\S*|\S+", self.row.script):
                self.perform(token)
            results = [self.result(call) for call in self.calls]
            answered = {n: moment for n, moment in self.moments.items() if isinstance(results[n][0], int)}
            return {"answers": together(answered), "results": results, **self.statistics(watch)}

    def perform(self, token: str):
        """Performs one token of the script."""
        if token[0] == "~":
            return run_for("the pause in the script between two arrivals", int(token[1:]) / 1000)
        if token[0] == "x":
            self.calls[int(token[1:])].cancel()
            return run_for("the arrival of a cancellation cannot be observed", APART_S)
        if token[0] == "!":
            enough = lambda: sum(call.done() for call in self.calls) >= int(token[1:])  # noqa: E731
            return eventually(f"{self.row.name}: {token[1:]} answers", enough, deadline_s=DEADLINE_S)
        number = len(self.calls)
        call = self.stub.ModelInfer.future(self.message(token), timeout=DEADLINE_S)
        self.calls.append(call)
        call.add_done_callback(lambda _: self.moments.setdefault(number, time.monotonic()))
        return self.watch.until_received(number + 1, call.done, APART_S / 2)

    def message(self, token: str):
        """Returns the request of a token."""
        parts = TOKEN.match(token)
        batch = [int(parts["batch"] or 1)] if self.row.batch else []
        array = np.full([*batch, 2 if parts["longer"] else 1], 1 + len(self.calls), np.int32)
        message = pb.ModelInferRequest(model_name=self.row.model, raw_input_contents=[array.tobytes()])
        message.inputs.add(name="VALUE", datatype="INT32", shape=array.shape)
        for name in ("SUM", "BATCH"):
            message.outputs.add(name=name)
        if parts["id"].startswith("'"):
            message.parameters["sequence_id"].string_param = parts["id"].strip("'")
        else:
            message.parameters["sequence_id"].int64_param = int(parts["id"])
        message.parameters["sequence_start"].bool_param = bool(parts["start"])
        message.parameters["sequence_end"].bool_param = bool(parts["end"])
        if parts["timeout"]:
            message.parameters["timeout"].int64_param = int(parts["timeout"]) * 1000
        return message

    def result(self, call) -> list:
        """Returns the sum and the controls of the batch, or the error."""
        try:
            answer = call.result(DEADLINE_S)
        except grpc.FutureCancelledError:
            return ["cancelled here", ""]
        except grpc.RpcError as error:
            return [error.code().name, error.details()]
        raw = dict(zip((output.name for output in answer.outputs), answer.raw_output_contents))
        return [int.from_bytes(raw["SUM"], "little", signed=True), raw["BATCH"][4:].decode()]


def groups(rows: list) -> dict:
    """Groups the rows by the server that they need."""
    found = {}
    for row in rows:
        found.setdefault((row.hold, row.backlog), []).append(row)
    return found


def environment(hold: int, backlog: int) -> dict:
    """Returns the additional environment of the server."""
    both = {"TRITONSERVER_DELAY_SCHEDULER": hold, "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": backlog}
    return {name: str(count) for name, count in both.items() if count}


def run_rows(rows: list, server) -> dict:
    """Runs rows against a running server; returns their outcomes by name."""
    with concurrent.futures.ThreadPoolExecutor(scheduling.AT_ONCE) as pool:
        return dict(zip((row.name for row in rows), pool.map(lambda row: Run(row, server).facts(), rows)))


def run_ours(rows: list, folder: Path) -> dict:
    """Runs rows against this project's server."""
    facts = {}
    for (hold, backlog), group in groups(rows).items():
        here = folder / f"{hold}-{backlog}"
        for row in group:
            write_model(row, here / "models", live_triton=False)
        # Rows leave sequences open, and a graceful exit would wait for them.
        server = Server(here, [here / "models"], ["--exit-timeout-secs=0"])
        server.environment = environment(hold, backlog)
        with server:
            facts |= run_rows(group, server)
            server.stop(check=False)
    return facts


def run_triton(rows: list, folder: Path) -> dict:
    """Runs rows against the Triton peer."""
    facts = {}
    for (hold, backlog), group in groups(rows).items():
        here = folder / f"{hold}-{backlog}"
        for row in group:
            write_model(row, here / "models", live_triton=True)
        triton = Triton(here / "models", here / "triton.log", environment(hold, backlog))
        try:
            scheduling.start_with_retries(triton)
            facts |= run_rows(group, triton)
        finally:
            triton.stop()
    return facts


def models_of_loads(target: Path, live_triton: bool) -> dict:
    """Writes the models of `LOADS` into the folder `target`; returns their names by those of the table."""
    rows = [Row(name, batching, "") for name, batching in LOADS.items()]
    for row in rows:
        write_model(row, target, live_triton)
    return {row.name: row.model for row in rows}


def load_here(folder: Path) -> tuple:
    """Returns the reason why each model of `LOADS` is not loaded by this server, empty if it is, and the server's log."""
    names = models_of_loads(folder / "models", live_triton=False)
    server = Server(folder, [folder / "models"], ["--exit-on-error=false", "--strict-readiness=false"])
    server.launch()
    try:
        server.wait_until_ready("/v2/health/ready")
        index = server.index()
        return {name: index[model][0].get("reason", "") for name, model in names.items()}, server.log.read_text()
    finally:
        server.stop()


def load_on_triton(folder: Path) -> dict:
    """Returns the reasons of a real Triton, which loads one model after the other. If its answer has no reason, its log has
    it."""
    names = models_of_loads(folder / "models", live_triton=True)
    triton, reasons = Triton(folder / "models", folder / "triton.log", options=["--model-control-mode=explicit"]), {}
    try:
        scheduling.start_with_retries(triton)
        for name, model in names.items():
            seen = len(triton.log.read_text())
            request = urllib.request.Request(f"http://{triton.http}/v2/repository/models/{model}/load", b"{}")
            try:
                urllib.request.urlopen(request, timeout=DEADLINE_S).read()
                reasons[name] = ""
            except urllib.error.HTTPError as error:
                error_text = json.loads(error.read())["error"]
                logged = re.findall(rf"Poll failed for model directory '{model}': (.*)\"$", triton.log.read_text()[seen:], re.M)
                inner = re.search(r"state: (?:Invalid argument|Internal): (.*);", error_text)
                reasons[name] = logged[-1] if logged else inner[1] if inner else error_text
    finally:
        triton.stop()
    return reasons


def write_loads(reasons: dict):
    """Writes the golden file of the loads."""
    GOLDEN_LOADS.write_text(json.dumps(reasons, indent=1, ensure_ascii=False) + "\n")


def record():
    """Writes the outcomes of all rows and loads on the Triton peer into the golden files."""
    with tempfile.TemporaryDirectory() as folder:
        facts = run_triton(ROWS, Path(folder))
        write_loads(load_on_triton(Path(folder) / "loads"))
    lines = (f" {json.dumps(row.name)}: {json.dumps(facts[row.name])}" for row in ROWS)
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["record"]:
        sys.exit(__doc__)
    record()
