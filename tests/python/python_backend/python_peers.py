#!/usr/bin/env python3
"""Sends the rows of `python_tables.py` to this server or to a real Triton and returns the outcomes.

python -m python_backend.python_peers record [PATTERN]     records Triton's answers in golden_python.json (PATTERN: names of rows)
"""

import fnmatch
import json
import re
import sys
import tempfile
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from ensembles.runner import ask, grown
from harness import waiting
from harness.peers import Triton
from harness.waiting import DEADLINE_S, pause_as_client, run_for
from harness.wire import set_parameter
from python_backend.python_repository import OPTIONS, build
from python_backend.python_tables import ROWS, Ask, Http, Row

GOLDEN = Path(__file__).resolve().parent / "golden_python.json"
CRASHED = "crashed"
"""The entry in the golden file for a row that crashed Triton."""
NO_ANSWER = {"status": "no answer"}
"""The entry for an answer that did not arrive within [`DEADLINE_S`]."""

NUMPY = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "BF16": ml_dtypes.bfloat16,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


def numpy_type(datatype: str):
    """Returns the numpy type of a datatype of the protocol."""
    return NUMPY.get(datatype) or np.dtype(datatype.lower())


def raw(datatype: str, values: list) -> bytes:
    """Encodes values in binary form."""
    if datatype == "BYTES":
        encoded = [value.encode() for value in values]
        return b"".join(len(value).to_bytes(4, "little") + value for value in encoded)
    return np.array(values, numpy_type(datatype)).tobytes()


def values(datatype: str, content: bytes) -> list:
    """Decodes values from binary form; bytes of texts that are not UTF-8 become escapes."""
    if datatype != "BYTES":
        found = np.frombuffer(content, numpy_type(datatype))
        return (found.astype(np.float64) if datatype == "BF16" else found).tolist()
    found, at = [], 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "little")
        found.append(content[at + 4 : at + 4 + size].decode(errors="backslashreplace"))
        at += 4 + size
    return found


def message(request: Ask):
    """Returns the gRPC message of a request."""
    made = pb.ModelInferRequest(model_name=request.model, model_version=request.version, id=request.id)
    for name, (datatype, shape, content) in request.inputs.items():
        made.inputs.add(name=name, datatype=datatype, shape=shape)
        made.raw_input_contents.append(raw(datatype, content))
    for name in request.outputs:
        made.outputs.add(name=name)
    for key, value in request.parameters.items():
        set_parameter(made.parameters[key], value)
    return made


def plain(response) -> dict:
    """Returns a gRPC response as a dictionary."""
    kind = lambda value: getattr(value, value.WhichOneof("parameter_choice"))  # noqa: E731
    pairs = zip(response.outputs, response.raw_output_contents)
    outputs = {o.name: [o.datatype, list(o.shape), values(o.datatype, content)] for o, content in pairs}
    parameters = {key: kind(value) for key, value in sorted(response.parameters.items())}
    of = [response.model_name, response.model_version, response.id]
    return {"of": of, "parameters": parameters, "outputs": readable(outputs)}


def readable(outputs: dict) -> dict:
    """Returns outputs sorted by name; the texts of `SEEN` are parsed if they are JSON."""
    found = dict(sorted(outputs.items()))
    if "SEEN" in found:
        found["SEEN"] = [*found["SEEN"][:2], [from_json(text) for text in found["SEEN"][2]]]
    return found


def from_json(text: str):
    """Returns the value of a JSON text; other texts unchanged, or shortened if they are long."""
    try:
        return json.loads(text)
    except ValueError:
        return text if len(text) < 1000 else f"{text[:10]}... {len(text)}"


def exact(datatype: str, data: list) -> list:
    """Rounds FP32 numbers from JSON to their datatype, since the servers write different numbers of digits."""
    return np.array(data, np.float32).tolist() if datatype == "FP32" else data


def send_http(server, request: Ask) -> dict:
    """Sends one request over HTTP, with tensors as JSON."""
    inputs = [{"name": n, "datatype": d, "shape": s, "data": v} for n, (d, s, v) in request.inputs.items()]
    body = {"inputs": inputs, "parameters": request.parameters} | ({"id": request.id} if request.id else {})
    if request.outputs:
        body["outputs"] = [{"name": name} for name in request.outputs]
    version = f"/versions/{request.version}" if request.version else ""
    try:
        status, answer = post(server, Http(f"v2/models/{request.model}{version}/infer", body))
    except TimeoutError:
        return NO_ANSWER
    if not isinstance(answer, dict) or "error" in answer:
        return {"status": status, **(answer if isinstance(answer, dict) else {"body": answer})}
    outputs = {
        o["name"]: [o["datatype"], o["shape"], exact(o["datatype"], o["data"])] for o in answer.get("outputs", [])
    }
    of = [answer["model_name"], answer["model_version"], answer.get("id", "")]
    return {"status": status, "of": of, "parameters": answer.get("parameters", {}), "outputs": readable(outputs)}


def send_grpc(server, request: Ask) -> dict:
    """Sends one unary call."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return {"status": "OK", **plain(stub.ModelInfer(message(request), timeout=DEADLINE_S))}
        except grpc.RpcError as error:
            return {"status": error.code().name, "error": error.details()}


def send_stream(server, request: Ask) -> dict:
    """Sends one request on a new stream and collects all its answers."""
    answers, status = [], "OK"
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([message(request)]), timeout=request.give_up_s or DEADLINE_S)
        try:
            for answer in call:
                answers.append({"error": answer.error_message, **plain(answer.infer_response)})
        except grpc.RpcError as error:
            status = error.code().name
    return {"status": status, "answers": answers}


def send(server, request) -> dict:
    """Sends one of the row's requests and returns its outcome."""
    if isinstance(request, Ask):
        pause_as_client(request.delay_s)
        answer = {"http": send_http, "grpc": send_grpc, "stream": send_stream}[request.via](server, request)
        return NO_ANSWER if answer["status"] == "DEADLINE_EXCEEDED" and not request.give_up_s else answer
    if request.path == "wait":
        run_for("the table's pause between two requests", request.body)
        return {}
    try:
        status, answer = post(server, request)
    except TimeoutError:
        return NO_ANSWER
    return {"status": status, "body": answer}


def post(server, request: Http) -> tuple:
    """Sends a request; returns the status and the body, which may be JSON, a text or empty."""
    data = None if request.body is None else json.dumps(request.body).encode()
    asked = urllib.request.Request(f"http://{server.http}/{request.path}", data)
    try:
        with urllib.request.urlopen(asked, timeout=DEADLINE_S) as response:
            return response.status, from_json(response.read().decode())
    except urllib.error.HTTPError as error:
        return error.code, from_json(error.read().decode())


COUNTED = ("success", "fail", "compute_infer")


def counts(server) -> dict:
    """Returns the counts of all models: requests, executions, batches by size, and responses of decoupled models by position."""
    result = {}
    for stats in ask(server.http, "v2/models/stats")[1]["model_stats"]:
        found = {key: stats["inference_stats"][key]["count"] for key in COUNTED}
        found |= {"inferences": stats["inference_count"], "executions": stats["execution_count"]}
        found |= {f"batch {b['batch_size']}": b["compute_infer"]["count"] for b in stats["batch_stats"]}
        for place, response in stats.get("response_stats", {}).items():
            kinds = ("success", "fail", "empty_response", "cancel")
            found |= {f"response {place} {kind}": response[kind]["count"] for kind in kinds if kind in response}
        result[f"{stats['name']} {stats['version']}"] = found
    return result


def settled(server, before: dict, quiet_s: float) -> dict:
    """Waits until the counts have not changed for `quiet_s` seconds; returns the increases."""
    return waiting.settled("the statistics", lambda: grown(before, counts(server)), quiet_s)


def custom(server, families: tuple) -> list:
    """Returns the sorted lines of these metric families, types and descriptions included."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=DEADLINE_S) as response:
        lines = response.read().decode().splitlines()
    wanted = re.compile(rf"(?:# (?:HELP|TYPE) )?(?:{'|'.join(families)})(?:_bucket|_sum|_count)?(?:[ {{]|$)")
    return sorted(same_form(line) for line in lines if wanted.match(line))


def same_form(line: str) -> str:
    """Returns a line with sorted labels and with numbers as Python formats them."""
    if line.startswith("#"):
        return line
    series, _, value = line.rpartition(" ")
    name, bracket, rest = series.partition("{")
    labels = sorted(
        f"{key}={float(text[1:-1])}" if key == "le" else f"{key}={text}" for key, text in LABEL.findall(rest)
    )
    return f"{name}{{{','.join(labels)}}} {float(value)}" if bracket else f"{name} {float(value)}"


LABEL = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')


@dataclass
class Peer:
    """The server under test: its addresses, the folder of its repository, which outcomes must not contain, and the time for
    which its statistics must be unchanged."""

    server: object
    repository: str
    quiet_s: float

    def run(self, row: Row) -> dict:
        """Sends a row's requests and returns the outcome."""
        before = counts(self.server)
        answers = self.together(row) if row.at_once else [send(self.server, request) for request in row.requests]
        found = {"answers": answers, "counted": settled(self.server, before, self.quiet_s)}
        if row.metrics:
            found["metrics"] = custom(self.server, row.metrics)
        return json.loads(json.dumps(found, ensure_ascii=False).replace(self.repository, "REPOSITORY"))

    def together(self, row: Row) -> list:
        """Sends a row's requests concurrently, each after its delay."""
        answers = [None] * len(row.requests)

        def one(place):
            answers[place] = send(self.server, row.requests[place])

        threads = [threading.Thread(target=one, args=(place,)) for place in range(len(row.requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers


TRIES = 4
"""The number of attempts for a row that crashes Triton. Its Python backend crashes at random in rows where a model receives
an error."""


def ask_triton(folder: Path, rows=ROWS) -> dict:
    """Returns the outcomes of the rows on a real Triton, which is restarted after a crash."""
    repository = build(folder / "models")
    triton = Triton(repository, folder / "triton.log", options=OPTIONS)
    try:
        return {row.name: asked(triton, Peer(triton, str(repository), 0.4), row) for row in rows}
    finally:
        triton.stop()


def asked(triton: Triton, peer: Peer, row: Row):
    """Returns Triton's outcome of one row, or CRASHED if the row crashes it."""
    for _ in range(TRIES):
        triton.ensure()
        try:
            found = peer.run(row)
        except OSError:
            triton.wait_for_end()
            continue
        if NO_ANSWER in found["answers"]:
            # After a request without an answer, the process may be in an undefined state.
            triton.process.kill()
            triton.process.wait()
        return found
    return CRASHED


def golden() -> dict:
    """Returns Triton's recorded answers."""
    return json.loads(GOLDEN.read_text())


def write(answers: dict):
    """Writes the golden file with one line for each answer."""
    line = lambda value: json.dumps(value, ensure_ascii=False)  # noqa: E731
    rows = []
    for name in (row.name for row in ROWS if row.name in answers):
        found = answers[name]
        if found == CRASHED:
            rows.append(f"{line(name)}: {line(found)}")
            continue
        parts = [f'"answers": [\n  {listed([line(answer) for answer in found["answers"]])}]']
        parts += [f'"{key}": {line(found[key])}' for key in ("counted", "metrics") if key in found]
        rows.append(f"{line(name)}: {{{listed(parts, ' ')}}}")
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def listed(parts: list, indent: str = "  ") -> str:
    """Joins parts of a JSON text, one on each line."""
    return f",\n{indent}".join(parts)


def main() -> int:
    """The command line."""
    if sys.argv[1:2] != ["record"] or len(sys.argv) > 3:
        print(__doc__)
        return 2
    pattern = sys.argv[2] if len(sys.argv) > 2 else "*"
    rows = [row for row in ROWS if fnmatch.fnmatchcase(row.name, pattern)]
    with tempfile.TemporaryDirectory() as folder:
        found = ask_triton(Path(folder), rows)
    write(golden() | found if pattern != "*" else found)
    print(f"{len(found)} rows written to {GOLDEN.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
