#!/usr/bin/env python3
"""Classifies all held-out images with a server and measures the accuracy. Requires only numpy.

    python3 examples/frameworks/ask.py digits_sklearn [digits_xgboost ...]
    python3 examples/frameworks/ask.py --server target/release/pharos --models FOLDER MODEL ...   # starts a server

The first output of the model contains the digit, or a score for each digit; see the configurations.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

PICTURES = Path(__file__).resolve().parent.parent / "digits_held_out.npz"
BATCH = 60


def fetch(url: str, body=None) -> dict:
    """Sends a request and returns the JSON response."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as response:
        return json.loads(response.read() or b"{}")


def digits_of(url: str, model: str, pictures: np.ndarray) -> np.ndarray:
    """Returns the digits in images FP32 [n, 64]."""
    of = fetch(f"{url}/v2/models/{model}")
    entry, wanted = of["inputs"][0], of["outputs"][0]
    batch = min(BATCH, fetch(f"{url}/v2/models/{model}/config")["max_batch_size"] or BATCH)
    found = []
    for begin in range(0, len(pictures), batch):
        rows = pictures[begin : begin + batch]
        tensor = {"name": entry["name"], "datatype": "FP32", "shape": list(rows.shape), "data": rows.ravel().tolist()}
        answer = fetch(f"{url}/v2/models/{model}/infer", {"inputs": [tensor], "outputs": [{"name": wanted["name"]}]})
        output = answer["outputs"][0]
        values = np.array(output["data"]).reshape(len(rows), -1)
        found.append(values[:, 0] if values.shape[1] == 1 else values.argmax(axis=1))
    return np.concatenate(found)


def start(server: str, models: Path, python: str):
    """Starts a server of these models on free ports: returns the process and its HTTP address."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    command = [server, f"--model-repository={models}", f"--python={python}"]
    for name, port in zip(("http", "grpc", "metrics"), ports):
        command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
    return subprocess.Popen(command), f"http://127.0.0.1:{ports[0]}"


def wait_until_ready(url: str, process, deadline_s: float = 120):
    """Waits until the server is ready; raises `RuntimeError` if it exits or times out."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/v2/health/ready", timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not become ready; run make_models.py first if the models are missing")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Classifies the held-out images with a server.")
    parser.add_argument("names", nargs="+", metavar="MODEL", help="the models to test")
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: %(default)s)")
    parser.add_argument("--server", help="an executable to start instead of using a running server")
    parser.add_argument("--models", type=Path, help="the model repository of that server")
    parser.add_argument("--python", default=sys.executable, help="the interpreter for its models (default: this one)")
    options = parser.parse_args()
    process, url = start(options.server, options.models, options.python) if options.server else (None, options.url)
    held_out = np.load(PICTURES)
    pictures = held_out["images"].reshape(-1, 64).astype(np.float32)
    try:
        if process:
            wait_until_ready(url, process)
        for name in options.names:
            right = np.mean(digits_of(url, name, pictures) == held_out["labels"])
            print(f"{name}: {right:.1%} accuracy on {len(pictures)} held-out images")
    finally:
        if process:
            process.terminate()
            process.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
