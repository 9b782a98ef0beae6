"""`examples/language_model/envoy.yaml`: a real Envoy in front of two servers with a real engine and a small model. A session stays with
the server that has its tokens in the cache, streams are not held back, and only requests without an answer are sent again."""

import threading

import openai
import pytest

from harness import envoy
from harness.gguf import COUNT, write_model
from harness.server import ROOT, Server, binary, kill_all, total
from harness.waiting import DEADLINE_S, eventually

LIBRARY = binary().parent / "backends/llamacpp/libpharos_llamacpp.so"
pytestmark = [
    pytest.mark.skipif(bool(envoy.missing()), reason=envoy.missing() or "Envoy is installed"),
    pytest.mark.skipif(not LIBRARY.is_file(), reason=f"{LIBRARY} is not built: `make llamacpp` builds it"),
]
PORTS = (8110, 8120)
CONFIG = """
backend: "llamacpp"
parameters { key: "threads" value: { string_value: "1" } }
parameters { key: "context_length" value: { string_value: "32768" } }
parameters { key: "max_sequences" value: { string_value: "8" } }
"""
ENDLESS = {"prompt": "loop", "max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
"""A completion that takes many seconds."""


@pytest.fixture
def servers(tmp_path):
    """Two servers with the model `tiny`."""
    (tmp_path / "models/tiny/1").mkdir(parents=True)
    (tmp_path / "models/tiny/config.pbtxt").write_text(CONFIG)
    write_model(tmp_path / "models/tiny/1/model.gguf")
    running = [Server(tmp_path, [tmp_path / "models"]) for _ in PORTS]
    for server in running:
        server.launch()
    try:
        for server in running:
            server.wait_until_ready()
        yield running
    finally:
        kill_all(running)


@pytest.fixture
def proxy(servers, tmp_path):
    """Envoy with the configuration of the example."""
    file = ROOT / "examples/language_model/envoy.yaml"
    with envoy.Configured(tmp_path, file, {port: server.http_port for port, server in zip(PORTS, servers)}) as running:
        eventually("Envoy has found both servers ready", lambda: healthy(running) == 2 * len(PORTS))
        yield running


def healthy(proxy) -> int:
    """Returns the number of ready servers, which each of the two clusters of Envoy counts."""
    lines = proxy.ask_admin("/stats?filter=membership_healthy")[1].splitlines()
    return sum(int(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture
def client(proxy):
    """OpenAI's client, which does not repeat requests, at Envoy."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as opened:
        yield opened


class Conversation:
    """A chat whose turns have the header of a session."""

    def __init__(self, client, session: str):
        self.client, self.headers, self.messages = client, {"x-session-id": session}, []

    def say(self, text: str):
        """Sends the next turn; returns the usage."""
        self.messages.append({"role": "user", "content": text})
        answer = self.client.chat.completions.create(model="tiny", messages=self.messages, extra_headers=self.headers)
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return answer.usage


def finished(server, **labels) -> float:
    """Returns the number of choices that a server has ended."""
    return total(server.scrape(), "pharos_llm_finished_total", model="tiny", **labels)


def running(server) -> float:
    """Returns the number of choices that a server generates."""
    return total(server.scrape(), "pharos_llm_running_requests", model="tiny")


def server_of(servers, client, session: str):
    """Sends a short chat; returns the server that a session selects, and the other one."""
    before = [finished(server) for server in servers]
    Conversation(client, session).say("hi")
    (at,) = [at for at, server in enumerate(servers) if finished(server) > before[at]]
    return servers[at], servers[1 - at]


def test_a_session_stays_with_the_server_that_has_its_prefix(servers, client):
    """Each later turn takes the tokens of the earlier ones from the cache; the sessions use both servers."""
    conversations = [Conversation(client, f"session-{number}") for number in range(6)]
    for turn in range(3):
        for word, conversation in zip(COUNT, conversations):
            cached = conversation.say(f"{word} " * 20).prompt_tokens_details.cached_tokens
            assert (cached > 20) == (turn > 0), f"{cached} cached tokens in turn {turn}"
    assert sum(map(finished, servers)) == 18 and all(finished(server) >= 3 for server in servers)


def test_other_requests_go_to_the_server_with_fewer(servers, client):
    """While one server generates a long answer, the other one gets the requests."""
    with client.completions.create(model="tiny", stream=True, **ENDLESS) as stream:
        next(iter(stream))
        # The engine reports its gauges after a step.
        (busy,) = eventually("a server generates", lambda: [server for server in servers if running(server)])
        (free,) = [server for server in servers if server is not busy]
        for _ in range(10):
            client.completions.create(model="tiny", prompt="one", max_tokens=2)
        assert finished(free) == 10


def test_streams_are_not_held_back_and_end_with_their_client(servers, client):
    """The first token arrives while the engine generates the rest; a client that leaves ends the generation."""
    stream = client.completions.create(model="tiny", stream=True, extra_headers={"x-session-id": "a"}, **ENDLESS)
    assert next(iter(stream)).choices[0].text.strip() == "loop"
    eventually("a server generates", lambda: sum(map(running, servers)) == 1)
    assert sum(map(finished, servers)) == 0
    stream.close()
    eventually("the generation is cancelled", lambda: sum(finished(server, reason="abort") for server in servers) == 1)


def test_sessions_of_a_killed_server_go_on_at_the_other_one(servers, client):
    """The next request is answered, without the prefix in the cache; the one after it has it again."""
    chosen, other = server_of(servers, client, "moving")
    conversation = Conversation(client, "moving")
    conversation.say("one two three four")
    chosen.kill()
    assert conversation.say("five six seven eight").prompt_tokens_details.cached_tokens < 5
    assert conversation.say("nine").prompt_tokens_details.cached_tokens > 10
    assert finished(other) == 2


def test_an_answer_that_had_begun_is_not_generated_again(servers, client):
    """The stream breaks: a second generation would repeat its text."""
    chosen, other = server_of(servers, client, "broken")
    stream = client.completions.create(model="tiny", stream=True, extra_headers={"x-session-id": "broken"}, **ENDLESS)
    chunks = iter(stream)
    next(chunks)
    chosen.kill()
    with pytest.raises(openai.APIConnectionError):
        list(chunks)
    assert (running(other), finished(other)) == (0, 0)


def test_a_request_without_an_answer_is_sent_again(servers, client):
    """The server is killed while it generates an answer without a stream; the other one generates it."""
    chosen, other = server_of(servers, client, "again")
    arguments = ENDLESS | {"max_tokens": 6000, "extra_headers": {"x-session-id": "again"}}
    found = []
    thread = threading.Thread(target=lambda: found.append(client.completions.create(model="tiny", **arguments)))
    thread.start()
    eventually("it is being generated", lambda: running(chosen) == 1)
    chosen.kill()
    thread.join()
    assert found[0].usage.completion_tokens == 6000 and finished(other) == 1


def test_a_server_that_exits_finishes_its_answers(servers, client, proxy):
    """It reports not ready, its sessions go to the other server, and the stream in progress ends with its last token."""
    chosen, other = server_of(servers, client, "leaving")
    headers = {"x-session-id": "leaving"}
    stream = client.completions.create(model="tiny", stream=True, extra_headers=headers, **(ENDLESS | {"max_tokens": 6000}))
    chunks = iter(stream)
    first = next(chunks)
    chosen.process.terminate()
    eventually("Envoy sees that it is not ready", lambda: healthy(proxy) == 2)
    client.completions.create(model="tiny", prompt="one", max_tokens=2, extra_headers=headers)
    assert finished(other) == 1
    *_, last = [first, *chunks]
    assert last.choices[0].finish_reason == "length"
    assert chosen.process.wait(DEADLINE_S) == 0
