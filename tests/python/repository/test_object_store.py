"""Models in a bucket of an S3-compatible server: all control modes, the fetched and the cached files, interrupted downloads,
hostile keys, and stores that are unreachable, refuse requests or do not answer."""

import json
import signal
import ssl
import threading
import time
import urllib.parse
import urllib.request

import pytest
import tritonclient.grpc

from harness import onnx_file
from harness.certificates import Authority
from harness.inference import one
from harness.models import copy_models
from harness.server import Server, kill_all, total
from harness.waiting import DEADLINE_S, eventually, join_all, run_for
from repository.object_stores import CREDENTIALS, Azurite, Between, Store, azurite, empty, files_below
from repository.repository_tables import ensemble

EXPLICIT = "--model-control-mode=explicit"
POLL = ["--model-control-mode=poll", "--repository-poll-secs=1"]
REQUEST = one("FP32", [1, 1], [1])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Starts moto; each test uses a separate prefix or bucket."""
    with Store(tmp_path_factory.mktemp("moto")) as running:
        yield running


@pytest.fixture
def between(store):
    """The emptied store behind a proxy that counts requests and breaks answers."""
    store.drop("")
    with Between(store) as running:
        yield running


@pytest.fixture
def serve(tmp_path):
    """Starts a server: `serve([repositories], *options)`; its temporary files are in `tmp_path/tmp`."""
    started = []
    empty(tmp_path / "tmp")

    def begin(repositories, *options, wait=True, environment=None):
        server = Server(tmp_path, repositories, list(options))
        server.environment = CREDENTIALS | {"TMPDIR": str(tmp_path / "tmp")} | (environment or {})
        started.append(server)
        server.launch()
        if wait:
            server.wait_until_ready()
        return server

    yield begin
    kill_all(started)


def works(server, name: str, version="") -> bool:
    """Returns whether a model answers."""
    path = f"/v2/models/{name}" + (f"/versions/{version}" if version else "")
    return server.ask("POST", f"{path}/infer", json.dumps(REQUEST))[0] == 200


def load(server, name: str) -> tuple:
    """Loads a model; returns the status and the error."""
    status, text = server.ask("POST", f"/v2/repository/models/{name}/load", b"{}")
    return status, json.loads(text)["error"] if text and status != 200 else ""


def unload(server, name: str) -> int:
    return server.ask("POST", f"/v2/repository/models/{name}/unload", b"{}")[0]


def batch_size(server, name: str) -> int:
    """Returns the model's maximum batch size."""
    status, text = server.get(f"/v2/models/{name}/config")
    return json.loads(text)["max_batch_size"] if status == 200 else 0


def fails(server) -> str:
    """Waits until the server exits with status 1, and returns the end of its log."""
    code = server.process.wait(90)
    assert code == 1, server.log_tail()
    return server.log_tail()


def test_models_of_a_bucket_are_served(store, between, serve, tmp_path):
    """Models of a bucket beside those of a directory: ensembles over both, ONNX files, unusual names; no temporary file
    remains."""
    node = onnx_file.node("Identity", ["X"], ["Y"])
    store.model("remote")
    store.put("m/onnx/1/model.onnx", onnx_file.model([node], [("X", "FP32", ["n", 2])], [("Y", "FP32", ["n", 2])]))
    store.model("größe +%20", versions=(1, 3))
    store.put("m/remote/1/odd name %2e+ü.txt", "odd")
    store.put("m/remote/2/", "")
    store.put("m/README.md", "no model")
    store.put("m/.hidden/config.pbtxt", "no model")
    store.put("mm/other/config.pbtxt", "beside the prefix")
    store.model("both", config=ensemble("both", "remote", "identity_fp32"))
    near = copy_models(tmp_path / "near", ["identity_fp32"])
    server = serve([near, between.url()])
    assert set(server.index()) == {"remote", "onnx", "größe +%20", "both", "identity_fp32"}
    assert works(server, "remote") and works(server, "both") and works(server, "gr%C3%B6%C3%9Fe%20%2B%2520", "3")
    status, answer = server.infer("onnx", {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]})
    assert status == 200 and answer["outputs"][0]["data"] == [1, 2]
    assert any(path.endswith("/remote/1/odd name %2e+ü.txt") for path in files_below(tmp_path / "tmp"))
    assert server.stop() == 0
    assert not list((tmp_path / "tmp").glob("pharos-*")), "no cache directory was configured"


def test_a_bucket_without_a_path_is_served(store, between, serve):
    """A repository without a path, with a credential file instead of the environment variables."""
    store.model("plain", prefix="")
    server = serve([between.url("")])
    assert works(server, "plain") and set(server.index()) == {"plain"}


def test_only_changed_objects_are_fetched(store, between, serve, tmp_path):
    """With loads by request, each object is read once, then only new and changed objects."""
    store.model("m", versions=(1, 2), batch=8)
    server = serve([between.url()], EXPLICIT)
    assert between.fetched() == [], "no object is read before the load"
    assert load(server, "m") == (200, "") and works(server, "m", "2")
    assert between.fetched() == ["m/m/1/weights.bin", "m/m/2/weights.bin", "m/m/config.pbtxt"]
    workers = server.workers()
    assert load(server, "m") == (200, "")
    assert between.fetched() == [] and server.workers() == workers, "no object has changed"
    store.model("m", versions=(), batch=16)
    assert load(server, "m") == (200, "") and batch_size(server, "m") == 16
    assert between.fetched() == ["m/m/config.pbtxt"]
    store.put("m/m/3/weights.bin", "new")
    store.drop("m/m/1/")
    assert load(server, "m") == (200, "") and works(server, "m", "3")
    assert between.fetched() == ["m/m/3/weights.bin"]
    metrics, counted = server.scrape(), {"repository": between.url(), "result": "success"}
    assert total(metrics, "pharos_repository_fetches_total", **counted) == 5
    sizes = sum(len(text) for text in ("weights of m 1", "weights of m 2", "new"))
    assert total(metrics, "pharos_repository_fetched_bytes_total") > sizes
    assert 0 < total(metrics, "pharos_repository_fetch_seconds_total") < 30
    kept = [path for path in files_below(tmp_path / "tmp") if "/contents/" in path]
    assert len(kept) == 3, f"removed objects are deleted from the cache: {kept}"
    assert unload(server, "m") == 200
    assert load(server, "nothing") == (
        500,
        "failed to load 'nothing', failed to poll from model repository: model 'nothing' is not in "
        f"'{between.url()}'",
    )
    for name in ("..", "%2e%2e%2fx", ".hidden", "a%5cb"):
        status, error = load(server, name)
        assert status != 200, (name, error)
    assert files_below(tmp_path / "tmp") != []


@pytest.mark.slow
def test_poll(store, between, serve):
    """Polling detects new models, versions and configurations, and removed models; no request fails meanwhile."""
    store.model("m", batch=8)
    server = serve([between.url()], *POLL)
    failed, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            if not works(server, "m"):
                failed.append(server.get("/v2/models/m/ready"))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        store.model("m", batch=16)
        eventually("the new configuration is in use", lambda: batch_size(server, "m") == 16)
        store.put("m/m/2/weights.bin", "two")
        eventually("the new version serves", lambda: works(server, "m", "2"))
        store.model("other")
        eventually("the new model serves", lambda: works(server, "other"))
        store.drop("m/other/")
        eventually("the removed model is unloaded", lambda: not works(server, "other"))
    finally:
        stop.set()
        join_all(threads)
    assert failed == []
    check_idle_polls(between)


def check_idle_polls(between):
    """A poll without changes is one request and reads no object."""
    between.fetched()
    run_for("three polling intervals pass", 3.5)
    seen = list(between.seen)
    assert 2 <= len(seen) <= 5 and all("list-type=2" in path for path in seen), seen


def test_cache_directory(store, between, serve, tmp_path):
    """Cached files are not fetched again, belong to one server, and are removed after their objects."""
    store.model("a")
    store.model("b")
    cache = f"--repository-cache-directory={tmp_path / 'cache'}"
    server = serve([between.url()], cache)
    assert len(between.fetched()) == 4
    second = serve([between.url()], cache, wait=False)
    assert "another server uses it" in fails(second)
    assert server.stop() == 0
    store.drop("m/b/")
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.parent.name == "a"]
    (left[0].parent / "x.part-7").write_text("half of something")
    server = serve([between.url()], cache)
    assert between.fetched() == [] and works(server, "a") and set(server.index()) == {"a"}
    names = {path.parent.name for path in (tmp_path / "cache").rglob("*") if path.parent.parent.name == "contents"}
    assert names == {"a"} and not list((tmp_path / "cache").rglob("*.part-*"))
    workers = server.workers()
    assert server.stop() == 0 and workers
    assert oct(next((tmp_path / "cache").iterdir()).stat().st_mode)[-3:] == "700"


def test_files_of_a_killed_server_are_removed(store, between, serve, tmp_path):
    """The next server removes the temporary files of a killed one, and keeps those of running servers."""
    store.model("a")
    first, second = serve([between.url()]), serve([between.url()])
    first.kill()
    assert len(list((tmp_path / "tmp").glob("pharos-store-*"))) == 2
    third = serve([between.url()])
    assert len(list((tmp_path / "tmp").glob("pharos-store-*"))) == 2
    assert works(second, "a") and works(third, "a")


def test_interrupted_downloads_are_resumed(store, between, serve, tmp_path):
    """An interrupted download resumes at the same position. If it is always interrupted, the load fails, the previous version
    continues to serve, and the next poll retries."""
    weights = bytes(range(256)) * 4096
    store.model("m")
    store.put("m/m/1/weights.bin", weights)
    left = [3]

    def cut(path):
        if path.endswith("weights.bin") and left[0]:
            left[0] -= 1
            return ("cut", 100_000)
        return None

    between.trouble = cut
    server = serve([between.url()], *POLL)
    assert left == [0] and works(server, "m")
    served = next((tmp_path / "tmp").glob("*/models/*/m/1/weights.bin"))
    assert served.read_bytes() == weights
    failures = lambda: total(server.scrape(), "pharos_repository_fetches_total", result="failure")  # noqa: E731
    assert failures() == 0
    left[0] = 1000
    workers = server.workers()
    store.put("m/m/1/weights.bin", weights[::-1])
    eventually("the load was tried twice", lambda: server.log.read_text().count("model cannot be loaded") >= 2)
    assert works(server, "m") and server.workers() == workers, "the previous version still serves"
    assert served.read_bytes() == weights and not list((tmp_path / "tmp").rglob("*.part-*"))
    assert failures() >= 2
    left[0] = 0
    eventually("the new version serves", lambda: server.workers() and not workers & server.workers())
    kept = lambda: list((tmp_path / "tmp").glob("*/models/*/m/1/weights.bin"))  # noqa: E731
    eventually("the old files are removed", lambda: len(kept()) == 1)
    assert kept()[0].read_bytes() == weights[::-1]


def test_a_loaded_model_is_a_consistent_snapshot(store, between, serve, tmp_path):
    """The files of a loaded model were in the bucket at the same time, even if objects change during the download."""
    store.model("m", versions=(1, 2))
    changed = []

    def change(path):
        if path.endswith("config.pbtxt") and len(changed) < 2:
            changed.append(path)
            for version in (1, 2):
                store.put(f"m/m/{version}/weights.bin", f"generation {len(changed)}")
        return None

    between.trouble = change
    server = serve([between.url()], EXPLICIT)
    assert load(server, "m") == (200, "")
    texts = {path.read_text() for path in (tmp_path / "tmp").glob("*/models/*/m/*/weights.bin")}
    assert len(texts) == 1 and "generation" in texts.pop()


def test_hostile_keys(store, between, serve, tmp_path):
    """An invalid key fails only the load of its model, and no file is written outside of the directory."""
    store.model("good")
    keys = {
        "up": "m/up/../../../../x",
        "inside": "m/inside/1/../2/x",
        "empty": "m/empty//x",
        "dot": "m/dot/./x",
        "control": "m/control/1/a\x01b",
        "both": "m/both/1/weights.bin/x",
        "long": "m/long/" + "x" * 300,
        "deep": "m/deep/" + "d/" * 40 + "x",
    }
    for name in keys:
        store.model(name)
    for name, key in keys.items():
        store.put(key, "evil " + name)
    server = serve([between.url()], *POLL, "--exit-on-error=false", wait=False)
    eventually("the valid model serves", lambda: alive_and(server, lambda: works(server, "good")))
    log = server.log.read_text()
    for name in keys:
        assert not works(server, name), name
        assert "serving without the models that failed to load:" in log and name in log
    written = [path for path in tmp_path.rglob("*") if path.is_file() and b"evil" in path.read_bytes() and "tmp" in str(path)]
    assert all("/contents/" in str(path) for path in written), written
    store.model("good", batch=16)
    eventually("the valid model is still polled", lambda: batch_size(server, "good") == 16)


def alive_and(server, check) -> bool:
    """Returns the result of the check; an error of the connection means False."""
    assert server.process.poll() is None, server.log_tail()
    try:
        return check()
    except OSError:
        return False


@pytest.mark.parametrize(
    "case",
    ["no bucket", "no server", "refused", "error", "slow down", "no words", "endless", "no name", "no scheme", "no credential file"],
)
def test_an_unusable_repository_fails_the_start(case, store, between, serve, tmp_path):
    """A server that cannot read its repository exits with the reason."""
    store.model("m")
    url, environment, words = between.url(), {}, []
    if case == "no bucket":
        url, words = url.replace("/models/", "/nothing/"), ["bucket 'nothing'", "NoSuchBucket", "does not exist"]
    elif case == "no server":
        url, words = "s3://http://127.0.0.1:1/models/m", ["bucket 'models', key 'm'", "refused"]
    elif case == "refused":
        between.trouble, words = lambda path: 403, ["bucket 'models'", "Made: simulated"]
    elif case == "error":
        between.trouble, words = lambda path: 500, ["Made: simulated"]
    elif case == "slow down":
        between.trouble, words = lambda path: 503, ["Made: simulated"]
    elif case == "no words":
        between.trouble, words = lambda path: (404, b""), ["bucket 'models'", "404"]
    elif case == "endless":
        between.trouble, words = lambda path: (200, b" " * (65 << 20)), ["bucket 'models'", "the answer is too long"]
    elif case == "no name":
        url, words = "s3://", ["names no bucket"]
    elif case == "no scheme":
        url, words = "ftp://host/models", ["allowed are directories, s3://BUCKET/PATH"]
    else:
        environment = {"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / "none.json")}
        words = ["none.json' cannot be used: No such file"]
    server = serve([url], wait=False, environment=environment)
    code = server.process.wait(DEADLINE_S)
    text = server.log_tail()
    assert code != 0 and all(word in text for word in words), text
    if case in ("error", "slow down"):
        assert len(between.seen) == 4, "four attempts"


def test_an_unreachable_store_affects_only_its_models(store, between, serve, tmp_path):
    """Other repositories are not affected when a store is unreachable, at the start or later; it is used once it is reachable."""
    store.model("far")
    near = copy_models(tmp_path / "near", ["identity_fp32"])
    between.trouble = lambda path: 503
    server = serve([near, between.url()], *POLL, "--exit-on-error=false", wait=False)
    eventually("the model in the directory serves", lambda: alive_and(server, lambda: works(server, "identity_fp32")))
    assert not works(server, "far")
    reachable = lambda: total(server.scrape(), "pharos_repository_reachable", repository=between.url())  # noqa: E731
    assert reachable() == 0
    between.trouble = lambda path: None
    eventually("the model in the store serves", lambda: works(server, "far"))
    assert reachable() == 1
    between.trouble = lambda path: 503
    eventually("the store is reported as unreachable", lambda: reachable() == 0)
    assert works(server, "far") and set(server.index()) == {"far", "identity_fp32"}
    config = near / "identity_fp32" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 4"))
    eventually("changes in the directory are detected", lambda: batch_size(server, "identity_fp32") == 4)
    assert works(server, "far")
    log = server.log.read_text()
    assert log.count("cannot be read; its models stay unchanged") == 2, "logged once per outage"
    assert "can be read again" in log


def ends_at_once(server):
    """Ends a server whose store stalls. The log has neither errors nor panics."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE_S) == 0
    assert time.monotonic() - began < 12, "the time limit of a read is 15 s"
    log = server.log.read_text()
    assert "panicked" not in log and " ERROR " not in log, server.log_tail()


class Waiting(threading.Thread):
    """A call on another thread; `result()` returns what it returned or raised."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.returned = call, None
        self.start()

    def run(self):
        try:
            self.returned = self.call()
        except Exception as error:
            self.returned = error

    def result(self):
        self.join(DEADLINE_S)
        assert not self.is_alive()
        return self.returned


def test_silent_store(store, between, serve, tmp_path):
    """A store that stalls: other models load and serve, and the server exits at once."""
    store.model("far")
    near = copy_models(tmp_path / "near", ["identity_fp32"])
    server = serve([near, between.url()], EXPLICIT, "--exit-timeout-secs=600")
    assert load(server, "far") == (200, "")
    store.model("far", batch=16)
    between.trouble = lambda path: "stall" if path.endswith("config.pbtxt") else None
    over_http = Waiting(lambda: load(server, "far"))
    eventually("the download stalls", lambda: any(path.endswith("config.pbtxt") for path in between.seen))
    over_grpc = Waiting(lambda: tritonclient.grpc.InferenceServerClient(server.grpc).load_model("far"))
    assert load(server, "identity_fp32") == (200, ""), "the other model is loaded meanwhile"
    assert works(server, "far") and batch_size(server, "far") == 8
    ends_at_once(server)
    assert over_http.result() == (503, "Server exiting")
    assert over_grpc.result().status() == "StatusCode.UNAVAILABLE"


def test_exit_while_a_request_waits_for_a_silent_store(store, between, serve):
    """The request that would load the model gets the same answer."""
    store.model("m")
    server = serve([between.url()], "--model-control-mode=on-demand", "--exit-timeout-secs=600")
    between.trouble = lambda path: "stall"
    between.seen.clear()
    asked = Waiting(lambda: server.infer("m", REQUEST))
    eventually("the download stalls", lambda: between.seen)
    ends_at_once(server)
    status, answer = asked.result()
    assert status == 503 and answer["error"] == "Server exiting", answer


@pytest.mark.parametrize("options", [["--model-control-mode=none"], POLL], ids=["none", "poll"])
def test_exit_while_a_silent_store_is_listed(store, between, serve, tmp_path, options):
    """During a poll, then at the start. The local copies of the models stay, because the names of the models are not known."""
    store.model("m")
    options = [*options, f"--repository-cache-directory={tmp_path / 'copies'}"]
    server = serve([between.url()], *options)
    between.seen.clear()
    between.trouble = lambda path: "stall"
    if options[0] == POLL[0]:
        eventually("the listing stalls", lambda: between.seen)
    ends_at_once(server)
    copies = [path for path in files_below(tmp_path / "copies") if "/contents/m/" in path]
    assert copies
    between.seen.clear()
    server = serve([between.url()], *options, wait=False)
    eventually("the listing stalls", lambda: between.seen)
    ends_at_once(server)
    assert [path for path in files_below(tmp_path / "copies") if "/contents/m/" in path] == copies


def test_an_unload_ends_a_download(store, between, serve):
    """An unload during the download fails the load."""
    store.model("m")
    server = serve([between.url()], EXPLICIT)
    go = threading.Event()

    def wait(path):
        if path.endswith("config.pbtxt"):
            go.wait(DEADLINE_S)

    between.trouble = wait
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(load(server, "m")))
    waiting.start()
    eventually("the download stalls", lambda: any(path.endswith("config.pbtxt") for path in between.seen))
    assert unload(server, "m") == 200
    go.set()
    waiting.join(DEADLINE_S)
    assert answers[0][0] == 400 and "it was unloaded during the load" in answers[0][1], answers
    assert not works(server, "m") and "state" not in server.index()["m"][0]
    between.trouble = lambda path: None
    assert load(server, "m") == (200, "") and works(server, "m")


def test_credentials_and_tls(serve, tmp_path):
    """A store that checks signatures, over TLS: keys of the environment and of Triton's credential file, wrong keys, and an
    untrusted certificate."""
    authority = Authority()
    certificate, key = authority.issue("localhost")
    for name, content in (("cert.pem", certificate), ("key.pem", key), ("root.pem", authority.pem)):
        (tmp_path / name).write_bytes(content)
    trusted = {"SSL_CERT_FILE": str(tmp_path / "root.pem")}
    with Store(tmp_path, "models", (tmp_path / "cert.pem", tmp_path / "key.pem")) as store:
        store.model("m")
        url = f"s3://{store.endpoint}/models/m"
        key, secret = user(store, tmp_path / "root.pem")
        right = trusted | {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        server = serve([url], environment=right)
        assert works(server, "m")
        assert server.stop() == 0
        file = tmp_path / "credentials.json"
        entry = {"key_id": key, "secret_key": secret, "region": "us-east-1", "session_token": "", "profile": ""}
        file.write_text(json.dumps({"s3": {"": {"key_id": "no", "secret_key": "no"}, url: entry}}))
        server = serve([url], environment=trusted | {"TRITON_CLOUD_CREDENTIAL_PATH": str(file)})
        assert works(server, "m")
        assert server.stop() == 0
        wrong = fails(serve([url], environment=right | {"AWS_SECRET_ACCESS_KEY": "wrong"}, wait=False))
        assert "SignatureDoesNotMatch" in wrong and secret not in wrong
        unknown = fails(serve([url], environment=trusted, wait=False))
        assert "InvalidAccessKeyId" in unknown
        other = Authority("somebody else")
        (tmp_path / "other.pem").write_bytes(other.pem)
        distrusted = fails(serve([url], environment=right | {"SSL_CERT_FILE": str(tmp_path / "other.pem")}, wait=False))
        assert "certificate" in distrusted


def user(store, root) -> tuple:
    """Returns the credentials of a user of a store behind TLS."""
    handler = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=root))
    urllib.request.install_opener(urllib.request.build_opener(handler))
    try:
        return store.user()
    finally:
        urllib.request.install_opener(None)


def test_a_model_in_two_repositories_is_not_served(store, between, serve, tmp_path):
    """A model that is in two repositories is served from neither."""
    store.model("identity_fp32")
    near = copy_models(tmp_path / "near", ["identity_fp32"])
    server = serve([near, between.url()], EXPLICIT)
    status, error = load(server, "identity_fp32")
    assert status == 500 and "model appears in two or more repositories" in error


def test_namespaces(store, between, serve, tmp_path):
    """With --model-namespacing both models are served, each under its repository's URL."""
    store.model("identity_fp32", batch=16)
    store.model("only")
    near = copy_models(tmp_path / "near", ["identity_fp32"])
    server = serve([near, between.url()], "--model-namespacing=true")
    of = {where: urllib.parse.quote(f"{where}/identity_fp32", safe="") for where in (str(near), between.url())}
    assert batch_size(server, of[between.url()]) == 16 and works(server, of[between.url()])
    assert batch_size(server, of[str(near)]) not in (0, 16) and works(server, of[str(near)])
    assert works(server, "only") and not works(server, "identity_fp32")


def test_memory_while_fetching(store, between, serve):
    """A large object is streamed to the disk: the server's memory does not grow with the object's size."""
    size = 96 << 20
    store.model("m")
    store.put("m/m/1/weights.bin", bytes(size))
    server = serve([between.url()], EXPLICIT)
    before = peak_mib(server)
    assert load(server, "m") == (200, "")
    assert peak_mib(server) - before < 32


def peak_mib(server) -> float:
    """Returns the peak memory of the server's process."""
    with open(f"/proc/{server.process.pid}/status", encoding="ascii") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmHWM"].split()[0]) / 1024


def test_endpoint_of_the_environment(store, between, serve):
    """The endpoint from the environment applies if the URL has none."""
    store.model("m")
    server = serve(["s3://models/m"], environment={"AWS_ENDPOINT_URL": between.endpoint})
    assert works(server, "m")




def test_google_storage(store, between, serve, tmp_path):
    """Requests for a Google store, answered by moto: Google's XML interface has the same requests for listing and reading."""
    between.plain = True
    store.model("m", batch=8)
    store.put("m/größe 1/config.pbtxt", "no configuration")
    file = tmp_path / "google.json"
    unsigned = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    file.write_text(json.dumps(unsigned | {"gcs_base_url": between.endpoint}))
    google = {"GOOGLE_SERVICE_ACCOUNT": str(file)}
    options = [*POLL, "--exit-on-error=false", "--strict-readiness=false"]
    server = serve([f"gs://{store.bucket}/m"], *options, environment=google)
    eventually("all valid models are loaded", lambda: "serving without the models that failed to load: größe 1" in server.log.read_text())
    assert works(server, "m")
    assert "größe 1" in server.index() and not works(server, "gr%C3%B6%C3%9Fe%201")
    store.model("m", batch=16)
    eventually("the new configuration is in use", lambda: batch_size(server, "m") == 16)
    missing = fails(serve(["gs://nothing/m"], wait=False, environment=google))
    assert "bucket 'nothing'" in missing and "NoSuchBucket" in missing


@pytest.mark.skipif(not azurite(), reason="azurite-blob is not on the PATH: `npm install -g azurite`")
def test_azure_storage(serve, tmp_path):
    """Azurite with its key from the environment and from Triton's credential file; a wrong key is refused."""
    with Azurite(tmp_path) as store:
        store.model("m", batch=8)
        url, endpoint = f"as://{store.account}/{store.container}/m", {"AZURE_STORAGE_ENDPOINT": store.endpoint}
        right = endpoint | {"AZURE_STORAGE_ACCOUNT": "another", "AZURE_STORAGE_KEY": store.key}
        server = serve([url], *POLL, environment=right)
        assert works(server, "m")
        store.model("m", versions=(1, 2), batch=16)
        eventually("the new configuration is in use", lambda: batch_size(server, "m") == 16)
        eventually("the new version serves", lambda: works(server, "m", "2"))
        assert server.stop() == 0
        file = tmp_path / "credentials.json"
        file.write_text(json.dumps({"as": {"": {"account_str": store.account, "account_key": store.key}}}))
        server = serve([url], environment=endpoint | {"TRITON_CLOUD_CREDENTIAL_PATH": str(file)})
        assert works(server, "m")
        wrong = {"AZURE_STORAGE_KEY": "d3Jvbmc="}
        refused = fails(serve([url], wait=False, environment=endpoint | wrong))
        assert "AuthorizationFailure" in refused or "AuthenticationFailed" in refused
        missing = f"as://{store.account}/nothing"
        assert "ContainerNotFound" in fails(serve([missing], wait=False, environment=right))
