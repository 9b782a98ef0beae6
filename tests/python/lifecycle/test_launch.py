"""Selection of the program that runs a model, and the errors if no program is found.

`standin` replaces the package `pharos-worker` and reports its arguments; interpreters and environments are real.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from harness.server import ROOT, STANDIN, Server, binary
from harness.tract import HAS_TRACT
from harness.waiting import DEADLINE_S, eventually, holds_for

IO = {
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]}],
}
VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
PACKAGE = f"where PACKAGE is the wheel of this server (pharos_server-{VERSION}-*.whl) or, in its source tree, ./worker/python; or "
USUAL = f"{PACKAGE}choose an interpreter that has the package with --python"
OF_THE_MODEL = f"{PACKAGE}remove the parameter EXECUTION_ENV_PATH to use the interpreter of --python"


PLAIN = "class TritonPythonModel:\n    pass\n"
COMPLETING = PLAIN + "    def auto_complete_config(config): pass\n"


class Place:
    """A folder with a repository, environments and the configuration of the stand-in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.repository, self.standin, self.backends = (folder / name for name in ("models", "standin", "backends"))
        for path in (self.repository, self.standin, self.backends):
            path.mkdir()

    def model(self, name: str, config='backend: "python"', versions=(1,), environment=None, code=COMPLETING, **answers) -> Path:
        """Writes a model with a `model.py`; without a configuration file if `config` is None."""
        for version in versions:
            directory = self.repository / name / str(version)
            directory.mkdir(parents=True)
            (directory / "model.py").write_text(code)
        if environment is not None:
            config += f'\nparameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{environment}" }} }}'
        if config is not None:
            (self.repository / name / "config.pbtxt").write_text(config)
        (self.standin / f"{name}.json").write_text(json.dumps(answers))
        return self.repository / name

    def environment(self, path: str, on_import: str = "") -> Path:
        """Creates a virtual environment; importing the package there runs the code `on_import`."""
        home = self.folder / path
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        if on_import:
            (self.standin / f"{home.name}.import").write_text(on_import)
        return home

    def interpreter(self, path: str, script: str) -> Path:
        """Creates an environment whose interpreter is a script."""
        home = self.folder / path
        (home / "bin").mkdir(parents=True)
        (home / "bin/python3").write_text(f"#!/bin/sh\n{script}\n")
        (home / "bin/python3").chmod(0o755)
        return home

    def server(self, *options, package=True) -> Server:
        """Returns a server for the repository that continues if a load fails."""
        options = ["--exit-on-error=false", "--strict-readiness=false", *options]
        options += [f"--environment-cache-directory={self.folder / 'environments'}", "--worker-variables=PHAROS_STANDIN"]
        server = Server(self.folder, [self.repository], options)
        server.environment = {"PHAROS_STANDIN": str(self.standin)}
        if package:
            server.environment["PYTHONPATH"] = str(STANDIN)
        return server

    def runs(self, model: str) -> list:
        """Returns the arguments of each start of the stand-in for a model."""
        path = self.standin / f"{model}.runs"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def served(self, model: str) -> dict:
        """Returns the arguments with which the model's only worker was started."""
        (run,) = [run for run in self.runs(model) if "instance" in run]
        return run


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def loaded(server: Server, *models):
    """Waits until each of these models is ready or has failed; returns the state and the reason of each."""

    def check():
        index = server.index()
        entries = {name: index[name][0] for name in models if name in index}
        done = [entry for entry in entries.values() if entry.get("state") in ("READY", "UNAVAILABLE")]
        return len(done) == len(models) and entries

    entries = eventually(f"{models} are ready or have failed", check)
    return {name: (entry["state"], entry.get("reason", "")) for name, entry in entries.items()}


def check_ready(server: Server, *models):
    for name, (state, reason) in loaded(server, *models).items():
        assert state == "READY", f"{name}: {reason}"


def config(server: Server, model: str, version="") -> dict:
    """Returns the configuration of a model from the server."""
    status, text = server.get(f"/v2/models/{model}{version}/config")
    assert status == 200, text
    return json.loads(text)


def test_every_choice_of_an_interpreter(place):
    """Virtual environments in the model's directory, from EXECUTION_ENV_PATH, in an archive, and from --python."""
    default, named = place.environment("default"), place.environment("named")
    packed = place.environment("packed")
    with tarfile.open(place.folder / "packed.tar.gz", "w:gz") as archive:
        archive.add(packed, ".")
    place.model("plain")
    place.environment("models/" + place.model("own").name + "/venv")
    place.environment("models/" + place.model("hidden").name + "/.venv")
    place.model("directory", environment=named)
    place.environment("models/" + place.model("relative", environment="$$TRITON_MODEL_DIRECTORY/env").name + "/env")
    place.model("one", environment=place.folder / "packed.tar.gz")
    place.model("two", environment="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    shutil.copy(place.folder / "packed.tar.gz", place.repository / "two/env.tar.gz")
    place.model("shadowed", environment=named)
    place.environment("models/shadowed/venv")
    models = ("plain", "own", "hidden", "directory", "relative", "one", "two", "shadowed")
    with place.server(f"--python={default}/bin/python3") as server:
        check_ready(server, *models)
        seen = {model: place.served(model) for model in models}
        for model, home in (
            ("plain", default),
            ("own", place.repository / "own/venv"),
            ("hidden", place.repository / "hidden/.venv"),
            ("directory", named),
            ("relative", place.repository / "relative/env"),
            ("shadowed", named),
        ):
            assert Path(seen[model]["prefix"]) == home, model
            if model != "plain":
                environment = seen[model]["environment"]
                assert environment["VIRTUAL_ENV"] == str(home)
                assert environment["PATH"].startswith(f"{home}/bin:")
                assert environment["LD_LIBRARY_PATH"].startswith(f"{home}/lib")
        assert "VIRTUAL_ENV" not in seen["plain"]["environment"]
        assert seen["plain"]["arguments"] == ["plain_0"]
        unpacked = Path(seen["one"]["prefix"])
        assert unpacked.parent == place.folder / "environments/pharos-environments", "archives are unpacked into the cache"
        assert seen["two"]["prefix"] == seen["one"]["prefix"], "the same archive is unpacked once"
        assert stat.S_IMODE(unpacked.parent.stat().st_mode) == 0o700
        assert server.log.read_text().count("unpacking the environment") == 1
        # Auto-complete ran in the same environments.
        for model in models:
            assert place.runs(model)[0]["question"]["config"]["name"] == model
            assert place.runs(model)[0]["prefix"] == seen[model]["prefix"]


@pytest.mark.slow
def test_foreign_files_in_the_cache_are_kept(place):
    """Lock files of other programs, of any age, have no effect in the folder of environments or below it."""
    archive = place.folder / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(place.environment("packed"), ".")
    place.model("m", environment=archive)
    cache = place.folder / "environments"
    own = cache / "pharos-environments"
    kept = [cache / "poetry", cache / ("0" * 32), own / "Cargo", own / ("A" * 32)]

    def put():
        for path in kept:
            (path / "precious").mkdir(parents=True, exist_ok=True)
            path.with_suffix(".lock").write_text("")
            os.utime(path.with_suffix(".lock"), (0, 0))

    cache.mkdir(mode=0o700)
    del kept[2:]
    put()
    with place.server() as server:
        check_ready(server, "m")
        assert all((path / "precious").is_dir() and path.with_suffix(".lock").exists() for path in kept)
    kept += [own / "Cargo", own / ("A" * 32)]
    put()
    (place.environment("packed") / "mark").write_text("changed")
    with tarfile.open(archive, "w:gz") as file:
        file.add(place.folder / "packed", ".")
    with place.server() as server:
        check_ready(server, "m")
        assert server.log.read_text().count("unpacking the environment") == 1
        assert all((path / "precious").is_dir() and path.with_suffix(".lock").exists() for path in kept)


@pytest.mark.slow
def test_a_changed_archive_is_unpacked_again(place):
    """A model whose archive has changed gets a new environment with its next load, not before."""
    archive = place.folder / "env.tar.gz"

    def pack(mark):
        home = place.environment(mark)
        (home / "mark").write_text(mark)
        with tarfile.open(archive, "w:gz") as file:
            file.add(home, ".")

    def mark():
        return (Path(place.runs("m")[-1]["prefix"]) / "mark").read_text()

    pack("first")
    place.model("m", environment=archive)
    options = ["--model-control-mode=explicit", "--load-model=m"]
    with place.server(*options) as server:
        check_ready(server, "m")
        assert mark() == "first"
        pack("second")
        status, text = server.ask("POST", "/v2/repository/models/m/load", "{}")
        assert status == 200 and mark() == "second", text
    with place.server(*options) as server:
        check_ready(server, "m")
        assert mark() == "second" and "unpacking" not in server.log_tail(), "the cache outlives the server"


def test_unusable_interpreters(place):
    """Each refusal has the model, the interpreter and the remedy; none is retried endlessly."""
    missing = place.environment("missing")
    # Not `sitecustomize`: Debian has a module of this name, which comes first.
    (next(missing.glob("lib/python*")) / "site-packages/hides.pth").write_text(
        f"import sys; sys.path[:] = [path for path in sys.path if path != {str(STANDIN)!r}]\n"
    )
    broken = place.environment("broken", "raise ImportError('no numpy here')")
    crashes = place.environment("crashes", "import os; os.abort()")
    silent = place.environment("silent", "import os; os._exit(9)")
    other = place.environment("other", "WIRE_VERSION = 1")
    old = place.interpreter("old", "if [ $1 = -c ]; then echo python 3 8; echo missing; fi; exit 1")
    no_python = place.interpreter("no_python", "exit 7")
    not_executable = place.interpreter("not_executable", "")
    (not_executable / "bin/python3").chmod(0o644)
    format_error = place.interpreter("format_error", "")
    (format_error / "bin/python3").write_bytes(b"\x7fELF nothing")
    with tarfile.open(place.folder / "packed.tar.gz", "w:gz") as archive:
        archive.add(missing, ".")
    (place.folder / "empty").mkdir()
    (place.folder / "wrong.tar.gz").write_bytes(b"\x1f\x8b nothing")
    python3 = "bin/python3"
    expected = {
        "missing": (
            missing,
            f"model 'missing' needs the Python package 'pharos-worker', which '{missing / python3}' (the model's "
            f"EXECUTION_ENV_PATH) does not have; run '{missing / python3} -m pip install PACKAGE', {OF_THE_MODEL}",
        ),
        "broken": (broken, f"'{broken / python3}' (the model's EXECUTION_ENV_PATH) cannot import: ImportError: no numpy here"),
        "crashes": (crashes, f"'{crashes / python3}' (the model's EXECUTION_ENV_PATH) exits when it imports 'pharos_worker' (killed by signal 6); run '{crashes / python3} -m pip install --force-reinstall PACKAGE', {OF_THE_MODEL}"),
        "silent": (silent, "exits when it imports 'pharos_worker' (exit status 9)"),
        "other": (other, f"does not match this server (frontend and worker are of different builds: wire versions"),
        "old": (old, f"model 'old' needs Python 3.9 or newer, and '{old / python3}' (the model's EXECUTION_ENV_PATH) is Python 3.8; choose another with --python"),
        "no_python": (no_python, "is not a working Python interpreter (exit status 7)"),
        "not_executable": (not_executable, f"the Python interpreter '{not_executable / python3}' (the model's EXECUTION_ENV_PATH) is not executable by this user"),
        "format_error": (format_error, f"the Python interpreter '{format_error / python3}' (the model's EXECUTION_ENV_PATH) cannot be started: Exec format error"),
        "nowhere": ("/nonexistent/env", "model 'nowhere': EXECUTION_ENV_PATH is '/nonexistent/env', which does not exist; allowed are the directory of a virtual or conda environment, and a .tar.gz"),
        "empty": (place.folder / "empty", "is not a Python environment: it has neither bin/python3 nor bin/python"),
        "packed": (place.folder / "packed.tar.gz", f"does not have; run 'python3 -m pip install PACKAGE' in the environment that is packed into '{place.folder}/packed.tar.gz' and pack it again, {OF_THE_MODEL}"),
        "wrong": (place.folder / "wrong.tar.gz", f"model 'wrong': the environment '{place.folder}/wrong.tar.gz' cannot be used: it cannot be unpacked"),
    }
    for model, (environment, _) in expected.items():
        # Without auto-complete the worker itself fails to start.
        place.model(model, environment=environment, die=1, exit=1)
    names = tuple(expected)
    for options in ((), ("--disable-auto-complete-config",)):
        with place.server(*options) as server:
            for model, (state, reason) in loaded(server, *names).items():
                assert state == "UNAVAILABLE" and expected[model][1] in reason, f"{model} {options}: {reason}"
                assert f"'{model}'" in reason, reason
            starts = {model: len(place.runs(model)) for model in names}
            runs = lambda names=names: {model: len(place.runs(model)) for model in names}  # noqa: E731
            holds_for("a worker that fails to load is not restarted", 1, lambda starts=starts, runs=runs: runs() == starts)
            eventually("no process is left", lambda: not server.workers())
    assert len(place.runs("other")) == 2, "one start for each server"


def test_a_server_without_the_package(place):
    """The error names the interpreter from PATH, or that of --python."""
    place.model("m")
    python3 = place.environment("bare") / "bin/python3"
    own = place.environment("models/" + place.model("own").name + "/venv") / "bin/python3"
    for options, by in (((), "of the PATH"), ((f"--python={python3}",), "of --python")):
        server = place.server(*options, package=False)
        server.environment["PATH"] = f"{python3.parent}:{os.environ['PATH']}"
        with server:
            outcome = loaded(server, "m", "own")
            assert f"'{own}' (in the model's directory) does not have; " in outcome["own"][1]
            assert outcome["own"][1].endswith("; or remove this environment to use the interpreter of --python")
            state, reason = outcome["m"]
            assert state == "UNAVAILABLE" and reason == (
                f"model 'm' needs the Python package 'pharos-worker', which '{python3}' ({by}) does not have; run '{python3} -m "
                f"pip install PACKAGE', {USUAL}"
            )
    with place.server("--python=/nonexistent/python3") as server:
        state, reason = loaded(server, "m", "own")["m"]
        assert "the Python interpreter '/nonexistent/python3' (of --python) does not exist" in reason


def test_workers_of_other_builds_and_models_that_fail(place):
    """The reason is the worker's error about its model; a worker of another build adds the remedy."""
    place.model("refused", refuse="ModuleNotFoundError: No module named 'torch'")
    place.model("other", refuse="frontend and worker are of different builds: wire versions 8 and 7")
    place.model("dies", die=5)
    with place.server() as server:
        outcome = loaded(server, "refused", "other", "dies")
        assert outcome["refused"] == ("UNAVAILABLE", "ModuleNotFoundError: No module named 'torch'")
        assert "does not match this server (frontend and worker are of different builds: wire versions 8 and 7); run '" in outcome["other"][1]
        assert f"-m pip install --force-reinstall PACKAGE', {USUAL}" in outcome["other"][1]
        assert outcome["dies"] == ("UNAVAILABLE", "Stub process 'dies_0' is not healthy. The worker process ended: exit status 5")


def test_auto_complete(place):
    """The outcomes are those of a real Triton 2.51 for models with an equivalent `auto_complete_config`."""
    eight = IO | {"max_batch_size": 8, "dynamic_batching": {}}
    place.model("bare", config=None, answer=eight, print="hello", complain="careful")
    place.model("larger", config='backend: "python"\nmax_batch_size: 4\ndynamic_batching {}', answer=IO | {"max_batch_size": 16})
    place.model("names", config='backend: "python"\ninput [{name:"IN"}]\noutput [{name:"OUT"}]', answer=IO)
    place.model("decoupled", answer=IO | {"model_transaction_policy": {"decoupled": True}})
    place.model("versions", config='backend: "python"\nversion_policy {all {}}', versions=(1, 2), answer={"1": IO | {"max_batch_size": 1}, "2": IO | {"max_batch_size": 2}})
    place.model("others", answer=IO | {"parameters": {"a": {"string_value": "b"}}, "version_policy": {"all": {}}, "name": "x"})
    models = ("bare", "larger", "names", "decoupled", "versions", "others")
    with place.server() as server:
        check_ready(server, *models)
        bare = config(server, "bare")
        assert bare["max_batch_size"] == 8 and bare["dynamic_batching"]["preferred_batch_size"] == [8]
        assert (bare["backend"], bare["default_model_filename"]) == ("python", "model.py")
        assert [(i["name"], i["data_type"], i["dims"]) for i in bare["input"]] == [("IN", "TYPE_FP32", [4])]
        status, text = server.get("/v2/models/bare")
        assert json.loads(text)["platform"] == "python" and json.loads(text)["inputs"][0]["shape"] == [-1, 4]
        assert config(server, "larger")["max_batch_size"] == 16
        for side in ("input", "output"):
            (tensor,) = config(server, "names")[side]
            assert (tensor["data_type"], tensor["dims"]) == ("TYPE_FP32", [4])
        assert config(server, "decoupled")["model_transaction_policy"] == {"decoupled": True}
        assert [config(server, "versions", f"/versions/{v}")["max_batch_size"] for v in (1, 2)] == [1, 2]
        other = config(server, "others")
        assert "a" not in other["parameters"] and other["version_policy"] == {"latest": {"num_versions": 1}}
        questions = [run["question"] for run in place.runs("versions") if "question" in run]
        question = next(question for question in questions if question["version"] == 2)
        assert question["directory"] == str(place.repository / "versions/2")
        assert (question["model_directory"], question["backend"]) == (str(place.repository / "versions"), "python")
        log = server.log.read_text()
        assert "auto-complete: hello" in log and "auto-complete: careful" in log and 'model=bare' in log
        answers = [Path(run["arguments"][1]) for model in models for run in place.runs(model) if "question" in run]
        assert len(answers) > len(models) and {path.name for path in answers} == {"answer.json"}
        left = lambda: [path for path in answers if path.parents[1].exists()]  # noqa: E731
        eventually("the directories with the answers are removed", lambda: not left())


def test_code_without_auto_complete_is_started_once(place):
    """A class without the method is not completed. A class with the method is called even if the configuration is complete,
    because it may add a scheduler, as in a real Triton 2.51."""
    whole = 'backend: "python" max_batch_size: 4' + "".join(
        f' {side} {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}' for side, name in [("input", "IN"), ("output", "OUT")]
    )
    place.model("plain", config=whole, code=PLAIN, versions=(1, 2))
    place.model("bare", config=None, code=PLAIN)
    place.model("inherits", config=whole, code=PLAIN.replace(":", "(Base):", 1), answer={})
    place.model("adds", config=whole, answer={"dynamic_batching": {}})
    with place.server() as server:
        check_ready(server, "plain", "bare", "inherits", "adds")
        asked = {model: ["question" in run for run in place.runs(model)] for model in ("plain", "bare", "inherits", "adds")}
        assert asked == {"plain": [False], "bare": [False], "inherits": [True, False], "adds": [True, False]}
        assert "dynamic_batching" in config(server, "adds") and "dynamic_batching" not in config(server, "plain")


def test_auto_complete_that_fails(place):
    """Each reason is the model's load error."""
    small = 'backend: "python"\nmax_batch_size: 4'
    int32 = 'backend: "python"\ninput [{name:"IN" data_type: TYPE_INT32 dims: [4]}]'
    place.model("error", write='{"error": "ValueError: no such weights"}')
    place.model("smaller", config=small, answer={"max_batch_size": 2})
    place.model("datatype", config=int32, answer=IO)
    place.model("nonsense", write="{")
    place.model("silent", exit=3)
    # An interpreter that is a script, which starts the real one and waits for it.
    script = place.interpreter("script", f'echo $$ > {place.folder}/slow; {sys.executable} "$@"; exit $?')
    place.model("slow", sleep=60, environment=script)
    with place.server("--backend-config=python,stub-timeout-seconds=20") as server:
        outcome = loaded(server, "error", "smaller", "datatype", "nonsense", "silent", "slow")
        assert {state for state, _ in outcome.values()} == {"UNAVAILABLE"}
        reasons = {model: reason for model, (_, reason) in outcome.items()}
        assert reasons["error"] == "ValueError: no such weights"
        assert reasons["smaller"].endswith("in auto-complete-config function for model 'smaller' specified max_batch_size 2")
        assert reasons["datatype"] == (
            "unable to load model 'datatype', configuration expects datatype TYPE_INT32 for input 'IN', model provides TYPE_FP32"
        )
        assert reasons["nonsense"].startswith("auto-complete of model 'nonsense' has answered JSON of the wrong form: ")
        assert reasons["silent"] == "auto-complete of model 'silent' failed: it ended without an answer (exit status 3)"
        assert "auto-complete of model 'slow' failed: it did not end within 20 s" in reasons["slow"]
        eventually("no process is left", lambda: not server.workers())
        group = int((place.folder / "slow").read_text())

        def is_gone():
            try:
                return os.killpg(group, 0)
            except ProcessLookupError:
                return True

        eventually("the child of the interpreter is killed too", is_gone)


def test_auto_complete_off(place):
    """Nothing is completed; a model without a configuration is refused, one with a configuration is served unchanged."""
    place.model("bare", config=None, answer=IO)
    place.model("whole", answer=IO)
    with place.server("--disable-auto-complete-config") as server:
        outcome = loaded(server, "bare", "whole")
        assert outcome["bare"][0] == "UNAVAILABLE" and "does not exist, and auto-complete is off" in outcome["bare"][1]
        assert outcome["whole"][0] == "READY" and config(server, "whole")["input"] == []
        assert ["question" in run for run in place.runs("whole")] == [False]


def test_triton_settings_of_the_python_backend(place):
    """Triton's options for shared memory are accepted with a warning, and invalid values are refused."""
    place.model("m")
    options = ["--backend-config=python,shm-default-byte-size=1048576", "--backend-config=python,thread-pool-size=4"]
    with place.server(*options) as server:
        check_ready(server, "m")
        log = server.log.read_text()
        for key in ("shm-default-byte-size", "thread-pool-size"):
            assert f"--backend-config=python,{key} has no effect: tensors are in shared memory" in log
    for option, expected in (
        ("--backend-config=python,stub-timeout-seconds=x", "stub-timeout-seconds is 'x'; allowed are whole seconds"),
        ("--backend-directory=/nonexistent", "--backend-directory is '/nonexistent', which is not a directory"),
    ):
        command = [str(binary()), f"--model-repository={place.repository}", "--http-port=0", "--grpc-port=0", "--metrics-port=0", option]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert ended.returncode != 0 and expected in ended.stderr, ended.stderr


def test_a_backend_directory_of_triton(place, tmp_path):
    """The directory in a command line for Triton does not end the start: a warning says what to do if it does not exist here."""
    place.model("m", answer=IO)
    place.model("mine", config='backend: "mine"')
    (place.repository / "mine/1/model.py").unlink()
    compiled = tmp_path / "opt/tritonserver/backends"
    with place.server(f"--backend-directory={compiled}") as server:
        check_ready(server, "m")
        assert f"--backend-directory is ignored: '{compiled}' does not exist" in server.log.read_text()
        assert "available: builtin, onnxruntime, onnxruntime_genai, python" in loaded(server, "mine")["mine"][1]
    for name in ("onnxruntime", "mine"):
        (compiled / name).mkdir(parents=True)
        (compiled / name / f"libtriton_{name}.so").write_bytes(b"")
    (compiled / "python").mkdir()
    with place.server(f"--backend-directory={compiled}") as server:
        check_ready(server, "m")
        # Its libraries are loaded; this one is empty.
        state, reason = loaded(server, "mine")["mine"]
        assert state == "UNAVAILABLE"
        assert f"backend library '{compiled}/mine/libtriton_mine.so' is not a valid shared library" in reason


def test_backend_directory(place):
    """A user's executable, Python code for models of one backend, and the error if there is neither."""
    (place.backends / "empty").mkdir()
    for name in ("native", "code"):
        (place.backends / name).mkdir()
    shutil.copy(binary().with_name("pharos-worker"), place.backends / "native/pharos-worker-native")
    (place.backends / "code/model.py").write_text("class TritonPythonModel:\n    pass\n")
    place.model("nothing", config='backend: "empty"')
    (place.repository / "nothing/1/model.py").unlink()
    place.model("executable", config='backend: "native"')
    (place.repository / "executable/1/model.py").unlink()
    place.model("coded", config='backend: "code"', answer=IO)
    (place.repository / "coded/1/model.py").unlink()
    # A real Triton 2.51 does not use a version's code for a backend either.
    place.model("own", config='backend: "inside"', answer=IO)
    with place.server(f"--backend-directory={place.backends}") as server:
        outcome = loaded(server, "nothing", "executable", "coded", "own")
        assert outcome["nothing"][0] == "UNAVAILABLE"
        reason = outcome["nothing"][1]
        assert "backend 'empty' of model 'nothing' is not available here; available: builtin, onnxruntime, onnxruntime_genai, python, pytorch, " in reason
        (names,) = re.findall(r"xgboost, (.*?);", reason)
        assert {"code", "native", *(["tract"] if HAS_TRACT else [])} <= set(names.split(", ")), "those of the operator and of the installation"
        assert f"neither '{place.backends}/empty' nor '{binary().parent}/backends/empty' holds libpharos_empty.so, pharos-worker-empty, model.py or libtriton_empty.so" in reason
        # The ordinary worker under another name: it starts, but does not support this backend.
        assert "unknown backend 'native'" in outcome["executable"][1], outcome["executable"]
        assert outcome["coded"] == ("READY", "")
        assert outcome["own"][0] == "UNAVAILABLE" and "backend 'inside' of model 'own' is not available" in outcome["own"][1]
        for run in place.runs("coded"):
            assert run["environment"]["PHAROS_PYTHON_BACKEND"] == str(place.backends / "code/model.py")
        assert config(server, "coded")["input"][0]["name"] == "IN"


MODEL = """
import sys
import triton_python_backend_utils as pb_utils
import only_here

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        print("completing for", only_here.NAME)
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "PREFIX", "data_type": "TYPE_STRING", "dims": [1]})
        return config

    def execute(self, requests):
        prefix = pb_utils.Tensor("PREFIX", __import__("numpy").array([sys.prefix], dtype=object))
        twice = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * 2 for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out), prefix]) for out in twice]
"""


def test_the_real_package_in_environments(place):
    """A model without a configuration runs with the packages of its environment, from a folder and from an archive."""
    package = pytest.importorskip("pharos_worker", reason="the package pharos-worker is not installed")
    numpy = pytest.importorskip("numpy")
    home = place.environment("packed")
    site = next(home.glob("lib/python*")) / "site-packages"
    paths = {str(Path(module.__file__).parent.parent) for module in (package, numpy)}
    (site / "others.pth").write_text("\n".join(paths))
    (site / "only_here.py").write_text("NAME = 'this environment'\n")
    with tarfile.open(place.folder / "packed.tar.gz", "w:gz") as archive:
        archive.add(home, ".")
    packed = place.model("packed", environment="$$TRITON_MODEL_DIRECTORY/../../packed.tar.gz")
    own = place.model("own", config=None)
    shutil.copytree(home, own / "venv", symlinks=True)
    outside = place.model("outside", config=None)
    for model in (packed, own, outside):
        (model / "1/model.py").write_text(MODEL)
    with place.server(package=False) as server:
        outcome = loaded(server, "packed", "own", "outside")
        assert outcome["outside"][0] == "UNAVAILABLE" and "No module named 'only_here'" in outcome["outside"][1]
        request = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}
        for model, prefix in (("packed", str(place.folder / "environments")), ("own", str(own / "venv"))):
            assert outcome[model] == ("READY", "")
            status, answer = server.infer(model, request)
            assert status == 200, answer
            outputs = {output["name"]: output["data"] for output in answer["outputs"]}
            assert outputs["OUT"] == [2, 4, 6, 8] and outputs["PREFIX"][0].startswith(prefix), outputs
        assert "auto-complete: completing for this environment" in server.log.read_text()
