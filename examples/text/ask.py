#!/usr/bin/env python3
"""Sorts texts by subject with the models of this example. Needs no packages.

    python3 examples/text/ask.py "my parcel has not arrived" ["the app crashes" ...]
    python3 examples/text/ask.py --model text_calls "my parcel has not arrived"
    python3 examples/text/ask.py --server target/release/pharos --models examples/text/models TEXT ...   # starts a server
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request


def subjects(url: str, model: str, texts: list) -> list:
    """Returns the subject of each text."""
    if model == "text_classifier":
        # The server returns the label of the largest probability, as "PROBABILITY:INDEX:LABEL".
        output = {"name": "probabilities", "parameters": {"classification": 1}}
    else:
        output = {"name": "subject"}
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
    body = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/{model}/infer", body, timeout=60) as response:
        found = json.load(response)["outputs"][0]["data"]
    return [text.rsplit(":", 1)[-1] for text in found]


def start(server: str, models: str, python: str):
    """Starts a server of these models on free ports; returns the process and its HTTP address."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    command = [server, f"--model-repository={models}", f"--python={python}"]
    for name, port in zip(("http", "grpc", "metrics"), ports):
        command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
    # The server searches for ONNX Runtime in the packages of the first `python3` on the PATH.
    path = os.pathsep.join([str(pathlib.Path(python).parent), os.environ.get("PATH", os.defpath)])
    return subprocess.Popen(command, env=os.environ | {"PATH": path}), f"http://127.0.0.1:{ports[0]}"


def wait_until_ready(url: str, process, deadline_s: float = 120):
    """Waits until the server is ready; raises `RuntimeError` if it exits or does not become ready in time."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/v2/health/ready", timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not become ready; run make_models.py first if the models are missing")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Sorts texts by subject.")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--model", default="text_classifier", choices=("text_classifier", "text_calls"))
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: %(default)s)")
    parser.add_argument("--server", help="an executable to start instead of using a running server")
    parser.add_argument("--models", help="the model repository of that server")
    parser.add_argument("--python", default=sys.executable, help="the interpreter for its models (default: this one)")
    options = parser.parse_args()
    process, url = start(options.server, options.models, options.python) if options.server else (None, options.url)
    try:
        if process:
            wait_until_ready(url, process)
        for text, subject in zip(options.texts, subjects(url, options.model, options.texts)):
            print(f"{subject}: {text}")
    finally:
        if process:
            process.terminate()
            process.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
