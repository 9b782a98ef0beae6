"""Two functions that could be the entry point: `handle`, which is one by its name, and `functions:answer`."""


def handle(data, context):
    """What is taken if none is named: a text, which goes out as it is."""
    return None if data is None else [f"handle of {context.manifest['model']['modelVersion']}" for _ in data]


def answer(data, context):
    """What a registration may name."""
    return None if data is None else [f"answer of {context.manifest['model']['modelVersion']}" for _ in data]
