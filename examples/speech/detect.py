#!/usr/bin/env python3
"""Detects speech in several audio streams at once with a running server, and draws the results.

pip install 'tritonclient[grpc]' onnxruntime
python3 examples/speech/detect.py examples/speech/fetched/speech.wav
python3 examples/speech/detect.py --server target/release/pharos   # starts and stops a server

Each stream is a sequence with an id, a start, an end, and chunks of 32 ms in between. The server stores the state of each
stream. The streams are interleaved chunk by chunk, like calls on a telephone line.
"""

import argparse
import os
import queue
import socket
import subprocess
import sys
import time
import wave
from pathlib import Path

import numpy as np
import tritonclient.grpc

HERE = Path(__file__).resolve().parent
MODEL = "silero_vad"
RATE = 16000
PIECE = 512
SPEECH = 0.5
"""The minimum probability of speech."""


def read_wav(path: Path) -> np.ndarray:
    """Reads samples from -1 to 1, FP32 [samples], from a WAV file with 16 kHz, one channel and 16 bits."""
    with wave.open(str(path)) as sound:
        found = (sound.getframerate(), sound.getnchannels(), sound.getsampwidth())
        if found != (RATE, 1, 2):
            raise ValueError(f"{path}: rate, channels and bytes per sample are {found}; expected {(RATE, 1, 2)}")
        return np.frombuffer(sound.readframes(-1), "<i2").astype(np.float32) / 32768


def cut(sound: np.ndarray, streams: int, seconds: float) -> list:
    """Cuts `streams` streams from evenly spaced positions of `sound`, each FP32 [chunks, 512] of at most `seconds`."""
    length = min(int(seconds * RATE), len(sound)) // PIECE * PIECE
    starts = [(len(sound) - length) * stream // max(streams - 1, 1) for stream in range(streams)]
    return [sound[start : start + length].reshape(-1, PIECE) for start in starts]


def piece(values: np.ndarray) -> tritonclient.grpc.InferInput:
    """Returns a chunk as the model's input."""
    tensor = tritonclient.grpc.InferInput("AUDIO", [1, PIECE], "FP32")
    tensor.set_data_from_numpy(values.reshape(1, PIECE))
    return tensor


def detect(client, streams: list, first_id: int = 1) -> list:
    """Returns the probabilities of speech, FP32 [chunks] for each stream. Sends the streams interleaved over one gRPC stream."""
    answers = queue.SimpleQueue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    sent = 0
    for at in range(max(len(stream) for stream in streams)):
        for number, stream in enumerate(streams):
            if at < len(stream):
                client.async_stream_infer(
                    MODEL,
                    [piece(stream[at])],
                    request_id=f"{number} {at}",
                    sequence_id=first_id + number,
                    sequence_start=at == 0,
                    sequence_end=at == len(stream) - 1,
                )
                sent += 1
    probabilities = [np.zeros(len(stream), np.float32) for stream in streams]
    for _ in range(sent):
        result, error = answers.get(timeout=60)
        if error:
            raise error
        number, at = map(int, result.get_response().id.split())
        probabilities[number][at] = result.as_numpy("PROBABILITY").item()
    client.stop_stream()
    return probabilities


def draw(streams: list, probabilities: list) -> str:
    """Returns an SVG image: for each stream the sound, overlaid with the probability of speech."""
    width, height, gap = 1000, 90, 30
    parts = []
    for number, (stream, chances) in enumerate(zip(streams, probabilities)):
        top = number * (height + gap) + gap
        step = width / max(len(chances), 1)
        peaks = np.abs(stream).max(axis=1) * height / 2
        middle = top + height / 2
        sound = " ".join(f"M{(i + 0.5) * step:.1f} {middle - p:.1f}V{middle + p:.1f}" for i, p in enumerate(peaks))
        line = " ".join(f"{(i + 0.5) * step:.1f},{top + height * (1 - p):.1f}" for i, p in enumerate(chances))
        share = np.mean(chances >= SPEECH)
        text = f"stream {number + 1}: {len(chances) * PIECE / RATE:.1f} s, speech in {share:.0%}"
        parts += [
            f'<rect y="{top}" width="{width}" height="{height}" fill="#f4f4f4"/>',
            f'<path d="{sound}" stroke="#9db4c8" stroke-width="{max(step * 0.8, 0.3):.2f}" fill="none"/>',
            f'<line x1="0" x2="{width}" y1="{middle}" y2="{middle}" stroke="#999" stroke-dasharray="4 4"/>',
            f'<polyline points="{line}" stroke="#c0392b" fill="none"/>',
            f'<text x="0" y="{top - 6}">{text}</text>',
        ]
    size = f'viewBox="0 0 {width} {len(streams) * (height + gap) + gap}"'
    title = "<title>Sound (grey) and probability of speech (red)</title>"
    style = 'font-family="sans-serif" font-size="14"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{title}\n' + "\n".join(parts) + "\n</svg>\n"


def start(program: str, models: Path) -> tuple:
    """Starts a server of these models on free ports: returns the process and its gRPC address. This Python is first on its
    PATH, so that it finds this Python's ONNX Runtime."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    names = zip(["http", "grpc", "metrics"], ports)
    command = [program, f"--model-repository={models}", *(f"--{name}-port={port}" for name, port in names)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return subprocess.Popen(command, env=os.environ | {"PATH": path}), f"127.0.0.1:{ports[1]}"


def wait_until_ready(client, process, deadline_s: float = 60):
    """Waits until the model is ready; raises `RuntimeError` if the server exits or times out."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and (process is None or process.poll() is None):
        try:
            if client.is_model_ready(MODEL):
                return
        except tritonclient.grpc.InferenceServerException:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the model {MODEL} did not become ready; run fetch.py first if it is missing")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Detects speech in audio streams and draws the result.")
    sound = HERE / "fetched/speech.wav"
    parser.add_argument("sound", nargs="?", type=Path, default=sound, help="WAV, 16 kHz, one channel, 16 bits")
    parser.add_argument("--url", default="localhost:8001", help="host:port of the server's gRPC (default: %(default)s)")
    parser.add_argument("--server", help="an executable to start instead of using a running server")
    parser.add_argument("--models", type=Path, default=HERE / "models", help="the model repository of that server")
    parser.add_argument("--streams", type=int, default=4, help="the number of concurrent streams (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="the length of each stream (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("speech.svg"), help="the output file (default: %(default)s)")
    options = parser.parse_args()
    try:
        streams = cut(read_wav(options.sound), options.streams, options.seconds)
    except (OSError, ValueError, wave.Error) as error:
        parser.error(str(error))
    process, url = start(options.server, options.models) if options.server else (None, options.url)
    try:
        with tritonclient.grpc.InferenceServerClient(url) as client:
            wait_until_ready(client, process)
            began = time.monotonic()
            probabilities = detect(client, streams, first_id=time.time_ns() % (1 << 62))
            took = time.monotonic() - began
    finally:
        if process:
            process.terminate()
            process.wait()
    options.plot.write_text(draw(streams, probabilities))
    for number, chances in enumerate(probabilities):
        print(f"stream {number + 1}: {len(chances)} chunks of 32 ms, speech in {np.mean(chances >= SPEECH):.0%}")
    pieces = sum(map(len, streams))
    speed = pieces * PIECE / RATE / took
    print(f"{pieces} chunks in {took:.2f} s, {speed:.0f} times real time; see {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
