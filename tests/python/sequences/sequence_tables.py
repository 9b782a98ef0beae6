"""Configurations and arrivals that exercise the sequence batcher.

Each row is a separate model (`sequence_models`) and a script of arrivals. The expected facts (each answer with the controls
of its whole batch, simultaneous answers, statistics, errors) are in `golden_sequences.json`, recorded from a real Triton by
`runner.py`; `DIFFERENCES` has the facts that differ on purpose.

A script is read from left to right; each request is sent once the previous one is queued, executing or answered:

    (7      START of sequence 7        7    a step of it        7)    its END        (7)    both
    'ab'    a text as the id           0    no id               7+    a longer item (dims: -1)
    7t50    with a timeout of 50 ms    7#2  a batch of two      x3    cancels the request number 3 (from 0)
    ~300    waits 300 ms               !4   waits until four requests have been answered
"""

from dataclasses import dataclass

from harness.sequence_models import controls, corrid

LONG = "max_sequence_idle_microseconds: 60000000 "
DIRECT = LONG + "direct { } " + controls()


def oldest(text: str) -> str:
    """Returns the strategy `oldest` with these settings."""
    return f"{LONG} oldest {{ {text} }} {controls()}"


@dataclass(frozen=True)
class Row:
    """One row. `hold` and `backlog` are TRITONSERVER_DELAY_SCHEDULER and TRITONSERVER_BACKLOG_DELAY_SCHEDULER."""

    name: str
    batching: str
    script: str
    batch: int = 4
    hold: int = 0
    backlog: int = 0
    delay_ms: int = 400
    instances: int = 1
    dims: int = 1

    @property
    def model(self) -> str:
        """The model's name."""
        return "".join(c if c.isalnum() else "_" for c in self.name)


WAITING = LONG + "direct { max_queue_delay_microseconds: 800000 minimum_slot_utilization: 0.5 } " + controls()

# Each row is one line, so that rows can be compared.
# fmt: off

ROWS = [
    Row("direct: steps of one", DIRECT, "(1 1 1)"),
    Row("direct: three side by side", DIRECT, "(1 (2 (3 1 2 3 1) 3) 2)"),
    Row("direct: only the second is ready", DIRECT, "(1 (2 !2 2 !3 1) 2)"),
    Row("direct: more than slots", DIRECT, "(1 (2 (3 2) 3) 1) (4)", batch=2),
    Row("direct: no batch dimension", DIRECT, "(1 (2 1) 2)", batch=0),
    Row("direct: two instances", DIRECT, "(1 (2 (3 1) 2) 3)", batch=2, instances=2),
    Row("direct: the id begins again behind its end", DIRECT, "(1 1) (1 1)"),
    Row("direct: START while active", DIRECT, "(1 1 (1 1)"),
    Row("direct: another shape", DIRECT, "(1 (2+ (3 1)+ 2) 3)", dims=-1),
    Row("direct: utilization is reached", WAITING, "(1 (2 !2 1) 2)"),
    Row("direct: utilization is not reached", WAITING, "(1 !1 1)"),
    Row("direct: held", DIRECT, "(1 (2 (3 1 2 1)", hold=6),
    Row("direct: held, backlog too", DIRECT, "(1) (2) (3 3)", batch=2, hold=2, backlog=2),
    Row("backlog: a timeout", DIRECT, "(1 (2t300 2 ~800 2 (3 1)", batch=1, delay_ms=600),
    Row("backlog: first come first served", DIRECT, "(1 (2 (3 3) 2) 1)", batch=1),
    Row("oldest: one candidate", oldest("max_candidate_sequences: 1"), "(1 (2 1) 2)"),
    Row("oldest: one candidate, short sequences", oldest("max_candidate_sequences: 1"), "(1) (2) (3) (4)"),
    Row("oldest: four candidates", oldest("max_candidate_sequences: 4"), "(1 1 (2 2 1) (3) 2)"),
    Row("oldest: preferred sizes", oldest("max_candidate_sequences: 4 preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 900000"), "(1 (2 !2 1) 2)"),
    Row("oldest: the delay", oldest("max_candidate_sequences: 4 preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 900000"), "(1 (2 !2 1) 2)"),
    Row("oldest: held", oldest("max_candidate_sequences: 4"), "(1 (2 (3 (4 4) 1)", hold=4),
    Row("idle: START is wanted again", "max_sequence_idle_microseconds: 1500000 direct { } " + controls(), "(1 !1 ~2500 1 (1 1)", delay_ms=50),
    Row("cancelled while it waits", DIRECT, "(1 (2 2 2 x2 ~900 2 1)", batch=2, delay_ms=600),
    Row("refused: START, no id, a batch", DIRECT, "5 0 (6#2 '5'"),
    Row("refused: a number for a text", LONG + "direct { } " + controls(CORRID=corrid("STRING")), "(5 'x y' ('x y') 0"),
    Row("an id that is too large", LONG + "direct { } " + controls(CORRID=corrid("INT32")), "(4294967303)"),
]

# fmt: on

WRONG_TYPE = "[request id: <id_unknown>] sequence batching control 'CORRID' data-type is '{}', but model '{}' expects '{}'"
NUMBER_FOR_TEXT = WRONG_TYPE.format("UINT64", "refused__a_number_for_a_text", "BYTES")
START = "inference request for sequence {} to model '{}' must specify the START flag on the first request of the sequence"
REFUSED = "refused__START__no_id__a_batch"
NO_ID = "inference request to model '{}' must specify a non-zero or non-empty correlation ID"
TOO_MANY = f"inference request to model '{REFUSED}' must specify batch-size 1 due to requirements of sequence batcher"
CANCELLED = (
    "sequence {} of model '{}' was ended: one of its waiting requests was cancelled; start it again with the START flag"
)

DIFFERENCES = {
    # Newer Tritons check the type of an id with this text, as this server does.
    "refused: START, no id, a batch": {
        "results": [
            ["INVALID_ARGUMENT", START.format(5, REFUSED)],
            ["INVALID_ARGUMENT", NO_ID.format(REFUSED)],
            ["INVALID_ARGUMENT", TOO_MANY],
            ["INVALID_ARGUMENT", WRONG_TYPE.format("BYTES", REFUSED, "UINT64")],
        ]
    },
    # The recorded Triton's Python backend cannot read a control with texts.
    "refused: a number for a text": {
        "answers": [[2]],
        "results": [
            ["INVALID_ARGUMENT", NUMBER_FOR_TEXT],
            ["INVALID_ARGUMENT", START.format("x y", "refused__a_number_for_a_text")],
            [3, "1,2,1,x y"],
            ["INVALID_ARGUMENT", NO_ID.format("refused__a_number_for_a_text")],
        ],
        "batch_stats": {"1": 1},
        "execution_count": 1,
        "inference_count": 1,
        "success": 1,
        "fail": 0,
        "failures": {},
    },
    # Triton's error has no text.
    "cancelled while it waits": {
        "results": [
            [1, "1,0,1,1"],
            [2, "0,0,0,0 1,0,1,2"],
            ["cancelled here", ""],
            ["CANCELLED", CANCELLED.format(2, "cancelled_while_it_waits")],
            ["INVALID_ARGUMENT", START.format(2, "cancelled_while_it_waits")],
            [7, "0,2,1,1"],
        ]
    },
}
"""Row -> the facts that differ from Triton's on purpose."""


def state(more: str = "", data_type: str = "INT32", output: str = "NEXT", dims: str = "1") -> str:
    """Returns a sequence batcher with a state."""
    fields = f'input_name: "STATE" output_name: "{output}" data_type: TYPE_{data_type} dims: [ {dims} ]'
    return f"{DIRECT} state [ {{ {fields} {more} }} ]"


def initial(*fields: str, data_type: str = "INT32", dims: str = "1", name: str = 'name: "first"') -> str:
    """Returns the initial value of a state."""
    return f"initial_state {{ {name} data_type: TYPE_{data_type} dims: [ {dims} ] {' '.join(fields)} }}"


ZERO = "zero_data: true"

LOADS = {
    "no candidates below zero": oldest("max_candidate_sequences: -3"),
    "preferred size beyond the batch": oldest("preferred_batch_size: [ 9 ]"),
    "preferred size of zero": oldest("preferred_batch_size: [ 0 ]"),
    "utilization beyond one": LONG + "direct { minimum_slot_utilization: 1.5 } " + controls(),
    "a fraction for an id": LONG + "direct { } " + controls(CORRID=corrid("FP32")),
    "a control without a kind": DIRECT + ' control_input [ { name: "EXTRA" } ]',
    "state": state(),
    "state: of zeros": state(initial(ZERO)),
    "state: an output with other dims": state(output="SUM", dims="7"),
    "state: initial of another type": state(initial(ZERO, data_type="FP32")),
    "state: initial without a name": state(initial(ZERO, name="")),
    "state: initial of another rank": state(initial(ZERO, dims="1, 2")),
    "state: initial of a variable size": state(initial(ZERO, dims="-1"), dims="-1"),
    "state: initial of another size": state(initial(ZERO, dims="2")),
    "state: initial without data": state(initial()),
    "state: initial twice": state(initial(ZERO) + initial(ZERO)),
}
"""Configurations by name; `golden_sequence_loads.json` has a real Triton's reasons for refusing them (empty: loaded).

The peer can show only this part of implicit state: its only backend, Python, has no interface for states, so that Triton does
not execute states here and does not check their names and types as for other backends. `test_state.py` tests states that are
executed."""

LOAD_DIFFERENCES = {
    # Triton converts the number to a very large unsigned one.
    "no candidates below zero": "sequence batching max_candidate_sequences must be 0 or greater for {}: it is -3",
    # Triton leaves this check to the backend, and the Python backend does not check states.
    "state: an output with other dims": "state 'STATE' has dims [7], but the output 'SUM' that gives it has [1] for {}",
}
"""Name -> the reason where it differs on purpose; `{}` is the model."""
