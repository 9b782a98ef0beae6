"""Steps of `check.py`: the speed of models on the device, compared with the same computation without a server."""

import json
import statistics
import subprocess
import sys
import time

import numpy as np

import plain_loop
from correctness import ends
from world import HERE, MIB, Client, World, farthest, parameters, together

RATIO_OF_STEPS, RATIO_OF_COPIES = 0.97, 0.80
STEP_S = 0.03
ROUNDS = 3
LARGE = 16 * MIB
"""The size in bytes of a tensor whose copies are measured."""
FILE_INPUT = 64 * MIB
"""The size in bytes of the input of a PyTorch file."""


class PlainLoop:
    """Runs `plain_loop.py` as a process that waits for requests."""

    def __init__(self, world: World, tokens: int, hidden: int):
        command = [sys.executable, str(HERE / "plain_loop.py"), world.where(), str(tokens), str(hidden)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **request):
        """Sends a request without waiting for the answer."""
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def ask(self, **request):
        """Sends a request and returns the answer."""
        self.send(**request)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the plain loop ended with {self.process.wait()}")
        return json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def served(server, given, seconds: float, clients: int) -> float:
    """Returns the answers per second that clients get without pauses between requests."""
    end = time.perf_counter() + seconds

    def ask(_):
        client, count = Client(server.http), 0
        while time.perf_counter() < end:
            client.infer("blocks", {"X": ("FP16", given)})
            count += 1
        return count, time.perf_counter()

    begun = time.perf_counter()
    found = together(clients, ask)
    return sum(count for count, _ in found) / (max(last for _, last in found) - begun)


def throughput(world: World):
    """Measures transformer blocks through the server and in a plain loop, alternately, three times each."""
    reason = world.lacks_cuda()
    if reason:
        return world.rows.skip("throughput", reason)
    tokens, hidden, seconds = (32, 128, 0.5) if world.cpu else (1024, 4096, 8.0)
    given = plain_loop.given(tokens, hidden)
    with PlainLoop(world, tokens, hidden) as plain:
        count = 2 if world.cpu else plain.ask(do="passes", step_s=STEP_S)
        sides = ends({"X": ("FP16", [tokens, hidden])}, {"Y": ("FP32", [hidden])})
        world.python_model("blocks", "blocks", sides, 0, parameters(tokens=tokens, hidden=hidden, passes=count))
        with world.server() as server:
            found = Client(server.http).infer("blocks", {"X": ("FP16", given)})["Y"]
            error = farthest(found, plain.ask(do="answer"))
            world.rows.check("the same answer", error <= 0.02, f"error {error:.2g}", "<= 0.02")
            served(server, given, seconds / 4, 4)
            rates = [(plain.ask(do="run", seconds=seconds), served(server, given, seconds, 4)) for _ in range(ROUNDS)]
    told = [f"{statistics.median(side):.2f} ({min(side):.2f} to {max(side):.2f})" for side in zip(*rates)]
    world.rows.check("steps a second in plain Python", True, told[0])
    world.rows.check("steps a second through the server", True, told[1])
    ratio = statistics.median(rate for _, rate in rates) / statistics.median(rate for rate, _ in rates)
    judged(world, f"ratio, {count} passes of {1000 / statistics.median(r for r, _ in rates):.1f} ms", ratio, RATIO_OF_STEPS)
    return None


def judged(world: World, name: str, ratio: float, limit: float):
    """Checks a ratio against its limit if there is a device; without one it is meaningless."""
    if world.cpu:
        return world.rows.check(name, ratio > 0, f"{ratio:.3f}", "no limit without a device")
    return world.rows.check(name, ratio >= limit, f"{ratio:.3f}", f">= {limit}")


def pinned_rate(world: World, size: int = LARGE) -> float:
    """Returns the GB/s of copies of pinned memory to the device, each measured with events, one after the other."""
    import torch

    if world.cpu:
        return 1.0
    source = torch.zeros(size, dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=world.where())
    times = []
    for _ in range(50):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        target.copy_(source, non_blocking=True)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return size / statistics.median(times) / 1e9


class Parts:
    """The parts of requests' time in the statistics of a model since this object was created."""

    def __init__(self, server, model: str):
        self.server, self.model = server, model
        self.before = self.told()

    def told(self) -> dict:
        """Returns part -> (count, nanoseconds)."""
        found = self.server.statistics(self.model)["inference_stats"]
        return {part: (found[part]["count"], found[part]["ns"]) for part in ("compute_input", "compute_infer", "compute_output")}

    def seconds(self, part: str) -> float:
        """Returns the mean per request in seconds."""
        (count, spent), (past, before) = self.told()[part], self.before[part]
        return (spent - before) / max(count - past, 1) / 1e9


def builtin_rate(server, client: Client, given) -> float:
    """Returns the GB/s from the statistics' compute_input of 20 requests."""
    parts = Parts(server, "large")
    for _ in range(20):
        client.infer("large", {"INPUT0": ("FP32", given)})
    return LARGE / max(parts.seconds("compute_input"), 1e-9) / 1e9


def copies(world: World):
    """Measures copies of 16 MiB to the device: of builtin by its statistics, of PyTorch in a model by events, against a plain
    copy."""
    reason = world.lacks_cuda()
    if reason:
        return world.rows.skip("copies", reason)
    one = {"INPUT0": ("FP32", [-1])}
    head = 'backend: "builtin"\nmax_batch_size: 0\n'
    world.model("large", head + ends(one, {"OUTPUT0": ("FP32", [-1])}) + parameters(function="identity"))
    found = {name: ("FP64", [1]) for name in ("SUM", "MS", "PINNED")}
    world.python_model("copies", "copies", ends({"X": ("FP32", [-1])}, found))
    given = np.random.default_rng(4).standard_normal(LARGE // 4).astype(np.float32)
    with world.server() as server:
        client = Client(server.http)
        for _ in range(5):
            client.infer("large", {"INPUT0": ("FP32", given)})
            client.infer("copies", {"X": ("FP32", given)})
        rates = [(pinned_rate(world), builtin_rate(server, client, given), *torch_rate(client, given)) for _ in range(ROUNDS)]
    plain, builtin, torch_model, pinned = (statistics.median(column) for column in zip(*rates))
    if world.cpu:
        world.rows.skip("copies of 16 MiB", "no copies without a device")
        return world.rows.check("both models respond", min(builtin, torch_model) > 0)
    world.rows.check("GB/s of a plain copy", True, f"{plain:.2f}")
    judged(world, f"builtin by compute_input, {builtin:.2f} GB/s, ratio", builtin / plain, RATIO_OF_COPIES)
    judged(world, f"PyTorch in a model, {torch_model:.2f} GB/s, ratio", torch_model / plain, RATIO_OF_COPIES)
    return world.rows.check("the model's input is pinned", pinned == 1.0, f"{pinned:.0%} of requests", "100%")


def torch_rate(client: Client, given) -> tuple:
    """Returns the GB/s that the model measures, as the median of 20 requests, and the share of requests with pinned memory."""
    found = [client.infer("copies", {"X": ("FP32", given)}) for _ in range(20)]
    wanted = float(given.astype(np.float64).sum())
    if any(abs(float(one["SUM"][0]) - wanted) > 1e-3 for one in found):
        raise RuntimeError("the model has summed other values")
    times = [float(one["MS"][0]) for one in found]
    return LARGE / (statistics.median(times) / 1000) / 1e9, sum(float(one["PINNED"][0]) for one in found) / len(found)


def file_copies(world: World):
    """Checks that a PyTorch file with an input of 64 MiB counts the copy to the device as input time in the statistics."""
    reason = world.lacks_cuda()
    if reason:
        return world.rows.skip("copies of a PyTorch file", reason)
    import torch

    sides = ends({"input": ("FP32", [-1])}, {"OUTPUT__0": ("FP32", [-1])})
    version = world.model("same", 'backend: "pytorch"\nmax_batch_size: 0\n' + sides)
    torch.jit.script(torch.nn.Identity()).save(str(version / "model.pt"))
    given = np.random.default_rng(9).standard_normal(FILE_INPUT // 4).astype(np.float32)
    with world.server() as server:
        client = Client(server.http)

        def ask(count: int) -> bool:
            found = [client.infer("same", {"input": ("FP32", given)})["OUTPUT__0"] for _ in range(count)]
            return all(np.array_equal(one, given) for one in found)

        ask(5)
        parts = Parts(server, "same")
        world.rows.check("64 MiB are returned unchanged", ask(10))
        spent = {part: 1000 * parts.seconds(part) for part in ("compute_input", "compute_infer", "compute_output")}
    plain = 1000 * FILE_INPUT / 1e9 / pinned_rate(world, FILE_INPUT)
    if world.cpu:
        return world.rows.skip("copies of a PyTorch file", "no copies without a device")
    world.rows.check("compute_output", True, f"{spent['compute_output']:.2f} ms")
    least, value = f"> {plain / 2:.2f}, half of a plain copy", f"{spent['compute_input']:.2f} ms"
    world.rows.check("compute_input includes the copy", spent["compute_input"] > plain / 2, value, least)
    value = f"{spent['compute_infer']:.2f} ms"
    return world.rows.check("compute_infer has no copy", spent["compute_infer"] < plain, value, f"< {plain:.2f}, a plain copy")
