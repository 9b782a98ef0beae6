"""Decoupled models, and models with one response for each request, as repositories for this server and for a real Triton
(`triton_models/streams.py` implements the functions for Triton's Python backend)."""

import shutil
from pathlib import Path

from harness.generate import parameters, tensor, with_backend
from harness.server import TRITON_MODELS

OPTIONAL = "    optional: true\n"

REPEAT = (
    tensor("input", "IN", "INT32", [-1])
    + tensor("input", "DELAY", "UINT32", [-1], OPTIONAL)
    + tensor("input", "WAIT", "UINT32", [1], OPTIONAL)
    + tensor("output", "OUT", "INT32", [-1])
    + tensor("output", "IDX", "UINT32", [1])
)
"""The tensors of Triton's example `repeat_int32`."""

ANY = [("INT32", [-1]), ("BYTES", [-1]), ("FP32", [2, -1]), ("BOOL", [2]), ("INT64", [-1, -1]), ("FP64", [1]),
       ("UINT8", [-1]), ("FP16", [-1]), ("INT8", [-1]), ("INT16", [-1]), ("UINT16", [-1]), ("UINT32", [-1]),
       ("UINT64", [-1])]  # fmt: skip
"""Datatypes and dimensions of the model `any`, whose inputs are all optional."""


def pair(number: int, datatype: str, dims: list, extra: str = "") -> str:
    """Returns input `I<number>` and output `O<number>`."""
    return tensor("input", f"I{number}", datatype, dims, extra) + tensor("output", f"O{number}", datatype, dims)


def model(function: str, tensors: str, batch: int = 0, decoupled: bool = True, extra: str = "", **more) -> str:
    """Returns a configuration without its backend."""
    policy = "model_transaction_policy { decoupled: true }\n" if decoupled else ""
    return f"max_batch_size: {batch}\n{tensors}{policy}{extra}" + parameters(function=function, **more)


COMPARED = {
    "repeat": model("repeat", REPEAT),
    "repeat_with": model("repeat", REPEAT, final="with"),
    "repeat_three": model("repeat", REPEAT, copies=3),
    "repeat_fails": model("repeat", REPEAT, fail_at=2),
    "repeat_fails_first": model("repeat", REPEAT, fail_at=0),
    "repeat_errs": model("repeat", REPEAT, error_at=1),
    "silent": model("silent", REPEAT),
    "any": model("identity", "".join(pair(n, *of, OPTIONAL) for n, of in enumerate(ANY)), decoupled=False),
    "rows": model("identity", pair(0, "INT32", [4]), 8, False),
    "text": model(
        "identity",
        tensor("input", "text_input", "BYTES", [1]) + tensor("output", "text_output", "BYTES", [1]),
        decoupled=False,
    ),
    "slow": model("delay", pair(0, "INT32", [-1]), decoupled=False, delay_ms=300),
}
"""Models that both servers serve."""

TOGETHER = "dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 20000000 }\n"
"""A batch is dispatched when it has three rows."""



def step(model: str, inputs: dict, outputs: dict) -> str:
    """Returns one step of an ensemble: the member's inputs and outputs with their ensemble tensors."""
    maps = "".join(f' input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items())
    maps += "".join(f' output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items())
    return f'step {{ model_name: "{model}" model_version: -1{maps} }}\n'


def ensemble(*steps: str, limit: int = 0, extra: str = "", outputs=("OUT",)) -> str:
    """Returns an ensemble with inputs like those of `repeat`: IN, and DELAY if a step uses it. `outputs` names the outputs."""
    ends = tensor("input", "IN", "INT32", [-1])
    if any('value: "DELAY"' in step for step in steps):
        ends += tensor("input", "DELAY", "UINT32", [-1], OPTIONAL)
    for name in outputs:
        ends += tensor("output", name, "UINT32" if name == "IDX" else "INT32", [-1])
    limited = f"max_inflight_requests: {limit}\n" if limit else ""
    return f'platform: "ensemble"\nmax_batch_size: 0\n{ends}{extra}ensemble_scheduling {{\n{limited}{"".join(steps)}}}\n'


def repeated(model="repeat", source="IN", target="a", delayed=True, **outputs) -> str:
    """Returns a step with a decoupled model."""
    return step(model, {"IN": source} | ({"DELAY": "DELAY"} if delayed else {}), {"OUT": target} | outputs)


def passed(source="a", target="OUT", model="rows_of_any") -> str:
    """Returns a step whose output is its input."""
    return step(model, {"I0": source}, {"O0": target})


ENSEMBLES = {
    "e_last": ensemble(passed("IN", "a"), repeated(source="a", target="OUT")),
    "e_first": ensemble(repeated(), passed()),
    "e_first_with": ensemble(repeated("repeat_with"), passed()),
    "e_middle": ensemble(passed("IN", "x"), repeated(source="x"), passed("a", "b"), passed("b")),
    "e_fork": ensemble(repeated(IDX="IDX"), passed("a", "b"), passed("b"), outputs=("OUT", "IDX")),
    "e_twice": ensemble(repeated("repeat_three"), repeated(source="a", target="b", delayed=False), passed("b")),
    "e_silent": ensemble(repeated("silent"), passed()),
    "e_silent_second": ensemble(repeated(), repeated("silent", "a", "b", False), passed("b")),
    "e_fails": ensemble(repeated("repeat_fails"), passed()),
    "e_fails_first": ensemble(repeated("repeat_fails_first"), passed()),
    "e_errs": ensemble(repeated("repeat_errs"), passed()),
    "e_refused": ensemble(repeated("repeat_three"), passed(model="rows_of_one")),
    "e_nested": ensemble(step("e_first", {"IN": "IN", "DELAY": "DELAY"}, {"OUT": "a"}), passed()),
    "e_nested_fails": ensemble(step("e_fails", {"IN": "IN", "DELAY": "DELAY"}, {"OUT": "a"}), passed()),
}
"""Ensembles with decoupled members that both servers serve."""

COMPARED |= {
    "rows_of_any": model("identity", pair(0, "INT32", [-1]), decoupled=False),
    "rows_of_one": model("identity", pair(0, "INT32", [1]), decoupled=False),
}
COMPARED |= ENSEMBLES

OWN = {
    "wide": model("repeat", REPEAT, copies=1 << 18),
    "wide_too": model("repeat", REPEAT, copies=1 << 18),
    "crashing": model("repeat", REPEAT, crash_at=2),
    "together": model("repeat", REPEAT, 4, extra=TOGETHER),
    "numbered": model("repeat", REPEAT, parameters="true"),
    "echo": model("identity", pair(0, "INT32", [-1]), decoupled=False, echo_parameters="true"),
    "once": model("identity", pair(0, "INT32", [-1])),
    "one_waits": model("repeat", REPEAT, extra="dynamic_batching { default_queue_policy { max_queue_size: 1 } }\n"),
}
"""Models of this server only. Each response of `wide` has 1 MiB."""


def build(target: Path, models: dict) -> Path:
    """Writes a repository for this server into the folder `target` and returns it."""
    for name, config in models.items():
        (target / name / "1").mkdir(parents=True)
        (target / name / "config.pbtxt").write_text(with_backend(config))
    return target


def build_for_triton(target: Path) -> Path:
    """Writes the [`COMPARED`] models for a real Triton into the folder `target` and returns it."""
    for name, config in COMPARED.items():
        (target / name / "1").mkdir(parents=True)
        if name in ENSEMBLES:
            (target / name / "config.pbtxt").write_text(config)
            continue
        group = "instance_group [ { kind: KIND_CPU } ]\n"
        (target / name / "config.pbtxt").write_text(f'backend: "python"\n{config}{group}')
        shutil.copy(TRITON_MODELS / "streams.py", target / name / "1" / "model.py")
    return target
