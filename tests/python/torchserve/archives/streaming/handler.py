"""Answers in parts; the body has their number."""

import time

from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    """Returns the last part."""
    if data is None:
        return None
    count = int(bytes(data[0]["body"] if "body" in data[0] else data[0]["data"]))
    if count < 0:
        raise ValueError("no parts")
    for part in range(count):
        send_intermediate_predict_response([f"part {part}, "], context.request_ids, "Intermediate", 200, context)
        time.sleep(0.1)
    return ["end"]
