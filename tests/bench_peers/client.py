"""The load generator: connections over HTTP/1.1, each with one request at a time.

    python client.py < SPECIFICATION

The specification is a JSON object: `port` on loopback, `requests` (the text of each request, sent in turn), `clients` (the number
of connections), `warmup` and `seconds`. Prints a JSON object:

- `rate`: the requests per second after the warm-up. A request at the begin or the end of the measurement counts with the share of
  its time within the measurement, because a batch may take a good part of a second.
- `p50`, `p99`: percentiles of the latency in milliseconds
- `count`: all requests, also those of the warm-up
- `processor`: the share of one processor that the measurement used; near 1, it limits the rate
- `processor_s`: the processor time of this process in seconds
- `answers`: for each connection, the number of a request and the body of its response, the last of the measurement

Requests are encoded before the measurement and responses are not parsed beyond their length, so that a measurement contains as
little of the client as possible. A status other than 200 ends the measurement with an error.
"""

import json
import re
import select
import socket
import sys
import time

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
TIMEOUT_S = 60


class Connection:
    """A connection with one request at a time. `turn` is the number of the request that it sent last."""

    def __init__(self, port: int, first: int):
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.turn = first - 1
        self.received, self.sent_at = b"", 0.0

    def send(self, requests: list):
        """Sends the next request."""
        self.turn = (self.turn + 1) % len(requests)
        self.received, self.sent_at = b"", time.perf_counter()
        self.socket.sendall(requests[self.turn])

    def receive(self) -> bool:
        """Receives a part of the response; returns whether it is complete."""
        part = self.socket.recv(1 << 18)
        if not part:
            raise RuntimeError("the server closed the connection")
        self.received += part
        return is_complete(self.received)

    def body(self) -> bytes:
        """Returns the body of the complete response."""
        return self.received.partition(b"\r\n\r\n")[2]


def is_complete(received: bytes) -> bool:
    """Returns whether a response is complete. Raises an error if it does not report success, or has no length."""
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return False
    length = LENGTH.search(received, 0, head)
    if not received.startswith(b"HTTP/1.1 200") or not length:
        raise RuntimeError(f"unexpected response: {received[:400]!r}")
    return len(received) >= head + 4 + int(length[1])


def measure(told: dict) -> dict:
    """Sends requests and returns the result that the module describes."""
    requests = [request.encode() for request in told["requests"]]
    opened = [Connection(told["port"], number) for number in range(told["clients"])]
    by_descriptor = {one.socket.fileno(): one for one in opened}
    poll = select.epoll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    begin = time.perf_counter() + told["warmup"]
    end = begin + told["seconds"]
    times, used = [], time.process_time()
    for one in opened:
        one.send(requests)
    pending = len(opened)
    while pending:
        ready = poll.poll(TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"no response within {TIMEOUT_S} s")
        for descriptor, _ in ready:
            one = by_descriptor[descriptor]
            if not one.receive():
                continue
            now = time.perf_counter()
            times.append((one.sent_at, now))
            if now < end:
                one.send(requests)
            else:
                pending -= 1
    used = (time.process_time() - used) / (time.perf_counter() - begin + told["warmup"])
    answers = [[one.turn, one.body().decode()] for one in opened]
    return summary(times, begin, end) | {"processor": used, "processor_s": time.process_time(), "answers": answers}


def summary(times: list, begin: float, end: float) -> dict:
    """Returns the rate and the percentiles, in milliseconds, of requests with the times `(sent, received)` in seconds."""
    within = [(sent, received) for sent, received in times if received > begin]
    count = sum((min(received, end) - max(sent, begin)) / (received - sent) for sent, received in within)
    latencies = sorted(received - sent for sent, received in within)
    found = {f"p{share}": 1000 * latencies[len(latencies) * share // 100] for share in (50, 99)}
    return found | {"count": len(times), "rate": count / (end - begin)}


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
