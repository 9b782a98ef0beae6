"""Reads a model's statistics."""


def sizes(server, model: str) -> dict:
    """Executions by batch size."""
    entries = server.statistics(model)["batch_stats"]
    return {entry["batch_size"]: entry["compute_infer"]["count"] for entry in entries}
