"""The gauges that routers and autoscalers read: executing and waiting requests, slots, and the busy time of instances."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.processes import held
from harness.waiting import eventually
from harness.wire import tensor

MODEL = (("model", "delay_20_two_instances"), ("version", "1"))
REQUEST = {"inputs": [tensor("INPUT0", "FP32", [1], [1.0])]}


def gauge(server, name: str, labels=()) -> float:
    return server.scrape()[name, labels]


def busy(server) -> dict:
    """Returns the busy seconds of each instance."""
    found = {}
    for (name, labels), value in server.scrape().items():
        if name == "pharos_instance_busy_seconds_total":
            found[dict(labels)["instance"]] = value
    return found


@pytest.mark.smoke
def test_executing_and_waiting_requests_add_up(start):
    server = start(["delay_20_two_instances", "identity_fp32"])
    most = json.loads(server.get("/v2/models/delay_20_two_instances/config")[1])["max_batch_size"]
    of_server = {name: gauge(server, f"pharos_{name}") for name in ("executing_requests", "waiting_requests")}
    assert of_server == {"executing_requests": 0, "waiting_requests": 0}
    assert gauge(server, "pharos_model_execution_slots", MODEL) == 2 * max(most, 1)
    other = (("model", "identity_fp32"), ("version", "1"))
    total = gauge(server, "pharos_model_execution_slots", MODEL) + gauge(server, "pharos_model_execution_slots", other)
    assert gauge(server, "pharos_execution_slots") == total
    assert gauge(server, "pharos_model_batch_free_slots", MODEL) == max(most, 1)
    count = 9
    with ThreadPoolExecutor(count) as pool:
        with held(server, "delay_20_two_instances"):
            answers = [pool.submit(server.infer, "delay_20_two_instances", REQUEST) for _ in range(count)]

            def all_there():
                now = server.scrape()
                found = [now[f"pharos_model_{kind}_requests", MODEL] for kind in ("executing", "waiting")]
                return sum(found) == count and (found, now)

            (executing, waiting), now = eventually("all requests are executing or waiting", all_there)
            # Both instances execute; nothing else does.
            assert executing >= 2
            assert now["pharos_executing_requests", ()] == executing and now["pharos_waiting_requests", ()] == waiting
            assert now["pharos_model_executing_requests", other] == 0
            before = busy(server)
            increased = lambda: [name for name, value in busy(server).items() if value > before[name]]
            eventually("both instances are busy", lambda: len(increased()) == 2)
        assert {answer.result()[0] for answer in answers} == {200}
    assert gauge(server, "pharos_executing_requests") == gauge(server, "pharos_waiting_requests") == 0
    after = busy(server)
    assert set(after) >= set(before) and busy(server) == after, "idle instances are not busy"
