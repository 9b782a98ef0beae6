"""The deliberate differences from Triton's answers, with their reasons.

The expected answers are in the tables (`request_table.py`, `error_table.py`) or in this module.
"""

from dataclasses import dataclass

TOO_LARGE = ": send fewer rows in a request, or raise max_batch_size in the model's config.pbtxt"
"""What follows Triton's text about a request with too many rows."""
OWN_PARAMETERS = {"engine"}
"""Keys that only this server's answers have. The configuration's parameter `engine` names the library and the version that
execute the model, so that users need not read logs; Triton's clients ignore unknown parameters."""


def content_type(theirs):
    """Returns the expected Content-Type of an answer: Triton's, except that every error body is `application/json`. Triton sends
    some of its JSON error bodies as `text/plain` (and others as `application/json`)."""
    if isinstance(theirs.status, int) and theirs.status >= 400:
        return "application/json"
    return theirs.headers.get("content-type")


@dataclass(frozen=True)
class Difference:
    """One deliberate difference: cases (patterns of names), the reason, and the expected answer: one of `statuses` (default:
    the table's) with `fragment` (default: the table's) in the text."""

    cases: tuple
    why: str
    statuses: tuple = ()
    fragment: str = ""

    def check(self, case, ours) -> str:
        """Returns how an answer differs from what this entry promises; empty if it does not."""
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
        "Triton 2.51 counts the inputs but does not check which are given; the model then runs without a required input.",
    ),
    Difference(("tensor: dimension too large",), "This shape crashes Triton 2.51."),
    Difference(
        ("json: integer out of range", "json: 128 for INT8", "json: 256 for UINT8", "grpc: integer out of range"),
        "Triton wraps the number around without an error.",
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
        "Triton answers invalid choices with 500, and names neither the value nor the allowed values; here its text is followed "
        "by both, with 400. Triton answers correlation IDs that are too long with 501.",
    ),
    Difference(
        ("grpc: sequence_id too long",),
        "Triton answers UNIMPLEMENTED, without the length.",
    ),
    Difference(
        ("json: 1 for BYTES",),
        "Triton's text names no input, and there may be several.",
        fragment="attempt to access JSON non-string as string, for input 'INPUT0'",
    ),
    Difference(
        ("json: empty body",),
        "Triton treats an empty body as a raw request of length 0 and reports the number of inputs.",
        (400, 500),
    ),
    Difference(
        ("header length: no number",),
        "Triton 2.51 reads a length that is not a number as 0, so that the body is a raw request; newer versions refuse it.",
    ),
    Difference(("header length: beyond 64 bits",), "This server's text names the limit differently."),
    Difference(
        ("compression: no *", "compression: gzip cut"),
        "Triton uses the part that it could decompress; this server refuses a body that does not match its header.",
    ),
    Difference(
        ("grpc one blob too many",),
        "Triton 2.51 ignores the extra blob over gRPC and refuses it over HTTP; this server refuses it over both.",
    ),
    Difference(
        ("bytes that are no text, as json",),
        "Triton copies the bytes into the JSON, which makes it invalid; refused here with a text that names the alternative.",
        (400,),
        "is not UTF-8",
    ),
    Difference(("grpc: unknown datatype",), "Triton's text says `expected datatype '<invalid>'`."),
    Difference(
        ("tensor: unknown datatype", "tensor: datatype in lower case"),
        "Triton's text, followed by the given datatype and the allowed ones.",
    ),
    Difference(
        ("tensor: batch too large", "tensor: shape without batch"),
        "Triton's text, followed by what to change.",
        fragment=f"inference request batch-size must be <= 8 for 'simple'{TOO_LARGE}",
    ),
    Difference(("json: FP16 out",), "Triton's text ends before the output's name."),
    Difference(
        ("raw: size that does not divide", "raw: odd size"),
        "Triton's text has `raw_input`, which is not the name of an input; this server's text has the input's name.",
        fragment="input byte size mismatch for input 'INPUT0' for model",
    ),
    Difference(
        ("grpc: classification 0",),
        "Triton refuses 0 with the text `expected >= 0`.",
        fragment="invalid value 0 for 'classification' parameter, expected 1 or greater.",
    ),
    Difference(
        ("output beats request",),
        "The protocol applies `binary_data_output` to all outputs without a `binary_data` parameter; Triton 2.51 ignores it "
        "when any output is named.",
        fragment='"parameters":{"binary_data_size":64}},{"name":"OUTPUT1","datatype":"INT32","shape":[1,16],"data":[',
    ),
    Difference(
        ("model: no number",),
        "The text is the model's; this server's names the element, and the status shows that the request is invalid.",
        (400,),
    ),
]


@dataclass(frozen=True)
class SchedulingDifference:
    """One deliberate difference in `scheduling_tables.py`: the reason, and the expected facts by row."""

    why: str
    rows: dict


SCHEDULING_DIFFERENCES = [
    SchedulingDifference(
        "While its instances are busy, Triton checks for expired requests only every 500 ms, or when an instance becomes "
        "idle; here they are answered when they expire.",
        {
            "REJECT: answered when it expires": {"answers": [[1], [0]], "pending": [0]},
            "DELAY and REJECT levels: all late": {"pending": [3, 2, 1, 0]},
        },
    ),
    SchedulingDifference(
        "While a batch waits for the queue delay, Triton does not check for expired requests that arrived after the first "
        "request; here they are answered when they expire.",
        {"REJECT: expires while the one before it waits for company": {"pending": [2, 1, 0]}},
    ),
]

GROWING = (
    "A batch that Triton has dispatched to an idle instance grows until the instance's thread starts it some microseconds "
    "later, even beyond the preferred size that triggered it. Here it does not grow, which is one of Triton's outcomes."
)

SCHEDULING_RACES = {
    "preferred 2 and 6: eight": GROWING,
    "preferred 2 and 6: ones and a five": GROWING,
    "preferred 2 and 6: a rest waits": GROWING,
    "shapes: a change after the preferred size": GROWING,
    "REJECT: answered when it expires": "When exactly Triton notices that a request has expired.",
}
"""Rows with several outcomes on Triton, and the race between its threads. Any recorded outcome is accepted here."""
