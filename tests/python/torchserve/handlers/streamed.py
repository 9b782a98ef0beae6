"""Handlers that answer in parts."""

from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    count = int(data[0]["body"].decode())
    for number in range(count):
        parts = {at: f"{at}:{number} " for at in range(len(data))}
        context.set_response_content_type(0, "text/plain")
        send_intermediate_predict_response(parts, context.request_ids, "Intermediate Prediction success", 200, context)
    if count == 3:
        raise ValueError("three")
    return ["end"] * len(data)
