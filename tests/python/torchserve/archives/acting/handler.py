"""A class as a handler. A request describes its answer: `{"content_type": ..., "headers": {...},
"status": [code, phrase], "all": [code, phrase], "answer": ... | "bytes": hex | "count": n | "strange": true}`."""

import json


class Acting:
    """Has the methods that a handler requires, and no others."""

    def __init__(self):
        self.asked = 0

    def initialize(self, context):
        """Stores the context; called once, with the context of later calls."""
        self.suffix = context.model_yaml_config.get("acting", {}).get("suffix", "")

    def handle(self, data, context):
        """Returns an answer for each request."""
        self.asked += len(data)
        return [self.one(place, request, context) for place, request in enumerate(data)]

    def one(self, place, request, context):
        """Executes one request's description."""
        said = request.get("body") or request.get("data")
        said = json.loads(said) if isinstance(said, (str, bytes, bytearray)) else said
        if "content_type" in said:
            context.set_response_content_type(place, said["content_type"])
        for name, value in said.get("headers", {}).items():
            context.set_response_header(place, name, value)
        if "status" in said:
            context.set_response_status(*said["status"], idx=place)
        if "all" in said:
            context.set_all_response_status(*said["all"])
        if "bytes" in said:
            return bytes.fromhex(said["bytes"])
        if "count" in said:
            return "x" * said["count"]
        return {1, 2} if said.get("strange") else said.get("answer", f"well{self.suffix}")
