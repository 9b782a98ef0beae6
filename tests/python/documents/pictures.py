"""Takes the pictures of the book from a running server: `PHAROS_BIN=... PYTHONPATH=tests/python python -m documents.pictures [SECONDS]`.

It starts a server of the example models, sends requests of several clients for a minute, opens the live page in a headless
Chromium and writes `docs/src/pictures/`. With a Prometheus and a Grafana (`harness/grafana.py`), it also writes a picture of a
dashboard. Look at the pictures before you commit them.
"""

import contextlib
import random
import struct
import sys
import tempfile
import threading
import zlib
from pathlib import Path

import numpy as np

from harness import grafana, prometheus
from harness.browser import Browser
from harness.inference import simple
from harness.server import EXAMPLES, ROOT, Server
from harness.waiting import eventually, run_for

PICTURES = ROOT / "docs/src/pictures"
SECONDS = 60
UNKNOWN = "nothere"
"""A model that is not there: the page shows its refused requests."""
LARGEST = 150_000
"""Bytes of a picture at most."""


def digits(rows: int) -> dict:
    """A request for `digits` with pictures of random pixels."""
    pixels = [float(random.randrange(17)) for _ in range(64 * rows)]
    return {"inputs": [{"name": "image", "datatype": "FP32", "shape": [rows, 8, 8], "data": pixels}]}


def scan() -> dict:
    """A request for `digits_pipeline`."""
    pixels = [random.randrange(256) for _ in range(64 * 64)]
    return {"inputs": [{"name": "picture", "datatype": "UINT8", "shape": [1, 64, 64], "data": pixels}]}


def send(server: Server, ended: threading.Event, model: str, request, pause_s: float):
    """Sends requests, with random pauses around `pause_s`."""
    while not ended.wait(random.expovariate(1 / pause_s)):
        status, answer = server.infer(model, request())
        assert status == 200 or model == UNKNOWN, answer


def pixels_of(data: bytes) -> np.ndarray:
    """The pixels of a PNG of 8 bits a channel that is not interlaced (https://www.w3.org/TR/png-3/): height, width, RGB."""
    at, body = 8, b""
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, *_, interlaced = struct.unpack(">IIBBBBB", content)
        body += content if kind == b"IDAT" else b""
        at += 12 + length
    assert depth == 8 and colour in (2, 6) and not interlaced
    channels = 3 if colour == 2 else 4
    lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width * channels)
    above, rows = [[0] * channels] * width, []
    for kind, *line in lines.tolist():
        left, corner, row = [0] * channels, [0] * channels, []
        for x in range(width):
            pixel = line[x * channels : (x + 1) * channels]
            if kind:
                pixel = [(v + predicted(kind, a, b, c)) & 255 for v, a, b, c in zip(pixel, left, above[x], corner)]
            left, corner = pixel, above[x]
            row.append(pixel)
        above = row
        rows.append(row)
    return np.array(rows, np.uint8)[:, :, :3]


def predicted(kind: int, left: int, above: int, corner: int) -> int:
    """What a filter of PNG predicts for a byte: 1 Sub, 2 Up, 3 Average, 4 Paeth."""
    if kind < 4:
        return (left, above, (left + above) // 2)[kind - 1]
    near = left + above - corner
    return min((abs(near - left), 0, left), (abs(near - above), 1, above), (abs(near - corner), 2, corner))[2]


def with_palette(data: bytes) -> bytes:
    """The picture with its 256 most frequent colours, which is less than half as large."""
    pixels = pixels_of(data)
    height, width, _ = pixels.shape
    colours, which, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    kept = np.sort(np.argsort(counts)[-256:])
    distances = (colours[:, None, :].astype(int) - colours[None, kept, :].astype(int)) ** 2
    indices = distances.sum(axis=2).argmin(axis=1)[which].astype(np.uint8).reshape(height, width)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), indices], axis=1).tobytes()
    parts = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0), b"PLTE": colours[kept].tobytes()}
    parts |= {b"IDAT": zlib.compress(lines, 9), b"IEND": b""}
    written = [struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in parts.items()]
    return data[:8] + b"".join(written)


def dashboard(folder: Path, source: str, minutes: float, to: Path):
    """Writes the picture of the dashboard `Server overview` in Grafana, with the data of a Prometheus."""
    with grafana.Grafana(folder, source) as shown, Browser(folder / "grafana-profile", width=1400, height=1000) as page:
        page.open(shown.url("pharos-overview", minutes))
        # Panels are drawn when their data has arrived.
        eventually("panels are drawn", lambda: page.ask("document.querySelectorAll('canvas, svg').length") > 3)
        page.wait(5)
        page.picture(to)


def main(seconds: float):
    """Writes every picture."""
    PICTURES.mkdir(exist_ok=True)
    ended = threading.Event()
    clients = [("digits", lambda: digits(random.choice((1, 1, 2, 4))), 0.03)] * 4
    clients += [("simple", simple, 0.05)] * 2 + [("digits_pipeline", scan, 0.2), (UNKNOWN, simple, 5)]
    missing = grafana.missing() or prometheus.missing()
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        server = running.enter_context(Server(Path(folder), [EXAMPLES]))
        scraping = None if missing else running.enter_context(prometheus.Prometheus(Path(folder), server.metrics))
        threads = [threading.Thread(target=send, args=(server, ended, *client)) for client in clients]
        for thread in threads:
            thread.start()
        try:
            with Browser(Path(folder) / "profile", width=1400, height=830) as page:
                page.open(f"http://{server.metrics}/dashboard")
                run_for("the page collects samples of the load", seconds)
                page.picture(PICTURES / "live-page.png")
            if scraping:
                dashboard(Path(folder), scraping.address, seconds / 60, PICTURES / "grafana-overview.png")
            else:
                print(f"no picture of Grafana: {missing}")
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    for picture in PICTURES.glob("*.png"):
        picture.write_bytes(with_palette(picture.read_bytes()))
        size = picture.stat().st_size
        assert size <= LARGEST, f"{picture} has {size} bytes, at most {LARGEST} are allowed"
        print(picture.relative_to(ROOT), size)


if __name__ == "__main__":
    main(float(sys.argv[1]) if sys.argv[1:] else SECONDS)
