"""Bearer tokens for inference and for management, and headers that become parameters."""

import asyncio
import json
import queue
import signal

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from harness.inference import one
from harness.models import write
from harness.server import total
from harness.waiting import DEADLINE_S, eventually

MODEL = "identity_fp32"
BODY = json.dumps(one("FP32", [1, 1], [1]))
INFERENCE = [
    ("POST", f"/v2/models/{MODEL}/infer", BODY),
    ("POST", f"/v2/models/{MODEL}/versions/1/infer", BODY),
    ("GET", "/v2", None),
    ("GET", f"/v2/models/{MODEL}", None),
    ("GET", f"/v2/models/{MODEL}/config", None),
    ("GET", f"/v2/models/{MODEL}/stats", None),
    ("GET", "/v2/models/stats", None),
    ("GET", "/v2/systemsharedmemory/status", None),
]
MANAGEMENT = [("POST", "/v2/repository/index", ""), ("GET", "/v2/logging", None)]
OPEN = ["/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}/ready"]


def bearer(token: str) -> dict:
    """Returns the authorization header."""
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def files(tmp_path):
    """The two token files."""
    inference, management = tmp_path / "inference", tmp_path / "management"
    inference.write_text("# one for each team\ninfer-1\ninfer-2==\n")
    management.write_text("admin-1\n")
    return inference, management


@pytest.fixture
def guarded(start, files):
    """A server that requires tokens for inference and for management."""
    return start([MODEL], f"--inference-token-file={files[0]}", f"--management-token-file={files[1]}")


def ask(server, method, path, body, headers) -> tuple:
    """Returns the status, the challenge and the error."""
    import http.client

    connection = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, response.getheader("WWW-Authenticate"), text


@pytest.mark.smoke
def test_http(guarded):
    """401 with a challenge without a valid token, 403 with a token for the other class; health is open. All refusals are counted,
    and no token is ever logged."""
    for method, path, body in INFERENCE + MANAGEMENT:
        scope = "management" if (method, path, body) in MANAGEMENT else "inference"
        for headers in [{}, {"Authorization": "Basic aW5mZXItMQ=="}, {"Authorization": "infer-1"}]:
            status, challenge, text = ask(guarded, method, path, body, headers)
            assert (status, challenge) == (401, 'Bearer realm="pharos"'), path
            assert f"needs a token for {scope}: send the header 'Authorization: Bearer TOKEN'" in json.loads(text)["error"]
        for token in ["infer-", "infer-11", "admin", "x" * 5000]:
            status, challenge, text = ask(guarded, method, path, body, bearer(token))
            assert (status, challenge) == (401, 'Bearer realm="pharos", error="invalid_token"'), path
            assert json.loads(text)["error"] == f"the bearer token is not valid for {scope}"
        assert guarded.ask(method, path, body, headers=bearer("admin-1"))[0] == 200, path
    for method, path, body in INFERENCE:
        assert guarded.ask(method, path, body, headers=bearer("infer-1"))[0] == 200, path
        assert guarded.ask(method, path, body, headers=bearer("infer-2=="))[0] == 200, path
    for method, path, body in MANAGEMENT:
        status, challenge, text = ask(guarded, method, path, body, bearer("infer-1"))
        assert (status, challenge.split(", ")[1]) == (403, 'error="insufficient_scope"'), text
    for path in OPEN:
        assert guarded.get(path)[0] == 200, path
    assert guarded.get("/v2/none")[0] == 404
    count = total(guarded.scrape(), "pharos_request_failures_total", protocol="http", reason="UNAUTHENTICATED")
    assert count == 7 * len(INFERENCE + MANAGEMENT) + len(MANAGEMENT)
    log = guarded.log.read_text()
    assert not any(token in log for token in ("infer-1", "infer-2", "admin-1", "infer-11"))


def tensor(module):
    """Returns the input of the model."""
    value = module.InferInput("INPUT0", [1, 1], "FP32")
    value.set_data_from_numpy(np.ones((1, 1), np.float32))
    return value


def test_clients_over_http(guarded):
    """tritonclient, sync and aio, with a user-supplied header."""
    with tritonclient.http.InferenceServerClient(guarded.http) as client:
        assert client.is_server_ready() and client.is_model_ready(MODEL)
        with pytest.raises(InferenceServerException, match="needs a token for inference"):
            client.infer(MODEL, [tensor(tritonclient.http)])
        assert client.infer(MODEL, [tensor(tritonclient.http)], headers=bearer("infer-1")).as_numpy("OUTPUT0").item() == 1
        assert client.get_model_repository_index(headers=bearer("admin-1"))

    async def run():
        async with tritonclient.http.aio.InferenceServerClient(guarded.http) as client:
            result = await client.infer(MODEL, [tensor(tritonclient.http)], headers=bearer("infer-1"))
            return result.as_numpy("OUTPUT0").item()

    assert asyncio.run(run()) == 1


@pytest.mark.smoke
def test_grpc(guarded):
    """UNAUTHENTICATED and PERMISSION_DENIED, also for a stream; health is open; reflection needs the class of server metadata."""
    header = lambda token: {"authorization": f"Bearer {token}"}  # noqa: E731
    value = tensor(tritonclient.grpc)
    with tritonclient.grpc.InferenceServerClient(guarded.grpc) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
        for headers, scope in [(None, "needs a token"), (header("nope"), "not valid")]:
            with pytest.raises(InferenceServerException, match=scope) as error:
                client.infer(MODEL, [value], headers=headers)
            assert error.value.status() == "StatusCode.UNAUTHENTICATED"
        with pytest.raises(InferenceServerException, match="the request has one for inference") as error:
            client.get_model_repository_index(headers=header("infer-1"))
        assert error.value.status() == "StatusCode.PERMISSION_DENIED"
        assert client.infer(MODEL, [value], headers=header("infer-2==")).as_numpy("OUTPUT0").item() == 1
        assert client.get_model_repository_index(headers=header("admin-1")).models
        answers = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error))
        assert "needs a token for inference" in str(answers.get(timeout=DEADLINE_S))
        client.stop_stream()
        client.start_stream(lambda result, error: answers.put((result, error)), headers=header("infer-1"))
        client.async_stream_infer(MODEL, [value])
        result, error = answers.get(timeout=DEADLINE_S)
        assert error is None and result.as_numpy("OUTPUT0").item() == 1
        client.stop_stream()
    count = total(guarded.scrape(), "pharos_request_failures_total", protocol="grpc", reason="UNAUTHENTICATED")
    assert count == 4


def test_grpc_aio(guarded):
    """tritonclient's client for asyncio."""

    async def run():
        async with tritonclient.grpc.aio.InferenceServerClient(guarded.grpc) as client:
            headers = {"authorization": "Bearer infer-1"}
            return (await client.infer(MODEL, [tensor(tritonclient.grpc)], headers=headers)).as_numpy("OUTPUT0").item()

    assert asyncio.run(run()) == 1


def test_files_are_read_again(guarded, files):
    """An added token is accepted and a removed one refused. A bad file changes nothing and is reported."""
    works = lambda token: guarded.ask("GET", "/v2", headers=bearer(token))[0] == 200  # noqa: E731
    files[0].write_text("infer-2==\ninfer-3\n")
    eventually("the new token works", lambda: works("infer-3"))
    assert not works("infer-1") and works("infer-2==") and works("admin-1")
    files[0].write_text("infer-3\nsecret words\n")
    name = "pharos_credential_reloads_total"
    failures = lambda: total(guarded.scrape(), name, file="inference_tokens", result="failure")  # noqa: E731
    eventually("the bad file is reported", lambda: failures() == 1)
    assert works("infer-2==") and works("infer-3")
    log = guarded.log.read_text()
    assert "inference_tokens reload failed" in log and "line 2 is not a token" in log and "secret words" not in log
    files[0].unlink()
    eventually("the missing file is reported", lambda: failures() == 2)
    assert works("infer-3")
    files[0].write_text("infer-4\n")
    guarded.process.send_signal(signal.SIGHUP)
    eventually("SIGHUP reads at once", lambda: works("infer-4"))


def test_inference_tokens_alone_protect_everything(start, files):
    """Inference tokens also open management, which would otherwise be inaccessible; no request is accepted without a token."""
    server = start([MODEL], f"--inference-token-file={files[0]}")
    for method, path, body in INFERENCE + MANAGEMENT:
        assert server.ask(method, path, body)[0] == 401, path
        assert server.ask(method, path, body, headers=bearer("infer-1"))[0] == 200, path


def test_management_tokens_alone(start, files):
    """Inference needs no token."""
    server = start([MODEL], f"--management-token-file={files[1]}")
    assert server.infer(MODEL, one("FP32", [1, 1], [1]))[0] == 200
    for method, path, body in MANAGEMENT:
        assert server.ask(method, path, body)[0] == 401, path
        assert server.ask(method, path, body, headers=bearer("admin-1"))[0] == 200, path


def test_tokens_and_restricted_apis(start, files):
    """Both are required; the token is checked first."""
    server = start([MODEL], f"--inference-token-file={files[0]}", "--http-restricted-api=inference:key=value")
    path = f"/v2/models/{MODEL}/infer"
    assert server.ask("POST", path, BODY, headers={"key": "value"})[0] == 401
    assert server.ask("POST", path, BODY, headers=bearer("infer-1"))[0] == 403
    assert server.ask("POST", path, BODY, headers=bearer("infer-1") | {"key": "value"})[0] == 200


@pytest.mark.parametrize(("text", "words"), [
    (None, ["cannot be read", "No such file"]), ("", ["the file has no tokens"]), ("a b", ["line 1 is not a token"]),
])  # fmt: skip
def test_files_that_cannot_be_used(start, tmp_path, text, words):
    """The server does not start and reports the reason."""
    path = tmp_path / "tokens"
    if text is not None:
        path.write_text(text)
    server = start([MODEL], f"--management-token-file={path}", wait=False)
    assert server.process.wait(DEADLINE_S) == 1
    log = server.log_tail()
    assert [word for word in [f"the token file '{path}' (--management-token-file)", *words] if word not in log] == [], log


# ---- headers that become parameters -----------------------------------------------------------------------------------

ECHO = """backend: "test" max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "function" value { string_value: "identity" } }
parameters { key: "echo_parameters" value { string_value: "true" } }
"""


@pytest.fixture(scope="module")
def forwarding(tmp_path_factory):
    """A server that forwards headers to a model that gives parameters back."""
    from harness.server import Server

    folder = tmp_path_factory.mktemp("forwarding")
    write(folder / "models", "echo", ECHO)
    patterns = [f"--{name}-header-forward-pattern=^(my-|x-user$|timeout|triton_)" for name in ("http", "grpc")]
    with Server(folder, [folder / "models"], patterns) as server:
        yield server


def test_headers_over_http(forwarding):
    """Headers that match the pattern, ignoring case, reach the model beside the request's own parameters; other headers do
    not."""
    request = one("FP32", [1, 1], [1]) | {"parameters": {"own": 5}}
    headers = {"My-Key": "value", "X-USER": "me", "x-user-agent": "no", "other": "no"}
    status, text = forwarding.ask("POST", "/v2/models/echo/infer", json.dumps(request), headers=headers)
    assert status == 200, text
    assert json.loads(text)["parameters"] == {"own": 5, "my-key": "value", "x-user": "me"}
    body = json.dumps({"INPUT0": 1.0, "own": 5})
    status, text = forwarding.ask("POST", "/v2/models/echo/generate", body, headers=headers)
    answer = json.loads(text)
    assert (answer["own"], answer["my-key"], answer["x-user"], "other" in answer) == (5, "value", "me", False)


@pytest.mark.parametrize("name", ["timeout", "triton_enable_empty_final_response"])
def test_reserved_names(forwarding, name):
    """A header must not set a parameter that the server interprets: 400, INVALID_ARGUMENT."""
    # Clients of newer Triton versions match "reserved for Triton usage".
    text = (
        f"header '{name}' cannot be forwarded: parameters of this name are reserved for Triton usage and should not be "
        "specified."
    )
    answer = forwarding.ask("POST", "/v2/models/echo/infer", BODY, headers={name: "1"})
    assert answer == (400, json.dumps({"error": text}, separators=(",", ":")))
    with tritonclient.grpc.InferenceServerClient(forwarding.grpc) as client:
        with pytest.raises(InferenceServerException, match=text) as error:
            client.infer("echo", [tensor(tritonclient.grpc)], headers={name: "1"})
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_headers_over_grpc(forwarding):
    """The headers of a unary call, and of a stream for each of its requests."""
    headers = {"my-key": "value", "x-user": "me", "other": "no"}
    expected = {"my-key": "value", "x-user": "me"}
    text = lambda response: {  # noqa: E731
        name: value.string_param for name, value in response.parameters.items() if name != "triton_final_response"
    }
    with tritonclient.grpc.InferenceServerClient(forwarding.grpc) as client:
        result = client.infer("echo", [tensor(tritonclient.grpc)], headers=headers)
        assert text(result.get_response()) == expected
        answers = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error or result.get_response()), headers=headers)
        for _ in range(2):
            client.async_stream_infer("echo", [tensor(tritonclient.grpc)])
        assert [text(answers.get(timeout=DEADLINE_S)) for _ in range(2)] == [expected] * 2
        client.stop_stream()


def test_tokens_are_not_forwarded(start, files, tmp_path):
    """Tokens are not forwarded even if the pattern matches all headers."""
    write(tmp_path / "echo", "echo", ECHO)
    server = start([], f"--inference-token-file={files[0]}", "--http-header-forward-pattern=.*", repository=tmp_path / "echo")
    status, text = server.ask("POST", "/v2/models/echo/infer", BODY, headers=bearer("infer-1") | {"key": "value"})
    parameters = json.loads(text)["parameters"]
    assert (status, parameters["key"], "authorization" in parameters) == (200, "value", False)


def test_an_invalid_pattern(start):
    """The server does not start and reports the invalid pattern."""
    server = start([MODEL], "--http-header-forward-pattern=(", wait=False)
    assert server.process.wait(DEADLINE_S) == 2
    assert "--http-header-forward-pattern" in server.log_tail() and "invalid regular expression" in server.log_tail()
