"""Budgets of tokens: the same limit over every protocol, OpenAI's headers, and no way around it for a client."""

import json
import re
import shutil
import signal
import subprocess

import grpc
import numpy as np
import openai
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from harness.server import MODELS as TEST_MODELS
from harness.server import ROOT, binary, total
from harness.waiting import DEADLINE_S, eventually

MODELS = ROOT / "examples/language_model/models"
TOKENS = "# tenant: acme\nacme-key\nacme-key-2\n# tenant: globex\nglobex-key\n# tenant: free\nfree-key\n"
# Few tokens: a budget does not refill during a test.
RULE = (ROOT / "metrics.yaml").read_text() + "tenants:\n  token: true\n  tokens_per_minute: 6\n  token_budgets: {globex: 1000, free: unlimited}\n"

# A model that generates text and is not decoupled.
PLAIN_CONFIG = """backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
output { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU }
"""
PLAIN = """import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        number = lambda name: pb_utils.Tensor(name, np.array([4], dtype=np.uint32))
        text = pb_utils.Tensor("text_output", np.array(["some text"], dtype=object))
        return [pb_utils.InferenceResponse([text, number("num_input_tokens"), number("num_output_tokens")]) for _ in requests]
"""


@pytest.fixture
def server(start, tmp_path):
    """A server with the model `words`, the rule above and tokens of three tenants."""
    shutil.copytree(MODELS, tmp_path / "models")
    shutil.copytree(TEST_MODELS / "identity_fp32", tmp_path / "models/identity_fp32")
    (tmp_path / "models/plain/1").mkdir(parents=True)
    (tmp_path / "models/plain/config.pbtxt").write_text(PLAIN_CONFIG)
    (tmp_path / "models/plain/1/model.py").write_text(PLAIN)
    (tmp_path / "metrics.yaml").write_text(RULE)
    (tmp_path / "tokens").write_text(TOKENS)
    options = [f"--metrics-config={tmp_path / 'metrics.yaml'}", "--metrics-mode=prometheus"]
    options.append(f"--inference-token-file={tmp_path / 'tokens'}")
    return start([], *options, repository=tmp_path / "models")


def client_of(server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0)


def chat(client, text="one two three", **more):
    return client.chat.completions.with_raw_response.create(model="words", messages=[{"role": "user", "content": text}], **more)


def budget(headers) -> tuple:
    names = [f"x-ratelimit-{name}-tokens" for name in ("limit", "remaining", "reset")]
    return tuple(headers.get(name) for name in names)


def spend(server, key="acme-key"):
    """Uses the tokens of several minutes in one request, so that a slow test sees no refill."""
    with client_of(server, key) as client:
        assert chat(client, "word " * 30).parse().usage.total_tokens == 60


def ask(server, path: str, body: dict, key: str, headers=(), model="words") -> tuple:
    headers = {"Authorization": f"Bearer {key}", **dict(headers)}
    return server.ask("POST", f"/v2/models/{model}/{path}", json.dumps(body), headers=headers)


V2 = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["one two"]}]}


@pytest.mark.smoke
def test_openai_answers_have_the_budget_and_429_says_when(server):
    """The tokens of prompts and outputs are charged; all keys of a tenant share one budget, other tenants are not affected."""
    with client_of(server, "acme-key") as client:
        limit, remaining, reset = budget(chat(client, max_tokens=2).headers)
        assert (limit, remaining) == ("6", "1") and re.fullmatch(r"4\d(\.\d+)?s|50s", reset), reset
        # A request is accepted while a token is left, and overdraws the budget.
        assert budget(chat(client).headers)[1] == "0"
        for key in ("acme-key", "acme-key-2"):
            with client_of(server, key) as other, pytest.raises(openai.RateLimitError) as refused:
                chat(other)
            error = refused.value
            assert error.code == "rate_limit_exceeded" and error.type == "rate_limit_error"
            assert "the budget of 6 tokens per minute of the client is used up" in error.message
            # 11 tokens are charged: 5 of debt and one to begin with take a minute.
            assert 45 <= int(error.response.headers["retry-after"]) <= 60
            assert budget(error.response.headers)[:2] == ("6", "0")
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="words", prompt="one")
    with client_of(server, "globex-key") as client:
        with client.chat.completions.with_streaming_response.create(
            model="words", messages=[{"role": "user", "content": "one"}], stream=True
        ) as stream:
            assert budget(stream.headers)[0] == "1000"
            assert stream.read()
    with client_of(server, "free-key") as client:
        for _ in range(5):
            assert budget(chat(client).headers) == (None, None, None)
    metrics = server.scrape()
    assert total(metrics, "pharos_request_failures_total", reason="RATE_LIMITED") == 3
    assert total(metrics, "pharos_tenant_rate_limited_requests_total", tenant="acme", model="words") == 3
    assert total(metrics, "pharos_tenant_rate_limited_requests_total") == 3
    assert total(metrics, "nv_inference_request_failure", model="words") == 0, "the model did not fail"


def test_every_protocol_has_the_same_budget(server):
    """generate, generate_stream, v2 over HTTP and gRPC, and a gRPC stream; models that generate no text are not limited."""
    spend(server)
    for path in ("generate", "generate_stream"):
        status, answer = ask(server, path, {"text_input": "one"}, "acme-key")
        assert status == 429 and "6 tokens per minute" in json.dumps(answer), answer
    connection = server.connect()
    connection.request("POST", "/v2/models/words/generate", json.dumps({"text_input": "x"}), {"Authorization": "Bearer acme-key"})
    response = connection.getresponse()
    assert response.status == 429 and 400 < int(response.headers["retry-after"]) <= 550, response.headers
    connection.close()
    status, answer = ask(server, "infer", V2, "acme-key", model="plain")
    assert status == 429, answer
    assert ask(server, "infer", V2, "free-key", model="plain")[0] == 200
    tensor = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"one"], dtype=object))
    metadata = {"authorization": "Bearer acme-key"}
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(tritonclient.grpc.InferenceServerException) as refused:
            client.infer("plain", [tensor], headers=metadata)
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        answers = []
        client.start_stream(lambda result, error: answers.append(error), headers=metadata)
        client.async_stream_infer("words", [tensor])
        eventually("the stream is answered", lambda: len(answers) == 1)
        client.stop_stream()
        assert "6 tokens per minute" in str(answers[0])
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        request = service_pb2.ModelInferRequest(model_name="plain")
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, metadata=[("authorization", "Bearer acme-key")])
    assert int(dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 300_000
    numbers = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    status, answer = server.ask(
        "POST", "/v2/models/identity_fp32/infer", json.dumps(numbers), headers={"Authorization": "Bearer acme-key"}
    )
    assert status == 200, answer
    assert total(server.scrape(), "pharos_request_failures_total", protocol="grpc", reason="RATE_LIMITED") == 3


def test_a_client_that_hides_its_tokens_pays_an_estimate(server):
    """Without the outputs that count tokens, four bytes of text are a token. Other headers change no tenant."""
    assert ask(server, "generate", {"text_input": "a b"}, "acme-key", {"x-tenant": "free", "tenant": "free"})[0] == 200
    with client_of(server, "acme-key") as client:
        before = int(budget(chat(client, max_tokens=1, text="one").headers)[1])
    assert before == 0, "two tokens of a prompt, two of the output, and one each"
    spent = "globex-key"
    with client_of(server, spent) as client:
        first = int(budget(chat(client, text="one", max_tokens=1).headers)[1])
        tensor = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array(["word " * 400], dtype=object))
        with tritonclient.grpc.InferenceServerClient(server.grpc) as streams:
            answers = []
            streams.start_stream(lambda result, error: answers.append(error), headers={"authorization": f"Bearer {spent}"})
            streams.async_stream_infer("words", [tensor], outputs=[tritonclient.grpc.InferRequestedOutput("text_output")])
            eventually("the stream is answered", lambda: answers == [None])
            streams.stop_stream()
        after = int(budget(chat(client, text="one", max_tokens=1).headers)[1])
    # 2000 bytes of the prompt and 79 of the output: 520 tokens, of which some have refilled.
    assert 300 < first - after <= 530, (first, after)


def test_budgets_change_while_the_server_runs(server, tmp_path):
    """SIGHUP applies other budgets, but no other tenants."""
    spend(server)
    with client_of(server, "acme-key") as client:
        with pytest.raises(openai.RateLimitError):
            chat(client)
        (tmp_path / "metrics.yaml").write_text(RULE.replace("free: unlimited", "acme: unlimited"))
        server.process.send_signal(signal.SIGHUP)
        eventually("the budget is gone", lambda: accepted(client))
    with client_of(server, "free-key") as client:
        assert budget(chat(client).headers)[0] == "6"
    (tmp_path / "metrics.yaml").write_text(RULE + "  limit: 7\n")
    server.process.send_signal(signal.SIGHUP)
    eventually("the change is refused", lambda: "only budgets of tokens can change" in server.log.read_text())


def accepted(client) -> bool:
    try:
        return budget(chat(client).headers)[0] is None
    except openai.RateLimitError:
        return False


def test_a_header_that_clients_write_is_no_source_of_budgets(tmp_path):
    """The start is refused, with what to do."""
    file = tmp_path / "metrics.yaml"
    file.write_text("tenants: {header: x-tenant, tokens_per_minute: 5}\n")
    command = [binary(), f"--model-repository={MODELS}", f"--metrics-config={file}", "--model-control-mode=explicit"]
    command += [f"--{listener}-port=0" for listener in ("http", "grpc", "metrics")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 1 and "budgets of tokens need `token` or `certificate`" in result.stderr, result.stderr
