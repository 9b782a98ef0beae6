"""Ensembles with decoupled members, and their requests."""

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

from harness.stream_models import REPEAT, ensemble, model, pair, passed, repeated, step
from harness.waiting import DEADLINE_S
from protocol.stream_tables import request

WIDE = 1 << 18
"""Elements of a response of 1 MiB."""


def one(function: str, extra: str = "", **more) -> str:
    """Returns an ordinary model with one input."""
    return model(function, pair(0, "INT32", [-1]), decoupled=False, extra=extra, **more)


MEMBERS = {
    "repeat": model("repeat", REPEAT),
    "repeat_fails": model("repeat", REPEAT, fail_at=2),
    "crashing": model("repeat", REPEAT, crash_at=2),
    "wide": model("repeat", REPEAT, copies=WIDE),
    "thrice": model("repeat", REPEAT, copies=3),
    "numbered": model("repeat", REPEAT, sequence=77),
    "rows_of_any": one("identity"),
    "four": one("delay", "instance_group [ { count: 4 } ]\n", delay_ms=2),
    "slow": one("delay", delay_ms=20),
    "slow_alone": one("delay", delay_ms=20),
    "slower": one("delay", delay_ms=3000),
    "failing": one("fail"),
}
ENSEMBLES = {
    "chain": ensemble(repeated(), passed()),
    "order": ensemble(repeated(), passed("a", "OUT", "four")),
    "big": ensemble(repeated("wide", delayed=False), passed()),
    "multiplied": ensemble(repeated("thrice"), passed("a", "b"), repeated("repeat", "b", "OUT", False)),
    "free": ensemble(repeated(delayed=False), passed("a", "OUT", "slow_alone")),
    "limited": ensemble(repeated(delayed=False), passed("a", "b", "slow"), passed("b"), limit=3),
    "limited_twice": ensemble(repeated("thrice", delayed=False), repeated("repeat", "a", "b", False), passed("b"), limit=1),
    "limited_once": ensemble(passed("IN", "a"), passed("a", "OUT", "slow"), limit=2),
    "waits": ensemble(repeated(), passed("a", "OUT", "slower")),
    "breaks": ensemble(repeated("crashing", delayed=False), passed()),
    "fails_behind": ensemble(repeated(), passed("a", "OUT", "failing")),
    "fails_early": ensemble(repeated("repeat_fails"), passed()),
    "steps_of_a_sequence": ensemble(
        repeated("numbered", delayed=False), step("sums", {"VALUE": "a"}, {"SUM": "OUT"})
    ),
    "cached": ensemble(repeated(), passed(), extra="response_cache { enable: true }\n"),
}


def stub(channel):
    """Returns the service of a channel."""
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def values(server, *requests) -> list:
    """Returns the answers of a gRPC stream of requests: the request's id with the first element of OUT, or the error."""
    with grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)]) as channel:
        return [read(message) for message in stub(channel).ModelStreamInfer(iter(requests), timeout=DEADLINE_S)]


def read(message) -> tuple:
    """Returns the id and the value, or the error, of one answer."""
    response = message.infer_response
    raw = response.raw_output_contents
    return response.id, message.error_message or (int(np.frombuffer(raw[0], np.int32)[0]) if raw else None)


def asked(name: str, elements, identifier="a", **more):
    """Returns one request."""
    return request(name, identifier, elements, **more)
