"""Steps of `check.py`: compares every backend on the device with float64 on the CPU."""

import json
from pathlib import Path

import numpy as np

from world import CODE, DTYPES, Client, World, bf16, eventually, farthest, index, loaded, of_bf16
from world import parameters, reason_of, tensor, together
from harness import onnx_file
from torchserve import models as torchserve_models

EPSILON = {"FP16": 2.0**-10, "BF16": 2.0**-7, "FP32": 2.0**-23, "FP64": 2.0**-52}
"""The distance from one to the next representable number."""
SHAPES = [(1, 1), (1, 4), (3, 1031), (8, 65537)]
NUMBERS = [datatype for datatype in DTYPES if datatype != "BOOL"]
"""The datatypes with addition."""
AT_ONCE = 4
"""Number of models loaded at a time."""
WEIGHTS = np.random.default_rng(7).standard_normal((64, 64)).astype(np.float32)
"""The weights of `gpu_models/affine.py`."""
SINGLE, TF32 = 1e-5, 2e-3
"""Largest error relative to the largest value: for FP32, and for TF32, the ten bits of it that tensor cores use."""


def ends(inputs: dict, outputs: dict) -> str:
    """Returns inputs and outputs of a configuration: name -> (datatype, dims)."""
    sides = (("input", inputs), ("output", outputs))
    return "".join(tensor(side, name, *of) for side, named in sides for name, of in named.items())


def pairs(datatype: str, numbers) -> tuple:
    """Yields two arrays whose sum and difference the datatype can represent, for each of SHAPES."""
    for shape in SHAPES:
        if datatype == "BF16":
            yield tuple(bf16(numbers.integers(-32, 32, shape) / 4) for _ in range(2))
        elif datatype.startswith("FP"):
            yield tuple(numbers.standard_normal(shape).astype(DTYPES[datatype]) for _ in range(2))
        else:
            information = np.iinfo(DTYPES[datatype])
            low, high = information.min // 2, information.max // 2
            left, right = (numbers.integers(low, high, shape, DTYPES[datatype]) for _ in range(2))
            yield (left, right) if low else (np.maximum(left, right), np.minimum(left, right))


def wide(datatype: str, array) -> np.ndarray:
    """Converts to a type that is exact for these computations: float64, or Python integers."""
    if datatype == "BF16":
        return of_bf16(array).astype(np.float64)
    return array.astype(np.float64 if datatype.startswith("FP") else object)


def errors_of_add_sub(client: Client, datatype: str) -> float:
    """Returns the largest error of sum and difference, in the datatype's precision."""
    worst = 0.0
    for left, right in pairs(datatype, np.random.default_rng(1)):
        found = client.infer(f"add_sub_{datatype.lower()}", {"INPUT0": (datatype, left), "INPUT1": (datatype, right)})
        one, two = wide(datatype, left), wide(datatype, right)
        for name, wanted in (("OUTPUT0", one + two), ("OUTPUT1", one - two)):
            got = wide(datatype, found[name])
            if datatype in EPSILON:
                errors = np.abs(got - wanted) / np.maximum(np.abs(wanted), 1e-30)
                worst = max(worst, float(errors.max()) if np.isfinite(errors).all() else float("inf"))
            else:
                worst = max(worst, float((got != wanted).any()))
    return worst


def changed_by_identity(client: Client) -> set:
    """Returns the datatypes whose random bytes are not returned unchanged; all are in one request."""
    numbers, wrong = np.random.default_rng(2), set()
    for shape in SHAPES:
        given = {}
        for number, (datatype, kind) in enumerate(DTYPES.items()):
            raw = numbers.integers(0, 2 if datatype == "BOOL" else 256, (*shape, np.dtype(kind).itemsize), np.uint8)
            given[f"INPUT{number}"] = (datatype, raw.view(kind).reshape(shape))
        found = client.infer("identity", given)
        for number, (datatype, array) in enumerate(given.values()):
            got = found[f"OUTPUT{number}"]
            if got.shape != shape or got.tobytes() != array.tobytes():
                wrong.add(datatype)
    return wrong


def mapped(server, library: str) -> bool:
    """Whether a worker has mapped a library."""
    return any(library in Path(f"/proc/{pid}/maps").read_text() for pid in server.workers())


def builtin_models(world: World):
    """Writes `identity` for all numeric datatypes, and an `add_sub` for each one with addition."""
    head = 'backend: "builtin"\nmax_batch_size: 8\n'
    sides = [{f"{side}{n}": (of, [-1]) for n, of in enumerate(DTYPES)} for side in ("INPUT", "OUTPUT")]
    world.model("identity", head + ends(*sides) + parameters(function="identity"))
    for datatype in NUMBERS:
        sides = [{f"{side}{n}": (datatype, [-1]) for n in (0, 1)} for side in ("INPUT", "OUTPUT")]
        world.model(f"add_sub_{datatype.lower()}", head + ends(*sides) + parameters(function="add_sub"))


def builtin(world: World):
    """Checks identity and add_sub for every numeric datatype, a few instances at a time: the driver creates contexts one by
    one."""
    builtin_models(world)
    with world.any_server("--model-control-mode=explicit") as server:
        server.wait_until_ready()
        client = Client(server.http)
        with loaded(server, ["identity"]):
            wrong = changed_by_identity(client)
            world.rows.check("identity, 13 datatypes", not wrong, "the same bytes", reason=f"other bytes: {wrong}")
            if world.cpu:
                world.rows.skip("the driver is in use", "runs without a device")
            else:
                world.rows.check("the driver is in use", mapped(server, "libcuda.so"))
        for few in (NUMBERS[at : at + AT_ONCE] for at in range(0, len(NUMBERS), AT_ONCE)):
            with loaded(server, [f"add_sub_{datatype.lower()}" for datatype in few]):
                for datatype in few:
                    limit = EPSILON.get(datatype, 0.0) / 2 * 1.001
                    worst = errors_of_add_sub(client, datatype)
                    world.rows.check(f"add_sub {datatype}", worst <= limit, f"error {worst:.2g}", f"<= {limit:.2g}")


def instances(world: World):
    """Checks two instances of builtin with eight concurrent clients: batches are joined and split."""
    two = [{f"{side}{n}": ("FP32", [-1]) for n in (0, 1)} for side in ("INPUT", "OUTPUT")]
    head = 'backend: "builtin"\nmax_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 2000 }\n'
    config = head + ends(*two) + parameters(function="add_sub")
    world.model("sums", config, group=world.group(2))

    def ask(number):
        client, numbers, worst = Client(server.http), np.random.default_rng(number), 0.0
        for _ in range(25):
            # The same shape for all, so that batches form; a length without alignment.
            left, right = (numbers.standard_normal((1 + number % 2, 10007)).astype(np.float32) for _ in range(2))
            found = client.infer("sums", {"INPUT0": ("FP32", left), "INPUT1": ("FP32", right)})
            wanted = left.astype(np.float64), right.astype(np.float64)
            worst = max(worst, farthest(found["OUTPUT0"], wanted[0] + wanted[1]), farthest(found["OUTPUT1"], wanted[0] - wanted[1]))
        return worst

    with world.server() as server:
        worst = max(together(8, ask))
        world.rows.check("add_sub, 2 instances", worst <= EPSILON["FP32"], f"error {worst:.2g}", f"<= {EPSILON['FP32']:.2g}")
        world.rows.check("two processes", len(server.workers()) == 2)
        told = server.statistics("sums")
        fewer = told["execution_count"] < told["inference_count"]
        world.rows.check("batches are formed", fewer, f"{told['inference_count']} in {told['execution_count']}")


def ask_affine(world: World, server, name: str, number: int) -> tuple:
    """Sends 25 requests as one client; returns the largest error, and the devices that computed them."""
    client, numbers = Client(server.http), np.random.default_rng(number)
    worst, places = 0.0, set()
    for _ in range(25):
        given = numbers.standard_normal((1 + number % 3, 64)).astype(np.float32)
        found = client.infer(name, {"X": ("FP32", given)})
        worst = max(worst, farthest(found["Y"], np.maximum(given.astype(np.float64) @ WEIGHTS, 0)))
        places |= set(found["WHERE"])
    return worst, places


def affine(world: World, name: str, code: str):
    """Checks a model in Python: its results with one instance and with two, in batches, and its device."""
    sides = ends({"X": ("FP32", [64])}, {"Y": ("FP32", [64]), "WHERE": ("BYTES", [1])})
    wait = "dynamic_batching { max_queue_delay_microseconds: 2000 }\n"
    world.python_model(f"{name}_1", code, sides, 16)
    world.python_model(f"{name}_2", code, sides, 16, wait, world.group(2))
    world.python_model(f"{name}_auto", code, sides, 16, group="")
    with world.server() as server:
        kind = json.loads(server.get(f"/v2/models/{name}_auto/config")[1])["instance_group"][0]["kind"]
        world.rows.check("KIND_AUTO", kind == ("KIND_CPU" if world.cpu else "KIND_GPU"), kind)
        for model, count in ((f"{name}_1", 1), (f"{name}_2", 2)):
            found = together(8, lambda n, model=model: ask_affine(world, server, model, n))
            worst = max(error for error, _ in found)
            places = set().union(*(place for _, place in found))
            world.rows.check(f"{model}, {count} instances", worst <= SINGLE, f"error {worst:.2g}", f"<= {SINGLE}")
            world.rows.check(f"{model} is on its device", places == {place(world)}, str(sorted(places)), str(place(world)))
        told = server.statistics(f"{name}_2")
        fewer = told["execution_count"] < told["inference_count"]
        value = f"{told['inference_count']} in {told['execution_count']}"
        world.rows.check(f"{name}_2 has batches", fewer, value)


def place(world: World) -> bytes:
    """Returns the device as models name it: their device is the first of their process."""
    return b"cpu" if world.cpu else b"cuda:0"


def torch(world: World):
    """Checks a `model.py` with PyTorch that uses `cuda:` and `model_instance_device_id`."""
    reason = world.lacks_cuda()
    if reason:
        return world.rows.skip("model.py with PyTorch", reason)
    return affine(world, "torch", "affine")


def sandbox(world: World):
    """Checks that instances compute on the device in a sandbox, as far as the kernel has its protections."""
    sides = [{f"{side}{n}": ("FP32", [-1]) for n in (0, 1)} for side in ("INPUT", "OUTPUT")]
    world.model("add_sub_fp32", 'backend: "builtin"\nmax_batch_size: 8\n' + ends(*sides) + parameters(function="add_sub"))
    lacking = {"affine": world.lacks_cuda(), "affine_cupy": "CuPy needs a device" if world.cpu else world.lacks("cupy")}
    tensors = ends({"X": ("FP32", [64])}, {"Y": ("FP32", [64]), "WHERE": ("BYTES", [1])})
    for code in (code for code, reason in lacking.items() if not reason):
        world.python_model(code, code, tensors, 16)
    with world.any_server("--worker-sandbox=auto") as server:
        eventually("all models are loaded or refused", lambda: states(server) <= {"READY", "UNAVAILABLE"})
        missing = [line.partition("sandboxes of workers: ")[2] for line in server.log.read_text().splitlines()]
        world.rows.check("missing protections", True, "; ".join(filter(None, missing)) or "none")
        limit, client = EPSILON["FP32"] / 2 * 1.001, Client(server.http)
        world.attempt("add_sub FP32 in a sandbox", lambda: errors_of_add_sub(client, "FP32"), limit)
        for code, reason in lacking.items():
            if reason:
                world.rows.skip(f"{code} in a sandbox", reason)
            else:
                world.attempt(f"{code} in a sandbox", lambda code=code: ask_affine(world, server, code, 1)[0], SINGLE)


def states(server) -> set:
    """Returns the states of all models; `{None}` if the index is empty."""
    return {entry.get("state") for entries in index(server).values() for entry in entries} or {None}


def cupy(world: World):
    """Checks the same with CuPy."""
    reason = "CuPy needs a device" if world.cpu else world.lacks("cupy")
    if reason:
        return world.rows.skip("model.py with CuPy", reason)
    return affine(world, "cupy", "affine_cupy")


def multilayer(numbers) -> tuple:
    """Returns x -> max(x A + b, 0) C as an ONNX file, and as a function in float64."""
    first, bias, second = (numbers.standard_normal(s).astype(np.float32) for s in ((64, 128), (128,), (128, 10)))
    constants = [onnx_file.constant(n, "FP32", a) for n, a in (("A", first), ("b", bias), ("C", second))]
    nodes = [
        onnx_file.node("MatMul", ["X", "A"], ["h"]),
        onnx_file.node("Add", ["h", "b"], ["i"]),
        onnx_file.node("Relu", ["i"], ["j"]),
        onnx_file.node("MatMul", ["j", "C"], ["Y"]),
    ]
    file = onnx_file.model(nodes, [("X", "FP32", ["n", 64])], [("Y", "FP32", ["n", 10])], constants)
    return file, lambda x: np.maximum(x.astype(np.float64) @ first + bias, 0) @ second


def convolution(numbers) -> tuple:
    """Returns a 3 x 3 convolution with padding and max(., 0) as an ONNX file, and as a function in float64."""
    kernel = numbers.standard_normal((8, 4, 3, 3)).astype(np.float32)
    nodes = [
        onnx_file.node("Conv", ["X", "K"], ["h"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        onnx_file.node("Relu", ["h"], ["Y"]),
    ]
    shapes = [("X", "FP32", ["n", 4, 16, 16])], [("Y", "FP32", ["n", 8, 16, 16])]
    file = onnx_file.model(nodes, *shapes, [onnx_file.constant("K", "FP32", kernel)])

    def wanted(x):
        padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        return np.maximum(np.einsum("nchwij,ocij->nohw", windows, kernel.astype(np.float64)), 0)

    return file, wanted


def on_processor() -> bytes:
    """Returns a model with the first K of each row in order, and X in another SHAPE. The graph reads both numbers on the
    processor, wherever the server has placed these inputs."""
    nodes = [onnx_file.node("TopK", ["X", "K"], ["VALUES", "INDICES"]), onnx_file.node("Reshape", ["X", "SHAPE"], ["Y"])]
    inputs = [("X", "FP32", ["r", "c"]), ("K", "INT64", [1]), ("SHAPE", "INT64", [2])]
    outputs = [("VALUES", "FP32", ["r", "k"]), ("INDICES", "INT64", ["r", "k"]), ("Y", "FP32", ["p", "q"])]
    return onnx_file.model(nodes, inputs, outputs)


def ask_on_processor(server, number: int) -> int:
    """Sends 30 requests as one client, each with another K and SHAPE and megabytes of rows; returns the number of wrong
    answers."""
    client, numbers, wrong = Client(server.http), np.random.default_rng(number), 0
    for turn in range(30):
        rows, columns = 8 * int(numbers.integers(1, 9)), 1024 * int(numbers.integers(1, 9))
        given = numbers.standard_normal((rows, columns)).astype(np.float32)
        k, part = 1 + (7 * turn + 13 * number) % 97, 2 ** int(numbers.integers(0, 10))
        shape = np.array([rows * part, columns // part])
        inputs = {"X": ("FP32", given), "K": ("INT64", np.array([k])), "SHAPE": ("INT64", shape)}
        found = client.infer("on_processor", inputs)
        values = -np.sort(-given, axis=1)[:, :k]
        right = found["VALUES"].shape == values.shape and (found["VALUES"] == values).all()
        right = right and (np.take_along_axis(given, found["INDICES"], 1) == values).all()
        wrong += not (right and found["Y"].shape == tuple(shape) and (found["Y"].ravel() == given.ravel()).all())
    return wrong


def numbers_on_the_processor(world: World, server):
    """Checks that no request gets the K or SHAPE of another or an earlier request."""
    wrong = sum(together(4, lambda number: ask_on_processor(server, number)))
    world.rows.check("inputs that are read on the processor", wrong == 0, f"{wrong} of 120 answers are wrong", "0")


def onnx(world: World, extra: str, library: str):
    """Checks both files with a single client and several; the provider's library must be loaded in the worker."""
    cases = {}
    for name, make, dims in (("mlp", multilayer, ([64], [10])), ("convolution", convolution, ([4, 16, 16], [8, 16, 16]))):
        file, wanted = make(np.random.default_rng(5))
        head = 'backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching { }\n'
        world.model(name, head + ends({"X": ("FP32", dims[0])}, {"Y": ("FP32", dims[1])}) + extra, {"model.onnx": file})
        cases[name] = (wanted, dims[0])
    sides = {"X": ("FP32", [-1, -1]), "K": ("INT64", [1]), "SHAPE": ("INT64", [2])}
    results = {"VALUES": ("FP32", [-1, -1]), "INDICES": ("INT64", [-1, -1]), "Y": ("FP32", [-1, -1])}
    config = 'backend: "onnxruntime"\nmax_batch_size: 0\n' + ends(sides, results)
    if not extra:
        world.model("on_processor", config, {"model.onnx": on_processor()})
    limit = SINGLE if world.cpu else TF32
    with world.server() as server:
        for name, (wanted, dims) in cases.items():

            def ask(number, name=name, wanted=wanted, dims=dims):
                client, numbers = Client(server.http), np.random.default_rng(number)
                given = [numbers.standard_normal((1 + n % 4, *dims)).astype(np.float32) for n in range(10)]
                return max(farthest(client.infer(name, {"X": ("FP32", x)})["Y"], wanted(x)) for x in given)

            worst = max(together(4, ask))
            world.rows.check(name, worst <= limit, f"error {worst:.2g}", f"<= {limit}")
        if not extra:
            numbers_on_the_processor(world, server)
        if library:
            world.rows.check("the provider is in use", mapped(server, library), library, reason="not loaded by any worker")


def provider(name: str) -> Path | None:
    """Returns the path of a provider's library in this Python's ONNX Runtime."""
    import onnxruntime

    found = Path(onnxruntime.__file__).parent / "capi" / f"libonnxruntime_providers_{name}.so"
    return found if found.exists() else None


def refused(world: World):
    """Without the provider, a model on the device is refused, and the message names the package to install."""
    file, _ = multilayer(np.random.default_rng(5))
    sides = ends({"X": ("FP32", [64])}, {"Y": ("FP32", [10])})
    world.model("refused", f'backend: "onnxruntime"\nmax_batch_size: 8\n{sides}', {"model.onnx": file})
    with world.any_server() as server:
        reason = eventually("the model is refused", lambda: reason_of(server, "refused"))
        wanted = "pip install onnxruntime-gpu"
        world.rows.check("refused without the provider", wanted in reason, reason, wanted)


def onnxruntime(world: World):
    """Checks ONNX files on the device with the CUDA provider."""
    reason = world.lacks("onnxruntime")
    if not reason and not world.cpu and not provider("cuda"):
        reason = "ONNX Runtime has no CUDA provider here: pip install onnxruntime-gpu"
        refused(world)
    if reason:
        return world.rows.skip("onnxruntime", reason)
    return onnx(world, "", "" if world.cpu else "libonnxruntime_providers_cuda.so")


def tensorrt(world: World):
    """Checks ONNX files on the device with TensorRT's provider."""
    reason = "TensorRT needs a device" if world.cpu else world.lacks("onnxruntime")
    if not reason and not provider("tensorrt"):
        reason = "ONNX Runtime has no TensorRT provider here"
    if not reason and not world.cpu:
        reason = world.lacks("tensorrt")
    if reason:
        return world.rows.skip("tensorrt", reason)
    accelerator = 'optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt" } ] } }\n'
    return onnx(world, accelerator, "libonnxruntime_providers_tensorrt.so")


def libtorch(world: World):
    """Checks files of TorchScript and of torch.export."""
    reason = world.lacks_cuda()
    if reason:
        return world.rows.skip("pytorch_libtorch", reason)
    import torch as torch_package

    layer = torch_package.nn.Linear(64, 16).eval()
    weights, bias = (part.detach().numpy().astype(np.float64) for part in (layer.weight, layer.bias))
    head = 'platform: "pytorch_libtorch"\nmax_batch_size: 16\ndynamic_batching { }\n'
    config = head + ends({"input": ("FP32", [64])}, {"OUTPUT__0": ("FP32", [16])})
    version = world.model("script", config)
    torch_package.jit.script(layer).save(str(version / "model.pt"))
    names = ["script"]
    if hasattr(torch_package, "export"):
        batch = {"input": {0: torch_package.export.Dim("batch", max=64)}}
        program = torch_package.export.export(layer, (torch_package.ones(2, 64),), dynamic_shapes=batch)
        torch_package.export.save(program, str(world.model("exported", config) / "model.pt2"))
        names.append("exported")
    with world.server() as server:
        client, given = Client(server.http), np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
        for name in names:
            found = client.infer(name, {"input": ("FP32", given)})["OUTPUT__0"]
            worst = farthest(found, given.astype(np.float64) @ weights.T + bias)
            world.rows.check(name, worst <= SINGLE, f"error {worst:.2g}", f"<= {SINGLE}")
    return None


def torchserve(world: World):
    """Checks an archive whose handler uses `gpu_id`."""
    reason = world.lacks_cuda()
    if reason:
        return world.rows.skip("torchserve", reason)
    manifest = {"createdOn": "01/01/2026 10:00:00", "runtime": "python", "archiverVersion": "0.12.0"}
    manifest["model"] = {"modelName": "twice", "modelVersion": "1.0", "handler": "handler"}
    files = {"handler.py": (CODE / "handler.py").read_bytes(), "MAR-INF/MANIFEST.json": json.dumps(manifest).encode()}
    torchserve_models.write(world.models / "twice" / "1", "twice", files)
    (world.models / "twice" / "config.pbtxt").write_text('backend: "torchserve"\n' + world.group())
    with world.server() as server:
        request = {"name": "data", "shape": [1, 1], "datatype": "BYTES", "data": ["[1.5, -2.0]"]}
        status, answer = server.infer("twice", {"inputs": [request]})
        found = json.loads(answer["outputs"][0]["data"][0]) if status == 200 else {}
        world.rows.check("the handler's answer", found.get("twice") == [3, -4], str(found), reason=str(answer)[:200])
        wanted = place(world).decode()
        world.rows.check("the handler runs on its device", found.get("where") == wanted, str(found.get("where")), wanted)
    return None


def xgboost(world: World):
    """Checks a file of XGBoost."""
    reason = world.lacks("xgboost")
    if reason:
        return world.rows.skip("xgboost", reason)
    import xgboost as package

    rows = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    numbers = rows @ [1.0, 2.0, 3.0, 4.0]
    model = package.train({"seed": 0, "max_depth": 3}, package.DMatrix(rows, numbers), 10)
    version = world.model("trees", 'backend: "xgboost"\n')
    model.save_model(str(version / "model.json"))
    few = rows[:20]
    with world.server() as server:
        found = next(iter(Client(server.http).infer("trees", {"input": ("FP32", few)}).values()))
        worst = farthest(found.ravel(), model.predict(package.DMatrix(few)).ravel())
        world.rows.check("the same result as without a server", worst <= SINGLE, f"error {worst:.2g}", f"<= {SINGLE}")
    return None


