"""Exceptions of the worker's package `ts` have the names and texts of TorchServe's, on which handlers and readers of logs
depend; `golden_torchserve_exceptions.json` has those of the real one."""

import json
import os
import subprocess
import sys

import pytest

from harness.waiting import DEADLINE_S
from torchserve.exceptions import GOLDEN, asked, of_torchserve
from torchserve.peer import missing

PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
HAS_WORKER = subprocess.run([PYTHON, "-c", "import pharos_worker"], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not HAS_WORKER, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")

ENDS = {
    "handler: two classes": "Expected only one class in custom service code or a function entry point",
    "handler: no handle": "Expect handle method in class ",
}
"""Texts that continue with Python's form of a class in TorchServe, and with names and the file here."""

FLAGS = ("PROFILER", "XLA", "PT2", "PT230", "IPEX", "ONNX")


@pytest.fixture(scope="module")
def theirs():
    """TorchServe's recorded exceptions."""
    return json.loads(GOLDEN.read_text())


def test_exceptions_have_torchserves_texts(theirs):
    """The same exception; its text begins with TorchServe's, and may be longer."""
    ours = asked(PYTHON, "pharos")
    assert set(ours) == set(theirs)
    wrong = {}
    for name, text in theirs.items():
        kind = text.partition(":")[0]
        wanted = f"{kind}: {ENDS[name]}" if name in ENDS else text
        # The text of a KeyError is in quotes.
        if not ours[name].startswith(wanted.rstrip("\"'")):
            wrong[name] = (ours[name], text)
    assert wrong == {}


@pytest.mark.peers
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_recorded_exceptions_are_torchserves(theirs):
    """The golden file has the exceptions of the real TorchServe."""
    assert of_torchserve() == theirs


def run(program: str, **environment) -> str:
    """Returns the output of a program that uses this server's `ts`."""
    program = f"from pharos_worker import torchserve; torchserve.activate()\n{program}"
    done = subprocess.run(
        [PYTHON, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("version", "expected"), [("1.8.0", "000"), ("1.13.1", "100"), ("2.2.2+cpu", "110"), ("2.3.0", "111")])
def test_flags_depend_on_the_version_of_pytorch(tmp_path, version, expected):
    """`from ts.torch_handler.base_handler import PROFILER_AVAILABLE` and similar flags, with any PyTorch."""
    (tmp_path / "torch.py").write_text(f"__version__ = '{version}'\n")
    found = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from ts.torch_handler.base_handler import PROFILER_AVAILABLE, PT2_AVAILABLE, PT230_AVAILABLE\n"
        "from ts.handler_utils import micro_batching\n"
        "assert micro_batching.PROFILER_AVAILABLE == PROFILER_AVAILABLE\n"
        "print(''.join(str(int(flag)) for flag in (PROFILER_AVAILABLE, PT2_AVAILABLE, PT230_AVAILABLE)))"
    )
    assert found == expected


def test_all_flags_are_there():
    """Each is true or false; other names are not attributes."""
    names = [f"{name}_AVAILABLE" for name in FLAGS]
    found = run(
        "from ts.torch_handler import base_handler\n"
        f"print([type(getattr(base_handler, name)).__name__ for name in {names}], hasattr(base_handler, 'NO_AVAILABLE'))"
    )
    assert found == f"{['bool'] * len(names)} False"


STREAMERS = """
class BaseStreamer:
    pass


class TextIteratorStreamer(BaseStreamer):
    def __init__(self, tokenizer, skip_prompt=False, timeout=None, **kwargs):
        self.texts, self.tokenizer = [], tokenizer

    def put(self, value):
        self.texts.append(self.tokenizer(value))

    def end(self):
        self.ended = True

    def __iter__(self):
        return iter(self.texts)
"""


def test_texts_of_a_batch_are_streamed(tmp_path):
    """`TextIteratorStreamerBatch`: a list of texts for each step, until one of the sequences ends."""
    package = tmp_path / "transformers/generation"
    package.mkdir(parents=True)
    (tmp_path / "transformers/__init__.py").write_text("class AutoTokenizer:\n    pass\n")
    (package / "__init__.py").touch()
    (package / "streamers.py").write_text(STREAMERS)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from ts.handler_utils.hf_batch_streamer import TextIteratorStreamerBatch\n"
        "import numpy\n"
        "made = TextIteratorStreamerBatch(lambda value: str(value.tolist()), 2, skip_prompt=True)\n"
        "made.put(numpy.array([[1], [2]])); made.put(numpy.array([[3], [4]])); made.streamers[1].put(numpy.array([5]))\n"
        "made.end()\n"
        "made.streamer_iterators = [iter(streamer) for streamer in made.streamers]\n"
        "print(list(made))\n"
        "try:\n    made.put(numpy.zeros((3, 1)))\nexcept ValueError as error:\n    print(error)"
    )
    expected = (
        "[[{'text': '[[1]]'}, {'text': '[[2]]'}]",
        "TextIteratorStreamerBatch batch size is set to 2 but got input tensor of shape (3, 1)",
    )
    first, second = run(program).splitlines()
    assert first == f"{expected[0]}, [{{'text': '[[3]]'}}, {{'text': '[[4]]'}}]]" and second == expected[1]


def test_memory_of_processes():
    """`get_cpu_usage`: bytes of a process, and 0 for a process that does not exist."""
    program = (
        "import io, logging, os, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s', level=logging.INFO)\n"
        "from ts.metrics import process_memory_metric as memory\n"
        "print(memory.get_cpu_usage(str(os.getpid())) > 1 << 20)\n"
        "memory.check_process_mem_usage(io.StringIO(f'{os.getpid()},\\n'))\n"
        "logging.disable(logging.ERROR)\nprint(memory.get_cpu_usage('999999999'))"
    )
    known, logged, absent = run(program).splitlines()
    assert (known, absent) == ("True", "0") and int(logged.partition(":")[2]) > 1 << 20
