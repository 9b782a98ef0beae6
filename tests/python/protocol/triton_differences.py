"""Where this server answers otherwise than Triton on purpose, and why.

What a case must be answered with then is written in the tables (`request_table.py`, `error_table.py`) or here.
"""

from dataclasses import dataclass

OWN_PARAMETERS = {"engine"}
"""Keys that only our answers have: the configuration's parameter `engine` says which library, in which version, executes
the model. Users see it there without reading logs; clients of Triton pass over parameters that they do not know."""


def content_type(theirs):
    """The Content-Type that an answer must have: Triton's, but that Triton calls some of its JSON error bodies
    `text/plain` (and others, of the same form, `application/json`). Here every error body is called what it is."""
    if isinstance(theirs.status, int) and theirs.status >= 400:
        return "application/json"
    return theirs.headers.get("content-type")


@dataclass(frozen=True)
class Difference:
    """One deliberate difference: the cases it is about (patterns of names), why, and what is answered instead: one of
    `statuses` (default: the table's) with `fragment` (default: the table's) in the text."""

    cases: tuple
    why: str
    statuses: tuple = ()
    fragment: str = ""

    def check(self, case, ours) -> str:
        """How an answer differs from what this entry promises, empty if it does not."""
        statuses = self.statuses or (case.status,)
        fragment = self.fragment or case.fragment
        if ours.status in statuses and fragment in ours.text:
            return ""
        return f"status {ours.status}, promised {statuses} with {fragment!r}: {ours.text[:300]!r}"


DIFFERENCES = [
    Difference(
        ("live", "ready", "query string is ignored"),
        "Triton's bodies are empty. KServe's SDK reads `live` and `ready` in them; Triton's clients read the status alone.",
        (200,),
        "true}",
    ),
    Difference(
        ("route: root",),
        "Triton serves nothing at `/`; KServe's SDK asks there whether a server of the v1 protocol is alive.",
        (200,),
        '{"status":"alive"}',
    ),
    Difference(
        ("route: unknown path of v1",),
        "Triton has no v1 protocol; here the path is KServe's, and the body of this case is empty.",
        (400,),
        "the request is not a JSON object",
    ),
    Difference(
        (
            "unknown model: metadata",
            "unknown model: config",
            "unknown model: infer",
            "unknown model and bad JSON",
            "escape in model name",
            "grpc unknown model: Model[MC]*",
            "grpc unknown model: infer",
            "grpc empty model name",
        ),
        "Triton 2.51 answers 404 NOT_FOUND, newer ones (2.73) 400 INVALID_ARGUMENT: as the newer ones.",
    ),
    Difference(
        ("bad version: ready",),
        "Triton's HTTP routes take digits only and answer `Not Found`; here the model is not ready in that version.",
    ),
    Difference(
        ("bad version: *", "negative version: infer"),
        "Triton's HTTP routes take digits only and answer `Not Found`; over gRPC it says what is wrong; here both do.",
        (400,),
        "failed to get model version from specified version string",
    ),
    Difference(
        ("huge version: infer", "grpc bad version: *"),
        "Triton's text carries the name of a C++ function in `details`.",
        fragment="failed to get model version from specified version string",
    ),
    Difference(
        ("tensor: output twice", "grpc: output twice"),
        "Triton 2.51 drops the repetition silently, newer ones refuse it: as the newer ones.",
    ),
    Difference(
        (
            "tensor: batch 0",
            "tensor: batches differ",
            "tensor: element count overflows",
            "grpc: element count overflows",
        ),
        "Which of two wrong inputs, or of two faults, is named first depends on the order of a hash map in Triton.",
    ),
    Difference(
        ("tensor: unknown input",),
        "The text also names the inputs of the model.",
        fragment="unexpected inference input 'INPUT7' for model 'simple', allowed inputs are: INPUT0, INPUT1",
    ),
    Difference(
        ("tensor: one input too many", "grpc: unknown input"),
        "Triton's text ends in an unbalanced bracket when no input is missing.",
        fragment="expected 2 inputs but got 3 inputs for model 'simple'",
    ),
    Difference(
        ("tensor: optional given, required missing",),
        "Triton 2.51 counts the inputs but does not look which are given; the model then runs without a required one.",
    ),
    Difference(("tensor: dimension too large",), "This shape ends a Triton 2.51 process."),
    Difference(
        ("json: integer out of range", "json: 128 for INT8", "json: 256 for UINT8", "grpc: integer out of range"),
        "Triton wraps the number silently into another one.",
    ),
    Difference(
        ("json: no JSON", "json: text after the JSON", "header length: inside the JSON"),
        "The text after the colon is the JSON parser's own.",
    ),
    Difference(
        (
            "json: not UTF-8",
            "json: parameters an array",
            "json: an array",
            "json: null",
            "json: no inputs",
            "json: * an object",
            "json: input without *",
            "json: output without name",
            "json: * a number",
            "json: shape of *",
            "json: nest*",
            "json: data a text",
            "tensor: negative *",
            "tensor: dimension beyond 64 bits",
            "binary: negative size",
        ),
        "The text after `Unable to parse 'FIELD'` is the JSON parser's own. A body that is not UTF-8, and parameters "
        "or inputs of a wrong kind, are refused with a text of our own.",
        (400, 500),
    ),
    Difference(
        ("json: choice: *",),
        "Triton answers what a client has chosen wrongly by 500, and neither says what was given nor what is allowed; here "
        "its text is followed by both, with 400. Of correlation ids that are too long it says 501.",
    ),
    Difference(
        ("grpc: sequence_id too long",),
        "Triton says UNIMPLEMENTED, and not how long it is.",
    ),
    Difference(
        ("json: 1 for BYTES",),
        "Triton's text names no input, and there may be several.",
        fragment="attempt to access JSON non-string as string, for input 'INPUT0'",
    ),
    Difference(
        ("json: empty body",),
        "Triton takes an empty body for a raw request of length 0 and complains about the number of inputs.",
        (400, 500),
    ),
    Difference(
        ("header length: no number",),
        "Triton 2.51 reads a length that is no number as 0, which makes the body a raw request; newer ones refuse it.",
    ),
    Difference(("header length: beyond 64 bits",), "The text names the limit in its own words."),
    Difference(
        ("compression: no *", "compression: gzip cut"),
        "Triton goes on with what could be decompressed; a body that is not what its header says is refused here.",
    ),
    Difference(
        ("grpc one blob too many",),
        "Triton 2.51 ignores what no input asks for; over HTTP it refuses the same mistake: so here over both.",
    ),
    Difference(
        ("bytes that are no text, as json",),
        "Triton copies the bytes into the JSON, which then is none; refused here by a text that names the way out.",
        (400,),
        "is not UTF-8",
    ),
    Difference(("grpc: unknown datatype",), "Triton's text says `expected datatype '<invalid>'`."),
    Difference(
        ("tensor: unknown datatype", "tensor: datatype in lower case"),
        "Triton's text, followed by the datatype that was given and those that there are.",
    ),
    Difference(("json: FP16 out",), "Triton's text ends before the output's name."),
    Difference(
        ("raw: size that does not divide", "raw: odd size"),
        "Triton's text says `raw_input`, which is the name of no input; ours says the input's name.",
        fragment="input byte size mismatch for input 'INPUT0' for model",
    ),
    Difference(
        ("grpc: classification 0",),
        "Triton refuses 0 by the words `expected >= 0`.",
        fragment="invalid value 0 for 'classification' parameter, expected 1 or greater.",
    ),
    Difference(
        ("output beats request",),
        "The protocol says that `binary_data_output` is for all outputs without a `binary_data` of their own; Triton 2.51 "
        "forgets it when any output is named.",
        fragment='"parameters":{"binary_data_size":64}},{"name":"OUTPUT1","datatype":"INT32","shape":[1,16],"data":[',
    ),
    Difference(
        ("model: no number",),
        "The text is the model's; ours names the element, and the status says that the client can mend it.",
        (400,),
    ),
]


@dataclass(frozen=True)
class SchedulingDifference:
    """One deliberate difference in `scheduling_tables.py`: why, and which facts of which rows are what instead."""

    why: str
    rows: dict


SCHEDULING_DIFFERENCES = [
    SchedulingDifference(
        "While its instances are busy Triton looks for expired requests every 500 ms only, or when an instance comes "
        "free; here they are answered when they expire.",
        {
            "REJECT: answered when it expires": {"answers": [[1], [0]], "pending": [0]},
            "DELAY and REJECT levels: all late": {"pending": [3, 2, 1, 0]},
        },
    ),
    SchedulingDifference(
        "While a batch waits for the queue delay, Triton does not look for expired requests that arrived after the first "
        "one; here they are answered when they expire.",
        {"REJECT: expires while the one before it waits for company": {"pending": [2, 1, 0]}},
    ),
]

GROWING = (
    "A batch that Triton has handed to an idle instance goes on growing until the instance's thread picks it up, some "
    "microseconds later, even beyond the preferred size that made it go. Here it does not grow: one of Triton's outcomes."
)

SCHEDULING_RACES = {
    "preferred 2 and 6: eight": GROWING,
    "preferred 2 and 6: ones and a five": GROWING,
    "preferred 2 and 6: a rest waits": GROWING,
    "shapes: a change after the preferred size": GROWING,
    "REJECT: answered when it expires": "When exactly Triton notices that a request has expired.",
}
"""Rows with several outcomes on Triton, and which of its threads race. Any recorded outcome is right here."""
