"""Loads when the file `go` of its configuration exists, and fails if `ill` exists then. Sets headers and a status on request."""

import json
import os
import time


class Waits:
    def initialize(self, context):
        config = context.model_yaml_config
        while not os.path.exists(config["go"]):
            time.sleep(0.01)
        if os.path.exists(config["ill"]):
            raise ValueError("it is ill")

    def handle(self, data, context):
        asked = json.loads(bytes(data[0]["body"]) or b"{}")
        for name, value in asked.get("headers", {}).items():
            context.set_response_header(0, name, value)
        if "status" in asked:
            context.set_response_status(asked["status"], "", 0)
        return ["0123456789"]
