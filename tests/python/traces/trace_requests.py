#!/usr/bin/env python3
"""Models and requests that are traced, for this server and for a real Triton, and the content of their trace files.

    python -m traces.trace_requests record      sends them to the Triton peer and writes golden_trace_file.json, its trace file
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import tritonclient.grpc
import tritonclient.http

from harness.generate import one_to_one, parameters, two_to_two, with_backend

GOLDEN = Path(__file__).resolve().parent / "golden_trace_file.json"

ADD_SUB = 'max_batch_size: 8\n' + two_to_two("INT32", [16])
CACHED = "response_cache { enable: true }\n"
SLOW = "max_batch_size: 1\ndynamic_batching { default_queue_policy { max_queue_size: 100 } }\n"
"""With a queue limit, a request is sent to the worker only when it can be executed."""
PIPE = """platform: "ensemble"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "B" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "C" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step [
  { model_name: "plain" model_version: -1
    input_map { key: "INPUT0" value: "A" } input_map { key: "INPUT1" value: "B" }
    output_map { key: "OUTPUT0" value: "S" } output_map { key: "OUTPUT1" value: "D" } },
  { model_name: "plain" model_version: -1
    input_map { key: "INPUT0" value: "S" } input_map { key: "INPUT1" value: "D" }
    output_map { key: "OUTPUT0" value: "C" } } ] }
"""
PYTHON = """import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        one, two = (utils.get_input_tensor_by_name(request, f"INPUT{n}").as_numpy() for n in (0, 1))
        return utils.InferenceResponse([utils.Tensor("OUTPUT0", one + two), utils.Tensor("OUTPUT1", one - two)])
"""


def build(repository: Path, triton: bool = False) -> Path:
    """Writes the models `plain`, `cached` and `pipe`; for this server also a slow one and one that fails."""
    backend = 'backend: "python"\ninstance_group [ { kind: KIND_CPU } ]\n' if triton else 'backend: "builtin"\n'
    own = "" if triton else parameters(function="add_sub")
    models = {"plain": backend + ADD_SUB + own, "cached": backend + ADD_SUB + own + CACHED, "pipe": PIPE}
    if not triton:
        models["slow"] = with_backend(SLOW + one_to_one("FP32") + parameters(function="delay", delay_ms=1500))
        models["large"] = backend + one_to_one("FP32", [-1]) + parameters(function="identity")
        models["fail"] = with_backend(one_to_one("FP32") + parameters(function="fail"))
    for name, config in models.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        if triton and name != "pipe":
            (repository / name / "1/model.py").write_text(PYTHON)
    return repository


def inputs(module, names=("INPUT0", "INPUT1")) -> list:
    """Returns two inputs of 16 numbers."""
    made = []
    for name in names:
        made.append(module.InferInput(name, [1, 16], "INT32"))
        made[-1].set_data_from_numpy(np.arange(16, dtype=np.int32).reshape(1, 16))
    return made


def ask_all(http: str, grpc: str):
    """Sends five requests: over HTTP, over gRPC, to an ensemble, and the same one twice to a model with a cache."""
    with tritonclient.http.InferenceServerClient(http) as client:
        client.infer("plain", inputs(tritonclient.http), request_id="one")
        with tritonclient.grpc.InferenceServerClient(grpc) as other:
            other.infer("plain", inputs(tritonclient.grpc), request_id="two")
        client.infer("pipe", inputs(tritonclient.http, ("A", "B")), request_id="three")
        client.infer("cached", inputs(tritonclient.http), request_id="four")
        client.infer("cached", inputs(tritonclient.http))


OPTIONS = ["level=TIMESTAMPS", "level=TENSORS", "rate=1"]
"""The traced events and the rate."""


def collect(records: list) -> dict:
    """Collects the records of a trace file by id: one dictionary for each request and step."""
    traces = {}
    for record in records:
        trace = traces.setdefault(record["id"], {"stamps": {}, "tensors": []})
        assert set(record) & {"model_name", "timestamps", "activity"}, f"unknown kind of record: {record}"
        if "model_name" in record:
            trace |= {key: record[key] for key in ("model_name", "model_version", "request_id", "parent_id") if key in record}
            trace |= {key: record[key] for key in ("instance", "error") if key in record}
            traces[record["id"]] = trace
        for stamp in record.get("timestamps", []):
            assert set(stamp) == {"name", "ns"} and isinstance(stamp["ns"], int)
            trace["stamps"].setdefault(stamp["name"], []).append(stamp["ns"])
        if "activity" in record:
            assert set(record["tensor"]) == {"name", "data", "shape", "dtype"}
            trace["tensors"].append((record["activity"], *record["tensor"].values()))
    return traces


def structure(records: list) -> list:
    """Returns the common part of trace files of the same requests: all but times, and Triton's second copy of the outputs of a
    request that was not in the cache."""
    traces = collect(records)
    shown = []
    for _, trace in sorted(traces.items()):
        parent = traces[trace["parent_id"]]["model_name"] if "parent_id" in trace else None
        known = {key: trace.get(key) for key in ("model_name", "model_version", "request_id")}
        shown.append(known | {"parent": parent, "stamps": sorted(trace["stamps"]), "tensors": sorted(set(trace["tensors"]))})
    return shown


def run_triton(folder: Path, *configs: str, ask=ask_all):
    """Starts a Triton with these values of `--trace-config` and its files in `folder`, and sends it requests."""
    from harness.peers import Triton

    options = [f"--trace-config={config}" for config in configs]
    cache = "--cache-config=local,size=1048576"
    triton = Triton(build(folder / "models", True), folder / "log", options=[*options, cache])
    triton.ensure()
    try:
        ask(triton.http, triton.grpc)
    finally:
        triton.stop()


def records_of_triton(folder: Path) -> list:
    """Returns the trace file that a new Triton writes for `ask_all`."""
    run_triton(folder, *OPTIONS, f"triton,file={folder / 'trace.json'}", "triton,log-frequency=5")
    return json.loads((folder / "trace.json.0").read_text())


def record():
    """Records the trace file of a new Triton."""
    with tempfile.TemporaryDirectory() as folder:
        records = records_of_triton(Path(folder))
    GOLDEN.write_text("[" + ",\n".join(json.dumps(record) for record in records) + "]\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["record"]:
        sys.exit(__doc__)
    record()
