"""Models that answer any number of times, and ordinary ones beside them, as repositories for this server and for a real
Triton (`triton_models/streams.py` has the functions for its Python backend)."""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "models"))
from generate import parameters, tensor  # noqa: E402

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
    """Input `I<number>` and output `O<number>`."""
    return tensor("input", f"I{number}", datatype, dims, extra) + tensor("output", f"O{number}", datatype, dims)


def model(function: str, tensors: str, batch: int = 0, decoupled: bool = True, extra: str = "", **more) -> str:
    """A configuration without its backend."""
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
"""A batch goes when there are three rows."""

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
"""Models of this server only. `wide` answers with 1 MiB each time."""


def build(target: Path, models: dict) -> Path:
    """Writes a repository for this server into the folder `target` and gives it back."""
    for name, config in models.items():
        (target / name / "1").mkdir(parents=True)
        (target / name / "config.pbtxt").write_text(f'backend: "builtin"\n{config}')
    return target


def build_for_triton(target: Path) -> Path:
    """The same of the [`COMPARED`] models for a real Triton."""
    for name, config in COMPARED.items():
        (target / name / "1").mkdir(parents=True)
        group = "instance_group [ { kind: KIND_CPU } ]\n"
        (target / name / "config.pbtxt").write_text(f'backend: "python"\n{config}{group}')
        shutil.copy(HERE / "triton_models" / "streams.py", target / name / "1" / "model.py")
    return target
