"""Models with sequences: configurations of the builtin function `sequence_sum` (for a real Triton: `triton_models`)."""

CONTROLS = {
    "START": "kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]",
    "END": "kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 2 ]",
    "READY": "kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ]",
    "CORRID": "kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64",
}
"""The control inputs, each of another type."""


def controls(**changes) -> str:
    """`control_input` of all kinds; `changes` replaces single ones."""
    texts = (f'{{ name: "{name}" control [ {{ {text} }} ] }}' for name, text in (CONTROLS | changes).items())
    return f"control_input [ {', '.join(texts)} ]"


def corrid(datatype: str) -> str:
    """The control for the correlation id in another type."""
    return f"kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype}"


def config(batching: str, batch: int = 4, backend: str = "builtin", instances: int = 1, dims: int = 1, **more) -> str:
    """A whole configuration; `batching` goes into `sequence_batching`, `more` are parameters."""
    values = {"function": "sequence_sum"} | more
    entries = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )
    return f"""backend: "{backend}" max_batch_size: {batch}
input [ {{ name: "VALUE" data_type: TYPE_INT32 dims: [ {dims} ] }} ]
output [ {{ name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "BATCH" data_type: TYPE_STRING dims: [ 1 ] }},
         {{ name: "OPEN" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
sequence_batching {{ {batching} }}
{entries}"""
