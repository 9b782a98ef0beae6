"""The reference loop for measurements of a server: the same blocks in plain Python on the same device, inputs in pinned memory.

    python plain_loop.py DEVICE TOKENS HIDDEN

Reads requests as lines of JSON from standard input and answers each with a line. `{"do": "passes", "step_s": 0.03}` finds and
keeps the number of passes that take this time, `{"do": "run", "seconds": 5}` measures the steps per second, `{"do": "answer"}`
returns the output, `{"do": "end"}` ends the loop. The input is that of `given`.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np


def given(tokens: int, hidden: int) -> np.ndarray:
    """Returns the model's input."""
    return np.random.default_rng(11).standard_normal((tokens, hidden)).astype(np.float16)


def steps(blocks, source, seconds: float) -> float:
    """Returns the steps per second; each begins with the copy to the device and ends with its output on the CPU."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        blocks(source)
        count += 1
    return count / (time.perf_counter() - begun)


def passes(blocks, source, step_s: float) -> int:
    """Returns the number of passes that take `step_s`."""
    blocks.passes = 4
    steps(blocks, source, 1)
    few = 1 / steps(blocks, source, 1)
    blocks.passes = 24
    steps(blocks, source, 0.5)
    each = (1 / steps(blocks, source, 1) - few) / 20
    return max(round((step_s - few) / max(each, 1e-9)) + 4, 1)


def main():
    """Runs the command line."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu_models"))
    from blocks import Blocks

    device, tokens, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    source = torch.from_numpy(given(tokens, hidden))
    source = source if device == "cpu" else source.pin_memory()
    blocks = Blocks(device, tokens, hidden, 2)
    for line in sys.stdin:
        request = json.loads(line)
        answer = None
        if request["do"] == "end":
            return
        if request["do"] == "passes":
            answer = blocks.passes = passes(blocks, source, request["step_s"])
        elif request["do"] == "run":
            answer = steps(blocks, source, request["seconds"])
        elif request["do"] == "answer":
            answer = blocks(source).tolist()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
