"""Compares loads and answers of ensembles in `ensemble_tables.py` with those of a real Triton in `golden_ensembles.json`.
[`DIFFERENCES`] has the reasons for intended differences. With the peer, the golden file is renewed and compared."""

import json

import pytest

from ensembles import runner as ensembles
from ensembles.ensemble_tables import LOADS, RUNS, SERVING
from harness.peers import missing
from harness.server import Server
from harness.waiting import eventually
from protocol.triton_differences import TOO_LARGE

WHY_NOT = missing("triton", "triton")


def golden() -> dict:
    """Returns Triton's recorded answers."""
    return json.loads(ensembles.GOLDEN.read_text())


REQUEST, OF_MANY = "the request", "each response of model 'many'"
LOAD_DIFFERENCES = {
    # Triton exits on some cycles, and reports no reason for others that it has found before.
    "circle_b": "circular dependency between ensembles: circle_b -> ... -> circle_a -> circle_b",
    **{
        f"circle_of_three_{a}": "circular dependency between ensembles: "
        f"circle_of_three_{a} -> ... -> circle_of_three_{c} -> circle_of_three_{a}: "
        + " -> ".join(f"circle_of_three_{n}" for n in (a, b, c, a))
        for a, b, c in ("bca", "cab")
    },
    "of_a_circle": "ensemble 'of_a_circle' depends on 'circle_a' which is not valid. Model 'circle_a' failed with error: "
    "circular dependency between ensembles: circle_a -> ... -> circle_b -> circle_a",
    # When it loads a single ensemble, Triton stops at the first missing member.
    "two_missing": "ensemble two_missing contains models that are not available or ambiguous: elsewhere, nowhere",
    # The end of the reason is the backend's text.
    "of_a_broken_one": (OF_BROKEN := "ensemble 'of_a_broken_one' depends on 'broken' which has no loaded version. Model 'broken' "
    "loading failed with error: version 1 is at UNAVAILABLE state: "),
    "of_one_of_a_broken_one": "ensemble 'of_one_of_a_broken_one' depends on 'of_a_broken_one' which is not valid. Model "
    f"'of_a_broken_one' failed with error: {OF_BROKEN}",
    # Triton does not name the inputs and, if the step makes an output of the ensemble, does not name the step.
    **{
        name: f"in ensemble {name}, step of model '{model}' receives inputs originated from different decoupled models: "
        + ", ".join(f"'{tensor}' comes of {REQUEST if of is None else OF_MANY}" for tensor, of in origins)
        for name, model, origins in [
            ("decoupled_meets_the_request", "two", [("a", 0), ("X", None)]),
            ("decoupled_meets_the_request_inside", "two", [("a", 0), ("X", None)]),
            ("decoupled_meets_a_step", "two", [("a", 0), ("b", None)]),
            ("decoupled_meets_another", "two", [("a", 0), ("b", 1)]),
            ("decoupled_beside_another", "decoupled_beside_another", [("A", 0), ("B", None)]),
            ("decoupled_meets_the_one_before", "two", [("a", 0), ("b", 1)]),
        ]
    },
    # Triton names another tensor of the cycle.
    "steps_in_a_ring": "ensemble tensor 'u' is unused in ensemble 'steps_in_a_ring': it can never be made: 'u' needs 't' needs "
    "'u' (step 0, model 'fp32', step 1, model 'fp32')",
    "from_nowhere": "ensemble tensor 'u' is unused in ensemble 'from_nowhere': input 'INPUT0' of step 0 (model 'fp32') takes "
    "'nowhere', which is neither an output of a step nor an input of the ensemble",
    # Triton loads it; which of the two makes the input of the last step is undefined.
    "input_is_an_output": "ensemble tensor 'X' is an input of ensemble 'input_is_an_output' and made by a step",
}


@pytest.fixture(scope="module")
def serving_loads(tmp_path_factory):
    """Loads the ensembles of `LOADS` on a separate server."""
    folder = tmp_path_factory.mktemp("loads")
    repository = ensembles.build(folder / "models", LOADS, False)
    server = Server(folder, [repository], ["--exit-on-error=false"])
    server.launch()
    try:
        server.wait_until_ready("/v2/health/live")
        broken = lambda: server.index().get("with_an_instance_group", [{}])[0].get("reason")  # noqa: E731
        eventually("the models are loaded", lambda: broken() and "LOADING" not in str(server.index()))
        eventually("the server serves", lambda: server.get("/v2/models/fp32/ready")[0] == 200)
        assert server.get("/v2/health/ready")[0] == 400
        yield ensembles.loaded(server), server.log
    finally:
        server.stop()


@pytest.fixture(scope="module")
def loads(serving_loads):
    """The reason for which each ensemble is not loaded, empty if it is."""
    return serving_loads[0]


@pytest.fixture(scope="module")
def logged(serving_loads):
    """The log of that server."""
    return serving_loads[1]


@pytest.mark.parametrize(
    "name, found_reason",
    [
        ("version_negative", "'model_version' of a step is 1 or greater, or -1 for the latest"),
        ("from_an_empty_name", "values that are made nowhere: '' of input 'INPUT0' of step 0 (model 'fp32')"),
        ("into_an_empty_name", "values that are taken nowhere: '' of output 'OUTPUT0' of step 0 (model 'fp32')"),
        ("output_from_half", "input 'INPUT1' of step 0 (model 'two') takes 'Z', which is neither an output of a step nor an input"),
    ],
)
def test_refusals_name_the_cause(loads, name, found_reason):
    """The additions to Triton's texts: the value, the step, the allowed values."""
    assert found_reason in loads[name]


@pytest.mark.parametrize(
    "name, found_reason",
    [
        ("in_a_namespace", "'model_namespace' is 'foo' in step 0 (model 'fp32')"),
        ("input_mapped_twice", "'input_map' has the key 'INPUT0' twice; the last one counts"),
        ("decoupled_itself", "says that it is decoupled, but none of its members is"),
    ],
)
def test_probable_mistakes_are_logged(loads, logged, name, found_reason):
    """Triton loads these silently; this server loads them with a warning."""
    assert loads[name] == ""
    assert any(found_reason in line and f"model={name}/1" in line and "WARN" in line for line in logged.read_text().splitlines())


def test_cycles_crash_triton():
    """The recorded answers are those that the differences describe."""
    found_reason = golden()["loads"]
    assert found_reason["of_a_circle"][0] == ensembles.CRASHED
    assert "of_itself -> ... -> of_itself" in found_reason["of_itself"][1]


@pytest.mark.parametrize("name", ["of_a_broken_one", "of_one_of_a_broken_one"])
def test_reasons_of_members_begin_with_tritons_text(name):
    """Triton's recorded reasons begin with the texts above."""
    assert golden()["loads"][name][1].startswith(LOAD_DIFFERENCES[name])


@pytest.mark.parametrize("name", [name for name in LOAD_DIFFERENCES if name.startswith("decoupled")])
def test_invalid_response_tensors_are_refused_as_by_triton(name):
    """Triton refuses the same ensembles with reasons that begin like those here."""
    text, found_reason = LOAD_DIFFERENCES[name], golden()["loads"][name][1]
    if name == "decoupled_meets_the_request":
        text = text.replace("model 'two'", f"model '{name}'")
    assert text.startswith(f"{found_reason}: ")


@pytest.mark.parametrize("ensemble", LOADS, ids=lambda ensemble: ensemble.name)
def test_loads(loads, ensemble):
    """An ensemble is loaded if Triton loads it, and otherwise refused with Triton's text."""
    ours, name = loads[ensemble.name], ensemble.name
    if name in LOAD_DIFFERENCES:
        assert ours.startswith(LOAD_DIFFERENCES[name])
        return
    _, theirs = golden()["loads"][name]
    plain = lambda text: text.replace("'", "").removesuffix(".")  # noqa: E731 (Triton forgets a quote here and there)
    # Additional information follows Triton's text.
    assert plain(ours) == plain(theirs) or (theirs and plain(ours).startswith(f"{plain(theirs)}: "))


RUN_DIFFERENCES = {
    # Triton deadlocks if an output is requested whose next step is not needed.
    "pruned: the first": ("A", {"branches": 1, "fp32": 1}),
    "pruned: the second": ("B", {"branches": 1, "fp32": 1, "small": 1}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """This server's answers to the requests, and its metadata and configuration of the ensembles."""
    folder = tmp_path_factory.mktemp("serving")
    with Server(folder, [ensembles.build(folder / "models", SERVING, False)]) as server:
        yield ensembles.served(server)


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row.name)
def test_answers(runs, row):
    """Status, outputs, parameters, errors, and the counts in the statistics of all models."""
    ours, theirs = runs["runs"][row.name], golden()["runs"][row.name]
    if row.name in RUN_DIFFERENCES:
        output, successes = RUN_DIFFERENCES[row.name]
        assert theirs["status"] == 400 and "deadlock" in theirs["answer"]["error"]
        assert [o["name"] for o in ours["answer"]["outputs"]] == [output]
        assert {model: counted["success"] for model, counted in ours["counted"].items()} == successes
        return
    assert ours["status"] == theirs["status"], ours
    assert normal(ours["answer"]) == normal(theirs["answer"])
    # A step concurrent with a failing one may have ended or been cancelled: only the ensemble's counts are deterministic.
    certain = [row.ensemble] if row.name in RACES else None
    assert failures_once(ours["counted"], certain) == failures_once(theirs["counted"], certain)
    assert all(counted.get("fail", 1) == 1 for counted in ours["counted"].values())


def normal(answer: dict) -> dict:
    """Returns an answer with its outputs by name, because Triton orders them by hash and this server by the configuration, and
    without what follows Triton's text."""
    changed = {"outputs": sorted(answer["outputs"], key=lambda o: o["name"])} if "outputs" in answer else {}
    if "error" in answer:
        changed["error"] = answer["error"].removesuffix(TOO_LARGE)
    return answer | changed


RACES = ("not pruned", "not pruned: the failing one", "a step fails while another runs")


def failures_once(counted: dict, certain=None) -> dict:
    """Returns the counts of these models without failures (except for the failing model). Triton counts most failures of
    ensembles twice, and errors of Python models as successes."""
    kept = {model: {k: v for k, v in counts.items() if k != "fail"} for model, counts in counted.items()}
    return {m: counts for m, counts in kept.items() if (m in certain if certain else m != "failing") and counts}


def test_failures_count_once_here_and_twice_in_triton(runs):
    """Checks the only difference in the statistics explicitly."""
    name = "a step fails"
    assert golden()["runs"][name]["counted"]["fails"] == {"fail": 2}
    assert runs["runs"][name]["counted"]["fails"] == {"fail": 1}
    assert runs["runs"][name]["counted"]["failing"]["fail"] == 1


def test_metadata_and_configuration(runs):
    """Metadata and configuration are those of Triton apart from the order of tensors."""
    theirs = golden()
    for part in ("metadata", "config"):
        left, right = dict(runs[part]), dict(theirs[part])
        for key in ("inputs", "outputs", "input", "output"):
            if key in left:
                left[key], right[key] = (sorted(d[key], key=lambda t: t["name"]) for d in (left, right))
        if part == "config":
            # Newer than the recorded Triton.
            assert left["ensemble_scheduling"].pop("max_inflight_requests") == 0
        assert left == right


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_live_triton_answers_as_recorded(tmp_path):
    """The recorded answers are still those of a real Triton."""
    live, recorded = ensembles.ask_triton(tmp_path), golden()
    for row in RUNS:
        ours, theirs = live["runs"][row.name], recorded["runs"][row.name]
        certain = [row.ensemble] if row.name in RACES else None
        assert (ours["status"], ours["answer"]) == (theirs["status"], theirs["answer"]), row.name
        assert failures_once(ours["counted"], certain) == failures_once(theirs["counted"], certain), row.name
    # Cycles crash it at varying points.
    stable = lambda loads: {n: found_reason for n, found_reason in loads.items() if "circle" not in n}  # noqa: E731
    assert stable(live["loads"]) == stable(recorded["loads"])
