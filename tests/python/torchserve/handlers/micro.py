"""A handler with micro-batches."""

from ts.handler_utils.micro_batching import MicroBatching
from ts.torch_handler.base_handler import BaseHandler


class Micro(BaseHandler):
    def initialize(self, context):
        options = context.model_yaml_config["micro_batching"]
        self.handle = MicroBatching(self, options["micro_batch_size"], options["parallelism"])

    def preprocess(self, data):
        return [int(row["body"].decode()) for row in data]

    def inference(self, data):
        if 13 in data:
            raise ValueError("thirteen")
        return [number * 10 for number in data]

    def postprocess(self, data):
        return [f"{number} in {len(data)}" for number in data]
