"""Fails in the way that the request selects."""

from ts.utils.util import PredictionException


def handle(data, context):
    """Raises one of the kinds of failures that TorchServe distinguishes."""
    if data is None:
        return None
    kind = bytes(data[0]["body"]).decode()
    if kind == "exception":
        raise PredictionException("a refusal of its own", 513)
    if kind == "client's":
        raise PredictionException("not this way", 418)
    if kind == "default":
        raise PredictionException("no code")
    if kind == "memory":
        raise MemoryError("none left")
    if kind == "cuda":
        raise RuntimeError("CUDA out of memory")
    if kind == "any":
        raise KeyError("any")
    if kind == "quotes":
        raise PredictionException('with "quotes" and \\ and a\nline', 500)
    return ["well"]
