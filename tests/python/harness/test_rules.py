"""House rules of the client tests."""

import ast
import functools
from pathlib import Path

import pytest

from harness.waiting import DEADLINE_S

TESTS = Path(__file__).resolve().parent.parent
MODELS = {"triton_models", "standin", "python_models", "archives", "handlers"}
"""Folders of code that servers run: a model may sleep to simulate a long execution."""
FILES = sorted(path for path in TESTS.rglob("*.py") if not MODELS & set(path.relative_to(TESTS).parts))
SLEEPS = ("sleep", "time.sleep", "asyncio.sleep")
REASON = 12
"""The minimum length of the reason that `run_for` receives."""


@functools.cache
def nodes(path: Path) -> list:
    """Returns the nodes of the syntax tree of a module."""
    return list(ast.walk(ast.parse(path.read_text())))


def called(node) -> str:
    """Returns the name of the function that a node calls, such as `time.sleep`; empty for other nodes."""
    function = getattr(node, "func", None)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def imported(node) -> list:
    """Returns the modules that a statement imports, `from package import module` included."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(name.name for name in node.names)]
    return []


def breaches(rule) -> list:
    """Returns each node that breaks `rule`, with its place. `rule(path, node)` is called for each node of each module."""
    found = []
    for path in FILES:
        found += [f"{path.relative_to(TESTS)}:{node.lineno}: {ast.unparse(node)}" for node in nodes(path) if rule(path, node)]
    return found


def test_no_module_imports_a_test_module():
    """Code that several tests share is in a module of their room, or in the harness."""
    assert breaches(lambda _, node: any(name.rpartition(".")[2].startswith("test_") for name in imported(node))) == []


def test_only_the_harness_sleeps():
    """Tests wait for conditions with `eventually`, and for intervals with the other functions of `harness.waiting`."""

    def sleeps(path, node) -> bool:
        by_name = isinstance(node, ast.ImportFrom) and "sleep" in imported(node)
        return path != TESTS / "harness/waiting.py" and (by_name or called(node) in SLEEPS)

    assert breaches(sleeps) == [], "wait with `eventually`, or see harness/waiting.py"


def test_time_that_passes_has_a_reason():
    """The first argument of `run_for` names the interval."""

    def without(_, node) -> bool:
        reason = node.args[0] if called(node) == "run_for" else None
        return reason is not None and not (isinstance(reason, ast.Constant) and len(reason.value) >= REASON)

    assert breaches(without) == []


def test_no_deadline_is_shorter_than_the_default():
    """On a loaded machine a short deadline passes although nothing is wrong."""

    def short(_, node) -> bool:
        given = [word.value for word in getattr(node, "keywords", []) if word.arg == "deadline_s"]
        return any(isinstance(value, ast.Constant) and value.value <= DEADLINE_S for value in given)

    assert breaches(short) == [], "omit `deadline_s`, or make the delay longer than the deadline"


def test_the_condition_follows_its_name():
    """`eventually` and its relatives take the deadline last, by name."""

    def misplaced(_, node) -> bool:
        waits = called(node).rpartition(".")[2] in ("eventually", "eventually_async", "settled") and len(node.args) > 1
        return waits and isinstance(node.args[1], ast.Constant)

    assert breaches(misplaced) == []


@pytest.mark.smoke
def test_every_room_is_a_package():
    """Modules are imported by the name of their room."""
    assert [room.name for room in TESTS.iterdir() if list(room.glob("*.py")) and not (room / "__init__.py").exists()] == []
