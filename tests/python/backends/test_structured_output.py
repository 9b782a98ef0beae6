"""Structured output of the engine of GGUF files: with noise as weights, a text is valid by its schema, or the schema is refused."""

import json

import jsonschema
import pytest

from backends.random_schemas import Schemas
from harness.gguf import write_model
from harness.server import Server, binary, kill_all

LIBRARY = binary().parent / "backends/llamacpp/libpharos_llamacpp.so"
pytestmark = pytest.mark.skipif(
    not LIBRARY.is_file(), reason=f"{LIBRARY} is not built: `make llamacpp` builds it, with a C++ compiler"
)
SETTINGS = """
backend: "llamacpp"
parameters { key: "threads" value: { string_value: "1" } }
parameters { key: "context_length" value: { string_value: "512" } }
"""
SEED, NUMBER = 11, 50
# jsonschema's own checks of times refuse seconds without a fraction, and leap seconds.
FORMATS = jsonschema.FormatChecker(formats=["date", "uuid", "ipv4", "email"])

ENFORCED = {
    "all of two": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    "keywords beside a reference": {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "minimum": 5, "maximum": 6},
    "escaped reference": {"$defs": {"a/b": {"const": 1}}, "$ref": "#/$defs/a~1b"},
    "recursion": {
        "type": "object",
        "properties": {"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["c"],
        "additionalProperties": False,
    },
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    "pattern with a length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3},
    "pattern anywhere": {"type": "string", "pattern": "ab", "maxLength": 5},
    "pattern of a format": {"type": "string", "format": "date", "pattern": "^2"},
    "control characters": {"const": '\x00\x1f"\\\u2028'},
    "names with control characters": {
        "type": "object",
        "properties": {'\x01"': {"const": 1}},
        "required": ['\x01"'],
        "additionalProperties": False,
    },
    "bounds between integers": {"type": "integer", "minimum": 0.5, "maximum": 1.5},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 2},
    "annotations": {"type": "integer", "minimum": 1, "maximum": 3, "title": "t", "default": 1, "examples": [1], "x-own": True},
}
"""Schemas that the engine enforces."""

REFUSED = {
    "uniqueItems": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    "contains": {"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a$"}},
    "dependentRequired": {"type": "object", "properties": {"a": {"type": "null"}}, "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "not": {"type": "integer", "not": {"const": 1}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    "nonsense": {"type": "string", "format": "nonsense"},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 4},
    "required": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"], "additionalProperties": False},
    "http://127.0.0.1:1/x.json": {"$ref": "http://127.0.0.1:1/x.json"},
    "file:///etc/passwd": {"$ref": "file:///etc/passwd"},
}
"""Schemas that cannot be enforced, or that no value has, by a part of the error."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A server with the model `tiny`."""
    folder = tmp_path_factory.mktemp("structured")
    (folder / "models/tiny/1").mkdir(parents=True)
    write_model(folder / "models/tiny/1/model.gguf")
    (folder / "models/tiny/config.pbtxt").write_text(SETTINGS)
    server = Server(folder, [folder / "models"])
    server.launch()
    server.wait_until_ready()
    yield server
    kill_all([server])


def write(server, schema: dict, seed: int) -> tuple:
    """Asks for a text of a schema; returns the status and the parsed answer."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    # The next tokens of `loop` are certain; the constraint excludes them, so that the rest is equally likely.
    body = {"model": "tiny", "messages": [{"role": "user", "content": "loop"}], "temperature": 1, "seed": seed, "max_tokens": 450}
    status, text = server.ask("POST", "/v1/chat/completions", json.dumps(body | {"response_format": form}))
    return status, json.loads(text)


def check(schema: dict, answer: dict) -> bool:
    """Fails unless a whole text is valid; returns whether it is whole."""
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        value = json.loads(choice["message"]["content"])
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)
    return choice["finish_reason"] == "stop"


def test_texts_are_valid_by_random_schemas(tiny):
    """Never an answer with another text. Nearly all schemas are enforced, and most texts end before the limit of tokens."""
    schemas = Schemas(SEED)
    whole, refused = 0, 0
    for number in range(NUMBER):
        schema = schemas.make()
        status, answer = write(tiny, schema, number)
        if status == 400:
            # The only keyword of the generator that the engine does not enforce.
            assert "oneOf" in answer["error"]["message"] and "oneOf" in json.dumps(schema), (answer, schema)
            refused += 1
            continue
        assert status == 200, (answer, schema)
        whole += check(schema, answer)
    assert refused < NUMBER / 5 and whole > NUMBER / 2


@pytest.mark.parametrize("name", ENFORCED)
def test_keywords_are_enforced_together(tiny, name):
    """Combinations of keywords."""
    whole = 0
    for seed in range(8):
        status, answer = write(tiny, ENFORCED[name], seed)
        assert status == 200, answer
        whole += check(ENFORCED[name], answer)
    assert whole


@pytest.mark.parametrize("part", REFUSED)
def test_a_schema_that_is_not_enforced_is_refused(tiny, part):
    """The error names the keyword or the value. Schemas of other addresses are not fetched."""
    status, answer = write(tiny, REFUSED[part], 1)
    assert status == 400 and part in answer["error"]["message"], answer


def test_a_schema_that_only_refers_to_itself_has_a_reason(tiny):
    """`NoExtensionBias` with a line break says nothing to a client."""
    status, answer = write(tiny, {"$ref": "#"}, 1)
    assert status == 400 and "$ref" in answer["error"]["message"], answer


def test_a_pattern_that_is_not_enforced_is_named(tiny):
    """Lookahead is no part of the engine's expressions."""
    status, answer = write(tiny, {"type": "string", "pattern": "^(?!a).*$"}, 1)
    assert status == 400 and "(?!a)" in answer["error"]["message"], answer
