"""The reference of `pb_utils` and of the arguments of `initialize` has what the module has, and nothing else."""

import enum
import inspect
import json
import re

import pytest

from harness.server import ROOT

pb_utils = pytest.importorskip("triton_python_backend_utils")

REFERENCE = (ROOT / "docs/src/reference/pb_utils.md").read_text()
CLASSES = [
    "Tensor", "InferenceRequest", "InferenceResponse", "InferenceResponseSender", "InferenceTrace", "PreferredMemory", "Logger",
    "MetricFamily", "Metric", "ModelConfig",
]  # fmt: skip
"""The classes with a section of their name. `TritonError` is in the section of errors."""


def section(title: str) -> list:
    """Returns the code in the first cells of a section's rows: members, with their parameters."""
    text = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", REFERENCE, re.M | re.S)
    assert text, f"the reference has no section {title}"
    rows = [re.split(r"(?<!\\) \|", line)[0] for line in text[1].splitlines() if line.startswith("| `")]
    return [member for row in rows for member in re.findall(r"`([^`]+)`", row)]


def public(thing) -> set:
    """Returns the public names of a class."""
    return {name for name in dir(thing) if not name.startswith("_")}


def described(members: list, name: str) -> dict:
    """Returns the parameters of each member in the reference; None without parentheses. Calls of the class itself are left out."""
    found = {}
    for member in members:
        called, parenthesis, parameters = member.partition("(")
        if called != name:
            found[called] = re.findall(r"(\w+)(?==|,|\)|$)", re.sub(r'=("[^"]*"|[^,)]*)', "", parameters)) if parenthesis else None
    return found


def parameters(function) -> list:
    """Returns the names of a function's parameters."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


def differences(thing, members: dict) -> list:
    """Returns the members whose kind or parameters differ from the reference."""
    return [
        (name, expected)
        for name, expected in members.items()
        if (parameters(getattr(thing, name)) if inspect.isroutine(getattr(thing, name)) else None) != expected
    ]


@pytest.mark.parametrize("name", [*CLASSES, "TritonError"])
def test_every_member_of_a_class_is_listed(name):
    """The reference has the members of the class and their parameters. Inherited members of exceptions and enums do not count."""
    thing, members = getattr(pb_utils, name), section("Errors" if name == "TritonError" else name)
    found = described(members, name)
    assert found.keys() == public(thing)
    assert differences(thing, found) == []


def test_every_name_of_the_module_is_listed():
    """The reference has the functions, classes and constants of the module."""
    functions = described(section("Functions"), "")
    assert differences(pb_utils, functions) == []
    modules = {"np", "struct"}
    named = {*functions, *section("Constants"), *CLASSES, "TritonError", "TritonModelException", "LogLevel", "MetricKind"}
    assert named == public(pb_utils) - modules
    for kinds in (pb_utils.LogLevel, pb_utils.MetricKind):
        assert issubclass(kinds, enum.IntEnum) and f"`pb_utils.{kinds.__name__}`" in REFERENCE


def test_every_method_of_a_model_is_listed():
    """The reference has the methods that the worker calls."""
    driver = (ROOT / "worker/python/python/pharos_worker/driver.py").read_text()
    completion = (ROOT / "worker/python/python/pharos_worker/autocomplete.py").read_text()
    for method in (member.partition("(")[0] for member in section("The model")):
        assert re.search(rf"\b{method}\b", driver + completion), method
    called = set(re.findall(r"instance\.(\w+)|instance, \"(\w+)\"", driver))
    assert {name for names in called for name in names if name} <= {member.partition("(")[0] for member in section("The model")}


def test_every_argument_of_initialize_is_listed():
    """The guide has the keys of `args`."""
    from pharos_worker import driver

    described = {"config": "{}", "kind": "CPU", "instance": "m_0", "directory": "/models/m/1", "version": "1", "name": "m"}
    given = driver.arguments(described)
    guide = (ROOT / "docs/src/guides/python-models.md").read_text()
    table = re.search(r"^## Arguments of initialize$(.*?)^## ", guide, re.M | re.S)[1]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == given.keys()
    assert all(isinstance(value, str) for value in given.values()) and json.loads(given["model_config"]) == {}
    assert given["model_repository"] == "/models/m", "the directory of the model"
