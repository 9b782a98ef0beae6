#!/usr/bin/env python3
"""Downloads the speech model and a recording, and converts the model for serving.

python3 examples/speech/fetch.py                 # into examples/speech
python3 examples/speech/fetch.py --into FOLDER

Both are in the source package of `silero-vad` on PyPI (29 MB, MIT licence, (c) Silero Team), which pip downloads and checks
against the hash below: the voice activity detector Silero VAD, 2.3 MB of ONNX, and a minute of speech from its tests. No code
of the package is executed except its packaging metadata, which pip reads.

The model has the inputs `input` [n, 64 + 512] (the last 64 samples of the previous chunk, then a chunk), `state` [2, n, 128]
and the sampling rate, and the outputs `output` [n, 1] and `stateN` [2, n, 128]. In states stored by the server, the batch is
the first dimension, so that each row is a stream. A few added operations convert the tensors without changing any value:

    AUDIO [n, 512], CONTEXT [n, 64]  --Concat-->     input          input   --Slice-->      NEXT_CONTEXT [n, 64]
    STATE [n, 2, 128]                --Transpose-->  state          stateN  --Transpose-->  NEXT_STATE [n, 2, 128]
    16000                            --constant-->   sr             output  --Identity-->   PROBABILITY [n, 1]

With these, chunks of many streams are computed in one batch, and clients send only audio.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "silero-vad==6.2.3"
HASH = "sha256:d7a23b09202be4953915cb9173089bb307eed0418a9bd4794d9ec5af07fa1996"
MEMBERS = {
    "silero_vad.onnx": "src/silero_vad/data/silero_vad.onnx",
    "speech.wav": "tests/data/test.wav",
    "LICENSE": "LICENSE",
}
"""The extracted files and their paths in the package."""

RATE = 16000
PIECE = 512
CONTEXT = 64
STATE = [2, 128]

# Field and type numbers of ONNX's `onnx.proto3`.
GRAPH, NODE, INITIALIZER, INPUT, OUTPUT = 7, 1, 5, 11, 12
FLOAT, INT64 = 1, 7


def varint(value: int) -> bytes:
    """Encodes a protobuf varint; negative numbers as 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def field(number: int, value) -> bytes:
    """Encodes a field: a number, or length-prefixed bytes or text."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields(data: bytes):
    """Decodes the fields of a message: yields numbers and values."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        elif key & 7 == 2:
            length = number()
            yield key >> 3, data[at : at + length]
            at += length
        else:
            raise ValueError(f"field {key >> 3} of an ONNX file has wire type {key & 7}")


def node(operator: str, inputs: list, output: str, **lists) -> bytes:
    """Encodes an operation with one output; attributes are numbers or lists of numbers."""
    data = b"".join(field(1, name) for name in inputs) + field(2, output) + field(3, f"around_{output}")
    data += field(4, operator)
    for name, value in lists.items():
        if isinstance(value, int):
            data += field(5, field(1, name) + field(3, value) + field(20, 2))
        else:
            data += field(5, field(1, name) + b"".join(field(8, number) for number in value) + field(20, 7))
    return data


def constant(name: str, values, dims) -> bytes:
    """Encodes a constant of INT64 numbers."""
    data = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
    return b"".join(field(1, dim) for dim in dims) + field(2, INT64) + field(8, name) + field(9, data)


def tensor(name: str, dims: list) -> bytes:
    """Encodes an FP32 input or output; its first dimension is the batch."""
    shape = field(1, field(2, "batch")) + b"".join(field(1, field(1, dim)) for dim in dims)
    return field(1, name) + field(2, field(1, field(1, FLOAT) + field(2, shape)))


def wrapped(model: bytes) -> bytes:
    """Adds the operations shown at the top of this file to the model."""
    parts = list(fields(model))
    graph = list(fields(next(value for number, value in parts if number == GRAPH)))
    before = [
        node("Concat", ["CONTEXT", "AUDIO"], "input", axis=1),
        node("Transpose", ["STATE"], "state", perm=[1, 0, 2]),
    ]
    after = [
        node("Slice", ["input", "around_start", "around_end", "around_axis"], "NEXT_CONTEXT"),
        node("Transpose", ["stateN"], "NEXT_STATE", perm=[1, 0, 2]),
        node("Identity", ["output"], "PROBABILITY"),
    ]
    constants = [
        constant("sr", [RATE], []),
        constant("around_start", [-CONTEXT], [1]),
        constant("around_end", [1 << 62], [1]),
        constant("around_axis", [1], [1]),
    ]
    inputs = [tensor("AUDIO", [PIECE]), tensor("CONTEXT", [CONTEXT]), tensor("STATE", STATE)]
    outputs = [tensor("PROBABILITY", [1]), tensor("NEXT_CONTEXT", [CONTEXT]), tensor("NEXT_STATE", STATE)]
    data = b"".join(field(NODE, item) for item in before)
    data += b"".join(field(number, value) for number, value in graph if number not in (INPUT, OUTPUT))
    for number, items in [(NODE, after), (INITIALIZER, constants), (INPUT, inputs), (OUTPUT, outputs)]:
        data += b"".join(field(number, item) for item in items)
    return b"".join(field(number, data if number == GRAPH else value) for number, value in parts)


def download(folder: Path) -> Path:
    """Downloads the source package with pip; raises `subprocess.CalledProcessError` on failure."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash={HASH}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "silero-vad", "--require-hashes", "--dest", str(folder), "-r", str(wanted)]
    subprocess.run(command, check=True)
    return next(folder.glob("silero_vad-*.tar.gz"))


def fetch(into: Path):
    """Writes the model to `into/models/silero_vad/1`, and the original, the recording and the licence to `into/fetched`. Does
    nothing if the files exist."""
    served, fetched = into / "models/silero_vad/1/model.onnx", into / "fetched"
    if served.exists() and all((fetched / name).exists() for name in MEMBERS):
        return
    fetched.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(download(Path(folder))) as package:
            for name, member in MEMBERS.items():
                root = package.getnames()[0].split("/")[0]
                (fetched / name).write_bytes(package.extractfile(f"{root}/{member}").read())
    served.parent.mkdir(parents=True, exist_ok=True)
    served.write_bytes(wrapped((fetched / "silero_vad.onnx").read_bytes()))


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Downloads the speech model and a recording.")
    parser.add_argument("--into", type=Path, default=Path(__file__).resolve().parent, help="the output folder")
    options = parser.parse_args()
    try:
        fetch(options.into)
    except subprocess.CalledProcessError as error:
        print(f"cannot download {PACKAGE}: pip exited with {error.returncode}", file=sys.stderr)
        return 1
    print(f"wrote the model to {options.into / 'models/silero_vad'} and the recording to {options.into / 'fetched'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
