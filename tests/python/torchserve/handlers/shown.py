"""Returns its input, and does what the body selects."""

import os
import signal
import time

from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException


class Shown:
    def initialize(self, context):
        if "fails" in context.model_name:
            raise ValueError("it does not start")

    def handle(self, data, context):
        return [self.one(row, context, index) for index, row in enumerate(data)]

    def one(self, row, context, index):
        if context.get_request_header(index, "explain") == "True":
            return "explained"
        if context.get_request_header(index, "describe") == "True":
            return {"says": "I am shown"}
        body = row.get("body")
        text = bytes(body).decode("latin1") if isinstance(body, (bytes, bytearray)) else body
        if isinstance(text, str):
            word, _, rest = text.partition(" ")
            if word == "raise":
                raise ValueError("an error of the handler")
            if word == "exception":
                raise PredictionException("my own text", int(rest))
            if word == "exit":
                os._exit(3)
            if word == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if word == "sleep":
                time.sleep(float(rest))
            if word == "status":
                context.set_response_status(code=int(rest), phrase="My Words", idx=index)
                context.set_response_header(index, "X-My", "mine")
                context.set_response_content_type(index, "text/x-mine")
            if word == "bytes":
                return b"\x00\xff"
            if word == "pid":
                return str(os.getpid())
            if word == "gpu":
                return str(context.system_properties.get("gpu_id"))
            if word == "parts":
                for part in range(int(rest)):
                    send_intermediate_predict_response([f"part {part};"], context.request_ids, "ok", 200, context)
                return "end"
        if isinstance(text, dict) and "inputs" in text:
            outputs = [{**tensor, "name": tensor["name"].replace("IN", "OUT")} for tensor in text["inputs"]]
            return {"id": text.get("id"), "model_name": "x", "model_version": "1", "outputs": outputs}
        shown = {key: [type(value).__name__, value if isinstance(value, (dict, list)) else str(value)] for key, value in row.items()}
        headers = context.get_all_request_header(index) or {}
        return {"data": shown, "headers": {name: value for name, value in headers.items() if isinstance(value, str)}, "id": context.get_request_id(index)}
