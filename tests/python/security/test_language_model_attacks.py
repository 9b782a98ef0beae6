"""Attacks on OpenAI's API: by clients, and by chat templates of models. Each ends in time, the memory of the frontend is bounded, and
other clients are served meanwhile."""

import concurrent.futures
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from harness.connections import connect, post, read_response
from harness.gguf import write_model
from harness.processes import resident_kb
from harness.server import ROOT, Server, binary, children, command_line, kill_all, total
from harness.waiting import DEADLINE_S, eventually, join_all, run_for

pytestmark = pytest.mark.alone

MODELS = ROOT / "examples/language_model/models"
ENGINE = binary().parent / "backends/llamacpp/libpharos_llamacpp.so"
needs_engine = pytest.mark.skipif(not ENGINE.is_file(), reason=f"{ENGINE} is not built: `make llamacpp` builds it, with a C++ compiler")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GROWTH_KB = 400_000
"""The limit of the growth of the frontend's memory: a body of 64 MiB is there several times while it is parsed."""
LONGEST_S = 1.0
"""The limit of another client's waiting time; some milliseconds are usual."""
ENDLESS_S = 10
"""The time after which a template runs without end: its work is limited to about a second."""
MEMORY_BYTES = 4 << 30
"""The limit of the memory of a server with hostile templates, so that the machine survives."""
ERROR = {"message", "type", "param", "code"}


def chat(content="hi", model="words", **more) -> dict:
    """Returns a request for a chat."""
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 3} | more


def member(name: str, text: str) -> bytes:
    """Returns a request with a member as it is written."""
    return f'{{"model":"words","messages":[{{"role":"user","content":"hi"}}],"{name}":{text}}}'.encode()


def message(content: bytes) -> bytes:
    """Returns a request with the bytes of a JSON string."""
    return b'{"model":"words","max_tokens":3,"messages":[{"role":"user","content":"' + content + b'"}]}'


TOOL = {"type": "function", "function": {"name": "f"}}
REQUESTS = {
    "a million stop strings": (chat(stop=[f"a{number}" for number in range(1_000_000)]), 400, "at most 16 strings"),
    "a long stop string": (chat(stop="x" * 1_000_000), 400, "1024 bytes"),
    "many choices": (chat(n=10**9), 400, "from 1 to 128"),
    "more choices than numbers": (member("n", "1e308"), 400, "from 1 to 128"),
    "many tools": (chat(tools=[TOOL] * 100_000), 400, "tools"),
    "many biases": (chat(logit_bias={str(number): 1 for number in range(1_000_000)}), 400, "at most 1024 members"),
    "a bias beyond numbers": (member("logit_bias", '{"1":1e999}'), 400, "from -100 to 100"),
    "a negative token": (chat(logit_bias={"-1": 1}), 400, "token id"),
    "a seed beyond 64 bits": (chat(seed=2**63), 400, "seed"),
    "a seed of 400 digits": (chat(seed=10**400), 400, "seed"),
    "no number": (member("temperature", "NaN"), 400, "not valid JSON"),
    "infinity": (member("temperature", "Infinity"), 400, "not valid JSON"),
    "infinity as a number": (member("temperature", "1e400"), 400, "from 0 to 2"),
    "open brackets": (b'{"a":' * 3_000_000, 400, "100 levels"),
    "nesting within a member": (member("x", "[" * 3_000_000 + "]" * 3_000_000), 400, "100 levels"),
    "nesting of strings": (member("metadata", '"' + "[" * 1_000_000 + '"'), 200, "hi"),
    "a million prompts": ((COMPLETION, {"model": "words", "prompt": ["a"] * 1_000_000}), 400, "1024"),
    "a million tokens": ((COMPLETION, {"model": "words", "prompt": [1] * 1_000_000}), 400, "token ids"),
    "a prompt of 10 MB": (chat("x " * (5 << 20)), 200, "x x x"),
    "a body above the limit": (chat("x" * (65 << 20)), 413, "too large"),
    "an image of another address": (chat([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:{trap}/x"}}]), 400, "not fetched"),
    "an image of a file": (chat([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), 400, "not fetched"),
    "bytes that are not UTF-8": (message(b"\xff\xfe"), 400, "not UTF-8"),
    "a slash in two bytes": (message(b"\xc0\xaf"), 400, "not UTF-8"),
    "half a pair in UTF-8": (message(b"\xed\xa0\x80"), 400, "not UTF-8"),
    "half a pair": (message(b"\\ud800"), 400, "hex escape"),
    "a whole pair": (message(b"\\ud83d\\ude00"), 200, "\U0001f600"),
    "zero in a string": (message(b"a\\u0000b"), 200, "a\\u0000b"),
    "a raw control character": (message(b"a\x01b"), 400, "control character"),
    "equal names": (b'{"model":"x","model":"words","messages":[],"messages":[{"role":"user","content":"last"}]}', 200, "last"),
    "a model of another folder": (chat(model="../../etc/passwd"), 404, "not found"),
    "a model with control characters": (chat(model="\x1b[31m\r\nx"), 404, "\\u001b"),
    "a long name of a model": (chat(model="m" * 100_000), 400, "1024 bytes"),
    "a template of the client": (chat(chat_template="{{ 7 }}"), 400, "not accepted from clients"),
    "an id of the body": (chat(request_id="x" * 300), 400, "256 bytes"),
}
"""Name -> request, expected status, and a part of the answer."""

TEMPLATES = {
    "loops": "{% for a in range(10000) %}{% for b in range(10000) %}{% set x = b %}{% endfor %}{% endfor %}",
    "long output": "{% for a in range(10000) %}{% for b in range(10000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    "repeated text": "{{ 'x' * 10000000000 }}",
    "repeated list": "{{ ([1] * 1000000000) | length }}",
    "range": "{{ range(10**18) | list | length }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "power": "{{ 9**9**9**9 }}",
    "replacement": "{{ ('x' * 100000) | replace('', 'y' * 100000) | length }}",
    "indentation": "{{ 'a' | indent(2000000000) | length }}",
    "slices": "{{ range(9999) | slice(1000000000) | list | length }}",
    "JSON of shared lists": "{% set n = namespace(s=[1]) %}{% for a in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
    "file": "{% include '/etc/passwd' %}",
    "attributes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}
"""Hostile templates that are refused in time."""
ENDLESS = {
    "added lists": "{% set n = namespace(s=[1]) %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}",
    "text of shared lists": "{% set n = namespace(s=[1]) %}{% for a in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | string | length }}",
    "equal shared lists": (
        "{% set n = namespace(s=[1], t=[1]) %}"
        "{% for a in range(40) %}{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.s == n.t }}"
    ),
}
GREEDY = {
    "width of a format": "{{ '{:>2000000000}'.format(1) }}",
    "joined text": "{{ (range(9999) | list) | join('x' * 1000000) | length }}",
    "doubled text": "{% set n = namespace(s='x' * 16) %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "kept texts": "{% set n = namespace(l=[]) %}{% for a in range(9999) %}{% set n.l = [n.l, 'x' * 99999] %}{% endfor %}{{ n.l | length }}",
}
SLOW = {
    "compared texts": (
        "{% set s = 'x' * 9999999 %}{% set t = 'x' * 9999999 %}{% for a in range(3000) %}{% if s == t %}{% endif %}{% endfor %}"
    ),
    "counted texts": "{% set s = 'x' * 9999999 %}{% for a in range(9999) %}{% set x = s.count('y') %}{% endfor %}",
}
DEEP = "{% set n = namespace(s=[1]) %}{% for a in range(10000) %}{% for b in range(30) %}{% set n.s = [n.s] %}{% endfor %}{% endfor %}x"


def write_words(folder, name: str, template: str = ""):
    """Writes a copy of the model `words`, with another template."""
    shutil.copytree(MODELS / "words", folder / name)
    if template:
        (folder / name / "chat_template.jinja").write_text(template)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A server with the model `words`, and `tiny` if its engine is built."""
    folder = tmp_path_factory.mktemp("attacked")
    write_words(folder / "models", "words")
    if ENGINE.is_file():
        (folder / "models/tiny/1").mkdir(parents=True)
        write_model(folder / "models/tiny/1/model.gguf")
        settings = 'parameters { key: "threads" value: { string_value: "1" } }'
        (folder / "models/tiny/config.pbtxt").write_text(f'backend: "llamacpp"\n{settings}\n')
    server = Server(folder, [folder / "models"])
    server.launch()
    server.wait_until_ready()
    yield server
    # The model still waits in requests whose clients have left, for longer than the server waits for them at its end.
    kill_all([server])


@contextlib.contextmanager
def hostile(folder, templates: dict):
    """Runs a server with a model for each template, whose memory is limited. Its end is no error here: tests see it."""
    for name, template in templates.items():
        write_words(folder / "models", name.replace(" ", "_"), template)
    write_words(folder / "models", "words")
    server = Server(folder, [folder / "models"])
    server.launch()
    server.wait_until_ready()
    resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@contextlib.contextmanager
def unharmed(server, growth_kb: int = GROWTH_KB, longest_s: float = LONGEST_S, ask=None):
    """Fails if another client waits longer than `longest_s` during the block, if the frontend's memory grows by more than `growth_kb`,
    or if the server ends. `ask(server)` is the other client's request: by default whether the server is live, on several connections,
    since each thread of the frontend serves some of them."""
    waited, over = [], threading.Event()
    most = first = resident_kb(server)

    def live(server):
        status, _ = server.get("/v2/health/live")
        assert status == 200

    def watch():
        nonlocal most
        while True:
            began = time.monotonic()
            with contextlib.suppress(OSError):
                (ask or live)(server)
            waited.append(time.monotonic() - began)
            most = max(most, resident_kb(server))
            if over.wait(0.005):
                return

    watchers = [threading.Thread(target=watch, daemon=True) for _ in range(1 if ask else 4)]
    for watcher in watchers:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        join_all(watchers)
    assert server.process.poll() is None, server.log_tail()
    assert max(waited) < longest_s, f"another client waited {max(waited):.2f} s"
    assert most - first < growth_kb, f"the memory grew by {most - first} kB"


def send(server, path: str, body, timeout_s: float = DEADLINE_S) -> tuple:
    """Sends a request; returns the status and the text of the answer. Status 0: no answer, or none in time."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=timeout_s) as wire:
            wire.sendall(post(path, body))
            status, text = read_response(wire)
            return status, text.decode()
    except OSError as error:
        return 0, repr(error)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_hostile_request_is_answered(attacked, name):
    """Refused with the field and what is allowed, or answered; nothing is fetched."""
    request, status, part = REQUESTS[name]
    path, body = request if isinstance(request, tuple) else (CHAT, request)
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        if isinstance(body, dict):
            body = json.dumps(body).replace("{trap}", str(trap.getsockname()[1])).encode()
        with unharmed(attacked):
            found, text = send(attacked, path, body)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert found == status and part in text, text[:1000]
    if status != 200:
        assert set(json.loads(text)["error"]) == ERROR


HEADS = [
    (b"X-Request-Id: mine", 200, b"x-request-id: mine"),
    (b"X-Request-Id: a%0d%0aX-Injected:1", 200, b"x-request-id: a%0d%0aX-Injected:1"),
    (b"X-Request-Id: a\rX-Injected: 1", 400, b""),
    (b"X-Request-Id: a\r\n X-Injected: 1", 400, b""),
    (b"X-Request-Id: a\x00b", 400, b""),
    (b"X-Request-Id: \xff\xfe", 200, b""),
    (b"X-Request-Id: " + b"a" * 300, 200, b""),
    (b"Content-Length: 5", 400, b""),
    (b"Transfer-Encoding: chunked", 400, b""),
    (b"Transfer-Encoding: identity", 400, b""),
    (b"Transfer-Encoding : chunked", 400, b""),
    (b"X-Request-Id: " + b"a" * 2_000_000, 431, b""),
    (b"\r\n".join(b"H%d: 1" % number for number in range(120)), 431, b""),
]


@pytest.mark.parametrize(("head", "status", "part"), HEADS, ids=range(len(HEADS)))
def test_a_hostile_head_is_one_request(attacked, head, status, part):
    """No head of the client begins another request or adds a line to the answer."""
    body = json.dumps(chat()).encode()
    with connect(attacked.http_port) as wire:
        with contextlib.suppress(ConnectionError):
            wire.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n\r\n%s" % (CHAT.encode(), len(body), head, body))
        wire.settimeout(0.5)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := wire.recv(65536):
                answer += piece
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/1.1 ") == 1
    assert part in answer and b"\nx-injected" not in answer.lower()


def test_an_id_adds_no_event_to_a_stream(attacked):
    """The id of the body is part of each event, and of log lines: it has no line breaks."""
    body = json.dumps(chat(stream=True, request_id="a\n\ndata: injected\r\n")).encode()
    status, text = attacked.ask("POST", CHAT, body)
    assert status == 400 and json.loads(text)["error"]["param"] == "request_id"


def test_a_tenant_of_another_token_is_not_charged(start, tmp_path):
    """If tokens name the tenants, the header does not, and neither do the body and the name of the user."""
    definition = (ROOT / "metrics.yaml").read_text() + "\ntenants: {token: true}\n"
    (tmp_path / "metrics.yaml").write_text(definition)
    (tmp_path / "tokens").write_text("# tenant: mallory\nsecret-1\n# tenant: victim\nsecret-2\n")
    server = start([], f"--inference-token-file={tmp_path / 'tokens'}", f"--metrics-config={tmp_path / 'metrics.yaml'}", repository=MODELS)
    for name, value in [("X-Tenant", "victim"), ("X-Forwarded-User", "victim"), ("x-gateway-inference-fairness-id", "victim")]:
        headers = {"Authorization": "Bearer secret-1", name: value}
        status, text = server.ask("POST", CHAT, json.dumps(chat(user="victim", metadata={"tenant": "victim"})), headers=headers)
        assert status == 200, text
    metrics = server.scrape()
    assert total(metrics, "pharos_tenant_requests_total", tenant="mallory") == 3
    assert total(metrics, "pharos_tenant_requests_total", tenant="victim") == 0


def test_many_idle_streams_are_small(attacked):
    """Streams that wait for their first token: other requests are served, and the memory of each is bounded."""
    streams = 1000
    request = post(CHAT, json.dumps(chat("w " * 5, stream=True, vllm_xargs={"delay_ms": 2000 * DEADLINE_S})).encode())
    wires = []
    try:
        with unharmed(attacked, growth_kb=100 * streams):
            for _ in range(streams):
                wires.append(connect(attacked.http_port))
                wires[-1].sendall(request)
            assert send(attacked, CHAT, chat("a"))[0] == 200
            run_for("streams wait for their first token", 2)
    finally:
        for wire in wires:
            wire.close()
    assert send(attacked, CHAT, chat("a"))[0] == 200


@needs_engine
def test_streams_that_are_never_read_hold_nothing_up(attacked):
    """Their clients have asked for much and read nothing."""
    body = {"model": "tiny", "prompt": "loop", "max_tokens": 500, "stream": True, "temperature": 0, "logprobs": 20}
    request = post(COMPLETION, json.dumps(body).encode())
    wires = []
    try:
        with unharmed(attacked, growth_kb=200_000):
            for _ in range(20):
                wires.append(connect(attacked.http_port))
                wires[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                wires[-1].sendall(request)
            status, text = send(attacked, COMPLETION, {"model": "tiny", "prompt": "one", "max_tokens": 1, "temperature": 0})
            assert status == 200 and " two" in text
    finally:
        for wire in wires:
            wire.close()
    eventually("the sequences are free", lambda: total(attacked.scrape(), "pharos_llm_running_requests", model="tiny") == 0)


@pytest.mark.slow
def test_a_hostile_template_is_refused(tmp_path):
    """Each within its limits of work and output; the error says which, and the server stays as it was."""
    with hostile(tmp_path, TEMPLATES) as server:
        for name in TEMPLATES:
            with unharmed(server, longest_s=DEADLINE_S):
                status, text = send(server, CHAT, chat(model=name.replace(" ", "_")))
                again, _ = send(server, CHAT, chat(model=name.replace(" ", "_")))
            assert status == again and status in (400, 500), (name, text)
            assert "template" in json.loads(text)["error"]["message"], (name, text)
        assert send(server, CHAT, chat("a"))[0] == 200


def test_no_template_runs_without_end(tmp_path):
    """Its work is limited, whatever the operation is."""
    with hostile(tmp_path, ENDLESS) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [pool.submit(send, server, CHAT, chat(model=name.replace(" ", "_")), ENDLESS_S) for name in ENDLESS]
        assert [one.result()[0] for one in asked] == [400] * len(ENDLESS)


def test_no_template_ends_the_server(tmp_path):
    """A list of 300,000 levels."""
    with hostile(tmp_path, {"deep": DEEP}) as server:
        assert send(server, CHAT, chat(model="deep"))[0] in (200, 400)
        assert server.process.poll() is None


@pytest.mark.parametrize("name", GREEDY)
def test_no_template_fills_the_memory(tmp_path, name):
    """The values of a rendering are limited, as its output is."""
    with hostile(tmp_path, {name: GREEDY[name]}) as server, unharmed(server, longest_s=DEADLINE_S):
        send(server, CHAT, chat(model=name.replace(" ", "_")))
        send(server, CHAT, chat(model=name.replace(" ", "_")))


@pytest.mark.parametrize("name", SLOW)
def test_other_clients_do_not_wait_for_a_template(tmp_path, name):
    """It takes seconds although the messages are short."""
    with hostile(tmp_path, {name: SLOW[name]}) as server:
        send(server, CHAT, chat(model=name.replace(" ", "_")))
        with unharmed(server):
            send(server, CHAT, chat(model=name.replace(" ", "_")))


def template_processes(server) -> list:
    """Returns the processes of a server that render chat templates."""
    return [child for child in children(server.process.pid) if b"chat-template-process" in command_line(child)]


def test_a_template_has_one_process_with_limits(tmp_path):
    """The first clients share it; it has no files, sockets and secrets, is replaced if it was killed, and ends with the server."""
    with hostile(tmp_path, {}) as server:
        assert template_processes(server) == []
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: send(server, CHAT, chat(f"n{number}")), range(8)))
        assert [(status, f"n{number}" in text) for number, (status, text) in enumerate(answers)] == [(200, True)] * 8
        (process,) = template_processes(server)
        folder = Path("/proc", str(process))
        assert sorted(os.listdir(folder / "fd")) == ["0", "1", "2"]
        assert (folder / "environ").read_bytes().split(b"\0") == [b"MIMALLOC_ARENA_EAGER_COMMIT=0", b""]
        limits = (folder / "limits").read_text()
        for limit in [r"open files +3 +3 ", r"core file size +0 +0 ", r"stack size +8388608 +8388608 "]:
            assert re.search(limit, limits), limits
        assert resource.prlimit(process, resource.RLIMIT_DATA)[1] < 600 << 20
        os.kill(process, signal.SIGKILL)
        assert send(server, CHAT, chat("again"))[0] == 200
        (process,) = template_processes(server)
    eventually("the process of the template ends with the server", lambda: not Path("/proc", str(process)).exists())


def test_other_clients_do_not_wait_for_a_long_answer(attacked):
    """Many choices of many tokens in one response."""
    with unharmed(attacked):
        status, _ = send(attacked, CHAT, chat("x " * 9999, n=128, max_tokens=9999))
    assert status == 200


COSTLY = {
    "a prompt of 20 MB": (COMPLETION, {"model": "tiny", "prompt": "x" * (20 << 20)}),
    "an expression of 70 kB": (CHAT, chat(model="tiny", structured_outputs={"regex": "[a-z]?" * 12_000})),
    "a schema of 6,000 properties": (
        CHAT,
        chat(
            model="tiny",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {f"p{number}": {} for number in range(6_000)}}},
            },
        ),
    ),
}


@needs_engine
@pytest.mark.parametrize("name", COSTLY)
def test_other_requests_of_the_model_do_not_wait_for_a_costly_one(attacked, name):
    """Requests of a few tokens, which take milliseconds otherwise."""

    def ask(server):
        status, _ = server.ask("POST", COMPLETION, json.dumps({"model": "tiny", "prompt": "one", "max_tokens": 1, "temperature": 0}))
        assert status == 200

    with unharmed(attacked, growth_kb=1_000_000, ask=ask):
        send(attacked, *COSTLY[name])
