#!/usr/bin/env python3
"""The exceptions that functions of the package `ts` raise for invalid calls, as JSON: the name of the exception and its text.

python -m torchserve.exceptions show [pharos]     for this interpreter's `ts`, or for the package of the worker
python -m torchserve.exceptions record            runs the real TorchServe and writes golden_torchserve_exceptions.json
"""

import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent / "golden_torchserve_exceptions.json"

FILES = {
    "empty.yaml": "mode: log\n",
    "none.yaml": "model_metrics:\n",
    "type.yaml": "model_metrics:\n  odd:\n  - name: a\n    unit: ms\n    dimensions: []\n",
    "unit.yaml": "model_metrics:\n  counter:\n  - name: a\n    dimensions: []\n",
    "good.yaml": "model_metrics:\n  counter:\n  - name: a\n    unit: ms\n    dimensions: [Level]\n",
    "list.json": "[1]",
    "number.json": '{"0": 1}',
    "two.py": "class A:\n    def handle(self, data, context): pass\n    def initialize(self, context): pass\n"
    "class B(A): pass\n",
    "lacks.py": "class A:\n    def initialize(self, context): pass\n",
}


def module(name: str):
    """Imports a module of `ts`."""
    return importlib.import_module(f"ts.{name}")


def cache(folder: str, file: str = "good.yaml"):
    """Returns a metrics cache that has read its definition."""
    made = module("metrics.metric_cache_yaml_impl").MetricsCacheYamlImpl(f"{folder}/{file}")
    made.initialize_cache()
    made.set_request_ids("id")
    made.model_name = "m"
    return made


def store():
    """Returns a metrics store of the older interface."""
    return module("metrics.metrics_store").MetricsStore({0: "id"}, "m")


def load(folder: str, handler: str):
    """Loads a handler."""
    return module("model_loader").TsModelLoader().load("m", folder, handler, None, 1)


def calls(folder: str) -> dict:
    """Returns the invalid calls by name."""
    return {
        "class: no name": lambda: module("handler_utils.utils").import_class(""),
        "class: no module": lambda: module("handler_utils.utils").import_class("Bare"),
        "class: absent": lambda: module("handler_utils.utils").import_class("json.Absent"),
        "cache: no file": lambda: cache("/nowhere"),
        "cache: no section": lambda: cache(folder, "empty.yaml"),
        "cache: an empty section": lambda: cache(folder, "none.yaml"),
        "cache: a wrong type": lambda: cache(folder, "type.yaml"),
        "cache: no unit": lambda: cache(folder, "unit.yaml"),
        "metric: absent": lambda: cache(folder).get_metric("absent"),
        "metric: a name that is not a string": lambda: cache(folder).get_metric(1),
        "metric: a type that is not an enum": lambda: cache(folder).get_metric("a", "counter"),
        "metric: a unit that is not a string": lambda: cache(folder).add_metric_to_cache("a", 1),
        "metric: dimensions that are not a list": lambda: cache(folder).add_metric_to_cache("a", "ms", dimension_names="x"),
        "metric: unit of a time": lambda: cache(folder).add_time("a", 1, unit="h"),
        "metric: unit of a size": lambda: cache(folder).add_size("a", 1, unit="h"),
        "store: unit of a time": lambda: store().add_time("a", 1, unit="h"),
        "store: unit of a size": lambda: store().add_size("a", 1, unit="h"),
        "store: dimensions that are not a list": lambda: store().add_counter("a", 1, dimensions="x"),
        "labels: a list": lambda: module("utils.util").load_label_mapping(f"{folder}/list.json"),
        "labels: a number": lambda: module("utils.util").load_label_mapping(f"{folder}/number.json"),
        "classes: not a list": lambda: module("utils.util").map_class_to_label((1, 2)),
        "classes: not a mapping": lambda: module("utils.util").map_class_to_label([[1]], mapping=[1]),
        "handler: two classes": lambda: load(folder, "two"),
        "handler: no handle": lambda: load(folder, "lacks"),
        "prediction: refused": lambda: raised(module("utils.util").PredictionException("no")),
        "prediction: refused with a code": lambda: raised(module("utils.util").PredictionException("no", 513)),
    }


def raised(error: Exception):
    """Raises an exception."""
    raise error


def show() -> dict:
    """Returns the exception of each call."""
    logging.disable(logging.CRITICAL)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in FILES.items():
            (Path(folder) / name).write_text(content)
        sys.path.insert(0, folder)
        for name, call in calls(folder).items():
            try:
                found[name] = f"no exception: {type(call()).__name__}"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
    return found


def asked(python: str, *arguments, **environment) -> dict:
    """Returns the output of another interpreter."""
    command = [python, str(Path(__file__).resolve()), "show", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_torchserve() -> dict:
    """Returns the exceptions of the real TorchServe."""
    from torchserve.peer import HOME, PEER_PYTHON, torch_folder

    return asked(str(PEER_PYTHON), PYTHONPATH=torch_folder() or str(HOME / "stub"))


def main() -> int:
    """Runs the program."""
    if sys.argv[1:2] == ["show"]:
        if sys.argv[2:] == ["pharos"]:
            from pharos_worker import torchserve

            torchserve.activate()
        print(json.dumps(show()))
        return 0
    if sys.argv[1:] != ["record"]:
        print(__doc__)
        return 2
    GOLDEN.write_text(json.dumps(of_torchserve(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
