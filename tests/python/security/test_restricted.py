"""Parts of the protocol that are restricted to clients with a key."""

import json
import queue

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from harness.inference import one
from harness.server import total
from harness.waiting import DEADLINE_S

HTTP = "--http-restricted-api="
GRPC = "--grpc-restricted-protocol="


@pytest.fixture
def guarded(start):
    """A server that restricts inference to one key, and administration and metadata to another."""
    rules = [
        "inference:infer-key=secret",
        "model-repository,statistics,logging,trace,shared-memory,model-config:admin-key=a=b",
    ]
    return start(["identity_fp32"], *[prefix + rule for prefix in (HTTP, GRPC) for rule in rules])


def test_http(guarded):
    """403 with the header's name without the key or with a wrong value; the rest is open; refusals are counted."""
    body = json.dumps(one("FP32", [1, 1], [1]))
    for path, method, key in [
        ("/v2/models/identity_fp32/infer", "POST", "infer-key"),
        ("/v2/models/identity_fp32/versions/1/infer", "POST", "infer-key"),
        ("/v2/models/identity_fp32/generate", "POST", "infer-key"),
        ("/v2/repository/index", "POST", "admin-key"),
        ("/v2/models/stats", "GET", "admin-key"),
        ("/v2/models/identity_fp32/stats", "GET", "admin-key"),
        ("/v2/models/identity_fp32/config", "GET", "admin-key"),
        ("/v2/logging", "GET", "admin-key"),
        ("/v2/trace/setting", "GET", "admin-key"),
        ("/v2/systemsharedmemory/status", "GET", "admin-key"),
    ]:
        for headers in [{}, {key: "wrong"}, {key: "secre"}]:
            status, text = guarded.ask(method, path, body if method == "POST" else None, headers=headers)
            expected = {"error": f"This API is restricted, expecting header '{key}'"}
            assert (status, json.loads(text)) == (403, expected), path
    assert guarded.ask("POST", "/v2/models/identity_fp32/infer", body, headers={"Infer-Key": "secret"})[0] == 200
    assert guarded.ask("GET", "/v2/logging", headers={"admin-key": "a=b"})[0] == 200
    for path in ["/v2", "/v2/health/live", "/v2/models/identity_fp32", "/v2/models/identity_fp32/ready"]:
        assert guarded.get(path)[0] == 200, path
    counted = total(guarded.scrape(), "pharos_request_failures_total", protocol="http", reason="RESTRICTED")
    assert counted == 30
    assert total(guarded.scrape(), "nv_inference_request_failure") == 0


def test_grpc(guarded):
    """UNAVAILABLE with the header's name, for streams too; tritonclient's headers grant access."""
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with tritonclient.grpc.InferenceServerClient(guarded.grpc) as client:
        refused = "This protocol is restricted, expecting header 'triton-grpc-protocol-infer-key'"
        with pytest.raises(InferenceServerException, match=refused) as error:
            client.infer("identity_fp32", [tensor])
        assert error.value.status() == "StatusCode.UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="expecting header 'triton-grpc-protocol-admin-key'"):
            client.get_inference_statistics(headers={"triton-grpc-protocol-admin-key": "wrong"})
        headers = {"triton-grpc-protocol-infer-key": "secret"}
        assert client.infer("identity_fp32", [tensor], headers=headers).as_numpy("OUTPUT0").item() == 1
        admin = {"triton-grpc-protocol-admin-key": "a=b"}
        assert client.get_inference_statistics(headers=admin).model_stats[0].inference_count == 1
        assert client.is_server_ready()
        answers = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error))
        assert refused in str(answers.get(timeout=DEADLINE_S))
        client.stop_stream()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (HTTP + "health", "expects <api>[,<api>...]:<key>=<value>, got 'health'"),
        (HTTP + "healthy:k=v", "unknown restricted api 'healthy'; allowed: health, metadata, inference"),
        (GRPC + "healthy:k=v", "unknown restricted protocol 'healthy'"),
        (HTTP + "health,trace,health:k=v", "api 'health' can not be specified in multiple config groups"),
    ],
)
def test_a_bad_rule_stops_the_start(start, option, text):
    """An invalid rule must not leave access open."""
    server = start(["identity_fp32"], option, wait=False)
    assert server.process.wait(DEADLINE_S) != 0
    assert text in server.log.read_text()
