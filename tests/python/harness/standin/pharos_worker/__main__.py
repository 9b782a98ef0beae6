"""What is done: `MODEL.json` has

    "answer"   what is added to the configuration, or a mapping of versions to that: the answer of auto-complete
    "write"    the whole answer, as text
    "print"    a line for standard output, "complain" one for standard error
    "sleep"    seconds before anything else
    "exit"     the status with which auto-complete ends, without an answer
    "refuse"   the reason why the model cannot be loaded, "die" a status with which it ends in place of that
    "pinned"   bytes that it says to have registered with the driver of its GPU

What it was started with is added as a line to `MODEL.runs`.
"""

import json
import os
import struct
import sys
import time

from pharos_worker import FOLDER

KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PHAROS_PYTHON_BACKEND")
SOCKET = 3


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
    frame = struct.pack("<I", len(payload)) + payload
    while frame:
        frame = frame[os.write(SOCKET, frame) :]


def receive():
    def exactly(count):
        data = b""
        while len(data) < count:
            piece = os.read(SOCKET, count - len(data))
            if not piece:
                sys.exit(0)
            data += piece
        return data

    return exactly(*struct.unpack("<I", exactly(4)))


def serve(instance):
    load = receive()
    # The frame's kind and the wire's version, then the model's name.
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
