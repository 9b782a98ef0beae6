"""How answers to `python_tables.py` are compared with a real Triton's, and where they differ on purpose, and why."""

import fnmatch
import json
import re
from dataclasses import dataclass

from python_peers import CRASHED, NO_ANSWER
from python_tables import NEWER
from triton_differences import OWN_PARAMETERS


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
        ("parameters: with a fraction from the model", "parameters: with a list from the model"),
        "The same; a value that is no text, number or truth is named.",
        ("Failed to process the request(s)", ""),
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
        ("500",),
    ),
    Difference(("death: the next request",), "The same.", ("", "")),
]


FRAME = re.compile(r"^  (.*)\((\d+)\): (.*)$", re.M)
ADDRESS = re.compile(r"0x[0-9a-f]+")


def traceback(text: str) -> str:
    """A text with a Python traceback, without the frames that are no model's: of the interpreter's own modules, of the
    package, and of comprehensions, which newer interpreters have no frames for."""
    kept = lambda m: m[0] if m[1].startswith("REPOSITORY") and not m[3].startswith("<") else ""  # noqa: E731
    text = ADDRESS.sub("0x", FRAME.sub(kept, text))
    return re.sub(r"\n+", "\n", text).replace("\nAt:\n;", ";").replace("c_python_backend_utils.", "")


def plain(value):
    """An answer without what each server may have its own way: frames of tracebacks, keys of the configuration."""
    if isinstance(value, str):
        return traceback(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in OWN_PARAMETERS}
    return value


def failed(answer: dict) -> bool:
    """Whether an answer, or one of a stream's, is an error."""
    return "error" in json.dumps(answer).replace('"error": ""', "")


def counted(outcome: dict, all_well: bool) -> dict:
    """What was counted. Triton counts errors that a Python model answers with as successes, and failures of ensembles
    twice: where there are errors, requests are looked at, and not how they ended."""
    if all_well:
        return outcome["counted"]
    found = {}
    for model, counts in outcome["counted"].items():
        kept = {key: value for key, value in counts.items() if key == "executions" or key.startswith("batch ")}
        found[model] = kept | {"requests": counts.get("success", 0) + counts.get("fail", 0)}
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


SPECIAL = {"interface: names": names_are_there, "interface: newer": newer_facts}


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
