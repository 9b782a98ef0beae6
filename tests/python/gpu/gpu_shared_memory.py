#!/usr/bin/env python3
"""CUDA shared memory on a machine with a GPU, through tritonclient's `cuda_shared_memory`.

    PHAROS_BIN=.../pharos python gpu_shared_memory.py [--device N] [--on-device] [--clients FOLDER] [--work FOLDER] [OPTION...]

Needs built executables (`pharos`, and `pharos-worker` beside it) and, in this Python or in the folder that `--clients` names,
`tritonclient[http]` and `cuda-python`; gRPC too if `tritonclient[grpc]` is there, and a model in Python if PyTorch is. The memory
belongs to this process; the server's workers open it by its handle. With `--on-device` the models' instances run on the same
device, and no data is copied through the host's memory. OPTIONs, after `--`, are the server's. Prints a line for each check, and
for each check that is not possible here; exits with 1 if one fails.
"""

import argparse
import contextlib
import importlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])
from harness.server import Server  # noqa: E402
from harness.stream_models import build, model, pair, tensor  # noqa: E402
from harness.waiting import DEADLINE_S, eventually  # noqa: E402

ADD = "".join(tensor(kind, name, "INT32", [-1]) for kind, name in [("input", "A"), ("input", "B"), ("output", "SUM")])
CLIENTS, ROUNDS = 6, 8
ROWS = CLIENTS // 2 * 3
"""The total batch size of all clients' requests, which have one or two rows."""
WAIT = f"dynamic_batching {{ preferred_batch_size: [ {ROWS} ] max_queue_delay_microseconds: 1000000 }}\n"
ON_DEVICE = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }\n'
MODELS = {
    "add": model("add_sub", ADD + tensor("output", "DIFFERENCE", "INT32", [-1]), 8, False),
    "large": model("identity", pair(0, "FP32", [-1]), 0, False),
    "batched": model("identity", pair(0, "FP32", [-1]), ROWS, False, WAIT),
}
DOUBLED = f'backend: "python"\nmax_batch_size: {ROWS}\n{pair(0, "FP32", [-1])}{WAIT}{ON_DEVICE}'
"""A Python model whose output is a PyTorch tensor."""
CODE = Path(__file__).resolve().parents[2] / "gpu/gpu_models/doubled.py"
CPU = "instance_group [ { kind: KIND_CPU } ]\n"
TEN = np.arange(10, dtype=np.int32).reshape(1, 10)
COLUMNS = 1031
"""The length of each row: a prime, so that rows are not aligned."""
SLOT = 16384
"""The bytes of a region for one client's input or output."""
UNTOUCHED = 0xA5
"""The initial content of a region."""
CUDA = "tritonclient.utils.cuda_shared_memory"
FAILED = []


def check(what: str, right: bool):
    """Prints and records the result of a check."""
    print(f"{'ok  ' if right else 'FAIL'} {what}", flush=True)
    if not right:
        FAILED.append(what)


def left_out(what: str, reason: str):
    """Prints that a check is not possible here."""
    print(f"none {what}: {reason}", flush=True)


def part(what: str, work, *arguments):
    """Runs some of the checks; an exception counts as a failed check, and the others still run."""
    try:
        work(*arguments)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        check(f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", False)


def imported(name: str) -> tuple:
    """Returns a module, or the reason why it cannot be imported."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # noqa: BLE001  # versions that do not fit raise errors of many kinds
        return None, f"{type(error).__name__}: {error}"


def refused(call, fragment: str) -> bool:
    """Returns whether a call fails with an error that contains `fragment`."""
    from tritonclient.utils import InferenceServerException

    try:
        call()
    except InferenceServerException as error:
        return fragment in str(error)
    return False


def names(client) -> list:
    """Returns the registered regions."""
    found = client.get_cuda_shared_memory_status()
    return sorted(region["name"] for region in found) if isinstance(found, list) else sorted(found.regions)


class Region:
    """Registered device memory that this process has allocated."""

    def __init__(self, client, name: str, size: int, device: int):
        self.cuda, self.client, self.name, self.size = imported(CUDA)[0], client, name, size
        self.memory = self.cuda.create_shared_memory_region(name, size, device)
        self.handle = self.cuda.get_raw_handle(self.memory)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.unregister_cuda_shared_memory()
        self.cuda.destroy_shared_memory_region(self.memory)
        # The memory is released with its last registered name.
        del self.memory

    def write(self, *arrays):
        """Writes arrays one after the other, from the beginning."""
        self.cuda.set_shared_memory_region(self.memory, list(arrays))

    def read(self, datatype, shape, offset: int = 0) -> np.ndarray:
        """Returns an array at an offset in bytes; tritonclient itself reads from the beginning only."""
        size = int(np.prod(shape)) * np.dtype(datatype).itemsize
        found = self.cuda.get_contents_as_numpy(self.memory, np.uint8, [offset + size])
        return found[offset:].view(datatype).reshape(shape)


def exchange(kind, client, device: int):
    """Inputs and outputs in one region, at offsets, together with ordinary tensors."""
    client.unregister_cuda_shared_memory()
    with Region(client, "gpu", 1024, device) as region:
        client.register_cuda_shared_memory("gpu", region.handle, device, 1024)
        check("the status has the region", names(client) == ["gpu"])
        region.write(TEN, TEN + 5)
        inputs = [kind.InferInput(name, [1, 10], "INT32") for name in ("A", "B")]
        for number, one in enumerate(inputs):
            one.set_shared_memory("gpu", 40, 40 * number)
        outputs = [kind.InferRequestedOutput(name) for name in ("SUM", "DIFFERENCE")]
        outputs[0].set_shared_memory("gpu", 40, 512)
        result = client.infer("add", inputs, outputs=outputs)
        check("the sum is on the device", (region.read(np.int32, [1, 10], 512) == 2 * TEN + 5).all())
        check("the difference is in the answer", (result.as_numpy("DIFFERENCE") == -5).all())
        inputs[1].set_data_from_numpy(TEN)
        client.infer("add", inputs, outputs=outputs)
        check("one input in the region and one in the request", (region.read(np.int32, [1, 10], 512) == 2 * TEN).all())
        outputs[0].set_shared_memory("gpu", 39, 512)
        wanted = "should be at least 40 bytes"
        check("a place that is too small", refused(lambda: client.infer("add", inputs, outputs=outputs), wanted))
        outputs[0].set_shared_memory("gpu", 40, 1000)
        wanted = "Invalid offset + byte size"
        check("a place outside of the region", refused(lambda: client.infer("add", inputs, outputs=outputs), wanted))
        client.unregister_cuda_shared_memory("gpu")
        check("the region is unregistered", names(client) == [])


def registration(client, device: int):
    """Checks the errors of invalid names, sizes, devices and handles."""
    with Region(client, "gpu", 1024, device) as region:
        client.register_cuda_shared_memory("gpu", region.handle, device, 1024)
        cases = {
            "the name is in use": ("gpu", region.handle, device, 64),
            "a size over that of the memory": ("more", region.handle, device, 1 << 40),
            "a device that does not exist": ("far", region.handle, 999, 64),
            "an invalid handle": ("no", b"A" * 86 + b"==", device, 64),
        }
        for what, given in cases.items():
            wanted = "already in manager" if given[0] == "gpu" else f"failed to register CUDA shared memory region '{given[0]}'"
            check(what, refused(lambda given=given: client.register_cuda_shared_memory(*given), wanted))


def large(kind, client, device: int):
    """Sends 256 MiB through a model that copies."""
    size = 256 << 20
    with Region(client, "large", 2 * size, device) as region:
        client.register_cuda_shared_memory("large", region.handle, device, 2 * size)
        region.write(np.arange(size // 4, dtype=np.float32))
        source, target = kind.InferInput("I0", [size // 4], "FP32"), kind.InferRequestedOutput("O0")
        source.set_shared_memory("large", size)
        target.set_shared_memory("large", size, size)
        times = []
        for _ in range(5):
            begun = time.monotonic()
            client.infer("large", [source], outputs=[target])
            times.append(time.monotonic() - begun)
        copied = region.read(np.float32, [size // 4], size)
        right = bool((copied == np.arange(size // 4, dtype=np.float32)).all())
        check(f"256 MiB, median {sorted(times)[2] * 1000:.2f} ms", right)


def place_of(number: int) -> tuple:
    """Returns the offsets of a client's input and output: a multiple of the cache line size, or four bytes after it."""
    start = 2 * SLOT * number
    return start, start + SLOT + 4 * (number % 2)


def ask_one(kind, address: str, number: int, name: str, given: np.ndarray):
    """Sends one client's request of a batch and returns the output in the answer's body. Every second client has its input in the
    region; two of three have their output there, so the body has none."""
    shape, (here, there) = list(given.shape), place_of(number)
    source, target = kind.InferInput("I0", shape, "FP32"), kind.InferRequestedOutput("O0")
    if number % 2:
        source.set_data_from_numpy(given)
    else:
        source.set_shared_memory("rows", given.nbytes, here)
    if number % 3:
        target.set_shared_memory("rows", given.nbytes, there)
    with kind.InferenceServerClient(address) as client:
        result = client.infer(name, [source], outputs=[target])
    return None if number % 3 else result.as_numpy("O0")


def batch(kind, client, address: str, device: int, of: tuple):
    """Sends requests of several clients that are executed together to `of`, a model that returns `expected(sent)`. Some outputs
    are in a region, each at its offset, some in the body; the rest of the region is unchanged."""
    name, expected = of
    wrong, spilt, numbers = [], 0, np.random.default_rng(6)
    with Region(client, "rows", 2 * SLOT * CLIENTS, device) as region, ThreadPoolExecutor(CLIENTS) as clients:
        client.register_cuda_shared_memory("rows", region.handle, device, region.size)
        for turn in range(ROUNDS):
            given = [numbers.standard_normal((1 + number % 2, COLUMNS)).astype(np.float32) for number in range(CLIENTS)]
            content = np.full(region.size, UNTOUCHED, np.uint8)
            for number, one in enumerate(given):
                start = place_of(number)[0]
                content[start : start + one.nbytes] = one.view(np.uint8).ravel()
            region.write(content)
            bodies = list(clients.map(lambda number, one: ask_one(kind, address, number, name, one), range(CLIENTS), given))
            found = region.read(np.uint8, [region.size])
            for number, (one, body) in enumerate(zip(given, bodies)):
                own = slice(place_of(number)[1], place_of(number)[1] + one.nbytes)
                got = found[own].copy().view(np.float32).reshape(one.shape) if body is None else body
                wrong += [(turn, number)] * (not np.array_equal(got, expected(one)))
                if body is None:
                    found[own] = content[own]
            spilt += int((found != content).sum())
    check(f"{name}: {CLIENTS * ROUNDS} outputs of batches, in a region and in the body {wrong[:6] or ''}".rstrip(), not wrong)
    check(f"{name}: the rest of the region is unchanged", spilt == 0)


def were_together(server, name: str):
    """Checks that a model has executed several requests at once."""
    told = server.statistics(name)
    requests, batches = told["inference_count"], told["execution_count"]
    check(f"{name}: {requests} requests in {batches} batches", 0 < batches <= requests / 2)


def frontend(server):
    """Checks with nvidia-smi that the frontend does not use the device."""
    what = "the frontend does not use the GPU"
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return left_out(what, "nvidia-smi is not installed")
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S).stdout
    return check(what, not any(line.startswith(f"{server.process.pid},") for line in found.splitlines()))


def repository(folder: Path, group: str) -> tuple:
    """Returns the models, and those of them that get batches: name -> the expected output."""
    build(folder, {name: config + group for name, config in MODELS.items()})
    batched = {"batched": lambda given: given}
    if not importlib.util.find_spec("torch"):
        left_out("outputs of a Python model", "this Python does not have torch")
        return folder, batched
    (folder / "doubled/1").mkdir(parents=True)
    (folder / "doubled/config.pbtxt").write_text(DOUBLED + group)
    (folder / "doubled/1/model.py").write_bytes(CODE.read_bytes())
    return folder, batched | {"doubled": lambda given: given * 2}


def protocols() -> list:
    """Returns the available client modules by protocol; HTTP is required."""
    found = []
    for name in ("http", "grpc"):
        module, trouble = imported(f"tritonclient.{name}")
        if module:
            found.append((name, module))
        elif name == "http":
            sys.exit(f"no client is installed: {trouble}")
        else:
            left_out("all checks over gRPC", trouble)
    return found


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--on-device", action="store_true")
    parser.add_argument("--clients", type=Path, help="a folder with tritonclient and what it needs, instead of this Python's")
    parser.add_argument("--work", type=Path, help="where models and logs are written [default: a folder that is removed]")
    parser.add_argument("options", nargs="*", help="further options of the server")
    return parser.parse_args()


@contextlib.contextmanager
def running(folder: Path, models: Path, options: list):
    """Starts a server that loads as many of the models as possible; `add` and `large` are required."""
    server = Server(folder, [models], [f"--python={sys.executable}", "--exit-on-error=false", *options])
    server.launch()
    try:
        server.wait_until_ready("/v2/health/live")
        for name in ("add", "large"):
            if not is_served(server, name):
                sys.exit(f"{name} is not served: {server.index()[name]}")
        yield server
    finally:
        if server.process.poll() is None:
            server.stop(check=False)


def is_served(server, name: str) -> bool:
    """Waits until a model is loaded or refused; returns whether it is ready."""

    def state() -> str:
        return server.index().get(name, [{}])[0].get("state", "")

    eventually(f"{name} is loaded or refused", lambda: state() in ("READY", "UNAVAILABLE"))
    return state() == "READY"


def all_checks(folder: Path, given: argparse.Namespace):
    """Runs the checks of each protocol."""
    device, modules = given.device, protocols()
    group = f"instance_group [ {{ kind: KIND_GPU gpus: [ {device} ] }} ]\n" if given.on_device else CPU
    models, batched = repository(folder / "regions", group)
    with running(folder, models, given.options) as server:
        for name in list(batched):
            if not is_served(server, name):
                check(f"{name} is served: {server.index().get(name)}", False)
                del batched[name]
        for protocol, kind in modules:
            print(protocol, flush=True)
            address = getattr(server, protocol)
            with kind.InferenceServerClient(address) as client:
                part("tensors in a region", exchange, kind, client, device)
                part("registration", registration, client, device)
                part("256 MiB", large, kind, client, device)
                for of in batched.items():
                    part(of[0], batch, kind, client, address, device, of)
        for name in batched:
            part(name, were_together, server, name)
        part("the frontend", frontend, server)


def main() -> int:
    """Runs the program."""
    given = arguments()
    if given.clients:
        # For this process alone: models use their own packages.
        sys.path.insert(0, str(given.clients))
    _, trouble = imported(CUDA)
    if trouble:
        sys.exit(f"there is no {CUDA}: {trouble}")
    with tempfile.TemporaryDirectory() as temporary:
        all_checks(given.work or Path(temporary), given)
    print(f"{len(FAILED)} checks failed" if FAILED else "all checks passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
