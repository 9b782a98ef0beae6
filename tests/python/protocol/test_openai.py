"""OpenAI's client, unmodified: it lists and finds the models, and learns which of its APIs this server does not have."""

import json

import openai
import pytest

from security.access_table import HTTP

UNAVAILABLE = {
    "/v1/moderations": lambda client: client.moderations.create(input="hello"),
    "/v1/images/generations": lambda client: client.images.generate(prompt="a cat"),
    "/v1/images/edits": lambda client: client.images.edit(prompt="a cat", image=b"x"),
    "/v1/images/variations": lambda client: client.images.create_variation(image=b"x"),
    "/v1/audio/speech": lambda client: client.audio.speech.create(model="simple", voice="alloy", input="hello"),
    "/v1/audio/transcriptions": lambda client: client.audio.transcriptions.create(model="simple", file=b"x"),
    "/v1/audio/translations": lambda client: client.audio.translations.create(model="simple", file=b"x"),
}
"""The calls of the client that send requests to models, by path."""


def client_of(server, key="none", base="/v1") -> openai.OpenAI:
    """Returns a client that does not repeat requests."""
    return openai.OpenAI(base_url=f"http://{server.http}{base}", api_key=key, max_retries=0)


@pytest.mark.smoke
@pytest.mark.parametrize("base", ["/v1", "/openai/v1"])
def test_models_are_listed_and_found(server, base):
    """The client's list has the same models as that of KServe's v1. Both read the same answers."""
    status, text = server.get("/v1/models")
    names = json.loads(text)["models"]
    assert status == 200 and {"simple", "digits"} <= set(names)
    with client_of(server, base=base) as client:
        listed = client.models.list()
        assert listed.object == "list" and [model.id for model in listed] == names
        for model in [*listed.data, client.models.retrieve("simple")]:
            assert (model.object, model.owned_by) == ("model", "triton")
            # A time in seconds, not in milliseconds.
            assert 1_600_000_000 < model.created < 10_000_000_000
        assert client.models.retrieve("simple").id == "simple"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("unknown")


def test_the_api_key_is_a_token(start, tmp_path):
    """The client sends its key as a bearer token. A client that may send requests may list the models."""
    (tmp_path / "tokens").write_text("infer-1\n")
    server = start(["identity_fp32"], f"--inference-token-file={tmp_path / 'tokens'}")
    with client_of(server) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with client_of(server, "infer-1") as client:
        assert [model.id for model in client.models.list()] == ["identity_fp32"]


@pytest.mark.parametrize("path", UNAVAILABLE)
def test_an_unavailable_api_says_what_to_use(server, path):
    """The client raises an error with the path and with what this server has instead."""
    with client_of(server) as client, pytest.raises(openai.NotFoundError) as raised:
        UNAVAILABLE[path](client)
    error = raised.value
    assert f"this server does not have OpenAI's API {path} yet: send POST /v2/models/MODEL/infer " in error.message
    assert error.body["type"] == "invalid_request_error", "the client reads OpenAI's form"


def test_every_unavailable_path_is_tested():
    """The calls above and the table of routes have the same paths."""
    rows = [line.split() for line in HTTP.strip().splitlines()]
    declared = {path for _, path, route, _, status in rows if route == "Infer" and path.startswith("/v1/") and status == "404"}
    assert {path for path in declared if "/models/" not in path} == UNAVAILABLE.keys()
