"""The nesting of steps in traces of every kind of request (decoupled and nested ensembles, sequences, the cache, failures, lost
workers, disconnected clients), once in a file and once as spans. See also `test_traces.py` and `test_otlp.py`."""

import json

import numpy as np
import pytest
import tritonclient.http

from ensembles.decoupled import ENSEMBLES, MEMBERS, asked, values
from harness.connections import connect, post
from harness.sequence_models import config as sequence_config, controls
from harness.otlp_collector import HttpCollector
from harness.processes import held
from harness.server import Server, total
from harness.statistics import until_dispatched
from harness.stream_models import build, ensemble, passed, step
from harness.waiting import eventually, settled
from protocol.request_table import tensor
from traces.trace_files import summary
from traces.trace_requests import collect

MODELS = {name: MEMBERS[name] for name in MEMBERS if name != "four"} | {
    "chain": ENSEMBLES["chain"],
    "fails_behind": ENSEMBLES["fails_behind"],
    "breaks": ENSEMBLES["breaks"],
    "waits": ENSEMBLES["waits"],
    "sequence": ENSEMBLES["steps_of_a_sequence"],
    "nested": ensemble(step("chain", {"IN": "IN", "DELAY": "DELAY"}, {"OUT": "a"}), passed()),
    "stored": ensemble(passed("IN", "a"), passed("a"), extra="response_cache { enable: true }\n"),
    "slowly": ensemble(passed("IN", "a"), passed("a", "OUT", "slower")),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of models and ensembles."""
    folder = build(tmp_path_factory.mktemp("steps") / "models", MODELS)
    (folder / "sums/1").mkdir(parents=True)
    sums = sequence_config(f"max_sequence_idle_microseconds: 60000000 {controls()}", batch=0)
    (folder / "sums/config.pbtxt").write_text(sums)
    return folder


def serve(folder, repository, *configs):
    """Starts a server that traces every request."""
    options = [f"--trace-config={config}" for config in ("level=TIMESTAMPS", "rate=1", *configs)]
    return Server(folder, [repository], [*options, "--cache-config=local,size=1048576"])


def posted(elements: list, identifier: str) -> dict:
    """Returns a request in JSON."""
    return {"id": identifier, "inputs": [tensor("IN", "INT32", [len(elements)], elements)]}


def ask_all(server) -> int:
    """Sends requests of every kind; returns their number."""
    assert values(server, asked("chain", [1, 2, 3], "chain")) == [("chain", n) for n in (1, 2, 3)]
    assert values(server, asked("nested", [4, 5], "nested")) == [("nested", 4), ("nested", 5)]
    assert values(server, asked("sequence", [1, 2], "sequence"))
    for name in ("stored", "stored again"):
        assert server.infer("stored", posted([7, 8], name))[0] == 200
    assert "requested failure" in values(server, asked("fails_behind", [1], "fails_behind"))[-1][1]
    assert "died" in values(server, asked("breaks", [1, 2, 3, 4], "breaks"))[-1][1]
    with held(server, "slower"), connect(server.http_port) as gone:
        gone.sendall(post("/v2/models/slowly/infer", json.dumps(posted([3], "gone")).encode()))
        until_dispatched(server, "slower", 1)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        for number in range(3):
            value = tritonclient.http.InferInput("VALUE", [1], "INT32")
            value.set_data_from_numpy(np.array([number], np.int32))
            ends = {"sequence_start": number == 0, "sequence_end": number == 2}
            client.infer("sums", [value], request_id=f"sums{number}", sequence_id=9, **ends)
    return 11


def tree(traces: dict, root: int) -> list:
    """Returns the models of a request's steps as nested lists, in the order in which they began."""
    steps = sorted(number for number, trace in traces.items() if trace.get("parent_id") == root)
    return [traces[root]["model_name"], *(tree(traces, number) for number in steps)]


TREES = {
    "chain": ["chain", ["repeat"], *[["rows_of_any"]] * 3],
    "nested": ["nested", ["chain", ["repeat"], *[["rows_of_any"]] * 2], *[["rows_of_any"]] * 2],
    "stored": ["stored", ["rows_of_any"], ["rows_of_any"]],
    "stored again": ["stored"],
    "fails_behind": ["fails_behind", ["repeat"], ["failing"]],
    "gone": ["slowly", ["rows_of_any"], ["slower"]],
    "sequence": ["sequence", ["numbered"], ["sums"], ["sums"]],
} | {f"sums{number}": ["sums"] for number in range(3)}
"""By the id of the request; failed requests may have fewer steps."""


def check(traces: dict, found: dict):
    """Every step lies within its parent, which exists; every part has an end; failures are reported with all affected steps."""
    assert {name: shape for name, shape in found.items() if name != "breaks"} == TREES
    assert found["breaks"][:2] == ["breaks", ["crashing"]]
    for trace in traces.values():
        stamps = trace["stamps"]
        assert "REQUEST_START" in stamps and "REQUEST_END" in stamps, trace
        parent = traces.get(trace.get("parent_id"))
        if "parent_id" in trace:
            assert parent is not None and parent["stamps"]["REQUEST_START"][0] <= stamps["REQUEST_START"][0]
            assert trace["request_id"] == parent["request_id"]
            if not parent.get("error"):
                assert stamps["REQUEST_END"][0] <= parent["stamps"]["REQUEST_END"][0]
            assert not {"HTTP_RECV_START", "GRPC_WAITREAD_START"} & set(stamps), "only root traces have events of receiving"
    failed = {(trace["request_id"], trace["model_name"]): trace["error"] for trace in traces.values() if trace.get("error")}
    assert ("fails_behind", "failing") in failed and ("fails_behind", "fails_behind") in failed
    assert ("breaks", "breaks") in failed and ("breaks", "crashing") in failed
    assert failed["gone", "slowly"] == "cancelled"
    assert {request for request, _ in failed} == {"fails_behind", "breaks", "gone"}


def test_steps_in_a_file(repository, tmp_path):
    """`parent_id` leads to the request; all parts have an end."""
    file = tmp_path / "trace.json"
    with serve(tmp_path, repository, f"triton,file={file}") as server:
        count = ask_all(server)
        eventually("all traces are written", lambda: total(server.scrape(), "pharos_traces_total", result="written") == count)
    traces = collect(json.loads(file.read_text()))
    roots = [number for number, trace in traces.items() if "parent_id" not in trace]
    check(traces, {traces[root]["request_id"]: tree(traces, root) for root in roots})
    assert all(model["unfinished"] == 0 for model in summary(file).values())


def test_steps_as_spans(repository, tmp_path):
    """As above, for spans: one root for each trace; the parent of every other span exists."""
    with HttpCollector() as collector:
        url = f"opentelemetry,url=http://127.0.0.1:{collector.port}/v1/traces"
        with serve(tmp_path, repository, "mode=opentelemetry", url, "opentelemetry,bsp_schedule_delay=100") as server:
            count = ask_all(server)
            roots = lambda: [span for span in collector.spans if span.name == "InferRequest"]  # noqa: E731
            eventually("all root spans are received", lambda: len(roots()) == count)
            settled("the spans", lambda: len(collector.spans), 0.3)
        by_id = {span.id: span for span in collector.spans}
        assert len(by_id) == len(collector.spans) and len({root.trace for root in roots()}) == count
        traces = {}
        for span in collector.spans:
            assert span.name == "InferRequest" or by_id[span.parent].trace == span.trace
            if "triton.trace_id" not in span.attributes:
                continue
            number, parent = span.attributes["triton.trace_id"], span.attributes["triton.trace_parent_id"]
            outer = by_id[span.parent]
            assert outer.name == "InferRequest" if parent == 0 else outer.attributes["triton.trace_id"] == parent
            more = {"parent_id": parent} if parent else {}
            stamps = {name: [at] for name, at in span.events.items()}
            known = {"model_name": span.name, "request_id": span.attributes["triton.request_id"], "error": span.error}
            traces[number] = known | {"stamps": stamps} | more
        own = [number for number, trace in traces.items() if "parent_id" not in trace]
        check(traces, {traces[root]["request_id"]: tree(traces, root) for root in own})


def test_steps_beyond_the_bound_are_left_out(repository, tmp_path):
    """A request with more than ten thousand steps: ten thousand are recorded, and the request itself to its end."""
    file = tmp_path / "trace.json"
    with serve(tmp_path, repository, f"triton,file={file}") as server:
        assert len(values(server, asked("chain", range(12_000), "long"))) == 12_000
        eventually("the trace is written", lambda: total(server.scrape(), "pharos_traces_total", result="written") == 1)
    traces = collect(json.loads(file.read_text()))
    root = next(trace for trace in traces.values() if "parent_id" not in trace)
    assert len(traces) == 10_001 and "REQUEST_END" in root["stamps"]
