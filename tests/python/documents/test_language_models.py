"""The guide *Language models*: its commands, with the example that they serve."""

import json
import subprocess
import sys

from documents.document_blocks import of_test
from harness.server import ROOT

MODELS = "examples/language_model/models"


def test_the_guide_of_language_models(start):
    """The command and the programs get the text of their prompt."""
    commands, program, of_responses = (block.text for block in of_test("test_the_guide_of_language_models"))
    serve, ask = commands.strip().splitlines()
    assert serve == f"pharos --model-repository {MODELS}"
    server = start([], repository=ROOT / MODELS)
    ask, program, of_responses = (text.replace("localhost:8000", server.http) for text in (ask, program, of_responses))
    answer = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout
    assert json.loads(answer)["choices"][0]["message"]["content"] == "hello world"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "hello world"
    printed = subprocess.run([sys.executable, "-c", of_responses], capture_output=True, text=True, check=True).stdout
    assert printed == "hello world\nhello world"
