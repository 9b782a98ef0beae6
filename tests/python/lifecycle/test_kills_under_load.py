"""Workers are killed at random moments under load, as fast as they restart. `make soak` kills 10,000; it prints its measurements."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest
import tritonclient.grpc

from harness.connections import connect, post, read_response
from harness.models import copy_models
from harness.server import EXAMPLES, MODELS, Server, total
from harness.waiting import DEADLINE_S, eventually, every, join_all, pause_as_client

KILLS = 10_000 if os.environ.get("PHAROS_SOAK_S") else 100
SEED = int(os.environ.get("PHAROS_SEED", "0")) or random.randrange(1, 1 << 32)
INSTANCES = {"simple": 24, "identity_uint8_nobatch": 8}
SIZE = 64 << 10
"""The bytes of a tensor of the second model."""
ROWS = np.arange(32, dtype=np.int32).reshape(2, 16)
COUNTED = (
    "nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count", "nv_inference_exec_count",
    "pharos_requests_total", "pharos_instance_restarts_total", "pharos_request_duration_seconds_count",
)  # fmt: skip
"""Counters of the server; they never go backwards."""
pytestmark = [pytest.mark.alone, pytest.mark.soak]


class Client(threading.Thread):
    """Sends requests until `ends` is set, and checks each answer. `codes` counts them by model and code."""

    def __init__(self, server: Server, seed: int, send):
        super().__init__(daemon=True)
        self.server, self.random, self.send = server, random.Random(seed), send
        self.ends, self.codes, self.longest_s, self.error = False, Counter(), 0.0, None

    def run(self):
        try:
            ask = self.send(self)
            while not self.ends:
                begun = time.monotonic()
                self.codes[ask()] += 1
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
        except Exception as error:  # shown by the test
            self.error = error


def json_client(client: Client):
    """Returns a function that sends two rows to `simple` in JSON."""
    connection = connect(client.server.http_port)

    def ask():
        first = client.random.randrange(1 << 20)
        values = [[first + n for n in range(32)], [1] * 32]
        names = ("INPUT0", "INPUT1")
        inputs = [{"name": name, "shape": [2, 16], "datatype": "INT32", "data": data} for name, data in zip(names, values, strict=True)]
        connection.sendall(post("/v2/models/simple/infer", json.dumps({"inputs": inputs}).encode()))
        status, body = read_response(connection)
        answer = json.loads(body)
        if status == 200:
            outputs = {output["name"]: output["data"] for output in answer["outputs"]}
            assert outputs == {"OUTPUT0": [n + 1 for n in values[0]], "OUTPUT1": [n - 1 for n in values[0]]}
        else:
            assert answer["error"], answer
        return "simple", status

    return ask


def binary_client(client: Client):
    """Returns a function that sends a large tensor in binary form."""
    connection = connect(client.server.http_port)
    tensor = {"name": "INPUT0", "shape": [SIZE], "datatype": "UINT8", "parameters": {"binary_data_size": SIZE}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    model = "identity_uint8_nobatch"

    def ask():
        data = client.random.randbytes(SIZE)
        connection.sendall(post(f"/v2/models/{model}/infer", head + data, f"Inference-Header-Content-Length: {len(head)}"))
        status, body = read_response(connection)
        if status == 200:
            assert body[-SIZE:] == data
        else:
            assert json.loads(body)["error"], body
        return model, status

    return ask


def grpc_client(client: Client):
    """Returns a function that sends two rows to `simple` over gRPC."""
    channel = tritonclient.grpc.InferenceServerClient(client.server.grpc)
    tensors = [tritonclient.grpc.InferInput(name, [2, 16], "INT32") for name in ("INPUT0", "INPUT1")]

    def ask():
        rows = ROWS + client.random.randrange(1 << 20)
        for tensor in tensors:
            tensor.set_data_from_numpy(rows)
        try:
            answer = channel.infer("simple", tensors, client_timeout=DEADLINE_S)
        except tritonclient.grpc.InferenceServerException as error:
            assert error.message(), error
            return "simple", error.status()
        assert (answer.as_numpy("OUTPUT0") == 2 * rows).all()
        return "simple", 200

    return ask


def put_models(folder):
    """Copies the models, with their numbers of instances."""
    copy_models(folder, ["simple"], EXAMPLES)
    copy_models(folder, ["identity_uint8_nobatch"], MODELS)
    for name, count in INSTANCES.items():
        config = folder / name / "config.pbtxt"
        config.write_text(f"{config.read_text()}instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n")
    return folder


def kill_workers(server: Server, dice: random.Random) -> int:
    """Kills a fifth of the living workers, each after a short time. Returns how many."""
    living, killed = sorted(server.workers()), 0
    for pid in dice.sample(living, -(-len(living) // 5)):
        pause_as_client(dice.random() * 0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def descriptors(server: Server) -> int:
    """Returns the number of open descriptors."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def has_all_workers(server: Server) -> bool:
    """Returns whether all instances have living workers."""
    return len(server.workers()) == sum(INSTANCES.values())


def test_every_request_is_answered_once_while_workers_are_killed(tmp_path):
    print(f"\nPHAROS_SEED={SEED}")
    dice, kills, last = random.Random(SEED), 0, {}
    flags = ["--worker-max-backoff-secs=1"]
    with Server(tmp_path, [put_models(tmp_path / "models")], flags) as server:
        eventually("all workers are there", lambda: has_all_workers(server))
        before = descriptors(server)
        makers = [json_client, json_client, json_client, binary_client, binary_client, grpc_client]
        clients = [Client(server, SEED + number, maker) for number, maker in enumerate(makers)]
        begun = time.monotonic()
        for client in clients:
            client.start()
        for _ in every(0.02, KILLS):
            kills += kill_workers(server, dice)
            last = not_backwards(last, server)
            if kills >= KILLS or any(client.error for client in clients):
                break
        for client in clients:
            client.ends = True
        join_all(clients)
        assert [client.error for client in clients if client.error] == []
        took, codes = time.monotonic() - begun, sum((client.codes for client in clients), Counter())
        eventually("all workers are there again", lambda: has_all_workers(server))
        metrics = server.scrape()
        for model in INSTANCES:
            answered = {code: count for (name, code), count in codes.items() if name == model}
            failed = sum(count for code, count in answered.items() if code != 200)
            assert total(metrics, "nv_inference_request_success", model=model) == answered[200]
            assert total(metrics, "nv_inference_request_failure", model=model) == failed
            assert total(metrics, "nv_inference_pending_request_count", model=model) == 0
        not_backwards(last, server)
        eventually("descriptors are closed", lambda: descriptors(server) <= before)
    assert kills >= KILLS
    print(
        f"{kills} kills in {took:.0f} s, {sum(codes.values())} requests, {dict(codes)}, "
        f"longest {max(client.longest_s for client in clients):.2f} s, "
        f"{total(metrics, 'pharos_instance_restarts_total'):.0f} restarts"
    )


def not_backwards(last: dict, server: Server) -> dict:
    """Checks that no counter is lower than before, and returns the counters."""
    now = {key: value for key, value in server.scrape().items() if key[0] in COUNTED}
    lower = {key: (value, now.get(key)) for key, value in last.items() if now.get(key, -1) < value}
    assert not lower, lower
    return now
