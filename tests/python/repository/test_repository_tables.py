"""Compares operations on the repository (`repository_tables.py`) with Triton's recorded answers in `golden_repository.json`.
[`DIFFERENCES`] has the reasons for intended differences. With the peer, the golden file is renewed and compared."""

import json
import re

import pytest

from harness.peers import missing
from harness.server import Server
from harness.waiting import DEADLINE_S, eventually
from repository import repositories
from repository.repositories import MODES, World, options_of, prepare, started
from repository.repository_tables import STARTED

WHY_NOT = missing("triton", "triton")
NAME = "must not contain path traversal characters"
EMPTY = "Model name cannot be empty. Please enter a valid name to deploy."


class Any:
    """An intended row: this server has `row`, whatever Triton has. A text needs to be a part of the answer only."""

    def __init__(self, *row):
        self.row = row

    def fits(self, ours) -> bool:
        return len(self.row) == len(ours) and all(
            mine in theirs if isinstance(mine, str) and isinstance(theirs, str) else mine == theirs
            for mine, theirs in zip(self.row, ours)
        )


def entry(name, version, state, reason=None) -> dict:
    """Returns an entry of the index."""
    return {"name": name, "version": version, "state": state} | ({"reason": reason} if reason else {})


def versions(name, **states) -> list:
    """Returns entries of the index: READY, unloaded, or a reason."""
    whole = lambda state: ("READY", None) if state == "READY" else ("UNAVAILABLE", state)  # noqa: E731
    return [entry(name, version[1:], *whole(state)) for version, state in states.items()]


TOO_LARGE = "ensemble {} allows maximum batch size 8, but it contains model en_c which only allows maximum batch size to be 3"
INSIDE = "must be a path in the model's directory such as 1/model.onnx"
UNREADY = Any(400, "Invalid value for 'ready': expected a boolean")
NOT_BOOL = Any(500, "attempt to access JSON non-boolean as boolean")

def unknown(name) -> dict:
    """Returns the answers about an unknown model: 400 here, as in Triton's specification."""
    text = f"Request for unknown model: '{name}' is not found"
    over_http = {f"GET {what}": [400, text] for what in ("", "/config")}
    over_grpc = {f"Model{what}": ["INVALID_ARGUMENT", text] for what in ("Infer", "Metadata", "Config")}
    return about(name) | {"infer": [400, text]} | over_http | over_grpc


def never_served(name) -> dict:
    """Returns the answers about a model that failed to load at start; this server has it in the index."""
    text = f"Request for unknown model: '{name}' has no available versions"
    over_http = {f"GET {what}": [404, text] for what in ("", "/config")}
    over_grpc = {f"Model{what}": ["NOT_FOUND", text] for what in ("Infer", "Metadata", "Config")}
    return about(name) | {"infer": [404, text]} | over_http | over_grpc


def about(name) -> dict:
    """Returns the answers that do not depend on the reason why a model does not serve."""
    text = f"requested model '{name}' is not available"
    return {
        "GET /stats": [400, text], "GET /ready": [400, "Model version not ready"],
        "ModelStatistics": ["INVALID_ARGUMENT", text],
    }  # fmt: skip


DIFFERENCES = {
    "names": {
        # Newer Tritons refuse these names with the same texts as this server.
        **{f"load {name} {{}}": Any(400, EMPTY) for name in ["%20", "%20%20"]},
        **{
            f"load {name} {{}}": Any(400, NAME)
            for name in ["a%2Fb", "..%2Fx", "..", "%2E%2E", "%20..%20", ".", "a%5Cb"]
        },
        ("load " + "n" * 300)[:300]: Any(400, "must be at most 255 bytes"),
        **{f"grpc_load {name} {{}}": Any("INVALID_ARGUMENT", EMPTY) for name in ["", " ", "\t\n"]},
        **{
            f"grpc_load {name} {{}}": Any("INVALID_ARGUMENT", NAME)
            for name in ["a/b", "../x", "..", " .. ", ".", "a\\b", "/", "a/"]
        },
    },
    # An unknown model is 400 here, as in Triton's specification.
    "life": {3: Any(400, "Request for unknown model: 'life' is not found")},
    "after an unload": {0: unknown("un"), 1: unknown("un"), 2: unknown("un"), 30: unknown("un_bad")},
    "two repositories": {23: unknown("new")},
    # This server lists a model that failed to load at start, with the reason in the index.
    "two at start": {
        0: [
            {"name": "both", "state": "UNAVAILABLE", "reason": "model appears in two or more repositories"},
            entry("one", "1", "READY"),
            entry("over", "1", "UNAVAILABLE", "ensemble over contains models that are not available or ambiguous: both"),
        ],
        2: never_served("both"),
        3: never_served("over"),
    },
    "parameters": {
        "post v2/repository/models/par/load []": Any(500, "failed to parse the request JSON buffer"),
        # The invalid request did not load the model.
        21: [{"name": "par"}],
        "post v2/repository/models/par/unload not json": Any(500, "failed to parse the request JSON buffer"),
        'post v2/repository/models/par/unload {"parameters":[]}': Any(500, "attempt to get members for non-object"),
        'unload par {"unload_dependents": "yes"}': NOT_BOOL,
        'unload par {"unload_dependents": 1}': NOT_BOOL,
        **{f'post v2/repository/index {{"ready":{value}}}': UNREADY for value in ("1", '"true"', "null")},
    },
    # The configuration of a load applies until the model is unloaded, also in newer Tritons.
    "config override": {5: [200, 16], 13: [200, 4], 17: [200, {"1": 1}]},
    "file override": {
        8: versions("fo", v1="unloaded", v2="READY", v3="unloaded"),
        9: [200, 5],
        # Triton's index has only models in a repository.
        17: versions("fo_new", v1="READY"),
    },
    # Triton converts these names to file names if it can; the longest names crash it.
    "escapes": {
        **{at: Any(500, INSIDE) for at in (8, 9, 10, 11)},
        12: Any(400, "the value of 'file:1/model.py' is not base64"),
    },
    # A serving model is in the index, even if its directory is removed.
    "a reload that fails": {16: versions("bad", v1="READY"), 18: versions("bad", v1="READY"), 27: [{"name": "bare"}]},
    # The index has the reason why an ensemble does not serve.
    "ensembles": {
        29: versions("en_bc", v1=TOO_LARGE.format("en_bc")) + versions("en_c", v1="READY")
        + versions("en_top", v1=TOO_LARGE.format("en_top")),
        32: versions("en_a", v1="READY") + versions("en_ab", v1="unloaded") + versions("en_b", v1="READY")
        + versions("en_bc", v1=TOO_LARGE.format("en_bc")) + versions("en_c", v1="READY")
        + versions("en_top", v1=TOO_LARGE.format("en_top")),
    },
    "mode poll": {10: [{"name": "half", "state": "UNAVAILABLE", "reason": "must specify at least one 'input' for 'half': the "
                        "configuration has none and the model file gives none"}]},
}  # fmt: skip


def normal(row):
    """Replaces parts that may differ: texts of backends, reasons that only this server reports, line ends."""
    if isinstance(row, list):
        return [normal(value) for value in row]
    if isinstance(row, dict):
        return {key: normal(value) for key, value in row.items()}
    if not isinstance(row, str):
        return row
    row = re.sub(r"(failed to poll from model repository): .*", r"\1", row, flags=re.S)
    row = re.sub(r"(version \d+ is at UNAVAILABLE state): .*", r"\1", row, flags=re.S)
    row = re.sub(r"(at least one version must be available under the version policy of model '\w+').*", r"\1", row, flags=re.S)
    row = re.sub(r"^(Internal: ValueError|.*parameter 'function' is).*", "BACKEND'S REASON", row, flags=re.S)
    row = re.sub(r"^(failed to parse the request JSON buffer).*", r"\1", row)
    row = re.sub(r"^.*(attempt to access JSON non-string as string)$", r"\1", row)
    row = re.sub(r"^(explicit model load / unload is not allowed if polling is enabled); the model control mode is .*", r"\1", row)
    row = re.sub(r"(contains models that are not available or ambiguous: [^:\n]+): .*", r"\1", row, flags=re.S)
    row = re.sub(r"^(unexpected error on creating Triton parameter).*", r"\1", row)
    return row.rstrip("\n")


def ours(folder, mode: str, name: str) -> list:
    """Returns this server's rows of a scenario."""
    scenarios, _ = MODES[mode]
    (folder / "models").mkdir()
    server = Server(folder, [folder / "models"], options_of(mode, folder / "models"))
    world = World(server, folder / "models", False)
    prepare(world, mode)
    with server:
        return world.scenario(scenarios[name])


@pytest.mark.slow
@pytest.mark.parametrize("mode, name", [(mode, name) for mode, (scenarios, _) in MODES.items() for name in scenarios])
def test_operations(tmp_path, mode, name):
    """Status, text, index and statistics after each step."""
    golden = json.loads(repositories.GOLDEN.read_text())[name]
    rows = ours(tmp_path, mode, name)
    assert [label for label, _ in rows] == [label for label, _ in golden]
    different, wrong = DIFFERENCES.get(name, {}), []
    for at, ((label, mine), (_, theirs)) in enumerate(zip(rows, golden)):
        expected = different.get(label, different.get(at))
        if expected is None:
            fits = normal(mine) == normal(theirs)
        else:
            fits = expected.fits(mine) if isinstance(expected, Any) else expected in (mine, normal(mine))
        if not fits:
            wrong.append(f"{at} {label[:100]}\n   ours   {mine}\n   wanted {expected.row if isinstance(expected, Any) else expected or theirs}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", STARTED)
def test_command_lines(tmp_path, name):
    """The models that are loaded at start, or the refusal to start."""
    expected = json.loads(repositories.GOLDEN.read_text())["started"][name]
    (tmp_path / "models").mkdir()
    server = Server(tmp_path, [tmp_path / "models"], STARTED[name])
    world = World(server, tmp_path / "models", False)
    started(world)
    server.launch()
    try:
        if expected[0] == "ended":
            assert server.process.wait(DEADLINE_S) != 0
            return
        eventually("the server serves", lambda: serves(server))
        assert world.index(["one", "two", "both", "nowhere"], False) == expected[1]
    finally:
        if server.process.poll() is None:
            server.stop()


def serves(server) -> bool:
    """Returns whether the server answers and has loaded the models of its start."""
    try:
        return server.get("/v2/health/ready")[0] == 200
    except OSError:
        return False


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("mode, name", [("explicit", "life"), ("explicit", "ensembles"), ("none", "mode none")])
def test_live_triton_answers_as_recorded(tmp_path, mode, name):
    """The recorded answers are still those of a real Triton."""
    rows = {}
    repositories.ask_triton(tmp_path, [name], rows, save=lambda _: None)
    golden = json.loads(repositories.GOLDEN.read_text())[name]
    assert [[label, normal(row)] for label, row in json.loads(json.dumps(rows[name]))] == [
        [label, normal(row)] for label, row in golden
    ]
