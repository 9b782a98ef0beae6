"""Images and audio in chats: the model gets their files, and the chat template their places."""

import base64
import json

import openai
import pytest

from harness.server import ROOT, Server, kill_all

MODELS = ROOT / "tests/python/protocol/language_models"
WORDS = ROOT / "examples/language_model/models"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """OpenAI's client of a server with a model that takes images, and one that does not."""
    server = Server(tmp_path_factory.mktemp("images"), [MODELS, WORDS])
    server.launch()
    server.wait_until_ready()
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:
        yield client
    kill_all([server])


def of(text: str) -> str:
    """Returns the content of a file as base64."""
    return base64.b64encode(text.encode()).decode()


def image(text: str) -> dict:
    """Returns an image as a part of a message."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{of(text)}", "detail": "low"}}


def seen(client, *messages) -> dict:
    """Sends a chat; returns what the model has received."""
    messages = [{"role": "user", "content": list(parts)} for parts in messages]
    answer = client.chat.completions.create(model="pictures", messages=messages)
    return json.loads(answer.choices[0].message.content)


@pytest.mark.smoke
def test_images_and_audio_reach_the_model(client):
    """In the order of the messages; the prompt has their places."""
    text = {"type": "text", "text": " and "}
    audio = {"type": "input_audio", "input_audio": {"data": of("tune"), "format": "wav"}}
    found = seen(client, [image("cat"), text, audio], [image("dog")])
    assert found == {"prompt": "<image> and <audio><image>", "image": ["cat", "dog"], "audio": ["tune"]}
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{of('song')}"}}
    assert seen(client, [url, text]) == {"prompt": "<audio> and ", "image": [], "audio": ["song"]}
    assert seen(client, [text]) == {"prompt": " and ", "image": [], "audio": []}


def test_images_in_responses(client):
    """The parts of a user's message."""
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{of('cat')}", "detail": "auto"}
    parts = [{"type": "input_text", "text": "see "}, picture]
    answer = client.responses.create(model="pictures", input=[{"role": "user", "content": parts}])
    assert json.loads(answer.output_text) == {"prompt": "see <image>", "image": ["cat"], "audio": []}
    with pytest.raises(openai.BadRequestError, match="it has no tensor 'image'") as raised:
        client.responses.create(model="words", input=[{"role": "user", "content": parts}])
    assert raised.value.param == "input[0].content[1].image_url"


@pytest.mark.parametrize(
    ("model", "part", "param", "why"),
    [
        ("words", image("cat"), "image_url", "is not available with the model 'words': it has no tensor 'image'"),
        ("pictures", {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}, "image_url", "others are not fetched"),
        ("pictures", {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}, "image_url", "is not base64"),
        ("pictures", {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}}, "type", "video_url is not supported"),
    ],
)
def test_what_the_model_cannot_take_is_refused(client, model, part, param, why):
    """With the name of the part."""
    with pytest.raises(openai.BadRequestError, match=why) as raised:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert raised.value.param == f"messages[0].content[1].{param}"


def test_many_images_are_refused(client):
    """More than 64 in a request."""
    assert len(seen(client, [image("a")] * 64)["image"]) == 64
    with pytest.raises(openai.BadRequestError, match="at most 64 images"):
        seen(client, [image("a")] * 32, [image("a")] * 33)
