#!/usr/bin/env python3
"""Tables of streams and of the generate extension, with the answers of a real Triton.

    python -m protocol.stream_tables record       records the Triton peer's answers in golden_streams.json

Both servers serve `stream_models.COMPARED`. A stream's answers are compared request by request: the answers to one request
have an order, the answers to different requests to decoupled models have none.
"""

import http.client
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from harness.peers import Triton
from harness.stream_models import ENSEMBLES, build_for_triton
from harness.waiting import DEADLINE_S, run_for
from harness.wire import set_parameter

GOLDEN = Path(__file__).resolve().parent / "golden_streams.json"


@dataclass(frozen=True)
class Generate:
    """One request of the generate extension."""

    model: str
    body: str
    streamed: bool = False
    headers: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the case in the golden file."""
        verb = "generate_stream" if self.streamed else "generate"
        return " ".join([self.model, verb, self.body, *(f"{key}: {value}" for key, value in self.headers.items())])


@dataclass(frozen=True)
class Stream:
    """Requests on one gRPC stream, all sent before the first answer is read."""

    name: str
    requests: tuple
    metadata: tuple = ()


def request(model: str, identifier: str, values=None, outputs=(), delay_ms=0, **parameters):
    """Returns one request; `values` are the elements of its input: IN, or I0 of an ordinary model. `delay_ms` is the pause
    before each response."""
    message = pb.ModelInferRequest(model_name=model, id=identifier)
    if values is not None:
        ordinary = model in ("slow", "any")
        message.inputs.add(name="I0" if ordinary else "IN", datatype="INT32", shape=[len(values)])
        message.raw_input_contents.append(np.array(values, np.int32).tobytes())
    if delay_ms:
        message.inputs.add(name="DELAY", datatype="UINT32", shape=[len(values)])
        message.raw_input_contents.append(np.full(len(values), delay_ms, np.uint32).tobytes())
    for name in outputs:
        message.outputs.add(name=name)
    for key, value in parameters.items():
        set_parameter(message.parameters[key], value)
    return message


EMPTY = {"triton_enable_empty_final_response": True}

STREAMS = [
    Stream("final with the last", (request("repeat_with", "a", [4, 5]),)),
    Stream("final alone", (request("repeat", "a", [4, 5]),)),
    Stream("final alone, told", (request("repeat", "a", [4, 5], **EMPTY),)),
    Stream("final with the last, told", (request("repeat_with", "a", [4, 5], **EMPTY),)),
    Stream("no response", (request("silent", "a", [4]), request("repeat", "b", [1]))),
    Stream("no response, told", (request("silent", "a", [4], **EMPTY),)),
    Stream("fails in mid-stream", (request("repeat_fails", "a", [4, 5, 6, 7]), request("repeat", "b", [1]))),
    Stream("fails first", (request("repeat_fails_first", "a", [4, 5]),)),
    Stream("an error among responses", (request("repeat_errs", "a", [4, 5, 6], **EMPTY),)),
    Stream("one output", (request("repeat_with", "a", [4, 5], ["IDX"]),)),
    Stream("refused", (request("repeat", "a", None), request("repeat", "b", [1]))),
    Stream("refused as a status", (request("repeat", "a", None),), (("triton_grpc_error", "true"),)),
    Stream("fails as a status", (request("repeat_fails", "a", [4, 5, 6]),), (("triton_grpc_error", "true"),)),
    Stream("ordinary, told", (request("any", "a", [4], **EMPTY),)),
    Stream("ordinary in order", (request("slow", "a", [1]), request("any", "b", [2]), request("slow", "c", [3]))),
    Stream("ordinary after decoupled", (request("repeat", "a", [1, 2]), request("any", "b", [2]))),
    Stream("wrong parameter", (request("repeat", "a", [1], triton_other=True),)),
    Stream("refused behind an ordinary one", (request("slow", "a", [1]), request("any", "b", None, no=True))),
    *(Stream(f"ensemble {name}", (request(name, "a", [4, 5, 6, 7], delay_ms=50),)) for name in ENSEMBLES),
    Stream("ensemble, told", (request("e_first", "a", [4, 5], delay_ms=50, **EMPTY),)),
    Stream("ensemble, no response, told", (request("e_silent", "a", [4], **EMPTY),)),
    Stream("ensemble, without pauses", (request("e_first", "a", range(40)),)),
    Stream("ensemble, one output", (request("e_fork", "a", [4, 5], ["IDX"], 50),)),
    Stream("ensemble, a sequence", (request("e_middle", "a", [4, 5], (), 50, sequence_id=7, sequence_start=True),)),
    Stream("ensembles beside others", (request("e_first", "a", [1, 2]), request("repeat", "b", [2]), request("e_last", "c", [3]))),
    Stream("ensemble, refused", (request("e_first", "a", None), request("e_first", "b", [1]))),
    Stream("many at once", tuple(request("repeat_with", str(n), range(n)) for n in range(1, 12))),
]


def generates():
    """Valid requests of the generate extension in all forms, and invalid ones."""
    three, one = '{"IN":[4,5,6]}', '{"IN":[4]}'
    for streamed in (False, True):
        yield Generate("repeat", one, streamed)
        yield Generate("repeat_with", '{"IN":4,"id":"q"}', streamed)
        yield Generate("repeat_three", '{"IN":7,"id":"abc"}', streamed)
        for model in ("repeat", "silent", "repeat_fails", "repeat_fails_first", "repeat_errs", "no_such_model"):
            yield Generate(model, three, streamed)
        yield Generate("repeat", '{"IN":[1]', streamed)
        yield Generate("repeat", '{"X":1}', streamed)
        yield Generate("repeat", three, streamed, {"Content-Encoding": "gzip"})
        yield Generate("text", '{"text_input":"b\\u00e9","parameters":{"a":1,"b":"x","c":true,"d":1.5}}', streamed)
        for model, body in [
            ("e_first", one), ("e_first", '{"IN":[4,5,6],"DELAY":[50,50,50]}'), ("e_silent", one), ("e_fails_first", one),
            ("e_fails", '{"IN":[4,5,6],"DELAY":[50,50,50]}'), ("e_last", '{"IN":4,"id":"q"}'),
        ]:  # fmt: skip
            yield Generate(model, body, streamed)
    yield Generate("repeat", one, False, {"Content-Encoding": "identity"})
    for body in [
        "", "[1]", '{"text_input":["b"]}', '{"text_input":["b","c"]}', '{"text_input":null}', '{"text_input":{"a":1}}',
        '{"text_input":5}', '{"text_input":"b","parameters":3}', '{"text_input":"b","parameters":{"k":{"z":1}}}',
        '{"text_input":"b","k":{"z":1}}', '{"text_input":"b","k":[1]}', '{"text_input":"b","k":null}',
        '{"text_input":"b","triton_x":1}', '{"parameters":{"text_input":"in"}}', '{"id":5,"text_input":"b"}',
        '{"id":"z","text_input":"b"}', '{"text_input":"b","sequence_id":5,"priority":2,"timeout":5000}',
        '{"text_input":"b","sequence_start":5}',
    ]:  # fmt: skip
        yield Generate("text", body)
    for body in ["[1,2,3,4]", "[1,2,3,4,5,6,7,8]", "[1,2,3]", "[[1,2],[3,4]]", "[[1,2,3,4]]"]:
        yield Generate("rows", f'{{"I0":{body}}}')
    for body in [
        '{"I0":[1,2]}', '{"I1":["a","b"]}', '{"I2":[1,2,3,4]}', '{"I2":[1,2,3]}', '{"I3":[true,false]}', '{"I3":[true]}',
        '{"I4":[1,2,3]}', '{"I5":1.5}', '{"I5":[1.5,2.5]}', '{"I6":[1,255]}', '{"I7":[1.0]}', '{"I0":["a"]}', '{"I0":1.5}',
        '{"I3":[1,0]}', '{"I5":3}', '{"I0":[]}', '{"I1":[1]}', '{"I1":"x","I0":3}', '{"I0":[1],"I0":[2]}',
        '{"I2":[0.5,1.25]}', '{"I5":NaN}', '{"I0":true}', '{"I6":-5}', '{"I4":9223372036854775807}',
        '{"I4":9223372036854775808}', "{}", '{"I0":[[1,2],[3]]}', '{"I0":{}}', '{"I0":"5"}', '{"I8":-128,"I9":-32768}',
        '{"I10":[1,65535],"I11":4294967295,"I12":18446744073709551615}',
    ]:  # fmt: skip
        yield Generate("any", body)


GENERATES = list(generates())


def send_generate(address: str, case: Generate) -> dict:
    """Sends a request of the generate extension; returns the status, the Content-Type and the body."""
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    try:
        verb = "generate_stream" if case.streamed else "generate"
        connection.request("POST", f"/v2/models/{case.model}/{verb}", case.body.encode(), case.headers)
        response = connection.getresponse()
        text = response.read().decode()
        return {"status": response.status, "type": response.getheader("content-type"), "body": text}
    finally:
        connection.close()


def send_stream(address: str, case: Stream) -> dict:
    """Returns the answers by request ID, the IDs of ordinary requests in the order of their answers, and the stream's status."""
    answers, order, status = {}, [], "OK"
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter(case.requests), metadata=case.metadata, timeout=DEADLINE_S)
        try:
            for message in call:
                answer = plain(message)
                answers.setdefault(answer.pop("id"), []).append(answer)
                order.append(message.infer_response.id)
        except grpc.RpcError as error:
            status = f"{error.code().name}: {error.details()}"
    ordinary = [r.id for r in case.requests if r.model_name in ("slow", "any")]
    return {"answers": answers, "ordinary": [name for name in order if name in ordinary], "status": status}


def plain(message) -> dict:
    """Returns the parts of an answer of a stream that are compared."""
    response = message.infer_response
    parameters = {key: value.WhichOneof("parameter_choice") and str(getattr(value, value.WhichOneof("parameter_choice")))
                  for key, value in sorted(response.parameters.items())}  # fmt: skip
    outputs = [
        [output.name, output.datatype, list(output.shape), raw.hex()]
        for output, raw in sorted(
            zip(response.outputs, response.raw_output_contents), key=lambda entry: entry[0].name
        )
    ]
    return {
        "id": response.id,
        "model": [response.model_name, response.model_version],
        "error": message.error_message,
        "parameters": parameters,
        "outputs": outputs,
    }


CRASHED = "crashed"
"""The entry in the golden file for a case that crashes Triton."""


def ask(case, http_address: str, grpc_address: str) -> dict:
    """Sends a case of either kind and returns the answer."""
    return send_generate(http_address, case) if isinstance(case, Generate) else send_stream(grpc_address, case)


def ask_triton(folder: Path) -> dict:
    """Returns the answers of the Triton peer, which is restarted after a crash."""
    triton = Triton(build_for_triton(folder / "models"), folder / "triton.log")
    found = {}
    try:
        for case in [*GENERATES, *STREAMS]:
            triton.ensure()
            found[case.name] = ask(case, triton.http, triton.grpc)
            # All answers of a stream can arrive before Triton crashes.
            run_for("Triton can crash shortly after the end of a stream", 0.5 if isinstance(case, Stream) else 0)
            if not triton.is_ready():
                triton.wait_for_end()
                found[case.name] = CRASHED
    finally:
        triton.stop()
    return found


NOT_ONE = "generate expects model to produce exactly 1 response"
BAD_JSON = "failed to parse the request JSON buffer: "


INPUT_NAME = re.compile(r"for input '([^']*)'")


def difference(name: str, ours: dict, theirs: dict) -> str:
    """Returns how an answer differs from Triton's; empty if it does not or if the difference is deliberate."""
    if theirs == CRASHED:
        # A request to an ordinary model after one to a decoupled model on one stream, or an invalid parameter.
        return "" if ours["status"] == "OK" and ours["answers"] else f"Triton crashes, here {ours}"
    if "body" not in theirs:
        return stream_difference(name, ours, theirs)
    expected = dict(theirs)
    if theirs["status"] == 200 and NOT_ONE in theirs["body"]:
        # Triton has sent the status 200 before the error occurs; the client gets an error in a successful response.
        expected["status"] = 400
    if "no_such_model" in name:
        # As for all requests, see `triton_differences.py`.
        expected["status"] = 400
    if "requested failure at response 0" in theirs["body"]:
        # A backend's error keeps its status here, as for `infer`; Triton always answers 400.
        expected["status"] = 500
    if BAD_JSON in theirs["body"] and BAD_JSON in ours["body"]:
        # The texts of JSON parsers differ.
        expected["body"] = ours["body"]
    if "Unable to parse JSON bytes array" in theirs["body"]:
        # Triton's text does not name the input.
        expected["body"] = re.sub(r'"}$', f", for input '{INPUT_NAME.search(ours['body'])[1]}'\"}}", theirs["body"])
        assert f'"{INPUT_NAME.search(ours["body"])[1]}":' in name
    return "" if ours == expected else f"{ours}, Triton {theirs}"


def stream_difference(name: str, ours: dict, theirs: dict) -> str:
    """Returns how the answers of a stream differ from Triton's."""
    if name == "refused as a status":
        # The client has requested errors as the status of the stream; Triton reports a refusal in the stream instead.
        return "" if ours["status"].startswith("INVALID_ARGUMENT: [request id: a] expected number") else str(ours)
    expected = json.loads(json.dumps(theirs))
    for answers in expected["answers"].values():
        for answer in answers:
            # Triton omits the parameter in refusals, so that a client that waits for the last response waits forever.
            if answer["error"] and not answer["parameters"]:
                answer["parameters"] = {"triton_final_response": "True"}
    if name.startswith("ensemble"):
        without = lambda side: side | {"answers": {name: unflagged(of) for name, of in side["answers"].items()}}  # noqa: E731
        ours, expected = without(ours), without(expected)
    return "" if ours == expected else f"{ours}, Triton {theirs}"


def unflagged(answers: list) -> list:
    """Returns answers without final flags. In both servers timing decides whether an ensemble's flag comes with the last
    response or alone; this function asserts that only the last answer has it."""
    finals = [answer["parameters"].pop("triton_final_response", None) for answer in answers]
    assert "True" not in finals[:-1], answers
    end = {"error": "", "outputs": []}
    return answers[:-1] if end.items() <= answers[-1].items() and finals[-1] == "True" else answers


def main():
    """Records Triton's answers in the golden file."""
    if sys.argv[1:] != ["record"]:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        answers = ask_triton(Path(folder))
    GOLDEN.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(answers)} answers written to {GOLDEN.name}")


if __name__ == "__main__":
    main()
