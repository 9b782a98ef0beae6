"""Follows the instructions of `MODEL.json`:

    "answer"   for auto-complete: fields that are added to the configuration, or a mapping from versions to such fields
    "write"    the whole answer of auto-complete, as text
    "print"    a line for standard output, "complain" one for standard error
    "sleep"    seconds that auto-complete waits before its answer
    "exit"     the exit status of auto-complete, which then writes no answer
    "refuse"   the reason with which the load of the model fails; "die" is an exit status at which the worker ends instead
    "pinned"   the number of bytes that the worker reports as registered with the driver of its GPU

Each start appends a line with prefix, executable, arguments and environment to `MODEL.runs`.
"""

import json
import mmap
import os
import struct
import sys
import time

from pharos_worker import FOLDER

KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PHAROS_PYTHON_BACKEND")
SOCKET, FRAMES = 3, 9

# The layout of src/wire/ring.rs: the ring of frames to the worker, then the one to the frontend.
CAPACITY = 64 << 10
HEAD, TAIL, CONSUMER_SLEEPS, PRODUCER_SLEEPS, DATA = 0, 64, 128, 192, 256
TO_FRONTEND = DATA + CAPACITY
RINGS = mmap.mmap(FRAMES, 2 * TO_FRONTEND) if sys.argv[1] != "--auto-complete" else None


def word(at):
    return struct.unpack_from("<Q", RINGS, at)[0]


def set_word(at, value):
    struct.pack_into("<Q", RINGS, at, value)



def instructions(model):
    path = FOLDER / f"{model}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def record(model, **more):
    seen = {"prefix": sys.prefix, "executable": sys.executable, "arguments": sys.argv[1:]}
    seen["environment"] = {name: os.environ[name] for name in KEPT if name in os.environ}
    with open(FOLDER / f"{model}.runs", "a") as file:
        file.write(json.dumps(seen | more) + "\n")


def complete(out):
    question = json.load(sys.stdin)
    config = question["config"]
    todo = instructions(config["name"])
    record(config["name"], question=question)
    print(todo.get("print", "completing"), flush=True)
    print(todo.get("complain", "no complaints"), file=sys.stderr, flush=True)
    time.sleep(todo.get("sleep", 0))
    if "exit" in todo:
        sys.exit(todo["exit"])
    answer = todo.get("answer", {})
    answer = answer.get(str(question["version"]), answer)
    with open(out, "w") as file:
        file.write(todo.get("write") or json.dumps({"config": config | answer}))


def text(string):
    return struct.pack("<I", len(string)) + string.encode()


def send(payload):
    """Writes a frame, which must be shorter than the ring, and wakes the frontend."""
    frame = struct.pack("<I", len(payload)) + payload
    head = word(TO_FRONTEND + HEAD)
    for at, byte in enumerate(frame, head):
        RINGS[TO_FRONTEND + DATA + at % CAPACITY] = byte
    set_word(TO_FRONTEND + HEAD, head + len(frame))
    os.write(SOCKET, b"\1")


def receive():
    """Returns the payload of the next frame. Ends the process when the frontend closes the connection."""

    def exactly(count):
        data = bytearray()
        while len(data) < count:
            head, tail = word(HEAD), word(TAIL)
            if head == tail:
                set_word(CONSUMER_SLEEPS, 1)
                if word(HEAD) == tail and not os.read(SOCKET, 64):
                    sys.exit(0)
                set_word(CONSUMER_SLEEPS, 0)
                continue
            taken = min(head - tail, count - len(data))
            data += bytes(RINGS[DATA + at % CAPACITY] for at in range(tail, tail + taken))
            set_word(TAIL, tail + taken)
            if word(PRODUCER_SLEEPS):
                set_word(PRODUCER_SLEEPS, 0)
                os.write(SOCKET, b"\1")
        return bytes(data)

    return exactly(*struct.unpack("<I", exactly(4)))


def serve(instance):
    load = receive()
    # The first 5 bytes are the kind of the frame and the version of the protocol. The length and the name of the model follow.
    (length,) = struct.unpack_from("<I", load, 5)
    model = load[9 : 9 + length].decode()
    todo = instructions(model)
    record(model, instance=instance)
    if "die" in todo:
        sys.exit(todo["die"])
    if "refuse" in todo:
        send(b"\x02" + text(todo["refuse"]))
    else:
        send(b"\x01" + text("stand-in") + struct.pack("<Q??Q", 0, False, False, todo.get("pinned", 0)))
    while True:
        receive()


if __name__ == "__main__":
    if sys.argv[1] == "--auto-complete":
        complete(sys.argv[2])
    else:
        serve(sys.argv[1])
