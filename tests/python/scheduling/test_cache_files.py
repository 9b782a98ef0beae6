"""The response cache while files change on which the answers of a model depend: files that its versions share, its environment and
its backend. No answer may come from other files than those that the model has loaded."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest

from harness import redis_server
from harness.processes import restart, writer
from harness.redis_server import Redis
from harness.server import Server
from harness.stream_models import step
from harness.waiting import eventually, join_all

needs_redis = pytest.mark.skipif(bool(redis_server.missing()), reason=redis_server.missing())
LOCAL = "local,size=1048576"
LOAD = "--load-model=*"
WARNING = "a worker has started with files that have changed since the load of the model began"
TENSORS = 'input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }\noutput { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }\n'
CACHED = f"max_batch_size: 0\n{TENSORS}response_cache {{ enable: true }}\n"
MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        directory = args["model_repository"]
        gate = os.path.join(directory, "../../gate")
        if os.path.exists(gate):
            open(gate).read()
        self.factor = float(FACTOR)

    def execute(self, requests):
        results = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() * self.factor for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", result.astype(np.float32))]) for result in results]
"""


def shared_factor(place: str) -> str:
    """Returns the code that reads the factor of a model from a file in its directory."""
    return f"open(os.path.join(directory, {place!r})).read()"


class Models:
    """A repository of models that multiply their input. `gate`: if it exists, models read this pipe before they read their files."""

    def __init__(self, folder: Path):
        self.folder, self.repository, self.gate = folder, folder / "models", folder / "gate"

    def write(self, name: str, factor: str = shared_factor("factor.txt"), config: str = ""):
        """Writes a model; `factor` is code that returns its factor."""
        directory = self.repository / name
        (directory / "1").mkdir(parents=True)
        (directory / "1/model.py").write_text(MODEL.replace("FACTOR", factor))
        (directory / "config.pbtxt").write_text((config or 'backend: "python"\n') + CACHED)

    def set(self, value: int, place: str = "member/factor.txt"):
        """Changes the factor of a model."""
        (self.repository / place).write_text(str(value))

    def ensemble(self, *members: str):
        """Writes the ensemble `all` of the members, one after the other."""
        tensors = ["X", *(f"after_{name}" for name in members[:-1]), "Y"]
        steps = [step(name, {"X": before}, {"Y": after}) for name, before, after in zip(members, tensors, tensors[1:])]
        (self.repository / "all/1").mkdir(parents=True)
        config = f'platform: "ensemble"\n{CACHED}ensemble_scheduling {{ {"".join(steps)} }}\n'
        (self.repository / "all/config.pbtxt").write_text(config)

    def serve(self, *options: str, cache=LOCAL) -> Server:
        options = [f"--python={sys.executable}", f"--cache-config={cache}", "--model-control-mode=explicit", *options]
        return Server(self.folder, [self.repository], options)


@pytest.fixture
def models(tmp_path) -> Models:
    return Models(tmp_path)


def result(server, value: int = 1, model: str = "member") -> float:
    """Returns the answer to a request, which must succeed."""
    status, answer = server.infer(model, {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [value]}]})
    assert status == 200, answer
    return answer["outputs"][0]["data"][0]


def hits(server, model: str = "member") -> int:
    return server.statistics(model)["inference_stats"]["cache_hit"]["count"]


def load(server, model: str = "member"):
    status, answer = server.ask("POST", f"/v2/repository/models/{model}/load")
    assert status == 200, answer


@pytest.mark.parametrize("place", ["factor.txt", "data/tables/factor.txt"])
def test_a_load_with_other_shared_files(models, place):
    """Answers of other files are not found; those of the same contents are, whatever the times of the files."""
    models.write("member", shared_factor(place))
    (models.repository / "member" / place).parent.mkdir(parents=True, exist_ok=True)
    models.set(1, f"member/{place}")
    with models.serve(LOAD) as server:
        assert (result(server), result(server), hits(server)) == (1, 1, 1)
        models.set(22, f"member/{place}")
        load(server)
        assert (result(server), result(server)) == (22, 22)
        models.set(1, f"member/{place}")
        load(server)
        before = hits(server)
        assert (result(server), hits(server) - before) == (1, 1), "the contents are those of the first load"
        assert WARNING not in server.log.read_text()


def test_a_load_with_another_environment(models):
    """The environment is a directory that was made again, with another package."""
    models.write("member", "__import__('factor').VALUE")
    home = models.repository / "member/venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(str(Path(numpy.__file__).parents[1]))
    (packages / "factor.py").write_text("VALUE = 1\n")
    with models.serve(LOAD) as server:
        assert (result(server), result(server), hits(server)) == (1, 1, 1)
        (packages / "factor.py").write_text("VALUE = 22\n")
        (home / "pyvenv.cfg").touch()
        load(server)
        assert (result(server), result(server)) == (22, 22)


def test_a_load_with_another_backend(models):
    """The backend is a file of the backend directory."""
    backend = models.folder / "backends/scaling"
    backend.mkdir(parents=True)
    models.write("member", config='backend: "scaling"\n')
    (backend / "model.py").write_text(MODEL.replace("FACTOR", "1"))
    with models.serve(LOAD, f"--backend-directory={backend.parent}") as server:
        assert (result(server), result(server), hits(server)) == (1, 1, 1)
        (backend / "model.py").write_text(MODEL.replace("FACTOR", "22"))
        load(server)
        assert (result(server), result(server)) == (22, 22)


def test_a_load_of_a_member_with_other_shared_files(models):
    """Its ensemble has no answers either. Between the loads of two members, the ensemble uses no cache."""
    for name in ("one", "two"):
        models.write(name)
        models.set(1, f"{name}/factor.txt")
    models.ensemble("one", "two")
    with models.serve(LOAD) as server:
        assert (result(server, 1, "all"), result(server, 1, "all"), hits(server, "all")) == (1, 1, 1)
        models.set(10, "one/factor.txt")
        load(server, "one")
        assert (result(server, 1, "all"), result(server, 1, "all"), hits(server, "all")) == (10, 10, 1)
        models.set(100, "one/factor.txt")
        models.set(2, "two/factor.txt")
        load(server, "two")
        assert (result(server, 1, "all"), result(server, 1, "all"), hits(server, "all")) == (20, 20, 0)
        load(server, "one")
        assert (result(server, 1, "all"), result(server, 1, "all"), hits(server, "all")) == (200, 200, 1)
        assert "files of its member 'one/1' have changed since their load" in server.log.read_text()


def test_a_worker_starts_again_with_other_shared_files(models):
    """Neither the model nor its ensemble finds or stores answers until the model is loaded again."""
    models.write("member")
    models.set(1)
    models.ensemble("member")
    with models.serve(LOAD) as server:
        both = lambda value=1: (result(server, value), result(server, value, "all"))  # noqa: E731
        assert both() == (1, 1)
        restart(server, "member")
        before = hits(server)
        assert (both(), hits(server) - before) == ((1, 1), 1), "the files are the same"
        models.set(22)
        restart(server, "member")
        assert (both(), both(2)) == ((22, 22), (44, 44))
        assert WARNING in server.log.read_text()
        models.set(1)
        load(server)
        assert (both(), both(2)) == ((1, 1), (2, 2))


@pytest.mark.parametrize("place", ["factor.txt", "1/factor.txt"])
def test_a_file_changes_while_the_model_loads(models, place):
    """The answers are not stored under the identity of the files before the change."""
    models.write("member", shared_factor(place))
    models.set(1, f"member/{place}")
    with models.serve() as server:
        os.mkfifo(models.gate)
        loading = threading.Thread(target=load, args=(server,), daemon=True)
        loading.start()
        gate = writer(models.gate)
        models.set(22, f"member/{place}")
        models.gate.unlink()
        os.close(gate)
        join_all([loading])
        assert (result(server), result(server), hits(server)) == (22, 22, 0)
        assert WARNING in server.log.read_text()
        models.set(1, f"member/{place}")
        load(server)
        assert (result(server), result(server), hits(server)) == (1, 1, 1)


@needs_redis
def test_servers_with_equal_shared_files_share_a_redis(tmp_path):
    """The times of the files and the paths of the repositories do not matter."""
    with Redis(tmp_path) as redis:
        found = []
        for number, factor in enumerate((3, 3, 4)):
            models = Models(tmp_path / str(number))
            models.write("member")
            models.set(factor)
            os.utime(models.repository / "member/factor.txt", (number, number))
            with models.serve(LOAD, cache=f"redis,host=127.0.0.1,port={redis.port},timeout_ms=2000") as server:
                eventually("Redis is connected", lambda: "connected to Redis" in server.log.read_text())
                found.append((result(server), hits(server)))
                eventually("the answer is stored", lambda: len(redis.keys()) == (2 if factor == 4 else 1))
        assert found == [(3, 0), (3, 1), (4, 0)]
