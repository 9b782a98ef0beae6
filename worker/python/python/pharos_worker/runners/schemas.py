"""Bounds the cost of JSON schemas that clients send to engines: some engines expand a schema without a limit."""

import json

MOST_ITEMS = 10_000
"""The largest number that a schema may set for the items of an array."""
MOST_ALTERNATIVES = 1_000
"""The most combinations of alternatives (`anyOf`, `oneOf`) that must hold at the same time (`allOf`, references and neighbours)."""
COUNTS = ("minItems", "maxItems", "minContains", "maxContains")
MARK = "%json"
"""The directive of a grammar that a schema follows."""


class Costly(ValueError):
    """A schema that is too costly."""


def check(schema):
    """Raises an error if a schema is too costly."""
    try:
        found = alternatives(schema, schema, {})
    except RecursionError:
        raise Costly("the schema is nested too deeply") from None
    if found > MOST_ALTERNATIVES:
        raise Costly(f"the schema has {found} combinations of alternatives; allowed are {MOST_ALTERNATIVES}")


def check_grammar(grammar):
    """Raises an error if a schema in a grammar is too costly."""
    at = grammar.find(MARK)
    while at >= 0:
        begin = at + len(MARK)
        rest = grammar[begin:].lstrip()
        try:
            schema, _ = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise Costly(f"{MARK} must be followed by a schema: {error}") from None
        check(schema)
        at = grammar.find(MARK, begin)


def alternatives(schema, root, known):
    """Returns how many combinations of alternatives a schema has; references are followed, and counted once if they are recursive."""
    if not isinstance(schema, dict):
        return 1
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = 1
    count = lambda one: alternatives(one, root, known)  # noqa: E731
    product, largest = 1, 1
    for name, value in schema.items():
        match name, value:
            case str(), int() | float() if name in COUNTS and value > MOST_ITEMS:
                raise Costly(f"{name} {value} is not allowed: it must be at most {MOST_ITEMS}")
            case "anyOf" | "oneOf", list():
                product *= max(sum(map(count, value)), 1)
            case "allOf", list():
                for one in value:
                    product = min(product * count(one), MOST_ALTERNATIVES * MOST_ALTERNATIVES)
            case "$ref", str():
                product *= count(target(value, root))
            case "properties" | "patternProperties" | "$defs" | "definitions", dict():
                inner = [count(one) for one in value.values()]
                if name.endswith("roperties"):
                    largest = max(largest, *inner, 1)
            case "prefixItems" | "items", list():
                largest = max(largest, *map(count, value), 1)
            case "items" | "additionalProperties" | "additionalItems" | "contains" | "not" | "if" | "then" | "else", dict():
                largest = max(largest, count(value))
    known[id(schema)] = min(product * largest, MOST_ALTERNATIVES * MOST_ALTERNATIVES)
    return known[id(schema)]


def target(reference, root):
    """Returns what a reference within a schema means; None if nothing has this name."""
    found = root
    if not reference.startswith("#"):
        return None
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, dict) else None
    return found
