"""The counts of the response cache of an ensemble whose clients disconnect and whose member is killed."""

import http.client
import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

from ensembles.plain_ensembles import ensemble, plain
from harness.models import write
from harness.server import Server
from harness.waiting import DEADLINE_S, eventually, pause_as_client, settled

CACHED = "response_cache { enable: true }"
DELAY = 'parameters { key: "delay_ms" value { string_value: "4" } }'
TWO = "instance_group [ { count: 2 kind: KIND_CPU } ] dynamic_batching { }"


def test_hits_and_misses_are_the_successes(tmp_path):
    """A request whose client disconnects is neither, although others may wait for its response. Sixteen clients take one of 200
    values, and some disconnect after at most 4 ms."""
    repository = tmp_path / "models"
    write(repository, "m", plain("m", "delay", f"{DELAY} {TWO} {CACHED}"))
    write(repository, "e", ensemble("m", more=CACHED))
    with Server(tmp_path, [repository], ["--cache-config=local,size=20000,single_flight=true"]) as server:

        def ask(number: int):
            chance = random.Random(number)
            tensor = {"name": "VALUE", "datatype": "INT32", "shape": [1, 1], "data": [chance.randrange(200)]}
            connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_S)
            connection.request("POST", f"/v2/models/{chance.choice('me')}/infer", json.dumps({"inputs": [tensor]}))
            if chance.random() < 0.15:
                pause_as_client(chance.random() * 0.004)
            else:
                # 503 for requests of the killed workers.
                assert connection.getresponse().status in (200, 503)
            connection.close()

        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(ask, number) for number in range(1500)]
            for _ in range(3):
                pause_as_client(0.25)
                workers = eventually("a worker runs", lambda: sorted(server.workers()))
                os.kill(random.choice(workers), signal.SIGKILL)
            for one in asked:
                one.result()

        def counts() -> dict:
            return {name: entry["count"] for name, entry in server.statistics("e")["inference_stats"].items()}

        # Requests whose clients disconnect at once may not be counted at all.
        found = settled("the counts", counts, 3)
        assert found["cache_hit"] + found["cache_miss"] == found["success"] and found["fail"] > 0, found
