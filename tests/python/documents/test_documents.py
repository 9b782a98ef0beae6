"""Every code block of the documents is run, or says why not; this file runs those that are more than a client's command."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from documents.document_blocks import blocks, commands, of_test
from harness import certificates, prometheus
from harness.inference import simple
from harness.ports import free_ports
from harness.server import EXAMPLES, MODELS, ROOT, Server, binary
from harness.waiting import DEADLINE_S, eventually
from torchserve import models as torchserve_models

HERE = Path(__file__).parent
CLIENT = re.compile(r"(curl |python3 examples/classify\.py |pip install 'tritonclient\[http,grpc\]'$)")
"""A command of a client; `test_readme.py` sends those of curl and of classify.py, and the tests' packages are installed."""

needs_promtool = pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())
needs_worker = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import pharos_worker"], capture_output=True).returncode != 0,
    reason="the package pharos-worker is not installed: make python-worker",
)


def problem(block) -> str:
    """Why a block is neither run nor marked; empty if it is."""
    if block.kind == "not run":
        return "" if block.argument else "the reason is missing"
    if block.kind == "run by":
        files = [HERE / f"test_{name}.py" for name in ("documents", "language_models", "readme", "reference", "text_models")]
        defined = any(f"\ndef {block.argument}(" in file.read_text() for file in files)
        return "" if defined else f"there is no {block.argument}"
    if block.kind == "configuration of":
        return "" if block.language == "pbtxt" and block.argument.split()[0] in BASES else "unknown base of a configuration"
    if block.mark:
        return f"unknown comment `{block.mark}`"
    if block.language == "sh":
        others = [line for line in commands(block) if not CLIENT.match(line)]
        return f"no command of a client: {others}" if others else ""
    return "neither run nor marked: see document_blocks.py"


def test_every_block_is_run_or_marked():
    """Lists the blocks that no test runs and that do not say why."""
    found = blocks()
    assert [f"{block.place}: {why}" for block in found if (why := problem(block))] == []
    assert len(found) > 80


def test_targets_of_make_exist():
    """Each `make TARGET` of a block and each test file that a comment names exists."""
    targets = {name for block in blocks() for name in re.findall(r"^\s*make ((?:[a-z-]+ ?)+)", block.text, re.M)}
    makefile = (ROOT / "Makefile").read_text()
    defined = set(" ".join(re.findall(r"^([a-z][a-z -]*):", makefile, re.M)).split())
    assert targets and {name for names in targets for name in names.split()} <= defined
    named = {name for block in blocks() for name in re.findall(r"test_\w+\.py", block.mark)}
    assert named and all(list(HERE.parent.rglob(name)) for name in named)


# Configurations.

IDENTITY = re.sub(r'name: "identity_fp32"\n', "", (MODELS / "identity_fp32/config.pbtxt").read_text())
ENDS = """
input [ { name: "IN" data_type: TYPE_STRING dims: [ 16 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 16 ] } ]
"""
STATEFUL = """backend: "test"
max_batch_size: 4
parameters { key: "function" value { string_value: "accumulate" } }
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 2, 128 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 2, 128 ] } ]
"""
PYTHON_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for request in requests]
"""
BASES = {
    "identity": (IDENTITY, {}),
    "onnx": ("", {"1/model.onnx": (EXAMPLES / "digits/1/model.onnx").read_bytes()}),
    "ensemble": ('platform: "ensemble"\nmax_batch_size: 8\n' + ENDS, {}),
    "sequences": (IDENTITY + "sequence_batching { }\n", {}),
    "stateful": (STATEFUL, {}),
    "python": ('backend: "python"\nmax_batch_size: 4\n', {"1/model.py": PYTHON_MODEL.encode()}),
}
"""The configuration and the files of models to which blocks add fields."""


def write_model(repository: Path, name: str, base: str, fields: str) -> Path:
    """A model of the base with further fields."""
    config, files = BASES[base]
    for path, content in {"1/.keep": b"", **files}.items():
        (repository / name / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / name / path).write_bytes(content)
    (repository / name / "config.pbtxt").write_text(config + fields)
    return repository / name


def configurations() -> list:
    """The blocks of configurations."""
    return [pytest.param(block, id=block.place) for block in blocks() if block.kind == "configuration of"]


@pytest.mark.parametrize("block", configurations())
def test_configuration(start, tmp_path, block):
    """A model with these fields is loaded, and the served configuration has each of them."""
    base, *flags = block.argument.split()
    files = BASES[base][1]
    checksum = hashlib.md5(files.get("1/model.onnx", b"")).hexdigest()
    write_model(tmp_path / "models", "m", base, block.text.replace("<sum>", checksum))
    if base == "ensemble":
        shutil.copytree(EXAMPLES / "simple_identity", tmp_path / "models/simple_identity")
    server = start(None, *flags, repository=tmp_path / "models")
    status, text = server.get("/v2/models/m/config")
    assert status == 200, text
    names = set(re.findall(r"(\w+)\s*[:{\[]", re.sub(r"#.*|\"[^\"]*\"", "", block.text))) - {"key", "value"}
    assert {name for name in names if f'"{name}"' not in text} == set()


# Starts of the server.


def masked(text: str) -> str:
    """An answer without what differs between runs: times, the memory of a model, versions, last digits of results."""
    text = re.sub(r'"(ns|last_inference|created)": ?"?\d+"?', r'"\1":0', text)
    text = re.sub(r'("type":"CPU","id":0,"byte_size":)\d+', r"\g<1>0", text)
    text = re.sub(r'("version": ?"|builtin |onnxruntime )\d+\.\d+\.\d+', r"\g<1>0", text)
    return re.sub(r"(\.\d{4})\d+", r"\1", text)


class Shown(Server):
    """A server that is started by the command line of a block, in `folder`; its ports are given by variables."""

    def __init__(self, folder: Path, line: str):
        folder.mkdir(exist_ok=True)
        super().__init__(folder, [])
        for path in ("target/release/pharos", "bin/pharos"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / path).exists():
                (folder / path).symlink_to(binary().resolve())
        self.folder, self.command = folder, ["bash", "-c", f"exec {line}"]
        self.environment = {"PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for name in ("http", "grpc", "metrics"):
            self.environment[f"PHAROS_{name.upper()}_PORT"] = str(getattr(self, f"{name}_port"))

    def launch(self, **options):
        """In the folder."""
        super().launch(cwd=self.folder, **options)

    def reference(self, lines: str) -> str:
        """What the commands of an example print, one answer a line."""
        answers = []
        for line in lines.splitlines():
            answers.append(self.shell(line.replace("curl ", "curl -s -S ", 1), check=False, fail=False).strip("\n"))
        return "".join(f"{answer}\n" for answer in answers if answer)

    def shell(self, line: str, check=True, fail=True) -> str:
        """What a shell prints that runs a line in the folder, with the ports of this server."""
        ports = {"8000": self.http_port, "8001": self.grpc_port, "8082": self.metrics_port}
        line = re.sub(r"(localhost|HOST):(8000|8001|8082)", lambda m: f"localhost:{ports[m[2]]}", line)
        line = line.replace("curl ", "curl --fail-with-body -s -S ", 1) if fail else line
        environment = os.environ | {"PATH": self.environment["PATH"]}
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, env=environment
        )
        assert not check or done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


def test_a_model_of_your_own(tmp_path):
    """The directory that a page draws, served by the command below it."""
    tree = of_test("test_a_model_of_your_own", "first-model.md", "text")[0].text
    assert re.findall(r"^ *(\S+)", tree, re.M) == ["models/", "my_model/", "config.pbtxt", "1/model.onnx"]
    write_model(tmp_path / "models", "my_model", "onnx", "")
    (tmp_path / "models/my_model/config.pbtxt").unlink()
    lines = {line for block in of_test("test_a_model_of_your_own", language="sh") for line in commands(block)}
    for line in lines:
        with Shown(tmp_path, line) as server:
            assert '"name":"image"' in server.shell("curl localhost:8000/v2/models/my_model")
            assert "model ready" in server.log.read_text()


def test_metrics_of_the_first_model(server):
    """Each metric that the page shows of `digits` is in the scrape, with the same labels."""
    (block,) = of_test("test_metrics_of_the_first_model")
    image = {"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": [0] * 64}
    assert server.infer("digits", {"inputs": [image]})[0] == 200
    _, scrape = server.get("/metrics", server.metrics)
    for line in block.text.splitlines()[:-1]:
        series = re.escape(line.rpartition(" ")[0]).replace("box", r"[^\"]*")
        assert re.search(f"^{series} ", scrape, re.M), line


def test_starts_of_the_response_cache(tmp_path):
    """Both start; without a Redis, requests are cache misses."""
    (block,) = of_test("test_starts_of_the_response_cache")
    write_model(tmp_path / "models", "m", "identity", "response_cache { enable: true }")
    for line in commands(block):
        with Shown(tmp_path, line.replace("6379", str(free_ports(1)[0]))) as server:
            assert '"enable":true' in server.shell("curl localhost:8000/v2/models/m/config")


def test_starts_of_many_models(tmp_path):
    """Each command starts a server that serves what it names, on demand if it says so."""
    for name in ("simple", "digits"):
        shutil.copytree(EXAMPLES / name, tmp_path / f"models/{name}")
    blocks_here = of_test("test_starts_of_many_models")
    assert len(blocks_here) > 2
    for block in blocks_here:
        with Shown(tmp_path, commands(block)[0]) as server:
            if "on-demand" in block.text:
                assert server.get("/v2/models/simple/ready")[0] != 200
                assert server.infer("simple", simple())[0] == 200
                continue
            for name in ("simple", "digits"):
                eventually(f"{name} is ready", lambda: server.get(f"/v2/models/{name}/ready")[0] == 200)


def test_clients_load_and_unload(tmp_path):
    """The commands in their order, and the client in Python with a model file of this directory."""
    shutil.copytree(EXAMPLES / "simple", tmp_path / "models/simple")
    (tmp_path / "model.onnx").write_bytes(BASES["onnx"][1]["1/model.onnx"])
    (shell,) = of_test("test_clients_load_and_unload", language="sh")
    (code,) = of_test("test_clients_load_and_unload", language="python")
    with Shown(tmp_path, "pharos --model-repository models --model-control-mode explicit --allow-model-upload") as server:
        load, index, unload = commands(shell)
        server.shell(load)
        assert json.loads(server.shell(index))[0]["state"] == "READY"
        server.shell(unload)
        assert server.get("/v2/models/simple/ready")[0] != 200
        run_client(code, server, cwd=tmp_path)
        assert server.get("/v2/models/m/ready")[0] == 200


def run_client(block, server, cwd=ROOT) -> str:
    """What a client in Python prints, whose ports are those of the server."""
    code = block.text.replace("localhost:8000", server.http).replace("localhost:8001", server.grpc)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_shared_memory_client(server):
    """It prints the sum, which the server has written behind the inputs."""
    (block,) = of_test("test_shared_memory_client")
    assert re.findall(r"\d+", run_client(block, server)) == [str(2 * number) for number in range(16)]


def test_traces_of_the_guide(tmp_path):
    """A server with traces, the settings of one model, and both readers of the file."""
    (block,) = of_test("test_traces_of_the_guide")
    begin, change, summary, chrome = commands(block)
    shutil.copytree(EXAMPLES / "simple", tmp_path / "models/simple")
    values = {"datatype": "INT32", "shape": [1, 16], "data": list(range(16))}
    request = {"inputs": [{"name": f"INPUT{number}", **values} for number in (0, 1)]}
    with Shown(tmp_path, begin) as server:
        assert '"trace_rate":"1"' in server.shell(change)
        assert server.infer("simple", request)[0] == 200
    # With a count, traces are in an indexed file.
    file = next(tmp_path.glob("trace.json*")).name
    assert "simple" in server.shell(summary.replace("trace.json", file))
    server.shell(chrome.replace(" trace.json", f" {file}"))
    assert json.loads((tmp_path / "timeline.json").read_text())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_locked_down_start(tmp_path):
    """Tokens are made as shown; a client with a token and the root is answered, one without a token is not."""
    start, client = of_test("test_a_locked_down_start")
    files = certificates.Files(tmp_path)
    for name, path in {"root": files.root, "server": files.cert, "server-key": files.key}.items():
        if path != tmp_path / f"{name}.pem":
            shutil.copy(path, tmp_path / f"{name}.pem")
    write_model(tmp_path / "models", "m", "identity", "")
    *tokens, line = commands(start)
    subprocess.run(["bash", "-e", "-c", "\n".join(tokens)], cwd=tmp_path, check=True)
    assert (tmp_path / "inference-tokens").stat().st_mode & 0o77 == 0
    server = Shown(tmp_path, line)
    server.launch()
    try:
        ask = commands(client)[0].replace("NAME", "m")
        eventually("the model answers over TLS", lambda: '"name":"m"' in server.shell(ask, check=False))
        assert "401" in server.shell(re.sub(r'-H "[^"]*"', "-i", ask), check=False)
    finally:
        server.stop()


def test_http_examples(tmp_path):
    """The commands of the page in their order; each answer is as shown, except for times."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    start, *examples = of_test("test_http_examples")
    assert len(examples) % 2 == 0 and len(examples) > 30
    with Shown(tmp_path, commands(start)[0]) as server:
        for request, answer in zip(examples[::2], examples[1::2]):
            assert request.language == "sh" and answer.language in ("json", "text"), request.place
            assert masked(server.reference(request.text)) == masked(answer.text), request.place


def test_every_endpoint_has_an_example():
    """Each row of the tables of endpoints; without its optional part, or with it."""
    rows = re.findall(r"^\| `(/\S*)` \| (`\S.*?) \|", (ROOT / "docs/src/reference/http.md").read_text(), re.M)
    sent = [line for block in of_test("test_http_examples", language="sh") for line in commands(block)]
    methods = [("POST" if re.search(" -X POST | -d ", line) else "GET", line) for line in sent]
    sent = {(path, method) for method, line in methods for path in re.findall(r":80(?:00|82)(/\S*)", line)}
    missing = []
    # The server of the page has no language model and no text model.
    of_texts = {"/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/info"}
    rows = [row for row in rows if not row[0].startswith("/predictions/") and row[0] not in of_texts and row != ("/", "`POST`")]
    for path, methods in rows:
        pattern = re.sub(r"\[(.*?)\]", r"(\1)?", path)
        pattern = re.sub(r"NAME|REGION|\bV\b", "[a-z0-9_]+", pattern)
        for method in re.findall("GET|POST", methods):
            if not any(method == used and re.fullmatch(pattern, found) for found, used in sent):
                missing.append((method, path))
    assert len(rows) > 25 and missing == []


def test_grpc_examples(tmp_path):
    """The client of the page, block by block; what each prints is as shown, except for times."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    start, *examples = of_test("test_grpc_examples")
    listed = re.findall(r"^\| `(\w+)`", (ROOT / "docs/src/reference/grpc.md").read_text(), re.M)
    page = (ROOT / start.document).read_text()
    assert listed and [name for name in listed if f"`{name}`" not in page] == []
    with Shown(tmp_path, commands(start)[0]) as server:
        names = {}
        for code, answer in zip(examples[::2], examples[1::2]):
            assert masked(printed_by(code.text, server, names)) == masked(answer.text), code.place


def printed_by(code: str, server, names: dict) -> str:
    """What the code of an example prints; `names` are its variables, which the next one finds."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code.replace("localhost:8001", server.grpc), names)
    return output.getvalue()


# Python models, handlers and backends.


@needs_worker
def test_python_models_of_the_guide(tmp_path):
    """The model is served with its configuration; after three requests its metric is as shown. So is a defined metric. The model that
    reports its progress is loaded."""
    code, reporter, recorder = of_test("test_python_models_of_the_guide", language="python")
    (config,) = of_test("test_python_models_of_the_guide", language="pbtxt")
    (shown,) = of_test("test_python_models_of_the_guide", language="text")
    parts = f"load_tokenizer = load_network = str\n{reporter.text}\n    def execute(self, requests):\n        return []\n"
    for name, text in {"calls": code.text, "shop": recorder.text + PYTHON_MODEL, "parts": parts}.items():
        (tmp_path / f"models/{name}/1").mkdir(parents=True)
        (tmp_path / f"models/{name}/1/model.py").write_text(text)
        (tmp_path / f"models/{name}/config.pbtxt").write_text(config.text)
    (definition,) = of_test("test_the_definition_of_metrics_is_valid")
    (tmp_path / "metrics.yaml").write_text(definition.text)
    request = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [4, 9]}]}
    with Shown(tmp_path, "pharos --model-repository models --metrics-config metrics.yaml") as server:
        for _ in range(3):
            status, answer = server.infer("calls", request)
            assert (status, answer["outputs"][0]["data"]) == (200, [2, 3])
        assert server.shell("curl localhost:8082/metrics | grep calls_total") == shown.text
        assert 'OrdersTotal{shop="north"} 1' in server.shell("curl localhost:8082/metrics")


@needs_worker
def test_a_packed_environment(tmp_path):
    """A model with an archive of an environment runs on the interpreter in it."""
    (block,) = of_test("test_a_packed_environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    packages = next((tmp_path / "env").glob("lib/*/site-packages"))
    (packages / "tests.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    folder = write_model(tmp_path / "models", "m", "python", ENDS + block.text)
    (folder / "1/model.py").write_text(PYTHON_MODEL + "import sys\nprint('runs on', sys.prefix)\n")
    with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "env", ".")
    with Shown(tmp_path, "pharos --model-repository models --environment-cache-directory cache") as server:
        assert f"runs on {tmp_path}/cache/pharos-environments/" in server.log.read_text()


HANDLER = """
def handle(data, context):
    return [bytes(row.get("data") or row.get("body")).decode().upper() for row in data or []]
"""


def archive(folder: Path, name: str):
    """An archive `name`.mar in the folder: a handler that answers in capital letters."""
    manifest = {"model": {"modelName": name, "modelVersion": "1.0", "handler": "capitals.py:handle"}}
    found = {"capitals.py": HANDLER.encode(), "MAR-INF/MANIFEST.json": json.dumps(manifest).encode()}
    torchserve_models.write(folder, name, found)


@needs_worker
def test_an_archive_in_a_model_repository(tmp_path):
    """An archive without a configuration is served to a client of the v2 protocol."""
    start, client = of_test("test_an_archive_in_a_model_repository")
    archive(tmp_path / "models/mnist/1", "mnist")
    with Shown(tmp_path, commands(start)[0]) as server:
        answer = server.shell(commands(client)[0].replace("NAME", "mnist"))
        assert "THE BODY OF THE REQUEST" in answer


@needs_worker
def test_the_module_ts_without_a_server():
    """The lines make `import ts` work."""
    (block,) = of_test("test_the_module_ts_without_a_server")
    code = block.text + "import ts\nfrom ts.context import Context\nprint(ts.__name__)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == "ts", done.stderr


def test_the_function_of_a_backend_compiles(tmp_path):
    """With the header and what the examples leave out: the instance and the computation."""
    lines = ["#include <pharos_backend.h>", "typedef struct { const pharos_host *host; } my_instance;"]
    lines += ["void compute(const void *from, void *to, size_t bytes);"]
    lines += [block.text for block in of_test("test_the_function_of_a_backend_compiles")]
    (tmp_path / "backend.c").write_text("\n".join(lines))
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", ROOT / "worker/include"]
    done = subprocess.run(["cc", *flags, tmp_path / "backend.c"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_worker
@pytest.mark.parametrize("document", ["docs/src/torchserve/torchserve.md", "examples/torchserve/README.md"])
def test_torchserve_starts(tmp_path, document):
    """TorchServe's commands in their order: in the background with a prediction, the end, and in the foreground."""
    shell = [block for block in of_test("test_torchserve_starts", document) if block.language == "sh"]
    clients = [block for block in shell if "curl" in block.text]
    lines = [line for block in shell if block not in clients for line in commands(block)]
    inference, management, metrics, grpc, grpc_management, kserve = free_ports(6)
    addresses = {"inference": inference, "management": management, "metrics": metrics}
    properties = [f"{name}_address=http://127.0.0.1:{port}" for name, port in addresses.items()]
    properties += [f"grpc_inference_port={grpc}", f"grpc_management_port={grpc_management}"]
    (tmp_path / "config.properties").write_text("\n".join(properties) + "\n")
    (tmp_path / "digit.png").write_text("a digit")
    for store in ("store", "model_store"):
        archive(tmp_path / store, "mnist")
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"PHAROS_BIN": str(binary()), "TMPDIR": str(tmp_path / "tmp")}
    environment |= {"TS_CONFIG_FILE": "config.properties"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(line):
        line = line.replace("localhost:8080", f"127.0.0.1:{inference}").replace("--http-port 8000", f"--http-port {kserve}")
        with (tmp_path / "out").open("ab") as log:
            return subprocess.Popen(["bash", "-c", line], cwd=tmp_path, env=environment, stdout=log, stderr=log)

    def printed():
        return (tmp_path / "out").read_text(errors="replace")

    assert run(lines[0]).wait(DEADLINE_S) == 0, printed()
    try:
        eventually("the server has started", lambda: "Model server started." in printed())
        for client in clients:
            assert run("set -e\n" + client.text.replace("curl", "curl -s --fail")).wait(DEADLINE_S) == 0, printed()
            assert "A DIGIT" in printed()
    finally:
        assert run(lines[1]).wait(DEADLINE_S) == 0, printed()
    if lines[2:]:
        (tmp_path / "out").write_text("")
        running = run("exec " + lines[2])
        try:
            eventually("the server has started", lambda: "Model server started." in printed())
            live = ["curl", "-s", "-i", f"127.0.0.1:{kserve}/v2/health/live"]
            done = subprocess.run(live, capture_output=True, text=True)
            assert "200 OK" in done.stdout, printed()
        finally:
            running.terminate()
            running.wait(DEADLINE_S)


# Metrics.


def test_a_mistake_in_a_definition(tmp_path):
    """`pharos metrics check` names the place, the key and the allowed ones as the page shows."""
    (block,) = of_test("test_a_mistake_in_a_definition")
    (definition,) = of_test("test_the_definition_of_metrics_is_valid")
    wrong = definition.text.replace("dimensions: [*shop, Hostname]", "bucket: [1]")
    lines = wrong.splitlines()
    at = next(number for number, line in enumerate(lines) if "bucket: [1]" in line)
    # The page names line 12: the comment lines are left out until it is there.
    lines = ["", *lines] if at < 11 else lines[at - 11 :] if at > 11 else lines
    (tmp_path / "metrics.yaml").write_text("\n".join(lines) + "\n")
    done = subprocess.run([binary(), "metrics", "check", "metrics.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    message = re.sub(r"metrics\.yaml:\d+:\d+", "metrics.yaml:12:9", done.stdout + done.stderr)
    assert block.text.strip().removesuffix("...").rstrip() in message, message


@needs_promtool
def test_objectives_and_their_rules(tmp_path):
    """The objectives of the page are valid, and promtool accepts their rules."""
    definition, of_tokens, commands = of_test("test_objectives_and_their_rules")
    # One objective more: the second block has another entry of the list.
    (tmp_path / "metrics.yaml").write_text(definition.text + of_tokens.text.removeprefix("slos:\n"))
    path = os.pathsep.join([str(binary().parent), str(Path(prometheus.program("promtool")).parent), os.environ["PATH"]])
    done = subprocess.run(["sh", "-ec", commands.text], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "slo-rules.yaml").read_text().count("alert: PharosSloBudgetBurn") == 10


@needs_promtool
def test_tenants_of_the_page(tmp_path):
    """The rule of the page is valid, and promtool accepts the query."""
    definition, query = of_test("test_tenants_of_the_page")
    (tmp_path / "metrics.yaml").write_text(definition.text)
    done = subprocess.run([binary(), "metrics", "check", "metrics.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "7 metrics (7 counters" in done.stdout, done.stdout + done.stderr
    rule = f"groups:\n  - name: page\n    rules:\n      - record: a:b\n        expr: {query.text}\n"
    (tmp_path / "rules.yaml").write_text(rule)
    done = prometheus.promtool("check", "rules", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_budgets_of_the_page(tmp_path):
    """The rule of the page is valid."""
    (definition,) = of_test("test_budgets_of_the_page")
    (tmp_path / "metrics.yaml").write_text(definition.text)
    done = subprocess.run([binary(), "metrics", "check", "metrics.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "7 metrics (7 counters" in done.stdout, done.stdout + done.stderr


@needs_promtool
def test_prometheus_configurations(tmp_path):
    """promtool accepts the configurations, and the query as a recording rule."""
    files = certificates.Files(tmp_path)
    for name, path in {"root": files.root, "prometheus": files.client_cert, "prometheus-key": files.client_key}.items():
        if path != tmp_path / f"{name}.pem":
            shutil.copy(path, tmp_path / f"{name}.pem")
    for block in of_test("test_prometheus_configurations"):
        file = tmp_path / "checked.yaml"
        if block.language == "yaml":
            file.write_text(block.text.replace("HOST", "localhost"))
            check = "config"
        else:
            rule = {"record": "checked", "expr": block.text}
            file.write_text(json.dumps({"groups": [{"name": "documents", "rules": [rule]}]}))
            check = "rules"
        done = prometheus.promtool("check", check, file)
        assert done.returncode == 0, f"{block.place}\n{done.stdout}{done.stderr}"


# Recipes.


def test_recipes_quote_the_source():
    """The lines of a recipe are lines of the files that it describes."""
    files = [ROOT / "metrics.yaml", *(ROOT / "src").rglob("*.rs"), *(ROOT / "examples").rglob("*.rs")]
    files += [*(ROOT / "frontend").rglob("*.rs"), *(ROOT / "worker").rglob("*.rs"), *(ROOT / "worker").rglob("*.py")]
    source = {line.strip() for file in files for line in file.read_text().splitlines()}
    for block in of_test("test_recipes_quote_the_source"):
        missing = [line for line in block.text.splitlines() if line.strip() and line.strip() not in source]
        assert missing == [], block.place
