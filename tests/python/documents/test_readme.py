"""The client commands in README.md, in the book and in the examples work as shown, except for the ports."""

import re
import shutil
import subprocess
import sys

import pytest

from harness.server import ROOT

BOOK = sorted((ROOT / "docs/src").rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", *BOOK, ROOT / "examples/README.md"]


def commands() -> list:
    """Returns every curl command in a shell block of a document, with continuation lines joined."""
    found = []
    for path in DOCUMENTS:
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", path.read_text(), re.S):
            lines = block.replace("\\\n", " ").splitlines()
            lines = [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?curl ", line)]
            found += [(str(path.relative_to(ROOT)), line) for line in lines]
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", [pytest.param(line, id=f"{name} {line[:60]}") for name, line in commands()])
def test_curl_command(server, command):
    """The command succeeds, and every request is answered with 200, which curl's `--fail` checks."""
    ports = {"8000": server.http_port, "8001": server.grpc_port, "8082": server.metrics_port}
    line = re.sub(r"(localhost|127\.0\.0\.1):(8000|8001|8082)", lambda m: f"127.0.0.1:{ports[m[2]]}", command)
    line = line.replace("curl ", "curl --fail-with-body -s -S ", 1)
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
    assert result.stdout.strip(), f"{line}\nprinted nothing"


def test_commands_were_found():
    """The pattern finds the commands of the examples."""
    names = [name for name, _ in commands()]
    assert names.count("README.md") >= 4
    assert names.count("examples/README.md") >= 6
    assert sum(name.startswith("docs/src/") for name in names) >= 8


@pytest.mark.parametrize("document", ["README.md", "docs/src/start/first-model.md", "examples/README.md"])
def test_pictures_are_classified_by_curl(server, document):
    """The command that classifies the picture of a seven prints 7."""
    line = next(line for name, line in commands() if name == document and "digit_7.pgm" in line)
    line = line.replace("localhost:8000", server.http)
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert re.search(r'"name":"label","datatype":"INT64","shape":\[1,1\],"data":\[7\]', result.stdout), result.stdout


def classifications() -> list:
    """Returns every command of the client examples/classify.py in a document."""
    found = [re.findall(r"^python3 (examples/classify\.py .*)$", path.read_text(), re.M) for path in DOCUMENTS]
    return sorted(set(sum(found, [])))


@pytest.mark.parametrize("command", classifications())
def test_classify_command(server, command):
    """The command prints the digit in the name of each picture."""
    url = f"127.0.0.1:{server.grpc_port}" if "--grpc" in command else server.http
    line = f"{sys.executable} {command} --url {url}"
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"digit_(\d)\.pgm: (\d)", result.stdout)
    assert found and all(name == digit for name, digit in found), result.stdout


@pytest.mark.smoke
def test_python_client_of_the_first_model(server):
    """The Python client in the document works as shown, except for the port."""
    text = (ROOT / "docs/src/start/first-model.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)[1].replace("localhost:8000", server.http)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["[[", *map(str, range(1, 16)), "16]]"], result.stdout + result.stderr


def answers() -> list:
    """Returns every curl command that is alone in its block and is followed by a block with its answer."""
    pairs = [re.findall(r"```sh\n(curl [^\n]*)\n```\n\n```json\n(.*?)```", path.read_text(), re.S) for path in DOCUMENTS]
    return sum(pairs, [])


@pytest.mark.parametrize("command, shown", answers())
def test_answers_are_as_shown(server, command, shown):
    """Compares the whole answer, except for the last digits of numbers, in which engines may differ."""
    line = command.replace("curl ", "curl -s -S ", 1).replace("localhost:8000", server.http)
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60)
    got, expected = (re.sub(r"(\.\d{4})\d+", r"\1", text.strip()) for text in (result.stdout, shown))
    assert got == expected


def test_answers_were_found():
    """The pattern finds the answers of the reference."""
    assert len(answers()) >= 3
