"""The command line of Triton: its flags, the name `tritonserver`, and the source of an invalid value in errors."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from harness import peers
from harness.server import binary
from harness.waiting import DEADLINE_S

GOLDEN = Path(__file__).parent / "golden_triton_flags.json"
"""Each flag of a real Triton's `--help` with the form of its value."""

WITHOUT_EFFECT = {
    "buffer-manager-thread-count": "4",
    "cache-directory": "/opt/tritonserver/caches",
    "cuda-memory-pool-byte-size": "0:67108864",
    "cuda-virtual-address-size": "0:1073741824",
    "enable-peer-access": "true",
    "grpc-http2-max-ping-strikes": "0",
    "grpc-infer-allocation-pool-size": "8",
    "repoagent-directory": "/opt/tritonserver/repoagents",
    "sagemaker-thread-count": "8",
    "vertex-ai-thread-count": "8",
}


VALUES = WITHOUT_EFFECT | {
    "log-format": "ISO8601",
    "model-control-mode": "EXPLICIT",
    "http-address": "127.0.0.1",
    "grpc-address": "127.0.0.1",
    "metrics-address": "127.0.0.1",
    "grpc-infer-response-compression-level": "High",
    "http-restricted-api": "health:key=value",
    "grpc-restricted-protocol": "health:key=value",
    "sagemaker-safe-port-range": "1-65535",
    "metrics-config": "summary_latencies=true",
    "metrics-interval-ms": "1500.5",
    "trace-config": "rate=3",
    "trace-level": "min",
    "backend-config": "tensorflow,version=2",
    "cache-config": "local,size=1048576",
    "response-cache-byte-size": "1048576",
    "rate-limit": "execution_count",
    "rate-limit-resource": "R1:10:0",
    "host-policy": "gpu_0,numa-node=0",
    "model-load-gpu-limit": "0:0.5",
    "min-supported-compute-capability": "7.5",
}
"""Values of flags that accept only some texts, numbers or booleans."""


def forms(flag: str, form: str) -> list:
    """Returns the forms in which a flag can be given."""
    if not form:
        return [[f"--{flag}"]]
    value = VALUES.get(flag) or {"string": "text", "integer": "3", "boolean": "True"}[form]
    alone = [[f"--{flag}"]] if form == "boolean" else []
    return [[f"--{flag}={value}"], [f"--{flag}", value], *alone]


def refusal(*args, **variables) -> str:
    """Returns the error on standard error with which a command line is refused."""
    command = [str(binary()), *args]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env={"PATH": "/usr/bin:/bin"} | variables)
    assert ended.returncode != 0, ended.stdout
    return ended.stderr


def test_the_recorded_flags_are_those_of_triton():
    """The golden file has every flag of a real Triton's --help, with the form of its value."""
    if why := peers.missing("triton", "triton"):
        pytest.skip(why)
    command = [str(peers.script("triton")), "/nonexistent", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    flags = re.findall(r"^  --([a-z0-9-]+)(?: <(.*)>)?$", printed.stdout + printed.stderr, re.MULTILINE)
    assert [list(flag) for flag in flags] == json.loads(GOLDEN.read_text())


@pytest.mark.slow
def test_every_flag_is_accepted_in_each_form(tmp_path):
    """With every flag in every form the start proceeds until the server looks for the worker."""
    flags = [flag for flag in json.loads(GOLDEN.read_text()) if flag[0] != "help"]
    assert len(flags) > 80
    wrong = []
    # Vertex AI's endpoints require their routes.
    environment = {"PATH": "/bin", "AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}
    for flag, form in flags:
        beside = ["--model-control-mode=explicit"] if flag == "load-model" else []
        for given in forms(flag, form):
            command = [str(binary()), "--model-repository=models", "--worker-binary=/nonexistent", *beside, *given]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path, env=environment)
            if "the worker '/nonexistent', which runs the models, does not exist" not in ended.stderr:
                wrong.append((given, ended.stderr[-300:]))
    assert not wrong, wrong


def test_flags_without_effect_are_named_with_the_reason(start):
    """The log has one line for each flag without effect, and none for flags with an effect."""
    given = [f"--{flag}={value}" for flag, value in WITHOUT_EFFECT.items()]
    server = start(["identity_fp32"], *given, "--strict-model-config=false", "--host-policy=cpu,cpu-cores=0-3")
    lines = [line for line in server.log.read_text().splitlines() if " has no effect" in line]
    named = [re.search(r"--([a-z0-9-]+) has no effect: \S", line) for line in lines]
    assert sorted(match and match.group(1) for match in named) == sorted(WITHOUT_EFFECT)
    assert "--strict-model-config is deprecated: use --disable-auto-complete-config" in server.log.read_text()


def test_a_host_policy_binds_instances_to_its_processors(start):
    """The default policy of instances on CPUs is `cpu`; a policy whose CPUs do not exist here is ignored."""
    allowed = sorted(os.sched_getaffinity(0))
    server = start(["identity_fp32"], f"--host-policy=cpu,cpu-cores={allowed[-1]}", "--host-policy=x,numa-node=99")
    (worker,) = server.workers()
    assert os.sched_getaffinity(worker) == {allowed[-1]}
    assert "--host-policy=x,numa-node=99 has no effect: this process may use none" in server.log.read_text()


def test_tritonserver_has_tritons_defaults(tmp_path):
    """With a link of that name, and with the command: metrics on port 8002."""
    link = tmp_path / "tritonserver"
    link.symlink_to(binary())
    for command in ([str(link)], [str(binary()), "tritonserver"]):
        text = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
        assert "Usage: tritonserver [OPTIONS]" in text
        ports = re.findall(r"--(http|grpc|metrics)-port <PORT>\s.*?\[default: (\d+)\]", text, re.DOTALL)
        assert dict(ports) == {"http": "8000", "grpc": "8001", "metrics": "8002"}


def test_addresses_of_kubernetes_services_are_ignored(start):
    """A Service named pharos-http sets PHAROS_HTTP_PORT to an address: the server logs a warning and uses the default."""
    text = 'PHAROS_SAGEMAKER_PORT="tcp://10.0.0.1:8000" is ignored: it is the address that Kubernetes sets for a Service named'
    server = start(["identity_fp32"], wait=False)
    server.kill()
    server.environment = {"PHAROS_SAGEMAKER_PORT": "tcp://10.0.0.1:8000", "PHAROS_METRICS_PORT": "udp://10.0.0.2:1"}
    server.launch()
    server.wait_until_ready()
    log = server.log.read_text()
    assert f"{text} pharos-sagemaker" in log and 'PHAROS_METRICS_PORT="udp://10.0.0.2:1" is ignored' in log


@pytest.mark.parametrize(
    ("args", "variables", "expected"),
    [
        (["--metrics-port=80a"], {}, 'invalid --metrics-port "80a": expected a number from 0 to 65535\n'),
        ([], {"PHAROS_METRICS_PORT": "80a"}, '"80a": expected a number from 0 to 65535 (from PHAROS_METRICS_PORT)\n'),
        ([], {"PHAROS_ALLOW_HTTP": "maybe"}, 'invalid --allow-http "maybe": allowed are true, false, on, off, yes, no, 1 and 0 (from PHAROS_ALLOW_HTTP)\n'),
        ([], {"PHAROS_CACHE_CONFIG": "disk,size=1"}, "(from PHAROS_CACHE_CONFIG)\n"),
        ([], {"PHAROS_TRACE_CONFIG": "level=ALL"}, "(from PHAROS_TRACE_CONFIG)\n"),
        ([], {"PHAROS_BACKEND_DIRECTORY": "/nonexistent"}, "'/nonexistent', which is not a directory (from PHAROS_BACKEND_DIRECTORY)\n"),
        ([], {"PHAROS_WORKER_BINARY": "/nonexistent"}, "(from PHAROS_WORKER_BINARY)\n"),
        (["--strict-model-confg=1"], {}, "unknown flag --strict-model-confg; did you mean --strict-model-config?\n"),
        (["--tf-gpu-memory-fraction=1"], {}, "unknown flag --tf-gpu-memory-fraction; --help lists all flags\n"),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_flag_or_variable(args, variables, expected, tmp_path):
    """The error has the flag, the value, the allowed values, and the environment variable if the value comes from one."""
    ports = ["--http-port=0", "--grpc-port=0"]
    assert expected in refusal(f"--model-repository={tmp_path}", *ports, *args, **variables)


def test_a_repository_may_come_from_vertex_ai(tmp_path):
    """AIP_STORAGE_URI replaces --model-repository."""
    text = refusal("--http-port=0", "--grpc-port=0", "--metrics-port=0", AIP_STORAGE_URI=str(tmp_path / "none"))
    assert str(tmp_path / "none") in text
    assert "--model-repository" in refusal("--http-port=0")
