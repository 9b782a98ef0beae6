"""Sends requests to every route of every listener with every kind of credential, in unusual spellings and with every method, and
compares the outcome with the tables of `access_table.py`. A request that must be refused announces a body and does not send it,
because the refusal must precede reading the body."""

import http.client
import mmap
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.ports import free_ports
from harness.server import MODELS, ROOT, Server
from harness.waiting import eventually
from security import access_table as table
from security.access_client import GRPC_PREFIX, Answer, Credentials, Http1, Http2, restrictions, token_files
from security.access_table import LISTENERS, METHODS, SPELLINGS, TORCHSERVE, V2
from torchserve.home import Home, message

REFUSALS = ("token", "scope", "restricted", "key")
STATUS = {"token": 401, "scope": 403, "restricted": 403, "key": 400, "model_api": 403, "unknown": 404, "method": 405}
PLATFORMS = ("sagemaker", "vertex_ai")
REGION = "/pharos-access-walk"

INFER = b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"FP32","data":[1]}]}'
BODIES = {
    "/infer": INFER, "/invocations": INFER, "/predict": INFER, "/invoke": INFER,
    "/generate": b'{"INPUT0":1.0}', "/generate_stream": b'{"INPUT0":1.0}', "predict": b'{"instances":[[1]]}',
    "/trace/setting": b'{"trace_rate":"7"}', "/logging": b'{"log_verbose_level":1}', "/models": b'{"model_name":"id"}',
    "/register": f'{{"key":"{REGION}","offset":0,"byte_size":4}}'.encode(),
    "RepositoryModelLoad": message((2, "other")), "RepositoryModelUnload": message((2, "other")),
    "LogSettings": message((1, message((1, "log_verbose_level"), (2, message((2, 1)))))),
}  # fmt: skip


class Walk:
    """Sends requests to the ports of one server and collects deviations from the table of its configuration."""

    def __init__(self, ports: dict, outcomes: dict, credentials: Credentials, server=None):
        self.ports, self.outcomes, self.credentials, self.server = ports, outcomes, credentials, server
        self.columns = list(dict.fromkeys(credential for _, credential in outcomes))
        self.clients, self.faults, self.requests = {}, [], 0

    def send(self, listener, row, credential, path=None, method=None, http2=False, expected="ok") -> Answer:
        """Sends a row's request, or one with another path or method; omits the body if the request must be refused."""
        is_rpc = "grpc" in listener
        headers = self.credentials.headers(credential, row.part, GRPC_PREFIX if is_rpc else "")
        path, _, redirect = (path or row.path).partition(">")
        if redirect:
            headers["x-vertex-ai-triton-redirect"] = redirect
        body = body_of(row) if method is None else None
        if is_rpc:
            headers |= {"content-type": "application/grpc", "te": "trailers"}
            body = b"\0" + len(body or b"").to_bytes(4, "big") + (body or b"")
        make = Http2 if is_rpc or http2 else Http1
        client = self.clients.setdefault((listener, make), make(self.ports[listener]))
        self.requests += 1
        if self.server and any(word in path.lower() for word in ("ready", "ping", "health")):
            # An unload is answered before it ends, and the server is not ready until then.
            eventually("the unload has ended", lambda: is_ready(self.server))
        withheld = body is not None and expected not in ("ok", "model_api")
        return client.ask(method or row.method, path, headers, body, withheld)

    def check(self, listener, row, credential, expected, **changes):
        """Sends a request and records an unexpected answer. `expected` is an outcome, or `closed` for any but `ok`."""
        try:
            answer = self.send(listener, row, credential, expected=expected, **changes)
        except TimeoutError:
            answer = Answer(0, None, "no answer; does it wait for the body?")
        if answer.status == 0:
            right = False
        elif changes.get("method") == "HEAD" and answer.code is None:
            # Without a body the status is the only evidence.
            right = 400 <= answer.status < 500 if expected == "closed" else answer.status == STATUS[expected]
        elif expected == "closed":
            loads = self.outcomes.get((row.kind, credential)) == "model_api"
            right = answer.outcome() not in (("ok",) if loads else ("ok", "model_api"))
        elif expected == "ok":
            right = answer.outcome() not in REFUSALS and row.answer in ("*", str(answer.status), answer.code)
        elif expected == "unknown" and row.kind.startswith("unknown"):
            right = answer.outcome() == "unknown" and row.answer in (str(answer.status), answer.code)
        else:
            right = answer.outcome() == expected
        if not right:
            what = f"{listener} {changes.get('method', row.method)} {changes.get('path', row.path)} with {credential}"
            found = f"{answer.outcome()} ({answer.status}, {answer.code}, {answer.text[:120]!r})"
            self.faults.append(f"{what}: expected {expected} {row.answer}, got {found}")

    def walk(self, listener, credential, **changes):
        """Sends every row unchanged."""
        for row in LISTENERS[listener]:
            self.check(listener, row, credential, self.outcomes[row.kind, credential], **changes)

    def walk_spellings(self, listener, credential):
        """Sends every row with every spelling of its path."""
        unknown = next(row.kind for row in LISTENERS[listener] if row.kind.startswith("unknown"))
        exact = listener in ("http", "metrics", "vertex_ai") or "grpc" in listener
        for name, (spell, meaning) in SPELLINGS.items():
            if name == "absolute form" and "grpc" in listener:
                continue
            for row in LISTENERS[listener]:
                path = spell(row.path.partition(">")[0])
                if path == row.path or ">" in row.path or (listener == "grpc" and row.answer == "UNIMPLEMENTED"):
                    continue
                if meaning == "same":
                    self.check(listener, row, credential, self.outcomes[row.kind, credential], path=path)
                elif exact and not re.match("/v2/repository/(somewhere/)?models/", path):
                    self.check(listener, as_unknown(row), credential, self.outcomes[unknown, credential], path=path)
                elif self.outcomes[row.kind, credential] in (*REFUSALS, "model_api"):
                    # The path may lead to another route, but only to one that this credential opens.
                    self.check(listener, row, credential, "closed", path=path)

    def walk_methods(self, listener, credential):
        """Sends every path with every method that it does not support."""
        rows, exact = LISTENERS[listener], listener in ("http", "metrics", "vertex_ai")
        known = {(row.method, row.path) for row in rows}
        # Of several rows of a path, the first one is for the methods that it does not support.
        for row in {row.path: row for row in reversed(rows) if ">" not in row.path}.values():
            outcome = self.outcomes[row.kind, credential]
            for method in METHODS:
                if (method, row.path) in known or (method == "HEAD" and ("GET", row.path) in known):
                    continue
                if outcome in REFUSALS:
                    # With another method TorchServe's paths belong to other routes, or to none.
                    expected = outcome if exact or "grpc" in listener else "closed"
                elif exact:
                    expected = "method" if outcome == "ok" else outcome
                else:
                    continue
                if listener == "vertex_ai" and row.kind == "unknown":
                    expected = "closed"
                self.check(listener, row, credential, expected, method=method)

    def opens(self, credential) -> set:
        """Returns the classes that a credential opens."""
        return {kind for (kind, column), outcome in self.outcomes.items() if column == credential and outcome == "ok"}

    def state(self, listener, kind) -> list:
        """Returns the state that requests of a class change, read with a credential that opens it."""
        credential = next(column for column in self.columns if self.outcomes[kind, column] == "ok")
        paths = {
            "manage": ("/v2/repository/index", "/v2/logging", "/v2/trace/setting"),
            "use": ("/v2/systemsharedmemory/status", "/v2/models/stats"),
        }
        rows = [next(row for row in LISTENERS["http"] if row.path == path) for path in paths[kind]]
        if self.server:
            eventually("the unload has ended", lambda: is_ready(self.server))
        return [self.send(listener, row, credential).text for row in rows]

    def walk_all(self, listener):
        """Sends every row with every credential; refused requests must not change any state."""
        changed = set()
        for credential in self.columns:
            kinds = ("manage", "use")
            before = {kind: self.state(listener, kind) for kind in kinds}
            for other in self.ports:
                self.walk(other, credential)
            for kind in kinds:
                if self.state(listener, kind) != before[kind]:
                    changed.add(kind)
                    if kind not in self.opens(credential):
                        self.faults.append(f"{credential} changed what {kind} opens")
        return changed

    def end(self):
        """Fails with all collected deviations."""
        for client in self.clients.values():
            client.close()
        assert not self.faults, f"{len(self.faults)} of {self.requests}:\n" + "\n".join(self.faults[:60])


def as_unknown(row):
    """Returns the row for another spelling of its path, for which the route table has no status."""
    return table.Row(row.method, row.path, row.route, row.part, "*", "spelling")


def body_of(row) -> bytes | None:
    """Returns the body of a request for a row."""
    if row.method not in ("POST", "PUT"):
        return None
    path = row.path.partition(">")[0].partition("?")[0]
    return next((body for end, body in BODIES.items() if path.endswith(end)), None)


@contextmanager
def v2_server(folder: Path, case: str):
    """A server with these credentials, the model `m` loaded, the model `other` not loaded, and all listeners open."""
    for name in ("m", "other"):
        (folder / "models" / name / "1").mkdir(parents=True)
        text = (MODELS / "identity_fp32/config.pbtxt").read_text().replace('"identity_fp32"', f'"{name}"')
        (folder / "models" / name / "config.pbtxt").write_text(text)
    sagemaker, vertex_ai = free_ports(2)
    options = ["--model-control-mode=explicit", "--load-model=m", "--vertex-ai-default-model=m"]
    options += ["--allow-sagemaker=true", f"--sagemaker-port={sagemaker}"]
    options += ["--allow-vertex-ai=true", f"--vertex-ai-port={vertex_ai}"]
    options += token_files(folder, case) + (restrictions() if "restricted" in case else [])
    server = Server(folder, [folder / "models"], options)
    server.environment = {
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m", "AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health",
    }  # fmt: skip
    server.launch()
    try:
        eventually("the server is ready", lambda: is_ready(server))
        ports = {"http": server.http_port, "grpc": server.grpc_port, "metrics": server.metrics_port}
        yield {**ports, "sagemaker": sagemaker, "vertex_ai": vertex_ai}, server
        assert server.process.poll() is None, server.log_tail()
    finally:
        if server.process.poll() is None:
            server.kill()


def is_ready(server) -> bool:
    """Returns whether the server answers, with the header that restricted health needs."""
    assert server.process.poll() is None, server.log_tail()
    try:
        return server.get("/v2/health/ready", headers=Credentials().headers("own", "health", ""))[0] == 200
    except OSError:
        return False


@contextmanager
def torchserve(folder: Path, case: str):
    """`pharos torchserve` with these credentials and no model."""
    home = Home(folder, arguments=[] if "keys" in case else ["--disable-token-auth"])
    home.command += token_files(folder, case) + (restrictions() if "restricted" in case else []) + ["--allow-client-shm"]
    ports = {
        "torchserve_inference": home.inference, "torchserve_management": home.management,
        "torchserve_metrics": home.metrics, "torchserve_grpc": home.grpc, "torchserve_grpc_management": home.grpc_management,
    }  # fmt: skip
    if case.startswith("one address"):
        text = (folder / "config.properties").read_text()
        for port in (home.management, home.metrics):
            text = text.replace(f":{port}\n", f":{home.inference}\n")
        (folder / "config.properties").write_text(text)
        ports = {"torchserve_one_address": home.inference}
    if case == "tokens":
        (ports["torchserve_http"],) = free_ports(1)
        home.command += ["--http-address=127.0.0.1", f"--http-port={ports['torchserve_http']}"]
    with home:
        yield ports, folder / "key_file.json"
        assert home.process.poll() is None


@pytest.fixture(scope="module", autouse=True)
def region():
    """A shared memory file to register."""
    path = Path("/dev/shm" + REGION)
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield
    path.unlink()


@pytest.mark.parametrize("case", V2)
def test_the_v2_listeners(tmp_path, case):
    """Sends every row with every credential; the server's state proves that refused requests had no effect."""
    with v2_server(tmp_path, case) as (ports, server):
        walk = Walk(ports, table.outcomes(V2[case]), Credentials(), server)
        changed = walk.walk_all("http")
        if case == "tokens":
            for listener in ports:
                for credential in ("none", "inference", "management"):
                    walk.walk_spellings(listener, credential)
                    walk.walk_methods(listener, credential)
                if listener != "grpc":
                    for credential in walk.columns:
                        walk.walk(listener, credential, http2=True)
            walk_other_protocols(walk)
        walk.end()
        # Allowed requests do change the state, so the comparison can fail.
        assert changed == {"manage", "use"}


def walk_other_protocols(walk):
    """The gRPC port does not answer HTTP/1.1 and, over HTTP/2, only gRPC."""
    client = Http2(walk.ports["grpc"])
    for row in LISTENERS["http"] + LISTENERS["grpc"]:
        path = row.path.partition(">")[0]
        answer = client.ask(row.method, path, {"content-type": "application/json"}, body_of(row), False)
        if answer.outcome() == "ok" and answer.status != 415:
            walk.faults.append(f"grpc {row.method} {row.path} as JSON: {answer}")
        try:
            answer = Http1(walk.ports["grpc"]).ask(row.method, path, {}, body_of(row), False)
            walk.faults.append(f"grpc {row.method} {row.path} over HTTP/1.1: {answer}")
        except (http.client.HTTPException, ConnectionError):
            pass
    client.close()


@pytest.mark.parametrize("case", TORCHSERVE)
def test_the_listeners_of_torchserve(tmp_path, case):
    """Sends every row with every credential; in two configurations also with unusual spellings and methods."""
    with torchserve(tmp_path, case) as (ports, keys):
        walk = Walk(ports, table.outcomes(TORCHSERVE[case]), Credentials(keys))
        walk.walk_all(next(iter(ports)))
        if case in ("keys", "tokens", "one address: keys tokens"):
            for listener in ports:
                for credential in ("none", walk.columns[2], walk.columns[3]):
                    walk.walk_spellings(listener, credential)
                    walk.walk_methods(listener, credential)
                if "grpc" not in listener:
                    walk.walk(listener, "none", http2=True)
        walk.end()


# ---- the tables are complete -------------------------------------------------------------------------------------------


def source(words: str, below: str) -> str:
    """Returns the text of the only source file that contains these words, without its tests and comments."""
    files = [path for path in (ROOT / below).rglob("*.rs") if words in path.read_text() and "/target/" not in str(path)]
    assert len(files) == 1, f"{words!r} is in {files}"
    return code_of(files[0])


def code_of(path: Path) -> str:
    """Returns the text of a source file without its unit tests and comments."""
    text = re.split(r"#\[cfg\(test\)\]\s+(?:#\[.*\]\s+)*mod ", path.read_text())[0]
    return re.sub(r"^ *//.*$", "", text, flags=re.M)


def test_every_route_of_the_metrics_has_a_row():
    """`enum Route` lists all HTTP routes; members without a path are those of gRPC alone."""
    body = re.search(r"pub enum Route \{(.*?)\n *\}", source("pub enum Route {", "src"), re.S).group(1)
    routes = set(re.findall(r"^ +([A-Z]\w+) =>", body, re.M))
    assert len(routes) > 30
    listed = {row.route for listener, rows in LISTENERS.items() if "grpc" not in listener for row in rows}
    assert routes - listed == {"StreamInfer", "HealthCheck", "Reflection", "StreamPredict", "LoadReport"}
    assert listed <= routes


def test_every_rpc_has_a_row():
    """Compares the services of `proto/` with the methods in the classification of paths."""
    rpcs = {path.stem: set(re.findall(r"^\s*rpc (\w+)", path.read_text(), re.M)) for path in (ROOT / "proto").rglob("*.proto")}
    services = {
        "grpc_service": [("grpc", table.KSERVE), ("torchserve_grpc", table.KSERVE), ("torchserve_grpc", table.ALIAS)],
        "orca": [("grpc", table.LOAD_REPORT), ("torchserve_grpc", table.LOAD_REPORT)],
        "torchserve_inference": [("torchserve_grpc", table.INFERENCE)],
        "torchserve_management": [("torchserve_grpc_management", table.MANAGEMENT)],
    }
    # Services of collectors, which the server calls.
    called = {"trace_service", "metrics_service"}
    assert {name for name, found in rpcs.items() if found} - called == set(services)
    for name, places in services.items():
        for listener, service in places:
            rows = {row.route for row in LISTENERS[listener] if row.path.startswith(service)}
            assert rows - {"None"} == rpcs[name], (listener, service)
    classified = set(re.findall(r'"([A-Z]\w+)"', source("fn of_grpc(", "frontend")))
    assert classified == {row.route for row in LISTENERS["grpc"] if row.part != "unknown"}
    classified = set(re.findall(r'"([A-Z]\w+)"', source("fn of_path(path: &str) -> Route", "frontend")))
    listed = [*LISTENERS["torchserve_grpc"], *LISTENERS["torchserve_grpc_management"]]
    own = [row for row in listed if row.path.startswith((table.INFERENCE, table.MANAGEMENT))]
    assert classified == {row.route for row in own if row.part != "unknown"}


def test_every_path_of_the_routers_has_a_row():
    """Compares the paths in the sources of the HTTP edge with the rows."""
    http = [path for path in (ROOT / "frontend").rglob("*.rs") if "http" in path.parts and "target" not in path.parts]
    text = "\n".join(code_of(path) for path in http)
    paths = re.findall(r'\.route\(\s*&?(?:format!\()?"([^"]+)"', text)
    paths += [f"/v2/models/{{m}}{suffix}" for suffix in re.findall(r'model_route\(router, "([^"]*)"', text)]
    paths = [path for path in paths if "{suffix}" not in path]
    paths += re.findall(r'\("(/[^"]+)", [A-Z]+, include_str!', text)
    assert len(paths) > 30
    listed = [row.path for listener in ("http", "metrics") for row in LISTENERS[listener] if row.answer in ("200", "400", "501")]
    for path in paths:
        path = path.replace("{{", "{").replace("}}", "}")
        pattern = re.sub(r"\\\{base\\\}", "/v2/(system|cuda)sharedmemory", re.escape(path))
        pattern = re.sub(r"\\\{\\\*\w+\\\}", ".+", pattern)
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", pattern)
        assert any(re.fullmatch(pattern, known) for known in listed), f"no row for {path}"


@pytest.mark.parametrize(("words", "listeners"), [
    ('"wfpredict"', ("torchserve_inference", "torchserve_management", "torchserve_metrics")),
    ('"/invocations" =>', ("sagemaker",)),
])  # fmt: skip
def test_every_word_of_the_matched_paths_has_a_row(words, listeners):
    """TorchServe's and SageMaker's paths are matched by segment."""
    text = source(words, "frontend")
    matched = re.findall(r'^ +(?:\(&Method::\w+, )?((?:\[|"/)[^=\n]*?)(?: if [^=\n]*)?=>', text, re.M)
    found = {word for pattern in matched for word in re.findall(r'"([/a-z0-9-]+)"', pattern)}
    listed = "\n".join(row.path for listener in listeners for row in LISTENERS[listener]) + "\n"
    missing = {word for word in found if word.strip("/") and not re.search(rf"\b{re.escape(word.strip('/'))}\b", listed)}
    assert len(found) > 1 and not missing
