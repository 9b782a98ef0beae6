"""The worker's package `ts` has the names, parameters and defaults that handlers import from TorchServe's, as recorded in
`golden_torchserve_surface.json`."""

import fnmatch
import json
import os
import subprocess
import sys

import pytest

from torchserve.surface import GOLDEN, asked

PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
HAS_WORKER = subprocess.run([PYTHON, "-c", "import pharos_worker"], capture_output=True).returncode == 0

LEFT_OUT = {
    "ts.protocol.otf_message_handler *": "TorchServe's protocol between server and worker, which this server does not use; only "
    "`send_intermediate_predict_response` is called by handlers",
    "ts.service Service*": "the worker's internal loop",
    "ts.handler_utils.micro_batching execute_call": "the internal function of a micro-batching thread",
    "ts.handler_utils.timer timed": "a decorator whose parameter is never passed by name",
    "ts.metrics.caching_metric * emit_metrics": "called by `add_or_update` to print a line; nothing is printed here",
    "ts.context Context metrics": "a plain attribute here, tested by the rows of `context`",
    "ts.context Context request_processor": "the same",
}
"""Names that are missing on purpose, and the reason: patterns of `MODULE NAME`."""

KEPT = {"ts.protocol.otf_message_handler send_intermediate_predict_response"}


@pytest.fixture(scope="module")
def ours():
    """The interface of this server's package."""
    if not HAS_WORKER:
        pytest.skip(f"{PYTHON} has no package pharos-worker")
    return asked(PYTHON, "pharos")


@pytest.fixture(scope="module")
def theirs():
    """The interface of TorchServe's package."""
    return json.loads(GOLDEN.read_text())


def left_out(name: str) -> bool:
    """Returns whether a name is missing on purpose."""
    return name not in KEPT and any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_OUT)


def takes(mine: list, other: list) -> bool:
    """Returns whether every valid call of TorchServe's function is valid: the same parameters at the same places with the same
    defaults (a list that TorchServe shares between calls may be None or a tuple), and others only after them and with
    defaults. TorchServe's own decorators hide the parameters of a function."""
    default = lambda text: text.partition("=")[2].replace("[]", "None").replace("()", "None")  # noqa: E731
    name = lambda text: text.partition("=")[0]  # noqa: E731
    if any(text.startswith("*") for text in mine + other):
        return True
    same = all(name(m) == name(o) and default(m) == default(o) for m, o in zip(mine, other))
    return same and len(mine) >= len(other) and all("=" in text for text in mine[len(other) :])


def differences(mine, other, where: str) -> list:
    """Returns the missing or different parts of a module, a class or a function."""
    if isinstance(other, str):
        return []
    if mine is None or isinstance(mine, str):
        return [f"{where}: {mine}"]
    if isinstance(other, list):
        return [] if takes(mine, other) else [f"{where}{tuple(mine)}, TorchServe {tuple(other)}"]
    found = []
    for key, value in other.items():
        name = f"{where} {key}"
        if key == "properties":
            missing = set(value) - set(mine.get(key, [])) - set(mine.get("methods", {}))
            found += [f"{where}: no {n}" for n in sorted(missing) if not left_out(f"{where} {n}")]
        elif key == "bases":
            found += [
                f"{where} is no {base}"
                for base in value
                if base not in mine.get(key, []) and not base.endswith("Abstract")
            ]
        elif key == "members":
            found += [
                f"{where}: {n} is {mine.get(key, {}).get(n)}" for n, v in value.items() if mine.get(key, {}).get(n) != v
            ]
        elif not left_out(name):
            found += differences(mine.get(key), value, name)
    return found


def test_what_handlers_import_is_there(ours, theirs):
    """Every module, class, function and method of TorchServe's that handlers may use."""
    found = [text for name in theirs for text in differences(ours.get(name), theirs[name], name)]
    assert found == []


def test_torch_is_not_imported_by_the_package():
    """Handlers without torch run where torch is not installed, and do not load it where it is."""
    if not HAS_WORKER:
        pytest.skip(f"{PYTHON} has no package pharos-worker")
    program = (
        "from pharos_worker import torchserve; torchserve.activate()\n"
        "import sys, ts.context, ts.metrics.metrics_store, ts.service, ts.utils.util, ts.handler_utils.timer\n"
        "import ts.torch_handler.base_handler, ts.handler_utils.utils, ts.protocol.otf_message_handler\n"
        "assert 'torch' not in sys.modules, 'torch is imported'"
    )
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_comparison_sees_differences(theirs):
    """The comparison can fail: a missing module, class, method, another parameter, another default."""
    name = "ts.metrics.metrics_store"
    assert differences(theirs[name], theirs[name], name) == []
    assert differences(None, theirs[name], name) == [f"{name}: None"]
    methods = theirs[name]["MetricsStore"]["methods"]
    for changed in (
        {key: value for key, value in methods.items() if key != "add_time"},
        methods | {"add_time": ["self", "name"]},
        methods | {"add_time": [text.replace("ms", "s") for text in methods["add_time"]]},
        methods | {"add_time": [*methods["add_time"], "more"]},
    ):
        mine = {"MetricsStore": theirs[name]["MetricsStore"] | {"methods": changed}}
        assert len(differences(mine, theirs[name], name)) == 1, changed
