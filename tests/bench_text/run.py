"""Texts per second of a served model that makes embeddings, beside other servers, and the tokenizer and ONNX Runtime in a loop.

    python tests/bench_text/run.py --server target/release/pharos --model FOLDER [--rounds 3] [--clients 1,8,32]
      [--peers fastapi,infinity,mlserver] [--peer NAME=URL ...]

FOLDER is a model as Hugging Face lays it out (`make.py` makes one). Each round measures the loop, then each server with each number of
clients, so that a noisy machine affects all. A client sends one text at a time, of 10 to 500 words, and leaves answers unread as bytes.
The loop has all texts at once: sorted by length, and computed in batches of the most tokens that are fastest. All servers run from the
beginning to the end; a peer is left out if its environment is missing (`environments` creates them). Vectors are compared with the loop's.
"""

import argparse
import http.client
import json
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import onnxruntime
from servers import PEERS, THREADS, Given, Pharos, Server
from tokenizers import Tokenizer

SIZES = (256, 512, 1024, 2048)
"""The most tokens of a batch of the loop."""


def texts(folder: Path, count: int) -> list:
    """Returns texts of 10 to 500 words, most of them short."""
    vocabulary = [word for word in json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] if word.isalpha()]
    source = random.Random(11)
    lengths = [round(10 * 50 ** (source.random() ** 1.5)) for _ in range(count)]
    return [" ".join(source.choices(vocabulary, k=length)) for length in lengths]


class Loop:
    """The tokenizer and ONNX Runtime, without a server."""

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(512)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])

    def run(self, encodings: list):
        """Computes texts together; returns their vectors."""
        length = max(len(one.ids) for one in encodings)
        ids, mask = np.zeros((2, len(encodings), length), np.int64)
        for row, one in enumerate(encodings):
            ids[row, : len(one.ids)] = one.ids
            mask[row, : len(one.ids)] = 1
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = self.session.run(["last_hidden_state"], {one.name: feeds[one.name] for one in self.session.get_inputs()})[0]
        weights = mask[:, :, None].astype(np.float32)
        vectors = (hidden * weights).sum(1) / weights.sum(1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def one_by_one(self, all_texts: list) -> float:
        """Returns the texts per second of one text at a time."""
        began = time.perf_counter()
        for text in all_texts:
            self.run([self.tokenizer.encode(text)])
        return len(all_texts) / (time.perf_counter() - began)

    def together(self, all_texts: list, most: int) -> float:
        """Returns the texts per second of batches with this many tokens at most."""
        began = time.perf_counter()
        encodings = sorted(self.tokenizer.encode_batch(all_texts), key=lambda one: len(one.ids))
        batch = []
        for one in encodings:
            if batch and len(one.ids) * (len(batch) + 1) > most:
                self.run(batch)
                batch = []
            batch.append(one)
        self.run(batch)
        return len(all_texts) / (time.perf_counter() - began)


def ask(server: Server, all_texts: list, clients: int) -> tuple:
    """Sends each text once, from this many clients; returns texts per second and the median latency in milliseconds."""
    waiting, latencies, failed = list(all_texts), [], []

    def client():
        connection = http.client.HTTPConnection(server.address, timeout=300)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while waiting and not failed:
            try:
                text = waiting.pop()
            except IndexError:
                return
            body = server.body(text)
            began = time.perf_counter()
            connection.request("POST", server.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                failed.append(f"{server.name}: {response.status} {answer[:500]}")
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    passed = time.perf_counter() - began
    if failed or len(latencies) != len(all_texts):
        raise SystemExit(failed[0] if failed else f"{server.name}: {len(latencies)} of {len(all_texts)} texts were answered")
    return len(all_texts) / passed, 1000 * statistics.median(latencies)


def compare(server: Server, loop: Loop, text: str):
    """Ends the run if a server's vector of a text is another than the loop's."""
    connection = http.client.HTTPConnection(server.address, timeout=300)
    connection.request("POST", server.path, server.body(text), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"{server.name}: {response.status} {answer[:500]}")
    cosine = float(np.ravel(server.vector(answer)) @ loop.run([loop.tokenizer.encode(text)])[0])
    if not abs(cosine - 1) < 1e-3:
        raise SystemExit(f"{server.name}: the cosine of a vector with that of the loop is {cosine}")


def spread(values: list, digits: int) -> str:
    """Returns the median of values and their range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def print_tables(rows: dict, servers: list, clients: list):
    """Prints the medians and ranges, and the medians and ranges of the ratios of each round."""
    print("\n| the loop | texts/s: median (range) |\n|---|---|")
    for key in ("one text", "best batch"):
        print(f"| {key} | {spread(rows[key], 1)} |")
    print("\n| server | clients | texts/s: median (range) | median latency, ms (range) | of Pharos | of the loop |\n|---|---|---|---|---|---|")
    for name in servers:
        for count in clients:
            rates = rows[name, count, "rate"]
            base = rows["one text" if count == 1 else "best batch"]
            of_pharos, of_loop = ([own / other for own, other in zip(rates, others)] for others in (rows["pharos", count, "rate"], base))
            latencies = spread(rows[name, count, "ms"], 0)
            print(f"| {name} | {count} | {spread(rates, 1)} | {latencies} | {spread(of_pharos, 2)} | {spread(of_loop, 2)} |")


def available(options, folder: Path) -> list:
    """Returns the servers that can be measured here; prints why others cannot."""
    found = [Pharos(options, folder / "pharos")]
    for name in filter(None, options.peers.split(",")):
        server = PEERS[name](options, folder / name)
        missing = server.missing()
        if missing:
            print(f"{name} is left out: {missing}", flush=True)
        else:
            found.append(server)
    given = [peer.split("=", 1) for peer in options.peer]
    return found + [Given(name, urlparse(url).netloc) for name, url in given]


def measure(options, servers: list, loop: Loop, all_texts: list) -> dict:
    """Starts the servers, measures all rounds, and stops the servers; returns the numbers of each row."""
    clients = [int(count) for count in options.clients.split(",")]
    rows = {}
    try:
        for server in servers:
            server.start()
            print(f"{server.name}: {'; '.join(filter(None, (server.version(), server.setup)))}", flush=True)
            for text in (all_texts[0], max(all_texts, key=len)):
                compare(server, loop, text)
        for number in range(options.rounds + 1):
            # The first round warms caches, with fewer texts.
            sent = all_texts if number else all_texts[: len(all_texts) // 4]
            best = {size: loop.together(sent, size) for size in SIZES}
            found = {"one text": loop.one_by_one(sent), "best batch": max(best.values())}
            # The servers take turns at being the first, because the machine's speed changes within a round.
            first = number % len(servers)
            for count in clients:
                for server in servers[first:] + servers[:first]:
                    found[server.name, count, "rate"], found[server.name, count, "ms"] = ask(server, sent, count)
            print(number, {size: round(rate, 1) for size, rate in best.items()}, {key: round(value, 1) for key, value in found.items()}, flush=True)
            for key, value in found.items() if number else ():
                rows.setdefault(key, []).append(value)
    finally:
        for server in servers:
            server.stop()
    return rows


def main():
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, type=Path)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--texts", type=int, default=192, help="number of texts that a row sends (default: %(default)s)")
    parser.add_argument("--config", default="", help="the text of a config.pbtxt")
    parser.add_argument("--peers", default="", help=f"servers to start beside Pharos: {','.join(PEERS)}")
    environments = Path(sys.prefix).parent / "venv-text"
    parser.add_argument("--environments", type=Path, default=environments, help="the peers' environments begin so (default: %(default)s)")
    parser.add_argument("--peer", action="append", default=[], help="NAME=URL of a server with OpenAI's path that was started before")
    options = parser.parse_args()
    unknown = [name for name in filter(None, options.peers.split(",")) if name not in PEERS]
    if unknown:
        parser.error(f"no peers: {', '.join(unknown)}")
    # The default would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    all_texts, loop = texts(options.model, options.texts), Loop(options.model)
    with tempfile.TemporaryDirectory() as folder:
        servers = available(options, Path(folder))
        rows = measure(options, servers, loop, all_texts)
    print_tables(rows, [server.name for server in servers], [int(count) for count in options.clients.split(",")])


if __name__ == "__main__":
    main()
