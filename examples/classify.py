#!/usr/bin/env python3
"""Classifies images of digits with a running server.

pip install 'tritonclient[http,grpc]'
python3 examples/classify.py examples/images/*.pgm
python3 examples/classify.py --grpc examples/images/digit_7.pgm
python3 examples/classify.py --pipeline examples/images/*.pgm
"""

import argparse
import sys
from pathlib import Path

import numpy as np

MODEL = "digits"
PIPELINE = "digits_pipeline"
ENLARGED = 8
SIZE = 8
BRIGHTEST = 16


def read_pgm(path: str) -> np.ndarray:
    """Reads a plain PGM image (P2) as FP32 [8, 8] with values from 0 to 16."""
    lines = (line.partition("#")[0] for line in Path(path).read_text().splitlines())
    words = " ".join(lines).split()
    if not words or words[0] != "P2":
        raise ValueError(f"{path}: not a plain PGM image: expected P2 at the start")
    width, height, brightest, *pixels = (int(word) for word in words[1:])
    if (width, height) != (SIZE, SIZE) or len(pixels) != SIZE * SIZE:
        raise ValueError(f"{path}: image of {width} x {height} with {len(pixels)} pixels; expected {SIZE} x {SIZE}")
    return (np.array(pixels, dtype=np.float32) * (BRIGHTEST / brightest)).reshape(SIZE, SIZE)


def classify(client, module, pictures: np.ndarray):
    """Returns the digits INT64 [n] and the probabilities FP32 [n, 10] of `pictures` FP32 [n, 8, 8]. `module` is the module of
    `client`: `tritonclient.http` or `tritonclient.grpc`."""
    image = module.InferInput("image", list(pictures.shape), "FP32")
    image.set_data_from_numpy(pictures)
    result = client.infer(MODEL, [image])
    return result.as_numpy("label")[:, 0], result.as_numpy("probabilities")


def as_scanned(pictures: np.ndarray) -> np.ndarray:
    """Converts images FP32 [n, 8, 8] to scanned images: UINT8 [n, 64, 64], dark ink on white paper."""
    paper = 255 - np.rint(pictures * (255 / BRIGHTEST)).astype(np.uint8)
    return paper.repeat(ENLARGED, axis=1).repeat(ENLARGED, axis=2)


def classify_scanned(client, module, pictures: np.ndarray):
    """Like [`classify`], with the ensemble, which takes scanned images."""
    scanned = as_scanned(pictures)
    picture = module.InferInput("picture", list(scanned.shape), "UINT8")
    picture.set_data_from_numpy(scanned)
    result = client.infer(PIPELINE, [picture])
    return result.as_numpy("digit")[:, 0], result.as_numpy("probabilities")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Classifies images of digits with a running server.")
    parser.add_argument("pictures", nargs="+", help="plain PGM images (P2) of 8 x 8 pixels, at most 32")
    parser.add_argument("--url", help="host:port of the server (default: localhost:8000, with --grpc localhost:8001)")
    parser.add_argument("--grpc", action="store_true", help="use gRPC instead of HTTP")
    parser.add_argument("--pipeline", action="store_true", help="convert to scanned images and use the ensemble digits_pipeline")
    options = parser.parse_args()
    if options.grpc:
        import tritonclient.grpc as module
    else:
        import tritonclient.http as module
    try:
        pictures = np.stack([read_pgm(path) for path in options.pictures])
    except (OSError, ValueError) as error:
        parser.error(str(error))
    client = module.InferenceServerClient(options.url or ("localhost:8001" if options.grpc else "localhost:8000"))
    ask = classify_scanned if options.pipeline else classify
    labels, probabilities = ask(client, module, pictures)
    for path, label, row in zip(options.pictures, labels, probabilities):
        print(f"{path}: {label} ({row[label]:.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
