"""Profiles of callgrind: the instructions of a process by stage.

The format: https://valgrind.org/docs/manual/cl-format.html
"""

import re
from collections import defaultdict
from pathlib import Path

NAME = re.compile(r"(c?fn)=\((\d+)\)(?: (.*))?$")
CALLS = re.compile(r"calls=(\d+) ")
COST = re.compile(r"(?:[+\-]?\d+|\*)(?: (?:[+\-]?\d+|\*))* (\d+)$")
MOST_CALLERS = 30
"""How many calls lie at most between a function of a library and the stage that calls it."""


class Profile:
    """The instructions of each function, and those of each call with what it calls."""

    def __init__(self, path: Path):
        self.own: dict[str, int] = defaultdict(int)
        self.arcs: dict[tuple[str, str], int] = defaultdict(int)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        names: dict[str, str] = {}
        caller = called = ""
        is_call = False
        for line in path.read_text().splitlines():
            if name := NAME.match(line):
                kind, number, text = name.groups()
                # The format gives each name once, with a number that stands for it later.
                names.setdefault(number, text)
                if kind == "fn":
                    caller = names[number]
                else:
                    called = names[number]
            elif calls := CALLS.match(line):
                self.calls[caller, called] += int(calls[1])
                is_call = True
            elif cost := COST.match(line):
                if is_call:
                    self.arcs[caller, called] += int(cost[1])
                elif caller:
                    self.own[caller] += int(cost[1])
                is_call = False

    def total(self) -> int:
        """Returns the instructions of all functions."""
        return sum(self.own.values())

    def calls_of(self, names: tuple[str, ...]) -> int:
        """Returns the number of calls of functions whose names end like this."""
        return sum(count for (_, called), count in self.calls.items() if called.endswith(names))

    def stages(self, patterns: dict[str, str]) -> dict[str, float]:
        """Returns the instructions of each stage, whose functions match its pattern.

        The instructions of a function without a stage, for example of the allocator, count for its callers in proportion to
        the instructions of their calls.
        """
        stages = {name: re.compile(pattern) for name, pattern in patterns.items()}

        def stage(function: str) -> str | None:
            return next((name for name, pattern in stages.items() if pattern.search(function)), None)

        callers = defaultdict(list)
        for (caller, called), cost in self.arcs.items():
            if caller != called and cost:
                callers[called].append((caller, cost))
        found: dict[str, float] = defaultdict(float)
        rest: dict[str, float] = dict(self.own)
        for _ in range(MOST_CALLERS):
            above: dict[str, float] = defaultdict(float)
            for function, cost in rest.items():
                if name := stage(function):
                    found[name] += cost
                    continue
                if not callers[function]:
                    found["other"] += cost
                total = sum(share for _, share in callers[function])
                for caller, share in callers[function]:
                    above[caller] += cost * share / total
            rest = above
        found["other"] += sum(rest.values())
        return dict(found)
