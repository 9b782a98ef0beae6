"""Waits in tests: for a condition with a deadline, or for an interval that a test is about.

No other module of the tests sleeps (`harness/test_rules.py`). To wait for an event, use [`eventually`], which ends as soon as the
condition is true. The other functions are for tests about time: [`run_for`], [`holds_for`], [`every`], and clients that are slow
on purpose.

Every wait has the same deadline, [`DEADLINE_S`], also waits for answers and for the end of a process. It is long enough for a
machine with eight times as many busy processes as cores. A test that something is not delayed does not use a shorter deadline: it
makes the delay longer than the deadline, and then waits as usual.
"""

import asyncio
import time

INTERVAL_S = 0.01
DEADLINE_S = 60
"""The deadline of a wait, in seconds. It costs no time if the condition becomes true."""


def eventually(what: str, check, deadline_s: float = DEADLINE_S):
    """Waits until `check()` returns a true value, and returns that value. Fails after `deadline_s` seconds with the condition
    `what`, the time waited and the last value."""
    begun, last = time.monotonic(), None
    while True:
        last = check()
        if last:
            return last
        waited = time.monotonic() - begun
        if waited >= deadline_s:
            raise AssertionError(f"{what}: did not come true within {deadline_s} s ({waited:.1f} s waited); last value: {last!r}")
        time.sleep(INTERVAL_S)


async def eventually_async(what: str, check, deadline_s: float = DEADLINE_S):
    """[`eventually`] for a coroutine function `check`."""
    begun = time.monotonic()
    while True:
        last = await check()
        if last:
            return last
        waited = time.monotonic() - begun
        if waited >= deadline_s:
            raise AssertionError(f"{what}: did not come true within {deadline_s} s ({waited:.1f} s waited); last value: {last!r}")
        await asyncio.sleep(INTERVAL_S)


def settled(what: str, read, quiet_s: float, deadline_s: float = DEADLINE_S):
    """Waits until `read()` has returned the same value for `quiet_s` seconds, and returns that value."""
    last, since = read(), time.monotonic()

    def check():
        nonlocal last, since
        now = read()
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since >= quiet_s

    eventually(f"{what} (no change for {quiet_s} s)", check, deadline_s)
    return last


def holds_for(what: str, seconds: float, check):
    """Fails as soon as `check()` is false within `seconds`: for a state that must not change, since no event shows that."""
    for _ in every(INTERVAL_S, seconds):
        assert check(), f"{what}: did not hold for {seconds} s"


def join_all(threads):
    """Waits until threads have ended; fails if one does not. A thread that can hang must be a daemon, since pytest ends after all
    others."""
    end = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    assert not (running := [thread.name for thread in threads if thread.is_alive()]), f"threads did not end: {running}"


def every(interval_s: float, for_s: float):
    """Repeats the body of a `for` loop every `interval_s` seconds, for `for_s` seconds; at least once."""
    end = time.monotonic() + for_s
    while True:
        yield
        if time.monotonic() >= end:
            return
        time.sleep(interval_s)


def run_for(why: str, seconds: float):
    """Waits for `seconds`. `why` names the interval that the test is about: an interval of the server or of a measurement."""
    assert why
    time.sleep(seconds)


def pause_as_client(seconds: float):
    """Simulates a slow client, which reads late, sends in chunks, or pauses between requests."""
    time.sleep(seconds)


async def pause_as_async_client(seconds: float):
    """[`pause_as_client`] in a coroutine."""
    await asyncio.sleep(seconds)


def answer_late(seconds: float):
    """Simulates a slow server."""
    time.sleep(seconds)
