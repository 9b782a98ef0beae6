"""The instructions and allocations of the frontend for a request, counted by valgrind: they do not depend on the speed of the
machine.

Valgrind does not follow the process of the model, and does not see the kernel. Background tasks of the frontend are part of the
counts. A change of the compiler or of a library can change them: a failed test shows the numbers for the table.
"""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from harness.connections import connect, post, read_response
from harness.server import EXAMPLES, Server

COUNT = 1000
WARM_UP = 200
TOLERANCE = 0.1
ALLOCATIONS_TOLERANCE = 2
RECORDED = {
    "http json": (67_600, 52),
    "http binary": (55_600, 53),
    "grpc": (106_700, 77),
}
"""Instructions and allocations for a request of the example `simple` on one connection."""
ALLOCATORS = ("__rust_alloc", "__rust_alloc_zeroed", "__rust_realloc")
"""The functions that allocate, as their names in the binary end."""
ROW = list(range(16))
JSON = {"inputs": [{"name": name, "shape": [1, 16], "datatype": "INT32", "data": ROW} for name in ("INPUT0", "INPUT1")]}
OPTIONS = ["--model-control-mode=explicit", "--load-model=simple", "--metrics-mode=prometheus", "--http-thread-count=1"]
"""Without metric lines, which another thread writes, and with one event loop on every machine."""
MISSING = [name for name in ("valgrind", "callgrind_control") if not shutil.which(name)]
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]


def tensors_of(module) -> list:
    """Returns the inputs for a module of the client."""
    tensors = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in tensors:
        tensor.set_data_from_numpy(np.array([ROW], dtype=np.int32))
    return tensors


def over_http(server: Server, body: bytes, *headers: str):
    """Returns a function that sends a request in one piece, whose size does not vary."""
    connection = connect(server.http_port)
    request = post("/v2/models/simple/infer", body, *headers)

    def ask():
        connection.sendall(request)
        status, answer = read_response(connection)
        assert status == 200, answer

    return ask


def over_grpc(server: Server):
    """Returns a function that sends a request."""
    client, tensors = tritonclient.grpc.InferenceServerClient(server.grpc), tensors_of(tritonclient.grpc)
    return lambda: client.infer("simple", tensors)


BINARY, HEAD_SIZE = tritonclient.http.InferenceServerClient.generate_request_body(tensors_of(tritonclient.http))
CLIENTS = {
    "http json": lambda server: over_http(server, json.dumps(JSON).encode()),
    "http binary": lambda server: over_http(server, BINARY, f"Inference-Header-Content-Length: {HEAD_SIZE}"),
    "grpc": over_grpc,
}


class Counted(Server):
    """A server under valgrind, which counts between two calls of `count`."""

    def __init__(self, folder):
        super().__init__(folder, [EXAMPLES], OPTIONS)
        self.counts = folder / "counts"
        self.command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={self.counts}", *self.command]

    def count(self, on: bool):
        """Starts or stops counting."""
        state = "on" if on else "off"
        subprocess.run(["callgrind_control", "-i", state, str(self.process.pid)], check=True, capture_output=True, timeout=60)

    def totals(self) -> tuple[int, int]:
        """Returns the numbers of counted instructions and allocations, after the end of the server."""
        counts = self.counts.read_text()
        return int(re.search(r"^totals: (\d+)", counts, re.M)[1]), calls(counts, ALLOCATORS)


def calls(counts: str, functions: tuple[str, ...]) -> int:
    """Returns the number of calls of functions whose names end like this, from a profile in the format of callgrind.

    The format gives each name once, with a number that stands for it later: https://valgrind.org/docs/manual/cl-format.html
    """
    names, called, total = {}, "", 0
    for kind, number, name, count in re.findall(r"^(?:(c?fn)=\((\d+)\)(?: (.*))?|calls=(\d+) .*)$", counts, re.M):
        if count:
            total += int(count) if called.endswith(functions) else 0
            continue
        if name:
            names[number] = name
        if kind == "cfn":
            called = names[number]
    return total


def counted(folder, case: str) -> tuple[int, int]:
    """Returns the instructions and allocations for a request."""
    with Counted(folder) as server:
        ask = CLIENTS[case](server)
        for _ in range(WARM_UP):
            ask()
        server.count(True)
        for _ in range(COUNT):
            ask()
        server.count(False)
    instructions, allocations = server.totals()
    return instructions // COUNT, allocations // COUNT


@pytest.mark.parametrize("case", RECORDED)
def test_a_request_takes_the_recorded_numbers_of_instructions_and_allocations(tmp_path, case):
    instructions, allocations = counted(tmp_path, case)
    expected = RECORDED[case]
    found = f"{instructions:,} instructions and {allocations} allocations for a request, recorded are {expected}"
    assert abs(instructions / expected[0] - 1) < TOLERANCE, found
    assert abs(allocations - expected[1]) <= ALLOCATIONS_TOLERANCE, found
