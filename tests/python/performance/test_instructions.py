"""The instructions that the frontend executes for a request, counted by valgrind: they do not depend on the speed of the machine.

Valgrind does not follow the process of the model, and does not see the kernel. Background tasks of the frontend are part of the
counts. A change of the compiler or of a library can change them: a failed test shows the number for the table.
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
RECORDED = {
    "http json": 76_900,
    "http binary": 73_300,
    "grpc": 112_300,
}
"""Instructions for a request of the example `simple` on one connection."""
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

    def total(self) -> int:
        """Returns the number of counted instructions, after the end of the server."""
        return int(re.search(r"^totals: (\d+)", self.counts.read_text(), re.M)[1])


def instructions(folder, case: str) -> int:
    """Returns the instructions for a request."""
    with Counted(folder) as server:
        ask = CLIENTS[case](server)
        for _ in range(WARM_UP):
            ask()
        server.count(True)
        for _ in range(COUNT):
            ask()
        server.count(False)
    return server.total() // COUNT


@pytest.mark.parametrize("case", RECORDED)
def test_a_request_takes_the_recorded_number_of_instructions(tmp_path, case):
    counted = instructions(tmp_path, case)
    assert abs(counted / RECORDED[case] - 1) < TOLERANCE, f"{counted:,} instructions for a request, recorded are {RECORDED[case]:,}"
