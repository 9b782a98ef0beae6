"""How long other clients wait for their answers meanwhile."""

import concurrent.futures
import contextlib
import http.client
import threading
import time

from harness.waiting import DEADLINE_S

OTHERS = 6
"""More clients than the server of a test has event loops, so that some share that of any other client."""


@contextlib.contextmanager
def slowest_answer(server):
    """Asks for the liveness on several connections until the block ends. Yields a list that gets the longest time of an answer, in
    seconds."""
    ended, result = threading.Event(), []
    with concurrent.futures.ThreadPoolExecutor(OTHERS) as pool:
        others = [pool.submit(slowest_of_one, server, ended) for _ in range(OTHERS)]
        try:
            yield result
        finally:
            ended.set()
        result.append(max(other.result() for other in others))


def slowest_of_one(server, ended: threading.Event) -> float:
    """Asks for the liveness on one connection until `ended` is set; returns the longest time of an answer."""
    connection, slowest = http.client.HTTPConnection(server.http, timeout=DEADLINE_S), 0
    while not ended.is_set():
        began = time.monotonic()
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        slowest = max(slowest, time.monotonic() - began)
    return slowest
