"""Configurations and arrivals that exercise a model's scheduler.

Each row is a separate model and a script of arrivals. The expected facts (the order of answers, batches, statistics, the
pending gauge) are in `golden_scheduling.json`, recorded from a real Triton by `runner.py`; `triton_differences.py` has the
facts that differ on purpose or by chance. A row's name describes the case.

Every model sleeps for `delay_ms` in each batch, far longer than a request takes, so that the order of events does not depend
on the machine. `hold` is TRITONSERVER_DELAY_SCHEDULER: the number of requests that wait before the first batch is formed.
"""

from dataclasses import dataclass

FAR = 100_000_000
"""A queue delay in microseconds that no row waits for: a batch that leaves has another reason."""


@dataclass(frozen=True)
class Send:
    """One request: `batch` items of `items` numbers in each of `inputs`, and its parameters. Requests alternate between HTTP and
    gRPC; each is sent once the previous one is queued, executing or answered."""

    batch: int = 1
    items: int = 1
    priority: int = 0
    timeout_ms: int = 0
    inputs: tuple = ("INPUT0",)


@dataclass(frozen=True)
class Answered:
    """Waits until this number of requests is answered."""

    count: int


@dataclass(frozen=True)
class Wait:
    """Waits this number of milliseconds; earlier values of the gauge are ignored."""

    ms: int


@dataclass(frozen=True)
class Row:
    """One row. `batching` is the scheduling part of the configuration; `optional` gives the model an optional second
    input. `slow_shape`: only batches of long requests ([`LONG`] items) take time."""

    name: str
    batching: str
    steps: tuple
    hold: int = 0
    max_batch: int = 8
    delay_ms: int = 300
    instances: int = 1
    optional: bool = False
    slow_shape: bool = False

    @property
    def model(self) -> str:
        """The model's name."""
        return "".join(c if c.isalnum() else "_" for c in self.name)


LONG = 2200
"""The length of an item that keeps a `slow_shape` model busy."""


def dynamic(text: str = "") -> str:
    """Returns `dynamic_batching` with these settings."""
    return f"dynamic_batching {{ {text} }}\n"


def prefer(*sizes: int, delay_us: int = FAR) -> str:
    """Returns `dynamic_batching` with preferred sizes and a queue delay."""
    return dynamic(f"preferred_batch_size: [ {', '.join(map(str, sizes))} ] max_queue_delay_microseconds: {delay_us}")


def policy(text: str, more: str = "") -> str:
    """Returns `dynamic_batching` with a queue policy."""
    return dynamic(f"{more} default_queue_policy {{ {text} }}")


def late(*sizes: int, action: str = "", more: str = "", delay_us: int = 3_000_000) -> str:
    """Returns `dynamic_batching` with preferred sizes, a queue delay, and a queue policy with a short timeout."""
    preferred = f"preferred_batch_size: [ {', '.join(map(str, sizes))} ]" if sizes else ""
    return policy(action or DELAY_SOON, f"{preferred} max_queue_delay_microseconds: {delay_us} {more}")


def levels(count: int, default: int, more: str = "") -> str:
    """Returns the settings of priority levels."""
    return f"priority_levels: {count} default_priority_level: {default} {more}"


def level_policy(level: int, text: str) -> str:
    """Returns the queue policy of a level."""
    return f"priority_queue_policy {{ key: {level} value {{ {text} }} }}"


def sends(*requests: dict) -> tuple:
    """Returns arrivals that differ in these fields."""
    return tuple(Send(**request) for request in requests)


def batches(*sizes: int) -> tuple:
    """Returns arrivals of these batch sizes."""
    return tuple(Send(batch=size) for size in sizes)


def shapes(*lengths: int) -> tuple:
    """Returns arrivals of items with these lengths."""
    return tuple(Send(items=length) for length in lengths)


def priorities(*numbers: int) -> tuple:
    """Returns arrivals of these priorities."""
    return tuple(Send(priority=number) for number in numbers)


def timeouts(*milliseconds: int) -> tuple:
    """Returns arrivals with these request timeouts; 0 means none."""
    return tuple(Send(timeout_ms=number) for number in milliseconds)


A_WHILE = 1_200_000
"""A queue delay in microseconds that is longer than sending a row's requests takes."""
ONE = (Send(),)
BOTH = ("INPUT0", "INPUT1")
REJECT_LATER = "timeout_action: REJECT default_timeout_microseconds: 10000000 allow_timeout_override: true"
DELAY_LATER = "timeout_action: DELAY default_timeout_microseconds: 10000000 allow_timeout_override: true"
DELAY_SOON = "timeout_action: DELAY default_timeout_microseconds: 300000"
REJECT_SOON = "timeout_action: REJECT default_timeout_microseconds: 300000"
TWO_LEVELS = levels(2, 2) + level_policy(1, DELAY_LATER) + level_policy(2, REJECT_LATER)
"""Level 1 delays and level 2 rejects, by the requests' timeouts."""
ORDERED = "preserve_ordering: true"

# Each row is one line, so that rows can be compared.
# fmt: off

PREFERRED = [
    Row("preferred 2 and 6: six", prefer(2, 6), ONE * 6, hold=6),
    Row("preferred 2 and 6: eight", prefer(2, 6, delay_us=A_WHILE), ONE * 8, hold=8),
    Row("preferred 2 and 6: four", prefer(2, 6), ONE * 4, hold=4),
    Row("preferred 2 and 6: by threes", prefer(2, 6), batches(3, 3, 3, 3), hold=4),
    Row("preferred 2 and 6: ones and a five", prefer(2, 6, delay_us=A_WHILE), batches(1, 5, 1, 5), hold=4),
    Row("preferred 2 and 6: a rest waits", prefer(2, 6, delay_us=A_WHILE), batches(1, 1, 1, 1, 1, 2), hold=6),
    Row("preferred 2: one waits the delay", prefer(2, delay_us=A_WHILE), ONE),
    Row("preferred 2: the second ends the wait", prefer(2), ONE * 2),
    Row("preferred 4: none reachable", prefer(4, delay_us=A_WHILE), batches(3, 3, 3, 3), hold=4),
    Row("preferred 4: six without delay", prefer(4, delay_us=0), ONE * 6, hold=6),
    Row("preferred 2: larger request", prefer(2), batches(5)),
    Row("preferred 2: larger request among others", prefer(2), batches(1, 5, 1, 1), hold=4),
    Row("preferred 1: never together", prefer(1, delay_us=0), ONE * 4, hold=4),
    Row("preferred 4: the delay passes while busy", prefer(4, delay_us=100_000), (Send(batch=4), *ONE * 3, Answered(4)), delay_ms=600),
]

SIZES = [
    Row("no options: as much as fits", dynamic(), ONE * 10, hold=10),
    Row("no options: one and the rest behind it", dynamic(), ONE * 6, max_batch=4, delay_ms=900),
    Row("no options: batches of three", dynamic(), batches(3, 3, 3, 1), hold=4),
    Row("no options: five, four, four, eight", dynamic(), batches(5, 4, 4, 8), hold=4),
    Row("maximum 4: ten", dynamic(), ONE * 10, hold=10, max_batch=4, delay_ms=500),
    Row("maximum 1", dynamic(), ONE * 4, hold=4, max_batch=1),
    Row("delay: three wait for more", dynamic("max_queue_delay_microseconds: 700000"), ONE * 3),
    Row("delay: a full batch does not wait", dynamic(f"max_queue_delay_microseconds: {FAR}"), ONE * 4, max_batch=4),
    Row("two instances: a batch each", dynamic(), ONE * 8, hold=8, max_batch=4, instances=2),
    Row("two instances: maximum 2, eight", dynamic(), ONE * 8, hold=8, max_batch=2, instances=2),
]

SHAPES = [
    Row("shapes: a change sends the batch", dynamic(f"max_queue_delay_microseconds: {A_WHILE}"), shapes(1, 1, 2, 2, 2, 1), hold=6),
    Row("shapes: alternating", dynamic(), shapes(1, 2, 1, 2), hold=4),
    Row("shapes: a change before the preferred size", prefer(4, delay_us=A_WHILE), shapes(1, 1, 1, 2), hold=4),
    Row("shapes: a change after the preferred size", prefer(2, delay_us=A_WHILE), shapes(1, 1, 1, 2), hold=4),
    Row("optional input: the same ones together", dynamic(), sends({}, {}, {"inputs": BOTH}, {"inputs": BOTH}), hold=4, optional=True),
    Row("optional input: alternating", dynamic(f"max_queue_delay_microseconds: {A_WHILE}"), sends({}, {"inputs": BOTH}, {}, {"inputs": BOTH}), hold=4, optional=True),
]

PRIORITIES = [
    Row("priorities: the important ones first", dynamic(levels(2, 2)), priorities(2, 2, 1, 1), hold=4, max_batch=1),
    Row("priorities: none and unknown are the default", dynamic(levels(3, 2)), priorities(3, 0, 9, 2, 1, 3), hold=6, max_batch=1),
    Row("priorities: levels share a batch", dynamic(levels(2, 2)), priorities(2, 1, 2, 1), hold=4, max_batch=3),
    Row("priorities: in a queue with a limit the late important one goes first", policy("max_queue_size: 9", levels(2, 2)), (*priorities(2, 2, 2), Answered(1), Wait(150), *priorities(1, 1)), max_batch=1, delay_ms=700),
    Row("priorities: the unimportant one starves", policy("max_queue_size: 9", levels(2, 2)), (*priorities(1, 2, 1), Answered(1), Wait(150), *priorities(1), Answered(2), Wait(150), *priorities(1)), max_batch=1, delay_ms=600),
    Row("priorities: no levels, priorities ignored", dynamic(), priorities(2, 1, 3, 1), hold=4, max_batch=1),
    Row("priorities: what was handed over early goes first", dynamic(levels(2, 2)), priorities(2, 2, 2, 2, 1), max_batch=1, delay_ms=900),
]

LIMITS = [
    Row("queue limit 2", policy("max_queue_size: 2"), ONE * 6, max_batch=1, delay_ms=900),
    Row("queue limit 4, batches of 4", policy("max_queue_size: 4"), (*ONE * 4, Wait(200), *ONE * 6), hold=4, max_batch=4, delay_ms=1500),
    Row("queue limit 2: counts requests, not items", policy("max_queue_size: 2"), batches(8, 4, 4, 1, 1), delay_ms=900),
    Row("queue limit of a level", dynamic(levels(2, 2) + level_policy(1, "max_queue_size: 1") + level_policy(2, "max_queue_size: 2")), priorities(1, 1, 1, 2, 2, 2), max_batch=1, delay_ms=900),
    Row("queue limit of one level only", dynamic(levels(2, 2) + level_policy(1, "max_queue_size: 1")), priorities(1, 1, 1, 2, 2, 0), max_batch=1, delay_ms=900),
    Row("queue limit, two instances", policy("max_queue_size: 1"), (*ONE, Wait(250), *ONE * 4, Wait(20)), max_batch=1, instances=2, delay_ms=900),
    Row("queue limit 1, after a free place", policy("max_queue_size: 1"), (*ONE * 3, Answered(2), Wait(200), *ONE * 2), max_batch=1, delay_ms=900),
]

TIMEOUTS = [
    Row("REJECT: waited too long behind another", policy("default_timeout_microseconds: 200000"), (*ONE * 3, Wait(1000)), max_batch=1, delay_ms=1800),
    Row("REJECT: answered when it expires", policy("default_timeout_microseconds: 50000"), ONE * 2, max_batch=1, delay_ms=450),
    Row("REJECT: the timeout is shorter than the delay", dynamic(f"max_queue_delay_microseconds: {FAR} default_queue_policy {{ default_timeout_microseconds: 300000 }}"), (*ONE * 2, Answered(2))),
    Row("REJECT: a request's own timeout", policy(REJECT_LATER), (*timeouts(0, 100, 0, 100, 20_000), Wait(1000)), max_batch=1, delay_ms=1800),
    Row("REJECT: the rest makes a batch", policy(REJECT_LATER), (*timeouts(0, 100, 0, 100, 0), Wait(1000)), max_batch=4, delay_ms=1800),
    Row("REJECT: an own timeout without a default is ignored", policy("allow_timeout_override: true"), timeouts(0, 50, 50), max_batch=1, delay_ms=700),
    Row("REJECT: an own timeout that is not allowed is ignored", policy("default_timeout_microseconds: 10000000"), timeouts(0, 50, 50), max_batch=1, delay_ms=700),
    Row("REJECT: a longer timeout of the request is ignored", policy("default_timeout_microseconds: 200000 allow_timeout_override: true"), (*timeouts(0, 9000), Wait(1000)), max_batch=1, delay_ms=1800),
    Row("REJECT: the timeout of a level", dynamic(levels(2, 2) + level_policy(1, "default_timeout_microseconds: 200000")), (*priorities(2, 2, 1), Wait(1000)), max_batch=1, delay_ms=1800),
    Row("REJECT: expires while the one before it waits for company", late(4, action=REJECT_LATER, delay_us=2_000_000), timeouts(0, 300)),
    Row("DELAY: late ones go last", policy(DELAY_LATER), timeouts(0, 100, 0, 100, 0), max_batch=1, delay_ms=800),
    Row("DELAY: late ones go last, then batched", policy(DELAY_LATER), timeouts(0, 100, 0, 100, 0), max_batch=2, delay_ms=800),
    Row("DELAY: late ones of a level before the next level", policy(DELAY_LATER, levels(2, 2)), sends({}, {"priority": 1, "timeout_ms": 100}, {"priority": 2}, {"priority": 1}), max_batch=1, delay_ms=800),
    Row("DELAY: late ones count for the limit", policy(f"max_queue_size: 2 {DELAY_LATER}"), (*timeouts(0, 50, 50), Wait(200), *timeouts(0, 0)), max_batch=1, delay_ms=1500),
    Row("DELAY: the timeout is shorter than the delay", dynamic(f"max_queue_delay_microseconds: 1500000 default_queue_policy {{ timeout_action: DELAY default_timeout_microseconds: 300000 }}"), ONE * 2),
]

DELAYED = [
    Row("DELAY, preferred 4 and 8: two of 2 pass it", late(4, 8), (*ONE, Wait(700), *batches(2, 2))),
    Row("DELAY, preferred 4 and 8: three make it four", late(4, 8), (*ONE, Wait(700), *ONE * 3)),
    Row("DELAY, preferred 4 and 8: a three and it are four", late(4, 8), (*ONE, Wait(700), *batches(3))),
    Row("DELAY, preferred 4 and 8: a four passes it", late(4, 8), (*ONE, Wait(700), *batches(4))),
    Row("DELAY, preferred 4 and 8: an eight passes it", late(4, 8), (*ONE, Wait(700), *batches(8))),
    Row("DELAY, preferred 4 and 8: two late and a two", late(4, 8), (*ONE * 2, Wait(700), *batches(2))),
    Row("DELAY, preferred 4 and 8: two late and two of 2", late(4, 8), (*ONE * 2, Wait(700), *batches(2, 2))),
    Row("DELAY, preferred 4 and 8: one wave after the other", late(4, 8), (*ONE, Wait(700), *ONE, Wait(700), *ONE)),
    Row("DELAY, preferred 4 and 8: a late one of 4", late(4, 8), (*batches(5), Wait(700), *batches(1, 1))),
    Row("DELAY, preferred 3: the late second is passed", late(3, action=DELAY_LATER), (*timeouts(0, 300), Wait(700), *batches(2))),
    Row("DELAY, queue delay: a late one takes the others along", late(), (*ONE, Wait(700), *ONE, Wait(700), *ONE)),
    Row("DELAY, queue delay: a full batch passes it", late(), (*ONE, Wait(700), *ONE * 4), max_batch=4),
    Row("DELAY, queue delay: another shape passes it", late(), (*shapes(1), Wait(700), *shapes(2))),
    Row("DELAY, queue delay: over while busy", late(4, delay_us=1_000_000), (*batches(4), *ONE * 3, Answered(1)), delay_ms=1600),
    Row("DELAY, busy: by queue order, not by timeout", policy(DELAY_LATER), timeouts(0, 600, 100, 0, 300), max_batch=1, delay_ms=1000),
    Row("DELAY, busy: requests that are not visited keep their place", policy(DELAY_LATER), timeouts(0, 2000, 0, 100, 0), max_batch=1, delay_ms=1200),
    Row("DELAY, busy: late ones fill the batch", policy(DELAY_LATER), timeouts(0, 100, 0, 100, 0, 0), max_batch=3, delay_ms=1200),
    Row("DELAY, busy: two instances", policy(DELAY_LATER), (*ONE, Wait(500), *timeouts(0, 100, 0, 100, 0), Wait(20)), max_batch=1, delay_ms=1500, instances=2),
    Row("DELAY, busy: a model without batches", policy(DELAY_LATER), timeouts(0, 100, 0, 100), max_batch=0, delay_ms=1000),
    Row("DELAY and REJECT levels: all late", dynamic(TWO_LEVELS), sends({}, {"priority": 1, "timeout_ms": 100}, {"priority": 2, "timeout_ms": 100}, {"priority": 1}, {"priority": 2}), max_batch=1, delay_ms=1500),
    Row("DELAY and REJECT levels: late ones before the next level", dynamic(TWO_LEVELS), sends({}, {"priority": 1, "timeout_ms": 100}, {"priority": 1, "timeout_ms": 100}, {"priority": 2}, {"priority": 1}), max_batch=2, delay_ms=1200),
    Row("DELAY and REJECT levels: one expires, one is late, three make it four", late(4, 8, action=DELAY_SOON, more=levels(2, 2) + level_policy(2, REJECT_SOON)), (*priorities(2, 1), Answered(1), Wait(400), *priorities(1, 1, 1))),
    Row("DELAY and REJECT levels: the next level makes it four", late(4, 8, action=DELAY_SOON, more=levels(2, 2) + level_policy(2, REJECT_LATER)), (*priorities(1), Wait(700), *sends({"priority": 2, "batch": 2}, {"priority": 1}))),
    Row("DELAY and REJECT levels: the next level does not pass it", late(4, 8, action=DELAY_SOON, more=levels(2, 2) + level_policy(2, REJECT_LATER)), (*priorities(1), Wait(700), *sends({"priority": 2, "batch": 2}, {"priority": 2, "batch": 2}))),
    Row("DELAY and REJECT levels: its own level passes it", late(4, 8, action=DELAY_SOON, more=levels(2, 2) + level_policy(2, REJECT_LATER)), (*priorities(1), Wait(700), *sends({"priority": 1, "batch": 2}, {"priority": 1, "batch": 2}))),
    Row("REJECT and DELAY levels: the important one passes it", late(4, 8, action=DELAY_SOON, more=levels(2, 2) + level_policy(1, REJECT_LATER)), (*priorities(2), Wait(700), *sends({"priority": 1, "batch": 2}, {"priority": 1, "batch": 2}))),
    Row("DELAY and REJECT levels: limits", dynamic(levels(2, 2) + level_policy(1, f"max_queue_size: 2 {DELAY_LATER}") + level_policy(2, f"max_queue_size: 1 {REJECT_LATER}")), sends({}, {"priority": 1, "timeout_ms": 100}, {"priority": 1, "timeout_ms": 100}, {"priority": 1}, {"priority": 2}, {"priority": 2}), max_batch=1, delay_ms=1500),
    Row("DELAY and REJECT levels: limits while it waits for company", late(4, 8, action="", more=levels(2, 2) + level_policy(1, f"max_queue_size: 2 {DELAY_SOON}") + level_policy(2, f"max_queue_size: 1 {REJECT_SOON}")), (*priorities(1), Wait(700), *priorities(1, 1))),
]

ORDER = [
    Row("order kept: the second instance is faster", dynamic(ORDERED), shapes(LONG, 1), max_batch=1, instances=2, slow_shape=True),
    Row("order not kept: the second instance is faster", dynamic(), shapes(LONG, 1), max_batch=1, instances=2, slow_shape=True),
    Row("order kept: expired ones", policy("default_timeout_microseconds: 200000", ORDERED), (*ONE * 3, Wait(1000), Answered(3), *ONE), max_batch=1, delay_ms=1800),
    Row("order kept: refused ones do not wait", policy("max_queue_size: 1", ORDERED), ONE * 4, max_batch=1, delay_ms=700),
    Row("order kept: two instances, batches", dynamic(ORDERED), ONE * 8, hold=8, max_batch=2, instances=2),
]

DEFAULT = [
    Row("default scheduler: one after the other", "", ONE * 5, delay_ms=800),
    Row("default scheduler: a model without batches", "", ONE * 5, max_batch=0, delay_ms=800),
    Row("default scheduler: does not know TRITONSERVER_DELAY_SCHEDULER", "", ONE * 2, hold=8),
    Row("default scheduler: two instances", "", (*ONE, Wait(300), *ONE * 5, Wait(20)), instances=2, delay_ms=1000),
    Row("a model without batches and a queue limit", policy("max_queue_size: 2"), ONE * 5, max_batch=0, delay_ms=900),
    Row("a model without batches and a timeout", policy("default_timeout_microseconds: 200000"), (*ONE * 3, Wait(1000)), max_batch=0, delay_ms=1800),
    Row("never together, and a queue limit", policy("max_queue_size: 2", "preferred_batch_size: [ 1 ]"), ONE * 5, delay_ms=900),
]

# fmt: on

ROWS = [*PREFERRED, *SIZES, *SHAPES, *PRIORITIES, *LIMITS, *TIMEOUTS, *DELAYED, *ORDER, *DEFAULT]
