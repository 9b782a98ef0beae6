#!/usr/bin/env python3
"""Loads the ensembles of `ensemble_tables.py` and sends the requests, on this server or on a real Triton.

    python -m ensembles.runner record     runs them on the Triton peer and writes golden_ensembles.json
"""

import json
import re
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from ensembles.ensemble_tables import INTEGERS, LOADS, MEMBERS, RUNS, SERVING, Run
from harness import waiting
from harness.generate import with_backend
from harness.peers import Triton
from harness.server import TRITON_MODELS
from harness.waiting import DEADLINE_S

GOLDEN = Path(__file__).resolve().parent / "golden_ensembles.json"
CRASHED = "crashed"
"""The golden file's reason of an ensemble that ended Triton."""


def build(target: Path, ensembles: list, live_triton: bool) -> Path:
    """Writes a repository of the members and these ensembles into the folder `target`, and returns it."""
    used = "".join(ensemble.configuration() for ensemble in ensembles)
    for name, (config, function) in MEMBERS.items():
        if f'model_name: "{name}"' not in used:
            continue
        version = target / name / "1"
        version.mkdir(parents=True)
        head = f'name: "{name}"\ninstance_group [ {{ kind: KIND_CPU }} ]\n'
        text = head + config + function
        (version.parent / "config.pbtxt").write_text('backend: "python"\n' + text if live_triton else with_backend(text))
        if live_triton:
            shutil.copy(TRITON_MODELS / "model.py", version / "model.py")
    for ensemble in ensembles:
        folder = target / ensemble.name / "1"
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(ensemble.configuration())
    return target


def ask(address: str, path: str, body=None) -> tuple:
    """Sends one request; returns the status and the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}/{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, json.loads(response.read() or "{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or "{}")


def loaded(server) -> dict:
    """Returns the reason why each ensemble of `LOADS` is not loaded, empty if it is."""
    found = {entry["name"]: entry for entry in ask(server.http, "v2/repository/index", {})[1]}
    return {e.name: found[e.name].get("reason", "") for e in LOADS}


def loaded_by_triton(triton: Triton) -> dict:
    """Returns the reasons of a Triton, loading one ensemble after the other, because its index omits models with unreadable
    configurations. Some cycles crash it."""
    reasons = {}
    for ensemble in LOADS:
        triton.ensure()
        seen = len(triton.log.read_text())
        try:
            status, answer = ask(triton.http, f"v2/repository/models/{ensemble.name}/load", {})
            error_text = "" if status == 200 else answer["error"]
        except OSError:
            error_text = CRASHED
            triton.wait_for_end()
        # The answer may not have the reason; the log does, with the reasons of all other models that still fail to load.
        logged = re.findall(r'(?:Invalid argument: |Poll failed for model directory [^:]*: )(.*)"$', triton.log.read_text()[seen:], re.M)
        own = [line for line in logged if re.search(rf"\b{ensemble.name}\b", line)]
        place = f"{triton.repository}/"
        reasons[ensemble.name] = [text.replace(place, "") for text in (error_text, own[-1] if own else "")]
    return reasons


def shape_of(values) -> list:
    """Returns the shape of a nested list."""
    return [len(values), *shape_of(values[0])] if isinstance(values, list) else []


def flat(values) -> list:
    """Returns a nested list's elements."""
    return [element for value in values for element in flat(value)] if isinstance(values, list) else [values]


def body_of(run: Run) -> dict:
    """Returns a row's request."""
    inputs = [
        {"name": n, "shape": shape_of(v), "datatype": "INT32" if n in INTEGERS else "FP32", "data": flat(v)}
        for n, v in run.inputs.items()
    ]
    body = {"inputs": inputs, "parameters": run.parameters}
    if run.outputs:
        body["outputs"] = [{"name": name} for name in run.outputs]
    return body | ({"id": run.id} if run.id else {})


COUNTED = ("success", "fail", "compute_infer")


def counts(address: str) -> dict:
    """Returns the counts of all models: successful and failed requests, executions, and batches by size."""
    _, all_stats = ask(address, "v2/models/stats")
    result = {}
    for stats in all_stats["model_stats"]:
        inference = {key: stats["inference_stats"][key]["count"] for key in COUNTED}
        batches = {f"batch {b['batch_size']}": b["compute_infer"]["count"] for b in stats["batch_stats"]}
        whole = {"inferences": stats["inference_count"], "executions": stats["execution_count"]}
        result[stats["name"]] = inference | whole | batches
    return result


def grown(before: dict, after: dict) -> dict:
    """Returns the non-zero increases between two snapshots."""
    result = {}
    for name, now in after.items():
        earlier = before.get(name, {})
        more = {key: value - earlier.get(key, 0) for key, value in now.items() if value != earlier.get(key, 0)}
        if more:
            result[name] = more
    return result


def settled(address: str, before: dict) -> dict:
    """Returns the increases after the counts are constant for half a second."""
    return waiting.settled("the statistics", lambda: grown(before, counts(address)), 0.5)


def run(address: str, row: Run) -> dict:
    """Returns the outcome of one row: status, answer, and increases of the statistics."""
    before = counts(address)
    status, answer = ask(address, f"v2/models/{row.ensemble}/infer", body_of(row))
    return {"status": status, "answer": answer, "counted": settled(address, before)}


def metadata(address: str) -> dict:
    """Returns the metadata and the configuration of an ensemble."""
    config = ask(address, "v2/models/diamond/config")[1]
    return {"metadata": ask(address, "v2/models/diamond")[1], "config": config}


def ask_triton(folder: Path) -> dict:
    """Returns a real Triton's results of all rows."""
    options = {"loads": ["--model-control-mode=explicit"], "serving": []}
    found = {}
    for name, ensembles in [("loads", LOADS), ("serving", SERVING)]:
        repository = build(folder / name, ensembles, True)
        triton = Triton(repository, folder / f"{name}.log", options=options[name])
        try:
            triton.ensure()
            found |= {"loads": loaded_by_triton(triton)} if name == "loads" else served(triton)
        finally:
            triton.stop()
    return found


def served(server) -> dict:
    """Returns the results of the requests on a server with the ensembles of `SERVING`."""
    return {"runs": {row.name: run(server.http, row) for row in RUNS}, **metadata(server.http)}


def main() -> int:
    """The command line."""
    if sys.argv[1:] != ["record"]:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = ask_triton(Path(folder))
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(found['loads'])} loads and {len(found['runs'])} requests written to {GOLDEN.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
