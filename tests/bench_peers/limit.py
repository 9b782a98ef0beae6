"""The limit of every server: ONNX Runtime in a loop in one process.

    python limit.py SECONDS

Prints a JSON object with the rows per second for each batch size. The environment variable `BENCH_MODEL` describes the model.
"""

import json
import sys
import time

import numpy as np
from models import MAX_BATCH_SIZE
from session import Session

SIZES = (1, 8, 16, MAX_BATCH_SIZE)


def rows_per_second(session: Session, size: int, seconds: float) -> float:
    """Returns the rows per second in batches of `size`."""
    random = np.random.default_rng(3)
    rows = random.integers(0, 17, (size, *session.shape)).astype(session.type)
    session.run(rows)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        session.run(rows)
        count += size
    return count / (time.perf_counter() - begun)


if __name__ == "__main__":
    opened = Session()
    print(json.dumps({size: rows_per_second(opened, size, float(sys.argv[1])) for size in SIZES}))
