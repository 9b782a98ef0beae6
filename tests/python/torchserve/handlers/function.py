"""A handler that is a function: it is called once with None when it is loaded."""

LOADED = []


def handle(data, context):
    if data is None:
        LOADED.append(context.model_name)
        return None
    return [f"{LOADED} {len(data)}" for _ in data]


def other(data, context):
    return None if data is None else ["other"] * len(data)
