"""A repository of Python models that this server and a real Triton both serve, with identical files.

The models' code is in `python_models/`; this module has their configurations. The models of [`SERVED`] are loaded at the
start. The models of [`LOADED`] are loaded by rows of `python_tables.py`, since most of them fail to load.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.generate import DATATYPES, parameters, tensor

CODE = Path(__file__).resolve().parent / "python_models"
OPTIONAL = "    optional: true\n"
CPU = "instance_group [ { kind: KIND_CPU } ]\n"
DECOUPLED = "model_transaction_policy { decoupled: true }\n"


@dataclass(frozen=True)
class Model:
    """A model: the name of its code file without `.py`, or the code itself; its configuration (empty: none); files that are
    copied beside its code; and its versions."""

    code: str
    config: str = ""
    beside: tuple = ()
    versions: tuple = (1,)

    def write(self, folder: Path):
        """Writes the model's folder."""
        for version in self.versions:
            (folder / str(version)).mkdir(parents=True)
            source = CODE / f"{self.code}.py"
            if "\n" in self.code:
                (folder / str(version) / "model.py").write_text(self.code)
            elif self.code:
                shutil.copy(source, folder / str(version) / "model.py")
            for name in self.beside:
                shutil.copy(CODE / f"{name}.py", folder / str(version))
        if self.config:
            (folder / "config.pbtxt").write_text(self.config)


def config(tensors: str, batch: int = 0, extra: str = "", **values) -> str:
    """Returns a whole configuration."""
    return f'backend: "python"\nmax_batch_size: {batch}\n{tensors}{extra}{CPU}{parameters(**values)}'


def told(batch: int = 0, extra: str = "", seen: int = 1, **values) -> str:
    """Returns the configuration of a model that follows instructions: inputs DO and VALUE, outputs OUT and SEEN."""
    tensors = tensor("input", "DO", "BYTES", [1]) + tensor("input", "VALUE", "FP32", [-1], OPTIONAL)
    tensors += tensor("output", "OUT", "FP32", [-1]) + tensor("output", "SEEN", "BYTES", [-1])
    return config(tensors, batch, extra, **values)


def valued(batch: int = 0, extra: str = "", **values) -> str:
    """Returns the configuration of a model with the input VALUE and the output OUT."""
    tensors = tensor("input", "VALUE", "FP32", [-1]) + tensor("output", "OUT", "FP32", [-1])
    return config(tensors, batch, extra, **values)


def batching(more: str = "") -> str:
    """Returns a dynamic batcher."""
    return f"dynamic_batching {{ {more} }}\n"


def control(name: str, kind: str, how: str) -> str:
    """Returns one control of a sequence batcher."""
    return f'    {{ name: "{name}" control [ {{ kind: {kind} {how} }} ] }}'


def sequences(strategy: str, key: str) -> str:
    """Returns a sequence batcher with all controls; `key` is the datatype of the correlation ID."""
    ints = "int32_false_true: [ 0, 1 ]"
    controls = [
        control("START", "CONTROL_SEQUENCE_START", ints),
        control("END", "CONTROL_SEQUENCE_END", ints),
        control("READY", "CONTROL_SEQUENCE_READY", ints),
        control("CORRID", "CONTROL_SEQUENCE_CORRID", f"data_type: {key}"),
    ]
    listed = ",\n".join(controls)
    return f"sequence_batching {{\n  {strategy}\n  control_input [\n{listed}\n  ]\n}}\n"


def any_datatype() -> str:
    """Returns a configuration with an optional input and an output of every datatype, and SEEN."""
    pairs = (
        tensor("input", f"I_{name}", name, [-1], OPTIONAL) + tensor("output", f"O_{name}", name, [-1])
        for name in DATATYPES
    )
    return config("".join(pairs) + tensor("output", "SEEN", "BYTES", [1]))


def summed(strategy: str, key: str, batch: int) -> str:
    """Returns the configuration of a sequence model."""
    tensors = tensor("input", "VALUE", "FP32", [1])
    tensors += tensor("output", "OUT", "FP32", [1]) + tensor("output", "SEEN", "BYTES", [1])
    return config(tensors, batch, sequences(strategy, key))


def ensemble(*members: str) -> str:
    """Returns an ensemble that passes VALUE through these members to OUT."""
    names = ["VALUE", *(f"t{n}" for n in range(len(members) - 1)), "OUT"]
    steps = "".join(
        f'  step {{ model_name: "{member}" model_version: -1 input_map {{ key: "VALUE" value: "{names[n]}" }} '
        f'output_map {{ key: "OUT" value: "{names[n + 1]}" }} }}\n'
        for n, member in enumerate(members)
    )
    ends = tensor("input", "VALUE", "FP32", [-1]) + tensor("output", "OUT", "FP32", [-1])
    return f'platform: "ensemble"\nmax_batch_size: 8\n{ends}ensemble_scheduling {{\n{steps}}}\n'


SLOW_QUEUE = (
    "priority_levels: 3 default_priority_level: 2 "
    "default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 3000000 }"
)
"""Priority levels, and a time limit of 3 s that a request may lower."""

SERVED = {
    "plain": Model("scripted", told()),
    "interface": Model("scripted", told()),
    "two_versions": Model("scripted", told(extra="version_policy { all { } }\n"), versions=(1, 2)),
    "rows": Model("scripted", told(8)),
    "batched": Model(
        "scripted", told(8, batching("preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 3000000"))
    ),
    "levels": Model("scripted", told(1, batching(SLOW_QUEUE))),
    "datatypes": Model("datatypes", any_datatype()),
    "streamed": Model("streamed", told(extra=DECOUPLED)),
    "sender": Model("sender", told()),
    "coroutine": Model("coroutine", valued()),
    "coroutine_streamed": Model("coroutine", valued(extra=DECOUPLED)),
    "direct": Model("sequence", summed("direct { }", "TYPE_UINT64", 4)),
    "oldest": Model("sequence", summed("oldest { max_candidate_sequences: 4 }", "TYPE_UINT64", 4)),
    "named": Model("sequence", summed("direct { }", "TYPE_STRING", 4)),
    "caller": Model("caller", told(), ("calls",)),
    "async_caller": Model("async_caller", told(), ("calls",)),
    "decoupled_caller": Model("decoupled_caller", told(extra=DECOUPLED), ("calls",)),
    "doubled": Model("completing", valued(8)),
    "chain": Model("", ensemble("doubled", "doubled")),
    "chain_of_plain": Model("", ensemble("doubled", "refusing")),
    "refusing": Model(
        "import triton_python_backend_utils as pb_utils\n\n\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        error = pb_utils.TritonError('refused', pb_utils.TritonError.UNAVAILABLE)\n"
        "        return [pb_utils.InferenceResponse(error=error) for _ in requests]\n",
        valued(8),
    ),
    "measuring": Model("measuring", told()),
    "arguments": Model("arguments", told(kept="as written")),
    "completed": Model("completing"),
    "dying": Model("scripted", told()),
}
"""The models that both servers load at the start."""

NO_CLASS = "class Other:\n    pass\n"
NO_EXECUTE = "class TritonPythonModel:\n    def initialize(self, args):\n        pass\n"
BAD_SYNTAX = "class TritonPythonModel:\n    def execute(self, requests)\n        return []\n"
BAD_IMPORT = "import no_such_module\n\n\nclass TritonPythonModel:\n    pass\n"
EMPTY_FINALIZE = (
    "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n\n    def finalize(self):\n"
    "        raise RuntimeError('the end')\n"
)


def completes(case: str, tensors: str = "", batch: int = 0, extra: str = "") -> Model:
    """Returns a model that completes its configuration as the case of `completing.py` says."""
    return Model("completing", config(tensors, batch, extra, case=case))


VALUE, OUT = tensor("input", "VALUE", "FP32", [-1]), tensor("output", "OUT", "FP32", [-1])

LOADED = {
    "on_demand": Model("scripted", told()),
    "fails_initialize": Model("failing", told(at="initialize")),
    "fails_initialize_model_exception": Model("failing", told(at="initialize, model exception")),
    "fails_initialize_inside": Model("failing", told(at="initialize, in a function")),
    "fails_initialize_exit": Model("failing", told(at="initialize, exit")),
    "fails_finalize": Model("failing", told(at="finalize")),
    "no_class": Model(NO_CLASS, told()),
    "no_execute": Model(NO_EXECUTE, told()),
    "bad_syntax": Model(BAD_SYNTAX, told()),
    "bad_import": Model(BAD_IMPORT, told()),
    "no_file": Model("", told()),
    "completes_all": completes(""),
    "completes_decoupled": completes("decoupled"),
    "completes_with_tensors": completes("", VALUE + OUT, 4),
    "completes_with_batcher": completes("", "", 0, batching("max_queue_delay_microseconds: 100")),
    "completes_raises": completes("raises"),
    "completes_returns_nothing": completes("returns nothing"),
    "completes_has_nothing": completes("has nothing", VALUE + OUT),
    "completes_nothing_at_all": completes("has nothing"),
    "completes_other_datatype": completes("other datatype", VALUE + OUT),
    "completes_other_dims": completes("other dims", VALUE + OUT),
    "completes_no_name": completes("no name", VALUE + OUT),
    "completes_no_datatype": completes("no datatype", VALUE + OUT),
    "completes_no_dims": completes("no dims", VALUE + OUT),
    "completes_unknown_key": completes("unknown key", VALUE + OUT),
    "completes_unknown_datatype": completes("unknown datatype", VALUE + OUT),
    "completes_one_more": completes("one more", VALUE + OUT),
    "completes_larger_batch": completes("larger batch", VALUE + OUT, 4),
    "completes_policy": completes("policy", VALUE + OUT),
    "completes_wrong_policy": completes("wrong policy", VALUE + OUT),
    "completes_batching": completes("batching", VALUE + OUT, 8),
}
"""Models that a row loads."""


def build(target: Path) -> Path:
    """Writes the repository into the folder `target` and returns it."""
    for name, model in (SERVED | LOADED).items():
        (target / name).mkdir(parents=True)
        model.write(target / name)
        # An ensemble's version is an empty folder.
        (target / name / "1").mkdir(exist_ok=True)
    return target


OPTIONS = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in SERVED)]
"""Options of both servers' command lines."""
