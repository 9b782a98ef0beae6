"""Sleeps for the milliseconds in the body."""

import time


def handle(data, context):
    """Sleeps."""
    if data is None:
        return None
    time.sleep(int(bytes(data[0]["body"])) / 1000)
    return ["slept" for _ in data]
