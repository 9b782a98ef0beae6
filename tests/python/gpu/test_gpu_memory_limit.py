"""The limit of the memory that models use on each GPU (`--model-gpu-memory-limit`).

A library in place of NVML simulates two GPUs, and a backend in C (`uses_memory.c`) reports to it how much memory its processes
use there."""

import re

import pytest

from backends.native_backends import MISSING, compile, parameter, place, write
from harness.fake_gpus import Gpus
from harness.inference import one
from harness.server import ROOT, total
from harness.waiting import eventually, holds_for, pause_as_client

MODE = "--model-control-mode=on-demand"
GB = 1_000_000_000
DEVICES = f"""* devices 2
0 uuid GPU-a
0 memory {80 * GB} 0
1 uuid GPU-b
1 memory {80 * GB} 0
"""
UUIDS = ("GPU-a", "GPU-b")
LIMIT = f"--model-gpu-memory-limit={10 * GB}"
IO = 'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }'
VALUES = one("FP32", [1, 2], [3, 4])
KEPT = 'parameters { key: "min_loaded" value { string_value: "1" } }'

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """A backend directory with the backend of `uses_memory.c`."""
    folder = tmp_path_factory.mktemp("backends")
    compile(ROOT / "tests/python/gpu/uses_memory.c", place(folder, "uses_memory"))
    return folder


class Simulation:
    """Two simulated GPUs, a repository of models that use their memory, and a server."""

    def __init__(self, start, folder, backends):
        self.start_server, self.backends, self.models = start, backends, folder / "models"
        self.models.mkdir()
        (folder / "nvml").mkdir()
        self.gpus = Gpus(folder / "nvml")
        self.gpus.tell(DEVICES)

    def model(self, name: str, gpus: list, gigabytes: float, more="", grows=""):
        """Writes a model with an instance on each of these GPUs, whose processes together use so many gigabytes on each. `grows` is
        a parameter of the backend."""
        uses = ",".join(f"{gpu} {int(gigabytes * GB / len(gpus))}" for gpu in gpus)
        text = f'backend: "uses_memory" max_batch_size: 4 {IO}\ninstance_group {{ kind: KIND_GPU gpus: {gpus} }}\n'
        text += parameter("devices", f"{self.gpus.library}.devices") + parameter("uses", uses) + parameter("grows", grows)
        write(self.models, name, text + more)

    def start(self, *options):
        """Starts the server."""
        self.server = self.start_server(
            [], MODE, self.gpus.option(), f"--backend-directory={self.backends}", *options, repository=self.models
        )

    def assert_answers(self, *names: str):
        """Sends a request to each model."""
        for name in names:
            status, answer = self.server.infer(name, VALUES)
            assert (status, answer.get("outputs", [{}])[0].get("data")) == (200, [3, 4]), answer

    def loaded(self) -> set:
        """Returns the names of the loaded models."""
        return {name for name, versions in self.server.index().items() if versions[0].get("state") == "READY"}

    def value(self, name: str, **labels) -> float:
        """Returns the sum of the series of a metric."""
        return total(self.server.scrape(), name, **labels)

    def used(self) -> list:
        """Returns the gigabytes that models use on each GPU."""
        return [self.value("pharos_model_gpu_memory_used_bytes", gpu_uuid=uuid) / GB for uuid in UUIDS]

    def unloads(self, name: str) -> float:
        """Returns how often a model has made room."""
        return self.value("pharos_on_demand_unloads_total", model=name, reason="memory")


@pytest.fixture
def simulation(start, tmp_path, backends):
    """A simulation for one test."""
    return Simulation(start, tmp_path, backends)


def test_models_on_the_full_gpu_make_room(simulation):
    """The others stay, also those that had no requests for longer. Sizes are measured and shown for each GPU."""
    simulation.model("other", [1], 4)
    for name in ("a", "b", "c"):
        simulation.model(name, [0], 4)
    simulation.start(LIMIT)
    simulation.assert_answers("other")
    pause_as_client(2)
    simulation.assert_answers("a", "b")
    assert simulation.used() == [8, 4]
    simulation.assert_answers("c")
    loaded = simulation.loaded()
    assert loaded in ({"other", "a", "c"}, {"other", "b", "c"}), loaded
    assert simulation.unloads("a") + simulation.unloads("b") == 1 and simulation.unloads("other") == 0
    eventually("the memory is free", lambda: simulation.used() == [8, 4])
    assert [simulation.value("pharos_model_gpu_memory_limit_bytes", gpu_uuid=uuid) for uuid in UUIDS] == [10 * GB, 10 * GB]
    assert simulation.value("pharos_model_gpu_memory_bytes", model="c", version="1", gpu_uuid="GPU-a") == 4 * GB
    assert simulation.value("pharos_model_gpu_memory_bytes", model="c", gpu_uuid="GPU-b") == 0
    # Only GPUs are limited.
    assert not [name for name, _ in simulation.server.scrape() if name.startswith("pharos_model_memory_")]


def test_a_load_that_does_not_fit_is_refused_with_the_numbers(simulation):
    """The text names the GPU. Models on the other one are not unloaded, because that would free nothing."""
    simulation.model("other", [1], 4)
    simulation.model("a", [0], 4, more=KEPT)
    simulation.model("b", [0], 4, more=KEPT)
    simulation.model("c", [0], 4)
    simulation.start(LIMIT)
    simulation.assert_answers("other", "a", "b")
    expected = (
        "not enough memory on GPU 0: model 'c' needs about 4000.0 MB there; others use 8000.0 MB of at most 10000.0 MB "
        "(--model-gpu-memory-limit), and unloading those that may be unloaded would free 0.0 MB"
    )
    status, answer = simulation.server.infer("c", VALUES)
    assert (status, answer["error"]) == (503, f"model 'c' could not be loaded on demand: {expected}")
    assert simulation.value("pharos_on_demand_loads_total", model="c", result="no_memory") == 1
    status, text = simulation.server.ask("POST", "/v2/repository/models/c/load", b"")
    assert status == 400 and expected in text, text
    assert simulation.loaded() == {"other", "a", "b"}
    assert simulation.server.ask("POST", "/v2/repository/models/a/unload", b"")[0] == 200
    simulation.assert_answers("c")


def test_sizes_are_remembered(simulation):
    """A model that turns out too large is unloaded again, and refused before it starts from then on."""
    simulation.model("large", [1], 12)
    simulation.model("a", [0], 4)
    simulation.start(LIMIT)
    simulation.assert_answers("a")
    text = "model 'large' needs about 12000.0 MB there; others use 0.0 MB of at most 10000.0 MB"
    status, answer = simulation.server.infer("large", VALUES)
    assert status == 503 and f"not enough memory on GPU 1: {text}" in answer["error"], answer
    assert simulation.value("pharos_on_demand_loads_total", model="large", result="failure") == 1
    eventually(
        "it is refused before it starts",
        lambda: simulation.server.infer("large", VALUES)[0] == 200
        or simulation.value("pharos_on_demand_loads_total", model="large", result="no_memory"),
    )
    assert simulation.loaded() == {"a"}
    eventually("its process has ended", lambda: simulation.used() == [4, 0])


def test_models_that_grow_make_others_on_the_gpu_leave(simulation):
    """Sizes are measured every second, and the largest is expected of the next load."""
    simulation.model("other", [1], 4)
    simulation.model("a", [0], 4)
    simulation.model("b", [0], 3, grows=f"0 {4 * GB}")
    simulation.start(LIMIT)
    simulation.assert_answers("other", "b")
    eventually("b has grown", lambda: simulation.value("pharos_model_gpu_memory_bytes", model="b") == 7 * GB)
    assert simulation.server.ask("POST", "/v2/repository/models/a/load", b"")[0] == 200
    # What a client has loaded stays, and b needs 7 GB again.
    assert simulation.loaded() == {"other", "a"} and simulation.unloads("b") == 1
    assert simulation.server.infer("b", VALUES)[0] == 503
    assert simulation.server.ask("POST", "/v2/repository/models/a/unload", b"")[0] == 200
    simulation.assert_answers("b")
    holds_for("the model on the other GPU stays", 2, lambda: "other" in simulation.loaded())


def test_a_model_on_two_gpus_makes_room_on_both(simulation):
    """In one decision: a model that frees memory on both is unloaded in place of two."""
    simulation.model("first", [0], 6)
    simulation.model("second", [1], 6)
    simulation.model("both", [0, 1], 6)
    simulation.start(LIMIT)
    simulation.assert_answers("first", "second")
    assert simulation.used() == [6, 6]
    simulation.assert_answers("both")
    assert simulation.loaded() == {"both"}
    eventually("their memory is free", lambda: simulation.used() == [6, 6])
    simulation.assert_answers("first")
    assert simulation.loaded() == {"first"}


def test_shares_and_limits_of_single_gpus(simulation):
    """A limit of one GPU takes precedence. Limits without effect are logged."""
    simulation.model("a", [0], 4)
    simulation.start("--model-gpu-memory-limit=50%", f"--model-gpu-memory-limit=1:{3 * GB};7:10%")
    limits = [simulation.value("pharos_model_gpu_memory_limit_bytes", gpu_uuid=uuid) for uuid in UUIDS]
    assert limits == [40 * GB, 3 * GB]
    log = simulation.server.log.read_text()
    assert f"memory of models on GPU 0: at most {40 * GB >> 20} MiB (--model-gpu-memory-limit)" in log
    assert "--model-gpu-memory-limit names GPU 7, which does not exist; existing GPUs: [0, 1]" in log
    simulation.assert_answers("a")


def test_without_gpus_it_has_no_effect(simulation):
    """The log says so once."""
    simulation.gpus.tell("* devices 0\n")
    write(simulation.models, "plain", f'backend: "builtin" max_batch_size: 4 {IO} {parameter("function", "identity")}')
    simulation.start("--model-gpu-memory-limit=50%")
    simulation.assert_answers("plain")
    log = simulation.server.log.read_text()
    assert len(re.findall(r"--model-gpu-memory-limit has no effect: there are no GPUs", log)) == 1, log
    assert not [name for name, _ in simulation.server.scrape() if name.startswith("pharos_model_gpu_memory_")]


def test_memory_of_unreadable_processes_is_expected(simulation):
    """If the driver reports only ids of processes in another namespace, models count as much as they are expected to use."""
    simulation.gpus.tell(f"{DEVICES}0 process 4194305 5\n")
    text = f'backend: "uses_memory" max_batch_size: 4 {IO}\ninstance_group {{ kind: KIND_GPU gpus: [ 0 ] }}\n'
    (simulation.gpus.library.parent / "ignored").touch()
    for name in ("a", "b"):
        write(simulation.models, name, text + parameter("devices", f"{simulation.gpus.library.parent}/ignored"))
    # The first guess is 512 MiB for each instance.
    simulation.start(f"--model-gpu-memory-limit={800 << 20}")
    simulation.assert_answers("a")
    assert 512 << 20 <= simulation.value("pharos_model_gpu_memory_used_bytes", gpu_uuid="GPU-a") < 513 << 20
    simulation.assert_answers("b")
    assert simulation.loaded() == {"b"} and simulation.unloads("a") == 1
