"""`model_warmup`: requests that a model executes before it is ready."""

import json
import struct

import pytest

from harness.generate import backend_of
from harness.inference import one
from harness.models import IO, write
from harness.sequence_models import config as sequence_config, controls
from harness.server import Server, total
from harness.waiting import eventually
from python_backend.worker import CODE, PYTHON, has_worker

TEXT_IO = IO.replace("FP32", "STRING")


def model(function: str, warmups: str, io=IO, batch=4) -> str:
    """Returns a complete configuration."""
    return f"""backend: "{backend_of(function)}" max_batch_size: {batch} {io} {warmups}
parameters {{ key: "function" value {{ string_value: "{function}" }} }}
parameters {{ key: "delay_ms" value {{ string_value: "300" }} }}
"""


def warmup(data: str, name="first", batch=1, dims="2", count=1, datatype="FP32", tensor="INPUT0") -> str:
    """Returns one entry of `model_warmup`."""
    return f"""model_warmup [ {{ name: "{name}" batch_size: {batch} count: {count}
  inputs {{ key: "{tensor}" value {{ data_type: TYPE_{datatype} dims: [ {dims} ] {data} }} }} }} ]
"""


def test_a_model_is_ready_after_its_warmups(start, tmp_path):
    """Zeros, random values and a file, repeatedly and in batches. All count in the model's statistics, once per instance, and the
    model is not ready while they run."""
    warmups = (
        warmup("zero_data: true", batch=2, count=3)
        + warmup("random_data: true", "second", batch=4)
        + warmup('input_data_file: "values"', "third")
    )
    folder = write(tmp_path / "models", "warm", model("delay", warmups + "instance_group [ { count: 2 } ]"))
    (folder / "warm/warmup").mkdir()
    (folder / "warm/warmup/values").write_bytes(struct.pack("<2f", 1, 2))
    server = start([], repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    assert server.get("/v2/models/warm/ready")[0] != 200
    server.wait_until_ready()
    statistics = server.statistics("warm")
    assert statistics["inference_stats"]["success"]["count"] == 2 * (3 * 2 + 4 + 1)
    assert statistics["inference_count"] == 2 * (3 * 2 + 4 + 1)
    assert statistics["execution_count"] == 2 * 5
    batches = {entry["batch_size"]: entry["compute_infer"]["count"] for entry in statistics["batch_stats"]}
    assert batches == {1: 2, 2: 6, 4: 2}
    assert statistics["inference_stats"]["compute_infer"]["ns"] >= 22 * 0.3e9
    assert total(server.scrape(), "nv_inference_request_success", model="warm") == 22
    assert total(server.scrape(), "nv_inference_pending_request_count", model="warm") == 0
    names = ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds")
    assert [total(server.scrape(), name) for name in names] == [0, 0, 0], "TorchServe's counters have the requests of clients"
    assert not any(name == "QueueTime" for name, _ in server.scrape()), "no client's request has waited"
    assert server.infer("warm", one("FP32", [1, 2], [5, 6]))[1]["outputs"][0]["data"] == [5, 6]
    assert 0.3e6 <= total(server.scrape(), "ts_inference_latency_microseconds") < 3e6, "one request: the warm-ups have 6.6 s"


def test_every_datatype_warms_up(start, tmp_path):
    """Random and zero values of every datatype reach the model."""
    folder = tmp_path / "models"
    names = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"]
    names += ["FP16", "BF16", "FP32", "FP64", "STRING"]
    for name in names:
        both = warmup("zero_data: true", datatype=name) + warmup("random_data: true", "other", datatype=name)
        write(folder, name.lower(), model("identity", both, IO.replace("FP32", name)))
    server = start([], repository=folder)
    for name in names:
        assert server.statistics(name.lower())["execution_count"] == 2, name


def test_a_restarted_instance_warms_up_again(start, tmp_path):
    """An instance whose worker dies executes its warm-ups again before it takes requests."""
    folder = write(tmp_path / "models", "warm", model("crash", warmup("zero_data: true")))
    server = start([], repository=folder)
    assert server.statistics("warm")["execution_count"] == 1
    server.infer("warm", one("FP32", [1, 2], [struct.unpack("<f", bytes([1, 0, 0, 0]))[0], 0]))
    eventually("the instance warms up again", lambda: server.statistics("warm")["execution_count"] >= 2)
    eventually("the instance answers", lambda: server.infer("warm", one("FP32", [1, 2], [2, 0]))[0] == 200)


def sample(tensors: dict, batch: int = 1) -> str:
    """Returns a warm-up with these tensors: `name: (datatype, dims, data)`."""
    texts = (
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_{datatype} dims: [ {dims} ] {data} }} }}'
        for name, (datatype, dims, data) in tensors.items()
    )
    return f'model_warmup [ {{ name: "first" batch_size: {batch} {" ".join(texts)} }} ]\n'


ZERO = "zero_data: true"
GIVEN = {"VALUE": ("INT32", 1, ZERO), "START": ("INT32", 1, ZERO), "READY": ("BOOL", 1, ZERO)}


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_samples_of_sequence_models_may_give_controls(start, tmp_path, strategy):
    """Controls that a sample omits have the values of a sequence with one request."""
    text = sequence_config(f"{strategy} {controls()}")
    folder = tmp_path / "models"
    write(folder, "some", text + sample(GIVEN, 3))
    write(folder, "none", text + sample({"VALUE": ("INT32", 1, ZERO)}))
    write(folder, "all", text + sample(GIVEN | {"END": ("FP32", 1, ZERO), "CORRID": ("UINT64", 1, ZERO)}))
    server = start([], repository=folder)
    counts = {name: server.statistics(name) for name in ("some", "none", "all")}
    assert {name: stats["execution_count"] for name, stats in counts.items()} == {"some": 1, "none": 1, "all": 1}
    assert counts["some"]["inference_count"] == 3


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"START": ("FP32", 1, ZERO)}, "control input 'START' has datatype FP32 and dims [1], expected INT32 and dims [1]"),
        ({"READY": ("BOOL", 2, ZERO)}, "control input 'READY' has datatype BOOL and dims [2], expected BOOL and dims [1]"),
        ({"OTHER": ("BOOL", 1, ZERO)}, "expected 1 inputs but got 2 inputs"),
    ],
)
def test_wrong_controls_fail_the_load(start, tmp_path, wrong, expected):
    """The reason of the failed load has the expected datatype and dims."""
    folder = write(tmp_path / "models", "wrong", sequence_config(f"direct {{ }} {controls()}") + sample(GIVEN | wrong))
    server = start([], "--exit-on-error=false", repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually(f"the reason contains {expected!r}", lambda: expected in str(server.index()))


@pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")
def test_a_model_sees_the_controls_that_a_sample_gives(tmp_path):
    """The sample sets START to 5 and READY to 0; the server sets END."""
    folder = write(
        tmp_path / "models",
        "seen",
        f"""backend: "python" max_batch_size: 2
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }} ] output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }} ]
sequence_batching {{ direct {{ }} {controls()} }} parameters {{ key: "file" value {{ string_value: "{tmp_path}/seen" }} }}
""" + sample({"IN": ("FP32", 1, ZERO), "START": ("INT32", 1, 'input_data_file: "five"'), "READY": ("BOOL", 1, ZERO)}, 2),
    )
    (folder / "seen/warmup").mkdir()
    (folder / "seen/warmup/five").write_bytes(struct.pack("<i", 5))
    (folder / "seen/1/model.py").write_text((CODE / "recorded.py").read_text())
    with Server(tmp_path, [folder], [f"--python={PYTHON}"]):
        lines = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [(line["START"], line["READY"], line["END"]) for line in lines] == [([[5]], [[False]], [[2.0]])] * 2


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        ("fail", warmup("zero_data: true"), "failed to run warmup sample 'first': requested failure"),
        ("crash", warmup('input_data_file: "crash"'), "failed to run warmup sample 'first': the worker process ended: killed by signal 6"),
        ("hang", warmup('input_data_file: "crash"'), "failed to run warmup sample 'first': it did not finish within 1 s"),
        ("identity", warmup("zero_data: true", batch=5), "batch_size 5 is more than the model's maximum of 4"),
        ("identity", warmup("zero_data: true", tensor="X"), "unexpected inference input 'X'"),
        ("identity", warmup("zero_data: true", datatype="INT32"), "data-type is 'INT32', but model 'wrong' expects 'FP32'"),
        ("identity", warmup("zero_data: true", dims="3"), "Expected [-1,2], got [1,3]"),
        ("identity", warmup("zero_data: true", dims="-1"), "dims [-1] are not all 0 or greater"),
        ("identity", warmup("zero_data: true", dims="1000000, 1000000"), "more than 1073741824 bytes"),
        ("identity", warmup('input_data_file: "short"'), "file 'short' has 1 bytes, the dims [2] need 8"),
        ("identity", warmup('input_data_file: "none"'), "warmup/none' cannot be read"),
        ("identity", warmup('input_data_file: "../config.pbtxt"'), "must be in the model's directory '"),
        ("identity", warmup(""), "one of zero_data, random_data and input_data_file must be given"),
    ],
)
def test_a_failed_warmup_fails_the_load(start, tmp_path, function, text, expected):
    """A model whose warm-up fails is not loaded, and the index has the reason."""
    folder = write(tmp_path / "models", "wrong", model(function, text))
    (folder / "wrong/warmup").mkdir()
    (folder / "wrong/warmup/short").write_bytes(b"\1")
    (folder / "wrong/warmup/crash").write_bytes(b"\1" + bytes(7))
    options = ["--exit-on-error=false", "--worker-execution-timeout-secs=1"]
    server = start([], *options, repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually(f"the reason contains {expected!r}", lambda: expected in str(server.index()))
    assert server.get("/v2/models/wrong/ready")[0] != 200
