"""LitServe with dynamic batching.

    python litserve_server.py PORT

Listens on loopback. `POST /predict` takes `{"row": [...]}` and returns `{"output": [...]}`.
"""

import os
import sys

import litserve
from models import MAX_BATCH_SIZE
from session import PROCESSES, Session, wait_s

API_SERVERS = 2
"""Two web servers answer more requests of small models than one."""


class Classifier(litserve.LitAPI):
    """The model behind LitServe's interface."""

    def setup(self, device):
        """Loads the model in the inference process."""
        self.session = Session()

    def decode_request(self, request):
        """Returns the input of a request; LitServe stacks those of a batch."""
        return self.session.row(request["row"])

    def predict(self, batch):
        """Runs a batch."""
        return self.session.run(batch)

    def encode_response(self, output):
        """Returns the response of one request."""
        return {"output": output.tolist()}


if __name__ == "__main__":
    api = Classifier(max_batch_size=MAX_BATCH_SIZE, batch_timeout=wait_s())
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=int(os.environ[PROCESSES]), fast_queue=True)
    general = {"num_api_servers": API_SERVERS, "generate_client_file": False, "log_level": "warning", "access_log": False}
    server.run(host="127.0.0.1", port=int(sys.argv[1]), **general)
