"""Access control on TorchServe's ports: every route of the v2 protocol, over HTTP and gRPC, with every kind of credential and
with unusual spellings. A model contains code, so a forbidden load must not execute any."""

import base64
import json

import grpc
import pytest

from harness.waiting import eventually
from torchserve.home import HOST, INFERENCE, MANAGEMENT, Home, has_worker, message

pytestmark = pytest.mark.skipif(not has_worker, reason="needs the package pharos-worker")

KSERVE = "/inference.GRPCInferenceService/"
ALIAS = "/org.pytorch.serve.grpc.openinference.GRPCInferenceService/"
STATUSES = {"key": 400, "model api": 403, "settings": 403, "scope": 403, "restricted": 403, "nowhere": 404}
"""The statuses of the refusals that `ask` distinguishes by their texts."""

HEALTH, USE, MANAGE, LOAD, SETTINGS = "health", "use", "manage", "load", "settings"

HTTP_ROUTES = [
    (HEALTH, "GET", "/v2/health/live"),
    (HEALTH, "GET", "/v2/health/ready"),
    (HEALTH, "GET", "/v2/models/m/ready"),
    (HEALTH, "GET", "/v2/models/m/versions/1.0/ready"),
    (USE, "GET", "/v2"),
    (USE, "GET", "/v2/models/m"),
    (USE, "GET", "/v2/models/m/versions/1.0"),
    (USE, "GET", "/v2/models/m/config"),
    (USE, "GET", "/v2/models/m/stats"),
    (USE, "GET", "/v2/models/stats"),
    (USE, "POST", "/v2/models/m/infer"),
    (USE, "POST", "/v2/models/m/versions/1.0/infer"),
    (USE, "POST", "/v2/models/m/generate"),
    (USE, "POST", "/v2/models/m/generate_stream"),
    (USE, "GET", "/v2/systemsharedmemory/status"),
    (USE, "GET", "/v2/systemsharedmemory/region/r/status"),
    (USE, "POST", "/v2/systemsharedmemory/region/r/register"),
    (USE, "POST", "/v2/systemsharedmemory/region/r/unregister"),
    (USE, "POST", "/v2/systemsharedmemory/unregister"),
    (USE, "GET", "/v2/cudasharedmemory/status"),
    (USE, "POST", "/v2/cudasharedmemory/region/r/register"),
    (USE, "POST", "/v2/cudasharedmemory/unregister"),
    (MANAGE, "POST", "/v2/repository/index"),
    (SETTINGS, "GET", "/v2/trace/setting"),
    (SETTINGS, "POST", "/v2/trace/setting"),
    (SETTINGS, "GET", "/v2/models/m/trace/setting"),
    (SETTINGS, "GET", "/v2/logging"),
    (SETTINGS, "POST", "/v2/logging"),
    (LOAD, "POST", "/v2/repository/models/evil/load"),
    (LOAD, "POST", "/v2/repository/models/evil/unload"),
]

GRPC_ROUTES = [
    (HEALTH, "ServerLive"),
    (HEALTH, "ServerReady"),
    (HEALTH, "ModelReady"),
    (USE, "ServerMetadata"),
    (USE, "ModelMetadata"),
    (USE, "ModelConfig"),
    (USE, "ModelStatistics"),
    (USE, "ModelInfer"),
    (USE, "ModelStreamInfer"),
    (USE, "SystemSharedMemoryStatus"),
    (USE, "SystemSharedMemoryRegister"),
    (USE, "SystemSharedMemoryUnregister"),
    (USE, "CudaSharedMemoryStatus"),
    (USE, "CudaSharedMemoryRegister"),
    (USE, "CudaSharedMemoryUnregister"),
    (MANAGE, "RepositoryIndex"),
    (SETTINGS, "TraceSetting"),
    (SETTINGS, "LogSettings"),
    (LOAD, "RepositoryModelLoad"),
    (LOAD, "RepositoryModelUnload"),
]

CONFIG = json.dumps({
    "name": "evil", "backend": "python", "max_batch_size": 0,
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}],
})  # fmt: skip

CREDENTIALS = ("none", "wrong", "inference key", "management key", "inference token", "management token")


class Guarded(Home):
    """A server with these options of `torchserve` and of `pharos`, and a model that writes a file when it runs."""

    def __init__(self, folder, arguments=(), options=()):
        super().__init__(folder, ["load_models=all"], arguments)
        # The model runs in a sandbox.
        self.mark = folder / "written/evil-was-here"
        self.mark.parent.mkdir()
        self.command += [*options, f"--worker-sandbox-write={self.mark.parent}"]
        self.archive("m")
        self.keys = {}

    def __enter__(self):
        super().__enter__()
        path = self.folder / "key_file.json"
        if path.exists():
            self.keys = {name: found["key"] for name, found in json.loads(path.read_text()).items()}
        return self

    def bearer(self, credential) -> str | None:
        """Returns the value of `Authorization`; `None` for no header."""
        if credential == "none":
            return None
        keys = {"inference key": "inference", "management key": "management"}
        token = {"inference token": "infer-1", "management token": "admin-1"}.get(credential, "wrong")
        return f"Bearer {self.keys.get(keys.get(credential), token)}"

    def code(self):
        """Returns the code of the model."""
        return f"open({str(self.mark)!r}, 'w').close()\nclass TritonPythonModel:\n    def execute(self, requests):\n        return []\n"

    def over_http(self, method, path, credential, port=None, headers=None):
        """Returns the outcome of an HTTP request."""
        code = base64.b64encode(self.code().encode()).decode()
        parameters = {"config": CONFIG, "file:1/model.py": code} if "load" in path.replace("%6c", "l") else {}
        body = json.dumps({"parameters": parameters}) if method == "POST" else None
        bearer = self.bearer(credential)
        headers = {**(headers or {}), **({"Authorization": bearer} if bearer else {})}
        status, _, text = self.ask(method, path, body, headers, port)
        for said, name in [
            (b"InvalidKeyException", "key"),
            (b"Model API disabled", "model api"),
            (b"Log and trace settings are disabled", "settings"),
            (b"needs a token for management; the request", "scope"),
            (b"This API is restricted", "restricted"),
            # An unknown model or region has another text.
            (b'"Not Found"', "nowhere"),
            (b"ResourceNotFoundException", "nowhere"),
        ]:
            if said in text:
                assert status == STATUSES[name], (name, status, text)
                return name
        return {401: "token", 405: "method"}.get(status, "allowed")

    def over_grpc(self, path, credential, port=None, metadata=()):
        """Returns the outcome of a gRPC call."""
        body = b""
        if path.endswith("RepositoryModelLoad"):
            text = lambda value: (3, value)
            parameters = [("config", message(text(CONFIG))), ("file:1/model.py", message((4, self.code())))]
            body = message((2, "evil"), *[(3, message((1, name), (2, value))) for name, value in parameters])
        bearer = self.bearer(credential)
        metadata = [*metadata, *([("authorization", bearer)] if bearer else [])]
        with grpc.insecure_channel(f"{HOST}:{port or self.grpc}") as channel:
            call = channel.stream_stream(path, lambda data: data, lambda data: data)
            try:
                list(call(iter([body]), metadata=metadata, timeout=60))
            except grpc.RpcError as error:
                code, details = error.code(), error.details()
                return {
                    "UNAUTHENTICATED": "token",
                    "UNIMPLEMENTED": "allowed" if details else "nowhere",
                    "PERMISSION_DENIED": "key" if "Token Authorization failed" in details
                    else "model api" if "Model API disabled" in details
                    else "settings" if "Log and trace settings are disabled" in details else "scope",
                    "UNAVAILABLE": "restricted" if "restricted" in details else "allowed",
                }.get(code.name, "allowed")  # fmt: skip
        return "allowed"


def table(keys, tokens, model_api):
    """Returns the expected outcome of a request to the inference port, by class and credential."""

    def expected(kind, credential):
        need = "management" if kind in (MANAGE, LOAD, SETTINGS) else "inference"
        if keys:
            opens = credential == f"{need} key"
            if tokens:
                # A management token also permits inference, as on the server's own ports.
                opens |= credential == "management token" or credential == f"{need} token"
            if not opens:
                return "key"
        elif tokens and kind != HEALTH:
            if credential == "inference token" and need == "management":
                return "scope"
            if credential not in ("management token", f"{need} token"):
                return "token"
        if kind == SETTINGS and not keys and not tokens:
            return "settings"
        return "model api" if kind == LOAD and not model_api else "allowed"

    return expected


def check(found: dict, expected: dict):
    """Fails with the differing rows only."""
    wrong = {row: (found[row], expected[row]) for row in expected if found[row] != expected[row]}
    assert not wrong, "\n".join(f"{row}: {got}, expected {wanted}" for row, (got, wanted) in wrong.items())


@pytest.fixture(scope="module")
def token_files(tmp_path_factory):
    """Returns the options that name token files."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "inference").write_text("infer-1\n")
    (folder / "management").write_text("admin-1\n")
    return [f"--inference-token-file={folder / 'inference'}", f"--management-token-file={folder / 'management'}"]


CASES = {
    "keys": (True, False, False),
    "keys and model api": (True, False, True),
    "keys and tokens": (True, True, False),
    "tokens and model api": (False, True, True),
    "nothing": (False, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_credentials_of_every_v2_route_on_every_port(tmp_path, token_files, case):
    keys, tokens, model_api = CASES[case]
    arguments = [*([] if keys else ["--disable-token-auth"]), *(["--enable-model-api"] if model_api else [])]
    expected, found, wanted = table(keys, tokens, model_api), {}, {}
    server = Guarded(tmp_path, arguments, token_files if tokens else [])
    loads = [row for row in HTTP_ROUTES + [(kind, name) for kind, name in GRPC_ROUTES] if row[0] == LOAD]
    assert len(loads) == 4
    with server:
        for credential in CREDENTIALS:
            allowed_to_load = expected(LOAD, credential) == "allowed"
            for kind, method, path in HTTP_ROUTES:
                row = (credential, method, path)
                found[row], wanted[row] = server.over_http(method, path, credential), expected(kind, credential)
                # The other ports do not serve these routes; they report this only to permitted clients.
                for port in (server.management, server.metrics):
                    own = expected(MANAGE, credential) if port == server.management and keys else "allowed"
                    row = (*row[:3], "management" if port == server.management else "metrics")
                    found[row] = server.over_http(method, path, credential, port)
                    wanted[row] = "nowhere" if own == "allowed" else own
            for service in (KSERVE, ALIAS):
                for kind, name in GRPC_ROUTES:
                    row = (credential, service, name)
                    found[row] = server.over_grpc(service + name, credential)
                    wanted[row] = expected(kind, credential)
                    row = (*row, "management")
                    own = expected(MANAGE, credential) if keys else "allowed"
                    found[row] = server.over_grpc(service + name, credential, server.grpc_management)
                    wanted[row] = own if keys and own != "allowed" else wanted_on_management(kind, credential, expected)
            # The file is written by a permitted load, so the test can fail.
            assert server.mark.exists() == allowed_to_load, credential
            server.mark.unlink(missing_ok=True)
        check(found, wanted)
        assert server.process.poll() is None


def wanted_on_management(kind, credential, expected):
    """Returns the expected outcome of a v2 call on the management gRPC port, which does not serve that protocol."""
    own = expected(kind, credential)
    return "nowhere" if own in ("allowed", "key") else own


ODD = [
    "//v2/repository/models/evil/load",
    "/v2//repository/models/evil/load",
    "/v2/./repository/models/evil/load",
    "/v2/x/../repository/models/evil/load",
    "/v2/%2e%2e/v2/repository/models/evil/load",
    "/%76%32/repository/models/evil/load",
    "/v2%2Frepository%2Fmodels%2Fevil%2Fload",
    "/v2/%72epository/models/evil/load",
    "/v2/repository/models/evil/load/",
    "/v2/repository/models/evil//load",
    "/v2/repository/models/evil%2Fload",
    "/v2/repository/models/evil/%6coad",
    "/v2/repository/models/evil/load?x=/v2/health/live",
    "/v2/repository/models/evil/load;/v2/models/m/infer",
    "/v2/models/m/infer/../../../repository/models/evil/load",
    "/V2/repository/models/evil/load",
    "/v2/repository/index/",
    "/v2/logging/",
    "/ping/../v2/repository/models/evil/load",
    "/predictions/../v2/repository/models/evil/load",
]


def test_no_spelling_of_a_path_bypasses_the_check(tmp_path):
    """With the inference key, and even the management key, no load is possible while `enable_model_api` is off."""
    with Guarded(tmp_path) as server:
        for port in (server.inference, server.management, server.metrics):
            for credential in ("none", "inference key", "management key"):
                for path in ODD:
                    for method in ("POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
                        if method == "HEAD" and credential != "none":
                            continue
                        outcome = server.over_http(method, path, credential, port)
                        refused = ("key", "nowhere", "method", "model api")
                        # TorchServe's own rules lead these to the endpoints of predictions and health.
                        own = path.startswith(("/ping/", "/predictions/")) or method == "HEAD"
                        assert own or outcome in refused, (port, credential, method, path, outcome)
        for path in (
            "/" + KSERVE + "RepositoryModelLoad",
            KSERVE + "RepositoryModelLoad/",
            KSERVE + "%52epositoryModelLoad",
            KSERVE.replace("/i", "/I") + "RepositoryModelLoad",
            INFERENCE + "RepositoryModelLoad",
            MANAGEMENT + "RepositoryModelLoad",
        ):
            for port in (server.grpc, server.grpc_management):
                for credential in ("none", "inference key", "management key"):
                    assert server.over_grpc(path, credential, port) in ("key", "nowhere"), (path, port, credential)
        assert not server.mark.exists()


def test_restricted_parts_on_torchserves_ports(tmp_path):
    rules = ["--http-restricted-api=model-repository,logging:admin=x", "--grpc-restricted-protocol=model-repository,trace:admin=x"]
    arguments = ["--disable-token-auth", "--enable-model-api"]
    with Guarded(tmp_path, arguments, rules) as server:
        for method, path in (("POST", "/v2/repository/index"), ("GET", "/v2/logging"), ("POST", "/v2/repository/models/evil/load")):
            assert server.over_http(method, path, "none") == "restricted", path
        assert server.over_http("GET", "/models", "none", server.management) == "restricted"
        assert server.over_http("GET", "/v2/trace/setting", "none") == "settings"
        for name in ("RepositoryIndex", "RepositoryModelLoad", "TraceSetting"):
            assert server.over_grpc(KSERVE + name, "none") == "restricted", name
        assert server.over_grpc(MANAGEMENT + "ListModels", "none", server.grpc_management) == "restricted"
        assert server.over_grpc(KSERVE + "LogSettings", "none") == "settings"
        assert not server.mark.exists()
        assert server.over_http("GET", "/v2/logging", "none", headers={"admin": "x"}) == "allowed"
        metadata = [("triton-grpc-protocol-admin", "x")]
        assert server.over_grpc(KSERVE + "RepositoryIndex", "none", metadata=metadata) == "allowed"


def test_token_files_protect_torchserves_api(tmp_path, token_files):
    """Without TorchServe's keys; refusals are counted."""
    with Guarded(tmp_path, ["--disable-token-auth"], token_files) as server:
        for credential, inference, management in [
            ("none", "token", "token"), ("wrong", "token", "token"),
            ("inference token", "allowed", "scope"), ("management token", "allowed", "allowed"),
        ]:  # fmt: skip
            # A prediction for an unknown model has a different error.
            assert server.over_http("POST", "/predictions/m", credential) == inference
            assert server.over_http("GET", "/models", credential, server.management) == management
            assert server.over_http("GET", "/workflows", credential, server.management) == management
            assert server.over_grpc(INFERENCE + "Predictions", credential) == inference
            assert server.over_grpc(MANAGEMENT + "ListModels", credential, server.grpc_management) == management
            assert server.over_http("GET", "/ping", credential) == "allowed"
            assert server.over_http("GET", "/metrics", credential, server.metrics) == "allowed"


def test_ping_reports_models_that_the_v2_protocol_unloaded(tmp_path):
    with Guarded(tmp_path, ["--disable-token-auth", "--enable-model-api"]) as server:
        ping = lambda: server.ask("GET", "/ping")[0]
        eventually("the model is ready", lambda: server.predict("m")[0] == 200)
        assert ping() == 200
        assert server.ask("POST", "/v2/repository/models/m/unload", "")[0] == 200
        eventually("predictions are refused", lambda: server.predict("m")[0] == 503)
        status, _, text = server.ask("GET", "/ping")
        assert (status, json.loads(text)) == (500, {"status": "Unhealthy"})
        assert server.ask("POST", "/v2/repository/models/m/load", "")[0] == 200
        eventually("the model answers again", lambda: server.predict("m")[0] == 200)
        assert ping() == 200
        status, answer = server.manage("PUT", "/models/m?min_worker=0&synchronous=true")
        assert (status, ping()) == (200, 200), answer


def test_warns_about_remote_loads_without_a_token(start, tmp_path, token_files):
    """One block of log lines names the addresses; absent on loopback addresses, with tokens, or if loading is disabled."""
    words = "models can be loaded by request without a token"

    def log(server):
        return server.log.read_text(errors="replace")

    explicit = "--model-control-mode=explicit"
    everywhere = ["--http-address=0.0.0.0", "--grpc-address=0.0.0.0"]
    server = start(["identity_fp32_nobatch"], explicit, *everywhere)
    assert log(server).count(words) == 1 and "HTTP on 0.0.0.0:" in log(server) and "gRPC on 0.0.0.0:" in log(server)
    for options in (
        [explicit, "--http-address=127.0.0.1", "--grpc-address=127.0.0.1"],
        [explicit, *everywhere, *token_files],
        everywhere,
        [explicit, *everywhere, "--http-restricted-api=model-repository:k=v", "--grpc-restricted-protocol=model-repository:k=v"],
    ):
        assert words not in log(start(["identity_fp32_nobatch"], *options)), options
    home = Guarded(tmp_path, ["--disable-token-auth", "--enable-model-api"])
    text = (tmp_path / "config.properties").read_text().replace(f"http://{HOST}:{home.management}", f"http://0.0.0.0:{home.management}")
    (tmp_path / "config.properties").write_text(text)
    with home:
        shown = lambda: (tmp_path / "out").read_text()
        eventually("the warning is logged", lambda: f"TorchServe's management API on 0.0.0.0:{home.management}" in shown())
        assert "TorchServe's inference" not in shown()
