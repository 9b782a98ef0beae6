"""The code blocks of the documents, and how each is run.

A comment directly above a block, which readers do not see, says how the tests treat it:

- `<!-- not run: REASON -->`: the tests cannot run it.
- `<!-- run by: TEST -->`: the function TEST of `test_documents.py`, `test_readme.py`, `test_reference.py` or `test_text_models.py` runs
  it.
- `<!-- configuration of: BASE [FLAGS] -->`: fields of a `config.pbtxt`; `test_documents.py` adds them to the model BASE and
  loads it with a server with these flags.

A line `<!-- all blocks are run by: TEST -->` says so for the other blocks of its page. Without a comment, a block of shell has
commands of clients, which `test_readme.py` sends.
"""

import re
from dataclasses import dataclass

from harness.server import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs/src").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]


@dataclass(frozen=True)
class Block:
    """A fenced block: its document, the number of its first fence's line, language, comment above it, and text."""

    document: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def place(self) -> str:
        """What names the block in a message."""
        return f"{self.document}:{self.line}"

    @property
    def kind(self) -> str:
        """The comment up to its colon; empty without a comment."""
        return self.mark.partition(":")[0]

    @property
    def argument(self) -> str:
        """The comment behind its colon."""
        return self.mark.partition(":")[2].strip()


def blocks() -> list:
    """Every block of the documents."""
    found = []
    for path in DOCUMENTS:
        lines = path.read_text().splitlines()
        of_page = re.search(r"^<!-- all blocks are (run by: \w+) -->$", path.read_text(), re.M)
        at = 0
        while at < len(lines):
            fence = re.match(r"( *)```(\w*)$", lines[at])
            at += 1
            if not fence:
                assert "```" not in lines[at - 1], f"{path}:{at}: a fence that this test does not understand"
                continue
            begin = at
            while lines[at].strip() != "```":
                at += 1
            comment = re.fullmatch(r" *<!-- (.*) -->", lines[begin - 2]) if begin > 1 else None
            text = "".join(line.removeprefix(fence[1]) + "\n" for line in lines[begin:at])
            name = str(path.relative_to(ROOT))
            mark = (comment or of_page or [0, ""])[1]
            found.append(Block(name, begin, fence[2], mark, text))
            at += 1
    return found


def of_test(test: str, document: str = "", language: str = "") -> list:
    """The blocks that the function `test` runs, in their order."""
    found = [block for block in blocks() if (block.kind, block.argument) == ("run by", test)]
    found = [block for block in found if document in block.document and language in ("", block.language)]
    assert found, f"no block says `run by: {test}`"
    return found


def commands(block: Block) -> list:
    """The commands of a block of shell: lines that end in a backslash are joined, comments are left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s{2,}#.*", "", line) for line in lines if line and not line.startswith("#")]


def curl_at(command: str, server) -> list:
    """The arguments that run a command of curl at the ports of a server, and fail if a request is refused."""
    ports = {"8000": server.http_port, "8001": server.grpc_port, "8082": server.metrics_port}
    line = re.sub(r"(localhost|127\.0\.0\.1):(8000|8001|8082)", lambda m: f"127.0.0.1:{ports[m[2]]}", command)
    return ["bash", "-o", "pipefail", "-c", line.replace("curl ", "curl --fail-with-body -s -S ", 1)]
