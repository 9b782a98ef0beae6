"""The limit of the memory that models use (`--model-memory-limit`)."""

import random
import re
import threading
import time
from pathlib import Path

import pytest

from harness.inference import one
from harness.processes import used_bytes
from harness.server import total
from harness.waiting import eventually, holds_for, join_all, pause_as_client
from python_backend.worker import PYTHON, has_worker
from repository.repository_tables import ensemble, model

MODE = "--model-control-mode=on-demand"
VALUES = one("FP32", [1, 2], [3, 4])
MB = 1_000_000
LARGE = 100 * MB
"""The bytes that each model of `large` allocates."""
LIMIT = 400 * MB
"""The memory of three such models, with their interpreters, but not of four."""
CODE = """import os
import time
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, arguments):
        self.held = [os.urandom(1000) * (SIZE // 1000)]

    def execute(self, requests):
        if os.path.exists("GROW"):
            self.held.append(os.urandom(1000) * (2 * SIZE // 1000))
            time.sleep(3)
        while WAITS and not os.path.exists(WAITS):
            time.sleep(0.01)
        return [
            utils.InferenceResponse([utils.Tensor("OUTPUT0", utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())])
            for request in requests
        ]
"""
IO = """input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }"""

needs_worker = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")


def large(folder: Path, *names: str, more="", waits=""):
    """Writes models that each allocate `LARGE` bytes. While the file `NAME.grow` exists, a request takes three seconds and twice as
    many bytes again. Requests execute until the file `waits` exists."""
    for name in names:
        (folder / name / "1").mkdir(parents=True)
        code = CODE.replace("SIZE", str(LARGE)).replace("GROW", str(folder.parent / f"{name}.grow")).replace("WAITS", repr(str(waits)))
        (folder / name / "1/model.py").write_text(code)
        (folder / name / "config.pbtxt").write_text(f'backend: "python" max_batch_size: 4 {IO} {more}')


def small(folder: Path, *names: str, text=""):
    """Writes models of the builtin backend."""
    for name in names:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(text or f'backend: "builtin"\n{model()}')


def assert_answers(server, name: str):
    status, answer = server.infer(name, VALUES)
    assert (status, answer.get("outputs", [{}])[0].get("data")) == (200, [3, 4]), answer


def count(server, what: str, name: str, **labels) -> float:
    return total(server.scrape(), f"pharos_on_demand_{what}_total", model=name, **labels)


def loaded(server) -> set:
    return {name for name, versions in server.index().items() if versions[0].get("state") == "READY"}


class Sampler:
    """Reads the memory of the workers again and again, and remembers the most."""

    def __init__(self, server):
        self.server, self.most, self.samples, self.stopping = server, 0, 0, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.stopping.is_set():
            memory = {worker: used_bytes(worker) for worker in self.server.workers()}
            # The others could have ended before their successors began.
            used = sum(memory[worker] for worker in self.server.workers() if worker in memory)
            self.most = max(self.most, used)
            self.samples += 1
            pause_as_client(0.005)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        join_all([self.thread])
        assert self.samples > 0


@needs_worker
def test_the_model_unused_for_longest_makes_room(start, tmp_path):
    """Before the new one starts: at no time do the processes use more than the limit."""
    large(tmp_path / "models", "a", "b", "c", "d")
    server = start([], MODE, f"--model-memory-limit={LIMIT}", f"--python={PYTHON}", repository=tmp_path / "models")
    with Sampler(server) as sampler:
        for name in ("a", "b"):
            assert_answers(server, name)
        # Much longer than any difference of the durations of their loads.
        pause_as_client(8)
        for name in ("c", "a"):
            assert_answers(server, name)
        pause_as_client(1.2)
        assert loaded(server) == {"a", "b", "c"}
        assert_answers(server, "d")
        assert loaded(server) == {"a", "c", "d"}
    assert 3 * LARGE < sampler.most <= LIMIT, f"{sampler.most} bytes in {sampler.samples} samples"
    assert count(server, "unloads", "b", reason="memory") == 1
    scraped = server.scrape()
    used, limit = (total(scraped, f"pharos_model_memory_{what}_bytes") for what in ("used", "limit"))
    assert limit == LIMIT and 3 * LARGE < used <= LIMIT
    assert total(scraped, "pharos_model_memory_bytes") == used
    assert LARGE < total(scraped, "pharos_model_memory_bytes", model="d", version="1") < LARGE + 60 * MB


@needs_worker
def test_a_load_by_request_makes_room_too(start, tmp_path):
    """It does not keep the models from ending for whose memory it waits."""
    large(tmp_path / "models", "a", "b", "c", "d")
    server = start([], MODE, f"--model-memory-limit={LIMIT}", f"--python={PYTHON}", repository=tmp_path / "models")
    for name in ("a", "b", "c"):
        assert_answers(server, name)
    began = time.monotonic()
    status, answer = server.ask("POST", "/v2/repository/models/d/load", b"")
    assert status == 200, answer
    assert time.monotonic() - began < 20, "it waits up to 30 s for the ends of models"
    assert "d" in loaded(server) and len(loaded(server)) == 3
    assert total(server.scrape(), "pharos_on_demand_unloads_total", reason="memory") == 1


@needs_worker
def test_a_load_that_does_not_fit_is_refused_with_the_numbers(start, tmp_path):
    """Nothing is unloaded for it, and it is possible as soon as it fits."""
    large(tmp_path / "models", "a", "b", "c", "d")
    flags = [f"--model-memory-limit={LIMIT}", f"--python={PYTHON}", "--load-model=a,b", "--model-idle-unload-secs=600"]
    (tmp_path / "models/c/config.pbtxt").open("a").write('parameters { key: "min_loaded" value { string_value: "1" } }')
    server = start([], MODE, *flags, repository=tmp_path / "models")
    # The configuration keeps c.
    assert_answers(server, "c")
    for _ in range(2):
        status, answer = server.infer("d", VALUES)
        expected = (
            r"model 'd' could not be loaded on demand: not enough memory: model 'd' needs about 1\d\d\.\d MB; others use 3\d\d\.\d MB "
            r"of at most 400\.0 MB \(--model-memory-limit\), and unloading those that may be unloaded would free 0\.0 MB"
        )
        assert status == 503 and re.fullmatch(expected, answer["error"]), answer
    assert count(server, "loads", "d", result="no_memory") == 2
    status, text = server.ask("POST", "/v2/repository/models/d/load", b"")
    assert status == 400 and "not enough memory: model 'd' needs" in text, text
    assert loaded(server) == {"a", "b", "c"}
    assert server.ask("POST", "/v2/repository/models/a/unload", b"")[0] == 200
    assert_answers(server, "d")


def executing(start, folder: Path, name: str):
    """Starts a server with room for one of the models a and b. Returns it while a request to a model executes, until the file `name`
    exists, and the thread that waits for the answer."""
    large(folder / "models", "a", "b", waits=folder / name)
    server = start([], MODE, f"--model-memory-limit={180 * MB}", f"--python={PYTHON}", repository=folder / "models")
    (folder / name).touch()
    # Then their sizes are known.
    for model in ("b", "a"):
        assert_answers(server, model)
    (folder / name).unlink()
    client = threading.Thread(target=assert_answers, args=(server, "a"))
    client.start()
    eventually("it executes", lambda: total(server.scrape(), "pharos_model_executing_requests", model="a") == 1)
    return server, client


@needs_worker
def test_a_load_waits_for_requests_that_end_soon(start, tmp_path):
    """Their model is unloaded afterwards, and the request is answered."""
    server, client = executing(start, tmp_path, "done")
    other = threading.Thread(target=assert_answers, args=(server, "b"))
    other.start()
    eventually("it waits", lambda: total(server.scrape(), "pharos_on_demand_waiting_requests") == 1)
    assert loaded(server) == {"a"}
    (tmp_path / "done").touch()
    join_all([client, other])
    assert loaded(server) == {"b"} and count(server, "loads", "b", result="no_memory") == 0


@needs_worker
def test_a_load_is_refused_if_requests_do_not_end_soon(start, tmp_path):
    """After a second; the requests continue."""
    server, client = executing(start, tmp_path, "done")
    began = time.monotonic()
    status, answer = server.infer("b", VALUES)
    assert status == 503 and "not enough memory: model 'b' needs" in answer["error"], answer
    assert 1 <= time.monotonic() - began < 10
    (tmp_path / "done").touch()
    join_all([client])
    assert_answers(server, "b")


@needs_worker
def test_a_model_that_turns_out_too_large_is_unloaded_again(start, tmp_path):
    """Its size is known from then on, so that it is refused before it starts."""
    large(tmp_path / "models", "a")
    server = start([], MODE, f"--model-memory-limit={60 * MB}", f"--python={PYTHON}", repository=tmp_path / "models")
    status, answer = server.infer("a", VALUES)
    assert status == 503 and re.search(r"needs about 1\d\d\.\d MB; others use 0\.0 MB of at most 60\.0 MB", answer["error"]), answer
    assert count(server, "loads", "a", result="failure") == 1
    eventually("it is refused before it starts", lambda: count(server, "loads", "a", result="no_memory") or server.infer("a", VALUES)[0] == 200)
    eventually("its process has ended", lambda: not server.workers())
    eventually("its memory is free", lambda: total(server.scrape(), "pharos_model_memory_used_bytes") == 0)


@needs_worker
def test_models_that_grow_make_others_leave(start, tmp_path):
    """A model has as much memory as its requests need. Others are unloaded, not the growing one, which executes a request."""
    large(tmp_path / "models", "a", "b")
    server = start([], MODE, f"--model-memory-limit={LIMIT}", f"--python={PYTHON}", repository=tmp_path / "models")
    for name in ("a", "b"):
        assert_answers(server, name)
    (tmp_path / "b.grow").touch()
    assert_answers(server, "b")
    eventually("the other is unloaded", lambda: count(server, "unloads", "a", reason="memory") == 1)
    assert loaded(server) == {"b"}
    # The next load of b expects what it has used.
    assert total(server.scrape(), "pharos_model_memory_bytes", model="b") > 3 * LARGE


@needs_worker
def test_a_start_with_too_many_models_names_the_numbers(start, tmp_path):
    """The limit also holds for models that are loaded at the start."""
    large(tmp_path / "models", "a", "b", "c", "d", "e")
    flags = [f"--model-memory-limit={LIMIT}", f"--python={PYTHON}", "--model-load-thread-count=1"]
    server = start([], *flags, repository=tmp_path / "models", wait=False)
    assert server.process.wait(60) == 1
    assert re.search(r"not enough memory: model '\w' needs about 1\d\d\.\d MB; others use 3", server.log_tail()), server.log_tail()


def test_an_ensemble_leaves_with_its_members(start, tmp_path):
    """It needs no memory itself. Its members stay while it is loaded."""
    folder = tmp_path / "models"
    small(folder, "first", "second", *(f"m{number}" for number in range(8)))
    small(folder, "both", text=ensemble("both", "first", "second"))
    server = start([], MODE, f"--model-memory-limit={1000 * MB}", repository=folder)
    assert_answers(server, "both")
    assert_answers(server, "m0")
    sizes = {name: total(server.scrape(), "pharos_model_memory_bytes", model=name) for name in ("first", "m0")}
    server.stop()
    # Room for the ensemble and two others.
    limit = int(2 * sizes["first"] + 2.7 * sizes["m0"])
    server = start([], MODE, f"--model-memory-limit={limit}", repository=folder)
    for number in range(8):
        assert_answers(server, "both")
        assert_answers(server, f"m{number}")
        found = loaded(server)
        assert {"first", "second", "both"} & found in ({"first", "second", "both"}, set()), found
    assert sum(count(server, "unloads", f"m{number}", reason="memory") for number in range(8)) > 0


def test_pressure_unloads_models_one_after_the_other(start, tmp_path):
    """Processes that wait for memory are reported by the kernel, here by a file in its place."""
    folder = tmp_path / "models"
    small(folder, "a", "b", "c")
    pressure = tmp_path / "memory.pressure"
    text = "some avg10=60.00 avg60=10.00 avg300=0.00 total=9\nfull avg10={:.2f} avg60=0.00 avg300=0.00 total=7\n"
    pressure.write_text(text.format(9.5))
    flags = ["--model-memory-limit=90%", f"--cgroup-root={tmp_path}", "--load-model=c"]
    server = start([], MODE, *flags, repository=folder)
    for name in ("a", "b"):
        assert_answers(server, name)
    holds_for("the models stay", 2.5, lambda: loaded(server) == {"a", "b", "c"})
    pressure.write_text(text.format(30))
    for number in (1, 2):
        eventually(
            "a model is unloaded", lambda number=number: total(server.scrape(), "pharos_on_demand_unloads_total", reason="pressure") >= number
        )
    assert loaded(server) == {"c"}


def test_a_reload_makes_room_by_unloading_others(start, tmp_path):
    """The model itself is the cheapest to unload, but it is being loaded. Two models fit."""
    small(tmp_path / "models", "a", "b")
    probe = start([], MODE, "--model-memory-limit=50%", repository=tmp_path / "models")
    assert_answers(probe, "a")
    limit = int(2.5 * total(probe.scrape(), "pharos_model_memory_bytes", model="a"))
    probe.stop()
    server = start([], MODE, f"--model-memory-limit={limit}", repository=tmp_path / "models")
    for name in ("b", "a", *20 * ["b"]):
        assert_answers(server, name)
        pause_as_client(0.2)
    config = tmp_path / "models/a/config.pbtxt"
    config.write_text(f"{config.read_text()} dynamic_batching {{ max_queue_delay_microseconds: 100 }}")
    began = time.monotonic()
    status, answer = server.ask("POST", "/v2/repository/models/a/load", b"")
    assert (status, time.monotonic() - began < 15, loaded(server)) == (200, True, {"a"}), answer
    assert_answers(server, "a")


def test_models_that_are_used_again_and_again_stay(start, tmp_path):
    """Each round uses two models and one that was never used before, much faster than the memory is measured. Four fit."""
    often, rounds = ("a", "b"), 60
    others = [f"m{number}" for number in range(rounds)]
    small(tmp_path / "models", *often, *others)
    probe = start([], MODE, "--model-memory-limit=50%", repository=tmp_path / "models")
    assert_answers(probe, "a")
    limit = int(4.5 * total(probe.scrape(), "pharos_model_memory_bytes", model="a"))
    probe.stop()
    server = start([], MODE, f"--model-memory-limit={limit}", repository=tmp_path / "models")
    for other in others:
        for name in (*often, other):
            assert_answers(server, name)
    loads = {name: count(server, "loads", name, result="success") for name in (*often, *others)}
    assert all(loads[name] == 1 for name in others)
    # How long the first loads took decides too, so one of the two may have left at the beginning.
    assert loads["a"] + loads["b"] <= rounds / 6, loads


def test_no_request_fails_and_the_limit_holds_with_many_models(start, tmp_path):
    """Clients choose among sixty models, most of them rarely; a third of them fits."""
    names = [f"m{number}" for number in range(60)]
    small(tmp_path / "models", *names)
    probe = start([], MODE, "--model-memory-limit=50%", repository=tmp_path / "models")
    assert_answers(probe, "m0")
    size = total(probe.scrape(), "pharos_model_memory_bytes", model="m0")
    probe.stop()
    limit = int(20 * size)
    server = start([], MODE, f"--model-memory-limit={limit}", repository=tmp_path / "models")
    until, failures, asked = time.monotonic() + 15, [], []
    weights = [1 / (rank + 1) for rank in range(len(names))]

    def client(seed: int):
        chance = random.Random(seed)
        # On a busy machine, few requests are answered in this time.
        while (time.monotonic() < until or len(asked) < 200) and not failures:
            name = chance.choices(names, weights)[0]
            status, answer = server.infer(name, VALUES)
            asked.append(name)
            if status != 200 or answer["outputs"][0]["data"] != [3, 4]:
                failures.append((name, status, answer))

    with Sampler(server) as sampler:
        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for one_client in clients:
            one_client.start()
        for one_client in clients:
            one_client.join()
    assert not failures, failures[:3]
    # The models are small: some pages that they write before the server measures them again are several percent.
    assert sampler.most <= 1.1 * limit, f"{sampler.most} of {limit} bytes in {sampler.samples} samples"
    loads = sum(count(server, "loads", name, result="success") for name in names)
    unloads = sum(count(server, "unloads", name, reason="memory") for name in names)
    assert loads - unloads == len(loaded(server)) <= 20
    assert loads > 60, f"{loads} loads for {len(asked)} requests"
    print(f"{len(asked)} requests, {loads:.0f} loads, at most {sampler.most / limit:.2f} of the limit in {sampler.samples} samples")
