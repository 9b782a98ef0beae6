"""House rules of the client tests."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
MODELS = {"triton_models", "standin", "python_models", "archives", "handlers"}
"""Folders of code that servers run: a model may sleep, since that is how long it takes."""
FILES = sorted(path for path in TESTS.rglob("*.py") if not MODELS & set(path.relative_to(TESTS).parts))
REASON = 12
"""The least length of a sentence that says why time passes."""


def each_file(check):
    """Runs a test for every module of the tests."""
    return pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))(check)


def called(node) -> str:
    """`time.sleep` for a call of it; empty for other nodes."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def imported(node) -> list:
    """The modules that a statement imports, `from package import module` included."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(name.name for name in node.names)]
    return []


@each_file
def test_no_module_imports_a_test_module(path):
    """What several tests need is in a module of its room, or in the harness."""
    names = [name for node in ast.walk(ast.parse(path.read_text())) for name in imported(node)]
    assert [name for name in names if name.rpartition(".")[2].startswith("test_")] == []


@each_file
def test_only_the_harness_sleeps(path):
    """`harness.waiting` has a condition with a deadline for what comes, and names for time that is the subject."""
    if path == TESTS / "harness/waiting.py":
        return
    tree = ast.parse(path.read_text())
    sleeps = [node.lineno for node in ast.walk(tree) if called(node) in ("time.sleep", "asyncio.sleep", "sleep")]
    names = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "sleep" in imported(node)]
    assert sleeps + names == [], f"{path.relative_to(TESTS)}: wait with `eventually`, or see harness/waiting.py"


@each_file
def test_time_that_passes_has_a_reason(path):
    """The first argument of `run_for` names the interval."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if called(node) == "run_for"]
    reasons = [node.args[0].value if isinstance(node.args[0], ast.Constant) else "" for node in calls]
    assert all(len(reason) >= REASON for reason in reasons), reasons


def test_every_room_is_a_package():
    """Modules are imported by the name of their room."""
    assert [room.name for room in TESTS.iterdir() if list(room.glob("*.py")) and not (room / "__init__.py").exists()] == []
