"""Compares answers to `python_tables.py` with those of a real Triton. Lists the deliberate differences with their reasons."""

import fnmatch
import json
import re
from dataclasses import dataclass

from protocol.triton_differences import OWN_PARAMETERS
from python_backend.python_peers import CRASHED, NO_ANSWER
from python_backend.python_tables import NEWER


@dataclass(frozen=True)
class Difference:
    """One deliberate difference: rows (patterns of names), the reason, and the expected outcome: `texts`, one for each
    answer in order (an empty text is a success), and `metrics`, lines that the scrape must have."""

    rows: tuple
    why: str
    texts: tuple = ()
    metrics: tuple = ()

    def check(self, ours: dict) -> str:
        """Returns how a row's outcome differs from what this entry promises; empty if it does not."""
        found = [text_of(answer) for answer in ours["answers"]]
        if len(found) != len(self.texts):
            return f"{len(found)} answers, promised {len(self.texts)}: {found}"
        for text, wanted in zip(found, self.texts, strict=True):
            if wanted not in text or (not wanted and '"error": "' in text.replace('"error": ""', "")):
                return f"{text[:500]!r}, promised {wanted!r}"
        missing = [line for line in self.metrics if line not in ours.get("metrics", [])]
        return f"no metric {missing}: {ours.get('metrics')}" if missing else ""


def text_of(answer: dict) -> str:
    """Returns an answer as text, to search for fragments."""
    return json.dumps(answer, ensure_ascii=False)


DROPPED = "has dropped the request without a response"
"""Part of the error text in the cases in which Triton never answers."""

DIFFERENCES = [
    Difference(
        ("batch: None for one of them",),
        "The model returns None and no sender answers: Triton never answers this request.",
        ("", DROPPED),
    ),
    Difference(("batch: None for all",), "The same.", (DROPPED, DROPPED)),
    Difference(("wrong: None returned", "wrong: None as a response"), "The same.", (DROPPED, "")),
    Difference(
        ("sender: none",),
        "The same for a sender that was used wrongly.",
        (DROPPED, "Non-decoupled model cannot send complete final before sending a response."),
    ),
    Difference(
        ("sender: two",),
        "The first response is the answer; Triton never sends it, even after the sender is closed.",
        ("", "Non-decoupled model cannot send more than one response."),
    ),
    Difference(
        ("stream: coroutine",),
        "A coroutine of a decoupled model raises an exception: Triton logs it and never ends the request.",
        ("", "ValueError: a negative time", ""),
    ),
    Difference(
        ("error: an empty text",),
        "An error without a text: Triton's client gets an empty one.",
        ("the model reported an error without a message", "the model reported an error without a message"),
    ),
    Difference(
        ("load: no_file",),
        "Triton hangs when there is no model.py.",
        ("model.py", '"status": 200'),
    ),
    Difference(
        ("parameters: from the model",),
        "Responses with parameters are newer than Triton 2.51.",
        ('"parameters": {"a": 1, "b": "grün", "c": true}', '"parameters": {"a": 1, "b": "x", "c": false}'),
    ),
    Difference(("parameters: none from the model",), "The same.", ('"parameters": {}',)),
    Difference(
        ("parameters: with a fraction from the model",),
        "The same; newer Tritons refuse fractions in responses.",
        ("Expect parameters values to have type bool/int/str, found type <class 'float'>", ""),
    ),
    Difference(
        ("parameters: with a list from the model",),
        "The same; a value that is no text, number or truth is refused.",
        ("Failed to process the request(s)", ""),
    ),
    Difference(
        ("plain: through generate",),
        "Triton also passes the ID to the model as a parameter.",
        ('{\\"extra\\": 5}',),
    ),
    Difference(
        ("stream: generate",),
        "Triton has sent the status 200 before the error occurs; the client gets an error in a successful response.",
        ("", "generate expects model to produce exactly 1 response"),
    ),
    Difference(
        ("coroutine: raises",),
        "The traceback includes the frame of `execute`.",
        ("message: ValueError: a negative time\\n\\nAt:\\n  REPOSITORY/coroutine/1/model.py(28): answer\\n", ""),
    ),
    Difference(
        ("complete: completes_returns_nothing",),
        "This server reports the exception as it is.",
        (
            "auto_complete_config function in model 'completes_returns_nothing' must return a valid pb.ModelConfig object.",
            "has no available versions",
            '"status": 200',
        ),
    ),
    Difference(("view: big endian",), "Triton refuses this array; this server converts the byte order.", ("[0.0, 1.0, 2.0",)),
    Difference(
        ("wrong: an output twice",),
        "Triton sends both: its HTTP client shows the last, its gRPC client the first. Refused here, as for all backends.",
        ("the response has the output 'OUT' twice",),
    ),
    Difference(
        ("stream: raises after the end",),
        "The request was answered in full before the model raised: a failure in the log, not of the request.",
        ("", ""),
    ),
    Difference(
        ("stream: returns responses",),
        "The return value of a decoupled model is ignored; Triton counts a failure after the answer.",
        ("", ""),
    ),
    Difference(
        ("sender: one, and one returned",), "The same for an ordinary model that has sent its response.", ("", "")
    ),
    Difference(
        ("sequence: oldest, by name",),
        "Triton passes the bytes of the name to a model with a numeric control; refused here, as for all models.",
        ("data-type is 'BYTES', but model",) * 2,
    ),
    Difference(("sequence: name where a number must be",), "The same.", ("data-type is 'BYTES', but model",)),
    Difference(
        ("call: a decoupled model that fails",),
        "Triton loses an error among the responses to a called model.",
        ('{"outputs": {"OUT": ["float32", [1], [1.0]]}}, {"code": 2, "error": "in band"}, {"outputs": {}}',),
    ),
    Difference(("call: a stream passed on",), "The same.", ('"error": "in band"',)),
    Difference(
        ("control: load an unknown model",),
        "This server's text names the searched repositories; Triton's begins with the name of the caller's instance.",
        ("failed to load 'nowhere', failed to poll from model repository: model 'nowhere' is not in",),
    ),
    Difference(
        ("control: load what fails",),
        "The same.",
        (
            "load failed for model 'fails_initialize': version 1 is at UNAVAILABLE state: ValueError: cannot begin: grün",
        ),
    ),
    Difference(
        ("metrics: another kind",),
        "The texts about invalid metrics are this server's own, after Triton's prefix where Triton has one.",
        ("Error when creating MetricFamily: 'kinds_total' is a counter already",),
        ('kinds_total{k="v"} 0.0',),
    ),
    Difference(
        ("metrics: a histogram's buckets",),
        "Own text.",
        (
            'Missing required buckets.", "made", "TritonModelException: the 2 buckets of metric `sized` must be ascending',
        ),
    ),
    Difference(
        ("metrics: a wrong name",),
        "Own text.",
        ("Error when creating MetricFamily: 'not a name' is no name of a metric",),
    ),
    Difference(
        ("metrics: a counter is set", "metrics: a histogram is set"),
        "Own text.",
        ("Failed to set metric value: a",),
    ),
    Difference(
        ("metrics: a counter observes", "metrics: a gauge observes"),
        "Own text.",
        ("Failed to observe metric value: a",),
    ),
    Difference(
        ("metrics: a counter goes down", "metrics: a histogram is incremented"),
        "Own text.",
        ("Failed to increment metric value: a",),
    ),
    Difference(("metrics: the value of a histogram *",), "Own text.", ("Failed to get metric value: a histogram",)),
    Difference(
        ("load: no_execute",),
        "Triton detects this at the first request.",
        ("does not implement `execute` method", '"status": 200'),
    ),
    Difference(
        ("complete: completes_unknown_datatype",),
        "Triton discards the whole result of auto-complete if it cannot parse a part of it.",
        (
            "auto-complete of model 'completes_unknown_datatype' has answered an invalid model configuration",
            "has no available versions",
            '"status": 200',
        ),
    ),
    Difference(
        ("cancel: while it waits",),
        "A request that is cancelled while it waits leaves the queue; Triton executes the request.",
        ("", "DEADLINE_EXCEEDED"),
    ),
    Difference(
        ("parameters: through a stream",),
        "The same.",
        ('{"a": 1, "b": "x"}', '"parameters": {"p": 5, "q": "x", "r": true, "triton_final_response": true}'),
    ),
    Difference(
        ("sequence: a name as control",),
        "Triton 2.51 does not pass a text correlation ID to a Python model that batches.",
        ('"CORRID": "one"', '"CORRID": "one"'),
    ),
    Difference(
        ("plain: versions",),
        "Unknown models: 400, as newer Tritons (see `triton_differences.py`).",
        ("", "", "Request for unknown model: 'two_versions' version 3 is not found"),
    ),
    Difference(
        ("death: in execute",),
        "Triton reports that its process is not healthy, and does not restart it; this server restarts the instance.",
        ("the worker of model 'dying' version 1 died twice while it executed this request",),
    ),
    Difference(("death: the next request",), "The same.", ("", "")),
]


FRAME = re.compile(r"^  (.*)\((\d+)\): (.*)$", re.M)
OBJECT = re.compile(r"<[\w. ]*(?:InferenceResponse|Tensor object)[^>]*>")
MORE = re.compile(
    r"(NumPy dtype is not supported)[.:].*|(unexpected inference input '[^']*' for model '[^']*'), allowed inputs are: .*"
    r"|(batch-size must be <= \d+ for '[^']*'): .*"
)
"""Texts that are longer than Triton's: they continue with the value, the allowed inputs or what to change."""


def traceback(text: str) -> str:
    """Returns a text with a Python traceback without the frames outside the model's code (modules of the interpreter and of
    the package) and without frames of comprehensions, which newer interpreters do not have."""
    kept = lambda m: m[0] if m[1].startswith("REPOSITORY") and not m[3].startswith("<") else ""  # noqa: E731
    text = re.sub(r"\n+", "\n", OBJECT.sub("<object>", FRAME.sub(kept, text)))
    return re.sub(r"\nAt:\n?(?=;|$)", "", text.replace("\n;", ";")).replace("Internal: ", "").rstrip(";\n")


LEFT_OUT = OWN_PARAMETERS | {"code"}
"""Keys that are not compared: keys that only this server has, and the error code of a called model's answer. Triton always
reports INTERNAL there, this server the code of the called model."""


def plain(value):
    """Returns an answer without the parts in which the servers may differ: frames of tracebacks, keys of the configuration,
    and what follows Triton's text."""
    if isinstance(value, str):
        return MORE.sub(lambda found: found[1] or found[2] or found[3], traceback(value))
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in LEFT_OUT}
    return value


def failed(answer: dict) -> bool:
    """Returns whether an answer, or an answer of a stream, is an error."""
    return answer.get("status", 200) not in (200, "OK") or "error" in json.dumps(answer).replace('"error": ""', "")


def counted(outcome: dict, all_well: bool) -> dict:
    """Returns the counts to compare. Triton counts errors that a Python model returns as successes, and failures of ensembles
    twice. If there are errors, the numbers of requests are therefore compared without their outcomes."""
    if all_well:
        # Counts by position of the response are newer than the recorded Triton.
        kept = lambda counts: {key: n for key, n in counts.items() if not key.startswith("response ")}  # noqa: E731
        return {model: kept(counts) for model, counts in outcome["counted"].items()}
    found = {}
    for model, counts in outcome["counted"].items():
        kept = {key: value for key, value in counts.items() if key == "executions" or key.startswith("batch ")}
        requests = counts.get("success", 0) + counts.get("fail", 0)
        found[model] = kept | {"requests": bool(requests) if model.startswith("chain") else requests}
    return found


def seen(outcome: dict) -> dict:
    """Returns the report of the model in the rows `interface: ...`."""
    return outcome["answers"][0]["outputs"]["SEEN"][2][0]


def names_are_there(ours: dict, theirs: dict) -> str:
    """Returns the names that Triton has and this server lacks; this server may have more names."""
    found = seen(ours)
    return ", ".join(name for name, there in seen(theirs).items() if there and not found[name])


def newer_facts(ours: dict, _theirs: dict) -> str:
    """Returns the expressions, unsupported by Triton 2.51, whose values differ from those of newer versions."""
    found = seen(ours)
    return ", ".join(f"{name} gives {found[name]!r}" for name, value in NEWER.items() if found[name] != value)


def wrong_calls(ours: dict, theirs: dict) -> str:
    """Returns the calls that only one of the servers refuses; the types of the exceptions may differ."""
    found = seen(ours)
    wrong = lambda value: isinstance(value, str) and value.endswith(("Error", "Exception"))  # noqa: E731
    return ", ".join(
        f"{name} gives {found[name]}" for name, value in seen(theirs).items() if wrong(value) != wrong(found[name])
    )


SPECIAL = {"interface: names": names_are_there, "interface: newer": newer_facts, "interface: wrong calls": wrong_calls}


def difference(name: str, ours: dict, theirs) -> str:
    """Returns how a row's outcome differs from Triton's; empty if it does not or if the difference is deliberate."""
    if name in SPECIAL:
        return SPECIAL[name](ours, theirs)
    allowed = reason_for(name)
    if allowed is not None:
        return allowed.check(ours)
    if theirs == CRASHED or NO_ANSWER in theirs["answers"]:
        return "Triton gives no answer here; add the expected outcome to DIFFERENCES"
    left, right = plain(ours), plain(theirs)
    if len(left["answers"]) != len(right["answers"]):
        return f"{len(left['answers'])} answers, Triton {len(right['answers'])}"
    for number, (mine, other) in enumerate(zip(left["answers"], right["answers"], strict=True)):
        if mine != other:
            return f"answer {number}: {mine!r}, Triton {other!r}"
    all_well = not any(failed(answer) for answer in theirs["answers"])
    mine, other = counted(left, all_well), counted(right, all_well)
    if mine != other:
        return f"counted {mine!r}, Triton {other!r}"
    if left.get("metrics") != right.get("metrics"):
        return f"metrics {left.get('metrics')!r}, Triton {right.get('metrics')!r}"
    return ""


def reason_for(name: str):
    """Returns the deliberate difference that names this row, or None."""
    matches = (entry for entry in DIFFERENCES if any(fnmatch.fnmatchcase(name, row) for row in entry.rows))
    return next(matches, None)
