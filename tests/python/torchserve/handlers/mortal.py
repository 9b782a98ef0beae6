"""Does not start while the file `ill` of its configuration exists, and exits on request."""

import os
import sys
import time


class Mortal:
    def initialize(self, context):
        if os.path.exists(context.model_yaml_config["ill"]):
            raise ValueError("it is ill")

    def handle(self, data, context):
        words = [bytes(row["body"]).decode() for row in data]
        if "die" in words:
            os._exit(3)
        if "print" in words:
            print("from the one")
            print("from the other", file=sys.stderr)
        time.sleep(max([float(word.partition(" ")[2]) for word in words if word.startswith("sleep ")], default=0))
        return [str(len(words))] * len(words)
