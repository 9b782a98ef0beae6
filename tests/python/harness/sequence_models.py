"""Sequence models: configurations of the function `sequence_sum` (`triton_models` implements it for a real Triton)."""

CONTROLS = {
    "START": "kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]",
    "END": "kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 2 ]",
    "READY": "kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ]",
    "CORRID": "kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64",
}
"""The control inputs, each of a different type."""


def controls(**changes) -> str:
    """Returns `control_input` with all kinds of controls; `changes` replaces single controls."""
    texts = (f'{{ name: "{name}" control [ {{ {text} }} ] }}' for name, text in (CONTROLS | changes).items())
    return f"control_input [ {', '.join(texts)} ]"


def corrid(datatype: str) -> str:
    """Returns the control for the correlation ID with this datatype."""
    return f"kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype}"


def config(batching: str, batch: int = 4, backend: str = "test", instances: int = 1, dims: int = 1, **more) -> str:
    """Returns a whole configuration; `batching` is the content of `sequence_batching`, `more` are parameters."""
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


IDLE_LONG = "max_sequence_idle_microseconds: 600000000"
FLAGS = {
    "int32": "int32_false_true: [ -3, 7 ]",
    "fp32": "fp32_false_true: [ 4, 9 ]",
    "bool": "bool_false_true: [ true, false ]",
}
"""START, END and READY in each allowed type, with values other than 0 and 1; BOOL is inverted."""
IDS = {
    "INT32": ((1 << 31) + 5, -(1 << 31) + 5),
    "UINT32": ((1 << 32) + 6, 6),
    "INT64": ((1 << 63) - 1, (1 << 63) - 1),
    "UINT64": ((1 << 63) - 2, (1 << 63) - 2),
    "STRING": ("né", "né"),
}
"""The correlation ID in each allowed type: the value that is sent, and the value that the model receives."""


def typed(values: str) -> str:
    """Returns controls whose flags have one type."""
    kinds = {kind: f"kind: CONTROL_SEQUENCE_{kind} {values}" for kind in ("START", "END", "READY")}
    return controls(**kinds)


MODELS = {
    "direct": config(f"{IDLE_LONG} direct {{ }} {controls()}"),
    "two": config(f"{IDLE_LONG} direct {{ }} {controls()}", batch=2, instances=2),
    "oldest": config(f"{IDLE_LONG} oldest {{ max_candidate_sequences: 64 }} {controls()}"),
    "plain": config(f"{IDLE_LONG} {controls()}", batch=0),
    "text": config(f"{IDLE_LONG} direct {{ }} {controls(CORRID=corrid('STRING'))}"),
    "short": config(f"{IDLE_LONG} direct {{ }} {controls(CORRID=corrid('UINT32'))}"),
    **{f"flags_{name}": config(f"{IDLE_LONG} direct {{ }} {typed(values)}") for name, values in FLAGS.items()},
    **{f"id_{name}": config(f"{IDLE_LONG} direct {{ }} {controls(CORRID=corrid(name))}") for name in IDS},
    "one": config(f"{IDLE_LONG} direct {{ }} {controls()}", batch=1, delay_ms=400),
    "idle": config(f"max_sequence_idle_microseconds: 2000000 direct {{ }} {controls()}", batch=1),
    "implicit": config(
        f"max_sequence_idle_microseconds: 1000000 direct {{ }} {controls()}", batch=1, implicit_sequence_start="true"
    ),
    "limited": config(
        f"{IDLE_LONG} direct {{ }} {controls()}",
        batch=1,
        delay_ms=300,
        max_queued_sequences=1,
        max_queue_size_per_sequence=1,
    ),
    "limited_oldest": config(
        f"{IDLE_LONG} oldest {{ max_candidate_sequences: 4 }} {controls()}",
        batch=1,
        delay_ms=1000,
        max_queue_size_per_sequence=1,
    ),
    "limited_direct": config(
        f"{IDLE_LONG} direct {{ }} {controls()}", batch=4, delay_ms=1000, max_queue_size_per_sequence=1
    ),
    "iterative": config(f"iterative_sequence: true direct {{ }} {controls()}"),
    "wide": config(f"{IDLE_LONG} direct {{ }} {controls()}", dims=-1),
    "wide_slow": config(f"{IDLE_LONG} direct {{ }} {controls()}", dims=-1, delay_ms=100),
    "many": config(f"{IDLE_LONG} oldest {{ max_candidate_sequences: 20000 }} {controls()}", batch=64),
}
"""The configurations of the sequence tests, by model name."""
