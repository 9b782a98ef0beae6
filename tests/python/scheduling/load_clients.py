"""A thousand clients in a separate process: `python load_clients.py PROTOCOL HOST:PORT MODEL CLIENTS`.

Each client holds a connection. Each input line is a number of seconds and starts one round: every client sends requests
continuously, and pauses for about a second after a refusal. After the last answer of a round the process prints a line of
JSON: the number of requests that were sent, answered with a result, refused, and of each other answer.
"""

import asyncio
import collections
import json
import random
import sys
import time

import grpc

from harness.waiting import DEADLINE_S, pause_as_async_client
from harness.wire import grpc_infer, grpc_tensor

PAUSE_S = 1.0
REFUSED = "Exceeds maximum queue size"


class HttpClient:
    """A client with one keep-alive connection."""

    def __init__(self, address: str, model: str):
        self.host, self.port = address.split(":")
        body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body

    async def open(self):
        """Connects."""
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)

    async def ask(self) -> str:
        """Sends one request; returns `ok`, `refused`, or the text of another answer."""
        self.writer.write(self.request)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await self.reader.readexactly(length)
        status = int(head.split()[1])
        if status == 200:
            return "ok"
        return "refused" if status == 503 and REFUSED in body.decode() else f"{status} {body.decode()[:200]}"

    async def close(self):
        """Disconnects."""
        self.writer.close()


class GrpcClient:
    """A client with a separate channel and connection."""

    def __init__(self, address: str, model: str):
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        message = grpc_infer("", model, [grpc_tensor("INPUT0", "FP32", [1, 2], fp32_contents=[1, 2])]).message
        self.request = message.SerializeToString()
        self.call = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", bytes, bytes)

    async def open(self):
        """Connects."""
        await self.channel.channel_ready()

    async def ask(self) -> str:
        """Sends one request; returns `ok`, `refused`, or the text of another answer."""
        try:
            await self.call(self.request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            known = error.code() == grpc.StatusCode.UNAVAILABLE and REFUSED in error.details()
            return "refused" if known else f"{error.code().name} {error.details()[:200]}"
        return "ok"

    async def close(self):
        """Disconnects."""
        await self.channel.close()


async def one_round(client, end: float, counts):
    """Runs one round of one client."""
    await pause_as_async_client(random.uniform(0, PAUSE_S / 4))
    while time.monotonic() < end:
        counts["sent"] += 1
        answer = await asyncio.wait_for(client.ask(), DEADLINE_S)
        counts[answer] += 1
        if answer != "ok":
            await pause_as_async_client(random.uniform(0.8, 1.2) * PAUSE_S)


async def main(protocol: str, address: str, model: str, count: str):
    """Connects all clients, prints `connected`, and runs rounds until the end of its input."""
    kind = {"http": HttpClient, "grpc": GrpcClient}[protocol]
    clients = [kind(address, model) for _ in range(int(count))]
    for start in range(0, len(clients), 50):
        await asyncio.gather(*(client.open() for client in clients[start : start + 50]))
    print("connected", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        counts, end = collections.Counter(), time.monotonic() + float(line)
        await asyncio.gather(*(one_round(client, end, counts) for client in clients))
        print(json.dumps(counts), flush=True)
    await asyncio.gather(*(client.close() for client in clients))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
