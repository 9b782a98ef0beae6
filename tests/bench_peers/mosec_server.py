"""mosec with dynamic batching.

    python mosec_server.py --address 127.0.0.1 --port PORT --path SOCKET

`POST /inference` takes `{"row": [...]}` and returns `{"output": [...]}`.
"""

import os

import mosec
import numpy as np
from models import MAX_BATCH_SIZE
from session import PROCESSES, Session

MAX_WAIT_MS = 1
"""The smallest value; zero means mosec's default, 10 ms."""


class Classifier(mosec.Worker):
    """The model behind mosec's interface."""

    def __init__(self):
        super().__init__()
        self.session = Session()

    def forward(self, data: list) -> list:
        """Runs a batch."""
        rows = np.stack([self.session.row(request["row"]) for request in data])
        return [{"output": row.tolist()} for row in self.session.run(rows)]


if __name__ == "__main__":
    server = mosec.Server()
    server.append_worker(Classifier, num=int(os.environ[PROCESSES]), max_batch_size=MAX_BATCH_SIZE, max_wait_time=MAX_WAIT_MS)
    server.run()
