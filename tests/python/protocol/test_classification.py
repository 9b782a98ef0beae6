"""The classification extension: returns the largest elements of an output with their class names."""

import time

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from harness.latency import slowest_answer
from harness.models import write
from harness.server import Server
from harness.waiting import eventually

LABELS = "cat\ndog\n\nbird\n"


def config(datatype: str, batch: int, label_filename="labels.txt") -> str:
    """Returns the configuration of an identity model of four values whose output has labels."""
    return f"""backend: "builtin" max_batch_size: {batch}
input [ {{ name: "X" data_type: TYPE_{datatype} dims: [ 4 ] }} ]
output [ {{ name: "Y" data_type: TYPE_{datatype} dims: [ 4 ] label_filename: "{label_filename}" }} ]
parameters {{ key: "function" value {{ string_value: "identity" }} }}
"""


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A server with models of several datatypes that have labels."""
    folder = tmp_path_factory.mktemp("labelled")
    for name, datatype, batch in [("fp32", "FP32", 4), ("one", "FP32", 0), ("int64", "INT64", 4), ("bool", "BOOL", 0)]:
        write(folder / "models", name, config(datatype, batch))
        (folder / "models" / name / "labels.txt").write_text(LABELS)
    with Server(folder, [folder / "models"]) as running:
        yield running


def classes(server, protocol, model: str, values: np.ndarray, datatype: str, count: int, **options) -> np.ndarray:
    """Returns the classes of the output as strings."""
    module, address = {"http": (tritonclient.http, server.http), "grpc": (tritonclient.grpc, server.grpc)}[protocol]
    with module.InferenceServerClient(address) as client:
        tensor = module.InferInput("X", list(values.shape), datatype)
        tensor.set_data_from_numpy(values)
        output = module.InferRequestedOutput("Y", class_count=count, **options)
        return np.char.decode(client.infer(model, [tensor], outputs=[output]).as_numpy("Y").astype(bytes), "utf-8")


@pytest.mark.parametrize(("protocol", "options"), [("http", {"binary_data": True}), ("http", {"binary_data": False}), ("grpc", {})])
def test_the_largest_by_name(labelled, protocol, options):
    """Each item of a batch is classified separately. A class without a label has only its number. A count over the number of
    classes returns all."""
    values = np.array([[0.1, 0.5, 0.25, 0.125], [-1, -2, -3, 4]], np.float32)
    got = classes(labelled, protocol, "fp32", values, "FP32", 2, **options)
    assert got.tolist() == [["0.500000:1:dog", "0.250000:2"], ["4.000000:3:bird", "-1.000000:0:cat"]]
    got = classes(labelled, protocol, "one", values[0], "FP32", 100, **options)
    assert got.tolist() == ["0.500000:1:dog", "0.250000:2", "0.125000:3:bird", "0.100000:0:cat"]
    got = classes(labelled, protocol, "int64", np.array([[1, 2**60, 3, 4]]), "INT64", 1, **options)
    assert got.tolist() == [[f"{2**60}:1:dog"]]


def test_a_label_file_that_is_not_utf8(tmp_path):
    """Invalid bytes are replaced; Triton sends them unchanged. The log has the file and the position."""
    write(tmp_path / "models", "latin", config("FP32", 4))
    (tmp_path / "models/latin/labels.txt").write_bytes("hund\nkäfer\n".encode("latin-1"))
    with Server(tmp_path, [tmp_path / "models"]) as server:
        got = classes(server, "http", "latin", np.array([[1, 2, 0, 0]], np.float32), "FP32", 2)
        assert got.tolist() == [["2.000000:1:k\ufffdfer", "1.000000:0:hund"]]
        line = "latin/labels.txt' is not UTF-8 at byte 6: invalid bytes are replaced with U+FFFD"
        # Another thread of the server writes the log.
        eventually("the log has the line", lambda: line in server.log.read_text())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_datatypes_without_an_order_are_refused(labelled, protocol):
    """A datatype without an order cannot be classified, but the tensor itself can be requested."""
    with pytest.raises(InferenceServerException, match="class result not available for output due to unsupported type 'BOOL'"):
        classes(labelled, protocol, "bool", np.array([True] * 4), "BOOL", 1)


def test_a_missing_label_file(start, tmp_path):
    """The load fails with the output and the file; a file outside the model's directory is not read."""
    folder = write(tmp_path / "models", "missing", config("FP32", 0))
    write(folder, "outside", config("FP32", 0, "../missing/config.pbtxt"))
    server = start([], "--exit-on-error=false", repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    eventually("both failures are reported", lambda: "labels.txt' cannot be read" in str(server.index()))
    eventually("both failures are reported", lambda: "must be in the model's directory" in str(server.index()))


@pytest.mark.alone
def test_others_are_served_while_a_large_output_is_classified(tmp_path):
    """A million elements are sorted and written on another thread than those that serve connections."""
    size = 1_000_000
    write(tmp_path / "models", "large", config("FP32", 0, "").replace("dims: [ 4 ]", "dims: [ -1 ]"))
    values = np.arange(size, dtype=np.float32)
    with Server(tmp_path, [tmp_path / "models"]) as server, slowest_answer(server) as slowest:
        tensor = tritonclient.http.InferInput("X", [size], "FP32")
        tensor.set_data_from_numpy(values)
        output = tritonclient.http.InferRequestedOutput("Y", class_count=size)
        body, length = tritonclient.http.InferenceServerClient.generate_request_body([tensor], outputs=[output])
        began = time.monotonic()
        status, answer = server.ask("POST", "/v2/models/large/infer", body, headers={"Inference-Header-Content-Length": str(length)})
        took = time.monotonic() - began
    assert status == 200 and f"{size - 1}.000000:{size - 1}" in str(answer)
    assert slowest[0] < took / 2, (slowest, took)
