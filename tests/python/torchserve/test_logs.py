"""Tools that read TorchServe's logs can read this server's: the files, the layouts on standard output, and the regular
expressions and ways of splitting that its own tools and users have. Each check also runs against a real TorchServe, if
installed."""

import json
import re

import pytest

from harness.waiting import DEADLINE_S, eventually
from torchserve.golden import DECLARED, DETECTED, GOLDEN, SHIPPED, golden_scrape, kinds
from torchserve.launched import NO_ARCHIVER, WHY_NOT, pharos
from torchserve.peer import torchserve
from torchserve.peers import Peer, at_start, golden, metric
from torchserve.repository import build
from torchserve.row_types import JSON, Rest, calls

FILES = ("access_log", "model_log", "ts_log", "ts_metrics", "model_metrics")
PARSER = re.compile(
    r"^(?P<ts>\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2},\d{3}) "
    r"(?:\[(?P<lvl>[A-Z ]{5})\] (?P<thread>\S+) (?P<logger>TS_METRICS|MODEL_METRICS) )?"
    r"- (?P<name>[\w ]+)\.(?P<unit>[^:|]*):(?P<value>-?[0-9.]+(?:E-?\d+)?|NaN|-?Infinity)\|#(?P<dims>[^|]*)"
    r"\|#hostname:(?P<host>[^,]+)"
    r"(?:,requestID:(?P<rid>.*))?,timestamp:(?P<epoch>\d+)$"
)
ACCESS = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - /(?P<ip>[\d.]+):(?P<port>\d+) "
    r'"(?P<method>\S+) (?P<path>\S+) (?P<protocol>\S+)" (?P<status>\d+) (?P<ms>\d+)$'
)
UNITS = {
    "Count",
    "Milliseconds",
    "ms",
    "Megabytes",
    "MB",
    "Gigabytes",
    "GB",
    "Bytes",
    "B",
    "Percent",
    "s",
    "Microseconds",
}
KINDS = {
    "pharos": pharos,
    "torchserve": torchserve,
}


@pytest.fixture(scope="module", params=KINDS)
def logged(request, tmp_path_factory):
    """A server in the mode `log` after some requests, and the number of predictions."""
    if NO_ARCHIVER or (request.param == "torchserve" and WHY_NOT):
        pytest.skip(NO_ARCHIVER or WHY_NOT)
    folder = tmp_path_factory.mktemp("logs")
    store = build(folder / "store", ("start",))
    properties = "load_models=echo.mar,metered.mar,based.mar\nmodel_metrics_auto_detect=true\n"
    options = ("--ncs", "--disable-token-auth", "--enable-model-api")
    with KINDS[request.param](folder / "server", store, properties, options) as server:
        peer = Peer(server)
        files = {name: (server.folder / f"logs/{name}.log").exists() for name in FILES}
        at_start(None, peer)
        for _ in range(3):
            assert peer.rest(Rest("/predictions/echo", b"x"))["status"] == 200
        assert peer.rest(Rest("/predictions/based", "[1]", JSON))["status"] == 200
        answer = peer.rest(
            calls(["add_counter", ["Seen", 2]], ["add_time", ["Long", 0.25, 0]], ["add_percent", ["Half", 50]])
        )
        assert answer["status"] == 200
        assert peer.rest(Rest("/predictions/absent", b"x"))["status"] == 404
        peer.settled()
        yield peer, files


def lines(peer: Peer, name: str) -> list:
    """Returns the lines of a log."""
    return peer.log(name).splitlines()


def console(peer: Peer) -> list:
    """Returns the metric lines on standard output."""
    return [
        line for line in peer.server.console().splitlines() if " TS_METRICS - " in line or " MODEL_METRICS - " in line
    ]


def test_all_files_are_there_from_the_start(logged):
    """TorchServe's documents configure log shippers to follow all five files."""
    assert logged[1] == dict.fromkeys(FILES, True)


def test_every_line_is_read_by_the_expression(logged):
    """In the files and on standard output, which have the same lines."""
    peer, _ = logged
    files = lines(peer, "ts_metrics") + lines(peer, "model_metrics")
    assert len(files) > 20
    assert [line for line in files + console(peer) if not PARSER.match(line)] == []
    shape = lambda line: metric(f"{PARSER.match(line)['ts']} - {line.partition(' - ')[2]}")  # noqa: E731
    assert sorted(map(shape, console(peer))) == sorted(map(shape, files))
    names = {PARSER.match(line)["name"] for line in files}
    assert {
        "Requests2XX",
        "Requests4XX",
        "ts_inference_requests_total",
        "QueueTime",
        "Seen",
        "Long",
        "Half",
        "HandlerTime",
        "PredictionTime",
        "CPUUtilization",
        "MemoryUsed",
        "DiskAvailable",
        "WorkerLoadTime",
    } <= names


def test_the_benchmark_tool_finds_its_values(logged):
    """The third colon from the left precedes the value, in both layouts."""
    peer, _ = logged
    for name in ("PredictionTime", "HandlerTime", "QueueTime", "WorkerThreadTime"):
        found = [
            line for line in lines(peer, "model_metrics") + lines(peer, "ts_metrics") + console(peer) if name in line
        ]
        assert found, name
        for line in found:
            assert float(line.split("|")[0].split(":")[3]) >= 0, line


def test_the_converter_to_json_reads_the_console(logged):
    """It requires the logger's name, parts between bars, a time at the end and known units."""
    peer, _ = logged
    found = console(peer)
    assert found
    for line in found:
        parts = line.split("|")
        assert re.search(r" TS_METRICS | MODEL_METRICS ", line)
        assert re.fullmatch(r"timestamp:\d+", parts[-1].split(",")[-1]), line
        assert parts[0].split(" - ")[1].split(":")[0].split(".")[1] in UNITS, line


def test_the_access_log_is_read(logged):
    """Remote address, quoted request, status and milliseconds."""
    peer, _ = logged
    found = [ACCESS.match(line) for line in lines(peer, "access_log")]
    assert all(found)
    asked = [(m["method"], m["path"], m["status"]) for m in found if m["path"].startswith("/predictions")]
    assert asked == [("POST", "/predictions/echo", "200")] * 3 + [
        ("POST", "/predictions/based", "200"),
        ("POST", "/predictions/metered", "200"),
        ("POST", "/predictions/absent", "404"),
    ]


def test_the_log_has_the_id_of_the_answer(logged):
    """The id in the answer's header is the id in the metric lines."""
    peer, _ = logged
    import http.client

    connection = http.client.HTTPConnection(peer.server.address("inference"), timeout=DEADLINE_S)
    connection.request("POST", "/predictions/echo", b"x")
    own = connection.getresponse().headers["x-request-id"]
    connection.close()

    def found():
        return [
            m["rid"]
            for m in map(PARSER.match, lines(peer, "model_metrics"))
            if m["rid"] == own and m["name"] == "PredictionTime"
        ]

    eventually("a line with the id of the answer", found)


def test_times_of_one_batch_are_exact(logged):
    """The number of lines equals the number of predictions, and each has its model."""
    peer, _ = logged
    found = [PARSER.match(line) for line in lines(peer, "model_metrics")]
    echo = [m for m in found if m["name"] == "PredictionTime" and m["dims"] == "ModelName:echo,Level:Model"]
    requests = [m for m in map(PARSER.match, lines(peer, "ts_metrics")) if m["name"] == "ts_inference_requests_total"]
    asked = [m for m in requests if m["dims"] == "model_name:echo,model_version:default"]
    assert len(echo) == len(asked) >= 3
    assert [m["dims"] for m in found if m["name"] == "HandlerTime"] == ["ModelName:based,Level:Model"]


PROPERTIES = {path.parent.name: path for path in sorted(GOLDEN.glob("*/config.properties"))}


@pytest.mark.parametrize("mode", PROPERTIES)
@pytest.mark.skipif(bool(NO_ARCHIVER), reason=NO_ARCHIVER)
def test_recorded_configurations_start_the_server(mode, tmp_path):
    """Each config.properties of the golden runs starts the server with only its ports changed. A model is registered and gets the
    recorded request; the scrape has TorchServe's families."""
    text = re.sub(r"(?m)^\w+(?:_address|_port)=.*\n", "", PROPERTIES[mode].read_text())
    store = build(tmp_path / "store", ("start",))
    own = tmp_path / "server"
    own.mkdir()
    for name, models in (("metrics.yaml", DECLARED), ("metrics_auto_detect.yaml", DETECTED)):
        (own / name).write_text(SHIPPED.partition("model_metrics:\n")[0] + f"model_metrics:\n{models}")
    with pharos(own, store, text, ("--ncs",)) as server:
        peer = Peer(server)
        url = "/models?url=echo.mar&model_name=mnist_custom_metrics&initial_workers=1&synchronous=true"
        assert peer.rest(Rest(url, b"", at="management"))["status"] == 200
        assert peer.rest(Rest("/predictions/mnist_custom_metrics", b"x"))["status"] == 200
        described = json.loads(peer.rest(Rest("/models/mnist_custom_metrics", at="management"))["body"])[0]
        then = json.loads(golden()["models: describe"]["answers"][0]["body"])[0]
        assert list(described) == list(then)
        assert described["jobQueueStatus"] == {"remainingCapacity": 2, "pendingRequests": 0}
        shown = kinds("\n".join(peer.scrape()))
        wanted = kinds(golden_scrape(mode))
        missing = {name: kind for name, kind in wanted.items() if shown.get(name) != kind}
        # Left out of the file for detection, and so off.
        off = {"PredictionTime"} if mode.endswith("_auto") else set()
        assert not {name for name in missing if name in SHIPPED} - off, missing
