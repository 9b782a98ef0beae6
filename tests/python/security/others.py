"""Clients that measure their own waiting times during an attack."""

import json
import threading
import time

import numpy as np

from harness.connections import connect, post, read_response
from harness.inference import one
from harness.processes import resident_kb
from harness.waiting import eventually, join_all

MODEL = "identity_fp32_nobatch"
INFER = f"/v2/models/{MODEL}/infer"
MOST = 2000
OPTIONS = [
    "--client-head-timeout-secs=2",
    "--client-body-timeout-secs=2",
    "--client-write-timeout-secs=2",
    "--client-handshake-timeout-secs=2",
    f"--http-max-connections={MOST}",
    f"--grpc-max-connections={MOST}",
]
P99_S = 1.0
"""The limit of the 99th percentile of waiting times; some milliseconds are usual, but the machine may be busy."""
LONGEST_S = 4.0
"""The limit of each waiting time. With two clients that wait for each answer, the percentile does not show a server that stops
for a while."""


class Others:
    """Clients that send requests continuously on their own connections, their waiting times, and the frontend's memory."""

    def __init__(self, server):
        self.server, self.over, self.times, self.wrong = server, threading.Event(), [], []
        self.most_kb = self.first_kb = resident_kb(server)
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self.ask, self.ask, self.record_memory)]

    def ask(self):
        """Runs one client, which sends a request every 2 ms."""
        request = post(INFER, json.dumps(one("FP32", [4], [1, 2, 3, 4])).encode())
        try:
            with connect(self.server.http_port) as wire:
                while not self.over.wait(0.002):
                    begun = time.monotonic()
                    wire.sendall(request)
                    status, _ = read_response(wire)
                    self.times.append(time.monotonic() - begun)
                    if status != 200:
                        self.wrong.append(status)
                        return
        except OSError as error:
            self.wrong.append(repr(error))

    def record_memory(self):
        """Records the maximum of the frontend's memory."""
        while not self.over.wait(0.02):
            self.most_kb = max(self.most_kb, resident_kb(self.server))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        eventually("the other clients are served", lambda: len(self.times) > 50)
        return self

    def __exit__(self, *_):
        self.over.set()
        join_all(self.threads)

    def check(self):
        """Fails if a request was not answered, or if clients waited longer than usual."""
        assert self.wrong == []
        assert self.p99() < P99_S
        assert max(self.times) < LONGEST_S

    def p99(self) -> float:
        """Returns the 99th percentile of the waiting times in seconds."""
        return float(np.percentile(self.times, 99))
