#!/usr/bin/env python3
"""The interface of this interpreter's package `ts` for handlers: modules, names, parameters and defaults, as JSON.

python -m torchserve.surface show [pharos]     for this interpreter's `ts`, or for the package of the worker
python -m torchserve.surface record            runs the real TorchServe and writes golden_torchserve_surface.json
"""

import enum
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

GOLDEN = Path(__file__).resolve().parent / "golden_torchserve_surface.json"
MODULES = (
    "ts",
    "ts.context",
    "ts.service",
    "ts.version",
    "ts.handler_utils.timer",
    "ts.handler_utils.utils",
    "ts.handler_utils.micro_batching",
    "ts.metrics.caching_metric",
    "ts.metrics.dimension",
    "ts.metrics.metric",
    "ts.metrics.metric_cache_errors",
    "ts.metrics.metric_cache_yaml_impl",
    "ts.metrics.metric_encoder",
    "ts.metrics.metric_type_enum",
    "ts.metrics.metrics_store",
    "ts.metrics.process_memory_metric",
    "ts.metrics.unit",
    "ts.model_service.model_service",
    "ts.protocol.otf_message_handler",
    "ts.torch_handler.base_handler",
    "ts.torch_handler.densenet_handler",
    "ts.torch_handler.image_classifier",
    "ts.torch_handler.image_segmenter",
    "ts.torch_handler.object_detector",
    "ts.torch_handler.text_classifier",
    "ts.torch_handler.text_handler",
    "ts.torch_handler.unit_tests.test_utils.mock_context",
    "ts.torch_handler.unit_tests.test_utils.model_dir",
    "ts.torch_handler.vision_handler",
    "ts.torch_handler.request_envelope.base",
    "ts.torch_handler.request_envelope.body",
    "ts.torch_handler.request_envelope.json",
    "ts.torch_handler.request_envelope.kserve",
    "ts.torch_handler.request_envelope.kservev2",
    "ts.utils.hf_utils",
    "ts.utils.timeit_decorator",
    "ts.utils.util",
)


def parameters(function) -> list:
    """Returns each parameter with the text of its default."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return [stars.get(p.kind, "") + p.name + ("" if p.default is p.empty else f"={shown(p.default)}") for p in found]


def shown(value) -> str:
    """Returns a default as a text that does not depend on the package."""
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def of_class(found) -> dict:
    """Returns the public methods of a class and its constructor, properties, and members of an enumeration."""
    if issubclass(found, enum.Enum):
        return {"members": {item.name: str(item.value) for item in found}}
    methods, properties = {}, []
    for name in dir(found):
        if name.startswith("_") and name != "__init__":
            continue
        value = inspect.getattr_static(found, name)
        if isinstance(value, property):
            properties.append(name)
        elif callable(getattr(found, name)) and inspect.isroutine(value) and value is not object.__init__:
            try:
                methods[name] = parameters(getattr(found, name))
            except ValueError:
                continue
    bases = [base.__name__ for base in found.__mro__[1:] if base is not object]
    return {"bases": bases, "methods": methods, "properties": sorted(properties)}


def of_module(name: str, only_defined_here: bool):
    """Returns the content of a module, or only what it defines itself, or the reason why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return f"cannot be imported: {error.name or error}"
    found = {}
    for key, value in vars(module).items():
        if key.startswith("_") or (only_defined_here and getattr(value, "__module__", name) != name):
            continue
        if inspect.isclass(value) and str(value.__module__).startswith("ts."):
            found[key] = of_class(value)
        elif inspect.isroutine(value):
            found[key] = {"function": parameters(value)}
    return found


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces packages that TorchServe's handlers import and that are not installed: any attribute exists."""

    def find_spec(self, name, path, target=None):
        """Finds only these packages."""
        known = name.split(".")[0] in ("captum", "torchvision", "torchtext", "transformers", "PIL")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        """Returns an object that has any attribute."""
        return mock.MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module):
        """Does nothing, because the module has no code."""


def show(kind: str) -> dict:
    """Returns all modules."""
    sys.meta_path.append(Absent())
    if kind == "pharos":
        from pharos_worker import torchserve

        torchserve.activate()
    return {name: of_module(name, kind != "pharos") for name in MODULES}


def asked(python: str, *arguments, **environment) -> dict:
    """Returns the output of another interpreter."""
    command = [python, str(Path(__file__).resolve()), "show", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Runs the program."""
    if sys.argv[1:2] == ["show"]:
        print(json.dumps(show("".join(sys.argv[2:]))))
        return 0
    if sys.argv[1:] != ["record"]:
        print(__doc__)
        return 2
    from torchserve.peer import HOME, PEER_PYTHON, torch_folder

    found = asked(str(PEER_PYTHON), PYTHONPATH=torch_folder() or str(HOME / "stub"))
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
