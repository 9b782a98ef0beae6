"""`InferenceResponseSender.is_ready`: a model that answers many requests on one thread does not wait for a client that reads slowly."""

import json
import socket

import pytest

from harness.server import Server, kill_all
from harness.waiting import DEADLINE_S, eventually

MODEL = '''
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    """Sends COUNT numbers; while the client is behind, it collects them into one response."""

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()

    def answer(self, sender):
        waiting, collected = [], 0
        for number in range(COUNT):
            waiting.append(number)
            if sender.is_ready():
                sender.send(pb_utils.InferenceResponse([self.text(waiting)]))
                waiting = []
            else:
                collected += 1
        with open("FILE", "a") as file:
            file.write(f"{collected}\\n")
        while not sender.is_ready():
            time.sleep(0.005)
        sender.send(pb_utils.InferenceResponse([self.text(waiting)]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def text(self, numbers):
        text = " ".join(f"{number:04}{'x' * 2000}" for number in numbers)
        return pb_utils.Tensor("OUT", np.array([text.encode()], np.object_))
'''
CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
input [ { name: "IN" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
COUNT = 5000


@pytest.fixture
def started(tmp_path):
    """A server with the model, and the file to which it writes how many numbers it has collected."""
    version = tmp_path / "models/m/1"
    version.mkdir(parents=True)
    file = tmp_path / "collected"
    (version / "model.py").write_text(MODEL.replace("FILE", str(file)).replace("COUNT", str(COUNT)))
    (tmp_path / "models/m/config.pbtxt").write_text(CONFIG)
    server = Server(tmp_path, [tmp_path / "models"])
    server.launch()
    server.wait_until_ready()
    yield server, file
    kill_all([server])


def test_what_a_slow_client_has_not_read_is_collected(started):
    """The model never waits, and the client gets every number once and in order."""
    server, file = started
    body = json.dumps({"IN": "x"}).encode()
    head = f"POST /v2/models/m/generate_stream HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.http_port), DEADLINE_S) as connection:
        connection.sendall(head + body)
        eventually("the model has made all numbers", file.exists)
        assert int(file.read_text()) > COUNT // 2, "the client has read nothing: most of it was collected"
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: ")]
    numbers = [int(word[:4]) for event in events for word in event["OUT"].split()]
    assert numbers == list(range(COUNT))
