"""Reports the size of each batch, with metrics for the batch and for each of its requests."""


def handle(data, context):
    """Returns the size of the batch and the index in it, for each request."""
    if data is None:
        return None
    context.metrics.add_counter("BatchSeen", len(data))
    for place in range(len(data)):
        context.metrics.add_size("RowSize", 2, idx=place, unit="kB")
    if any(bytes(request["body"]) == b"418" for request in data):
        context.set_all_response_status(200, "all")
        context.set_response_status(418, "teapot", idx=0)
        context.set_response_header(0, "X-Place", "0")
    return [{"size": len(data)} for _ in data]
