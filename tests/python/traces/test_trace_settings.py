"""The trace settings: every step of `trace_table.py` is answered as by a real Triton, or differs as listed; and all forms of
tritonclient's calls."""

import asyncio
import json

import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from harness.peers import missing
from harness.waiting import DEADLINE_S
from traces import trace_table
from traces.trace_table import ALL, GOLDEN, ONE, OPTIONS, STEPS, UNKNOWN

WHY_NOT = missing("triton", "triton")
ATOMIC = "an update that leaves a model's settings wrong is refused as a whole; Triton refuses it and keeps a part"

DIFFERENCES = {
    f"POST {ALL}": (200, "an empty body reads the settings, as in newer Tritons"),
    f'POST {ALL} {{"trace_level": ["MIN"]}}': ("settings", "MIN and MAX are former names of TIMESTAMPS"),
    f'POST {ALL} {{"trace_level": ["MAX"]}}': ("settings", "MIN and MAX are former names of TIMESTAMPS"),
    f'POST {ALL} {{"trace_rate": "1.5"}}': (400, "Triton stores 1"),
    f'POST {ALL} {{"trace_rate": "-1"}}': (400, "Triton stores 4294967295"),
    f'POST {ALL} {{"log_frequency": "-1"}}': (400, "Triton stores 4294967295"),
    f'POST {ALL} {{"trace_rate": "4294967295"}}': (200, "is in the range of Triton's error text"),
    f'POST {ALL} {{"trace_level": ["TIMESTAMP"]}}': (400, "an unknown level is an error; Triton ignores it"),
    f'POST {ALL} {{"trace_level": ["timestamps"]}}': (400, "an unknown level is an error; Triton ignores it"),
    f'POST {ALL} {{"trace_rate": 5}}': (200, "numbers are accepted too"),
    f'POST {ALL} {{"trace_count": 5}}': (200, "numbers are accepted too"),
    f'POST {ALL} {{"log_frequency": 5}}': (200, "numbers are accepted too"),
    f'POST {ALL} {{"trace_mode": "opentelemetry"}}': (501, "the mode cannot be changed; Triton ignores it"),
    f'POST {ALL} {{"nonsense": "1"}}': (400, "an unknown setting is an error; Triton ignores it"),
    f'POST {ALL} {{"nonsense": null}}': (400, "an unknown setting is an error; Triton ignores it"),
    f"POST {ALL} {{": (500, "the same status; another text for invalid JSON"),
    f"POST {ALL} [1]": (500, "a body that is not an object is an error; Triton ignores it"),
    f"POST {ALL} 7": (500, "a body that is not an object is an error; Triton ignores it"),
    'grpc global {"trace_level": ["nonsense"]}': ("INVALID_ARGUMENT", "an unknown level is an error"),
    'grpc global {"trace_level": [""]}': ("INVALID_ARGUMENT", "an unknown level is an error"),
    'grpc global {"nonsense": ["1"]}': ("INVALID_ARGUMENT", "an unknown setting is an error"),
    'grpc global {"trace_mode": ["triton"]}': ("UNIMPLEMENTED", "the mode cannot be changed"),
}
"""Intended differences from Triton 2.51: the status of this server (or that the settings differ), and the reason."""

AFTER_ATOMIC = STEPS.index(next(s for s in STEPS if s.name.endswith('{"trace_level": ["OFF"], "trace_rate": "0"}')))
"""The step at which Triton applies a part of a refused update; later settings differ from this server's, see `ATOMIC`."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A server with the table's options and models."""
    from harness.server import Server

    folder = tmp_path_factory.mktemp("trace")
    for name in trace_table.MODELS:
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(
            'backend: "builtin" parameters { key: "function" value { string_value: "identity" } }\n'
            'input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ] output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]'
        )
    options = [f"--trace-config={option.replace('FOLDER', str(folder))}" for option in OPTIONS]
    with Server(folder, [folder / "models"], options) as server:
        yield server


@pytest.fixture(scope="module")
def answers(ours):
    """This server's answers to all steps; an update that Triton refuses and this server accepts is reverted at once."""
    found = []
    for step in STEPS:
        found.append(step.ask(ours.http, ours.grpc))
        if DIFFERENCES.get(step.name, (None,))[0] == 200:
            trace_table.Http(ALL, {"trace_rate": None, "trace_count": None, "log_frequency": None}).ask(ours.http, ours.grpc)
        if step.name.endswith(('["MIN"]}', '["MAX"]}')):
            trace_table.Http(ALL, {"trace_level": ["TENSORS"]}).ask(ours.http, ours.grpc)
    return found


def golden() -> list:
    """Returns Triton's answers."""
    return json.loads(GOLDEN.read_text())


def comparable(answer: dict) -> dict:
    """Returns an answer without parts that may differ: the order of levels, and spaces after `got:`."""
    answer = {key: value for key, value in answer.items() if key != "step"}
    if "error" in answer:
        answer["error"] = answer["error"].replace("got:-2", "got: -2")
    return answer


@pytest.mark.parametrize("number", range(len(STEPS)), ids=lambda number: f"{number} {STEPS[number].name}"[:90])
def test_every_step_is_answered_as_by_triton(answers, number):
    """Compares status, text and settings."""
    ours, theirs = comparable(answers[number]), comparable(golden()[number])
    assert golden()[number]["step"] == STEPS[number].name, "the golden file was recorded with another table: record it again"
    if number >= AFTER_ATOMIC:
        if number == AFTER_ATOMIC:
            assert ours["status"] == theirs["status"] and theirs["error"] in ours["error"], ATOMIC
        elif STEPS[number].name == f"GET {ALL}" and number == AFTER_ATOMIC + 1:
            assert ours["settings"]["trace_rate"] == "7" and ours["settings"]["trace_level"] == ["TIMESTAMPS"], ATOMIC
        else:
            assert ours == theirs
        return
    promised = DIFFERENCES.get(STEPS[number].name)
    if promised is None:
        if "error" in theirs and ours["status"] == theirs["status"]:
            assert theirs["error"] in ours["error"]
        else:
            assert ours == theirs
    elif promised[0] == "settings":
        assert (ours["status"], ours["settings"]["trace_level"]) == (200, ["TIMESTAMPS"]), promised[1]
    else:
        assert ours["status"] == promised[0], promised[1]
        assert ours != theirs, f"this intended difference no longer exists: {promised[1]}"


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_live_triton_answers_as_recorded(tmp_path):
    """A real Triton gives the recorded answers."""
    assert trace_table.run_triton(tmp_path) == golden()


def http_client(server):
    return tritonclient.http.InferenceServerClient(server.http)


def grpc_client(server):
    return tritonclient.grpc.InferenceServerClient(server.grpc)


class Blocking:
    """A blocking wrapper of an asyncio client."""

    def __init__(self, module, address: str):
        self.loop = asyncio.new_event_loop()

        async def make():
            return module.InferenceServerClient(address)

        self.client = self.loop.run_until_complete(make())

    def __getattr__(self, name):
        return lambda *args, **more: self.loop.run_until_complete(getattr(self.client, name)(*args, **more))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self.loop.close()


def http_aio_client(server):
    return Blocking(tritonclient.http.aio, server.http)


def grpc_aio_client(server):
    return Blocking(tritonclient.grpc.aio, server.grpc)


def settings_of(answer) -> dict:
    """Returns the settings in one form: lists of strings."""
    if not isinstance(answer, dict):
        return {key: list(value.value) for key, value in answer.settings.items()}
    if "settings" in answer:
        return {key: value["value"] for key, value in answer["settings"].items()}
    return {key: value if isinstance(value, list) else [value] for key, value in answer.items()}


@pytest.mark.parametrize("make", [http_client, grpc_client, http_aio_client, grpc_aio_client])
def test_tritonclient_changes_settings_in_all_forms(ours, make):
    """Strings, lists, and None to clear; globally and for a model."""
    with make(ours) as client:

        def update(settings, **model):
            return settings_of(client.update_trace_settings(settings=settings, **model))

        def get(**model):
            return settings_of(client.get_trace_settings(**model))

        before = get()
        lists = make in (grpc_client, grpc_aio_client)
        one = (lambda value: [value]) if lists else (lambda value: value)
        changed = update({"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "9", "trace_count": one("12")})
        assert changed["trace_level"] == ["TIMESTAMPS", "TENSORS"] and changed["trace_rate"] == ["9"] == get()["trace_rate"]
        own = update({"trace_rate": one("3"), "log_frequency": "4"}, model_name="one")
        assert (own["trace_rate"], own["log_frequency"], own["trace_count"]) == (["3"], ["4"], ["12"])
        assert get(model_name="two")["trace_rate"] == ["9"] and get(model_name="one") == own
        if lists:
            assert update({"trace_level": "OFF"}, model_name="one")["trace_level"] == ["OFF"]
            update({"trace_level": None}, model_name="one")
            assert update({"trace_rate": [], "trace_level": []}, model_name="one")["trace_rate"] == ["9"]
            assert get(as_json=True) == get()
            update({"trace_rate": one("3")}, model_name="one")
        cleared = update({"trace_rate": None, "log_frequency": None}, model_name="one")
        assert cleared == get() == get(model_name="one")
        assert update({"trace_level": None, "trace_rate": None, "trace_count": None}) == before
        assert update({}) == before == get(model_name=None)
        assert update({"trace_rate": "8"}, model_name=None)["trace_rate"] == ["8"] == get(model_name="")["trace_rate"]
        update({"trace_rate": None})
        for settings, words in [
            ({"trace_file": "x"}, "can not be updated through network protocol"),
            ({"trace_rate": "many"}, "Unable to parse 'trace_rate', got: many"),
            ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ]:
            with pytest.raises(InferenceServerException, match=words):
                client.update_trace_settings(settings=settings)
        with pytest.raises(InferenceServerException, match=f"Request for unknown model : {UNKNOWN}"):
            client.update_trace_settings(model_name=UNKNOWN, settings={"trace_rate": "1"})
        assert get() == before
        assert ONE.endswith("/one/trace/setting")


def test_wrong_options_are_refused_at_the_start(start):
    """The error has the setting, the value and the allowed values."""
    for option, words in [
        ("zipkin,url=x", "there is no trace mode 'zipkin'"),
        ("level=EVERYTHING", "allowed are OFF, TIMESTAMPS, TENSORS"),
        ("rate=often", "got: often"),
        ("opentelemetry,bsp_max_queue_size=0;mode=opentelemetry", "bsp_max_queue_size is '0'"),
    ]:
        server = start(["identity_fp32"], f"--trace-config={option}", wait=False)
        assert server.process.wait(DEADLINE_S) == 2
        assert words in server.log_tail()
