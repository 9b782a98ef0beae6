"""Loads a model with Triton's Python interface, runs the event loop of `async def execute`, and detaches forked processes from
the server."""

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import sys
import threading

from pharos_worker import _native

# The runners of backends without a model.py: modules with a class of the same interface.
RUNNERS = {
    "onnxruntime_genai": "pharos_worker.runners.onnxruntime_genai",
    "pytorch": "pharos_worker.runners.pytorch",
    "sklearn": "pharos_worker.runners.sklearn",
    "torchserve": "pharos_worker.runners.torchserve",
    "vllm": "pharos_worker.runners.vllm",
    "xgboost": "pharos_worker.runners.xgboost",
}


class Loop:
    """An event loop on a separate thread, started on first use. It runs `async def execute` and the requests to other models
    that it awaits."""

    def __init__(self):
        self._loop = None
        self._lock = threading.Lock()

    def start(self, coroutine):
        """Runs a coroutine; returns its `concurrent.futures.Future`."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, name="execute", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        while True:
            # A model that stops the loop stops neither its other tasks nor those of later requests.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                # asyncio has set them as the result of their task, and raises them here too. The other tasks go on.
                self._loop.run_forever()


class Loaded:
    """A loaded model. The native part calls `execute` for each batch."""

    def __init__(self, instance, engine, takes_device_tensors):
        self.instance = instance
        self.execute = instance.execute
        self.engine = engine
        self.takes_device_tensors = takes_device_tensors
        self._loop = Loop()

    def settle(self, returned, decoupled, requests):
        """Returns the result of `execute`. If it is a coroutine, waits for it or, if the model is decoupled, leaves it to the
        event loop; an exception then fails the requests that are not complete."""
        if not asyncio.iscoroutine(returned):
            return returned
        future = self._loop.start(returned)
        if not decoupled:
            return future.result()
        future.add_done_callback(lambda done: _fail_requests(done, requests))
        return None

    @property
    def has_is_ready(self):
        """Whether the model implements the readiness check `is_ready`."""
        return callable(getattr(self.instance, "is_ready", None))

    def is_ready(self):
        """Calls the model's readiness check. As with Triton, an exception or a result other than True and False is logged and
        means not ready."""
        said = self.instance.is_ready()
        if asyncio.iscoroutine(said):
            said = self._loop.start(said).result()
        if not isinstance(said, bool):
            raise TypeError(f"is_ready() must return True or False, not {said!r}")
        return said

    def finalize(self):
        """Calls the model's `finalize` before the process exits."""
        if callable(getattr(self.instance, "finalize", None)):
            self.instance.finalize()


def _fail_requests(future, requests):
    error = asyncio.CancelledError("the task of execute was cancelled") if future.cancelled() else future.exception()
    if error is not None:
        _native.fail(requests, error)


def load(described):
    """Imports and initializes the model described by a JSON text."""
    described = json.loads(described)
    directory, config = described["directory"], json.loads(described["config"])
    module = model_module(described["backend"], directory, described["file"], described["version"])
    on_device = takes_device_tensors(module, config) and described["kind"] == "GPU"
    instance = module.TritonPythonModel()
    if not callable(getattr(instance, "execute", None)):
        raise AttributeError(f"Python model {module.__file__} does not implement `execute` method.")
    if callable(getattr(instance, "initialize", None)):
        instance.initialize(arguments(described))
    return Loaded(instance, engine(module), on_device)


def engine(module):
    """Returns the description of the engine for logs and the served configuration: the interpreter and the runner's `ENGINE`."""
    name = f"python {platform.python_version()}"
    return f"{name}, {module.ENGINE}" if isinstance(getattr(module, "ENGINE", None), str) else name


def takes_device_tensors(module, config):
    """Returns whether the model gets inputs of clients in device memory: the runner's `DEVICE_TENSORS`, else Triton's
    parameter."""
    if module.__name__ in RUNNERS.values():
        return getattr(module, "DEVICE_TENSORS", False)
    given = (config.get("parameters") or {}).get("FORCE_CPU_ONLY_INPUT_TENSORS", {}).get("string_value", "yes")
    if given not in ("yes", "no"):
        raise ValueError(f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: '{given}', it must be 'yes' or 'no'")
    return given == "no"


def arguments(described):
    """Returns the argument of `initialize`; all values are strings. The process sees the instance's device as device 0."""
    return {
        "model_config": described["config"],
        "model_instance_kind": described["kind"],
        "model_instance_name": described["instance"],
        "model_instance_device_id": "0",
        "model_repository": os.path.dirname(described["directory"]),
        "model_version": described["version"],
        "model_name": described["name"],
    }


def model_module(backend, directory, file, version):
    """Imports the module with the class TritonPythonModel: a runner, the backend's, or the model's own `model.py`."""
    directory = os.path.abspath(directory)
    _set_model_dir(directory)
    if backend in RUNNERS and not os.environ.get("PHAROS_PYTHON_BACKEND"):
        return importlib.import_module(RUNNERS[backend])
    shared = os.environ.get("PHAROS_PYTHON_BACKEND")
    path = os.path.abspath(shared) if shared else os.path.join(directory, file or "model.py")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"Python model file not found in '{path}'")
    # As in Triton, `import` finds modules in the directory of model.py and in the one above it.
    folder = os.path.dirname(path)
    for place in (os.path.dirname(folder), folder):
        if place not in sys.path:
            sys.path.append(place)
    name = f"{os.path.basename(folder)}.{os.path.splitext(os.path.basename(path))[0]}"
    if os.path.basename(folder) != str(version) and not shared:
        name = f"{version}.{os.path.splitext(os.path.basename(path))[0]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "TritonPythonModel"):
        raise AttributeError(f"module '{name}' has no attribute 'TritonPythonModel'")
    return module


def _set_model_dir(directory):
    import triton_python_backend_utils

    triton_python_backend_utils._model_dir = directory


def watch_forks():
    """Detaches forked processes from the server: they share descriptors with this one, but must not use them."""
    os.register_at_fork(after_in_child=_detach_from_server)


def _detach_from_server():
    _native.forked()
    try:
        ours = os.fstat(3).st_ino
        null = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            try:
                if os.fstat(descriptor).st_ino == ours:
                    os.dup2(null, descriptor, inheritable=False)
            except OSError:
                pass
        os.close(null)
    except OSError:
        pass
