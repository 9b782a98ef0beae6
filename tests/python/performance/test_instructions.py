"""The instructions and allocations of the frontend for a request, and its instructions by stage, counted by valgrind: they do not
depend on the speed of the machine.

Valgrind does not follow the process of the model, and does not see the kernel. Background tasks of the frontend are part of the
counts. A change of the compiler or of a library can change them: a failed test shows the numbers for the table.
"""

import json
import shutil
import subprocess

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from harness.callgrind import Profile
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
BUDGET = {
    "http json": {
        "HTTP library": 10_000,
        "JSON library": 9_100,
        "byte buffers": 1_200,
        "HTTP interface": 12_200,
        "listener and Call": 5_100,
        "core": 9_100,
        "engine": 12_300,
        "event loop": 6_400,
        "metrics": 2_600,
    },
    "http binary": {
        "HTTP library": 11_600,
        "JSON library": 800,
        "byte buffers": 1_500,
        "HTTP interface": 6_100,
        "listener and Call": 5_200,
        "core": 9_200,
        "engine": 12_200,
        "event loop": 6_500,
        "metrics": 2_600,
    },
    "grpc": {
        "HTTP library": 17_500,
        "gRPC library": 36_300,
        "byte buffers": 6_000,
        "gRPC interface": 8_400,
        "listener and Call": 5_900,
        "core": 8_700,
        "engine": 12_300,
        "event loop": 11_000,
        "metrics": 2_600,
    },
}
"""Instructions of each stage for a request."""
STAGE_TOLERANCE = 0.05
STAGE_TOLERANCES = {"event loop": 0.3, "listener and Call": 0.1}
"""Larger tolerances: the event loops sleep and wake more often on a machine with other work."""
SMALL = 500
"""A difference in instructions that is always within the tolerance."""
STAGES = {
    "HTTP library": "hyper|^http::|httparse|http_body|axum|tower",
    "gRPC library": "tonic|h2::|prost",
    "event loop": "tokio|mio::",
    "byte buffers": "bytes::",
    "JSON library": "serde",
    "HTTP interface": "pharos_http",
    "gRPC interface": "pharos_grpc",
    "listener and Call": "pharos_edge|pharos_listener|pharos_os",
    "metrics": "pharos_metrics",
    "engine": "pharos_engine",
    "core": "pharos::",
}
"""The functions of each stage, by the packages in their names. The first pattern that matches counts."""
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

    def profile(self) -> Profile:
        """Returns the counts, after the end of the server."""
        return Profile(self.counts)


def counted(folder, case: str) -> Profile:
    """Returns the profile of COUNT requests."""
    with Counted(folder) as server:
        ask = CLIENTS[case](server)
        for _ in range(WARM_UP):
            ask()
        server.count(True)
        for _ in range(COUNT):
            ask()
        server.count(False)
    return server.profile()


@pytest.mark.parametrize("case", RECORDED)
def test_a_request_takes_the_recorded_numbers_of_instructions_and_allocations(tmp_path, case):
    profile = counted(tmp_path, case)
    instructions, allocations = profile.total() // COUNT, profile.calls_of(ALLOCATORS) // COUNT
    expected = RECORDED[case]
    found = f"{instructions:,} instructions and {allocations} allocations for a request, recorded are {expected}"
    stages = {stage: cost / COUNT for stage, cost in profile.stages(STAGES).items()}
    recorded = BUDGET[case]
    table = "\n".join(f"{stage}: {cost:,.0f}, recorded {recorded.get(stage, 0):,}" for stage, cost in sorted(stages.items()))
    print(f"{case}: {found}\n{table}")
    assert abs(instructions / expected[0] - 1) < TOLERANCE, f"{found}\n{table}"
    assert abs(allocations - expected[1]) <= ALLOCATIONS_TOLERANCE, found
    for stage, cost in stages.items():
        before = recorded.get(stage, 0)
        tolerance = max(STAGE_TOLERANCES.get(stage, STAGE_TOLERANCE) * before, SMALL)
        assert abs(cost - before) <= tolerance, f"the stage '{stage}' differs by more than {tolerance:,.0f}\n{table}"
