"""System metrics of the host, the container, the processes and the GPUs, and the memory use of model loads.

Values are compared with the same files that psutil reads. GPUs are simulated by a library in place of NVML
(`tests/fake_nvml/nvml.c`, whose head lists what a simulated device can report).
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness.fake_gpus import AT_WORK, Gpus
from harness.inference import one
from harness.models import copy_models
from harness.server import EXAMPLES, total
from harness.waiting import eventually, run_for

MODEL, REQUEST = "identity_fp32", one("FP32", [1, 1], [1])
FAST = "--metrics-interval-ms=50"
MIB, GIB = 1 << 20, 1 << 30
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
CPU_NAMES = ["nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes", "CPUUtilization"]
GPU_NAMES = ["nv_gpu_utilization", "nv_gpu_memory_total_bytes", "nv_energy_consumption", "GPUUtilization"]


def meminfo() -> dict:
    """Returns `/proc/meminfo` in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def stat(pid) -> list:
    """Returns the fields of `/proc/PID/stat` beginning with the state, which is number 3 in proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pid) -> float:
    """Returns the user and system time of a process."""
    return sum(int(field) for field in stat(pid)[11:13]) / TICKS


def only(server, name: str, **labels) -> float:
    """Returns the value of the only series of `name` with these labels."""
    wanted = set(labels.items())
    found = [value for (n, pairs), value in server.scrape().items() if n == name and wanted <= set(pairs)]
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found[0]


def names(server) -> set:
    """Returns the names of all series."""
    return {name for name, _ in server.scrape()}


def measured(server, name="nv_cpu_utilization"):
    """Waits for the second measurement, which is the first with a value for the CPUs."""
    eventually(name, lambda: name in names(server))
    return server


def no_limits(tmp_path) -> str:
    """Returns the option for a machine without control groups."""
    (tmp_path / "nothing").mkdir()
    return f"--cgroup-root={tmp_path / 'nothing'}"


class Cgroup:
    """A simulated tree of control groups with limits at its root, where a container finds its limits."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()

    def write(self, **files):
        """Writes files; `memory_max=1` is `memory.max`."""
        for name, text in files.items():
            fresh = self.folder / "fresh"
            fresh.write_text(f"{text}\n")
            fresh.rename(self.folder / name.replace("_", ".", 1))


TWO = f"""
* devices 2
* driver 550.54.15
{AT_WORK}1 uuid GPU-1
1 mig 7
1 utilization !3
1 memory !4
1 power 90000
1 energy 1000
1.3 uuid MIG-3
1.3 memory 21474836480 1073741824
"""


@pytest.fixture
def gpus(tmp_path):
    """Two simulated devices, the second in MIG mode."""
    folder = tmp_path / "nvml"
    folder.mkdir()
    made = Gpus(folder)
    made.tell(TWO)
    return made


def test_host_metrics_agree_with_proc(start, tmp_path):
    """Memory and disk agree with the files that psutil reads; TorchServe's and Triton's metrics agree with each other."""
    server = measured(start([MODEL], FAST, no_limits(tmp_path)))
    memory, disk, scrape = meminfo(), os.statvfs("/"), server.scrape()
    value = {name: number for (name, _), number in scrape.items()}
    assert value["nv_cpu_memory_total_bytes"] == memory["MemTotal"]
    used = memory["MemTotal"] - memory["MemAvailable"]
    assert abs(value["nv_cpu_memory_used_bytes"] - used) < 512 * MIB
    assert value["MemoryUsed"] * MIB == value["nv_cpu_memory_used_bytes"]
    assert (value["MemoryUsed"] + value["MemoryAvailable"]) * MIB == memory["MemTotal"]
    assert value["MemoryUtilization"] == pytest.approx(value["nv_cpu_memory_used_bytes"] / memory["MemTotal"] * 100)
    taken, free = (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_bavail * disk.f_frsize
    assert value["DiskUsage"] * GIB == pytest.approx(taken, abs=2 * GIB)
    assert value["DiskAvailable"] * GIB == pytest.approx(free, abs=2 * GIB)
    assert value["DiskUtilization"] == pytest.approx(taken / (taken + free) * 100, abs=5)
    assert 0 <= value["nv_cpu_utilization"] <= 1
    assert value["CPUUtilization"] == pytest.approx(value["nv_cpu_utilization"] * 100)


def test_the_labels_are_torchserves_and_tritons(start, tmp_path):
    """TorchServe's metrics have the labels Level and Hostname, Triton's have no labels."""
    server = measured(start([MODEL], FAST, no_limits(tmp_path)))
    torchserve = {("Level", "Host"), ("Hostname", os.uname().nodename)}
    for name, labels in server.scrape():
        if name in {"CPUUtilization", "MemoryUsed", "MemoryAvailable", "MemoryUtilization"} or name.startswith("Disk"):
            assert set(labels) == torchserve, name
        if name.startswith(("nv_cpu", "process_")):
            assert not labels, name


def test_cpu_usage_is_measured_over_an_interval(start, tmp_path):
    """With every CPU busy the usage rises to nearly 100 %: it is measured over an interval, not at one moment."""
    server = measured(start([MODEL], "--metrics-interval-ms=300", no_limits(tmp_path)))
    burners = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * os.cpu_count())]
    try:
        eventually("all CPUs are busy", lambda: only(server, "nv_cpu_utilization") > 0.9)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_process_metrics_describe_the_frontend(start, tmp_path):
    """The standard process metrics are those of the frontend."""
    server = measured(start([MODEL], FAST, no_limits(tmp_path)), "process_open_fds")
    pid = server.process.pid
    assert abs(only(server, "process_resident_memory_bytes") - int(stat(pid)[21]) * PAGE) < 64 * MIB

    def files_agree():
        """While workers start, there are more."""
        return abs(only(server, "process_open_fds") - len(os.listdir(f"/proc/{pid}/fd"))) <= 10

    eventually("the open files are counted", files_agree)
    lines = Path("/proc/stat").read_text().splitlines()
    boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    assert only(server, "process_start_time_seconds") == pytest.approx(boot + int(stat(pid)[19]) / TICKS)
    before = cpu_seconds(pid)
    for _ in range(200):
        server.infer(MODEL, REQUEST)
    eventually("the CPU time increases", lambda: only(server, "process_cpu_seconds_total") >= before)
    assert only(server, "process_cpu_seconds_total") <= cpu_seconds(pid)


def test_worker_counters_continue_after_a_restart(start, tmp_path):
    """A worker's CPU time and memory are shown separately; after a kill, the counter continues from its last value."""
    server = start([], FAST, no_limits(tmp_path), repository=copy_models(tmp_path / "models", ["digits"], EXAMPLES))
    labels = {"model": "digits", "version": "1"}
    name = "pharos_worker_cpu_seconds_total"
    pictures = {"inputs": [{"name": "image", "shape": [32, 8, 8], "datatype": "FP32", "data": [0.5] * 2048}]}

    def measured():
        """Keeps the worker busy, because its CPU time is shown in hundredths of a second, and returns that time."""
        server.infer("digits", pictures)
        return total(server.scrape(), name, **labels)

    eventually("the worker is measured", lambda: measured() > 0)
    (pid,) = server.workers()
    assert abs(total(server.scrape(), "pharos_worker_resident_bytes", **labels) - int(stat(pid)[21]) * PAGE) < 32 * MIB
    spent = cpu_seconds(pid)
    eventually("all its time is counted", lambda: total(server.scrape(), name, **labels) >= spent)
    before = total(server.scrape(), name, **labels)
    instances = [pairs for n, pairs in server.scrape() if n == name]
    assert [dict(pairs)["instance"] for pairs in instances] == ["digits_0"]
    os.kill(pid, signal.SIGKILL)
    seen = [before]

    def is_back():
        seen.append(measured())
        return server.workers() - {pid} and seen[-1] > before

    eventually("the next worker adds to it", is_back)
    assert seen == sorted(seen), "the counter never decreases"
    (new,) = server.workers() - {pid}

    def added():
        return total(server.scrape(), name, **labels) - before - cpu_seconds(new)

    eventually("its time is added", lambda: added() >= -0.02)
    assert added() <= 0.02


def test_limits_of_a_container_apply(start, tmp_path):
    """Memory is the container's without reclaimable memory; the CPU usage is the share of the quota."""
    cgroup = Cgroup(tmp_path / "cgroup")
    cgroup.write(memory_max=512 * MIB, memory_current=256 * MIB, cpu_max="25000 100000")
    cgroup.write(memory_stat=f"anon 1\ninactive_file {56 * MIB}", cpu_stat="usage_usec 1000000")
    server = start([MODEL], "--metrics-interval-ms=400", f"--cgroup-root={cgroup.folder}")
    eventually("the memory is measured", lambda: "MemoryUsed" in names(server))
    assert only(server, "nv_cpu_memory_total_bytes") == 512 * MIB
    assert only(server, "nv_cpu_memory_used_bytes") == 200 * MIB
    assert (only(server, "MemoryUsed"), only(server, "MemoryAvailable")) == (200, 312)
    assert only(server, "MemoryUtilization") == pytest.approx(200 / 512 * 100)
    eventually("the CPU usage is 0", lambda: ("CPUUtilization", 0) in {(n, v) for (n, _), v in server.scrape().items()})
    begun = time.monotonic()

    def an_eighth_of_a_processor():
        cgroup.write(cpu_stat=f"usage_usec {1_000_000 + int((time.monotonic() - begun) * 125_000)}")
        return 45 < only(server, "CPUUtilization") < 55

    eventually("the usage is half of the quota", an_eighth_of_a_processor)
    cgroup.write(memory_max="max")
    eventually("the limit is removed", lambda: only(server, "nv_cpu_memory_total_bytes") == meminfo()["MemTotal"])


def test_gpus(start, gpus):
    """The values of the devices under TorchServe's and Triton's names; a value that the device does not report has no series."""
    server = measured(start([MODEL], FAST, gpus.option()), "nv_gpu_power_usage")
    first = {"gpu_uuid": "GPU-0"}
    expected = {
        "nv_gpu_utilization": 0.37,
        "nv_gpu_memory_total_bytes": 80 * GIB,
        "nv_gpu_memory_used_bytes": 8 * GIB,
        "nv_gpu_power_usage": 250.5,
        "nv_gpu_power_limit": 400,
        "nv_energy_consumption": 0,
        "pharos_gpu_temperature_celsius": 55,
        "pharos_gpu_memory_bandwidth_utilization": 0.12,
    }
    assert {name: only(server, name, **first) for name in expected} == expected
    host = {"Level": "Host", "Hostname": os.uname().nodename, "DeviceId": "0"}
    assert only(server, "GPUUtilization", **host) == 37
    assert only(server, "GPUMemoryUsed", **host) == 8192
    assert only(server, "GPUMemoryUtilization", **host) == 10
    reported = {(name, dict(labels)["gpu_uuid"]) for name, labels in server.scrape() if dict(labels).get("gpu_uuid")}
    assert {name for name, uuid in reported if uuid == "GPU-1"} == {"nv_gpu_power_usage", "nv_energy_consumption"}
    memory = {"nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"}
    assert {name for name, uuid in reported if uuid == "MIG-3"} == memory
    assert only(server, "nv_gpu_memory_used_bytes", gpu_uuid="MIG-3") == GIB
    numbers = {dict(labels).get("DeviceId") for name, labels in server.scrape()}
    assert numbers == {None, "0"}, "a device without values has no series under TorchServe's names"
    gpus.tell(TWO.replace("energy 5000", "energy 12500"))
    eventually("the energy increases", lambda: only(server, "nv_energy_consumption", **first) == 7.5)
    assert server.log_tail().count("GPUs: 2 (driver 550.54.15)") == 1


def test_a_lost_gpu_has_no_series_until_it_recovers(start, gpus):
    """The series of the lost device disappear, those of others stay; the log reports the loss and the recovery once each."""
    server = measured(start([MODEL], FAST, gpus.option()), "nv_gpu_power_usage")

    def uuids():
        return {dict(labels)["gpu_uuid"] for name, labels in server.scrape() if name == "nv_gpu_power_usage"}

    assert uuids() == {"GPU-0", "GPU-1"}
    gpus.tell("0 all !15\n" + TWO)
    eventually("its series disappear", lambda: uuids() == {"GPU-1"})
    lost = {("gpu_uuid", "GPU-0"), ("DeviceId", "0")}
    assert not [(name, labels) for name, labels in server.scrape() if lost & set(labels)]
    run_for("several measurements pass", 0.5)
    assert server.log_tail().count("GPU 0 cannot be read") == 1, server.log_tail()
    gpus.tell(TWO)
    eventually("the device has recovered", lambda: uuids() == {"GPU-0", "GPU-1"})
    assert server.log_tail().count("GPU 0 answers again") == 1
    assert server.infer(MODEL, REQUEST)[0] == 200


def test_the_metric_log_has_a_separate_interval(start, tmp_path):
    """TorchServe's gauges are logged in TorchServe's order every second, although they are measured twenty times per second."""
    begun = time.monotonic()
    server = start([MODEL], FAST, no_limits(tmp_path), "--system-metrics-log-interval-secs=1")

    def logged():
        text = (server.logs / "ts_metrics.log").read_text().rpartition("\n")[0]
        samples = [line.partition(" - ")[2] for line in text.splitlines()]
        return [line for line in samples if line.startswith(("CPU", "Disk", "Memory"))]

    eventually("three rounds are logged", lambda: len(logged()) >= 21)
    # A server with the interval of the measurement would have logged ten times as many.
    assert len(logged()) // 7 <= time.monotonic() - begun + 2
    order = [
        "CPUUtilization.Percent",
        "DiskAvailable.Gigabytes",
        "DiskUsage.Gigabytes",
        "DiskUtilization.Percent",
        "MemoryAvailable.Megabytes",
        "MemoryUsed.Megabytes",
        "MemoryUtilization.Percent",
    ]
    assert [line.partition(":")[0] for line in logged()[:21]] == order * 3
    assert all("|#Level:Host|#hostname:" in line for line in logged())


def test_workers_memory_on_gpus(start, gpus):
    """The bytes that the driver reports for a worker's process, by instance and device; other processes have no series."""
    server = measured(start([MODEL], FAST, gpus.option()), "nv_gpu_power_usage")
    (pid,) = server.workers()
    gpus.tell(f"{TWO}0 process {pid} 300\n0 process {pid} 50\n0 process 1 999\n1.3 process {pid} 20\n")
    name, instance = "pharos_worker_gpu_memory_bytes", {"model": MODEL, "version": "1", "instance": f"{MODEL}_0"}
    eventually("the series is shown", lambda: total(server.scrape(), name) == 370)
    assert only(server, name, gpu_uuid="GPU-0", **instance) == 350
    assert only(server, name, gpu_uuid="MIG-3", **instance) == 20
    gpus.tell(TWO)
    eventually("the series is removed", lambda: name not in names(server))


def test_workers_time_on_gpus(start, gpus):
    """The kernel time of a worker's process: 0 while the driver has no samples, no series if the device does not report it."""
    server = measured(start([MODEL], FAST, gpus.option()), "nv_gpu_power_usage")
    (pid,) = server.workers()
    name, instance = "pharos_worker_gpu_utilization", {"model": MODEL, "version": "1", "instance": f"{MODEL}_0"}
    there = f"{TWO}0 process {pid} 300\n1.3 process {pid} 20\n"
    gpus.tell(f"{there}0 kernels {pid} 40\n0 kernels {pid} 20\n0 kernels 1 99\n")
    eventually("the series is shown", lambda: total(server.scrape(), name) == 0.3)
    assert only(server, name, gpu_uuid="GPU-0", **instance) == 0.3
    gpus.tell(f"{there}0 kernels !6\n")
    eventually("no kernel runs", lambda: only(server, name) == 0)
    gpus.tell(f"{there}0 kernels !3\n")
    eventually("the series is removed", lambda: name not in names(server))
    assert total(server.scrape(), "pharos_worker_gpu_memory_bytes") == 320
    assert "cannot be read" not in server.log_tail()


def test_memory_usage_of_a_load(start, gpus):
    """The statistics show the memory that loading has added to the workers, and the workers' memory on each GPU."""
    gpus.tell(TWO + "0 children 1000000\n1.3 children 5000\n")
    # Its ONNX session takes megabytes. A small model can take less than the pages of the worker's code that the kernel reclaims.
    model = "digits"
    options = ["--model-control-mode=explicit", f"--load-model={model}"]
    server = start([], gpus.option(), *options, repository=EXAMPLES)
    (worker,) = server.workers()
    cpu, *rest = server.statistics(model)["memory_usage"]
    assert (cpu["type"], cpu["id"]) == ("CPU", 0)
    assert 0 < cpu["byte_size"] < int(stat(worker)[21]) * PAGE, "only the increase of the memory, not all of it"
    assert rest == [
        {"type": "GPU", "id": 0, "byte_size": 1_000_000},
        {"type": "GPU", "id": 1, "byte_size": 5_000},
    ]


def test_without_nvml(start, tmp_path):
    """The missing library is logged once, and everything else works."""
    server = measured(start([MODEL], FAST, f"--nvml-library={tmp_path / 'libnvidia-ml.so.1'}"))
    run_for("several measurements pass", 0.3)
    lines = [line for line in server.log_tail().splitlines() if "GPU" in line]
    assert len(lines) == 1 and str(tmp_path) in lines[0], lines
    assert not [name for name in names(server) if "gpu" in name.lower()]
    assert server.infer(MODEL, REQUEST)[0] == 200


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a driver")
def test_a_missing_default_nvml_is_logged_as_information(start):
    """As above without an option that names the library: the log line is information, not a warning."""
    server = measured(start([MODEL], FAST))
    lines = [line for line in server.log_tail().splitlines() if "GPU" in line]
    assert len(lines) == 1 and " INFO " in lines[0] and "libnvidia-ml" in lines[0], lines


def threads(server) -> set:
    """Returns the names of the server's threads."""
    return {(task / "comm").read_text().strip() for task in Path(f"/proc/{server.process.pid}/task").iterdir()}


@pytest.mark.parametrize(
    "options, absent, present",
    [
        (["--allow-cpu-metrics=false"], CPU_NAMES + ["process_open_fds"], GPU_NAMES),
        (["--allow-gpu-metrics=false"], GPU_NAMES, CPU_NAMES),
        (["--allow-cpu-metrics=false", "--allow-gpu-metrics=false"], CPU_NAMES + GPU_NAMES, []),
    ],
)
def test_disabled_system_metrics_have_no_series_and_no_thread(start, gpus, options, absent, present):
    """Either half alone can be disabled; with both disabled, no thread wakes up for them."""
    server = start([MODEL], FAST, gpus.option(), *options)
    eventually("the other series exist", lambda: set(present) <= names(server))
    run_for("several measurements pass", 0.2)
    assert not set(absent) & names(server)
    assert ("system-metrics" in threads(server)) == bool(present)
