"""Tenants: the same counts over every protocol, sums equal to the model's numbers, a limited number of series."""

import http.client
import json
import signal
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
from cryptography import x509

from harness.certificates import Files
from harness.inference import one
from harness.server import MODELS, ROOT, binary, total
from harness.tls_server import TlsServer
from harness.waiting import DEADLINE_S, eventually

TENANTS = "tenants: {header: X-Tenant, limit: 5, names: [known]}\n"
ONE = one("FP32", [1, 1], [1])


@pytest.fixture
def server(start, tmp_path):
    """A server that distinguishes five tenants."""
    file = tmp_path / "metrics.yaml"
    file.write_text((ROOT / "metrics.yaml").read_text() + TENANTS)
    return start(["identity_fp32", "delay_20_two_instances", "fail"], f"--metrics-config={file}", "--metrics-mode=prometheus")


def infer(server, model: str, tenant: str | None, request: dict, path: str = "infer") -> int:
    """Sends a request of a tenant over HTTP; returns the status."""
    headers = {} if tenant is None else {"x-tenant": tenant}
    status, _ = server.ask("POST", f"/v2/models/{model}/{path}", json.dumps(request), headers=headers)
    return status


def grpc(server, model: str, tenant: str, times: int = 1):
    """Sends valid requests of a tenant over gRPC, and as many over a stream."""
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), "float32"))
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        for _ in range(times):
            client.infer(model, [tensor], headers={"x-tenant": tenant})
        answers = []
        client.start_stream(lambda result, error: answers.append(error), headers={"x-tenant": tenant})
        for _ in range(times):
            client.async_stream_infer(model, [tensor])
        eventually("the stream is answered", lambda: len(answers) == times)
        client.stop_stream()
        assert answers == [None] * times


def requests(metrics: dict, **labels) -> dict:
    """Returns tenant -> number of requests."""
    found = {}
    for (name, pairs), value in metrics.items():
        if name == "pharos_tenant_requests_total" and set(labels.items()) <= set(pairs):
            tenant = dict(pairs)["tenant"]
            found[tenant] = found.get(tenant, 0) + value
    return found


def check_sums(metrics: dict, model: str):
    """The sums over all tenants equal the numbers of the model."""

    def of(name: str) -> float:
        return total(metrics, name, model=model)

    failures = of("nv_inference_request_failure")
    assert of("pharos_tenant_requests_total") == of("nv_inference_request_success") + failures
    assert of("pharos_tenant_failures_total") == failures
    # The counters of the model are in whole microseconds.
    assert of("pharos_tenant_queue_seconds_total") == pytest.approx(of("nv_inference_queue_duration_us") / 1e6, abs=2e-6)
    parts = sum(of(f"nv_inference_compute_{part}_duration_us") for part in ("input", "infer", "output"))
    assert of("pharos_tenant_compute_seconds_total") == pytest.approx(parts / 1e6, abs=4e-6)


def test_every_protocol_counts_its_tenants(server):
    """HTTP, the generate extension's route, v1, gRPC and a gRPC stream; without a header the tenant is `none`."""
    for _ in range(3):
        assert infer(server, "identity_fp32", "a", ONE) == 200
    assert infer(server, "identity_fp32", None, ONE) == 200
    assert infer(server, "identity_fp32", "", ONE) == 200
    status, answer = server.ask("POST", "/v1/models/identity_fp32:predict", '{"instances": [[1]]}', headers={"X-Tenant": "v1"})
    assert status == 200, answer
    grpc(server, "identity_fp32", "b", 2)
    # Requests that do not fit the model are in no number of the model.
    assert infer(server, "identity_fp32", "a", one("INT8", [1, 1], [1])) == 400
    for _ in range(2):
        assert infer(server, "fail", "a", one("FP32", [1], [1])) >= 400
    metrics = server.scrape()
    assert requests(metrics, model="identity_fp32") == {"a": 3, "none": 2, "v1": 1, "b": 4}
    assert total(metrics, "pharos_tenant_failures_total", model="fail", tenant="a") == 2
    for model in ("identity_fp32", "fail"):
        check_sums(metrics, model)


def test_sums_over_tenants_equal_the_models_numbers(server):
    """With concurrent requests, so that some wait."""
    with ThreadPoolExecutor(8) as pool:
        names = [f"t{at % 4}" for at in range(64)]
        statuses = list(pool.map(lambda tenant: infer(server, "delay_20_two_instances", tenant, one("FP32", [1], [1])), names))
    assert set(statuses) == {200}
    metrics = server.scrape()
    assert requests(metrics, model="delay_20_two_instances") == {f"t{at}": 16 for at in range(4)}
    assert total(metrics, "pharos_tenant_queue_seconds_total", tenant="t0") > 0
    assert total(metrics, "pharos_tenant_compute_seconds_total", tenant="t0") > 0.1
    check_sums(metrics, "delay_20_two_instances")


def tenant_series(metrics: dict) -> int:
    return sum(name.startswith("pharos_tenant_") for name, _ in metrics)


def resident(server) -> float:
    return eventually("the memory is measured", lambda: total(server.scrape(), "process_resident_memory_bytes"))


def test_ten_thousand_names_make_a_limited_number_of_series(server):
    """Names beyond the limit and invalid ones are `other`; a listed tenant has its place even after the attack."""
    body = json.dumps(ONE)

    def attack(numbers) -> list:
        connection = http.client.HTTPConnection(server.http)
        statuses = []
        for number in numbers:
            connection.request("POST", "/v2/models/identity_fp32/infer", body, {"x-tenant": f"attacker-{number}-{'x' * 40}"})
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        connection.close()
        return statuses

    def attack_with_four(first: int, end: int):
        with ThreadPoolExecutor(4) as pool:
            for statuses in pool.map(attack, [range(first + at, end, 4) for at in range(4)]):
                assert set(statuses) == {200}

    # Every thread of the server has allocated what it keeps.
    attack_with_four(0, 2_000)
    before, series = resident(server), tenant_series(server.scrape())
    attack_with_four(2_000, 10_000)
    for tenant in ("known", "not valid", "x" * 65, 'quote"', "other"):
        assert infer(server, "identity_fp32", tenant, ONE) == 200
    metrics = server.scrape()
    found = requests(metrics)
    assert len(found) == 6 and {"known", "other"} < set(found), found
    # Four attackers have places; four of the last five requests are `other` too.
    assert found["other"] == 10_000 - 4 + 4 and found["known"] == 1
    assert tenant_series(metrics) == series + 4, "only the four series of `known` are new"
    assert resident(server) - before < 16 << 20
    check_sums(metrics, "identity_fp32")


def test_sighup_refuses_another_rule(start, tmp_path):
    """Series refer to the names, so the rule is fixed; other changes are still applied."""
    file = tmp_path / "metrics.yaml"
    file.write_text(TENANTS)
    server = start(["identity_fp32"], f"--metrics-config={file}", "--metrics-mode=prometheus")
    for text, message in [
        (TENANTS.replace("5", "6"), "`tenants` has changed, which needs a restart of the server"),
        (TENANTS + "slos: [{name: up, availability: 99%}]\n", "added pharos_slo_good_requests_total"),
    ]:
        file.write_text(text)
        server.process.send_signal(signal.SIGHUP)
        eventually(f"the log has {message!r}", lambda message=message: message in server.log.read_text())
    assert infer(server, "identity_fp32", "a", ONE) == 200
    assert requests(server.scrape()) == {"a": 1}


def test_tokens_name_their_tenants(start, tmp_path):
    """Only configured tokens have a tenant, and a changed file applies to the next requests."""
    file, tokens = tmp_path / "metrics.yaml", tmp_path / "tokens"
    file.write_text("tenants: {token: true}\n")
    tokens.write_text("unnamed\n# tenant: acme\nold\nnew\n# tenant: globex\nother\n")
    options = [f"--metrics-config={file}", "--metrics-mode=prometheus", f"--inference-token-file={tokens}"]
    server = start(["identity_fp32"], *options)

    def ask(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}", "x-tenant": "ignored"}
        return server.ask("POST", "/v2/models/identity_fp32/infer", json.dumps(ONE), headers=headers)[0]

    assert [ask(token) for token in ("unnamed", "old", "new", "wrong")] == [200, 200, 200, 401]
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), "float32"))
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.infer("identity_fp32", [tensor], headers={"authorization": "Bearer other"})
    assert requests(server.scrape()) == {"none": 1, "acme": 2, "globex": 1}
    # A value of another scheme gives no access, and does not hide the tenant of the token either.
    connection = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
    connection.putrequest("POST", "/v2/models/identity_fp32/infer")
    for value in ("Basic x", "Bearer old"):
        connection.putheader("Authorization", value)
    body = json.dumps(ONE).encode()
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    assert connection.getresponse().status == 200
    connection.close()
    assert requests(server.scrape()) == {"none": 1, "acme": 3, "globex": 1}
    tokens.write_text("# tenant: initech\nother\n")
    eventually("the token is read again", lambda: ask("old") == 401)
    assert ask("other") == 200
    assert requests(server.scrape())["initech"] == 1


def test_certificates_name_their_tenants(tmp_path):
    """By the common name, over HTTP, its streams, gRPC and its streams; without one, by a URI or by the DNS name. Headers change
    nothing."""
    files = Files(tmp_path / "files")
    definition = tmp_path / "metrics.yaml"
    definition.write_text("tenants: {certificate: true}\n")
    options = [f"--metrics-config={definition}", "--metrics-mode=prometheus"]

    def identity(name: str, alternative=()) -> tuple:
        paths = tmp_path / "tenant-cert.pem", tmp_path / "tenant-key.pem"
        for path, text in zip(paths, files.authority.issue(name, alternative=alternative)):
            path.write_bytes(text)
        return paths

    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), "float32"))

    def ask(server, name: str, alternative=()):
        """Sends four requests."""
        certificate, key = identity(name, alternative)
        context = ssl.create_default_context(cafile=files.root)
        context.load_cert_chain(certificate, key)
        connection = http.client.HTTPSConnection(f"localhost:{server.http_port}", timeout=DEADLINE_S, context=context)
        for path in ("infer", "generate"):
            body = ONE if path == "infer" else {"INPUT0": [[1]]}
            connection.request("POST", f"/v2/models/identity_fp32/{path}", json.dumps(body), headers={"x-tenant": "ignored"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.read()
        connection.close()
        credentials = {"root_certificates": str(files.root), "private_key": str(key), "certificate_chain": str(certificate)}
        with tritonclient.grpc.InferenceServerClient(f"localhost:{server.grpc_port}", ssl=True, **credentials) as client:
            client.infer("identity_fp32", [tensor])
            answers = []
            client.start_stream(lambda result, error, answers=answers: answers.append(error))
            client.async_stream_infer("identity_fp32", [tensor])
            eventually("the stream is answered", lambda answers=answers: answers == [None])
            client.stop_stream()

    with TlsServer(tmp_path, files, *options, mutual=True) as server:
        for name in ("acme", "globex", "not a tenant", "acme"):
            ask(server, name)
        ask(server, "", [x509.UniformResourceIdentifier("spiffe://here/initech")])
        ask(server, "")
        expected = {"acme": 8, "globex": 4, "other": 4, "spiffe://here/initech": 4, "localhost": 4}
        assert requests(server.scrape()) == expected


@pytest.mark.parametrize("source, needed", [("token", "--inference-token-file"), ("certificate", "--http-use-ssl-mutual")])
def test_tenants_need_their_source(tmp_path, source, needed):
    """The start fails instead of counting everything as `none`."""
    file = tmp_path / "metrics.yaml"
    file.write_text(f"tenants: {{{source}: true}}\n")
    command = [binary(), f"--model-repository={MODELS}", f"--metrics-config={file}", "--model-control-mode=explicit"]
    command += [f"--{listener}-port=0" for listener in ("http", "grpc", "metrics")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 1 and f"which needs {needed}" in result.stderr, result.stderr


def test_without_a_rule_no_tenants(start):
    """The built-in definition distinguishes no tenants."""
    server = start(["identity_fp32"])
    assert infer(server, "identity_fp32", "a", ONE) == 200
    assert "pharos_tenant" not in server.get("/metrics", server.metrics)[1]
