"""Two functions that can be the entry point: `handle`, the default name, and `functions:answer`."""


def handle(data, context):
    """The default entry point: returns a text, which is sent unchanged."""
    return None if data is None else [f"handle of {context.manifest['model']['modelVersion']}" for _ in data]


def answer(data, context):
    """An entry point that a registration can name."""
    return None if data is None else [f"answer of {context.manifest['model']['modelVersion']}" for _ in data]
