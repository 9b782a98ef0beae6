"""The client commands in README.md, in the book and in the examples work as shown, except for the ports."""

import re
import shutil
import subprocess
import sys

import pytest

from documents import document_blocks
from harness.server import ROOT
from harness.waiting import DEADLINE_S


def lines(beginning: str) -> list:
    """Every command of a shell block without a comment that begins with these words, with its document."""
    shell = [block for block in document_blocks.blocks() if block.language == "sh" and not block.mark]
    found = [(block.document, line) for block in shell for line in document_blocks.commands(block)]
    return [(name, line) for name, line in found if line.startswith(beginning)]


def commands() -> list:
    """Every curl command."""
    return lines("curl ")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", [pytest.param(line, id=f"{name} {line[:60]}") for name, line in commands()])
def test_curl_command(server, command):
    """The command succeeds, and every request is answered with 200, which curl's `--fail` checks."""
    shell = document_blocks.curl_at(command, server)
    result = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, f"{shell[-1]}\n{result.stdout}{result.stderr}"
    assert result.stdout.strip(), f"{shell[-1]}\nprinted nothing"


def test_commands_were_found():
    """The pattern finds the commands of the examples."""
    names = [name for name, _ in commands()]
    assert names.count("README.md") >= 4
    assert names.count("examples/README.md") >= 6
    assert sum(name.startswith("docs/src/") for name in names) >= 6


@pytest.mark.parametrize("document", ["README.md", "docs/src/start/first-model.md", "examples/README.md"])
def test_pictures_are_classified_by_curl(server, document):
    """The command that classifies the picture of a seven prints 7."""
    line = next(line for name, line in commands() if name == document and '"shape":[1,8,8]' in line)
    line = line.replace("localhost:8000", server.http)
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert re.search(r'"name":"label","datatype":"INT64","shape":\[1,1\],"data":\[7\]', result.stdout), result.stdout


def classifications() -> list:
    """Every command of the client examples/classify.py that a document shows."""
    return sorted({line.removeprefix("python3 ") for _, line in lines("python3 examples/classify.py")})


@pytest.mark.parametrize("command", classifications())
def test_classify_command(server, command):
    """The command prints the digit in the name of each picture."""
    url = f"127.0.0.1:{server.grpc_port}" if "--grpc" in command else server.http
    line = f"{sys.executable} {command} --url {url}"
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"digit_(\d)\.pgm: (\d)", result.stdout)
    assert found and all(name == digit for name, digit in found), result.stdout


@pytest.mark.smoke
def test_python_client_of_the_first_model(server):
    """The Python client in the document works as shown, except for the port."""
    text = (ROOT / "docs/src/start/first-model.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)[1].replace("localhost:8000", server.http)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.stdout.split() == ["[[", *map(str, range(1, 16)), "16]]"], result.stdout + result.stderr
