"""A handler on `BaseHandler` that loads what the archive has: a script, or a class with its weights."""

import json

import torch
from ts.torch_handler.base_handler import BaseHandler


class TinyHandler(BaseHandler):
    """Numbers in, numbers out."""

    def preprocess(self, data):
        """A row for each number of the body."""
        body = data[0].get("body", data[0].get("data"))
        numbers = body if isinstance(body, list) else json.loads(body)
        return torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1).to(self.device)

    def postprocess(self, data):
        """One answer with all numbers; a tensor when there are three of them."""
        if data.shape[0] == 3:
            return [data]
        return [[round(number, 3) for number in data.reshape(-1).tolist()]]
