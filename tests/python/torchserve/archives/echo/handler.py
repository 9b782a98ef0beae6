"""A function as a handler: what each request of the batch brought, with the types it came in."""


def shown(value):
    """A value and its type; bytes as a text of hexadecimal digits."""
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, bytes(value).hex() if len(value) < 1000 else len(value)]
    return [type(value).__name__, value]


def handle(data, context):
    """One answer for each request; nothing when it is called without requests, as it is once at the start."""
    if data is None:
        return None
    return [{name: shown(value) for name, value in request.items()} for request in data]
