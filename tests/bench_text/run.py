"""Texts per second of a served model that makes embeddings, beside the tokenizer and ONNX Runtime in a loop.

    python tests/bench_text/run.py --server target/release/pharos --model FOLDER [--rounds 3] [--clients 1,8,32] [--peer NAME=URL ...]

FOLDER is a model as Hugging Face lays it out (`make.py` makes one). Rounds alternate: the loop, then the server with each number of
clients, so that a noisy machine affects both. Each client sends one text at a time, of 10 to 500 words. The loop has all texts at
once: sorted by length, and computed in batches of the most tokens that are fastest. A peer is a server that was started before, with
OpenAI's path.
"""

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

TEXTS = 192
THREADS = len(os.sched_getaffinity(0))


def texts(folder: Path) -> list:
    """Returns texts of 10 to 500 words, most of them short."""
    vocabulary = [word for word in json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] if word.isalpha()]
    source = random.Random(11)
    lengths = [round(10 * 50 ** (source.random() ** 1.5)) for _ in range(TEXTS)]
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


def ask(address: str, model: str, all_texts: list, clients: int) -> tuple:
    """Sends each text once, from this many clients; returns texts per second and the median latency in milliseconds."""
    waiting, latencies = list(all_texts), []

    def client():
        connection = http.client.HTTPConnection(address, timeout=300)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while waiting:
            try:
                text = waiting.pop()
            except IndexError:
                return
            body = json.dumps({"model": model, "input": text, "encoding_format": "base64"})
            began = time.perf_counter()
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise SystemExit(f"{address}: {response.status} {answer[:500]}")
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return len(all_texts) / (time.perf_counter() - began), 1000 * statistics.median(latencies)


def started(server: str, folder: Path, log: Path, config: str):
    """Starts the server; returns its process and the address of its HTTP port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    models = Path(tempfile.mkdtemp())
    (models / "text").mkdir()
    (models / "text/1").symlink_to(folder.resolve())
    if config:
        (models / "text/config.pbtxt").write_text(config)
    ports = ["--grpc-port=0", "--metrics-port=0", f"--http-port={port}"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with open(log, "wb") as output:
        process = subprocess.Popen([server, "--model-repository", str(models), *ports], stdout=output, stderr=output, env=environment)
    address = f"127.0.0.1:{port}"
    for _ in range(600):
        try:
            connection = http.client.HTTPConnection(address)
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return process, address
        except OSError:
            pass
        if process.poll() is not None:
            raise SystemExit(f"the server ended: {log.read_text()[-2000:]}")
        time.sleep(0.1)
    raise SystemExit("the server is not ready after 60 s")


def main():
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--config", default="", help="the text of a config.pbtxt")
    parser.add_argument("--peer", action="append", default=[], help="NAME=URL of a server with OpenAI's path")
    arguments = parser.parse_args()
    clients = [int(count) for count in arguments.clients.split(",")]
    all_texts, loop = texts(arguments.model), Loop(arguments.model)
    process, address = started(arguments.server, arguments.model, Path(tempfile.mkdtemp()) / "log", arguments.config)
    servers = {"pharos": (address, "text")}
    for peer in arguments.peer:
        name, url = peer.split("=", 1)
        servers[name] = (urlparse(url).netloc, "text")
    sizes = (256, 512, 1024, 2048)
    rows = {}
    try:
        for number in range(arguments.rounds + 1):
            found = {"loop, one text": loop.one_by_one(all_texts)}
            best = {size: loop.together(all_texts, size) for size in sizes}
            found["loop, best batch"] = max(best.values())
            for name, (place, model) in servers.items():
                for count in clients:
                    rate, latency = ask(place, model, all_texts, count)
                    found[f"{name}, {count} clients"] = rate
                    found[f"{name}, {count} clients, median ms"] = latency
            print(number, {size: round(rate, 1) for size, rate in best.items()}, {key: round(value, 2) for key, value in found.items()}, flush=True)
            # The first round warms caches.
            for key, value in found.items() if number else ():
                rows.setdefault(key, []).append(value)
    finally:
        process.terminate()
        process.wait(30)
    print("\n| row | texts/s or ms | spread |\n|---|---|---|")
    for key, values in rows.items():
        print(f"| {key} | {statistics.median(values):.1f} | {min(values):.1f} to {max(values):.1f} |")
    for name in servers:
        for count in clients:
            base = "loop, one text" if count == 1 else "loop, best batch"
            shares = [own / limit for own, limit in zip(rows[f"{name}, {count} clients"], rows[base])]
            print(f"{name}, {count} clients: {statistics.median(shares):.3f} of {base} ({min(shares):.3f} to {max(shares):.3f})")


if __name__ == "__main__":
    main()
