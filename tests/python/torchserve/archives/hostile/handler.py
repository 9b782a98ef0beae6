"""Performs actions that a handler must not perform."""

import os
import signal
import sys
import time


def handle(data, context):
    """The body is one word that selects the action."""
    if data is None:
        return None
    what = bytes(data[0]["body"]).decode()
    wrong = {
        "none": None,
        "text": "text",
        "dict": {},
        "short": [],
        "long": ["a", "b"],
        "tuple": ("a",),
        "object": [object()],
        "nan": [float("nan")],
        "nothing": [None],
        "number": [5],
    }
    if what in wrong:
        return wrong[what]
    if what == "raise":
        raise ValueError("hostile")
    if what == "system exit":
        sys.exit(3)
    if what == "exit":
        os._exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(600)
    if what == "flood":
        for line in range(4_000):
            print("flood", line, "x" * 100)
        sys.stdout.write("no end of line")
        sys.stdout.flush()
    if what == "bytes":
        sys.stdout.buffer.write(bytes(range(256)) + b"\n")
        sys.stdout.flush()
    if what == "closed":
        os.close(1)
        os.close(2)
    if what == "stderr":
        print("a line on standard error", file=sys.stderr, flush=True)
    return [what]
