"""Shared code of the steps of `check.py`: the model repository of a step, its server, a client for large tensors, and readings of
`nvidia-smi`."""

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
for folder in ("python", "models"):
    sys.path.insert(0, str(HERE.parent / folder))

from generate import parameters, tensor  # noqa: E402, F401
from rows import Rows  # noqa: E402
from harness.server import Server  # noqa: E402
from harness.waiting import DEADLINE_S, eventually  # noqa: E402, F401

CODE = HERE / "gpu_models"
MIB = 1 << 20
DTYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "BF16": np.uint16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
"""The arrays for the protocol's datatypes; BF16 as its bits."""



def bf16(array) -> np.ndarray:
    """Converts numbers to the bits of BF16; excess digits are truncated."""
    return (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def of_bf16(bits: np.ndarray) -> np.ndarray:
    """Converts bits of BF16 to numbers."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Client:
    """Sends requests with binary tensors over one connection, without any package."""

    def __init__(self, address: str, timeout_s: float = 60):
        self.connection = http.client.HTTPConnection(address, timeout=timeout_s)

    def infer(self, model: str, inputs: dict) -> dict:
        """Sends a request with `inputs`: name -> (datatype, array). Returns the outputs by name; BYTES as lists of bytes."""
        parts, described = [], []
        for name, (datatype, array) in inputs.items():
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            parts.append(flat.data)
            entry = {"name": name, "datatype": datatype, "shape": list(array.shape)}
            described.append(entry | {"parameters": {"binary_data_size": flat.size}})
        head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
        size = len(head) + sum(len(part) for part in parts)
        headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Length": str(size)}
        self.connection.request("POST", f"/v2/models/{model}/infer", iter([head, *parts]), headers)
        response = self.connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{model}: {response.status} {body[:500].decode(errors='replace')}")
        return outputs(body, int(response.headers["Inference-Header-Content-Length"]))


def outputs(body: bytes, head: int) -> dict:
    """Returns the tensors of an answer whose JSON is its first `head` bytes."""
    found, at = {}, head
    for entry in json.loads(body[:head])["outputs"]:
        size = entry["parameters"]["binary_data_size"]
        data, at = body[at : at + size], at + size
        if entry["datatype"] == "BYTES":
            found[entry["name"]] = texts(data)
        else:
            found[entry["name"]] = np.frombuffer(data, DTYPES[entry["datatype"]]).reshape(entry["shape"])
    return found


def texts(data: bytes) -> list:
    """Returns the elements of a BYTES tensor."""
    found = []
    while data:
        size = int.from_bytes(data[:4], "little")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def index(server) -> dict:
    """Returns the repository index; empty while the server does not respond yet."""
    try:
        return server.index()
    except (OSError, http.client.HTTPException):
        return {}


def refused(server) -> dict:
    """Returns the unavailable models with the reasons; empty while nothing is known."""
    entries = ((name, entry) for name, entries in index(server).items() for entry in entries)
    return {name: entry.get("reason", "") for name, entry in entries if entry.get("state") == "UNAVAILABLE"}


def reason_of(server, name: str) -> str:
    """Returns why a model is unavailable; empty while that is unknown."""
    return refused(server).get(name, "")


def is_ready(server, what: str = "health/ready") -> bool:
    """Whether all models are served, or the one that `what` names."""
    try:
        return server.get(f"/v2/{what}")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


@contextlib.contextmanager
def loaded(server, names: list):
    """Loads models in parallel on a server with explicit control, and unloads them at the end."""

    def change(name: str, what: str):
        connection = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
        connection.request("POST", f"/v2/repository/models/{name}/{what}", b"")
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        if response.status != 200:
            raise RuntimeError(f"cannot {what} {name}: {text[:500]}")

    together(len(names), lambda number: change(names[number], "load"))
    yield
    together(len(names), lambda number: change(names[number], "unload"))


class World:
    """The environment of one step: its folder, its rows, and whether it runs without a device."""

    def __init__(self, folder: Path, step: str, device: int, cpu: bool):
        self.folder, self.device, self.cpu = folder, device, cpu
        self.rows = Rows(folder / "rows.jsonl", step)
        self.models, self.clients = folder / "models", folder.parent / "clients"
        shutil.rmtree(self.models, ignore_errors=True)
        self.models.mkdir(parents=True)

    def group(self, count: int = 1, device=None) -> str:
        """Returns the instance group of a model on the device, or on processors."""
        if self.cpu and device is None:
            return f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n"
        number = self.device if device is None else device
        return f"instance_group [ {{ count: {count} kind: KIND_GPU gpus: [ {number} ] }} ]\n"

    def model(self, name: str, config: str, files=None, group=None) -> Path:
        """Writes a model; `files`: name -> bytes, or a path to copy. Returns its version's directory."""
        version = self.models / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config + (self.group() if group is None else group))
        for file, content in (files or {}).items():
            (version / file).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
        return version

    def python_model(self, name: str, code: str, tensors: str, batch: int = 0, extra: str = "", group=None):
        """Writes a model in Python whose code is in `gpu_models`."""
        config = f'backend: "python"\nmax_batch_size: {batch}\n{tensors}{extra}'
        return self.model(name, config, {"model.py": CODE / f"{code}.py"}, group)

    @contextlib.contextmanager
    def server(self, *options):
        """Starts a server of the models and waits until all are ready. Fails as soon as one is unavailable, with its reason, or
        otherwise with the end of the log."""
        with self.any_server(*options) as server:
            known = lambda: server.process.poll() is not None or refused(server) or is_ready(server)  # noqa: E731
            try:
                eventually("the models are ready or refused", known)
            except AssertionError as error:
                raise RuntimeError(f"{error}\n{server.log_tail()}") from None
            if refused(server):
                raise RuntimeError(f"refused: {refused(server)}")
            server.wait_until_ready()
            yield server

    @contextlib.contextmanager
    def any_server(self, *options):
        """Like [`server`], without waiting."""
        flags = [f"--python={sys.executable}", "--exit-on-error=false", "--worker-max-backoff-secs=2", *options]
        flags += os.environ.get("CHECK_SERVER_FLAGS", "").split()
        server = Server(self.folder, [self.models], flags)
        server.launch()
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.stop(check=False)

    def attempt(self, name: str, error, limit: float):
        """Adds a row for an error that `error()` returns; the row fails if it raises an exception."""
        try:
            worst = error()
        except (OSError, RuntimeError, http.client.HTTPException) as trouble:
            return self.rows.check(name, False, reason=str(trouble)[:300])
        return self.rows.check(name, worst <= limit, f"error {worst:.2g}", f"<= {limit:.2g}")

    def lacks(self, module: str) -> str:
        """Returns why a module cannot be used in this Python; empty if it can."""
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        return "" if found else f"this Python has no {module}"

    def lacks_cuda(self) -> str:
        """Returns why PyTorch cannot use the device; empty if it can, or if no device is used."""
        missing = self.lacks("torch")
        if missing or self.cpu:
            return missing
        import torch

        return "" if torch.cuda.is_available() else "this Python's PyTorch finds no device"

    def where(self) -> str:
        """Returns PyTorch's name of the device for this process."""
        return "cpu" if self.cpu else f"cuda:{self.device}"

    def smi(self, *fields: str) -> list:
        """Returns values of `nvidia-smi --query-gpu` for the device, as numbers if possible; None for unknown values."""
        command = ["nvidia-smi", f"--id={self.device}", f"--query-gpu={','.join(fields)}"]
        done = subprocess.run([*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30)
        return [number(cell) for cell in done.stdout.strip().split(", ")] if done.returncode == 0 else [None] * len(fields)

    def used_mib(self) -> float:
        """Returns the used memory of the device in MiB."""
        return self.smi("memory.used")[0] or 0.0

    def settled_mib(self) -> float:
        """Returns the used memory once it is stable: ended processes release their memory with a delay."""
        readings = [self.used_mib()]
        while len(readings) < 10 and readings[-2:] != [readings[-1]] * 2:
            time.sleep(0.3)
            readings.append(self.used_mib())
        return readings[-1]

    def of_processes(self) -> dict:
        """Returns process id -> MiB on the device. In a container the driver may report other ids, or none."""
        command = ["nvidia-smi", f"--id={self.device}", "--query-compute-apps=pid,used_memory"]
        done = subprocess.run([*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30)
        pairs = (line.split(", ") for line in done.stdout.splitlines() if ", " in line)
        return {int(pid): number(used) for pid, used in pairs if isinstance(number(used), float)}


def number(cell: str):
    """Converts a cell of `nvidia-smi` to a number, a string, or None."""
    try:
        return float(cell)
    except ValueError:
        return None if cell.startswith("[") or not cell else cell


def together(count: int, work) -> list:
    """Runs `work(n)` in threads; returns their results or raises the first exception."""
    results, failed = [None] * count, []

    def one(n):
        try:
            results[n] = work(n)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return results


def farthest(found, wanted) -> float:
    """Returns the largest error relative to the largest expected value."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def answered(check):
    """Waits until a request is answered correctly: `check()` is true and raises no exception."""

    def tried():
        try:
            return check()
        except (OSError, RuntimeError, http.client.HTTPException):
            time.sleep(0.2)
            return False

    return eventually("it is answered", tried)
