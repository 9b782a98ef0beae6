"""Answers in as many parts as the body says, then with an end. With 3 it fails after the parts. If the body has a path after the
number, it waits after the parts until the writer of this named pipe closes it."""

from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    number, _, gate = data[0]["body"].decode().partition(" ")
    count = int(number)
    for part in range(count):
        parts = {at: f"{at}:{part} " for at in range(len(data))}
        context.set_response_content_type(0, "text/plain")
        send_intermediate_predict_response(parts, context.request_ids, "Intermediate Prediction success", 200, context)
    if gate:
        with open(gate) as pipe:
            pipe.read()
    if count == 3:
        raise ValueError("three")
    return ["end"] * len(data)
