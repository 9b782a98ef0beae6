#!/usr/bin/env python3
"""Writes the model configurations of this folder and of `../models_broken`, which differ only in names and datatypes.

Run it after changing it, and commit what it writes: `python3 tests/models/generate.py`. A test checks that the
committed files are what this script writes.
"""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
BROKEN = HERE.parent / "models_broken"

DATATYPES = [
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
"""The datatypes of the protocol; BYTES is TYPE_STRING in a configuration."""

ARITHMETIC = [name for name in DATATYPES if name not in ("BOOL", "BYTES")]


BUILTIN_FUNCTIONS = ("identity", "add_sub")
"""The functions of the server's backend `builtin`. All others are those of the tests' backend `test` (tests/backends)."""


def backend_of(function: str) -> str:
    """Returns the backend that has a function."""
    return "builtin" if function in BUILTIN_FUNCTIONS else "test"


def with_backend(config: str) -> str:
    """Returns a configuration with the backend that has its function; the configuration of an ensemble as it is."""
    if "ensemble" in config:
        return config
    function = re.search(r'key: "function"\s+value { string_value: "([^"]*)"', config)
    is_for_tests = 'key: "echo_parameters"' in config or (function and function[1] not in BUILTIN_FUNCTIONS)
    return f'backend: "{"test" if is_for_tests else "builtin"}"\n{config}'


def config_type(datatype: str) -> str:
    """Returns the name of a datatype in a configuration: `TYPE_STRING` for BYTES, else `TYPE_` and the protocol's name."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def tensor(kind: str, name: str, datatype: str, dims: list, extra: str = "") -> str:
    """Returns one `input` or `output` entry."""
    size = ", ".join(str(d) for d in dims)
    body = f'    name: "{name}"\n    data_type: {config_type(datatype)}\n    dims: [ {size} ]\n{extra}'
    return f"{kind} [\n  {{\n{body}  }}\n]\n"


def parameters(**values) -> str:
    """Returns the `parameters` of a model."""
    entry = 'parameters {{\n  key: "{}"\n  value {{ string_value: "{}" }}\n}}\n'
    return "".join(entry.format(key, value) for key, value in values.items())


def model(name: str, function: str, tensors: str, batch: int = 8, extra: str = "", **more) -> tuple:
    """Returns a complete configuration of a model with this function, and its versions."""
    versions = more.pop("versions", [1])
    text = f'name: "{name}"\nbackend: "{backend_of(function)}"\nmax_batch_size: {batch}\n{tensors}{extra}'
    return name, text + parameters(function=function, **more), versions


def one_to_one(datatype: str, dims=(-1,)) -> str:
    """Returns INPUT0 and OUTPUT0 of the same datatype and shape."""
    return tensor("input", "INPUT0", datatype, dims) + tensor("output", "OUTPUT0", datatype, dims)


def two_to_two(datatype: str, dims) -> str:
    """Returns INPUT0, INPUT1, OUTPUT0, OUTPUT1 of the same datatype and shape."""
    names = [("input", "INPUT0"), ("input", "INPUT1"), ("output", "OUTPUT0"), ("output", "OUTPUT1")]
    return "".join(tensor(kind, name, datatype, dims) for kind, name in names)


def per_datatype():
    """Yields identity models with and without batching for every datatype, and add_sub models for every numeric one."""
    for datatype in DATATYPES:
        yield model(f"identity_{datatype.lower()}", "identity", one_to_one(datatype))
        yield model(f"identity_{datatype.lower()}_nobatch", "identity", one_to_one(datatype), batch=0)
    for datatype in ARITHMETIC:
        yield model(f"add_sub_{datatype.lower()}", "add_sub", two_to_two(datatype, [4]))


def special():
    """Yields models with one special property each, which is their name."""
    fp32 = one_to_one("FP32")
    two_instances = "instance_group [ { count: 2 kind: KIND_CPU } ]\n"
    wait = "dynamic_batching {{ max_queue_delay_microseconds: {} }}\n".format
    yield model("delay_200", "delay", fp32, batch=4, extra="dynamic_batching { }\n", delay_ms=200)
    yield model("delay_20_two_instances", "delay", fp32, batch=0, extra=two_instances, delay_ms=20)
    yield model("batched", "identity", fp32, extra=wait(100000))
    yield model(
        "preferred",
        "identity",
        fp32,
        extra="dynamic_batching {\n  preferred_batch_size: [ 4 ]\n  max_queue_delay_microseconds: 600000000\n}\n",
    )
    yield model(
        "queue_limit",
        "delay",
        fp32,
        batch=1,
        delay_ms=300,
        extra="dynamic_batching {\n  default_queue_policy { max_queue_size: 2 }\n}\n",
    )
    yield model(
        "queue_timeout",
        "delay",
        fp32,
        batch=1,
        delay_ms=300,
        extra="dynamic_batching {\n  default_queue_policy { default_timeout_microseconds: 100000 }\n}\n",
    )
    yield model("crash", "crash", one_to_one("UINT8"), batch=0)
    yield model("hang", "hang", one_to_one("UINT8"), batch=0)
    yield model("panic", "panic", one_to_one("UINT8"), batch=0)
    yield model("decoupled", "identity", fp32, batch=0, extra="model_transaction_policy { decoupled: true }\n")
    yield model("add_sub_any", "add_sub", two_to_two("INT32", [-1]), batch=0)
    yield model("fail", "fail", fp32, batch=0)
    yield model("one_string", "identity", one_to_one("BYTES", [1]), batch=0)
    yield model("print", "print", one_to_one("BYTES", [-1]), batch=0)
    yield model("two_dims", "identity", one_to_one("INT32", [-1, -1]), batch=0)
    yield model("fixed_and_free", "identity", one_to_one("INT32", [2, -1]), batch=0)
    optional = tensor("input", "INPUT1", "FP32", [-1], "    optional: true\n")
    outputs = tensor("output", "OUTPUT0", "FP32", [-1]) + tensor("output", "OUTPUT1", "FP32", [-1])
    yield model("optional", "identity", tensor("input", "INPUT0", "FP32", [-1]) + optional + outputs)


def versioned():
    """Yields models with three versions each, for the three version policies and without one."""
    fp32 = one_to_one("FP32")
    policies = {
        "versions_default": "",
        "versions_all": "version_policy { all { } }\n",
        "versions_latest_2": "version_policy { latest { num_versions: 2 } }\n",
        "versions_specific": "version_policy { specific { versions: [ 1, 3 ] } }\n",
    }
    for name, policy in policies.items():
        yield model(name, "identity", fp32, extra=policy, versions=[1, 2, 3])


def broken():
    """Yields models that must not load, each for a different reason, and one valid model that must load beside them."""
    fp32 = one_to_one("FP32")
    yield model("good", "identity", fp32)
    yield model("unknown_function", "no_such_function", fp32)
    yield "unknown_backend", 'backend: "no_such_backend"\nmax_batch_size: 0\n' + fp32, [1]
    yield "unknown_field", 'backend: "builtin"\nmax_batch_sizes: 8\n' + fp32, [1]
    yield "bad_syntax", 'backend: "builtin"\nmax_batch_size: {{\n', [1]
    yield "bad_datatype", 'backend: "builtin"\n' + fp32.replace("TYPE_FP32", "TYPE_FP31"), [1]
    yield "no_version", 'backend: "builtin"\n' + fp32 + parameters(function="identity"), []
    yield "wrong_name", 'name: "another"\nbackend: "builtin"\n' + fp32 + parameters(function="identity"), [1]
    yield "not_onnx", 'backend: "tract"\nmax_batch_size: 0\n' + fp32, [1]
    yield (
        "some_versions",
        'backend: "builtin"\nversion_policy { specific { versions: [ 1, 7 ] } }\n'
        + fp32
        + parameters(function="identity"),
        [1],
    )


def files() -> dict:
    """Returns all files that this script writes: path -> text."""
    wanted = {}
    for root, models in [(HERE, [*per_datatype(), *special(), *versioned()]), (BROKEN, [*broken()])]:
        for name, text, versions in models:
            wanted[root / name / "config.pbtxt"] = text
            for version in versions:
                wanted[root / name / str(version) / ".gitkeep"] = ""
    wanted[BROKEN / "not_onnx" / "1" / "model.onnx"] = "This is not an ONNX model.\n"
    return wanted


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"wrote {len(files())} files")
