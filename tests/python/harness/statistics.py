"""Reads a model's statistics, and waits until its requests are received or dispatched."""

from harness.server import total
from harness.waiting import eventually


def sizes(server, model: str) -> dict:
    """Returns the number of executions by batch size."""
    entries = server.statistics(model)["batch_stats"]
    return {entry["batch_size"]: entry["compute_infer"]["count"] for entry in entries}


def received(server, model: str) -> float:
    """Returns how many requests of the model the scheduler has received, answered or not."""
    return total(server.scrape(), "ts_inference_requests_total", model_name=model)


def dispatched(server, model: str) -> float:
    """Returns how many batches of the model were dispatched to an instance, finished or not."""
    return total(server.scrape(), "pharos_batches_total", model=model)


class Short:
    """A count that is still too low: false as a condition, and printed as the last value if the deadline passes."""

    def __init__(self, count: float):
        self.count = count

    def __bool__(self):
        return False

    def __repr__(self):
        return f"{self.count:g}"


def until_received(server, model: str, count: float):
    """Waits until the scheduler has received `count` requests of the model."""
    what = f"{count} requests of {model} are received"
    eventually(what, lambda: (now := received(server, model)) >= count or Short(now))


def until_dispatched(server, model: str, count: float):
    """Waits until `count` batches of the model have been dispatched to an instance."""
    what = f"{count} batches of {model} are dispatched"
    eventually(what, lambda: (now := dispatched(server, model)) >= count or Short(now))
