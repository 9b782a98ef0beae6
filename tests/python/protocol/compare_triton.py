#!/usr/bin/env python3
"""Compares this server's answers to valid and invalid requests with those of a real Triton.

    python -m protocol.compare_triton record                           records the Triton peer's answers in golden_triton.json
    python -m protocol.compare_triton compare --http H:P --grpc H:P    compares a running server, prints the differences

Both serve the models of `triton_repository.COMPARED`: this server with its `builtin` backend, Triton with the same functions
in its Python backend. `DIFFERENCES` lists the deliberate differences with their reasons.
"""

import argparse
import fnmatch
import json
import re
import struct
import sys
import tempfile
from pathlib import Path

from harness.peers import Triton
from harness.triton_repository import build
from harness.wire import Answer, GrpcCase, send_grpc, send_http
from protocol import error_table, request_table
from protocol.triton_differences import DIFFERENCES, OWN_PARAMETERS, content_type

GOLDEN = Path(__file__).resolve().parent / "golden_triton.json"
CRASHED = "crashed"
"""The status in the golden file of a request that crashed Triton."""

CASES = [*request_table.HTTP_REQUESTS, *error_table.HTTP_ERRORS, *request_table.GRPC_REQUESTS, *error_table.GRPC_ERRORS]


def send(http: str, grpc: str, case) -> Answer:
    """Sends a case of either protocol."""
    return send_grpc(grpc, case) if isinstance(case, GrpcCase) else send_http(http, case)


def difference(case, ours: Answer, theirs: Answer) -> str:
    """Returns how an answer differs from Triton's; empty if it does not or if the difference is deliberate."""
    allowed = reason_for(case.name)
    if allowed is not None:
        return allowed.check(case, ours)
    if theirs.status == CRASHED:
        return "Triton crashes at this request; add the expected answer to DIFFERENCES"
    if ours.status != theirs.status:
        return f"status {ours.status}, Triton {theirs.status}: {ours.text[:300]!r}, Triton {theirs.text[:300]!r}"
    expected = {"content-type": content_type(theirs), "content-encoding": theirs.headers.get("content-encoding")}
    for header, right in expected.items():
        left = ours.headers.get(header)
        if theirs.text and left != right:
            return f"header {header} is {left!r}, not {right!r}"
    if ours.blob != theirs.blob:
        return f"binary part is {ours.blob[:64].hex()}, Triton {theirs.blob[:64].hex()}"
    left, right = normal(case, ours), normal(case, theirs)
    return "" if left == right else f"body {left!r}, Triton {right!r}"


def reason_for(name: str):
    """Returns the deliberate difference that names this case, or None."""
    matches = (entry for entry in DIFFERENCES if any(fnmatch.fnmatchcase(name, cases) for cases in entry.cases))
    return next(matches, None)


def normal(case, answer: Answer):
    """Returns the body without the parts that may differ: the server's name and version, the backend's name, the order of input
    names in a text (Triton's is that of a hash map), and the decimal form of FP32 numbers. Keys keep their order."""
    try:
        value = json.loads(
            answer.text, object_pairs_hook=list, parse_constant=str, parse_float=lambda text: Single(text, case)
        )
    except ValueError:
        return sorted_names(answer.text)
    return replace(value)


class Single:
    """A number with a fraction; two numbers are equal if they are equal in the tensor's datatype."""

    def __init__(self, text: str, case):
        number = float(text)
        fits = abs(number) <= 3.4028235677973366e38
        self.value = struct.pack("<f", number) if "FP64" not in case.name and fits else number

    def __eq__(self, other):
        return isinstance(other, Single) and self.value == other.value

    def __repr__(self):
        return repr(struct.unpack("<f", self.value)[0] if isinstance(self.value, bytes) else self.value)


NAMES = {"version", "backend", "platform", "instance_group", "extensions"}
"""Keys of metadata and configuration whose values may differ between the servers."""

LEFT_OUT = OWN_PARAMETERS | {"default_model_filename"}
"""Keys that one server may lack: gRPC omits an empty file name, and a `builtin` model has no file."""


def replace(value):
    """Removes the parts of a parsed body that may differ."""
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):
        return [(key, "*" if key in NAMES else replace(item)) for key, item in value if key not in LEFT_OUT]
    if isinstance(value, list):
        return [replace(item) for item in value]
    return sorted_names(value) if isinstance(value, str) else value


def sorted_names(text: str) -> str:
    """Sorts the input names within brackets of an error text."""
    return re.sub(r"\[('\w+'(?:,'\w+')*)\]", lambda m: "[" + ",".join(sorted(m[1].split(","))) + "]", text)


def load_golden() -> dict:
    """Returns Triton's recorded answers: name of a case -> answer."""
    return {name: Answer.from_json(value) for name, value in json.loads(GOLDEN.read_text()).items()}


def ask_triton(triton: Triton, case) -> Answer:
    """Returns Triton's answer. If none arrives, Triton is restarted and the case is sent again, since the case before may have
    crashed it."""
    for _ in range(2):
        triton.ensure()
        try:
            answer = send(triton.http, triton.grpc, case)
            if answer.status != "UNAVAILABLE" or triton.is_ready():
                return answer
        except OSError:
            pass
        triton.wait_for_end()
    return Answer(CRASHED, "")


def record():
    """Sends every case to the Triton peer and writes the golden file."""
    with tempfile.TemporaryDirectory() as folder:
        triton = Triton(build(Path(folder) / "models"), Path(folder) / "triton.log")
        try:
            answers = {case.name: ask_triton(triton, case).to_json() for case in CASES}
        finally:
            triton.stop()
    GOLDEN.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(answers)} answers written to {GOLDEN.name}")


def compare(http: str, grpc: str) -> int:
    """Prints every case with an unexplained difference of the server at these addresses; returns their number."""
    golden, count = load_golden(), 0
    for case in CASES:
        found = difference(case, send(http, grpc, case), golden[case.name])
        if found:
            count += 1
            print(f"{case.name}: {found}")
    print(f"{len(CASES)} requests, {count} unexplained differences")
    return count


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["record", "compare"])
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    options = parser.parse_args()
    if options.verb == "record":
        record()
        return 0
    return 1 if compare(options.http, options.grpc) else 0


if __name__ == "__main__":
    sys.exit(main())
