"""The command line of Triton: its flags, the name `tritonserver`, and the source of an invalid value in errors."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from harness import peers
from harness.server import ROOT, binary
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


def refusal(*args, cwd=None, **variables) -> str:
    """Returns the error on standard error with which a command line is refused."""
    command = [str(binary()), *args]
    environment = {"PATH": "/usr/bin:/bin"} | variables
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, cwd=cwd)
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


@pytest.mark.parametrize(
    ("args", "variable", "named"),
    [
        (["--metrics-po=80a"], "METRICS_PORT", False),
        (["--metrics-po", "80a"], "METRICS_PORT", False),
        (["--metrics-port=80a"], "METRICS_PORT", False),
        (["--metrics-port", "80a"], "METRICS_PORT", False),
        (["--http-port=1"], "METRICS_PORT", True),
        (["--rate-limit=execution_count"], "RATE_LIMIT_RESOURCE", True),
    ],
)
def test_the_source_of_a_bad_value_under_the_name_tritonserver(args, variable, named, tmp_path):
    """The command line, also if it has a prefix of the flag; a variable only if no argument sets the flag."""
    link = tmp_path / "tritonserver"
    link.symlink_to(binary())
    for command in ([str(link)], [str(binary()), "tritonserver"]):
        command += [f"--model-repository={tmp_path}", *args]
        environment = {"PATH": "/usr/bin:/bin", f"PHAROS_{variable}": "80a"}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
        assert ended.returncode == 2 and '"80a": ' in ended.stderr, ended.stderr
        assert (f"(from PHAROS_{variable})" in ended.stderr) == named, ended.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["torchserve", "--foreground", "--model-store=.", "--", "--http-prt=1"], "pharos: unknown flag --http-prt; did you mean --http-port?\n"),
        (["torchserve", "--foreground", "--model-store=.", "--", "top"], "pharos: only options of the server may follow `--`"),
        (["torchserve", "--foreground", "--model-store=.", "--", "--help"], "pharos: only options of the server may follow `--`"),
        (["torchserve", "--http-port=1"], "unexpected argument '--http-port' found"),
        (["metrics", "list", "a", "b"], "unexpected argument 'b' found"),
        (["health", "http://localhost:8000/"], "expected [https://]HOST:PORT, without a path\n"),
        (["model.onnx"], "'model.onnx' is not a command; `pharos serve model.onnx` serves it\n"),
    ],
)
def test_errors_of_commands(args, expected, tmp_path):
    """They name the flags and the usage of the command, not those of the server."""
    text = refusal(*args, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert expected in text and (args == ["model.onnx"] or "Usage: pharos [OPTIONS] --model" not in text), text


def test_the_help_lists_serve():
    """Among the commands and in the usage, as in errors."""
    text = subprocess.run([binary(), "--help"], capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    usage = ["pharos [OPTIONS] --model-repository <PLACE>", "pharos serve <PLACE>... [OPTIONS]", "pharos <COMMAND>"]
    assert "Usage: " + "\n       ".join(usage) in text
    assert re.search(r"^Commands:\n  serve  +Serve model files, models or repositories", text, re.MULTILINE), text
    for args in (["serve"], ["--http-port=x", "serve", "a"]):
        assert "pharos serve <PLACE>... [OPTIONS]" in refusal(*args)
    assert "serve must be the first argument: pharos serve PLACE... [OPTIONS]" in refusal("--id=a", "serve", "a")


READ = r"""(?:environ(?:\.get)?|getenv|var_os|var|setdefault|setenv|from|number|env)\W{1,4}["'](PHAROS_[A-Z0-9_]+)|\$\{?(PHAROS_[A-Z0-9_]+)"""


def read_by_others() -> set:
    """Returns the variables that files of this repository read, except the flags of the server."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {"PHAROS_TORCHSERVE_BACKGROUND", "PHAROS_BACKEND_LIBRARY", "PHAROS_PYTHON_BACKEND"}
    for name in listed.rstrip("\0").split("\0"):
        path = ROOT / name
        if path.suffix not in (".json", ".svg", ".png", ".lock") and path.is_file() and path.stat().st_size < 1 << 20:
            text = path.read_bytes().decode(errors="replace")
            found |= {a or b for a, b in re.findall(READ, text)} if "PHAROS_" in text else set()
    text = subprocess.run([binary(), "--help"], capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    return found - set(re.findall(r"env:\s+(\w+)", text))


def test_misspelt_variables_are_named(start):
    """With the nearest one and without their values; not the variables that other programs of this repository read."""
    others = read_by_others()
    assert {"PHAROS_BIN", "PHAROS_LOGS", "PHAROS_CHROMIUM", "PHAROS_SOAK_S"} <= others
    wrong = {"PHAROS_HTP_PORT": "secret", "PHAROS_MODEL_REPO": "secret", "PHAROS_UNHEARD_OF": "secret"}
    services = {"PHAROS_SERVICE_HOST": "10.0.0.1", "PHAROS_PORT": "tcp://10.0.0.1:80", "PHAROS_PORT_80_TCP_ADDR": "10.0.0.1"}
    server = start(["identity_fp32"], environment=dict.fromkeys(others, "1") | wrong | services)
    log = server.log.read_text()
    named = re.findall(r" WARN (PHAROS_\w+) sets no flag of the server; (.*)", log)
    assert named == [
        ("PHAROS_HTP_PORT", "did you mean PHAROS_HTTP_PORT?"),
        ("PHAROS_MODEL_REPO", "did you mean PHAROS_MODEL_REPOSITORY?"),
        ("PHAROS_UNHEARD_OF", "--help lists the variables"),
    ]
    assert "secret" not in log


def test_flags_of_another_control_mode_are_named(start):
    """A flag without effect in this mode is a warning, with its variable."""
    variables = {"PHAROS_ON_DEMAND_MAX_WAITING": "5", "PHAROS_REPOSITORY_POLL_SECS": "60"}
    server = start(["identity_fp32"], "--model-idle-unload-secs=60", environment=variables)
    log = server.log.read_text()
    assert " WARN --repository-poll-secs has no effect without --model-control-mode=poll (from PHAROS_REPOSITORY_POLL_SECS)\n" in log
    # These also concern models whose configuration says that requests load them.
    assert "model-idle-unload-secs" not in log and "on-demand-max-waiting" not in log


def test_health_checks_ask_the_port_of_the_servers_variable(start):
    """Without an address, and not the address that Kubernetes sets for a Service named pharos-http."""
    server = start(["identity_fp32"])

    def health(port) -> subprocess.CompletedProcess:
        environment = os.environ | {"PHAROS_HTTP_PORT": str(port)}
        return subprocess.run([binary(), "health"], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)

    assert health(server.http_port).returncode == 0
    service = health("tcp://10.0.0.1:8000")
    assert service.returncode == 1 and service.stderr.startswith("127.0.0.1:8000 is not ready")


def test_a_repository_may_come_from_vertex_ai(tmp_path):
    """AIP_STORAGE_URI replaces --model-repository."""
    text = refusal("--http-port=0", "--grpc-port=0", "--metrics-port=0", AIP_STORAGE_URI=str(tmp_path / "none"))
    assert str(tmp_path / "none") in text
    assert "--model-repository" in refusal("--http-port=0")
