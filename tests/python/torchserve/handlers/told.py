"""A handler that executes the JSON body of a request, without PyTorch."""

import json
import os
import signal
import sys
import time

from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException


class Told(BaseHandler):
    """`{"do": WHAT, ...}` of the first request of a batch applies to all."""

    def initialize(self, context):
        self.context = context
        self.initialized = True
        self.loaded_with = dict(context.system_properties)

    def preprocess(self, data):
        return data

    def inference(self, data):
        return data

    def postprocess(self, data):
        body = data[0].get("body")
        told = body if isinstance(body, dict) else {}
        return getattr(self, told.get("do", "echo"))(data, told)

    def describe_handle(self):
        return {"about": self.context.model_name}

    def explain_handle(self, data_preprocess, raw_data):
        return [{"explained": str(raw_data[0])}]

    def echo(self, data, told):
        return [{name: [type(value).__name__, value if isinstance(value, (str, dict, list)) else value.hex()]
                 for name, value in row.items()} for row in data]  # fmt: skip

    def about(self, data, told):
        context = self.context
        return [
            {
                "batch": len(data),
                "id": context.get_request_id(at),
                "headers": context.get_all_request_header(at),
                "sequence": context.get_sequence_id(at),
                "properties": context.system_properties,
                "yaml": context.model_yaml_config,
                "manifest": context.manifest,
                "here": os.getcwd(),
                "decode": os.environ.get("PYTHONPATH", "").split(os.pathsep)[0],
            }
            for at in range(len(data))
        ]

    def value(self, data, told):
        return [{"bytes": b"\x00\xff", "bytearray": bytearray(b"ab"), "text": "t\u00e4xt", "number": 7, "set": {1},
                 "surrogate": "\ud800"}[row["body"]["kind"]] for row in data]  # fmt: skip

    def answered(self, data, told):
        for at, row in enumerate(data):
            said = row["body"]
            self.context.set_response_status(said["status"], said.get("phrase", ""), at)
            self.context.set_response_content_type(at, said["type"])
            self.context.set_response_header(at, "x-place", str(at))
        return [f"answer {at}" for at in range(len(data))]

    def raises(self, data, told):
        raise {"value": ValueError, "memory": MemoryError, "runtime": RuntimeError}[told["kind"]](told.get("text", "no"))

    def refuses(self, data, told):
        raise PredictionException(told["text"], told["code"])

    def wrong(self, data, told):
        return {"none": None, "number": 5, "few": [], "many": [1] * (len(data) + 1)}[told["kind"]]

    def ends(self, data, told):
        if told["kind"] == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    def sleeps(self, data, told):
        time.sleep(told["s"])
        return ["slept"] * len(data)

    def prints(self, data, told):
        for line in range(told["lines"]):
            print("line", line, "x" * 100)
        return ["printed"] * len(data)
