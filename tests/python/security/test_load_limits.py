"""What a configuration that a client sends with a load may ask for, and which files it may read. Files of the operator have no such
limits."""

import base64
import json

import pytest

from harness.models import IO, write
from harness.server import Server
from harness.waiting import eventually

EXPLICIT = "--model-control-mode=explicit"
MODEL = f'backend: "builtin" max_batch_size: 0 {IO} parameters {{ key: "function" value {{ string_value: "identity" }} }}\n'
TENSORS = {
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
}
GIGABYTE = {"INPUT0": {"data_type": "TYPE_FP32", "dims": [1 << 28], "zero_data": True}}


def configuration(**fields) -> str:
    """Returns a configuration of the model with these fields."""
    function = {"function": {"string_value": "identity"}}
    parameters = {name: {"string_value": value} for name, value in fields.pop("parameters", {}).items()}
    return json.dumps({"backend": "builtin", "max_batch_size": 0, **TENSORS, "parameters": function | parameters, **fields})


def load(server: Server, config: str | None = None, files=()) -> tuple:
    """Loads the model; returns the status and the answer."""
    parameters = {} if config is None else {"config": config}
    parameters |= {f"file:{name}": base64.b64encode(text.encode()).decode() for name, text in dict(files).items()}
    return server.ask("POST", "/v2/repository/models/m/load", json.dumps({"parameters": parameters}))


def peak_bytes(server: Server) -> int:
    """Returns the most memory that the server has used."""
    status = open(f"/proc/{server.process.pid}/status").read()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def labels(server: Server) -> tuple:
    """Returns the status and the classes of an inference request."""
    output = {"name": "OUTPUT0", "parameters": {"classification": 2}}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    status, answer = server.infer("m", {"inputs": [tensor], "outputs": [output]})
    return status, answer["outputs"][0]["data"] if status == 200 else answer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    models = write(folder / "models", "m", MODEL)
    (models / "m/1/model.py").write_text("SECRET = 'of the model'\n")
    with Server(folder, [models], [EXPLICIT]) as server:
        yield server


def test_warm_ups_of_a_request_are_limited_before_they_take_memory(server):
    warmups = [{"name": f"w{n}", "inputs": GIGABYTE} for n in range(3)]
    before = peak_bytes(server)
    status, answer = load(server, configuration(model_warmup=warmups))
    assert status == 400 and "1073741824 bytes for the largest sample of 'model_warmup'" in answer, answer
    assert "may ask for 536870912 (--load-request-max-warmup-byte-size sets the limit)" in answer, answer
    assert peak_bytes(server) - before < 64 << 20


def test_samples_are_made_one_at_a_time(tmp_path):
    """Also those of the operator."""
    input_ = 'inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 16777216 ] zero_data: true } }'
    warmups = "".join(f'model_warmup {{ name: "w{n}" {input_} }}\n' for n in range(6))
    models = write(tmp_path / "models", "m", MODEL.replace("dims: [ 2 ]", "dims: [ -1 ]") + warmups)
    with Server(tmp_path, [models], [EXPLICIT]) as server:
        before = peak_bytes(server)
        assert load(server)[0] == 200
        grown = (peak_bytes(server) - before) >> 20
        assert grown < 300, f"{grown} MiB: each of the six samples takes 64 MiB, and each of the two arenas as much"
        eventually("the samples and the arenas are given back", lambda: server.resident_bytes() - before < 50 << 20)


@pytest.mark.parametrize(
    ("fields", "what", "flag"),
    [
        ({"instance_group": [{"count": 150, "kind": "KIND_CPU"}]}, "150 instances", "--load-request-max-instances"),
        (
            {"instance_group": [{"count": 100, "kind": "KIND_CPU"}] * 2},
            "200 instances",
            "--load-request-max-instances",
        ),
        (
            {"dynamic_batching": {"priority_levels": 1 << 40, "default_priority_level": 1}},
            "1099511627776 as 'priority_levels'",
            "--load-request-max-queue-size",
        ),
        ({"parameters": {"intra_op_thread_count": "1000"}}, "1000 threads", "--load-request-max-threads"),
    ],
)
def test_what_a_request_asks_for_is_limited(server, fields, what, flag):
    workers = server.workers()
    status, answer = load(server, configuration(**fields))
    assert status == 400 and f"asks for {what}" in answer and flag in answer, answer
    assert server.workers() == workers, "no process was started"


def test_flags_and_the_operator_set_the_limits(tmp_path):
    models = write(tmp_path / "models", "m", MODEL + "instance_group { count: 4 kind: KIND_CPU }\n")
    group = lambda count: configuration(instance_group=[{"count": count, "kind": "KIND_CPU"}])
    with Server(tmp_path, [models], [EXPLICIT, "--load-request-max-instances=2"]) as server:
        assert load(server)[0] == 200, "the operator's configuration has no limit"
        assert len(server.workers()) == 4
        assert load(server, group(3))[0] == 200
        eventually("the surplus instance has ended", lambda: len(server.workers()) == 3)
        status, answer = load(server, group(5))
        assert status == 400 and "5 instances" in answer and "may ask for 4" in answer, answer
    with Server(tmp_path, [models], [EXPLICIT, "--load-request-max-instances=0"]) as server:
        assert load(server, group(6))[0] == 200


def test_labels_of_a_request_come_from_the_operators_files_or_its_own(server):
    labelled = lambda name: configuration(output=[{**TENSORS["output"][0], "label_filename": name}])
    for name in ("1/model.py", "config.pbtxt"):
        status, answer = load(server, labelled(name))
        assert status == 400 and f"label file '{name}' of output 'OUTPUT0' must be one that" in answer, answer
        assert "which names none" in answer
    status, answer = load(server, labelled("labels.txt"), {"labels.txt": "one\ntwo\n", "1/empty": ""})
    assert status == 200, answer
    assert labels(server) == (200, ["2.000000:1:two", "1.000000:0:one"])


def test_labels_of_the_operator_stay(tmp_path):
    config = MODEL.replace("output [ { ", 'output [ { label_filename: "labels.txt" ')
    models = write(tmp_path / "models", "m", config)
    (models / "m/labels.txt").write_text("one\ntwo\n")
    (models / "m/.env").write_text("SECRET=1\n")
    labelled = lambda name: configuration(output=[{**TENSORS["output"][0], "label_filename": name}])
    with Server(tmp_path, [models], [EXPLICIT, "--allow-model-upload=false"]) as server:
        assert load(server, labelled("labels.txt"))[0] == 200
        assert labels(server) == (200, ["2.000000:1:two", "1.000000:0:one"])
        status, answer = load(server, labelled(".env"))
        assert status == 400 and "names 'labels.txt', or be sent with the load" in answer, answer
