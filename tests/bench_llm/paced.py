"""Measures many slow streams: how late tokens arrive, and what the frontend needs for each stream.

A model sends each stream a token at fixed times, as engines do, and writes into each token when it was due and when it was sent. The
client reads raw connections, because a client of OpenAI's API would be busier than the server.
"""

import asyncio
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from harness.server import Server  # noqa: E402

LATE_S = 0.2
"""The delay after which a token is late: readers see it."""
CONFIG = """backend: "python"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU }
"""
MODEL = '''import asyncio
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

ONE = pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.uint32))


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        tensor = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
        parameters = json.loads(tensor.as_numpy().reshape(-1)[0])
        count, interval = parameters["max_tokens"], parameters["extra_args"]["interval_s"]
        due = time.monotonic()
        for number in range(count):
            due += interval
            await asyncio.sleep(due - time.monotonic())
            text = np.array([f"<{due:.4f} {time.monotonic():.4f}>".encode()], dtype=object)
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if number + 1 == count else 0
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text), ONE]), flags=flags)
'''


class Stream(asyncio.Protocol):
    """A connection with one stream: the delays of its tokens from when they were due and from when they were sent, in seconds."""

    def __init__(self, request: bytes):
        self.request, self.due, self.sent, self.rest = request, [], [], b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes):
        now = time.monotonic()
        *tokens, self.rest = (self.rest + data).split(b">")
        for token in tokens:
            due, sent = token.rpartition(b"<")[2].split()
            self.due.append(now - float(due))
            self.sent.append(now - float(sent))
        if b"[DONE]" in self.rest:
            self.transport.close()

    def connection_lost(self, error):
        if not self.ended.done():
            self.ended.set_result(error)


def spent_s(pid: int) -> float:
    """Returns the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def queued_s(pid: int) -> float:
    """Returns the time that the threads of a process were ready to run but had no processor, in seconds."""
    return sum(int((task / "schedstat").read_text().split()[1]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


async def read_streams(server, streams: int, rate: float, seconds: float) -> dict:
    """Opens the streams over one second and reads them to their ends."""
    tokens = int(rate * seconds)
    body = {"model": "paced", "prompt": "x", "max_tokens": tokens, "stream": True, "vllm_xargs": {"interval_s": 1 / rate}}
    body = json.dumps(body).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    loop = asyncio.get_running_loop()
    (worker,) = server.workers()
    first = server.resident_bytes()
    opened = []
    for _ in range(streams):
        _, stream = await loop.create_connection(lambda: Stream(request), "127.0.0.1", server.http_port)
        opened.append(stream)
        await asyncio.sleep(1 / streams)
    # All streams run from here: the first tokens have arrived.
    await asyncio.sleep(seconds / 4)
    middle = server.resident_bytes()
    processes = {"frontend": server.process.pid, "worker": worker, "client": os.getpid()}
    times = lambda read: {name: read(pid) for name, pid in processes.items()}  # noqa: E731
    began, spent, queued = time.monotonic(), times(spent_s), times(queued_s)
    await asyncio.sleep(seconds / 2)
    wall, spent_then, queued_then = time.monotonic() - began, times(spent_s), times(queued_s)
    per_second = lambda before, after: {name: round((after[name] - before[name]) / wall, 3) for name in processes}  # noqa: E731
    most = max(middle, server.resident_bytes())
    await asyncio.gather(*(stream.ended for stream in opened))
    due = sorted(delay for stream in opened for delay in stream.due)
    sent = sorted(delay for stream in opened for delay in stream.sent)
    assert len(due) == streams * tokens, f"{len(due)} of {streams * tokens} tokens have arrived"
    share = lambda delays: round(sum(delay > LATE_S for delay in delays) / len(delays), 5)  # noqa: E731
    at = lambda delays, part: round(delays[int(part * (len(delays) - 1))] * 1000, 1)  # noqa: E731
    return {
        "streams": streams,
        "tokens_per_second": round(streams * rate),
        "late_share": share(due),
        "late_share_after_sending": share(sent),
        "delay_ms": {"p50": at(due, 0.5), "p99": at(due, 0.99), "max": at(due, 1)},
        "delay_after_sending_ms": {"p50": at(sent, 0.5), "p99": at(sent, 0.99), "max": at(sent, 1), "mean": round(statistics.mean(sent) * 1000, 2)},
        "frontend_kb_per_stream": round((most - first) / 1000 / streams, 1),
        "processors": per_second(spent, spent_then),
        # Above zero on a busy machine: then the delays are those of the machine.
        "waits_for_processors": per_second(queued, queued_then),
    }


def measure(program: str, folder: Path, streams: int, rate: float, seconds: float) -> dict:
    """Runs a server with the model and measures."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    version = folder / "paced/paced/1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    server = Server(folder, [version.parent.parent])
    server.command[0] = program
    with server:
        asyncio.run(read_streams(server, 10, rate, 1))
        return asyncio.run(read_streams(server, streams, rate, seconds))
