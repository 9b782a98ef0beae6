"""Random JSON schemas as clients of structured output write them."""

import random

FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
PATTERNS = ["^[a-z]{1,4}$", "^[A-Z][a-z]{0,3}$", "^(red|green|blue)$", "^[0-9]{2}-[0-9]{2}$", "^x?y{2,3}z$", "^\\d+\\.\\d$"]
NAMES = ["a", "b", "name", "a b", "größe", "x-y", "$id_", "0", "_", "na\"me"]
VALUES = ["a", "bc", "", "ü", 0, 1, -7, 2.5, True, False, None, [], [1], {"k": 1}]


class Schemas:
    """Makes schemas; equal seeds make equal ones."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.definitions = {}

    def make(self) -> dict:
        """Returns a schema with its definitions."""
        self.definitions = {}
        for number in range(self.chance.randint(0, 2)):
            self.definitions[f"d{number}"] = self.value(2)
        schema = self.object(0)
        return schema | ({"$defs": self.definitions} if self.definitions else {})

    def value(self, depth: int) -> dict:
        """Returns the schema of a value at a certain depth."""
        leaves = [self.integer, self.number, self.string, self.enumeration, self.constant, self.boolean, self.null, self.reference]
        nodes = [self.object, self.array, self.alternatives]
        kind = self.chance.choice(leaves + nodes if depth < 3 else leaves)
        return kind(depth + 1)

    def boolean(self, depth: int) -> dict:
        return {"type": "boolean"}

    def null(self, depth: int) -> dict:
        return {"type": "null"}

    def integer(self, depth: int) -> dict:
        low = self.chance.randint(-50, 50)
        return self.some_of(
            {"type": "integer"},
            self.chance.choice([{"minimum": low}, {"exclusiveMinimum": low}]),
            self.chance.choice([{"maximum": low + 40}, {"exclusiveMaximum": low + 40}]),
            {"multipleOf": self.chance.choice([2, 5])},
        )

    def number(self, depth: int) -> dict:
        low = round(self.chance.uniform(-9, 9), 2)
        return {"type": "number"} | self.chance.choice([{"minimum": low, "maximum": low + 3}, {"exclusiveMinimum": low, "exclusiveMaximum": low + 2}])

    def string(self, depth: int) -> dict:
        kind = self.chance.choice(["length", "pattern", "format"])
        if kind == "length":
            least = self.chance.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + self.chance.randint(0, 4)}
        return {"type": "string", kind: self.chance.choice({"pattern": PATTERNS, "format": FORMATS}[kind])}

    def enumeration(self, depth: int) -> dict:
        return {"enum": self.chance.sample(VALUES, self.chance.randint(1, 5))}

    def constant(self, depth: int) -> dict:
        return {"const": self.chance.choice(VALUES)}

    def reference(self, depth: int) -> dict:
        return {"$ref": f"#/$defs/{self.chance.choice(list(self.definitions))}"} if self.definitions else self.boolean(depth)

    def array(self, depth: int) -> dict:
        least = self.chance.randint(0, 2)
        schema = {"type": "array", "minItems": least, "maxItems": least + self.chance.randint(0, 2), "items": self.value(depth)}
        if self.chance.random() < 0.2:
            schema |= {"prefixItems": [self.value(depth)]}
        return schema

    def alternatives(self, depth: int) -> dict:
        return {self.chance.choice(["anyOf", "anyOf", "oneOf"]): [self.value(depth) for _ in range(self.chance.randint(1, 3))]}

    def object(self, depth: int) -> dict:
        names = self.chance.sample(NAMES, self.chance.randint(1, 4))
        required = self.chance.sample(names, self.chance.randint(0, len(names)))
        schema = {"type": "object", "properties": {name: self.value(depth) for name in names}, "required": required}
        more = self.chance.choice([False, False, False, {"type": "boolean"}])
        return schema | {"additionalProperties": more}

    def some_of(self, schema: dict, *optional: dict) -> dict:
        """Returns a schema with each of the keywords with a probability of a half."""
        for keywords in optional:
            schema |= keywords if self.chance.random() < 0.5 else {}
        return schema
