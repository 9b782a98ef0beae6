"""Invalid data that a model writes into memory shared with the frontend, or sends, must not corrupt metrics or leave clients
without an error text."""

import json

import pytest

from harness.server import Server, total
from harness.waiting import eventually
from python_backend.worker import PYTHON, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")

CONFIG = """backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
MODEL = '''
import ctypes, re, threading, time
import triton_python_backend_utils as pb_utils

# The ring of metric samples begins with these bytes; the count of dropped samples is its word 24.
MAGIC, DROPPED = int.from_bytes(b"PHRSRING", "little"), 24 * 8

def scribble(value):
    found = 0
    for line in open("/proc/self/maps"):
        place = re.match(r"([0-9a-f]+)-[0-9a-f]+ rw-s", line)
        if place and "memfd:" in line:
            at = int(place[1], 16)
            if ctypes.c_uint64.from_address(at).value == MAGIC:
                ctypes.c_uint64.from_address(at + DROPPED).value = value
                found += 1
    return found

def corrupt_frames(offset):
    """Writes an impossible position into the rings of frames, for a second, because the next frame may repair it."""
    for line in open("/proc/self/maps"):
        place = re.match(r"([0-9a-f]+)-[0-9a-f]+ rw-s .*memfd:pharos-frames", line)
        if place:
            word, end = ctypes.c_uint64.from_address(int(place[1], 16) + offset), time.monotonic() + 1
            while time.monotonic() < end:
                word.value = 2**62

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            value = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            if value > 1000:
                threading.Thread(target=corrupt_frames, args=[value - 1001]).start()
                value = 3
            if value < 0:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("")))
                continue
            import numpy as np
            out = pb_utils.Tensor("OUT", np.array([scribble(10**value)], dtype=np.int32))
            answers.append(pb_utils.InferenceResponse([out]))
        return answers
'''


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with the model."""
    folder = tmp_path_factory.mktemp("untrusted")
    (folder / "models/m/1").mkdir(parents=True)
    (folder / "models/m/1/model.py").write_text(MODEL)
    (folder / "models/m/config.pbtxt").write_text(CONFIG)
    with Server(folder, [folder / "models"], [f"--python={PYTHON}"]) as server:
        yield server


def ask(server, value):
    """Returns the status and the answer."""
    return server.infer("m", {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}]})


def test_a_count_in_shared_memory_is_checked(served):
    name = "pharos_metric_samples_dropped_total"
    for value in (18, 19, 3, 18):
        status, answer = ask(served, value)
        assert (status, answer["outputs"][0]["data"]) == (200, [1]), "the model must find the ring"
    dropped = lambda: total(served.scrape(), name, model="m")
    eventually("the invalid count is detected", lambda: dropped() > 0)
    assert dropped() <= 2 * 2**24


def test_an_error_without_a_message_has_one(served):
    status, answer = ask(served, -1)
    assert status == 500, answer
    assert answer == {"error": "the model reported an error without a message"}, json.dumps(answer)


# The positions in the rings of frames, by their offsets in the memory.
RING = 256 + 64 * 1024
POSITIONS = {"written to the worker": 0, "read by the worker": 64, "written to the frontend": RING, "read by the frontend": RING + 64}


@pytest.mark.parametrize("position", POSITIONS)
def test_an_impossible_position_in_a_ring_of_frames_costs_only_its_worker(served, position):
    restarts = lambda: total(served.scrape(), "pharos_instance_restarts_total", model="m")
    before = restarts()
    # The response may leave before the position is read. Otherwise the request is lost with its worker, and so is its retry.
    status, answer = ask(served, 1001 + POSITIONS[position])
    assert status in (200, 500, 503), answer
    eventually("the worker is replaced", lambda: ask(served, 3)[0] == 200 and restarts() > before)
