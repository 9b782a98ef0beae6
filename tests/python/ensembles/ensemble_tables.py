"""Valid and invalid ensembles, and requests to them: `golden_ensembles.json` has the expected results.

A row of [`LOADS`] is an ensemble that is loaded or refused with a reason. A row of [`RUNS`] is a request. Both use members of
[`MEMBERS`] and ensembles of [`SERVING`]; `runner.py` writes them for this server and for a real Triton.
"""

from dataclasses import dataclass, field

from harness.generate import parameters, tensor


def member(function: str, tensors: str, batch: int = 8, **more) -> tuple:
    """Returns a composing model: its configuration without backend and instances, and its function."""
    return f"max_batch_size: {batch}\n{tensors}", parameters(function=function, **more)


def pairs(*datatypes: str, dims=(-1,), optional=()) -> str:
    """Returns INPUT0 and OUTPUT0, INPUT1 and OUTPUT1 ... of these datatypes; `optional` lists the numbers of optional inputs."""
    text = ""
    for n, datatype in enumerate(datatypes):
        text += tensor("input", f"INPUT{n}", datatype, dims, "    optional: true\n" if n in optional else "")
        text += tensor("output", f"OUTPUT{n}", datatype, dims)
    return text


MEMBERS = {
    "fp32": member("identity", pairs("FP32")),
    "int32": member("identity", pairs("INT32")),
    "flat": member("identity", pairs("FP32", dims=(4,)), batch=0),
    "wide": member("identity", pairs("FP32", dims=(-1, 4)), batch=0),
    "fixed": member("identity", pairs("FP32", dims=(4,))),
    "small": member("identity", pairs("FP32"), batch=2),
    "square": member("identity", pairs("FP32", dims=(2, 2))),
    "two": member("add_sub", pairs("FP32", "FP32")),
    "maybe": member("identity", pairs("FP32", "FP32", optional=[1])),
    "slow": member("delay", pairs("FP32"), delay_ms=300),
    "failing": member("fail", pairs("FP32")),
    "many": member("identity", pairs("FP32") + "model_transaction_policy { decoupled: true }\n"),
    "broken": member("no such function", pairs("FP32")),
}


def step(model: str, inputs: dict, outputs: dict, version: int = -1) -> str:
    """Returns one step that maps the member's inputs and outputs to ensemble tensors."""
    maps = "".join(f'    input_map {{ key: "{k}" value: "{v}" }}\n' for k, v in inputs.items())
    maps += "".join(f'    output_map {{ key: "{k}" value: "{v}" }}\n' for k, v in outputs.items())
    return f'  step {{\n    model_name: "{model}"\n    model_version: {version}\n{maps}  }}\n'


NESTED = {"one", "three", "fails", "one_missing", "of_itself", "of_a_broken_one"}
"""Ensembles that are members of others; all cycles are, too."""


def chain(*models: str, first="X", last="Y") -> tuple:
    """Returns consecutive steps with tensors `t0`, `t1` ... between them. Members have INPUT0 and OUTPUT0, ensembles X and Y."""
    names = [first, *(f"t{n}" for n in range(len(models) - 1)), last]
    nested = [model in NESTED or model.startswith("circle") for model in models]
    ends = [("X", "Y") if is_ensemble else ("INPUT0", "OUTPUT0") for is_ensemble in nested]
    numbered = enumerate(zip(models, ends))
    return tuple(step(m, {source: names[n]}, {target: names[n + 1]}) for n, (m, (source, target)) in numbered)


@dataclass(frozen=True)
class Ensemble:
    """An ensemble: inputs and outputs by name, each `(datatype, dims)`, by default FP32 [-1]."""

    name: str
    steps: tuple
    inputs: dict = field(default_factory=lambda: {"X": ("FP32", [-1])})
    outputs: dict = field(default_factory=lambda: {"Y": ("FP32", [-1])})
    batch: int = 8
    optional: tuple = ()
    more: str = ""

    def configuration(self) -> str:
        """Returns the config.pbtxt."""
        text = f'name: "{self.name}"\nplatform: "ensemble"\nmax_batch_size: {self.batch}\n'
        for name, (datatype, dims) in self.inputs.items():
            text += tensor("input", name, datatype, dims, "    optional: true\n" if name in self.optional else "")
        for name, (datatype, dims) in self.outputs.items():
            text += tensor("output", name, datatype, dims)
        return text + self.more + "ensemble_scheduling {\n" + "".join(self.steps) + "}\n"


FP32, FOUR = ("FP32", [-1]), ("FP32", [4])
FORWARD, BACK = {"INPUT0": "X"}, {"OUTPUT0": "Y"}

# Each row is one line, so that rows can be compared.
# fmt: off

LOADS = [
    Ensemble("one_missing", chain("fp32", "nowhere")),
    Ensemble("two_missing", chain("nowhere", "elsewhere")),
    Ensemble("no_such_version", (step("fp32", FORWARD, BACK, version=7),)),
    Ensemble("of_a_broken_one", chain("fp32", "broken")),
    Ensemble("of_itself", chain("of_itself")),
    Ensemble("circle_a", chain("circle_b")),
    Ensemble("circle_b", chain("circle_a")),
    Ensemble("circle_of_three_a", chain("circle_of_three_b")),
    Ensemble("circle_of_three_b", chain("circle_of_three_c")),
    Ensemble("circle_of_three_c", chain("circle_of_three_a")),
    Ensemble("of_a_circle", chain("circle_a")),
    Ensemble("of_a_bad_one", chain("one_missing")),
    Ensemble("of_one_of_a_broken_one", chain("of_a_broken_one")),
    Ensemble("output_twice", (step("fp32", FORWARD, BACK), step("small", FORWARD, BACK)), batch=2),
    Ensemble("output_twice_in_a_step", (step("two", {"INPUT0": "X", "INPUT1": "X"}, {"OUTPUT0": "Y", "OUTPUT1": "Y"}),)),
    Ensemble("input_is_an_output", (step("fp32", FORWARD, {"OUTPUT0": "X"}), step("fp32", FORWARD, BACK))),
    Ensemble("steps_wait_for_each_other", (step("two", {"INPUT0": "X", "INPUT1": "a"}, {"OUTPUT0": "b"}), step("fp32", {"INPUT0": "b"}, {"OUTPUT0": "a"}), step("fp32", {"INPUT0": "b"}, BACK))),
    Ensemble("output_not_written", chain("fp32", last="Z")),
    Ensemble("output_from_nothing", (step("fp32", {"INPUT0": "Z"}, BACK),), inputs={"X": FP32}),
    Ensemble("output_from_half", (step("two", {"INPUT0": "X", "INPUT1": "Z"}, {"OUTPUT0": "Y"}),)),
    Ensemble("input_unused", chain("fp32"), inputs={"X": FP32, "W": FP32}),
    Ensemble("tensor_unused", (step("two", {"INPUT0": "X", "INPUT1": "X"}, {"OUTPUT0": "Y", "OUTPUT1": "Z"}),)),
    Ensemble("step_unused", (*chain("fp32"), step("fp32", FORWARD, {"OUTPUT0": "Z"}))),
    Ensemble("input_of_another_type", chain("int32", "int32"), outputs={"Y": ("INT32", [-1])}),
    Ensemble("output_of_another_type", chain("fp32"), outputs={"Y": ("INT32", [-1])}),
    Ensemble("members_of_different_types", chain("fp32", "int32"), outputs={"Y": ("INT32", [-1])}),
    Ensemble("input_of_another_shape", chain("fixed"), inputs={"X": ("FP32", [5])}),
    Ensemble("output_of_another_shape", chain("fixed"), inputs={"X": FOUR}, outputs={"Y": ("FP32", [2, 2])}),
    Ensemble("members_of_different_shapes", chain("fixed", "square"), inputs={"X": FOUR}, outputs={"Y": ("FP32", [2, 2])}),
    Ensemble("no_such_input", (step("fp32", {"INPUT0": "X", "INPUT9": "X"}, BACK),)),
    Ensemble("no_such_output", (step("fp32", FORWARD, {"OUTPUT0": "Y", "OUTPUT9": "Z"}),), outputs={"Y": FP32, "Z": FP32}),
    Ensemble("input_not_mapped", (step("two", FORWARD, BACK),)),
    Ensemble("larger_batches_than_a_member", chain("fp32", "small")),
    Ensemble("no_batches_but_the_member", chain("fixed"), inputs={"X": FOUR}, outputs={"Y": FOUR}, batch=0),
    Ensemble("wide_of_fixed", chain("fixed", "wide", "fixed"), inputs={"X": FOUR}, outputs={"Y": FOUR}),
    Ensemble("optional_for_required", chain("fp32"), optional=("X",)),
    Ensemble("decoupled", chain("fp32", "many", "fp32")),
    Ensemble("decoupled_twice", chain("many", "many")),
    Ensemble("decoupled_meets_the_request", (*chain("many", last="a"), step("two", {"INPUT0": "a", "INPUT1": "X"}, {"OUTPUT0": "Y"}))),
    Ensemble("decoupled_meets_the_request_inside", (*chain("many", last="a"), step("two", {"INPUT0": "a", "INPUT1": "X"}, {"OUTPUT0": "b"}), *chain("fp32", first="b"))),
    Ensemble("decoupled_meets_a_step", (*chain("many", last="a"), *chain("fp32", last="b"), step("two", {"INPUT0": "a", "INPUT1": "b"}, {"OUTPUT0": "c"}), *chain("fp32", first="c"))),
    Ensemble("decoupled_meets_another", (*chain("many", last="a"), *chain("many", last="b"), step("two", {"INPUT0": "a", "INPUT1": "b"}, {"OUTPUT0": "c"}), *chain("fp32", first="c"))),
    Ensemble("decoupled_beside_another", (*chain("many", last="A"), *chain("fp32", last="B")), outputs={"A": FP32, "B": FP32}),
    Ensemble("decoupled_meets_the_one_before", (*chain("many", last="a"), *chain("many", first="a", last="b"), step("two", {"INPUT0": "a", "INPUT1": "b"}, {"OUTPUT0": "c"}), *chain("fp32", first="c"))),
    Ensemble("decoupled_itself", chain("fp32"), more="model_transaction_policy { decoupled: true }\n"),
    Ensemble("version_zero", (step("fp32", FORWARD, BACK, version=0),)),
    Ensemble("version_negative", (step("fp32", FORWARD, BACK, version=-2),)),
    Ensemble("steps_in_a_ring", (step("fp32", {"INPUT0": "t"}, {"OUTPUT0": "u"}), step("fp32", {"INPUT0": "u"}, {"OUTPUT0": "t"}), *chain("fp32"))),
    Ensemble("from_nowhere", (step("fp32", {"INPUT0": "nowhere"}, {"OUTPUT0": "u"}), *chain("fp32"))),
    Ensemble("from_an_empty_name", (step("fp32", {"INPUT0": ""}, BACK),)),
    Ensemble("into_an_empty_name", (step("fp32", FORWARD, {"OUTPUT0": ""}),)),
    Ensemble("in_a_namespace", (step("fp32", FORWARD, BACK).replace("step {", 'step { model_namespace: "foo"'),)),
    Ensemble("input_mapped_twice", (step("fp32", {"INPUT0": "Z"}, BACK).replace("  output_map", '  input_map { key: "INPUT0" value: "X" }\n    output_map'),)),
    Ensemble("with_an_instance_group", chain("fp32"), more="instance_group [ { kind: KIND_CPU } ]\n"),
]

SERVING = [
    Ensemble("one", chain("fp32")),
    Ensemble("three", chain("fp32", "small", "fp32"), batch=2),
    Ensemble("diamond", (*chain("fp32", last="a"), *chain("slow", first="a", last="b"), *chain("slow", first="a", last="c"), step("two", {"INPUT0": "b", "INPUT1": "c"}, {"OUTPUT0": "SUM", "OUTPUT1": "DIFFERENCE"})), outputs={"SUM": FP32, "DIFFERENCE": FP32}),
    Ensemble("branches", (*chain("fp32", last="A"), *chain("small", first="A", last="B"), *chain("failing", last="C")), outputs={"A": FP32, "B": FP32, "C": FP32}, batch=2),
    Ensemble("fails", chain("fp32", "failing")),
    Ensemble("fails_early", (*chain("failing", last="a"), *chain("slow", last="b"), step("two", {"INPUT0": "a", "INPUT1": "b"}, BACK))),
    Ensemble("nested", chain("one", "three"), batch=2),
    Ensemble("nested_failure", chain("one", "fails")),
    Ensemble("one_flat", chain("fp32", "flat"), outputs={"Y": FOUR}),
    Ensemble("flat_first", chain("flat", "fixed"), inputs={"X": FOUR}, outputs={"Y": FOUR}),
    Ensemble("not_batched", chain("flat", "flat"), inputs={"X": FOUR}, outputs={"Y": FOUR}, batch=0),
    Ensemble("only_the_member_batches", chain("fixed"), inputs={"X": FOUR}, outputs={"Y": FOUR}, batch=0),
    Ensemble("batch_as_a_dimension", chain("fixed", "wide"), inputs={"X": FOUR}, outputs={"Y": FOUR}),
    Ensemble("half", (step("maybe", {"INPUT0": "X", "INPUT1": "W"}, {"OUTPUT0": "Y", "OUTPUT1": "Z"}),), inputs={"X": FP32, "W": FP32}, outputs={"Y": FP32, "Z": FP32}, optional=("W",)),
    Ensemble("half_and_on", (step("maybe", {"INPUT0": "X", "INPUT1": "W"}, {"OUTPUT0": "Y", "OUTPUT1": "t"}), *chain("fp32", first="t", last="Z")), inputs={"X": FP32, "W": FP32}, outputs={"Y": FP32, "Z": FP32}, optional=("W",)),
    Ensemble("optional_needed", chain("fp32"), inputs={"X": FP32}, optional=("X",)),
    Ensemble("two_kinds", (*chain("fp32"), *chain("int32", first="N", last="M")), inputs={"X": FP32, "N": ("INT32", [-1])}, outputs={"Y": FP32, "M": ("INT32", [-1])}),
    Ensemble("checked_inside", chain("fp32", "fixed"), outputs={"Y": FOUR}),
]


@dataclass(frozen=True)
class Run:
    """A request: inputs by name as nested lists (FP32; INT32 for names in [`INTEGERS`]), and the requested outputs."""

    name: str
    ensemble: str
    inputs: dict
    outputs: tuple = ()
    parameters: dict = field(default_factory=dict)
    id: str = ""


INTEGERS = ("N",)
ROW, ROWS = [[1, 2, 3, 4]], [[1, 2, 3, 4], [5, 6, 7, 8]]

RUNS = [
    Run("one step", "one", {"X": ROW}),
    Run("an id", "one", {"X": ROW}, id="mine"),
    Run("a batch", "one", {"X": ROWS}),
    Run("three steps", "three", {"X": ROWS}),
    Run("a diamond", "diamond", {"X": ROW}),
    Run("a diamond: one output", "diamond", {"X": ROW}, ("DIFFERENCE",)),
    Run("pruned: the first", "branches", {"X": ROW}, ("A",)),
    Run("pruned: the second", "branches", {"X": ROW}, ("B",)),
    Run("pruned: both", "branches", {"X": ROW}, ("B", "A")),
    Run("not pruned", "branches", {"X": ROW}),
    Run("not pruned: the failing one", "branches", {"X": ROW}, ("C",), id="mine"),
    Run("a step fails", "fails", {"X": ROW}),
    Run("a step fails, an id", "fails", {"X": ROW}, id="mine"),
    Run("a step fails while another runs", "fails_early", {"X": ROW}),
    Run("nested", "nested", {"X": ROW}),
    Run("nested failure", "nested_failure", {"X": ROW}, id="mine"),
    Run("batch of one to a flat member", "one_flat", {"X": ROW}),
    Run("batch of two to a flat member", "one_flat", {"X": ROWS}),
    Run("flat first, batch of one", "flat_first", {"X": ROW}),
    Run("flat first, batch of two", "flat_first", {"X": ROWS}),
    Run("not batched", "not_batched", {"X": ROW[0]}),
    Run("only the member batches", "only_the_member_batches", {"X": ROW[0]}),
    Run("the batch is a dimension", "batch_as_a_dimension", {"X": ROWS}),
    Run("optional input given", "half", {"X": ROW, "W": ROW}),
    Run("optional input left out", "half", {"X": ROW}),
    Run("optional input left out, its output asked for", "half", {"X": ROW}, ("Z",)),
    Run("optional input left out, its output not asked for", "half", {"X": ROW}, ("Y",)),
    Run("optional input given, a step on", "half_and_on", {"X": ROW, "W": ROW}),
    Run("optional input left out, a step on", "half_and_on", {"X": ROW}),
    Run("optional input left out, a step on that is pruned", "half_and_on", {"X": ROW}, ("Y",)),
    Run("optional here, required there", "optional_needed", {}),
    Run("two kinds", "two_kinds", {"X": ROW, "N": ROW}),
    Run("two kinds, one of them", "two_kinds", {"X": ROW, "N": ROWS}, ("M",)),
    Run("a member refuses the shape", "checked_inside", {"X": [[1, 2, 3]]}, id="mine"),
    Run("an input is missing", "two_kinds", {"X": ROW}),
    Run("too large a batch", "three", {"X": [*ROWS, *ROW]}),
    Run("an unknown output", "one", {"X": ROW}, ("Q",)),
    Run("a sequence number", "one", {"X": ROW}, parameters={"sequence_id": 7, "sequence_start": True, "sequence_end": False}),
    Run("a sequence name", "one", {"X": ROW}, parameters={"sequence_id": "seven", "sequence_start": False, "sequence_end": True}),
    Run("a sequence through two", "nested", {"X": ROW}, parameters={"sequence_id": 7, "sequence_start": True, "sequence_end": True}),
    Run("other parameters", "one", {"X": ROW}, parameters={"priority": 1, "timeout": 1000000, "mine": "text"}),
]

# fmt: on
