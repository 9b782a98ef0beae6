"""`deploy/compose`: read by Docker Compose and podman-compose, the files that they mount, and the commands and health checks of the
services with the real server and a real Prometheus, without containers."""

import functools
import itertools
import json
import re
import shlex
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from deploy import schemas
from deploy.containers import DEPLOY, EXIT_STEPS_S, Container, default, documents, flag, help_text
from documents.document_blocks import blocks
from harness import prometheus
from harness.dashboards import DASHBOARDS
from harness.inference import simple
from harness.otlp_collector import HttpCollector, values
from harness.peers import wait_or_kill
from harness.ports import free_ports
from harness.server import EXAMPLES, ROOT, START_S, Process, binary, total
from harness.waiting import DEADLINE_S, eventually
from torchserve import models as archives
from torchserve.launched import interpreter

FOLDER = DEPLOY / "compose"
PAGE = "docs/src/guides/compose.md"
GPU = "gpu.yaml"
FILES = [("compose.yaml",), ("triton.yaml",), ("torchserve.yaml",)]
"""The files that are started alone."""
ALL = FILES + [(*files, GPU) for files in FILES]
VARIABLES = {"MODEL_STORE": "/store"}
"""The variables that have no default."""
SECRET = re.compile(r"PASSWORD|TOKEN|SECRET|KEY|AUTHORIZATION")
SINCE_3_8 = ("scrape_native_histograms", "always_scrape_classic_histograms")
"""Keys of a Prometheus configuration that earlier versions, such as Debian's, refuse."""
COLLECTOR = {"receivers": {"otlp"}, "processors": {"memory_limiter"}, "exporters": {"debug", "otlp_http"}}
"""Components in the collector's image `otel/opentelemetry-collector`, of those that the configuration may use."""
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

needs_compose = pytest.mark.skipif(bool(schemas.missing("compose")), reason=schemas.missing("compose"))
needs_prometheus = pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())
needs_worker = pytest.mark.skipif(
    subprocess.run([interpreter(), "-c", "import pharos_worker"], capture_output=True).returncode != 0,
    reason="the package pharos-worker is not installed: make python-worker",
)


def named(files) -> str:
    """Returns the name of a case."""
    return "+".join(files)


def options(files) -> list:
    """Returns the options that name files of the folder, or others by their paths."""
    return [option for file in files for option in ("-f", FOLDER / file)]


def read(files, **variables) -> dict:
    """Returns the model that Docker Compose makes of files. Fails with its errors and warnings."""
    return json.loads(model(tuple(files), tuple((VARIABLES | variables).items())))


@functools.cache
def model(files: tuple, variables: tuple) -> str:
    """Returns the model of files as JSON."""
    done = schemas.docker_compose([*options(files), "config", "--format=json"], dict(variables))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def service(files, name="pharos", **variables) -> dict:
    """Returns a service."""
    return read(files, **variables)["services"][name]


def binds(of: dict) -> dict:
    """Returns the mounted files and directories of a service: the path in the container, and the path here."""
    return {volume["target"]: volume["source"] for volume in of["volumes"] if volume["type"] == "bind"}


def seconds(duration: str) -> float:
    """Converts a duration of Compose, such as `1m30s`."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


def published(of: dict) -> dict:
    """Returns the published ports of a service: the port in the container, and the address on the host."""
    return {port["target"]: (port.get("host_ip"), port["published"]) for port in of.get("ports", [])}


def properties(path) -> dict:
    """Reads a `config.properties`."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


class Composed(Container):
    """The command line of a service `pharos`. `mounts` are the paths in the container, each with the one here; ports are free ones."""

    def __init__(self, folder, of: dict, mounts: dict, **variables):
        def local(text: str) -> str:
            for target, source in mounts.items():
                text = re.sub(rf"(^|=){target}(?=/|$)", rf"\g<1>{source}", text)
            return text

        self.is_torchserve = of["command"][0] == "torchserve"
        self.health = of["healthcheck"]["test"]
        container = {
            "command": ["tini", "--", "pharos"],
            "args": of["command"],
            "env": [{"name": name, "value": value} for name, value in of["environment"].items()],
        }
        # The variables of the image `full`.
        image = {"HOME": str(folder), "PHAROS_PYTHON": interpreter()}
        super().__init__(folder, container, EXAMPLES, variables=image | variables, python=interpreter())
        self.folder = folder
        # After `/tmp` is replaced: the paths here may be below `/tmp`.
        self.command = [local(word) for word in self.command]
        self.environment = {name: local(value) for name, value in self.environment.items()}
        # TorchServe's ports are those of its configuration; this one is an option of the command line.
        self.health_port = free_ports(1)[0] if self.is_torchserve else self.http_port
        if self.is_torchserve:
            self.command = [word.replace("--http-port=8000", f"--http-port={self.health_port}") for word in self.command]

    def listener_flags(self) -> list:
        """`pharos torchserve` has its ports from its configuration."""
        return [] if self.is_torchserve else super().listener_flags()

    def launch(self, **_):
        """Starts the process in the folder that replaces `/tmp`, the working directory of the image."""
        with open(self.log_path, "wb") as log:
            self.process = Process(self.command, stdout=log, stderr=log, env=self.environment, cwd=self.folder)

    def wait_until_ready(self, path=""):
        """Waits until the health check succeeds."""

        def is_healthy() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.poll()}:\n{self.log_tail()}"
            return self.check_health().returncode == 0

        try:
            eventually("the health check succeeds", is_healthy, deadline_s=START_S)
        except AssertionError:
            self.process.kill()
            self.process.wait()
            raise

    def check_health(self) -> subprocess.CompletedProcess:
        """Runs the health check, at the ports of this server."""
        kind, *words = self.health
        assert kind == "CMD" and words == ["/usr/bin/pharos", "health"]
        ports = {"PHAROS_HTTP_PORT": str(self.health_port)}
        command = [str(binary()), *words[1:]]
        return subprocess.run(command, env=self.environment | ports, capture_output=True, text=True, timeout=DEADLINE_S)


@needs_compose
@pytest.mark.parametrize("files", ALL, ids=named)
def test_docker_compose_reads_the_files(files):
    """Without warnings, for example about variables without a value, and with nothing but their own services."""
    services = read(files)["services"]
    assert set(services) == ({"pharos", "prometheus", "grafana", "otel-collector"} if "compose.yaml" in files else {"pharos"})


@needs_compose
def test_docker_compose_finds_mistakes(tmp_path):
    text = (FOLDER / "triton.yaml").read_text()
    for right, wrong, expected in (
        ("stop_grace_period: 60s", "stop_grace: 60s", "stop_grace"),
        ("memlock: -1", "memlock: none", "memlock"),
        ("${PHAROS_MEMORY:-4g}", "${PHAROS_MEMORY}", "PHAROS_MEMORY"),
    ):
        assert right in text
        (tmp_path / "broken.yaml").write_text(text.replace(right, wrong))
        done = schemas.docker_compose([*options([tmp_path / "broken.yaml"]), "config", "--quiet"], {})
        assert expected in done.stderr
    done = schemas.docker_compose([*options(["torchserve.yaml"]), "config", "--quiet"], {})
    assert done.returncode and "MODEL_STORE" in done.stderr and "directory of the archives" in done.stderr


@needs_compose
@pytest.mark.parametrize("files", ALL, ids=named)
def test_podman_compose_reads_the_same(files, tmp_path):
    """Images, command lines, variables and health checks."""
    done = schemas.podman_compose([*options(files), "config"], VARIABLES, tmp_path)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    for name, docker in read(files)["services"].items():
        podman = services[name]
        assert podman["image"] == docker["image"]
        assert podman.get("environment", {}) == docker.get("environment", {})
        assert podman.get("healthcheck", {}).get("test") == docker.get("healthcheck", {}).get("test")
        words = podman.get("command")
        assert (shlex.split(words) if isinstance(words, str) else words) == docker["command"]


@needs_compose
@pytest.mark.parametrize("files", ALL, ids=named)
def test_images_are_pinned(files):
    """The image of Pharos has the version of this tree, others have whole versions."""
    version = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    name = "pharos-gpu" if GPU in files else "pharos"
    for called, found in read(files)["services"].items():
        if called == "pharos":
            assert found["image"] == f"localhost/{name}:{version}"
        else:
            assert re.fullmatch(r"docker\.io/[\w/-]+:v?\d+\.\d+\.\d+", found["image"])
    assert service(files, PHAROS_IMAGE="registry.example.com/pharos:1")["image"] == "registry.example.com/pharos:1"


@needs_compose
@pytest.mark.parametrize("files", ALL, ids=named)
def test_the_image_is_built_from_the_container_file(files):
    build = service(files)["build"]
    text = (ROOT / build["dockerfile"]).read_text()
    assert build["context"] == str(ROOT) and f"AS {build['target']}\n" in text
    assert all(re.search(rf"^ARG {name}\b", text, re.M) for name in build["args"])
    assert build["args"].get("EXTRAS") == ("[onnx-gpu]" if GPU in files else None)
    assert service(files, PHAROS_PACKAGES="torch")["build"]["args"]["PACKAGES"] == "torch"


@needs_compose
@pytest.mark.parametrize("files", ALL, ids=named)
def test_services_have_no_rights_and_limits(files):
    for name, found in read(files)["services"].items():
        assert found["read_only"] is True and found["cap_drop"] == ["ALL"] and found["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & set(found)
        limits = found["deploy"]["resources"]["limits"]
        assert int(limits["memory"]) >= 2**29 and limits["pids"] > 0
        # A machine with one processor starts no container that may use more.
        assert limits.get("cpus") == (None if name == "pharos" else 1)
    limited = service(files, PHAROS_MEMORY="1g", PHAROS_CPUS="1.5")["deploy"]["resources"]["limits"]
    assert (int(limited["memory"]), float(limited["cpus"])) == (2**30, 1.5)


@needs_compose
@pytest.mark.parametrize("files", ALL, ids=named)
def test_ports_are_published_on_loopback(files):
    for found in read(files)["services"].values():
        assert all(host == "127.0.0.1" and target == int(port) for target, (host, port) in published(found).items())
    for found in read(files, PUBLISH_ADDRESS="0.0.0.0")["services"].values():
        assert all(host == "0.0.0.0" for host, _ in published(found).values())


@needs_compose
@pytest.mark.parametrize("files", ALL, ids=named)
def test_files_have_no_secrets(files):
    found = [name for one in read(files)["services"].values() for name in one.get("environment", {}) if SECRET.search(name)]
    assert found == []


@needs_compose
@pytest.mark.parametrize("files", ALL, ids=named)
def test_mounted_files_exist(files):
    """They are mounted read-only. The directory that VARIABLES names is the user's."""
    for found in read(files)["services"].values():
        for volume in found["volumes"]:
            if volume["type"] == "bind" and volume["source"] != "/dev/null":
                assert volume["read_only"] is True
                assert (FOLDER / volume["source"]).exists() or volume["source"] in VARIABLES.values(), volume["source"]
    models = [volume for volume in service(files)["volumes"] if volume["target"].endswith(("models", "model-store"))]
    assert [volume["bind"] for volume in models] == [{"create_host_path": False}], "a missing directory is an error"


@needs_compose
@pytest.mark.parametrize("files", FILES, ids=named)
def test_the_stop_grace_period_covers_every_step_of_the_exit(files):
    found = service(files)
    container = {"args": found["command"]}
    steps = float(flag(container, "exit-delay-secs")) + float(flag(container, "exit-timeout-secs"))
    assert steps + EXIT_STEPS_S <= seconds(found["stop_grace_period"])


@needs_compose
@pytest.mark.parametrize("files", FILES, ids=named)
def test_variables_of_the_server_exist(files):
    """The server ignores unknown variables."""
    names = {name for name in service(files)["environment"] if name.startswith("PHAROS_")}
    assert names and [name for name in names if f"[env: {name}=" not in help_text()] == []


@needs_compose
def test_the_overlay_for_gpus_adds_the_reservation_only():
    for files in FILES:
        alone, overlaid = service(files), service((*files, GPU))
        (device,) = overlaid["deploy"]["resources"].pop("reservations")["devices"]
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
        for found in (alone, overlaid):
            del found["image"], found["build"]
        assert overlaid == alone


# The server.


@needs_compose
def test_the_server_of_the_stack_starts_and_ends(tmp_path):
    """The health check fails before the start; the spans of a traced request, and the metrics at the exit, reach the collector."""
    found = service(("compose.yaml",))
    with HttpCollector() as collector:
        endpoint = f"http://127.0.0.1:{collector.port}"
        server = Composed(tmp_path / "tmp", found, binds(found), OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_BSP_SCHEDULE_DELAY="100")
        unready = server.check_health()
        assert unready.returncode == 1 and "is not ready" in unready.stderr
        with server:
            assert server.check_health().returncode == 0
            assert {"digits", "simple"} <= set(server.index())
            headers = {"traceparent": TRACEPARENT}
            assert server.ask("POST", "/v2/models/simple/infer", json.dumps(simple()), headers=headers)[0] == 200
            eventually("the spans arrive", lambda: any(span.trace == TRACEPARENT.split("-")[1] for span in collector.spans))
        assert {span.resource["service.name"] for span in collector.spans} == {"pharos"}
        resource = collector.metrics[-1].resource_metrics[0].resource
        assert values(resource.attributes)["service.name"] == "pharos"


@needs_compose
def test_triton_starts_with_its_command_line(tmp_path):
    found = service(("triton.yaml",))
    assert found["command"][0] == "tritonserver"
    server = Composed(tmp_path / "tmp", found, binds(found))
    assert server.check_health().returncode == 1
    with server:
        assert server.check_health().returncode == 0
        assert server.infer("simple", simple())[0] == 200
        assert total(server.scrape(), "nv_inference_request_success", model="simple") == 1


@needs_compose
def test_ports_of_triton_are_those_that_it_listens_on():
    """`pharos tritonserver` has other defaults than `pharos`."""
    shown = subprocess.run([binary(), "tritonserver", "--help"], capture_output=True, text=True, check=True).stdout
    defaults = [re.search(rf"--{name}-port <PORT>.*?\[default: (\d+)\]", shown, re.S)[1] for name in ("http", "grpc", "metrics")]
    assert set(published(service(("triton.yaml",)))) == set(map(int, defaults))


@needs_compose
def test_ports_of_the_stack_are_those_that_the_server_listens_on():
    assert set(published(service(("compose.yaml",)))) == {int(default(f"{name}-port")) for name in ("http", "grpc", "metrics")}


@needs_compose
def test_ports_of_torchserve_are_those_of_its_configuration():
    """They listen on all addresses of the container."""
    found = service(("torchserve.yaml",))
    given = properties(FOLDER / "torchserve/config.properties")
    addresses = [given[f"{name}_address"] for name in ("inference", "management", "metrics")]
    assert all(address.startswith("http://0.0.0.0:") for address in addresses)
    assert given["grpc_inference_address"] == given["grpc_management_address"] == "0.0.0.0"
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    ports += [int(given[f"grpc_{name}_port"]) for name in ("inference", "management")]
    assert set(published(found)) == set(ports)
    assert int(default("http-port")) not in ports
    assert found["command"][-2:] == ["--", f"--http-port={default('http-port')}"]
    assert binds(found)["/home/model-server/config.properties"] == str(FOLDER / "torchserve/config.properties")


@pytest.fixture
def torchserve(tmp_path):
    """The service of `torchserve.yaml` with the model store `tmp_path / "store"`; it is started by the test."""
    found, home, config, logs = service(("torchserve.yaml",)), "/home/model-server", tmp_path / "config.properties", tmp_path / "logs"
    (tmp_path / "store").mkdir()
    logs.mkdir()
    masked = {target: source for target, source in binds(found).items() if target.startswith(f"{home}/logs/")}
    for target, source in masked.items():
        (logs / target.rpartition("/")[2]).symlink_to(source)
    mounts = {f"{home}/model-store": tmp_path / "store", f"{home}/config.properties": config, f"{home}/logs": logs}
    assert set(binds(found)) == set(mounts) - {f"{home}/logs"} | set(masked)
    server = Composed(tmp_path / "tmp", found, mounts)
    management, grpc_management = free_ports(2)
    ports = {8080: server.http_port, 8081: management, 8082: server.metrics_port, 7070: server.grpc_port, 7071: grpc_management}
    text = (FOLDER / "torchserve/config.properties").read_text().replace("0.0.0.0", "127.0.0.1")
    config.write_text(re.sub(r"\b(808\d|707\d)\b", lambda match: str(ports[int(match[0])]), text))
    return server


def token(server) -> dict:
    """Returns the header with TorchServe's key for inference, from the file in the working directory."""
    key = json.loads((server.folder / "key_file.json").read_text())["inference"]["key"]
    return {"Authorization": f"Bearer {key}"}


@needs_compose
def test_torchserve_starts_with_its_command_line(torchserve, tmp_path):
    """With tokens, which the health check does not need, and without log files: their lines are in the output."""
    assert torchserve.check_health().returncode == 1
    with torchserve as server:
        assert server.check_health().returncode == 0
        assert server.get("/ping")[0] == 400, "the reason for the port of the health check"
        assert server.get("/ping", headers=token(server))[0] == 200
        assert server.get("/metrics", server.metrics)[0] == 200
        eventually("the access log is in the output", lambda: '"GET /ping HTTP/1.1" 200' in server.log.read_text())
        assert {path.name for path in (tmp_path / "logs").iterdir()} == {"access_log.log", "model_log.log", "ts_log.log"}
        assert all(path.readlink() == Path("/dev/null") for path in (tmp_path / "logs").iterdir())


@needs_worker
@needs_compose
def test_torchserve_serves_the_archives_of_the_store(torchserve, tmp_path):
    (tmp_path / "store").rmdir()
    archives.write(tmp_path / "store", "told", archives.contents("told"))
    with torchserve as server:
        headers = {"Content-Type": "application/json"}
        body = b'{"do": "about"}'
        assert server.ask("POST", "/predictions/told", body, headers=headers)[0] == 400
        status, text = server.ask("POST", "/predictions/told", body, headers=headers | token(server))
        assert (status, json.loads(text)["batch"]) == (200, 1), text
        assert total(server.scrape(), "ts_inference_requests_total", model_name="told") == 1


# Prometheus, Grafana, the collector.


def laid_out(of: dict, folder) -> None:
    """Puts the mounted files of a service below a folder, with the paths of the container."""
    for target, source in binds(of).items():
        place = folder / target[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)


def for_promtool(path) -> str:
    """Returns a configuration without the settings that the installed version does not have."""
    lines = path.read_text().splitlines(keepends=True)
    new = [line for line in lines if line.strip().startswith(SINCE_3_8)]
    assert [line.strip() for line in new] == [f"{name}: true" for name in SINCE_3_8]
    return "".join(line for line in lines if line not in new or prometheus.version() >= (3, 8))


def test_prometheus_scrapes_as_the_configuration_of_the_repository():
    """Except for the target, the paths of the rules, and native histograms."""
    (own,), (root,) = documents(FOLDER / "prometheus.yaml"), documents(ROOT / "prometheus.yaml")
    assert own["global"] == root["global"] | dict.fromkeys(SINCE_3_8, True)
    (job,), (expected,) = own["scrape_configs"], root["scrape_configs"]
    assert job.pop("static_configs") == [{"targets": ["pharos:8082"]}]
    expected.pop("static_configs")
    assert job == expected and set(own) == set(root)


@needs_compose
def test_prometheus_reaches_the_metrics_of_the_server():
    """The target is the name of the service, and the port one that the service publishes as that of metrics."""
    (config,) = documents(FOLDER / "prometheus.yaml")
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert int(port) in published(service(("compose.yaml",), name))
    assert port == default("metrics-port")


def is_ready(of: dict, address: str) -> bool:
    """Runs the health check of Prometheus at an address. Debian's 2.42 has no such command: then sends the request of the command."""
    kind, program, *arguments = of["healthcheck"]["test"]
    assert (kind, program, arguments) == ("CMD", "promtool", ["check", "ready"])
    if prometheus.version() >= (2, 45):
        return prometheus.promtool(*arguments, f"--url=http://{address}").returncode == 0
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=DEADLINE_S) as answer:
            return answer.status == 200
    except OSError:
        return False


@needs_compose
@needs_prometheus
def test_prometheus_runs_with_the_files_of_the_stack(tmp_path):
    """A real one scrapes the server and evaluates the rules; its health check fails before the start."""
    stack = read(("compose.yaml",))["services"]
    laid_out(stack["prometheus"], tmp_path)
    config = tmp_path / "etc/prometheus/prometheus.yaml"
    with Composed(tmp_path / "tmp", stack["pharos"], binds(stack["pharos"]), OTEL_SDK_DISABLED="true") as server:
        text = for_promtool(config).replace("pharos:8082", server.metrics).replace(": 15s", ": 1s")
        config.unlink()
        config.write_text(text)
        checked = prometheus.promtool("check", "config", config)
        assert checked.returncode == 0 and "2 rule files found" in checked.stdout, checked.stdout + checked.stderr
        address = f"127.0.0.1:{free_ports(1)[0]}"
        assert not is_ready(stack["prometheus"], address)
        arguments = [re.sub(r"=(/etc)?/prometheus", rf"={tmp_path}\g<1>/prometheus", word) for word in stack["prometheus"]["command"]]
        asked = prometheus.Prometheus(tmp_path)
        asked.address = address
        with open(tmp_path / "prometheus.log", "wb") as log:
            command = [prometheus.program("prometheus"), *arguments, f"--web.listen-address={address}"]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            eventually("Prometheus is ready", lambda: is_ready(stack["prometheus"], address))
            eventually("the server is scraped", lambda: asked.query('up{job="pharos"} == 1'))
            eventually("a rule has a value", lambda: asked.query('{__name__=~"fleet:.+|model:.+"}'))
        finally:
            process.terminate()
            wait_or_kill(process, 10)


@needs_compose
def test_prometheus_has_the_rules_of_the_repository():
    mounted = binds(service(("compose.yaml",), "prometheus"))
    (config,) = documents(FOLDER / "prometheus.yaml")
    assert mounted["/etc/prometheus/rules"] == str(ROOT / "grafana/rules") and config["rule_files"] == ["rules/*.yaml"]
    assert [path.name for path in prometheus.RULES] == ["alerts.yaml", "recording.yaml"]


@needs_compose
def test_grafana_shows_the_dashboards_with_the_data_of_prometheus():
    """The data source of the repository, at the address of the service, and every dashboard."""
    grafana = service(("compose.yaml",), "grafana")
    mounted, home = binds(grafana), "/etc/grafana"
    (source,) = documents(FOLDER / "datasources.yaml")
    (expected,) = documents(ROOT / "grafana/provisioning/datasources/prometheus.yaml")
    assert mounted[f"{home}/provisioning/datasources/prometheus.yaml"] == str(FOLDER / "datasources.yaml")
    assert source["datasources"][0].pop("url") == "http://prometheus:9090"
    assert expected["datasources"][0].pop("url") and source == expected
    assert set(published(service(("compose.yaml",), "prometheus"))) == {9090}
    (provider,) = documents(ROOT / "grafana/provisioning/dashboards/pharos.yaml")[0]["providers"]
    variable = provider["options"]["path"].removeprefix("$")
    boards = mounted[grafana["environment"][variable]]
    assert boards == str(ROOT / "grafana/dashboards") and len(DASHBOARDS) >= 10
    assert mounted[f"{home}/provisioning/dashboards"] == str(ROOT / "grafana/provisioning/dashboards")


@needs_compose
def test_grafana_has_no_account():
    """Viewers need no login, and an administrator with a default password does not exist."""
    given = service(("compose.yaml",), "grafana")["environment"]
    assert (given["GF_AUTH_ANONYMOUS_ENABLED"], given["GF_AUTH_ANONYMOUS_ORG_ROLE"]) == ("true", "Viewer")
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == given["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


@needs_compose
def test_the_collector_receives_what_the_server_sends():
    """Its pipelines consist of components that exist and are defined, and the server sends to the port of its receiver."""
    stack = read(("compose.yaml",))["services"]
    collector = stack["otel-collector"]
    assert collector["command"] == [f"--config={next(iter(binds(collector)))}"] and published(collector) == {}
    (config,) = documents(FOLDER / "otel-collector.yaml")
    pipelines = config["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics"} and set(config) == {*COLLECTOR, "service"}
    for kind, known in COLLECTOR.items():
        used = set(itertools.chain.from_iterable(pipeline[kind] for pipeline in pipelines.values()))
        assert used == set(config[kind]), f"{kind}: defined and used"
        assert {name.partition("/")[0] for name in used} <= known
    http = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert stack["pharos"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == http.replace("0.0.0.0", "http://otel-collector")
    limit = config["processors"]["memory_limiter"]
    assert limit["spike_limit_mib"] < limit["limit_mib"]
    assert limit["limit_mib"] * 2**20 <= 0.8 * int(collector["deploy"]["resources"]["limits"]["memory"])
    assert "otel-collector" in stack["pharos"]["depends_on"], "the collector ends after the server"


# The page.


def test_the_page_describes_every_variable_and_file():
    text = (ROOT / PAGE).read_text()
    used = {name for path in FOLDER.glob("*.yaml") for name in re.findall(r"(?<!\$)\$\{([A-Z_]+)[:}]", path.read_text())}
    assert used and used == set(re.findall(r"^\| `([A-Z_]+)` \|", text, re.M))
    files = [path.name for path in FOLDER.iterdir() if not path.name.startswith(".")]
    assert [name for name in files if f"`{name}`" not in text and f"{name}/" not in text] == []


@needs_compose
def test_the_overlay_of_the_page_adds_an_administrator(tmp_path):
    (block,) = [block for block in blocks() if block.document == PAGE and block.language == "yaml" and "GF_" in block.text]
    (tmp_path / "admin.yaml").write_text(block.text)
    files = ("compose.yaml", tmp_path / "admin.yaml")
    given = service(files, "grafana", GRAFANA_ADMIN_PASSWORD="x")["environment"]
    assert given["GF_SECURITY_ADMIN_PASSWORD"] == "x"
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == given["GF_AUTH_DISABLE_LOGIN_FORM"] == "false"
    done = schemas.docker_compose([*options(files), "config", "--quiet"], {})
    assert done.returncode and "GRAFANA_ADMIN_PASSWORD" in done.stderr
