"""Placement of instances: GPUs by kind, number and count, environments of processes, limits, lost devices, CPUs.

A library in place of NVML simulates the GPUs (`fake_gpus.py`). No driver is needed, because the Python models do not use their
device."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from gpu.world import REQUEST, TWO, World
from harness.fake_gpus import Gpus
from harness.server import EXAMPLES, STANDIN, total
from harness.tract import HAS_TRACT
from harness.waiting import eventually
from python_backend.worker import PYTHON, has_worker
from torchserve import models as torchserve_models
from torchserve.home import Home

ALL = sorted(os.sched_getaffinity(0))
MIB = 1 << 20

BUSY = """
* devices 2
0 uuid GPU-a
0 utilization 37 12
0 memory 85899345920 8589934592
1 uuid GPU-b
1 utilization 0 0
1 memory 85899345920 1000
"""
MIG = """
* devices 3
0 uuid GPU-a
1 uuid GPU-b
1 mig 7
1.2 uuid MIG-2
1.5 uuid MIG-5
2 uuid GPU-c
2 mig 7
"""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")]


ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The variable that makes device numbers mean the same in all processes."""


def order(*uuids) -> dict:
    """Returns the environment variables of a process that sees these devices."""
    return {**ORDER, "CUDA_VISIBLE_DEVICES": ",".join(uuids)}


@pytest.fixture
def world(tmp_path):
    """A server and its repository for one test."""
    made = World(tmp_path)
    yield made
    if made.server and made.server.process.poll() is None:
        made.server.kill()


def test_without_gpus_everything_runs_on_cpus(world):
    """The environment is unchanged; a model that requires a GPU is refused with the reason, and the others are served."""
    world.model("plain")
    world.model("wants", "instance_group { kind: KIND_GPU }")
    world.model("names", "instance_group { gpus: [ 0 ] }")
    server = world.start("* devices 0", wait=False)
    server.wait_until_ready("/v2/models/plain/ready")
    (place,) = world.places("plain", 1).values()
    assert (place["kind"], place["cuda"], place["cpus"]) == ("CPU", ORDER, ALL)
    assert [(group["kind"], group["gpus"]) for group in world.groups("plain")] == [("KIND_CPU", [])]
    for name in ("wants", "names"):
        expected = f"instance group {name}_0 of model {name} has kind KIND_GPU but no GPUs are available"
        assert expected in world.reason(name)
    assert world.pinned() == (0, 0)


def test_automatic_placement(world):
    """A Python model has an instance on each GPU, with that GPU first in its process; other backends stay on CPUs."""
    world.model("auto")
    world.model("bare", config="")
    world.model("cpu", "instance_group { kind: KIND_CPU }")
    for name in ("simple", "digits"):
        shutil.copytree(EXAMPLES / name, world.models / name)
    server = world.start(TWO)
    assert [(g["kind"], g["count"], g["gpus"]) for g in world.groups("auto")] == [("KIND_GPU", 1, [0, 1])]
    places = world.places("auto", 2)
    assert {name: place["cuda"] for name, place in places.items()} == {
        "auto_0": order("GPU-a", "GPU-b"),
        "auto_1": order("GPU-b", "GPU-a"),
    }
    # The device is the first of its process, whatever its number on the machine.
    assert {(place["kind"], place["device"]) for place in places.values()} == {("GPU", "0")}
    assert [group["gpus"] for group in places["auto_0"]["config"]] == [[0, 1]]
    assert len({place["pid"] for place in places.values()}) == 2
    (place,) = world.places("cpu", 1).values()
    assert (place["kind"], place["device"], place["cuda"]) == ("CPU", "0", ORDER)
    for name in ("simple", "digits"):
        assert [group["kind"] for group in world.groups(name)] == ["KIND_CPU"]
    # The code that completes a configuration gets the same placement.
    assert world.groups("bare")[0]["gpus"] == [0, 1]
    asked = [line for line in server.log.read_text().splitlines() if "asked with" in line and "model=bare" in line]
    assert '"kind": "KIND_GPU"' in asked[0] and '"gpus": [0, 1]' in asked[0], asked
    assert world.pinned() == (256 * MIB, 0), "without a driver no memory can be pinned"


def test_gpus_and_counts(world):
    """`gpus` selects devices and `count` applies to each; as in Triton each GPU gets its first instance before any gets its
    second."""
    world.model("second", "instance_group { kind: KIND_GPU gpus: [ 1 ] count: 2 }")
    world.model("both", 'instance_group [ { name: "g" count: 2 kind: KIND_GPU }, { name: "c" kind: KIND_CPU } ]')
    world.start(TWO, "--allow-gpu-metrics=false")
    second = order("GPU-b", "GPU-a")
    places = world.places("second", 2)
    assert {name: place["cuda"] for name, place in places.items()} == {"second_0_0": second, "second_0_1": second}
    assert {(place["kind"], place["device"]) for place in places.values()} == {("GPU", "0")}
    first = order("GPU-a", "GPU-b")
    expected = {"g_0": first, "g_1": second, "g_2": first, "g_3": second, "c_0": ORDER}
    assert {name: place["cuda"] for name, place in world.places("both", 5).items()} == expected


def test_more_instances_in_place(world):
    """With a higher count the existing instances continue."""
    world.model("grows", "instance_group { kind: KIND_GPU }")
    server = world.start(TWO, "--model-control-mode=explicit", "--load-model=grows")
    before = {name: place["pid"] for name, place in world.places("grows", 2).items()}
    world.model("grows", "instance_group { kind: KIND_GPU count: 2 }")
    assert server.ask("POST", "/v2/repository/models/grows/load", "{}")[0] == 200
    after = world.places("grows", 4)
    assert {name: after[name]["pid"] for name in before} == before
    assert [after[f"grows_0_{n}"]["cuda"]["CUDA_VISIBLE_DEVICES"][:5] for n in range(4)] == ["GPU-a", "GPU-b"] * 2


def test_what_cannot_be_placed_is_refused(world):
    """An unknown GPU or a backend without GPU support: the error has the group, the model, the device and the available
    devices."""
    world.model("unknown", 'instance_group { name: "g" kind: KIND_GPU gpus: [ 0, 7 ] }')
    engines = {"onnx": "onnxruntime"} | ({"embedded": "tract"} if HAS_TRACT else {})
    for name, backend in engines.items():
        shutil.copytree(EXAMPLES / "digits", world.models / name)
        config = (world.models / name / "config.pbtxt").read_text().replace('name: "digits"', f'backend: "{backend}"')
        (world.models / name / "config.pbtxt").write_text(config + "\ninstance_group { kind: KIND_GPU }\n")
    world.model("fine")
    server = world.start(TWO, wait=False)
    server.wait_until_ready("/v2/models/fine/ready")
    gone = "instance group g of model unknown specifies invalid or unsupported gpu id 7; GPUs here: 0, 1"
    assert gone in world.reason("unknown")
    alone = "instance group embedded_0 of model embedded has kind KIND_GPU but its backend 'tract' runs on CPUs only"
    assert not HAS_TRACT or alone in world.reason("embedded")
    onnx = world.reason("onnx")
    assert "instance group onnx_0 of model onnx has kind KIND_GPU but ONNX Runtime" in onnx
    assert "pip install onnxruntime-gpu" in onnx and "allow_cpu_fallback" in onnx
    assert len(world.places("fine", 2)) == 2


def test_limits_of_memory(world):
    """A model is not loaded onto a device with too much memory in use; existing instances continue there and are restarted
    there."""
    world.model("first", 'instance_group { name: "g" kind: KIND_GPU gpus: [ 0 ] }')
    world.model("second", "instance_group { kind: KIND_GPU gpus: [ 1 ] }")
    server = world.start(
        TWO, "--model-load-gpu-limit=0:0.5", "--model-load-gpu-limit=1:0.5", "--model-control-mode=explicit",
        "--load-model=second",
    )

    def load(name):
        status, text = server.ask("POST", f"/v2/repository/models/{name}/load", "{}")
        return status, text

    status, text = load("first")
    assert status == 400
    assert "instance group g of model first: memory limit set for GPU 0 has exceeded, model loading is rejected" in text
    assert "600 of 1000 bytes are in use (60.0 %), --model-load-gpu-limit allows 50.0 %" in text
    world.gpus.tell(TWO.replace("600", "500"))
    assert load("first")[0] == 200
    world.gpus.tell(TWO)
    (place,) = world.places("first", 1).values()
    os.kill(place["pid"], signal.SIGKILL)
    eventually("it is back", lambda: list(world.places("first", 1).values())[0]["pid"] != place["pid"])


def test_mig_devices_are_taken_in_turn(world):
    """A process sees only one MIG device; a process with a whole device sees no device in MIG mode."""
    world.model("auto", "instance_group { count: 3 }")
    world.model("whole", "instance_group { kind: KIND_GPU gpus: [ 0 ] }")
    world.model("empty", 'instance_group { name: "g" kind: KIND_GPU gpus: [ 2 ] }')
    server = world.start(MIG, wait=False)
    server.wait_until_ready("/v2/models/auto/ready")
    server.wait_until_ready("/v2/models/whole/ready")
    assert world.groups("auto")[0]["gpus"] == [0, 1], "the third GPU has no MIG devices"
    uuids = {name: place["cuda"]["CUDA_VISIBLE_DEVICES"] for name, place in world.places("auto", 6).items()}
    assert [uuids[f"auto_0_{n}"] for n in range(6)] == ["GPU-a", "MIG-2", "GPU-a", "MIG-5", "GPU-a", "MIG-2"]
    assert world.places("whole", 1)["whole_0_0"]["cuda"] == order("GPU-a")
    reason = world.reason("empty")
    assert "instance group g of model empty: GPU 2 (GPU-c) cannot be used: it is in MIG mode and has no MIG devices" in reason
    assert "GPUs that can be used: 0 (GPU-a), 1 (GPU-b, in MIG mode with MIG-2, MIG-5)" in reason
    assert server.log_tail().count("GPU 2 cannot be used") >= 1


def test_a_lost_gpu_and_its_return(world):
    """Instances on it are not ready and report the reason; others continue; the instances recover with the device."""
    world.model("first", 'instance_group { name: "g" kind: KIND_GPU gpus: [ 0 ] }')
    world.model("second", "instance_group { kind: KIND_GPU gpus: [ 1 ] }")
    world.model("both", "instance_group { kind: KIND_GPU }")
    world.model("cpu", "instance_group { kind: KIND_CPU }")
    server = world.start(TWO, "--worker-max-backoff-secs=1")
    before = {name: world.places(name, 1) for name in ("first", "second", "cpu")}
    assert len(world.places("both", 2)) == 2
    lost = "0 all !15\n" + TWO
    world.gpus.tell(lost)
    eventually("it is not ready", lambda: server.get("/v2/models/first/ready")[0] == 400)
    assert server.get("/v2/health/ready")[0] == 400

    def readiness():
        return server.get("/v2/models/first/ready")[1]

    about = "Model version not ready: 0 of 1 instances run; last failure: instance group g of model first: GPU 0 (GPU-a) "
    eventually("readiness reports the reason", lambda: about in readiness())
    eventually("it was tried again", lambda: "cannot be used" in readiness())
    assert "GPUs that can be used: 1 (GPU-b)" in readiness()
    eventually("requests report the reason too", lambda: about.partition("failure: ")[2] in str(server.infer("first", REQUEST)))
    assert server.infer("first", REQUEST)[0] == 503
    assert server.get("/v2/models/both/ready")[0] == 200
    eventually("the other instance has all", lambda: set(world.places("both", 1)) == {"both_0_1"})
    for name in ("second", "cpu"):
        assert world.places(name, 1) == before[name], "it is the same process"
    assert total(server.scrape(), "pharos_instance_state", instance="g_0", state="ready") == 0
    # A process that is started now sees the remaining devices.
    pid = list(before["second"].values())[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually("it is another", lambda: list(world.places("second", 1).values())[0]["pid"] != pid)
    assert world.places("second", 1)["second_0_0"]["cuda"] == order("GPU-b")
    log = server.log.read_text()
    assert "instance lost: instance group g of model first: GPU 0 (GPU-a) is lost: " in log
    assert "it will be restarted" in log
    world.gpus.tell(TWO)
    server.wait_until_ready()
    assert world.places("first", 1)["g_0"]["cuda"] == order("GPU-a", "GPU-b")
    assert len(world.places("both", 2)) == 2


def test_a_gpu_that_is_lost_at_the_start(world):
    """It is used only by models that name it, and those can be loaded when it is back."""
    world.model("auto")
    world.model("named", 'instance_group { name: "g" kind: KIND_GPU gpus: [ 0 ] }')
    server = world.start(
        "0 all !15\n" + TWO, "--model-control-mode=explicit", "--load-model=auto", "--load-model=named", wait=False
    )
    server.wait_until_ready("/v2/models/auto/ready")
    assert world.groups("auto")[0]["gpus"] == [1]
    assert "instance group g of model named: GPU 0 cannot be used: " in world.reason("named")
    world.gpus.tell(TWO)
    status, text = server.ask("POST", "/v2/repository/models/named/load", "{}")
    assert status == 200, text
    assert world.places("named", 1)["g_0"]["cuda"] == order("GPU-a", "GPU-b")


def test_cpus_near_the_device(world):
    """A worker is bound to them, with as many threads; other processes are not. If none are known, all CPUs are used."""
    world.model("auto")
    world.model("cpu", "instance_group { kind: KIND_CPU }")
    near = ALL[-1]
    server = world.start(f"{TWO}0 cpus {near} 1023\n0 bus 00000000:FF:1F.0\n")
    places = world.places("auto", 2)
    assert (places["auto_0"]["cpus"], places["auto_0"]["threads"]) == ([near], 1)
    assert places["auto_1"]["cpus"] == ALL
    assert world.places("cpu", 1)["cpu_0_0"]["cpus"] == ALL
    tasks = [int(task.name) for task in Path(f"/proc/{server.process.pid}/task").iterdir()]
    assert all(sorted(os.sched_getaffinity(task)) == ALL for task in tasks), "the server's own threads are not bound"


@pytest.mark.smoke
def test_the_servers_own_variable_hides_gpus(world):
    """As for any CUDA program: device numbers count the visible GPUs."""
    world.model("auto")
    world.model("hidden", "instance_group { kind: KIND_GPU gpus: [ 1 ] }")
    world.environment = {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    server = world.start(TWO, wait=False)
    server.wait_until_ready("/v2/models/auto/ready")
    assert world.groups("auto")[0]["gpus"] == [0]
    assert world.places("auto", 1)["auto_0"]["cuda"] == order("GPU-b")
    assert "invalid or unsupported gpu id 1; GPUs here: 0" in world.reason("hidden")
    assert "CUDA_VISIBLE_DEVICES is 'GPU-b': of 2 GPUs, 0 is GPU-b" in server.log_tail()


def test_the_pool_of_pinned_memory(world):
    """Its size is shown while an instance runs on a GPU, and has the value of the option."""
    world.model("auto")
    server = world.start(
        TWO, f"--pinned-memory-pool-byte-size={8 * MIB}", "--model-control-mode=explicit", "--load-model=auto"
    )
    assert world.pinned() == (8 * MIB, 0)
    assert server.ask("POST", "/v2/repository/models/auto/unload", "{}")[0] == 200
    eventually("nothing runs on a GPU", lambda: world.pinned() == (0, 0))


def test_what_instances_have_pinned(world):
    """It is counted while the process lives, in the gauges and the statistics. The stand-in for the package reports the
    registrations that its model configures."""
    standin = world.folder / "told"
    standin.mkdir()
    world.environment = {"PYTHONPATH": str(STANDIN), "PHAROS_STANDIN": str(standin)}
    for name, pinned in (("pins", 8 * MIB), ("fails", 0), ("cpu", 5 * MIB)):
        (standin / f"{name}.json").write_text(json.dumps({"pinned": pinned}))
        world.model(name, "instance_group { kind: %s }" % ("KIND_CPU" if name == "cpu" else "KIND_GPU gpus: [ 0 ]"))
    server = world.start(TWO, f"--pinned-memory-pool-byte-size={64 * MIB}", "--worker-variables=PHAROS_STANDIN|PHAROS_FAKE_CUDA")
    assert world.pinned() == (64 * MIB, 8 * MIB)
    usage = {entry["type"]: entry["byte_size"] for entry in server.statistics("pins")["memory_usage"]}
    assert usage == {"CPU_PINNED": 8 * MIB}
    (run,) = [json.loads(line) for line in (standin / "pins.runs").read_text().splitlines() if '"instance"' in line]
    assert run["instance"] == "pins_0_0"
    (standin / "pins.json").write_text(json.dumps({"pinned": 7 * MIB}))
    for pid in server.workers():
        os.kill(pid, signal.SIGKILL)
    server.wait_until_ready()
    eventually("another process has pinned less", lambda: world.pinned() == (64 * MIB, 7 * MIB))


def test_resources_are_those_of_the_device(world):
    """The rate limiter keeps separate resources per device: they limit how many instances on one GPU execute concurrently."""
    limiter = 'rate_limiter { resources [ { name: "R" count: 1 } ] }'
    world.model("auto", f"instance_group {{ kind: KIND_GPU count: 2 {limiter} }}")
    server = world.start(TWO, "--rate-limit=execution_count", "--rate-limit-resource=R:1")
    assert len(world.places("auto", 4)) == 4
    scrape = server.scrape()
    limits = {dict(labels)["device"]: value for (name, labels), value in scrape.items() if name == "pharos_rate_limiter_resource_limit"}
    assert limits == {"0": 1, "1": 1}


def test_devices_of_an_archive(world):
    """`deviceType` and `deviceIds` of an archive apply in any repository if its configuration has no instance groups."""
    yaml = {
        "cpu": "deviceType: cpu\ndeviceIds: [1]\n",
        "two": "deviceType: cpu\nminWorkers: 2\n",
        "second": "deviceIds: [1]\n",
        "spread": "deviceType: gpu\ndeviceIds: [1, 0]\nminWorkers: 3\n",
        "absent": "deviceIds: [1, 7]\n",
        "odd": "deviceType: tpu\ndeviceIds: 1\n",
        "plain": "",
    }
    for name, text in yaml.items():
        torchserve_models.model(world.models, name, "told", text)
    config = 'backend: "torchserve"\ninstance_group { kind: KIND_GPU gpus: [ 0 ] }\n'
    torchserve_models.model(world.models, "said", "told", yaml["cpu"], config=config)
    server = world.start(TWO)

    def groups(name):
        return [(group["kind"], group["count"], group["gpus"]) for group in world.groups(name)]

    assert groups("cpu") == [("KIND_CPU", 1, [])]
    assert groups("two") == [("KIND_CPU", 2, [])]
    assert groups("second") == [("KIND_GPU", 1, [1])]
    assert groups("spread") == [("KIND_GPU", 2, [1]), ("KIND_GPU", 1, [0])]
    assert groups("said") == [("KIND_GPU", 1, [0])]
    for name in ("absent", "odd", "plain"):
        assert groups(name) == [("KIND_GPU", 1, [0, 1])], name
    log = server.log.read_text()
    assert "deviceIds is [1, 7], but the available GPUs are [0, 1]; ignored" in log
    assert "deviceType is 'tpu', but must be cpu or gpu; ignored" in log
    assert "deviceIds is 1, but must be list; ignored" in log


def test_gpu_usage_is_reported_by_the_servers_device_number(tmp_path, monkeypatch):
    """That is CUDA's number with the server's own variable, not the number in the management library."""
    (tmp_path / "nvml").mkdir()
    gpus = Gpus(tmp_path / "nvml")
    gpus.tell(BUSY)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")
    home = Home(tmp_path / "home")
    home.command += [gpus.option(), "--metrics-interval-ms=50"]
    url = home.archive("second", yaml="minWorkers: 1\nmaxWorkers: 1\ndeviceIds: [1]\n")
    with home:
        home.register(url, "&synchronous=true")
        usage = lambda: home.manage("GET", "/models/second")[1][0]["workers"][0]["gpuUsage"]  # noqa: E731
        eventually("it is reported", lambda: "gpuId::1 utilization.gpu [%]::37 %" in usage())


def test_torchserves_devices(tmp_path):
    """deviceIds, deviceType and number_of_gpu select GPUs, and workers use them in turn; the usage of the GPUs is reported."""
    (tmp_path / "nvml").mkdir()
    gpus = Gpus(tmp_path / "nvml")
    gpus.tell(BUSY)
    home = Home(tmp_path / "home")
    home.command += [gpus.option(), "--metrics-interval-ms=50"]
    archives = {
        "spread": home.archive("spread", yaml="minWorkers: 2\nmaxWorkers: 2\n"),
        "second": home.archive("second", yaml="minWorkers: 1\nmaxWorkers: 1\ndeviceIds: [1]\n"),
        "cpu": home.archive("cpu", yaml="minWorkers: 2\nmaxWorkers: 2\ndeviceType: cpu\n"),
    }
    with home:
        found = {}
        for name, url in archives.items():
            home.register(url, "&synchronous=true")
            (described,) = home.manage("GET", f"/models/{name}")[1]
            devices = []
            for worker in described["workers"]:
                environment = Path(f"/proc/{worker['pid']}/environ").read_bytes().decode().split("\0")
                variables = dict(entry.split("=", 1) for entry in environment if "=" in entry)
                devices.append((worker["gpu"], variables.get("CUDA_VISIBLE_DEVICES")))
            found[name] = described["deviceType"], devices
        told = {name: home.predict(name, b"gpu")[1] for name in archives}

        def usages(name):
            return [worker["gpuUsage"] for worker in home.manage("GET", f"/models/{name}")[1][0]["workers"]]

        part = "gpuId::{} utilization.gpu [%]::{} % utilization.memory [%]::{} % memory.used [MiB]::{} MiB"
        first, second = part.format(0, 37, 12, 8192), part.format(1, 0, 0, 0)
        eventually("their devices are reported", lambda: usages("spread") == [first, second])
        assert (usages("second"), usages("cpu")) == ([second], ["N/A", "N/A"])
        gpus.tell("0 all !15\n" + BUSY)
        eventually("it cannot be read", lambda: set(usages("spread")) >= {"failed to obtained gpu usage"})
    assert told == {"spread": b"0", "second": b"0", "cpu": b"None"}
    assert found == {
        "spread": ("gpu", [(True, "GPU-a,GPU-b"), (True, "GPU-b,GPU-a")]),
        "second": ("gpu", [(True, "GPU-b,GPU-a")]),
        "cpu": ("cpu", [(False, None), (False, None)]),
    }
