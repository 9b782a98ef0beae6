"""How answers to `torchserve_table.py` are compared with a real TorchServe's, and where they differ on purpose, and
why."""

import fnmatch
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One deliberate difference: rows (patterns of names), why, and what holds here instead: `texts`, which are in the
    answers in this order, and `logged`, lines of the metric logs that are there."""

    rows: tuple
    why: str
    texts: tuple = ()
    logged: tuple = ()

    def check(self, ours: dict) -> str:
        """How a row's outcome differs from what this entry promises, empty if it does not."""
        found = [json.dumps(answer, ensure_ascii=False) for answer in ours["answers"]]
        if len(found) < len(self.texts):
            return f"{len(found)} answers, promised {len(self.texts)}"
        for text, wanted in zip(found, self.texts):
            if wanted not in text:
                return f"{text[:600]!r}, promised {wanted!r}"
        lines = [line for log in ours.get("logged", {}).values() for line in log]
        missing = [line for line in self.logged if line not in lines]
        return f"no line {missing}: {lines}" if missing else ""


DIFFERENCES = []


def reason_for(name: str):
    """The deliberate difference that names this row, if there is one."""
    matches = (entry for entry in DIFFERENCES if any(fnmatch.fnmatchcase(name, row) for row in entry.rows))
    return next(matches, None)


def plain(outcome: dict) -> dict:
    """An outcome without what is chance in TorchServe: the order of families in a scrape, and of the entries of a map
    in a message."""
    found = json.loads(json.dumps(outcome))
    for answer in found["answers"]:
        if answer.get("headers", {}).get("content-type", "").startswith("text/plain"):
            answer["body"] = sorted(answer["body"].splitlines())
        answer["answers"] = [in_order(message) for message in answer.get("answers", [])]
    return found


def in_order(message: dict) -> dict:
    """A message; what it says of several inputs is in alphabetical order."""
    text = message.get("prediction", "")
    try:
        said = json.loads(text)
    except ValueError:
        return message
    return message | {"prediction": json.dumps(said, sort_keys=True, indent=2)} if isinstance(said, dict) else message


def difference(name: str, ours: dict, theirs: dict) -> str:
    """How a row's outcome differs from TorchServe's, empty if it does not or if it does so on purpose."""
    allowed = reason_for(name)
    if allowed is not None:
        return allowed.check(ours)
    left, right = plain(ours), plain(theirs)
    for number, (mine, other) in enumerate(zip(left["answers"], right["answers"])):
        parts = [key for key in sorted(set(mine) | set(other)) if mine.get(key) != other.get(key)]
        if parts:
            return f"answer {number}: " + "; ".join(
                f"{key} {mine.get(key)!r}, TorchServe {other.get(key)!r}" for key in parts
            )
    for key in ("logged", "scraped"):
        if left.get(key) != right.get(key):
            return f"{key}: {only(left[key], right[key])}"
    return ""


def only(mine, other) -> str:
    """What only one of two has, of lists or of lists by name."""
    if isinstance(mine, dict):
        return "; ".join(f"{name}: {only(mine[name], other[name])}" for name in mine if mine[name] != other[name])
    rest = list(other)
    more = [line for line in mine if line not in rest or rest.remove(line)]
    return f"only here {more}, only TorchServe {rest}"
