"""Sequences whose model is a member of ensembles: they continue on the same model version after a reload, the gauges are sums
over the old and the new version, and the response cache ignores them."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from ensembles.plain_ensembles import ensemble, plain
from harness.models import write
from harness.sequence_models import config, controls
from harness.processes import held
from harness.server import Server, total
from harness.statistics import until_dispatched
from harness.waiting import DEADLINE_S, eventually

IDLE_LONG = "max_sequence_idle_microseconds: 600000000"
DELAY_S = 1.0
SEQUENCE = config(f"{IDLE_LONG} direct {{ }} {controls()}")
OPTIONS = ["--model-control-mode=explicit", "--exit-timeout-secs=1", "--cache-config=local,size=1048576"]
SLOW = f'parameters {{ key: "delay_ms" value {{ string_value: "{int(DELAY_S * 1000)}" }} }}'
MODELS = {
    "seq": SEQUENCE,
    "before": plain("before", "delay", SLOW),
    "alone": ensemble("seq"),
    "late": ensemble("before", "seq"),
    "nested": ensemble("alone"),
}


@pytest.fixture
def serve(tmp_path):
    """Returns a function that starts a server, loads these models and returns the server."""
    started = []

    def begin(models: dict, *loaded: str):
        for name, text in models.items():
            write(tmp_path / "models", name, text)
        options = [*OPTIONS, "--exit-on-error=false", "--strict-readiness=false"]
        server = Server(tmp_path, [tmp_path / "models"], [*options, *(f"--load-model={name}" for name in loaded)])
        server.models = tmp_path / "models"
        started.append(server.__enter__())
        return server

    yield begin
    for server in started:
        # These tests leave sequences open, and a graceful exit would wait for them.
        server.stop(check=False)


def step(server, model: str, sequence, value: int, flags: str = ""):
    """Sends one request; returns the sum, or the status and the error."""
    parameters = {"sequence_start": "(" in flags, "sequence_end": ")" in flags} | ({"sequence_id": sequence} if sequence else {})
    tensor = {"name": "VALUE", "shape": [1, 1], "datatype": "INT32", "data": [value]}
    status, answer = server.infer(model, {"parameters": parameters, "inputs": [tensor], "outputs": [{"name": "SUM"}]})
    return answer["outputs"][0]["data"][0] if status == 200 else (status, answer["error"])


def load(server, name: str) -> tuple:
    """Loads a model by name."""
    return server.ask("POST", f"/v2/repository/models/{name}/load", "{}")


def reload(server, name: str):
    """Changes a file of the model and loads it again."""
    changed = server.models / name / "1" / "changed"
    changed.write_text(changed.read_text() + "x" if changed.exists() else "x")
    assert load(server, name) == (200, "")


def workers_of(server, model: str) -> set:
    """Returns the processes of a model's instances."""
    return {pid for pid in server.workers() if f"\0{model}_0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.mark.parametrize("model", ["seq", "alone", "late", "nested"])
def test_a_sequence_continues_on_the_replaced_model(serve, model):
    """Also through an ensemble; a sequence that starts after the reload uses the new model."""
    server = serve(MODELS, "late", "nested")
    assert step(server, model, 1, 10, "(") == 10
    old = workers_of(server, "seq")
    assert len(old) == 1
    reload(server, "seq")
    assert step(server, model, 1, 5) == 15
    assert step(server, model, 2, 7, "(") == 7
    assert len(workers_of(server, "seq")) == 2
    assert step(server, "seq", 1, 1) == 16, "direct requests and ensemble requests belong to one sequence"
    assert step(server, model, 1, 1, ")") == 17
    eventually("the old worker has ended", lambda: not old & server.workers())
    assert step(server, model, 2, 7) == 14
    status, error = step(server, model, 1, 1)
    assert status == 400 and "must specify the START flag" in error


@pytest.mark.parametrize("model", ["seq", "alone"])
def test_a_restarted_sequence_uses_the_new_model(serve, model):
    """The old model still has a sequence with this id."""
    server = serve(MODELS, "alone")
    assert step(server, model, 3, 1, "(") == 1
    reload(server, "seq")
    assert step(server, model, 3, 100, "(") == 100
    assert step(server, model, 3, 1) == 101
    assert step(server, model, 3, 1, ")") == 102
    status, error = step(server, model, 3, 1)
    assert status == 400 and "must specify the START flag" in error, "the old sequence does not continue"


@pytest.mark.parametrize("model", ["seq", "alone"])
def test_a_lost_sequence_continues_no_older_one(serve, model):
    """The old model still had a sequence with this id when the lost one began."""
    server = serve(MODELS, "alone")
    assert step(server, model, 3, 1, "(") == 1
    old = workers_of(server, "seq")
    reload(server, "seq")
    assert step(server, model, 3, 100, "(") == 100
    (new,) = workers_of(server, "seq") - old
    os.kill(new, signal.SIGKILL)
    status, error = eventually("the loss is known", lambda: only_refused(step(server, model, 3, 1)))
    assert status == 503 and "was ended" in error, error


def only_refused(answer):
    """Returns the status and the error of an answer; None for a sum."""
    return answer if isinstance(answer, tuple) else None


def test_an_unload_does_not_wait_for_idle_sequences(serve):
    """A sequence that waits for a slot gets that of an idle one, which no request can continue."""
    one_slot = config(f"{IDLE_LONG} direct {{ }} {controls()}", batch=1)
    server = serve({"seq": one_slot}, "seq")
    assert step(server, "seq", 1, 1, "(") == 1
    waiting = in_background(lambda: step(server, "seq", 2, 5, "()"))
    eventually("it waits", lambda: total(server.scrape(), "nv_inference_pending_request_count", model="seq") == 1)
    assert server.ask("POST", "/v2/repository/models/seq/unload", b"")[0] == 200
    assert waiting() == 5
    eventually("the worker has ended", lambda: not server.workers())


def test_a_sequence_with_an_implicit_start_continues_on_the_replaced_model(serve):
    """Its requests have no START flag, so a new one would begin without an error."""
    server = serve({"seq": config(f"{IDLE_LONG} direct {{ }} {controls()}", implicit_sequence_start="true")}, "seq")
    assert [step(server, "seq", 1, value) for value in (10, 1)] == [10, 11]
    reload(server, "seq")
    assert [step(server, "seq", 1, 1), step(server, "seq", 2, 1)] == [12, 1]


def in_background(check):
    """Runs the check in a thread; returns a function that waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(check()), daemon=True)
    thread.start()
    return lambda: (thread.join(DEADLINE_S), results[0])[1]


def test_a_sequence_begins_while_its_model_is_replaced(serve):
    """The first request enters the ensemble before the reload and reaches the old model during it."""
    server = serve(MODELS, "late")
    with held(server, "before"):
        first = in_background(lambda: step(server, "late", 4, 10, "("))
        until_dispatched(server, "before", 1)
        reload(server, "seq")
    assert first() == 10
    assert step(server, "late", 4, 5) == 15
    assert step(server, "seq", 4, 5, ")") == 20


@pytest.mark.slow
def test_gauges_are_sums_over_the_old_and_the_new_version(serve):
    """While a replaced version finishes its sequences: sequences, slots, instances and waiting requests."""
    slow = config(f"{IDLE_LONG} direct {{ }} {controls()}", batch=2, delay_ms=int(DELAY_S * 1000))
    server = serve({"seq": slow}, "seq")

    def gauges() -> dict:
        now = server.scrape()
        of = lambda name, **labels: total(now, name, model="seq", version="1", **labels)  # noqa: E731
        return {
            "active": of("pharos_sequences", state="active"),
            "used": of("pharos_sequence_slots_used"),
            "slots": of("pharos_sequence_slots"),
            "waiting": of("pharos_pending_requests", priority="0"),
            "pending": of("nv_inference_pending_request_count"),
            "oldest": of("pharos_oldest_pending_seconds") > 0,
            "instances": total(now, "pharos_instances", model="seq"),
            "states": of("pharos_instance_state"),
        }

    assert [step(server, "seq", number, 1, "(") for number in (1, 2)] == [1, 1]
    with held(server, "seq"):
        more = [in_background(lambda: step(server, "seq", 1, 1)) for _ in range(6)]
        eventually("five requests wait", lambda: gauges()["waiting"] == 5)
        reload(server, "seq")
        now = gauges()
        assert (now["active"], now["used"], now["slots"]) == (2, 2, 4)
        assert now["waiting"] == now["pending"] == 5 and now["oldest"], now
        assert now["instances"] == 2 and now["states"] == 1, "the state of an instance is that of the serving version"
        assert step(server, "seq", 3, 1, "(") == 1
        assert gauges()["active"] == gauges()["used"] == 3
    assert sorted(answer() for answer in more) == [2, 3, 4, 5, 6, 7]
    assert [step(server, "seq", number, 1, ")") for number in (1, 2)] == [8, 2]
    idle = {"active": 1, "used": 1, "slots": 2, "waiting": 0, "pending": 0, "oldest": False, "instances": 1, "states": 1}
    eventually("the old version is unloaded", lambda: gauges() == idle)


STATE = """backend: "test" max_batch_size: 4
input [ { name: "X" data_type: TYPE_INT64 dims: [ 1 ] } ] output [ { name: "Y" data_type: TYPE_INT64 dims: [ 1 ] } ]
parameters { key: "function" value { string_value: "accumulate" } }
sequence_batching { direct { } state [ { input_name: "S" output_name: "T" data_type: TYPE_INT64 dims: [ 1 ] } ] }"""
CACHE = "response_cache { enable: true }"


def refusal(model: str, member: str) -> str:
    """Returns the reason with which the load of an ensemble is refused."""
    return (
        f"Response Cache does not currently support model {model} with sequence batching scheduler in its member {member}. "
        "Please disable the response cache."
    )


def test_the_cache_is_refused_where_a_member_has_sequences(serve):
    """Also with an indirect member, and with states. The same ensembles without the cache serve."""
    models = {
        "seq": SEQUENCE,
        "iterative": config(f"iterative_sequence: true {IDLE_LONG} direct {{ }} {controls()}"),
        "state": STATE,
        "alone": ensemble("seq"),
        "cached": ensemble("seq", more=CACHE),
        "cached_nested": ensemble("alone", more=CACHE),
        "cached_iterative": ensemble("iterative", more=CACHE),
        "cached_state": ensemble("state", more=CACHE, kind="INT64", ends=("X", "Y")),
    }
    server = serve(models, "*")
    members = {"cached": "seq", "cached_nested": "seq", "cached_iterative": "iterative", "cached_state": "state"}
    for model, member in members.items():
        [entry] = server.index()[model]
        assert entry["state"] == "UNAVAILABLE" and refusal(model, member) in entry["reason"], entry
        status, text = load(server, model)
        assert status == 400 and refusal(model, member) in json.loads(text)["error"]
    assert [step(server, "alone", 1, value, flags) for value, flags in ((5, "("), (5, ""), (5, ")"))] == [5, 10, 15]


@pytest.mark.parametrize("by_name", ["member", "ensemble"])
def test_a_cached_ensemble_is_refused_once_a_member_has_sequences(serve, by_name):
    """The result does not depend on which of the two is loaded."""
    server = serve({"member": plain("member", "identity"), "cached": ensemble("member", more=CACHE)}, "cached")
    assert [step(server, "cached", None, 5) for _ in range(2)] == [5, 5]
    assert total(server.scrape(), "nv_cache_num_hits_per_model", model="cached") == 1
    (server.models / "member/config.pbtxt").write_text(SEQUENCE)
    status, text = load(server, by_name if by_name == "member" else "cached")
    if by_name == "ensemble":
        assert status == 400 and refusal("cached", "member") in json.loads(text)["error"]
    [entry] = server.index()["cached"]
    assert entry["state"] == "UNAVAILABLE" and refusal("cached", "member") in entry["reason"]
    assert step(server, "cached", 1, 5, "(")[0] == 404
    assert [step(server, "member", 1, 5, flags) for flags in ("(", "", ")")] == [5, 10, 15]
    (server.models / "member/config.pbtxt").write_text(plain("member", "identity"))
    assert load(server, "cached") == (200, "")
    assert step(server, "cached", None, 5) == 5


def test_requests_of_sequences_are_not_cached(serve):
    """Such requests are neither looked up nor stored, in models and ensembles without sequences, which ignore the id."""
    models = {"member": plain("member", "identity", CACHE), "cached": ensemble("member", more=CACHE)}
    server = serve(models, "cached")
    counted = lambda model: tuple(  # noqa: E731
        total(server.scrape(), f"nv_cache_num_{what}_per_model", model=model) for what in ("hits", "misses")
    )
    for model in ("member", "cached"):
        assert [step(server, model, 7, 5, flags) for flags in ("(", "", "", ")")] == [5] * 4
        assert counted(model) == (0, 0)
    assert [step(server, "cached", None, 5) for _ in range(3)] == [5] * 3
    assert counted("cached") == (2, 1)
