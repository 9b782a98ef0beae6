"""Fields of config.pbtxt that other servers ignore: each has an effect, is reported in the log, or fails the load."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from backends.onnx_models import MODELS, write
from harness.server import Server
from harness.waiting import DEADLINE_S, eventually

IO = "input { name: 'INPUT0' data_type: TYPE_FP32 dims: [ -1 ] } output { name: 'OUTPUT0' data_type: TYPE_FP32 dims: [ -1 ] }"
IDENTITY = f"backend: 'builtin' max_batch_size: 8 {IO} parameters {{ key: 'function' value {{ string_value: 'identity' }} }}"


def put(repository: Path, name: str, config: str, **files) -> Path:
    """Writes a model with one version to a repository."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config)
    for file, text in files.items():
        (version / file).write_text(text)
    return version


def parameter(key: str, value: str) -> str:
    """Returns a model parameter."""
    return f"parameters {{ key: '{key}' value {{ string_value: '{value}' }} }} "

STATUSES = {"load failed for model": 400, "failed to load": 500, "explicit model load / unload is not allowed": 503}
"""The status of a refused load by the beginning of its text: the worker or the configuration failed, or the mode forbids it."""


def reason(server, name: str) -> str:
    """Returns the reason for which a model cannot be loaded by request."""
    status, text = server.ask("POST", f"/v2/repository/models/{name}/load", b"{}")
    error = json.loads(text)["error"]
    assert [status] == [code for begin, code in STATUSES.items() if error.startswith(begin)], text
    return error


@pytest.fixture
def place(tmp_path):
    """Starts a server with the models in `place.repository`, which are loaded by request."""

    class Place:
        repository = tmp_path / "models"

        def server(self, *options):
            return Server(tmp_path, [self.repository], ["--model-control-mode=explicit", *options])

    Place.repository.mkdir()
    return Place()


def load(server, name: str):
    """Loads a model."""
    status, text = server.ask("POST", f"/v2/repository/models/{name}/load", b"{}")
    assert status == 200, text


def test_the_checksum_agent_compares_sums_before_a_model_is_used(place):
    """A model with a wrong checksum does not become READY, and its code does not run; a changed file fails the next load."""
    agent = "model_repository_agents {{ agents [ {{ name: '{}' parameters {{ key: '{}' value: '{}' }} }} ] }}"
    text = "whatever"
    right = hashlib.md5(text.encode()).hexdigest().upper()
    put(place.repository, "right", f"{IDENTITY} {agent.format('checksum', 'MD5:1/data', right)}", data=text)
    put(place.repository, "wrong", f"{IDENTITY} {agent.format('checksum', 'MD5:1/data', '0' * 32)}", data=text)
    put(place.repository, "gone", f"{IDENTITY} {agent.format('checksum', 'MD5:1/none', right)}")
    put(place.repository, "other", f"{IDENTITY} {agent.format('decrypt', 'key', 'x')}")
    put(place.repository, "hash", f"{IDENTITY} {agent.format('checksum', 'SHA256:1/data', right)}")
    ran = place.repository.parent / "ran"
    code = f"open({str(ran)!r}, 'w').close()\n\n\nclass TritonPythonModel:\n    pass\n"
    wrong = agent.format("checksum", "MD5:1/model.py", "0" * 32)
    put(place.repository, "code", f"backend: 'python' {wrong}", **{"model.py": code})
    with place.server() as server:
        load(server, "right")
        for name, expected in [
            ("wrong", f"Mismatched MD5 hash for file 1/data, expect: {'0' * 32}, got: {right.lower()}"),
            ("gone", "cannot compute the MD5 sum of "),
            ("other", "repository agent 'decrypt' is not known; allowed is checksum"),
            ("hash", "parameter 'SHA256:1/data' is not supported; allowed are MD5:FILE"),
            ("code", "Mismatched MD5 hash for file 1/model.py"),
        ]:
            assert expected in reason(server, name), name
        assert not ran.exists(), "the model's code ran before its sum was compared"
        (place.repository / "right/1/data").write_text("changed")
        assert "Mismatched MD5 hash for file 1/data" in reason(server, "right")


def test_options_of_onnx_sessions(place):
    """The session uses the threads that the model configures; an unsupported option fails the load with the allowed values."""
    pytest.importorskip("onnxruntime")

    def onnx(name: str, more: str):
        write(place.repository, name, "onnxruntime", MODELS["batched"])
        config = place.repository / name / "config.pbtxt"
        config.write_text(f"{config.read_text()}\n{more}")

    onnx("one", parameter("intra_op_thread_count", "1"))
    onnx("four", parameter("intra_op_thread_count", "4"))
    onnx("parallel", parameter("intra_op_thread_count", "1") + parameter("execution_mode", "1") + parameter("inter_op_thread_count", "3"))
    more = [("session.disable_prepacking", "1"), ("enable_mem_arena", "0"), ("enable_mem_pattern", "0"), ("graph_optimization_level", "1")]
    onnx("more", "".join(parameter(*pair) for pair in more) + "optimization { graph { level: -1 } }")
    onnx("mode", parameter("execution_mode", "2"))
    onnx("ops", "model_operations { op_library_filename: 'no_such_library.so' }")
    onnx("openvino", "optimization { execution_accelerators { cpu_execution_accelerator: [ { name: 'openvino' } ] } }")
    onnx("dnnl", "optimization { execution_accelerators { cpu_execution_accelerator: [ { name: 'dnnl' } ] } }")

    def threads(server, name: str) -> int:
        before = server.workers()
        load(server, name)
        (pid,) = server.workers() - before
        return len(os.listdir(f"/proc/{pid}/task"))

    with place.server("--worker-threads=2") as server:
        one = threads(server, "one")
        assert threads(server, "four") == one + 3
        assert threads(server, "parallel") > one
        load(server, "more")
        assert server.infer("more", {"inputs": [{"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})[0] == 200
        for name, expected in [
            ("mode", "parameter 'execution_mode' of model mode is '2'; allowed are 0 (sequential) and 1 (parallel)"),
            ("ops", "no_such_library.so"),
            ("openvino", "pip install onnxruntime-openvino"),
            ("dnnl", "the cpu_execution_accelerator 'dnnl' of model dnnl is not known; allowed is openvino"),
        ]:
            assert expected in reason(server, name), name


def test_fields_without_effect_are_named_in_the_log(place):
    """A model load logs a warning for each such field."""
    fields = {
        "optimization.cuda": "optimization { cuda { graphs: true } eager_batching: true }",
        "runtime": "runtime: 'libx.so'",
        "instance_group.profile": "instance_group { kind: KIND_CPU profile: '0' host_policy: 'near' }",
    }
    put(place.repository, "m", f"{IDENTITY} {' '.join(fields.values())}")
    with place.server() as server:
        load(server, "m")
        log = server.log.read_text()
    assert [field for field in [*fields, "optimization.eager_batching"] if f"'{field}' has no effect: " not in log] == []
    assert "host_policy 'near' of instance group m_0 has no effect: no --host-policy=near,... sets it" in log


def test_gpu_groups_run_on_cpus_if_the_model_allows_it(place):
    """With every backend, on a machine without GPUs; without the parameter the load is refused."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    group = "instance_group { kind: KIND_GPU }"
    put(place.repository, "allowed", f"{IDENTITY} {group} {parameter('allow_cpu_fallback', 'true')}")
    put(place.repository, "refused", f"{IDENTITY} {group}")
    with place.server() as server:
        load(server, "allowed")
        assert "runs on processors, as allow_cpu_fallback allows: no GPUs are available" in server.log.read_text()
        assert "KIND_GPU but no GPUs are available" in reason(server, "refused")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("platform: 'tensorflow_savedmodel'", "python -m tf2onnx.convert --saved-model DIR --output model.onnx"),
        ("backend: 'tensorflow'", "python -m tf2onnx.convert"),
        ("backend: 'tensorrt'", "serve the ONNX file that the plan was built from"),
        ("backend: 'openvino'", "export the model to ONNX"),
    ],
)
def test_models_of_missing_backends_fail_with_advice(place, kind, advice):
    """The reason of the failed load has the remedy."""
    put(place.repository, "m", f"{kind} max_batch_size: 8 {IO}")
    with place.server() as server:
        assert advice in reason(server, "m")


def test_loads_beyond_the_limit_of_open_files_affect_no_other_model(place):
    """The soft limit is raised to the hard limit. A load that would exceed it is reported and fails with the reason; the other
    models serve."""
    count = 40
    for number in range(count):
        put(place.repository, f"m{number}", IDENTITY)
    server = Server(place.repository.parent, [place.repository], ["--exit-on-error=false"])
    # A shell lowers the limits for the server alone: this process may have more files open than that.
    server.command = ["/bin/sh", "-c", 'ulimit -Sn 200; ulimit -Hn 500; exec "$0" "$@"', *server.command]
    server.launch()
    server.wait_until_ready("/v2/health/live")
    try:
        eventually("all loads have ended", lambda: all(
            entry.get("state") == "READY" or (entry.get("state") == "UNAVAILABLE" and entry.get("reason"))
            for entries in server.index().values() for entry in entries
        ) and len(server.index()) == count, deadline_s=120)  # fmt: skip
        entries = [entries[0] for entries in server.index().values()]
        ready = [entry["name"] for entry in entries if entry["state"] == "READY"]
        reasons = [entry["reason"] for entry in entries if entry["state"] != "READY"]
        assert 10 <= len(ready) < count
        assert all("too few file descriptors for model" in text and "the limit of open files is 500" in text for text in reasons), reasons
        request = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        assert all(server.infer(name, request)[0] == 200 for name in ready)
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 500 - 100
        log = server.log.read_text()
        assert f"open files: limit 500, 7 per model instance, at most {len(ready)} instances" in log
        assert f"{count} models with {count} instances need {count * 7} file descriptors" in log
    finally:
        server.stop()


def test_a_failed_start_does_not_log_that_it_waits_for_requests(place):
    """The log has the model and the reason; nothing waits for requests."""
    put(place.repository, "bad", "backend: 'tensorrt'")
    server = Server(place.repository.parent, [place.repository])
    server.launch()
    assert server.process.wait(DEADLINE_S) == 1
    log = server.log.read_text()
    assert "exiting: not all models were loaded" in log and "TensorRT plans need Triton's library" in log
    assert "waiting up to" not in log and "requests" not in log


def test_loads_by_request_in_another_mode_name_the_modes(place):
    """Triton's text, followed by the current mode and the required one."""
    server = Server(place.repository.parent, [place.repository])
    with server:
        text = reason(server, "m")
    assert text.startswith("explicit model load / unload is not allowed if polling is enabled; the model control mode is 'none'")
    assert "--model-control-mode=explicit (modes: none, poll, explicit, on-demand)" in text


def test_an_unreachable_interpreter_is_reported_as_a_permission_error(place, tmp_path):
    """A directory in the interpreter's path that the server's user may not enter."""
    if os.geteuid() == 0 and not hasattr(os, "setresuid"):
        pytest.skip("this user may enter every directory")
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    (closed / "bin/python3").symlink_to("/usr/bin/python3")
    put(place.repository, "m", "backend: 'python'", **{"model.py": "class TritonPythonModel:\n    pass\n"})
    server = Server(tmp_path, [place.repository], ["--model-control-mode=explicit", f"--python={closed}/bin/python3"])
    if os.geteuid() == 0:
        # Root may enter every directory, except without this capability.
        server.command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", *server.command]
    closed.chmod(0)
    try:
        with server:
            text = reason(server, "m")
    finally:
        closed.chmod(0o700)
    assert "cannot be reached: permission denied" in text and str(closed) in text
