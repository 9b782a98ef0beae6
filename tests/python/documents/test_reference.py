"""The flags, metrics, endpoints and codes in the book exist in the server, and its reference lists all of them."""

import json
import re
import subprocess

import pytest

from documents import reference
from harness.server import ROOT, binary
from harness.waiting import DEADLINE_S
from security import access_table

BOOK = ROOT / "docs/src"
PAGES = [ROOT / "README.md", *sorted(BOOK.rglob("*.md"))]
COMMANDS = [
    (), ("torchserve",), ("metrics", "check"), ("metrics", "list"), ("health",), ("top",), ("trace", "summary"), ("trace", "chrome"),
]  # fmt: skip

OTHER_FLAGS = {
    "--concurrency-range", "--ulimit", "--config", "--homepath", "--grpc", "--pipeline", "--flag", "--http", "--metrics",
    "--target", "--read-only", "--tmpfs", "--from-literal", "--enable-feature", "--scope", "--user", "--init",
    "--pid", "--gpus", "--device", "--build-arg", "--health-cmd", "--stop-timeout", "--no-deps", "--platform", "--only-binary",
    "--perf-analyzer-path", "--model",
    "--tokenizer", "--tool-call-parser", "--openai-restricted-api", "--max-model-len", "--api-key", "--served-model-name",
    "--reasoning-parser", "--chat-template", "--base-url",
    "--alias", "--api-key-file", "--backend", "--cache-prompt", "--chat-template-file", "--data-parallel-size",
    "--default-max-tokens", "--local-dir", "--dtype", "--enable-auto-tool-choice", "--enable-kserve-frontends", "--enable-lora",
    "--enable-prefix-caching", "--enable-request-id-headers", "--enforce-eager", "--generation-config",
    "--gpu-memory-utilization", "--host", "--jinja", "--kserve-grpc-port", "--kserve-http-port", "--kv-cache-dtype",
    "--lora-modules", "--lora-separator", "--max-num-seqs", "--mmproj", "--otlp-traces-endpoint", "--port",
    "--quantization", "--reasoning-format", "--ssl-certfile", "--ssl-keyfile", "--tensor-parallel-size",
    "--tritonserver-log-verbose-level",
    "--build", "--check", "--detach", "--follow", "--ignore-missing", "--namespace", "--predicate-type", "--push", "--repo", "--set",
    "--auto-truncate", "--cors-allow-origin", "--default-prompt-name", "--hostname", "--max-batch-tokens", "--max-client-batch-size",
    "--max-concurrent-requests", "--model-id", "--otlp-endpoint", "--payload-limit", "--pooling", "--prometheus-port", "--task",
    "--tokenization-workers",
    "--values", "--volumes", "--wait", "--locked", "--release", "--timings",
}  # fmt: skip
"""Flags of cargo, Docker Compose, Helm, gh, sha256sum, deploy/build-images, vLLM, llama-server, Hugging Face's programs, text-embeddings-inference and Triton's OpenAI frontend, of perf_analyzer, Model Analyzer, pip, docker, podman, kubectl, Prometheus, Grafana, systemd-run and examples/classify.py, `--flag` in general, and
`--http-...` for all with this beginning."""


def rows(page: str) -> list:
    """Returns the cells of each row of a page's tables, without the headers."""
    lines = [line for line in (BOOK / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


@pytest.fixture(scope="module")
def help_texts() -> str:
    """Returns the help of all commands."""
    outputs = [subprocess.run([binary(), *words, "--help"], capture_output=True, text=True) for words in COMMANDS]
    assert all(output.returncode == 0 for output in outputs)
    return "\n".join(output.stdout for output in outputs)


@pytest.fixture(scope="module")
def metrics() -> set:
    """Returns the names of all metrics of the built-in definition."""
    output = subprocess.run([binary(), "metrics", "list", "--format", "json"], capture_output=True, text=True)
    return {metric["name"] for metric in json.loads(output.stdout)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_and_variables_exist(page, help_texts):
    """Each flag and each variable of the server on a page is in the help."""
    flags = set(re.findall(r"--[a-z0-9-]*[a-z0-9]", help_texts)) | OTHER_FLAGS
    text = page.read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text)) - flags == set()
    # The script `torchserve`, Compose files, Grafana's provisioning and unit tests read these; the others are constants of the C interface.
    others = {"PHAROS_BACKEND_ABI_VERSION", "PHAROS_BIN", "PHAROS_CPUS", "PHAROS_DASHBOARDS", "PHAROS_FP32", "PHAROS_HAS", "PHAROS_IMAGE"}
    others |= {"PHAROS_MEMORY", "PHAROS_OK", "PHAROS_PACKAGES", "PHAROS_TEST_PTXAS"}
    assert set(re.findall(r"\bPHAROS_\w+", text)) - set(re.findall(r"env:\s+(\w+)", help_texts)) - others == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_exist(page, metrics):
    """Each metric on a page, or each prefix of names before `*`, is in the definition."""
    text = re.sub(r"```(?:c|rust|python)\n.*?```", "", page.read_text(), flags=re.S)
    others = {"pharos_backend", "pharos_host", "pharos_server", "pharos_worker", "ts_log", "ts_metrics", "ts_request_sequence_end"}
    others |= {"ts_open_inference_protocol"} | {f"ts_header_key_sequence_{end}" for end in ("id", "start", "end")}
    # The example of `also_as` gives a metric the name that it had in 0.2.0.
    others |= {"nv_inference_request_duration_histogram_us"}
    unknown = []
    for name in set(re.findall(r"(?<![\w:./])(?:pharos|nv|ts)_[a-z0-9_]*\*?", text)) - others:
        begins = any(metric.startswith(name.rstrip("*")) for metric in metrics)
        known = begins if name.endswith(("*", "_")) else name in metrics
        if not known and re.sub(r"_(bucket|sum|count)$", "", name) not in metrics:
            unknown.append(name)
    assert unknown == []


@pytest.mark.smoke
@pytest.mark.parametrize("page", reference.PAGES)
def test_generated_pages_are_current(page):
    """The page equals the generator's output for this server."""
    current = (reference.FOLDER / page).read_text() == reference.PAGES[page]()
    assert current, f"docs/src/reference/{page} is stale: write it with `PYTHONPATH=tests/python python -m documents.reference`"


@pytest.mark.smoke
def test_every_flag_is_listed():
    """The generator omits no flag of `pharos --help`."""
    listed = {row[0].strip("`").split()[0] for row in rows("reference/flags.md") if row[0].startswith("`")}
    help_text = subprocess.run([binary(), "--help"], capture_output=True, text=True).stdout
    assert {f"--{name}" for name in re.findall(r"^ {6}--([\w-]+)", help_text, re.M)} == listed
    assert len(listed) > 100


def spelled_out(path: str) -> list:
    """Returns the paths that a path of the reference abbreviates."""
    found = re.fullmatch(r"(.*)\[(.*)\](.*)", path)
    return [found[1] + middle + found[3] for middle in ("", found[2])] if found else [path]


def test_every_http_endpoint_is_listed():
    """The reference has the endpoints of the access tests, with their parts, and no others."""
    listed = set()
    for paths, methods, part, *_ in rows("reference/http.md"):
        for method in re.findall(r"`(GET|POST|DELETE)`", methods):
            listed |= {(method, path, part) for path in spelled_out(paths.strip("`"))}
    served = set()
    for method, path, route, part, answer in map(str.split, access_table.HTTP.strip().splitlines()):
        if route == "Unknown" or "%" in path or ".." in path:
            continue
        # What this server does not have, other than responses that it does not store.
        if path.startswith("/v1") and answer == "404" and route != "StoredResponse":
            continue
        # Triton's paths with the name of a repository, which has no effect or is refused.
        if (method, route) == ("GET", "Infer") or "/somewhere/" in path:
            continue
        names = {r"/(m|other)(?=[/:]|$)": "/NAME", r"/versions/1\b": "/versions/V", r"/responses/r\b": "/responses/ID", "/r/": "/REGION/", "/NAME/1/v1/": "/NAME/V/v1/"}
        for sent, name in names.items():
            path = re.sub(sent, name, path)
        served.add((method, path, part))
    assert listed == served


def test_every_grpc_call_is_listed():
    """The reference has the calls of the definition, with the parts of the access tests."""
    listed = {(row[0].strip("`"), row[1]) for row in rows("reference/grpc.md") if row[0].startswith("`")}
    parts = [tuple(line.split()[:2]) for line in access_table.KSERVE_RPCS.strip().splitlines()]
    assert listed == {row for row in parts if row[0] != "None"}
    defined = re.findall(r"^  rpc (\w+)", (ROOT / "proto/grpc_service.proto").read_text(), re.M)
    assert {name for name, _ in listed} == set(defined)


NUMBERS = {
    1: "CANCELLED", 2: "UNKNOWN", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 6: "ALREADY_EXISTS",
    8: "RESOURCE_EXHAUSTED", 12: "UNIMPLEMENTED", 13: "INTERNAL", 14: "UNAVAILABLE",
}  # fmt: skip


def test_every_error_code_and_reason_is_listed():
    """The reference has the table of the server's error codes, and each reason of failed requests."""
    source = (ROOT / "src/base/error.rs").read_text()
    codes = {(http, NUMBERS[int(grpc)]) for http, grpc in re.findall(r"Self::\w+ => \((\d+), (\d+)\)", source)}
    table = rows("reference/errors.md")
    assert codes and codes <= {(row[1], row[0]) for row in table}
    reasons = set(re.findall(r'^ +\w+ => "([A-Z_]+)"', source, re.MULTILINE))
    assert reasons and reasons == {row[0].strip("`") for row in table if re.fullmatch(r"`[A-Z_]+`", row[0])}


def test_exit_codes(tmp_path):
    """The exit codes of a wrong flag, a wrong repository and a wrong definition."""
    wrong = tmp_path / "metrics.yaml"
    wrong.write_text("x: [")
    repository = ["--model-repository", tmp_path / "none"]
    for words, code in [(["--nonsense"], 2), (repository, 1), (["metrics", "check", wrong], 1)]:
        assert subprocess.run([binary(), *words], capture_output=True, timeout=DEADLINE_S).returncode == code, words


def test_the_definition_of_metrics_is_valid(tmp_path):
    """The example of metrics.yaml passes `pharos metrics check`."""
    text = (BOOK / "metrics/definition.md").read_text()
    file = tmp_path / "metrics.yaml"
    file.write_text(re.search(r"```yaml\n(.*?)```", text, re.S)[1])
    output = subprocess.run([binary(), "metrics", "check", file], capture_output=True, text=True)
    assert output.returncode == 0, output.stdout + output.stderr


def test_further_names_of_a_metric(tmp_path):
    """The example of `also_as` is valid, and `pharos metrics list` shows the names."""
    text = (BOOK / "metrics/definition.md").read_text()
    file = tmp_path / "metrics.yaml"
    file.write_text(re.search(r"test_further_names_of_a_metric -->\n```yaml\n(.*?)```", text, re.S)[1])
    output = subprocess.run([binary(), "metrics", "list", file, "--format", "json"], capture_output=True, text=True)
    assert output.returncode == 0, output.stdout + output.stderr
    names = {metric["name"]: metric["also_as"] for metric in json.loads(output.stdout)}
    labels = {"store": "shop", "source": {"value": "shops"}}
    assert names == {
        "pharos_request_duration_seconds": [{"name": "nv_inference_request_duration_histogram_us", "unit": "Microseconds"}],
        "orders_total": [{"name": "OrdersTotal", "unit": "Count"}],
        "returns_total": [{"name": "ReturnsTotal", "unit": "Count", "labels": labels}],
    }


def fields(messages: dict, message: str, path: str = "") -> set:
    """Returns the paths of the fields of a message of the schema that hold values."""
    found = set()
    for kind, name in messages[message]:
        inner = kind if kind in messages else f"{message}.{kind}"
        below = fields(messages, inner, f"{path}{name}.") if inner in messages else set()
        found |= below or {path + name}
    return found


def test_every_field_of_the_configuration_is_listed():
    """The reference has each field of the schema once; a row of a message without effect stands for its fields."""
    messages, open_ones = {}, []
    source = re.sub(r"//.*", "", (ROOT / "proto/model_config.proto").read_text())
    for opened, name, kind, field, _ in re.findall(
        r"(?:(message|enum|oneof) (\w+) \{)|(?:(?:repeated |optional )?([\w.]+|map<\w+, [\w.]+>) (\w+) = \d+;)|(\})", source
    ):
        if opened:
            open_ones.append((opened, name))
        elif not field:
            open_ones.pop()
        path = ".".join(name for opened, name in open_ones if opened == "message")
        if opened == "message":
            messages[path] = []
        elif field:
            messages[path].append((re.sub(r"map<\w+, ([\w.]+)>", r"\1", kind), field))
    schema = fields(messages, "ModelConfig")
    assert {"name", "input.dims", "optimization.cuda.graphs", "version_policy.all", "parameters.string_value"} <= schema
    listed = [field for row in rows("reference/config.md") for field in re.findall(r"`([\w.]+)`", row[0])]
    assert len(listed) == len(set(listed))
    covered = {field for field in schema for name in listed if field == name or field.startswith(f"{name}.")}
    assert schema - covered == set()
    assert [name for name in listed if not any(f"{field}.".startswith(f"{name}.") for field in schema)] == []


def test_every_flag_of_triton_has_a_row():
    """Those of the recorded help of a real Triton, in its order; a flag has `no effect` where the help says so."""
    recorded = (ROOT / "tests/python").rglob("golden_triton_flags.json")
    flags = [f"`--{flag}`" for flag, _ in json.loads(next(recorded).read_text())]
    table = [row for row in rows("triton/flags.md") if len(row) == 3]
    assert [row[0] for row in table if row[0] in flags] == flags
    help_text = subprocess.run([binary(), "--help"], capture_output=True, text=True).stdout
    _, _, ending = help_text.partition("\nAccepted for compatibility with Triton (no effect):")
    section = ending[: ending.index("\n\n")] if "\n\n" in ending else ending
    without = set(re.findall(r"^ {6}--([\w-]+)", section, re.M))
    without |= set(re.findall(r"^ {6}--([\w-]+)[^\n]*\n\s+Accepted, no effect", help_text, re.M))
    assert len(without) > 10
    assert {row[0].strip("`-") for row in table if row[1] == "no effect"} == without


def test_every_property_of_torchserve_has_a_row():
    """The page has the keys of the source in their order, each with the effect that it has there."""
    source = (ROOT / "frontend/torchserve/src/settings/keys.rs").read_text()
    keys = re.findall(r'^    (same|file_only|none)\(\s*"(\w+)"', source, re.M)
    table = [row for row in rows("torchserve/properties.md") if re.fullmatch(r"`\w+`", row[0])]
    assert [row[0].strip("`") for row in table] == [name for _, name in keys]
    # Refused with advice, or read by the launcher of Java only.
    others = {"keystore", "keystore_pass", "keystore_type", "vmargs", "tsConfigFile"}
    wrong = [name for (kind, name), row in zip(keys, table) if name not in others and (kind == "none") != (row[1] == "no effect")]
    assert len(keys) > 60 and wrong == []


def test_every_argument_of_torchserve_has_a_row():
    """Those of the help of `pharos torchserve`, with the same effect."""
    help_text = subprocess.run([binary(), "torchserve", "--help"], capture_output=True, text=True).stdout
    arguments = re.findall(r"^ {2,6}(?:-\w, )?--([\w-]+)", help_text, re.M)
    names = {name: bool(re.search(rf"--{name} <[^\n]*No effect", help_text)) for name in arguments}
    names.pop("help")
    table = {word: row[1] for row in rows("torchserve/properties.md") for word in re.findall(r"--([a-z-]+)", row[0])}
    assert names and {name: without for name, without in names.items() if (table.get(name) == "no effect") != without} == {}
    assert set(names) <= set(table)
