"""Clips of audio with the backend `vllm`: a real vLLM on CPUs with a Qwen2-Audio without trained weights."""

import base64
import io
import json
import os
import subprocess
import wave

import openai
import pytest

from harness.server import ROOT, Server, kill_all
from harness.vllm import OWN, PYTHON, VARIABLES, needs_vllm

pytestmark = needs_vllm
RATE = 16_000


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """OpenAI's client of a server with the model `hearing`."""
    folder = tmp_path_factory.mktemp("vllm")
    version = folder / "models/hearing/1"
    version.mkdir(parents=True)
    subprocess.run([PYTHON, ROOT / "tests/vllm/tiny.py", version / "hf", "audio"], check=True, env=os.environ | VARIABLES)
    own = {"load_format": "dummy", "limit_mm_per_prompt": {"audio": 2}, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    (version / "model.json").write_text(json.dumps({"model": "hf"} | OWN | own))
    (folder / "models/hearing/config.pbtxt").write_text('backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n')
    server = Server(folder, [folder / "models"], [f"--python={PYTHON}"])
    server.environment = VARIABLES
    server.launch()
    server.wait_until_ready()
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
    kill_all([server])


def clip(seconds: float, sample_bytes=2) -> dict:
    """Returns a clip as a part of a message."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, sample_bytes, RATE, 0, "NONE", ""))
        written.writeframes(bytes(sample_bytes * int(RATE * seconds)))
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}


def prompt_tokens(client, *parts) -> int:
    """Sends a chat; returns the tokens of its prompt."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "one two"}, *parts]}]
    return client.chat.completions.create(model="hearing", messages=messages, max_tokens=4).usage.prompt_tokens


def test_clips_are_part_of_the_prompt(client):
    """Each second of Qwen2-Audio has 25 tokens."""
    one = prompt_tokens(client, clip(1))
    assert one > prompt_tokens(client) + 25
    assert prompt_tokens(client, clip(3)) - one == 2 * 25
    assert prompt_tokens(client, clip(2), clip(4)) - prompt_tokens(client, clip(1), clip(1)) == 4 * 25


def test_wrong_clips_are_refused(client):
    """With the reasons of vLLM and of the backend."""
    wrong = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
    long = clip(1000, sample_bytes=1)
    for parts, why in (([clip(1)] * 3, "At most 2 audio"), ([wrong], "clip 0 is not a file of WAV"), ([long] * 2, "more than 30000000 samples")):
        with pytest.raises(openai.BadRequestError, match=why):
            prompt_tokens(client, *parts)
