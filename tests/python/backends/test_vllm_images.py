"""Images with the backend `vllm`: a real vLLM on CPUs with a LLaVA without trained weights."""

import base64
import io
import json
import os
import subprocess

import openai
import pytest

from harness.server import ROOT, Server, kill_all
from harness.vllm import ARGUMENTS, PYTHON, VARIABLES, needs_vllm

pytestmark = needs_vllm
Image = pytest.importorskip("PIL.Image", reason="Pillow is missing: `pip install pillow`")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """OpenAI's client of a server with the model `vision`."""
    folder = tmp_path_factory.mktemp("vllm")
    version = folder / "models/vision/1"
    version.mkdir(parents=True)
    subprocess.run([PYTHON, ROOT / "tests/vllm/tiny.py", version / "hf", "images"], check=True, env=os.environ | VARIABLES)
    (version / "model.json").write_text(json.dumps(ARGUMENTS | {"load_format": "dummy", "limit_mm_per_prompt": {"image": 2}}))
    (folder / "models/vision/config.pbtxt").write_text('backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n')
    server = Server(folder, [folder / "models"], [f"--python={PYTHON}"])
    server.environment = VARIABLES
    server.launch()
    server.wait_until_ready()
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
    kill_all([server])


def image(size=(40, 30)) -> dict:
    """Returns an image as a part of a message."""
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}}


def prompt_tokens(client, *parts) -> int:
    """Sends a chat; returns the tokens of its prompt."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "one two"}, *parts]}]
    return client.chat.completions.create(model="vision", messages=messages, max_tokens=4).usage.prompt_tokens


def test_images_are_part_of_the_prompt(client):
    """Each has four tokens."""
    text = prompt_tokens(client)
    assert [prompt_tokens(client, *[image()] * count) - text for count in (1, 2)] == [4, 8]


def test_wrong_images_are_refused(client):
    """With the reasons of vLLM and of the backend."""
    wrong = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    large = image((12_000, 9_000))
    for parts, why in (([image()] * 3, "At most 2 image"), ([wrong], "image 0 is not a file"), ([large], "more than 100000000 pixels")):
        with pytest.raises(openai.BadRequestError, match=why):
            prompt_tokens(client, *parts)
