"""Invalid data that a model writes into memory shared with the frontend, or sends, must not corrupt metrics or leave clients
without an error text."""

import json
import threading
import time

import pytest

from harness.server import Server, total
from harness.waiting import eventually
from python_backend.worker import PYTHON, has_worker
from security.vulnerability_checks import peak_kb

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

CALLER = '''
import ctypes, os, re, struct, time
import numpy as np
import triton_python_backend_utils as pb_utils

# Each ring has its positions in the first bytes, and then its data. The second ring is the worker's.
DATA, CAPACITY, SIZE = 256, 64 * 1024, 32 << 20

def text(value):
    return struct.pack("<I", len(value)) + value

def call(count):
    """Returns the frame of a call whose inputs are all the first bytes of the memory of outputs."""
    request = text(b"unknown") + text(b"") + text(b"") + bytes(1 + 8 + 2 + 16 + 4 + 4 + 2)
    one = text(b"X") + bytes([6]) + struct.pack("<IqQQ", 1, SIZE, 0, SIZE) + bytes(1)
    payload = bytes([5]) + struct.pack("<Q", 77) + request + struct.pack("<I", count) + one * count
    return struct.pack("<I", len(payload)) + payload

def reply_to(frame):
    """Writes the frame behind the back of the runtime; returns the text of the reply."""
    for line in open("/proc/self/maps"):
        place = re.match(r"([0-9a-f]+)-[0-9a-f]+ rw-s .*memfd:pharos-frames", line)
        if place:
            base = int(place[1], 16)
    ring = base + DATA + CAPACITY
    head = ctypes.c_uint64.from_address(ring)
    for position, byte in enumerate(frame, head.value):
        ctypes.c_ubyte.from_address(ring + DATA + position % CAPACITY).value = byte
    head.value += len(frame)
    os.write(3, b"1")
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for known in (b"the inputs of a call overlap", b"Model 'unknown' is not ready"):
            if known in ctypes.string_at(base + DATA, CAPACITY):
                return known
    return b"none"

class TritonPythonModel:
    def execute(self, requests):
        # The next frame of this process does not follow on the written one: the process is lost, and the next one answers.
        if not os.path.exists(PATH):
            count = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0]
            reply = reply_to(call(int(count)))
            with open(PATH, "wb") as file:
                file.write(reply)
        with open(PATH, "rb") as file:
            out = np.array([file.read()], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for _ in requests]
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


MOST_KB = 64 << 10
MOST_S = 3
"""The limit for the answer of the health check, on a busy machine too."""


def test_inputs_of_a_call_that_name_the_same_memory(tmp_path):
    """More than the server keeps without copies: 200 times 32 MiB."""
    (tmp_path / "models/caller/1").mkdir(parents=True)
    (tmp_path / "models/caller/1/model.py").write_text(f"PATH = {str(tmp_path / 'reply')!r}\n{CALLER}")
    (tmp_path / "models/caller/config.pbtxt").write_text(CONFIG.replace('"OUT" data_type: TYPE_INT32', '"OUT" data_type: TYPE_STRING'))
    with Server(tmp_path, [tmp_path / "models"], [f"--python={PYTHON}"]) as server:
        before, answers = peak_kb(server), []
        request = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [200]}]}
        client = threading.Thread(target=lambda: answers.append(server.infer("caller", request)))
        client.start()
        slowest = 0
        while client.is_alive():
            begun = time.monotonic()
            assert server.get("/v2/health/live")[0] == 200
            slowest = max(slowest, time.monotonic() - begun)
        ((status, answer),) = answers
        assert slowest < MOST_S and peak_kb(server) - before < MOST_KB, (slowest, peak_kb(server) - before)
        assert (status, answer["outputs"][0]["data"]) == (200, ["the inputs of a call overlap"]), answer
