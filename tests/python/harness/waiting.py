"""Waiting in tests: for a condition with a deadline, or for a time that a test is about.

No other module of the tests sleeps (`harness/test_rules.py`). A wait for an event is [`eventually`], which ends as soon as the
event has come. What stays is time that is itself the subject: [`run_for`], [`holds_for`], [`every`], and clients that are slow on
purpose.
"""

import asyncio
import time

INTERVAL_S = 0.01


def eventually(what: str, deadline_s: float, check):
    """Waits until `check()` returns something true, and returns that. Fails after `deadline_s` seconds with `what` it waited for,
    how long, and the last value. A generous deadline costs nothing when the condition comes."""
    begun, last = time.monotonic(), None
    while True:
        last = check()
        if last:
            return last
        waited = time.monotonic() - begun
        if waited >= deadline_s:
            raise AssertionError(f"{what}: did not come true within {deadline_s} s ({waited:.1f} s waited); last value: {last!r}")
        time.sleep(INTERVAL_S)


async def eventually_async(what: str, deadline_s: float, check):
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


def settled(what: str, deadline_s: float, read, quiet_s: float):
    """Waits until `read()` has returned the same value for `quiet_s` seconds, and returns that value."""
    last, since = read(), time.monotonic()

    def check():
        nonlocal last, since
        now = read()
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since >= quiet_s

    eventually(f"{what} (no change for {quiet_s} s)", deadline_s, check)
    return last


def holds_for(what: str, seconds: float, check):
    """Fails as soon as `check()` is false within `seconds`: for what must not happen, which no event tells."""
    for _ in every(INTERVAL_S, seconds):
        assert check(), f"{what}: did not hold for {seconds} s"


def every(interval_s: float, for_s: float):
    """Repeats the body of a `for` loop every `interval_s` seconds, for `for_s` seconds; at least once."""
    end = time.monotonic() + for_s
    while True:
        yield
        if time.monotonic() >= end:
            return
        time.sleep(interval_s)


def run_for(why: str, seconds: float):
    """Lets `seconds` pass. `why` names the interval that the test is about: one of the server, or one that is measured."""
    assert why
    time.sleep(seconds)


def pause_as_client(seconds: float):
    """A client that is slow on purpose: it reads late, sends in pieces, or thinks between requests."""
    time.sleep(seconds)


async def pause_as_async_client(seconds: float):
    """[`pause_as_client`] in a coroutine."""
    await asyncio.sleep(seconds)


def answer_late(seconds: float):
    """A server of the tests that is slow on purpose."""
    time.sleep(seconds)
