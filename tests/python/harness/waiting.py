"""Waiting for a condition with a deadline, in place of sleeping for a time."""

import time


def eventually(what: str, deadline_s: float, check):
    """Waits until `check()` gives something true, and gives that back; fails by naming `what` after `deadline_s`."""
    end, last = time.monotonic() + deadline_s, None
    while time.monotonic() < end:
        last = check()
        if last:
            return last
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come true within {deadline_s} s; at last: {last!r}")
