"""A TorchServe handler: doubles the numbers of a JSON list on the device that its context names, and returns the device."""

import json

import torch


class Handler:
    def initialize(self, context):
        number = context.system_properties.get("gpu_id")
        on_gpu = torch.cuda.is_available() and number is not None
        self.device = torch.device(f"cuda:{number}" if on_gpu else "cpu")

    def handle(self, data, context):
        return [self.one(row.get("body", row.get("data"))) for row in data]

    def one(self, body):
        numbers = json.loads(bytes(body)) if isinstance(body, (bytes, bytearray)) else body
        numbers = json.loads(numbers) if isinstance(numbers, str) else numbers
        found = 2 * torch.tensor(numbers, device=self.device)
        return json.dumps({"twice": found.cpu().tolist(), "where": str(found.device)})
