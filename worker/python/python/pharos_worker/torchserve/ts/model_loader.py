"""Finds a handler's entry point and initializes the handler."""

import functools
import importlib
import importlib.util
import json
import os
import uuid

from ts.service import Service
from ts.utils.util import list_classes_from_module

ENVELOPES = ("body", "json", "kserve", "kservev2")


class ModelLoaderFactory:
    """Returns the only loader."""

    @staticmethod
    def get_model_loader():
        """Returns the loader."""
        return TsModelLoader()


class TsModelLoader:
    """Loads models from directories with the files of an archive."""

    def load(
        self,
        model_name,
        model_dir,
        handler=None,
        gpu_id=None,
        batch_size=None,
        envelope=None,
        limit_max_image_pixels=True,
        metrics_cache=None,
    ):
        """Loads a handler: a module, `module:function`, or a module of `ts.torch_handler`. Returns an initialized service."""
        if metrics_cache is not None:
            # Samples recorded during loading belong to no request.
            metrics_cache.set_request_ids(str(uuid.uuid4()))
        manifest = read_manifest(model_dir)
        handler = handler or ((manifest or {}).get("model") or {}).get("handler")
        if not handler:
            raise ValueError(f"model '{model_name}' names no handler, and neither does {model_dir}/MAR-INF/MANIFEST.json")
        entry_point, initialize = entry_points(handler)
        if envelope:
            entry_point = envelope_class(envelope)(entry_point).handle
        places = (model_name, model_dir, manifest or default_manifest(model_name, handler))
        service = Service(*places, entry_point, gpu_id, batch_size, limit_max_image_pixels, metrics_cache)
        initialize(service.context)
        return service


def read_manifest(model_dir):
    """Returns the manifest in a model's directory; None if it does not exist."""
    path = os.path.join(model_dir, "MAR-INF", "MANIFEST.json")
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def default_manifest(model_name, handler):
    """Returns the manifest for a directory without one."""
    return {"runtime": "python", "model": {"modelName": model_name, "modelVersion": "1.0", "handler": handler}}


def entry_points(handler):
    """Returns the function for each batch, and the function that is called once with the context."""
    path, _, function = handler.partition(":")
    module = handler_module(path)
    entry = getattr(module, function or "handle", None)
    if entry is not None:
        return entry, functools.partial(entry, None)
    if function:
        raise ValueError(f"the handler '{handler}' names a function that {module.__file__} does not have")
    classes = list_classes_from_module(module)
    if len(classes) > 1:
        # Other classes may be in the module, such as the model's network.
        classes = [member for member in classes if hasattr(member, "handle") and hasattr(member, "initialize")]
    if len(classes) != 1:
        names = ", ".join(member.__name__ for member in classes) or "none"
        raise ValueError(
            f"Expected only one class in custom service code or a function entry point; {module.__file__} has: {names}"
        )
    service = classes[0]()
    if not hasattr(service, "handle"):
        raise ValueError(f"Expect handle method in class {classes[0].__name__} of {module.__file__}")
    return _handle_of(service), service.initialize


def _handle_of(service):
    """Returns a function that looks up `handle` on each call: handlers may replace it, as for micro-batching."""
    import inspect

    if inspect.iscoroutinefunction(service.handle):
        return service.handle
    return lambda data, context: service.handle(data, context)


def handler_module(path):
    """Imports the module of a handler: the model's own, else one of `ts.torch_handler`."""
    name = path.rsplit("/", 1)[-1].removesuffix(".py")
    if _is_there(name):
        return importlib.import_module(name)
    if _is_there(f"ts.torch_handler.{name}"):
        return importlib.import_module(f"ts.torch_handler.{name}")
    raise ValueError(
        f"Unable to load module {path}, make sure it is added to python path: the model has no '{name}.py', and "
        f"ts.torch_handler has no such handler"
    )


def _is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def envelope_class(name):
    """Returns the class of an envelope."""
    if name not in ENVELOPES:
        raise ValueError(f"the service envelope is '{name}'; allowed are {', '.join(ENVELOPES)}")
    module = importlib.import_module(f"ts.torch_handler.request_envelope.{name}")
    return list_classes_from_module(module)[0]
