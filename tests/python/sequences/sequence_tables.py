"""What the sequence batcher makes of requests: configurations, the arrivals, and what must come of them.

Each row is a model of its own (`sequence_models`) and a script of arrivals. Its facts (each answer with the controls of
its whole batch, who was answered together, statistics, errors) are not written here: `golden_sequences.json` has those of
a real Triton, recorded by `runner.py`, and `DIFFERENCES` those that differ on purpose.

A script is read from left to right; each request is sent when the one before has come to rest:

    (7      START of sequence 7        7    a step of it        7)    its END        (7)    both
    'ab'    a text as the id           0    no id               7+    a longer row (dims: -1)
    7t50    with a timeout of 50 ms    7#2  a batch of two      x3    cancels the request number 3 (from 0)
    ~300    waits 300 ms               !4   waits until four requests have been answered
"""

from dataclasses import dataclass

from harness.sequence_models import controls, corrid

LONG = "max_sequence_idle_microseconds: 60000000 "
DIRECT = LONG + "direct { } " + controls()


def oldest(text: str) -> str:
    """The strategy with these settings."""
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

# One row, one line: a table is read by comparing its rows.
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
    Row("idle: START is wanted again", "max_sequence_idle_microseconds: 500000 direct { } " + controls(), "(1 !1 ~2500 1 (1 1)", delay_ms=50),
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
NO_ID = f"inference request to model '{REFUSED}' must specify a non-zero or non-empty correlation ID"
TOO_MANY = f"inference request to model '{REFUSED}' must specify batch-size 1 due to requirements of sequence batcher"

DIFFERENCES = {
    # Later Tritons than the recorded one check the type of an id, with this text; so do we.
    "refused: START, no id, a batch": {
        "results": [
            ["INVALID_ARGUMENT", START.format(5, REFUSED)],
            ["INVALID_ARGUMENT", NO_ID],
            ["INVALID_ARGUMENT", TOO_MANY],
            ["INVALID_ARGUMENT", WRONG_TYPE.format("BYTES", REFUSED, "UINT64")],
        ]
    },
    # The recorded one's Python backend cannot read a control of texts at all.
    "refused: a number for a text": {
        "answers": [[2]],
        "results": [
            ["INVALID_ARGUMENT", NUMBER_FOR_TEXT],
            ["INVALID_ARGUMENT", START.format("x y", "refused__a_number_for_a_text")],
            [3, "1,2,1,x y"],
            ["INVALID_ARGUMENT", NUMBER_FOR_TEXT],
        ],
        "batch_stats": {"1": 1},
        "execution_count": 1,
        "inference_count": 1,
        "success": 1,
        "fail": 0,
        "failures": {},
    },
}
"""Row -> the facts that differ from Triton's on purpose."""


def state(more: str = "", data_type: str = "INT32", output: str = "NEXT", dims: str = "1") -> str:
    """A sequence batcher that keeps a state."""
    fields = f'input_name: "STATE" output_name: "{output}" data_type: TYPE_{data_type} dims: [ {dims} ]'
    return f"{DIRECT} state [ {{ {fields} {more} }} ]"


def initial(*fields: str, data_type: str = "INT32", dims: str = "1", name: str = 'name: "first"') -> str:
    """What a state begins as."""
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
"""Configurations by name, which are loaded or not: `golden_sequence_loads.json` has a real Triton's reasons (empty: loaded).

Of implicit state this is all that the peer can show: its only backend, Python, has no interface for states, so a state that
runs cannot be compared, and what Triton asks of backends that have one (names, types) it does not ask here. `test_state.py`
holds what runs."""

LOAD_DIFFERENCES = {
    # Triton takes the number for a very large one.
    "no candidates below zero": "sequence batching max_candidate_sequences must be 0 or greater for {}: it is -3",
    # Triton leaves this to the backend, and Python's does not look at states.
    "state: an output with other dims": "state 'STATE' has dims [7], but the output 'SUM' that gives it has [1] for {}",
}
"""Name -> the reason, where it is another one on purpose; `{}` is the model."""
