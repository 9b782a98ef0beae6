#!/usr/bin/env python3
"""CUDA shared memory on a machine with a GPU, through tritonclient's `cuda_shared_memory`.

    PHAROS_BIN=.../pharos python gpu_shared_memory.py [--device N] [--on-device]

Needs built executables (`pharos`, and `pharos-worker` beside it) and, in this Python, `tritonclient[all]` and `cuda-python`.
The memory belongs to this process; the server's workers open it by its handle. With `--on-device` the models' instances run on the
same device, and nothing goes through the host's memory. Prints a line for each check and ends with 1
if one fails.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.cuda_shared_memory as cuda
from tritonclient.utils import InferenceServerException

from server import Server
from stream_models import build, model, pair, tensor

ADD = "".join(tensor(kind, name, "INT32", [-1]) for kind, name in [("input", "A"), ("input", "B"), ("output", "SUM")])
MODELS = {
    "add": model("add_sub", ADD + tensor("output", "DIFFERENCE", "INT32", [-1]), 8, False),
    "large": model("identity", pair(0, "FP32", [-1]), 0, False),
}
CPU = "instance_group [ { kind: KIND_CPU } ]\n"
TEN = np.arange(10, dtype=np.int32).reshape(1, 10)
FAILED = []


def check(what: str, right: bool):
    """Says whether something is as it should be."""
    print(f"{'ok  ' if right else 'FAIL'} {what}", flush=True)
    if not right:
        FAILED.append(what)


def refused(call, fragment: str) -> bool:
    """Whether a call fails with a text."""
    try:
        call()
    except InferenceServerException as error:
        return fragment in str(error)
    return False


def names(client) -> list:
    """The registered regions."""
    found = client.get_cuda_shared_memory_status()
    return sorted(region["name"] for region in found) if isinstance(found, list) else sorted(found.regions)


def exchange(kind, client, device: int):
    """Inputs and outputs in one region, at offsets; beside ordinary tensors; the errors of wrong ranges and handles."""
    client.unregister_cuda_shared_memory()
    region = cuda.create_shared_memory_region("gpu", 1024, device)
    try:
        handle = cuda.get_raw_handle(region)
        client.register_cuda_shared_memory("gpu", handle, device, 1024)
        check("it is in the status", names(client) == ["gpu"])
        check(
            "its name is taken",
            refused(lambda: client.register_cuda_shared_memory("gpu", handle, device, 64), "already in manager"),
        )
        cuda.set_shared_memory_region(region, [TEN, TEN + 5])
        inputs = [kind.InferInput(name, [1, 10], "INT32") for name in ("A", "B")]
        for number, one in enumerate(inputs):
            one.set_shared_memory("gpu", 40, 40 * number)
        outputs = [kind.InferRequestedOutput(name) for name in ("SUM", "DIFFERENCE")]
        outputs[0].set_shared_memory("gpu", 40, 512)
        result = client.infer("add", inputs, outputs=outputs)
        check(
            "the sum is on the device",
            (cuda.get_contents_as_numpy(region, np.int32, [1, 10], 512) == 2 * TEN + 5).all(),
        )
        check("the difference came with the answer", (result.as_numpy("DIFFERENCE") == -5).all())
        inputs[1].set_data_from_numpy(TEN)
        client.infer("add", inputs, outputs=outputs)
        check("beside an ordinary input", (cuda.get_contents_as_numpy(region, np.int32, [1, 10], 512) == 2 * TEN).all())
        outputs[0].set_shared_memory("gpu", 39, 512)
        check(
            "no room for the output",
            refused(lambda: client.infer("add", inputs, outputs=outputs), "should be at least 40 bytes"),
        )
        outputs[0].set_shared_memory("gpu", 40, 1000)
        check(
            "outside of the region",
            refused(lambda: client.infer("add", inputs, outputs=outputs), "Invalid offset + byte size"),
        )
        check(
            "more than there is",
            refused(
                lambda: client.register_cuda_shared_memory("more", handle, device, 1 << 40),
                "failed to register CUDA shared memory region 'more'",
            ),
        )
        check(
            "a device that is not there",
            refused(
                lambda: client.register_cuda_shared_memory("far", handle, 999, 64),
                "failed to register CUDA shared memory region 'far'",
            ),
        )
        check(
            "a handle of nothing",
            refused(
                lambda: client.register_cuda_shared_memory("no", b"A" * 86 + b"==", device, 64),
                "failed to register CUDA shared memory region 'no'",
            ),
        )
        client.unregister_cuda_shared_memory("gpu")
        check("it is unregistered", names(client) == [])
    finally:
        client.unregister_cuda_shared_memory()
        cuda.destroy_shared_memory_region(region)


def large(kind, client, device: int):
    """256 MiB through a model that copies."""
    size = 256 << 20
    region = cuda.create_shared_memory_region("large", 2 * size, device)
    try:
        client.register_cuda_shared_memory("large", cuda.get_raw_handle(region), device, 2 * size)
        cuda.set_shared_memory_region(region, [np.arange(size // 4, dtype=np.float32)])
        source, target = kind.InferInput("I0", [size // 4], "FP32"), kind.InferRequestedOutput("O0")
        source.set_shared_memory("large", size)
        target.set_shared_memory("large", size, size)
        times = []
        for _ in range(5):
            begun = time.monotonic()
            client.infer("large", [source], outputs=[target])
            times.append(time.monotonic() - begun)
        copied = cuda.get_contents_as_numpy(region, np.float32, [size // 4], size)
        check(
            f"256 MiB, median {sorted(times)[2] * 1000:.0f} ms",
            bool((copied == np.arange(size // 4, dtype=np.float32)).all()),
        )
    finally:
        client.unregister_cuda_shared_memory()
        cuda.destroy_shared_memory_region(region)


def device_memory(pid: int) -> str:
    """What a process holds of the GPUs, by nvidia-smi; empty if nothing."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return "".join(line for line in found.splitlines() if line.startswith(f"{pid},"))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--on-device", action="store_true")
    given = parser.parse_args()
    device = given.device
    group = f"instance_group [ {{ kind: KIND_GPU gpus: [ {device} ] }} ]\n" if given.on_device else CPU
    models = {name: config + group for name, config in MODELS.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with Server(folder, [build(folder / "models", models)]) as server:
            for protocol, kind in (("http", tritonclient.http), ("grpc", tritonclient.grpc)):
                print(protocol, flush=True)
                with kind.InferenceServerClient(getattr(server, protocol)) as client:
                    exchange(kind, client, device)
                    large(kind, client, device)
            check("the frontend holds nothing of the GPU", not device_memory(server.process.pid))
    print(f"{len(FAILED)} checks failed" if FAILED else "all checks passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
