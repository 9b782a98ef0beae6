"""Tensors on devices in Python models: inputs in device memory of clients, and outputs that libraries make on a device.

No GPU is needed. A simulated driver (`fake_cuda`) provides device memory that can be read where it is mapped. Stand-ins replace
PyTorch and CuPy for copies from a device; real PyTorch, if installed, is used with tensors that claim a device."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpu.devices import Devices
from gpu.world import TWO, World
from harness.waiting import DEADLINE_S, eventually
from python_backend.worker import CODE, PYTHON, has_worker

GPU_ERROR = "Tensor is stored in GPU and cannot be converted to NumPy."
CONFIG = """
backend: "python"
%s
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
ON_DEVICE = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "%s" } }'
BATCHED = "max_batch_size: 4\ndynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 3000000 }\n"
GPU, CPU = "instance_group { kind: KIND_GPU gpus: [ 1 ] }", "instance_group { kind: KIND_CPU }"
TYPES = {"float32": "FP32", "int64": "INT64", "bool": "BOOL", "bfloat16": "BF16", "float16": "FP16"}

has_torch = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True).returncode == 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")]


class Made(World):
    """A server whose workers use the simulated driver."""

    def __init__(self, folder):
        super().__init__(folder)
        self.devices = Devices(folder / "cuda")
        self.environment = dict(self.devices.environment)

    def code(self, name, code, parameters="", group=GPU):
        """Writes a model with this code."""
        version = self.models / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text((CODE / f"{code}.py").read_text())
        (version.parent / "config.pbtxt").write_text(f"{CONFIG % parameters}\n{group}\n")

    def region(self, name, content: bytes, number=1):
        """Registers a region on a device of the machine."""
        body = {"raw_handle": {"b64": self.devices.allocate(name, content)}, "device_id": number, "byte_size": len(content)}
        status, text = self.server.ask("POST", f"/v2/cudasharedmemory/region/{name}/register", json.dumps(body))
        assert status == 200, text

    def unregister(self, name):
        """Unregisters a region."""
        assert self.server.ask("POST", f"/v2/cudasharedmemory/region/{name}/unregister")[0] == 200

    def infer(self, model, given, how="tensor", out=None, **more):
        """Sends a request; returns what the model reports, and its output. `given` is a list of floats, or (region, offset,
        shape)."""
        entry = {"name": "IN", "datatype": "FP32"}
        if isinstance(given, tuple):
            region, offset, shape = given
            size = 4 * int(np.prod(shape))
            place = {"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": size}
            entry |= {"shape": shape, "parameters": place}
        else:
            entry |= {"shape": list(np.shape(given)), "data": np.ravel(given).tolist()}
        request = {"inputs": [entry], "parameters": {"how": how, **more}}
        if out:
            place = dict(zip(("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"), out))
            request["outputs"] = [{"name": "OUT", "parameters": place}]
        status, answer = self.server.infer(model, request)
        assert status == 200, answer
        (output,) = answer["outputs"]
        return json.loads(answer.get("parameters", {}).get("told", "null")), output.get("data")


@pytest.fixture
def world(tmp_path):
    """A server and its devices for one test."""
    made = Made(tmp_path)
    yield made
    if made.server and made.server.process.poll() is None:
        made.server.kill()


def floats(*values) -> bytes:
    """Returns values as bytes."""
    return np.array(values, np.float32).tobytes()


def test_inputs_on_the_device_stay_there(world):
    """With FORCE_CPU_ONLY_INPUT_TENSORS "no", as in Triton: the tensor stays on the device and its elements are not copied. The
    output, which is the input, is copied once, to the place that the client requested."""
    world.code("there", "own_device", ON_DEVICE % "no")
    world.start(TWO)
    world.region("own", floats(*range(16)) + bytes(64))
    expected = {
        "cpu": False, "device": [2, 0], "capsule": [2, 0], "values": [4.0, 5.0, 6.0], "numpy": GPU_ERROR, "shape": [3],
        "together": 1,
    }  # fmt: skip
    report, output = world.infer("there", ("own", 16, [3]), "none")
    assert (report, output) == (expected, [0, 0, 0])
    assert [world.devices.calls(what, "own") for what in ("read", "write")] == [0, 0]
    for number, how in enumerate(("tensor", "capsule"), 1):
        report, output = world.infer("there", ("own", 16, [3]), how)
        assert output == [4, 5, 6]
        assert report.pop("again", [False, [2, 0]]) == [False, [2, 0]]
        assert (report, world.devices.calls("read", "own")) == (expected, number)
    # Outputs for another place on a device are copied on the device.
    world.region("other", bytes(64), number=0)
    for how, region in [("tensor", "own"), ("capsule", "own"), ("lent", "own"), ("tensor", "other"), ("lent", "other")]:
        before = [world.devices.calls(*call) for call in (("copy_to", region), ("wait", "default stream"))]
        # The answer has no elements of outputs that went to shared memory.
        assert world.infer("there", ("own", 16, [3]), how, (region, 52, 12))[1] is None
        assert world.devices.floats(region, 3, 52) == [4, 5, 6], how
        after = [world.devices.calls(*call) for call in (("copy_to", region), ("wait", "default stream"))]
        assert [now - then for now, then in zip(after, before)] == [1, 1], how
        (world.devices.folder / region).open("r+b").write(floats(*range(16)))
    # The library gets the stream that waits for its work: the driver's default stream.
    assert world.infer("there", ("own", 16, [3]), "streams")[0]["streams"][-1] == 1
    # A place that is too small is an error, and nothing is written.
    status, answer = world.server.infer("there", {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [3], "parameters": {
            "shared_memory_region": "own", "shared_memory_offset": 16, "shared_memory_byte_size": 12}}],
        "outputs": [{"name": "OUT", "parameters": {
            "shared_memory_region": "other", "shared_memory_offset": 0, "shared_memory_byte_size": 8}}],
    })  # fmt: skip
    assert (status, world.devices.floats("other", 3)) == (500, [0, 1, 2]), answer
    assert "(8 bytes) should be at least 12 bytes" in answer["error"]
    # Data in the request itself is in CPU memory as usual.
    report, output = world.infer("there", [7.0, 8.0], "capsule")
    assert (report["cpu"], report["capsule"], report["numpy"], output) == (True, [1, 0], [7, 8], [7, 8])


def test_memory_of_other_devices_and_unaligned_memory(world):
    """Memory of another device is reported on that device, by the process's number. Unaligned memory is copied to the CPU."""
    world.code("there", "own_device", ON_DEVICE % "no")
    world.start(TWO)
    world.region("other", floats(1, 2, 3, 4), number=0)
    world.region("odd", floats(*range(8)))
    report, output = world.infer("there", ("other", 0, [4]))
    assert (report["device"], report["capsule"], report["values"], output) == ([2, 1], [2, 1], [1, 2, 3, 4], [1, 2, 3, 4])
    report, output = world.infer("there", ("odd", 4, [2]))
    assert (report["cpu"], report["capsule"], report["numpy"], output) == (True, [1, 0], [1, 2], [1, 2])


def test_inputs_are_copied_unless_a_model_asks_for_them(world):
    """"yes" is the default, an instance on CPUs has no device, and any other word is an error."""
    world.code("default", "own_device")
    world.code("yes", "own_device", ON_DEVICE % "yes")
    world.code("cpu", "own_device", ON_DEVICE % "no", CPU)
    world.code("wrong", "own_device", ON_DEVICE % "maybe")
    server = world.start(TWO, wait=False)
    for name in ("default", "yes", "cpu"):
        server.wait_until_ready(f"/v2/models/{name}/ready")
    world.region("own", floats(1, 2, 3, 4))
    for name in ("default", "yes", "cpu"):
        report, output = world.infer(name, ("own", 0, [4]))
        assert (report["cpu"], report["device"], report["numpy"], output) == (True, [1, 0], [1, 2, 3, 4], [1, 2, 3, 4]), name
    reason = "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: 'maybe', it must be 'yes' or 'no'"
    eventually("it is not served", lambda: reason in world.reason("wrong"))


def test_each_request_of_a_batch_has_its_own_tensor(world):
    """Some are on a device and some are not; one that cannot be read fails only its own request."""
    world.code("batch", "own_device", f"{BATCHED}{ON_DEVICE % 'no'}")
    server = world.start(TWO)
    world.region("own", floats(*range(16)))
    with ThreadPoolExecutor(3) as clients:
        given = [("own", 0, [1, 4]), [[9.0, 9.0, 9.0, 9.0]], ("own", 32, [1, 4])]
        answers = list(clients.map(lambda one: world.infer("batch", one), given))
    assert [output for _, output in answers] == [[0, 1, 2, 3], [9] * 4, [8, 9, 10, 11]]
    assert [(report["cpu"], report["shape"], report["together"]) for report, _ in answers] == [
        (False, [1, 4], 3), (True, [1, 4], 3), (False, [1, 4], 3),
    ]  # fmt: skip
    assert server.statistics("batch")["execution_count"] == 1


def test_outputs_over_inputs_are_written_after_all_are_made(world):
    """An input that is passed on is unchanged, even if its request, or another one of the batch, writes its output there."""
    world.code("alone", "own_device", ON_DEVICE % "no")
    world.code("batch", "own_device", f"{BATCHED}{ON_DEVICE % 'no'}")
    server = world.start(TWO)
    world.region("own", floats(*range(16)))
    for offset in (20, 16, 12):
        given = world.devices.floats("own", 3, 16)
        world.infer("alone", ("own", 16, [3]), "tensor", ("own", offset, 12))
        assert world.devices.floats("own", 3, offset) == given
    (world.devices.folder / "own").open("r+b").write(floats(*range(16)))
    with ThreadPoolExecutor(3) as clients:
        # The first two swap, the third has a separate place.
        places = [(0, 32), (32, 0), (16, 48)]
        swap = lambda place: world.infer("batch", ("own", place[0], [1, 4]), "tensor", ("own", place[1], 16))  # noqa: E731
        report = [report for report, _ in clients.map(swap, places)]
    assert [(one["cpu"], one["together"]) for one in report] == [(False, 3)] * 3
    assert world.devices.floats("own", 16) == [8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]
    assert world.devices.calls("copy_to", "own") == 1, "the third's"
    assert server.statistics("batch")["execution_count"] == 1


def test_memory_stays_open_while_a_model_holds_its_tensor(world):
    """The client unregisters its region while the model holds the tensor: the memory is closed when the model releases it."""
    world.code("keeps", "own_device", ON_DEVICE % "no")
    world.start(TWO)
    world.region("own", floats(1, 2, 3, 4))
    # By the process that has mapped it.
    before = world.devices.calls("close", "own")
    world.infer("keeps", ("own", 0, [4]), "keep")
    world.unregister("own")
    report, _ = world.infer("keeps", [0.0], "kept")
    assert (report["capsule"], report["values"]) == ([2, 0], [1, 2, 3, 4])
    assert world.devices.calls("close", "own") == before
    world.infer("keeps", [0.0], "drop")
    eventually("it is closed", lambda: world.devices.calls("close", "own") == before + 1)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A server with a model of the simulated libraries, and one with real PyTorch if it is installed."""
    world = Made(tmp_path_factory.mktemp("outputs"))
    world.code("made", "own_outputs", group=CPU)
    if has_torch:
        for torch_type, name in TYPES.items():
            world.code(torch_type, "own_torch", group=CPU)
            config = world.models / torch_type / "config.pbtxt"
            changed = config.read_text().replace('name: "OUT" data_type: TYPE_FP32', f'name: "{torch_type}" data_type: TYPE_{name}')
            config.write_text(changed)
    world.start("* devices 0")
    yield world
    world.server.kill()


VALUES = np.arange(12, dtype=np.float32).reshape(12).tolist()
ARENA = "/memfd:pharos-outputs"
HOW = {
    "torch": [["copy_", ARENA, True, False]],
    "cupy": [["get", ARENA]],
    # Versions that cannot write to existing memory, and other libraries: through an additional copy.
    "old": ["get"],
    "fails": ["cpu"],
    "other": ["cpu"],
}


@pytest.mark.parametrize("how", HOW)
def test_outputs_are_copied_into_the_servers_memory(outputs, how):
    """Once, by the library that owns them, into the shared memory in which they are sent."""
    outputs.infer("made", VALUES, "told")
    _, output = outputs.infer("made", VALUES, how)
    assert output == VALUES
    report, _ = outputs.infer("made", VALUES, "told")
    assert report == HOW[how]


def test_a_view_that_a_library_keeps_is_harmless(outputs):
    """Its memory is not used for any answer while the library could write there."""
    for number in range(20):
        values = [float(number)] * 100
        assert outputs.infer("made", values, "kept")[1] == values
    assert outputs.infer("made", [], "torch")[1] == []


@pytest.mark.skipif(not has_torch, reason=f"{PYTHON} does not have torch")
@pytest.mark.parametrize("how", ["tensor", "runner"])
@pytest.mark.parametrize("torch_type", TYPES)
def test_torchs_own_tensors(outputs, torch_type, how):
    """Each type, without an intermediate copy, including BF16, which numpy lacks."""
    request = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [4], "data": [0, 1, 2, 3]}],
               "parameters": {"how": how, "type": torch_type},
               "outputs": [{"name": torch_type, "parameters": {"binary_data": True}}]}  # fmt: skip
    body = json.dumps(request)
    status, text = outputs.server.ask("POST", f"/v2/models/{torch_type}/infer", body)
    if torch_type == "bfloat16":
        # It has a binary form but no JSON form.
        connection_status, raw = binary(outputs.server, torch_type, body)
        assert (connection_status, raw[-8:]) == (200, np.array([0, 0x3F80, 0x4000, 0x4040], np.uint16).tobytes())
        return
    assert status == 200, text
    _, raw = binary(outputs.server, torch_type, body)
    kinds = {"float32": np.float32, "int64": np.int64, "bool": np.bool_, "float16": np.float16}
    expected = np.array([0, 1, 2, 3]).astype(kinds[torch_type]).tobytes()
    assert raw[-len(expected) :] == expected


def binary(server, model, body):
    """Sends a request for a binary answer."""
    import http.client

    connection = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_copies_that_a_model_makes_and_times_count_as_input(world):
    """In the statistics; a value that is not a time is refused and does not affect the next batch."""
    world.code("copies", "own_copies", group=CPU)
    server = world.start("* devices 0")
    assert world.infer("copies", [1.0])[1] == [1]
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [-2]}]}
    status, answer = server.infer("copies", body)
    assert status == 500 and "-2 is not a valid duration of input copies" in answer["error"]
    assert world.infer("copies", [1.0])[1] == [1]
    stats = server.statistics("copies")["inference_stats"]
    spent = {name: stats[name]["ns"] / stats[name]["count"] / 1e9 for name in ("compute_input", "compute_infer", "compute_output")}
    assert 0.07 <= spent["compute_input"] < 0.1 and 0.02 < spent["compute_infer"] < 0.07 and spent["compute_output"] < 0.03, spent


RUNNER = """
import types
from pharos_worker.runners.pytorch import Copies, TritonPythonModel, _native

told = []
def stream(device):
    return types.SimpleNamespace(synchronize=lambda: told.append(device))
class Event:
    def __init__(self, enable_timing):
        self.timed = enable_timing
    def record(self, stream):
        assert self.timed and stream.synchronize
    def elapsed_time(self, end):
        assert end is not self
        return 1500.0
_native.inputs_took = told.append
model = TritonPythonModel()
model.arguments, model.outputs, model.cleans = {}, [], True
model.torch = types.SimpleNamespace(cuda=types.SimpleNamespace(current_stream=stream, empty_cache=lambda: told.append("emptied"), Event=Event))
def fails():
    raise RuntimeError("no kernel for that")
model.mode = fails
for model.device in ("cuda:0", "cpu"):
    model.copies = Copies(model.torch, model.device) if model.device != "cpu" else None
    (response,) = model.execute([None])
    assert response.error().message() == "no kernel for that"
print(told)
"""


def test_the_runner_for_pytorchs_files_waits_for_the_device():
    """Even if the model fails, because the copies of its inputs may still be running. It reports the time of the copies."""
    ran = subprocess.run([PYTHON, "-c", RUNNER], capture_output=True, text=True, env=dict(os.environ))
    assert (ran.stdout.strip(), ran.stderr) == ("['cuda:0', 1.5, 'emptied', 'emptied']", "")


PROGRAMS = """
import sys, types
from types import SimpleNamespace as Made
from pharos_worker.runners.pytorch import Exported

def program(place):
    side = Made(num_children=1, num_leaves=1, context=[])
    spec = Made(in_spec=Made(children=lambda: (side, Made(num_children=0, num_leaves=0, context=[]))))
    nodes = [Made(op="placeholder", meta={"val": Made(device=Made(type=place))}), Made(op="output", meta={})]
    return Made(graph=Made(nodes=nodes), call_spec=spec, graph_signature=Made(user_inputs=["x"]), module=lambda: place)

passes = types.ModuleType("torch.export.passes")
passes.move_to_device_pass = lambda program, device: moved.append(device.type) or program
torch = Made(__version__="2", export=Made(load=program))
for name, module in (("torch", types.ModuleType("torch")), ("torch.export", types.ModuleType("torch.export")), ("torch.export.passes", passes)):
    sys.modules[name] = module
for file, device in (("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")):
    moved = []
    Exported(torch, file, Made(type=device))
    print(file, device, moved)
"""


def test_an_exported_program_is_moved_from_the_device_on_which_it_was_exported():
    """Its outputs are determined on the processor, with zeros that are there."""
    ran = subprocess.run([PYTHON, "-c", PROGRAMS], capture_output=True, text=True, env=dict(os.environ))
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["cuda cuda ['cuda']", "cpu cuda ['cuda']", "cuda cpu ['cpu']", "cpu cpu []"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
