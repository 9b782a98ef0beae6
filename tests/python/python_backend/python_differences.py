"""How answers to `python_tables.py` are compared with a real Triton's, and where they differ on purpose, and why."""

import fnmatch
import json
import re
from dataclasses import dataclass

from protocol.triton_differences import OWN_PARAMETERS
from python_backend.python_peers import CRASHED, NO_ANSWER
from python_backend.python_tables import NEWER


@dataclass(frozen=True)
class Difference:
    """One deliberate difference: rows (patterns of names), why, and what holds here instead: `texts`, which are in the
    answers in this order (an empty one is a success), and `metrics`, lines that are there."""

    rows: tuple
    why: str
    texts: tuple = ()
    metrics: tuple = ()

    def check(self, ours: dict) -> str:
        """How a row's outcome differs from what this entry promises, empty if it does not."""
        found = [text_of(answer) for answer in ours["answers"]]
        if len(found) < len(self.texts):
            return f"{len(found)} answers, promised {len(self.texts)}"
        for text, wanted in zip(found, self.texts):
            if wanted not in text or (not wanted and '"error": "' in text.replace('"error": ""', "")):
                return f"{text[:500]!r}, promised {wanted!r}"
        missing = [line for line in self.metrics if line not in ours.get("metrics", [])]
        return f"no metric {missing}: {ours.get('metrics')}" if missing else ""


def text_of(answer: dict) -> str:
    """An answer as a text to look for fragments in."""
    return json.dumps(answer, ensure_ascii=False)


DROPPED = "has dropped the request without a response"
"""Part of the text where Triton never answers."""

DIFFERENCES = [
    Difference(
        ("batch: None for one of them",),
        "A response that is None, while no sender answers: Triton never answers such a request.",
        ("", DROPPED),
    ),
    Difference(("batch: None for all",), "The same.", (DROPPED, DROPPED)),
    Difference(("wrong: None returned", "wrong: None as a response"), "The same.", (DROPPED, "")),
    Difference(
        ("sender: none",),
        "The same, of a sender that was used wrongly.",
        (DROPPED, "Non-decoupled model cannot send complete final before sending a response."),
    ),
    Difference(
        ("sender: two",),
        "The first response is the answer; Triton keeps it back until the sender is closed, and then for ever.",
        ("", "Non-decoupled model cannot send more than one response."),
    ),
    Difference(
        ("stream: coroutine",),
        "A coroutine of a decoupled model that raises: Triton writes it to its log and never ends the request.",
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
        ("model.py",),
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
        "Triton hands the id to the model as a parameter as well.",
        ('{\\"extra\\": 5}',),
    ),
    Difference(
        ("stream: generate",),
        "Triton says 200 because it has begun to answer; the client sees an error in an answer that claims to be good.",
        ("", "generate expects model to produce exactly 1 response"),
    ),
    Difference(
        ("coroutine: raises",),
        "The traceback goes on to `execute` itself.",
        ("message: ValueError: a negative time\\n\\nAt:\\n  REPOSITORY/coroutine/1/model.py(28): answer\\n", ""),
    ),
    Difference(
        ("complete: completes_returns_nothing",),
        "Ours is told as the exception that it is.",
        (
            "auto_complete_config function in model 'completes_returns_nothing' must return a valid pb.ModelConfig object.",
        ),
    ),
    Difference(("view: big endian",), "Triton refuses such an array; here it is put in order.", ("[0.0, 1.0, 2.0",)),
    Difference(
        ("wrong: an output twice",),
        "Triton sends both, of which its HTTP client shows the last and its gRPC client the first; refused, as of all backends.",
        ("the response has the output 'OUT' twice",),
    ),
    Difference(
        ("stream: raises after the end",),
        "The request was answered in full before the model raised: a failure in the log, not of the request.",
        ("", ""),
    ),
    Difference(
        ("stream: returns responses",),
        "What a decoupled model returns is passed over; Triton counts a failure after the answer.",
        ("", ""),
    ),
    Difference(
        ("sender: one, and one returned",), "The same, of an ordinary model that has sent its response.", ("", "")
    ),
    Difference(
        ("sequence: oldest, by name", "sequence: name where a number must be"),
        "Triton hands the bytes of the name to a model that wants a number; refused here as for all models.",
        ("data-type is 'BYTES', but model",),
    ),
    Difference(
        ("call: a decoupled model that fails",),
        "Triton loses an error among the responses to a called model.",
        ('{"outputs": {"OUT": ["float32", [1], [1.0]]}}, {"code": 2, "error": "in band"}, {"outputs": {}}',),
    ),
    Difference(("call: a stream passed on",), "The same.", ('"error": "in band"',)),
    Difference(
        ("control: load what is not there",),
        "Our text says where was looked; Triton's begins with the name of the caller's instance.",
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
        "The texts of what is wrong with a metric are our own, behind Triton's beginning where it has one.",
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
    Difference(("metrics: a histogram is asked",), "Own text.", ("Failed to get metric value: a histogram",)),
    Difference(
        ("load: no_execute",),
        "Triton finds out when the first request comes.",
        ("does not implement `execute` method",),
    ),
    Difference(
        ("complete: completes_unknown_datatype",),
        "Triton forgets everything that auto-complete has found when it cannot read a part of it.",
        ("auto-complete of model 'completes_unknown_datatype' has answered what is no model configuration",),
    ),
    Difference(
        ("cancel: while it waits",),
        "Who gives up while waiting leaves the queue; Triton executes the request.",
        ("", "DEADLINE_EXCEEDED"),
    ),
    Difference(
        ("parameters: through a stream",),
        "The same.",
        ('{"a": 1, "b": "x"}', '"parameters": {"p": 5, "q": "x", "r": true, "triton_final_response": true}'),
    ),
    Difference(
        ("sequence: a name as control",),
        "Triton 2.51 does not hand a text as correlation id to a Python model that batches.",
        ('"CORRID": "one"', '"CORRID": "one"'),
    ),
    Difference(
        ("plain: versions",),
        "Unknown models: 400, as newer Tritons (see `triton_differences.py`).",
        ("", "", "Request for unknown model: 'two_versions' version 3 is not found"),
    ),
    Difference(
        ("death: in execute",),
        "Triton says that its process is not healthy, and does not start it again; here the instance is started anew.",
        ("the worker of model 'dying' version 1 died twice while it executed this request",),
    ),
    Difference(("death: the next request",), "The same.", ("", "")),
]


FRAME = re.compile(r"^  (.*)\((\d+)\): (.*)$", re.M)
OBJECT = re.compile(r"<[\w. ]*(?:InferenceResponse|Tensor object)[^>]*>")
MORE = re.compile(
    r"(NumPy dtype is not supported)[.:].*|(unexpected inference input '[^']*' for model '[^']*'), allowed inputs are: .*"
)
"""A text that goes on with what was given; Triton's does not."""


def traceback(text: str) -> str:
    """A text with a Python traceback, without the frames that are no model's: of the interpreter's own modules, of the
    package, and of comprehensions, which newer interpreters have no frames for."""
    kept = lambda m: m[0] if m[1].startswith("REPOSITORY") and not m[3].startswith("<") else ""  # noqa: E731
    text = re.sub(r"\n+", "\n", OBJECT.sub("<object>", FRAME.sub(kept, text)))
    return re.sub(r"\nAt:\n?(?=;|$)", "", text.replace("\n;", ";")).replace("Internal: ", "").rstrip(";\n")


LEFT_OUT = OWN_PARAMETERS | {"code"}
"""Keys that are not compared: ours alone, and the code of an error that a called model answers with, which Triton always
calls INTERNAL and which is the real one here."""


def plain(value):
    """An answer without what each server may have its own way: frames of tracebacks, keys of the configuration."""
    if isinstance(value, str):
        return MORE.sub(lambda found: found[1] or found[2], traceback(value))
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in LEFT_OUT}
    return value


def failed(answer: dict) -> bool:
    """Whether an answer, or one of a stream's, is an error."""
    return answer.get("status", 200) not in (200, "OK") or "error" in json.dumps(answer).replace('"error": ""', "")


def counted(outcome: dict, all_well: bool) -> dict:
    """What was counted. Triton counts errors that a Python model answers with as successes, and failures of ensembles
    twice: where there are errors, requests are looked at, and not how they ended."""
    if all_well:
        # Responses by their place are newer than the Triton that was asked.
        kept = lambda counts: {key: n for key, n in counts.items() if not key.startswith("response ")}  # noqa: E731
        return {model: kept(counts) for model, counts in outcome["counted"].items()}
    found = {}
    for model, counts in outcome["counted"].items():
        kept = {key: value for key, value in counts.items() if key == "executions" or key.startswith("batch ")}
        requests = counts.get("success", 0) + counts.get("fail", 0)
        found[model] = kept | {"requests": bool(requests) if model.startswith("chain") else requests}
    return found


def seen(outcome: dict) -> dict:
    """What the model of the interface's rows has seen."""
    return outcome["answers"][0]["outputs"]["SEEN"][2][0]


def names_are_there(ours: dict, theirs: dict) -> str:
    """Every name that Triton has is here; ours may be more."""
    found = seen(ours)
    return ", ".join(name for name, there in seen(theirs).items() if there and not found[name])


def newer_facts(ours: dict, _theirs: dict) -> str:
    """What a Triton 2.51 does not have is as in newer ones."""
    found = seen(ours)
    return ", ".join(f"{name} gives {found[name]!r}" for name, value in NEWER.items() if found[name] != value)


def wrong_calls(ours: dict, theirs: dict) -> str:
    """What Triton refuses is refused, by an exception of whichever type that says more."""
    found = seen(ours)
    wrong = lambda value: isinstance(value, str) and value.endswith(("Error", "Exception"))  # noqa: E731
    return ", ".join(
        f"{name} gives {found[name]}" for name, value in seen(theirs).items() if wrong(value) != wrong(found[name])
    )


SPECIAL = {"interface: names": names_are_there, "interface: newer": newer_facts, "interface: wrong calls": wrong_calls}


def difference(name: str, ours: dict, theirs) -> str:
    """How a row's outcome differs from Triton's, empty if it does not or if it does so on purpose."""
    if name in SPECIAL:
        return SPECIAL[name](ours, theirs)
    allowed = reason_for(name)
    if allowed is not None:
        return allowed.check(ours)
    if theirs == CRASHED or NO_ANSWER in theirs["answers"]:
        return "Triton gives no answer here; what must come instead has to be in DIFFERENCES"
    left, right = plain(ours), plain(theirs)
    for number, (mine, other) in enumerate(zip(left["answers"], right["answers"])):
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
    """The deliberate difference that names this row, if there is one."""
    matches = (entry for entry in DIFFERENCES if any(fnmatch.fnmatchcase(name, row) for row in entry.rows))
    return next(matches, None)
