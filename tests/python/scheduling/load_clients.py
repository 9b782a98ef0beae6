"""A thousand clients in a separate process: `python load_clients.py PROTOCOL HOST:PORT MODEL CLIENTS`.

Each client holds a connection. The process prints `connected` when all are open. Each input line is a number of answers and
starts one round: every client sends one request. The process prints a line of JSON as soon as it has that many answers, and
another after the last answer: the number of answers so far that are a result (`ok`), a refusal (`refused`), or another text.
"""

import asyncio
import collections
import json
import sys

import grpc

from harness.waiting import DEADLINE_S
from harness.wire import grpc_infer, grpc_tensor

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


async def one_round(clients: list, first: int):
    """Sends one request of each client; prints the counts of the first answers, and then of all."""
    counts = collections.Counter()
    for answer in asyncio.as_completed([client.ask() for client in clients], timeout=2 * DEADLINE_S):
        counts[await answer] += 1
        if counts.total() in (first, len(clients)):
            print(json.dumps(counts), flush=True)


async def main(protocol: str, address: str, model: str, count: str):
    """Connects all clients, prints `connected`, and runs rounds until the end of its input."""
    kind = {"http": HttpClient, "grpc": GrpcClient}[protocol]
    clients = [kind(address, model) for _ in range(int(count))]
    for start in range(0, len(clients), 50):
        await asyncio.gather(*(client.open() for client in clients[start : start + 50]))
    print("connected", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await one_round(clients, int(line))
    await asyncio.gather(*(client.close() for client in clients))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
